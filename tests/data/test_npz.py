"""npz files: labels, parts and classes. The wording of their faults is held by ``tests/bad_input/messages``."""

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from polyclinic.data.base.spec import NpzDatasetSpec
from polyclinic.data.images import store
from polyclinic.data.images.pixel_cache import MemoryMappedPictures, PixelCache
from polyclinic.data.images.store import DecodedImageStore
from polyclinic.data.load import find_dataset_faults, load_dataset
from polyclinic.data.sources import npz
from polyclinic.data.sources.npz import draw_stratified_rows

Save = Callable[..., Path]
NO_VALIDATION = dict.fromkeys(("val_images", "val_labels", "val_patient"))
SEVERAL = np.array([[0, 1, 0], [1, 0, 1]] * 5)


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """Write ten training, four validation and four test images of three classes; an array that is None is left out."""

    def write(**changes: NDArray[Any] | None) -> Path:
        arrays: dict[str, NDArray[Any] | None] = {}
        for start, (prefix, count) in enumerate((("train", 10), ("val", 4), ("test", 4))):
            arrays[f"{prefix}_images"] = np.arange(count * 16, dtype=np.uint8).reshape(count, 4, 4)
            arrays[f"{prefix}_labels"] = np.arange(count, dtype=np.uint8).reshape(-1, 1) % 3
            arrays[f"{prefix}_patient"] = 100 * start + np.arange(count) // 2
        present = {name: array for name, array in {**arrays, **changes}.items() if array is not None}
        np.savez(tmp_path / "set.npz", allow_pickle=True, **present)
        return tmp_path

    return write


def labelled(labels: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """The same labels in all parts."""
    return {"train_labels": labels, "val_labels": labels[:4], "test_labels": labels[:4]}


def spec(**settings: Any) -> NpzDatasetSpec:
    return NpzDatasetSpec.model_validate({"kind": "npz", "path": "set.npz", "classes": ["x", "y", "z"], **settings})


def sizes(base: Path, **settings: Any) -> list[int]:
    return [len(part) for part in load_dataset(spec(**settings), base).parts]


def test_a_class_number_becomes_one_column_per_class(save: Save) -> None:
    splits = load_dataset(spec(), save())
    assert splits.train.labels[:4].tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 0, 0]]
    assert len({patient for part in splits.parts for patient in part.patients}) == 18  # each image is its own


def test_zeros_and_ones_stay_and_nan_is_unknown(save: Save) -> None:
    labels = np.array([[0, 1, np.nan]] * 10)
    splits = load_dataset(spec(image_size=7), save(**labelled(labels)))
    np.testing.assert_array_equal(splits.train.labels, labels.astype(np.float32))
    assert splits.test.images.shape == (4, 7, 7)


@pytest.mark.parametrize(("fraction", "expected"), [(0.4, [6, 4, 4]), (0, [10, 0, 4])])
def test_without_validation_part_training_patients_are_held_out(
    save: Save, fraction: float, expected: list[int]
) -> None:
    splits = load_dataset(spec(patient_key="patient", validation_fraction=fraction), save(**NO_VALIDATION))
    # 0.4 of 5 patients, 2 images each
    assert [len(part) for part in splits.parts] == expected
    assert not set(splits.train.patients.tolist()) & set(splits.validation.patients.tolist())


@pytest.mark.parametrize("settings", [{}, {"image_size": 7}, {"keep": ["z", "x"]}, {"train_limit": 4}])
@pytest.mark.parametrize("changes", [{}, NO_VALIDATION, {"train_images": np.zeros((10, 4, 8), np.uint8)}])
def test_images_of_a_large_file_are_kept_on_the_disk(
    save: Save, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], changes: dict[str, Any]
) -> None:
    base, lines = save(**changes), list[str]()
    expected = load_dataset(spec(**settings), base)
    monkeypatch.setattr(npz, "MAX_IMAGE_BYTES_IN_MEMORY", 0)
    monkeypatch.setattr(store, "MIN_FILE_AGE_S", 0)
    for _ in range(2):
        lines.clear()
        splits = load_dataset(spec(**settings), base, DecodedImageStore(base / "cache", tell=lines.append))
        for part, same in zip(splits.parts, expected.parts, strict=True):
            assert isinstance(part.stored, MemoryMappedPictures) or not len(part)
            np.testing.assert_array_equal(part.images, same.images)
            np.testing.assert_array_equal(part.labels, same.labels)
    assert {"0 of them read now" in line for line in lines} == {True}


