"""Collections that share classes are one data set, under the classes of a label map."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from pydantic import ValidationError

from polyclinic.common.config import validate_experiment
from polyclinic.common.errors import BadInput, Fault
from polyclinic.common.simulation import load_simulated_data
from polyclinic.data.base.spec import CollectionsDatasetSpec, CollectionSpec
from polyclinic.data.load import find_dataset_faults, load_dataset, load_external_test_images
from polyclinic.data.sources.collections import find_collection_faults, merge_labels

ARRAYS = {"kind": "npz", "path": "arrays.npz", "classes": ["Effusion", "Mass", "Hernia"], "patient_key": "patient"}
SCANS = {
    "kind": "folder", "images": "scans", "labels": "scans.csv", "image_column": "file", "patient_column": "patient",
    "split_column": "part", "label_columns": ["Pleural Effusion", "Lung Lesion", "Lung Opacity"], "color": True,
}  # fmt: skip
NAMES = {"scans": {"Pleural Effusion": "Effusion", "Lung Lesion": "Mass", "Lung Opacity": "Mass"}}
ROWS = ["1,0,0", "0,,1", "0,0,0", "0,0,", "0,1,0", ""]
PARTS = ["train", "train", "train", "train", "val", "test"]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Six arrays of 8 x 8 in grey, and six pictures of 16 x 16 beside a table."""
    arrays: dict[str, Any] = {}
    for start, (part, count) in enumerate((("train", 3), ("val", 2), ("test", 1))):
        arrays[f"{part}_images"] = np.full((count, 8, 8), 90 + start, dtype=np.uint8)
        arrays[f"{part}_labels"] = np.eye(3, dtype=np.uint8)[np.arange(count)]
        arrays[f"{part}_patient"] = 10 * start + np.arange(count)
    np.savez(tmp_path / "arrays.npz", allow_pickle=False, **arrays)
    (tmp_path / "scans").mkdir()
    lines = ["file,patient,part,Pleural Effusion,Lung Lesion,Lung Opacity"]
    for number, (cells, part) in enumerate(zip(ROWS, PARTS, strict=True)):
        Image.fromarray(np.full((16, 16), 100 + number, np.uint8)).save(tmp_path / "scans" / f"{number}.png")
        lines.append(f"{number}.png,{number},{part},{cells or '0,0,1'}")
    (tmp_path / "scans.csv").write_text("\n".join(lines) + "\n")
    return tmp_path


def spec(**keys: Any) -> CollectionsDatasetSpec:
    collections = {"arrays": ARRAYS, "scans": SCANS}
    settings = {"kind": "collections", "image_size": 12, "collections": collections, "names": NAMES}
    return CollectionsDatasetSpec.model_validate({**settings, **keys})


def test_labels_of_one_meaning_are_one_class_and_what_a_collection_lacks_is_unknown(base: Path) -> None:
    """Mass at the scans is Lung Lesion or Lung Opacity: 0 or 0; blank or 1; 0 or 0; 0 or blank, which is unknown."""
    splits, nan = load_dataset(spec(), base), np.nan
    assert splits.class_names == ("Effusion", "Mass", "Hernia")
    own, scans = splits.train.labels[:3], splits.train.labels[3:]
    np.testing.assert_array_equal(own, np.eye(3))
    np.testing.assert_array_equal(scans, [[1, 0, nan], [0, 1, nan], [0, 0, nan], [0, nan, nan]])


def test_images_have_one_size_and_colour_and_the_name_of_their_collection_as_source(base: Path) -> None:
    splits = load_dataset(spec(), base)
    assert [part.images.shape for part in splits.parts] == [(7, 12, 12), (3, 12, 12), (2, 12, 12)]
    assert splits.train.sources.tolist() == ["arrays"] * 3 + ["scans"] * 4
    assert splits.validation.patients.tolist() == ["arrays/10", "arrays/11", "scans/4"]
    assert load_dataset(spec(color=True), base).test.images.shape == (2, 12, 12, 3)


