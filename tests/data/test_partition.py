from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from polyclinic.common.errors import BadInput
from polyclinic.data.base.image_set import DatasetSplits
from polyclinic.data.partition.checks import find_partition_faults
from polyclinic.data.partition.division import SitePartition, select_site_images
from polyclinic.data.partition.paper_tables import read_paper_class_lists
from polyclinic.data.partition.partition import (
    distribute_classes_over_sites,
    draw_random_class_owners,
    draw_site_classes_with_missing,
    partition_dataset,
)
from polyclinic.data.partition.spec import PartitionSpec, RandomOwnersPartitionSpec
from polyclinic.data.tables.class_names import NIH_CLASSES
from tests.data.conftest import check_disjoint, partition_spec, splits_of

subsets = partial(partition_spec, "class_subsets")
missing_classes = partial(partition_spec, "missing_classes")


def lists(**by_site: list[str]) -> PartitionSpec:
    return partition_spec("class_lists", lists=by_site)


def owners(parts: tuple[SitePartition, ...]) -> dict[str, int]:
    names = [name for part in parts for name in part.class_names]
    return {name: names.count(name) for name in names}


@pytest.mark.parametrize("sweep", ["clients", "shared"])
def test_the_class_tables_are_the_papers(read_vectors: Callable[[str], dict[str, Any]], sweep: Any) -> None:
    rows = read_vectors("surgical_class_sets")[f"{sweep}_sweep"]
    numbers = [row["K"] for row in rows] if sweep == "clients" else range(1, 8)
    for number, row in zip(numbers, rows, strict=True):
        assert [list(names) for names in read_paper_class_lists(sweep, number)] == row["local_labels"]


@settings(max_examples=25)
@given(st.integers(1, 5), st.integers(0, 6), st.integers(0, 2**31))
def test_each_class_is_shared_by_all_or_owned_by_one(sites: int, shared: int, seed: int) -> None:
    parts = partition_dataset(splits_of(40, 6), subsets(sites=sites, shared=shared), seed).parts
    counts = sorted(owners(parts).values())
    assert counts == sorted([1] * (6 - shared) + [sites] * shared)
    assert all(part.class_names == tuple(sorted(part.class_names)) and part.class_names for part in parts)


@settings(max_examples=25)
@given(st.integers(1, 6), st.integers(0, 2**31))
def test_sites_have_different_patients_and_the_same_seed_the_same_sites(sites: int, seed: int) -> None:
    splits, spec = splits_of(40, 6), partition_spec("random_owners", sites=sites)
    parts, again = (partition_dataset(splits, spec, seed).parts for _ in range(2))
    check_disjoint(splits.train.patients[part.train] for part in parts)
    for part, same in zip(parts, again, strict=True):
        assert (part.site, part.class_names) == (same.site, same.class_names)
        np.testing.assert_array_equal(part.train, same.train)
        np.testing.assert_array_equal(part.validation, same.validation)


@settings(max_examples=50)
@given(st.integers(1, 12), st.integers(1, 15), st.integers(0, 2**31))
def test_random_owners_leave_no_class_and_no_site_empty(sites: int, classes: int, seed: int) -> None:
    owned = draw_random_class_owners(sites, classes, np.random.default_rng(seed))
    assert owned.any(axis=0).all()
    assert owned.any(axis=1).all()


