from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from polyclinic.data.base.spec import MixtureDatasetSpec
from polyclinic.data.images.reading import convert_image_colors
from polyclinic.data.load import find_dataset_faults, load_dataset

SCAN = {"kind": "npz", "path": "scan.npz", "classes": ["normal", "mass"], "patient_key": "patient"}
PHOTO = {"kind": "npz", "path": "photo.npz", "classes": ["normal", "rash", "burn"]}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Grey scans of 6 x 6 with patients, photographs of 4 x 4 in colour without."""
    for name, side, shape, classes in (("scan", 6, (), 2), ("photo", 4, (3,), 3)):
        arrays: dict[str, Any] = {}
        for start, (part, count) in enumerate((("train", 6), ("val", 3), ("test", 4))):
            arrays[f"{part}_images"] = np.full((count, side, side, *shape), 40 + start, dtype=np.uint8)
            arrays[f"{part}_labels"] = np.arange(count) % classes
            arrays[f"{part}_patient"] = 10 * start + np.arange(count)
        np.savez(tmp_path / f"{name}.npz", allow_pickle=False, **arrays)
    return tmp_path


def spec(**keys: Any) -> MixtureDatasetSpec:
    tasks = {"scan": SCAN, "photo": PHOTO}
    return MixtureDatasetSpec.model_validate({"kind": "mixture", "image_size": 5, "tasks": tasks, **keys})


@pytest.mark.parametrize(("color", "shape"), [(False, (5, 5)), (True, (5, 5, 3))])
def test_all_images_are_brought_to_one_size_and_colour(base: Path, color: bool, shape: tuple[int, ...]) -> None:
    splits = load_dataset(spec(color=color), base)
    assert [part.images.shape for part in splits.parts] == [(12, *shape), (6, *shape), (8, *shape)]
    assert np.unique(splits.train.images).tolist() == [40]


def test_classes_stand_under_their_tasks_name_and_those_of_other_tasks_are_unknown_not_absent(base: Path) -> None:
    splits, nan = load_dataset(spec(), base), np.nan
    assert splits.class_names == ("scan normal", "scan mass", "photo normal", "photo rash", "photo burn")
    expected = [[1, 0, nan, nan, nan], [0, 1, nan, nan, nan], [nan, nan, 1, 0, 0], [nan, nan, 0, 1, 0]]
    np.testing.assert_array_equal(splits.train.labels[[0, 1, 6, 7]], expected)


def test_an_image_comes_from_its_task_and_patients_of_two_tasks_are_never_the_same(base: Path) -> None:
    splits = load_dataset(spec(), base)
    assert splits.test.sources.tolist() == ["scan"] * 4 + ["photo"] * 4
    assert splits.train.patients[[1, 7]].tolist() == ["scan/1", "photo/unknown#1"]
    everyone = [patient for part in splits.parts for patient in part.patients]
    assert len(set(everyone)) == len(everyone)


def test_a_tasks_own_settings_hold(base: Path) -> None:
    limited = {**PHOTO, "train_limit": 2, "keep": ["burn", "rash"]}
    splits = load_dataset(spec(tasks={"scan": SCAN, "photo": limited}), base)
    assert splits.class_names == ("scan normal", "scan mass", "photo burn", "photo rash")
    assert splits.train.sources.tolist() == ["scan"] * 6 + ["photo"] * 2


def test_the_faults_of_all_tasks_are_named_at_once(base: Path) -> None:
    wrong = spec(tasks={"scan": {**SCAN, "path": "scna.npz"}, "photo": {**PHOTO, "classes": ["normal"]}})
    where = [fault.where for fault in find_dataset_faults(wrong, base)]
    assert where == ["data.tasks.scan.path", "data.tasks.photo.classes"]


def test_two_classes_that_come_to_one_name_are_refused(base: Path) -> None:
    twice = {"a": {**SCAN, "classes": ["b c", "d"]}, "a b": {**SCAN, "classes": ["c", "d"]}}
    (fault,) = find_dataset_faults(spec(tasks=twice), base)
    assert (fault.where, '"a b c"' in fault.problem) == ("data.tasks", True)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"tasks": {"a:b": SCAN}}, "String should match pattern"),
        ({"tasks": {}}, "at least 1 item"),
        ({"tasks": {"scan": {**SCAN, "image_size": 28}}}, "image_size is the mixture's; take it out of scan"),
    ],
)
def test_settings_that_cannot_be_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        spec(**keys)


def test_colour_becomes_grey_by_its_brightness() -> None:
    # ITU-R 601: .299 R + .587 G + .114 B
    color = np.array([[[[200, 0, 0], [0, 100, 0], [0, 0, 250]]]], dtype=np.uint8)
    np.testing.assert_allclose(convert_image_colors(color, color=False), [[[59.8, 58.7, 28.5]]], atol=0.51)
    assert convert_image_colors(color, color=True) is color
