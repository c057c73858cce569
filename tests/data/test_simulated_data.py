"""What each simulated site gets to see of a divided data set."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from polyclinic.common.config import Experiment, validate_experiment
from polyclinic.common.simulation import (
    SimulatedData,
    cache_received_data,
    load_simulated_data,
    load_undivided_data,
    select_simulated_site_images,
)
from polyclinic.data.base.image_set import deserialize_dataset_splits, serialize_dataset_splits
from polyclinic.data.partition.partition import partition_dataset
from tests.data.conftest import even_splits, in_turn, mixture, partition_spec, splits_of


def own_tests() -> SimulatedData:
    division = partition_dataset(even_splits(), partition_spec("label_skew", shards="practical", sites=4), seed=1)
    return SimulatedData(division.splits, division.parts)


def of_tasks() -> SimulatedData:
    splits = mixture({"scan": in_turn(200, 2), "photo": in_turn(300, 3)})
    division = partition_dataset(splits, partition_spec("tasks", split="strong", sites_per_task=2), seed=0)
    return SimulatedData(division.splits, division.parts, division.server)


def test_a_site_with_test_images_of_its_own_tests_on_them() -> None:
    data = own_tests()
    images = select_simulated_site_images(data, 2, "no")
    assert 0 < len(images.test) < len(data.splits.test)
    np.testing.assert_array_equal(images.test.patients, data.splits.test.patients[data.parts[2].test])


def test_a_pooled_site_tests_on_what_all_sites_test_on() -> None:
    data = own_tests()
    pooled = select_simulated_site_images(data, 0, "negative").test.patients.tolist()
    single = [select_simulated_site_images(data, site, "no").test.patients for site in range(4)]
    assert sorted(pooled) == sorted(np.concatenate(single).tolist())


def test_the_coordinator_tests_on_its_own_images_where_it_has_any() -> None:
    data, alone = of_tasks(), own_tests()
    assert data.server is not None
    assert data.test_images is data.server.test
    assert alone.server is None
    assert alone.test_images is alone.splits.test


def test_a_site_of_a_task_sees_only_its_tasks_images_and_classes_in_all_three_parts() -> None:
    images = select_simulated_site_images(of_tasks(), 0, "no")
    assert images.declaration.site == "photo-1"
    for part in (images.train, images.validation, images.test):
        assert set(part.sources.tolist()) == {"photo"}
        assert part.class_names == ("c", "d", "e")
        assert not np.isnan(part.labels).any()


@pytest.mark.parametrize(("pooling", "filled"), [("negative", 0.0), ("masked", np.nan)])
def test_pooled_tasks_take_each_others_classes_as_absent_or_unknown(pooling: Any, filled: float) -> None:
    images = select_simulated_site_images(of_tasks(), 0, pooling).train
    photos = images.labels[images.sources == "photo"][:, :2]
    np.testing.assert_array_equal(photos, np.full_like(photos, filled))


def tasks_in(folder: Path) -> Experiment:
    """Two tasks of one small npz file, which it writes."""
    splits = splits_of(240, 3)
    arrays = dict[str, NDArray[Any]]()
    for part, images in zip(("train", "val", "test"), splits.parts, strict=True):
        own = {"images": images.images, "labels": images.labels, "patient": images.patients}
        arrays |= {f"{part}_{key}": array for key, array in own.items()}
    np.savez(folder / "set.npz", allow_pickle=False, **arrays)
    task = {"kind": "npz", "path": "set.npz", "classes": ["a", "b", "c"], "patient_key": "patient"}
    return Experiment.model_validate(
        {
            "run": {"method": "surgical"},
            "model": {"architecture": "tiny_cnn", "image_size": 32},
            "data": {"kind": "mixture", "image_size": 32, "tasks": {"one": task, "two": task}},
            "partition": {"kind": "tasks", "split": "strong", "sites_per_task": 1},
        }
    )


def test_the_same_experiment_is_loaded_and_divided_once(tmp_path: Path) -> None:
    experiment = tasks_in(tmp_path)
    data = load_simulated_data(experiment, tmp_path)
    assert data is load_simulated_data(experiment, tmp_path)
    assert [part.site for part in data.parts] == ["one-1", "two-1"]
    assert data.label_contract.class_names == ("one a", "one b", "one c", "two a", "two b", "two c")
    assert data.server is not None


def test_a_worker_reads_what_was_decoded_for_it_and_cuts_it_likewise(tmp_path: Path) -> None:
    experiment = tasks_in(tmp_path)
    decoded = load_simulated_data(experiment, tmp_path)
    flat = serialize_dataset_splits(load_undivided_data(experiment, tmp_path))
    (tmp_path / "set.npz").unlink()
    cache_received_data(experiment, tmp_path, deserialize_dataset_splits(*flat))
    received = load_simulated_data(experiment, tmp_path)
    for site in range(2):
        expected, actual = (select_simulated_site_images(data, site, "no") for data in (decoded, received))
        assert expected.declaration == actual.declaration
        assert any(actual.train.stored is array for array in flat[1])  # no copy for each site
        np.testing.assert_array_equal(expected.train.images, actual.train.images)
        np.testing.assert_array_equal(expected.test.labels, actual.test.labels)


def test_patients_of_several_hospitals_are_counted_in_a_note(tmp_path: Path) -> None:
    """P1 to P5 are at both hospitals; whether they are one person or two, nobody knows."""
    lines = ["file,patient,hospital,part,Mass,Fluid"]
    for number in range(20):
        Image.fromarray(np.full((8, 8), 20 + 9 * number, np.uint8)).save(tmp_path / f"{number}.png")
        hospital = ("north", "south")[number // 10]
        patient = number % 10 if number % 10 < 5 else number
        part = ("train", "val")[number % 2]
        lines.append(f"{number}.png,P{patient},{hospital},{part},{number % 2},{number // 2 % 2}")
    Image.fromarray(np.full((8, 8), 3, np.uint8)).save(tmp_path / "test.png")
    lines.append("test.png,T,north,test,1,0")
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    data = {
        "kind": "folder", "images": ".", "labels": "t.csv", "image_column": "file", "patient_column": "patient",
        "source_column": "hospital", "split_column": "part", "label_columns": ["Mass", "Fluid"], "image_size": 16,
    }  # fmt: skip
    lists = {"north": ["Mass", "Fluid"], "south": ["Mass"]}
    tables = {
        "run": {"method": "surgical", "rounds": 1},
        "model": {"architecture": "tiny_cnn", "channels": 1, "image_size": 16},
        "data": data,
        "partition": {"kind": "class_lists", "images": "source", "lists": lists},
    }
    experiment = validate_experiment(tables, tmp_path / "e.toml", name="e.toml").experiment
    notes = load_simulated_data(experiment, tmp_path).splits.train.notes
    assert any("5 patients have images at several hospitals" in note for note in notes)