@settings(max_examples=40)
@given(st.integers(1, 6), st.integers(0, 8), st.integers(0, 2**31))
def test_a_deal_with_a_minimum_still_gives_every_site_a_class(sites: int, minimum: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    owned = distribute_classes_over_sites(
        np.zeros(7, dtype=np.bool_), random.integers(0, 9, (sites, 7)), minimum, random
    )
    assert owned.any(axis=1).all()
    assert (owned.sum(axis=0) == 1).all()


def test_a_class_goes_only_to_a_site_with_enough_positives() -> None:
    # Site 0 has 9 positives of classes 0 and 1, site 1 of classes 2 and 3: a minimum of 5 allows only one deal.
    positives = np.array([[9, 9, 1, 1], [1, 1, 9, 9]])
    for seed in range(10):
        owned = distribute_classes_over_sites(np.zeros(4, dtype=np.bool_), positives, 5, np.random.default_rng(seed))
        assert owned.tolist() == [[True, True, False, False], [False, False, True, True]]


def test_unshared_classes_are_dealt_evenly() -> None:
    parts = partition_dataset(splits_of(40, 8), subsets(sites=3, shared=["b", "d"]), seed=5).parts
    assert sorted(len(part.class_names) for part in parts) == [4, 4, 4]  # 2 shared and 6 / 3 dealt
    assert owners(parts)["b"] == owners(parts)["d"] == 3


def test_names_of_more_than_nine_sites_sort_as_numbers() -> None:
    parts = partition_dataset(splits_of(60, 10), subsets(sites=10), seed=1).parts
    assert [part.site for part in parts][::9] == ["site-01", "site-10"]
    assert [part.site for part in parts] == sorted(part.site for part in parts)


def test_fixed_lists_go_to_the_sites_they_name_which_see_only_their_own_labels() -> None:
    splits = splits_of(20, 3)
    parts = partition_dataset(splits, lists(north=["c", "a"], east=["b"]), seed=1).parts
    assert [(part.site, part.class_names) for part in parts] == [("east", ("b",)), ("north", ("a", "c"))]
    data = select_site_images(splits, parts[1])
    assert data.class_names == ("a", "c")
    np.testing.assert_array_equal(data.train.labels, splits.train.labels[parts[1].train][:, [0, 2]])


def test_a_row_of_the_papers_table_is_dealt_with_the_papers_patients() -> None:
    splits = DatasetSplits(*(replace(part, class_names=NIH_CLASSES) for part in splits_of(60, 14).parts))
    parts = partition_dataset(splits, partition_spec("class_table", table="clients", row=4), seed=1337).parts
    assert tuple(part.class_names for part in parts) == read_paper_class_lists("clients", 4)


def test_a_seed_in_the_spec_wins_over_the_runs() -> None:
    splits = splits_of(40, 6)
    parts, same = (partition_dataset(splits, subsets(sites=3, seed=8), seed).parts for seed in (1, 2))
    assert [part.train.tolist() for part in parts] == [part.train.tolist() for part in same]


def test_one_site_for_each_centre_holds_the_centres_images() -> None:
    splits = splits_of(30, 6)
    parts = partition_dataset(splits, subsets(images="source", shared=2), seed=3).parts
    assert [part.site for part in parts] == ["centre-0", "centre-1", "centre-2"]
    assert sum(len(part.train) for part in parts) == len(splits.train)
    assert set(splits.train.sources[parts[1].train].tolist()) == {"centre-1"}


def test_images_that_fall_to_no_site_are_counted() -> None:
    splits = splits_of(31, 1)
    division = partition_dataset(splits, subsets(sites=4, shared=1), seed=3)
    used = sum(len(part.train) + len(part.validation) for part in division.parts)
    every = len(splits.train) + len(splits.validation)
    assert used < every
    (sentence,) = division.splits.test.omissions
    assert sentence.startswith(f"Of {every} training and validation images, {every - used} images of ")


CENTRES = {"centre-0": ["a", "b"], "centre-1": ["b"], "centre-2": ["a", "c"]}
by_centre = partial(partition_spec, "class_lists", images="source", lists=CENTRES)


def test_negatives_of_a_class_in_the_test_part_are_those_of_centres_that_look_for_it() -> None:
    splits = splits_of(30, 3)
    division = partition_dataset(splits, by_centre(), seed=3)
    test, before = division.splits.test, splits.test
    owners_of = {"a": ["centre-0", "centre-2"], "b": ["centre-0", "centre-1"], "c": ["centre-2"]}
    for column, (name, centres) in enumerate(owners_of.items()):
        own = np.isin(before.sources, centres)
        assert (test.labels[own, column] == before.labels[own, column]).all(), name
        assert np.isnan(test.labels[~own, column]).all(), name
    # Ten patients, two images each, of the centres in turn: 8 of centre-0, 6 of centre-1, 6 of centre-2.
    assert division.splits.train.notes[0].endswith("Of 20 test images these have a label: a 14, b 14 and c 6.")
    np.testing.assert_array_equal(division.splits.train.labels, splits.train.labels)


@pytest.mark.parametrize(
    "spec", [by_centre(test_labels="all"), subsets(images="source", shared=1), lists(east=["a", "b"], west=["b", "c"])]
)
def test_other_partitions_keep_all_labels_of_the_test_part(spec: PartitionSpec) -> None:
    splits = splits_of(30, 3)
    division = partition_dataset(splits, spec, seed=3)
    np.testing.assert_array_equal(division.splits.test.labels, splits.test.labels)
    assert division.splits.test.notes == ()


def test_a_centre_of_test_images_alone_says_what_it_looks_for_and_is_no_site() -> None:
    splits = splits_of(30, 3)
    splits = replace(splits, test=replace(splits.test, sources=np.full(20, "centre-3")))
    with pytest.raises(BadInput, match=r'^partition.lists: says nothing of "centre-3"'):
        partition_dataset(splits, by_centre(), seed=3)
    division = partition_dataset(splits, by_centre(lists={**CENTRES, "centre-3": ["c"]}), seed=3)
    assert [part.site for part in division.parts] == ["centre-0", "centre-1", "centre-2"]
    assert np.isnan(division.splits.test.labels).all(axis=0).tolist() == [True, True, False]
    assert division.empty_sites == ("centre-3",)
    without = replace(splits.test, labels=np.full_like(splits.test.labels, np.nan))
    partition_dataset(replace(splits, test=without), by_centre(), seed=3)  # no label that anybody would have to explain


def move_to_other_parts(centre: str) -> DatasetSplits:
    """Splits in which all but one patient of validation and test come from elsewhere, and no training image does."""
    splits = splits_of(30, 3)
    train, validation = splits.train, splits.validation
    elsewhere = np.where(train.sources == centre, "centre-0", train.sources)
    validated = np.where(validation.patients == validation.patients[0], centre, "centre-0")
    tested = np.where(splits.test.patients == splits.test.patients[0], centre, "centre-2")
    return DatasetSplits(
        replace(train, sources=elsewhere),
        replace(validation, sources=validated),
        replace(splits.test, sources=tested),
    )


def test_a_hospital_whose_patients_are_all_validated_or_tested_is_named_with_a_remedy() -> None:
    splits = move_to_other_parts("centre-1")
    division = partition_dataset(splits, by_centre(lists={**CENTRES, "centre-0": ["a", "b"]}), seed=3)
    assert division.empty_sites == ("centre-1",)
    assert [part.site for part in division.parts] == ["centre-0", "centre-2"]
    for images in division.splits.parts:
        (sentence,) = images.omissions
        assert "centre-1 (1 patient for validation, 1 patient for the test)" in sentence
        assert "data.split_seed" in sentence


def test_a_class_that_only_such_a_hospital_annotates_names_the_hospital() -> None:
    lists = {"centre-0": ["a"], "centre-1": ["b"], "centre-2": ["a", "c"]}
    with pytest.raises(BadInput, match=r'no site annotates "b".*centre-1 \(1 patient for validation'):
        partition_dataset(move_to_other_parts("centre-1"), by_centre(lists=lists), seed=3)


RAW_NIH = tuple(
    {"Pleural Effusion": "Effusion", "Pleural Thickening": "Pleural_Thickening"}.get(name, name) for name in NIH_CLASSES
)
FAULTS: list[tuple[PartitionSpec, tuple[str, ...], dict[str, str]]] = [
    # The key of each fault, with what its sentence says.
    (
        lists(north=["Infiltrate"], east=["Mass"]),
        ("Infiltration", "Mass"),
        {"partition.lists.north[0]": 'Did you mean "Infiltration"?', "partition.lists": 'no site annotates "Infilt'},
    ),
    (subsets(sites=4), ("a", "b", "c"), {"partition.sites": "3 classes cannot be dealt to 4 sites"}),
    (subsets(sites=2, shared=5), ("a", "b", "c"), {"partition.shared": "5 shared classes, but the data has 3."}),
    (subsets(), ("a", "b", "c"), {"partition.sites": "the number of sites is missing."}),
    (
        partition_spec("class_table", table="shared", row=8),
        RAW_NIH,
        {"partition.row": "its rows are 1, 2, 3", "partition.table": 'Rename "Effusion" to "Pleural Effusion", "'},
    ),
    (missing_classes(sites=2, missing=4), tuple("abcde"), {"partition.sites": "2 sites with 1 class each cannot"}),
    (missing_classes(sites=2, missing=5), tuple("abcde"), {"partition.missing": "Take at most 4."}),
    (missing_classes(missing=1), tuple("abcde"), {"partition.sites": "the number of sites is missing."}),
]


@pytest.mark.parametrize(("spec", "class_names", "expected"), FAULTS)
def test_impossible_partitions_are_refused(
    spec: PartitionSpec, class_names: tuple[str, ...], expected: dict[str, str]
) -> None:
    messages = {fault.where: str(fault) for fault in find_partition_faults(class_names, spec)}
    assert messages.keys() == expected.keys()
    assert all(words in messages[where] for where, words in expected.items())


def test_a_partition_that_the_data_does_not_allow_is_refused() -> None:
    with pytest.raises(BadInput, match=r"^partition.sites: 6 sites, but only 5 patients in the train part."):
        partition_dataset(splits_of(5, 8), subsets(sites=6), seed=1)
    splits = splits_of(5, 3)
    nowhere = replace(splits, train=replace(splits.train, sources=np.full(len(splits.train), "")))
    with pytest.raises(BadInput, match=r"^partition.images: .* source_column = .*source_key of .*sources="):
        partition_dataset(nowhere, subsets(images="source"), seed=1)
    with pytest.raises(BadInput, match=r'^partition.missing: no site annotates "d", "e"'):
        partition_dataset(
            splits_of(30, 5), missing_classes(images="source", missing=4), seed=1
        )  # three centres, a class each


# ---------------------------------------------------------------------- lists that lack drawn classes (FedMLP)

FEDMLP = [("ICH", 5, 5, missing) for missing in (1, 2, 3, 4)] + [
    ("ChestXray14", 8, 8, missing) for missing in (1, 3, 7)
]


def columns(class_lists: Any) -> list[list[int]]:
    return [np.flatnonzero(row).tolist() for row in class_lists]


@pytest.fixture(scope="module")
def fedmlp(read_vectors: Callable[[str], dict[str, Any]]) -> Any:
    return read_vectors("fedmlp")["partial_labels"]["sets"]


@pytest.mark.parametrize(("name", "sites", "classes", "missing"), FEDMLP)
def test_class_lists_are_the_authors(fedmlp: dict[str, Any], name: str, sites: int, classes: int, missing: int) -> None:
    drawn = draw_site_classes_with_missing(sites, classes, missing, seed=1037)
    assert columns(drawn) == fedmlp[f"{name}_missing_{missing}"]["active"]


def test_the_authors_draw_that_leaves_a_class_without_owner_is_drawn_again(fedmlp: dict[str, Any]) -> None:
    assert not fedmlp["ChestXray14_missing_5"]["covers_all_classes"]
    owned = draw_site_classes_with_missing(8, 8, 5, seed=1037)
    assert columns(owned) != fedmlp["ChestXray14_missing_5"]["active"]
    assert owned.any(axis=0).all()
    assert (owned.sum(axis=1) == 3).all()


@settings(max_examples=50)
@given(st.integers(2, 8), st.integers(3, 8), st.integers(0, 2), st.integers(0, 2**31))
def test_sites_lack_as_many_classes_and_each_class_has_an_owner(
    sites: int, classes: int, missing: int, seed: int
) -> None:
    owned = draw_site_classes_with_missing(sites * classes, classes, missing, seed)
    assert (owned.sum(axis=1) == classes - missing).all()
    assert owned.any(axis=0).all()


def test_one_class_a_site_goes_round() -> None:
    assert columns(draw_site_classes_with_missing(5, 3, 2, seed=1)) == [[0], [1], [2], [0], [1]]


def test_sites_with_missing_classes_have_patients_of_their_own_and_the_lists_of_the_draw() -> None:
    splits = splits_of(40, 5)
    parts = partition_dataset(splits, missing_classes(sites=5, missing=1), seed=3).parts
    assert [part.class_names for part in parts][:2] == [("a", "b", "c", "d"), ("a", "b", "d", "e")]  # ICH missing 1
    assert check_disjoint(splits.train.patients[part.train] for part in parts)
    assert all(part.test is None for part in parts)


def test_a_partition_is_read_by_its_kind_and_unknown_keys_are_refused() -> None:
    assert isinstance(partition_spec("random_owners", sites=3), RandomOwnersPartitionSpec)
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        subsets(sites=3, overlap=2)