def test_classes_that_are_not_listed_are_left_out_and_counted(base: Path) -> None:
    splits = load_dataset(spec(classes=["Mass", "Effusion"]), base)
    assert splits.class_names == ("Mass", "Effusion")
    assert splits.train.omissions[-1] == 'data.classes leaves out 1 label of arrays: "Hernia".'


@pytest.mark.parametrize(
    ("keys", "where"),
    [
        ({"names": {"scans": {"Pleural Efusion": "Effusion"}}}, ["data.names.scans"]),
        ({"classes": ["Effusion", "Masss"]}, ["data.classes"]),
        (
            {"collections": {"arrays": ARRAYS, "scans": {**SCANS, "labels": "no.csv"}}},
            ["data.collections.scans.labels"],
        ),
    ],
)
def test_a_name_that_no_collection_has_is_a_fault_with_its_key(
    base: Path, keys: dict[str, Any], where: list[str]
) -> None:
    with pytest.raises(BadInput) as error:
        load_dataset(spec(**keys), base)
    assert [fault.where for fault in error.value.faults] == where


def test_the_faults_of_all_collections_are_found_before_pictures_are_read(base: Path) -> None:
    wrong = {"arrays": {**ARRAYS, "path": "array.npz"}, "scans": {**SCANS, "image_column": "picture"}}
    faults = find_dataset_faults(spec(collections=wrong), base)
    assert [fault.where for fault in faults] == ["data.collections.arrays.path", "data.collections.scans.image_column"]


def test_a_fault_of_a_file_keeps_its_path_behind_the_name_of_the_collection(base: Path) -> None:
    def find_faults(own: CollectionSpec) -> list[Fault]:
        return [Fault("my data/table.csv: line 3", "is odd.", "")] if own.kind == "folder" else []

    (fault,) = find_collection_faults(spec(), find_faults)
    assert fault.where == "data.collections.scans: my data/table.csv: line 3"


def test_a_map_for_a_collection_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValidationError, match="there is no collection scan"):
        spec(names={"scan": {}})


def test_each_collection_can_be_a_site_with_an_external_test_of_another(base: Path) -> None:
    tables = {
        "run": {"method": "surgical", "rounds": 1},
        "model": {"architecture": "tiny_cnn", "channels": 1, "image_size": 16},
        "data": spec(image_size=16).model_dump(),
        "partition": {
            "kind": "class_lists", "images": "source",
            "lists": {"arrays": ["Effusion", "Mass", "Hernia"], "scans": ["Effusion", "Mass"]},
        },
        "external_test": {**ARRAYS, "image_size": 16},
    }  # fmt: skip
    file = validate_experiment(tables, base / "experiment.toml", name="experiment.toml")
    data = load_simulated_data(file.experiment, base)
    assert [(part.site, len(part.train), part.class_names) for part in data.parts] == [
        ("arrays", 3, ("Effusion", "Hernia", "Mass")),
        ("scans", 4, ("Effusion", "Mass")),
    ]
    external = load_external_test_images(file.experiment.external_test, base)
    assert external is not None
    assert len(external) == 1


@given(st.lists(st.tuples(*[st.sampled_from([0.0, 1.0, np.nan])] * 3), min_size=1, max_size=9))
def test_an_or_of_labels_never_turns_a_positive_or_an_unknown_into_a_negative(rows: list[tuple[float, ...]]) -> None:
    labels = np.array(rows, dtype=np.float32)
    merged = merge_labels(labels, ["a", "a", "b"], ["b", "a"])
    positive = (labels[:, :2] == 1).any(axis=1)
    known = ~np.isnan(labels[:, :2]).any(axis=1)
    np.testing.assert_array_equal(merged[:, 0], labels[:, 2])
    np.testing.assert_array_equal(merged[:, 1] == 1, positive)
    np.testing.assert_array_equal(merged[:, 1] == 0, ~positive & known)
