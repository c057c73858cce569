from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyclinic.common.errors import BadInput
from polyclinic.data.base.image_set import DatasetSplits, ImageSet
from polyclinic.data.partition.division import PartitionedDataset, select_site_images
from polyclinic.data.partition.partition import partition_dataset
from tests.data.conftest import check_disjoint, in_turn, mixture, partition_spec, splits_of

TASKS = {"oct": 4, "organ": 11, "tissue": 8}
tasks = partial(partition_spec, "tasks")


def sizes(division: PartitionedDataset) -> dict[str, list[int]]:
    rows = [(part.train, part.validation, part.test) for part in division.parts]
    names = ("client_train_sizes", "client_val_sizes", "client_test_sizes")
    return {name: [len(of_site[place]) for of_site in rows] for place, name in enumerate(names)}  # type: ignore[arg-type]


def server_of(division: PartitionedDataset) -> DatasetSplits:
    assert division.server is not None
    return division.server


def label_counts(images: ImageSet) -> dict[str, int]:
    totals = np.nansum(images.labels, axis=0).astype(int)
    return {str(column): int(count) for column, count in enumerate(totals) if count}


def everybody(division: PartitionedDataset) -> list[set[str]]:
    """The patients of each part of each site, and of the coordinator."""
    sites = [part for site in division.parts for part in select_site_images(division.splits, site).parts]
    return [set(part.patients.tolist()) for part in (*sites, *server_of(division).parts)]


@pytest.fixture(scope="module")
def results(read_vectors: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    loaded = read_vectors("unifed")["splits_fake_data"]["results"]
    return {name.split("_")[0]: result for name, result in loaded.items()}


@pytest.fixture(scope="module")
def fake() -> DatasetSplits:
    """The vector's: 30,000 images a task, later classes up to three times as frequent."""
    random = np.random.default_rng(0)
    weights = {task: np.linspace(1, 3, count) for task, count in TASKS.items()}
    return mixture({task: random.choice(len(w), 30_000, p=w / w.sum()) for task, w in weights.items()})


@pytest.mark.parametrize(("split", "name"), [("strong", "strongly"), ("moderate", "moderately")])
def test_sites_and_coordinator_hold_as_many_images_as_in_the_authors_code(
    results: dict[str, Any], fake: DatasetSplits, split: str, name: str
) -> None:
    division, expected = (partition_dataset(fake, tasks(split=split, limit=8000), seed=1), results[name])
    server = server_of(division)
    assert sizes(division) == {key: expected[key] for key in sizes(division)}
    assert [len(part) for part in server.parts] == expected["server_train_val_test"]


def test_moderate_sites_hold_as_many_of_each_class_as_in_authors_code(
    results: dict[str, Any], fake: DatasetSplits
) -> None:
    division = partition_dataset(fake, tasks(split="moderate", limit=8000), seed=1)
    trains = [division.splits.train.select_rows(part.train) for part in division.parts]
    assert [label_counts(trains[site]) for site in (0, 8, 16)] == results["moderately"]["labels_client_0_8_16_train"]
    assert label_counts(trains[1]) == results["moderately"]["labels_client_1_train"]


@settings(max_examples=25)
@given(st.sampled_from(["strong", "moderate"]), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**31))
def test_no_patient_stands_in_two_hands(split: str, each: int, sites: int, seed: int) -> None:
    splits = mixture({"a": in_turn(240 * each, 2, each), "b": in_turn(300 * each, 3, each)}, each)
    division = partition_dataset(splits, tasks(split=split, sites_per_task=sites, seed=seed), seed=0)
    hands = everybody(division)
    check_disjoint(hands)
    of_sites = [*sizes(division).values()]
    assert np.sum(of_sites) + len(np.concatenate([[*hand] for hand in hands[-3:]])) * each <= len(splits.train)


def test_a_strong_split_leaves_nobody_out() -> None:
    splits = mixture({"a": in_turn(101, 2), "b": in_turn(203, 3)})
    division = partition_dataset(splits, tasks(split="strong", sites_per_task=2), seed=0)
    assert set().union(*everybody(division)) == set(splits.train.patients.tolist())