@pytest.mark.parametrize(("settled_s", "expected"), [(0.0, 1), (60.0, 6)])
def test_a_large_file_that_has_just_changed_is_hashed_again(
    save: Save, monkeypatch: pytest.MonkeyPatch, settled_s: float, expected: int
) -> None:
    # It may change once more without another time of change, as in Git's "racy" index.
    base, hashed, plain = save(), list[Path](), PixelCache.hash_image_file
    monkeypatch.setattr(npz, "MAX_IMAGE_BYTES_IN_MEMORY", 0)
    monkeypatch.setattr(store, "MIN_FILE_AGE_S", settled_s)
    monkeypatch.setattr(PixelCache, "hash_image_file", lambda cache, file: (hashed.append(file), plain(cache, file))[1])
    for _ in range(2):
        load_dataset(spec(), base, DecodedImageStore(base / "cache"))
    assert hashed == [base / "set.npz"] * expected  # each of two loads reads three parts


FAULTS: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    ({"train_images": None, "test_images": None}, {}, ["data.path"] * 2),
    ({"train_images": np.zeros((10, 4)), "val_labels": np.zeros((3, 1), np.uint8)}, {}, ["data.path"] * 2),
    ({}, {"classes": ["x", "y", "x"]}, ["data.classes"]),
    ({"test_labels": np.array([0, np.nan, 1, 1])}, {}, ["data.path"]),
    ({"test_labels": np.array([0, 0.5, 1, 1])}, {}, ["data.path"]),
    ({}, {"keep": ["w", "x", "x"]}, ["data.keep[0]", "data.keep"]),
]


@pytest.mark.parametrize(("changes", "settings", "where"), FAULTS)
def test_faults_name_their_key(save: Save, changes: dict[str, Any], settings: dict[str, Any], where: list[str]) -> None:
    assert [fault.where for fault in find_dataset_faults(spec(**settings), save(**changes))] == where


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_file_that_numpy_does_not_pack_so_is_refused(save: Save, method: int) -> None:
    base = save()
    with zipfile.ZipFile(base / "set.npz") as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(base / "set.npz", "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    (fault,) = find_dataset_faults(spec(), base)
    assert "packed in an unusual way" in fault.problem


@settings(max_examples=50)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.data())
def test_a_limited_train_part_keeps_each_class_in_proportion(classes: list[int], data: st.DataObject) -> None:
    labels = np.eye(5, dtype=np.float32)[classes]
    limit = data.draw(st.integers(1, len(classes)))
    rows = draw_stratified_rows(labels, limit, seed=3)
    assert len(set(rows.tolist())) == limit
    expected = labels.sum(axis=0) * limit / len(classes)
    # Off by one within a class, and by the rounding of all others together.
    assert np.abs(labels[rows].sum(axis=0) - expected).max() <= 2


def test_both_parts_can_be_limited(save: Save) -> None:
    base = save()
    assert sizes(base, train_limit=3, test_limit=3) == [3, 4, 3]
    labels = load_dataset(spec(test_limit=3), base).test.labels
    assert labels.sum(axis=0).tolist() == [1, 1, 1]  # of 2, 1 and 1


def test_only_the_classes_kept_are_labelled_in_their_order_and_no_image_of_several_labels_is_lost(save: Save) -> None:
    splits = load_dataset(spec(keep=["z", "x"]), save(**labelled(SEVERAL)))
    assert splits.class_names == ("z", "x")
    assert splits.train.labels[:3].tolist() == [[0, 0], [1, 1], [0, 0]]
    assert len(splits.train) == 10


def test_an_image_whose_one_class_is_not_kept_is_left_out(save: Save) -> None:
    splits = load_dataset(spec(keep=["z", "x"]), save())
    # classes of the ten: x y z x y z x y z x
    assert splits.train.labels.tolist() == [[0, 1], [1, 0]] * 3 + [[0, 1]]
    np.testing.assert_array_equal(splits.train.images, load_dataset(spec(), save()).train.images[[0, 2, 3, 5, 6, 8, 9]])