def test_a_site_annotates_its_tasks_classes_and_the_others_are_unknown() -> None:
    splits = mixture({"scan": in_turn(100, 2), "photo": in_turn(150, 3)})
    division = partition_dataset(splits, tasks(split="strong", sites_per_task=2), seed=0)
    assert [(part.site, part.class_names) for part in division.parts] == [
        ("photo-1", ("c", "d", "e")),
        ("photo-2", ("c", "d", "e")),
        ("scan-1", ("a", "b")),
        ("scan-2", ("a", "b")),
    ]
    photos = division.splits.train.select_rows(division.parts[0].train)
    assert np.isnan(photos.labels[:, :2]).all()
    assert not np.isnan(photos.labels[:, 2:]).any()


def test_the_coordinator_holds_its_fraction_of_every_task_in_all_classes() -> None:
    splits = mixture({"a": in_turn(200, 2), "b": in_turn(400, 4)})
    server = server_of(partition_dataset(splits, tasks(split="strong", sites_per_task=3, server_fraction=0.1), seed=0))
    assert server.class_names == splits.class_names
    sources = np.concatenate([part.sources for part in server.parts])
    assert {task: int((sources == task).sum()) for task in "ab"} == {"a": 20, "b": 40}
    assert label_counts(server.test) == dict.fromkeys("012345", 2)  # 20 % of 10 images a class


def test_names_of_more_than_nine_sites_are_padded() -> None:
    division = partition_dataset(mixture({"a": in_turn(500, 2)}), tasks(split="strong", sites_per_task=10), seed=0)
    assert [part.site for part in division.parts][::9] == ["a-01", "a-10"]


def test_a_moderate_split_takes_of_each_class_as_many_as_the_scarcest_has() -> None:
    classes = np.repeat([0, 1, 2], [300, 50, 120])
    division = partition_dataset(mixture({"a": classes}), tasks(split="moderate", sites_per_task=2), seed=0)
    # 50 of each, 150 in all: 30 are the coordinator's; each of two sites has 20 of each class, 14 of them to train on.
    trains = [division.splits.train.select_rows(part.train) for part in division.parts]
    assert [label_counts(images) for images in trains] == [{"0": 14, "1": 14, "2": 14}] * 2


def test_a_limit_takes_the_first_patients_of_each_task() -> None:
    splits = mixture({"a": in_turn(200, 2, each=2), "b": in_turn(200, 2, each=2)}, each=2)
    division = partition_dataset(splits, tasks(split="strong", sites_per_task=2, limit=80), seed=0)
    assert set().union(*everybody(division)) == {f"{task}/{number}" for task in "ab" for number in range(80)}


@pytest.mark.parametrize(
    ("classes", "sites", "problem"),
    [
        ([0] * 50 + [1], 8, 'Task "a" has a single patient of "b"'),
        ([0, 0, 1, 1, 2, 2], 8, 'Task "a" has 6 patients to divide, too few for each part to have 3 classes'),
        ([0] * 95 + [1] * 5, 1, 'The coordinator has a single patient of "b"'),
        ([0, 1] * 10, 17, 'Site "a-01" has a single patient of "a"'),
    ],
)
def test_a_class_with_too_few_patients_is_named(classes: list[int], sites: int, problem: str) -> None:
    with pytest.raises(BadInput) as caught:
        partition_dataset(mixture({"a": np.array(classes)}), tasks(split="strong", sites_per_task=sites), seed=0)
    (fault,) = caught.value.faults
    assert fault.where == "partition.sites_per_task"
    assert fault.problem.startswith(problem)


def test_images_that_do_not_say_their_task_are_refused() -> None:
    splits = splits_of(30, 3)
    nowhere = replace(splits, train=replace(splits.train, sources=np.full(len(splits.train), "")))
    with pytest.raises(BadInput, match="which task each image belongs to"):
        partition_dataset(nowhere, tasks(split="strong"), seed=1)
