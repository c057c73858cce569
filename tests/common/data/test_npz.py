import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from common.data.base.spec import NpzSpec
from common.data.load import faults, load
from common.data.sources.npz import stratified_rows
from common.errors import BadInput

Save = Callable[..., Path]


def arrays(**changes: NDArray[Any] | None) -> dict[str, NDArray[Any]]:
    """Ten training, four validation and four test images of three classes, with patients; None takes an array away."""
    whole: dict[str, NDArray[Any] | None] = {}
    for start, (prefix, count) in enumerate((("train", 10), ("val", 4), ("test", 4))):
        whole[f"{prefix}_images"] = np.arange(count * 16, dtype=np.uint8).reshape(count, 4, 4)
        whole[f"{prefix}_labels"] = np.arange(count, dtype=np.uint8).reshape(-1, 1) % 3
        whole[f"{prefix}_patient"] = 100 * start + np.arange(count) // 2
    return {name: array for name, array in {**whole, **changes}.items() if array is not None}


@pytest.fixture
def save(tmp_path: Path) -> Save:
    def write(**changes: NDArray[Any] | None) -> Path:
        np.savez(tmp_path / "set.npz", allow_pickle=True, **arrays(**changes))
        return tmp_path

    return write


def spec(**settings: Any) -> NpzSpec:
    return NpzSpec.model_validate({"kind": "npz", "path": "set.npz", "classes": ["x", "y", "z"], **settings})


def messages(base: Path, **settings: Any) -> list[str]:
    return [str(fault) for fault in faults(spec(**settings), base)]


def test_a_class_number_becomes_one_column_per_class(save: Save) -> None:
    splits = load(spec(), save())
    assert splits.train.labels[:4].tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 0, 0]]


def test_zeros_and_ones_stay_and_nan_is_unknown(save: Save) -> None:
    labels = np.array([[0, 1, np.nan]] * 10)
    splits = load(spec(), save(train_labels=labels, val_labels=labels[:4], test_labels=labels[:4]))
    np.testing.assert_array_equal(splits.train.labels, labels.astype(np.float32))


def test_images_are_resized_on_request(save: Save) -> None:
    assert load(spec(image_size=7), save()).test.images.shape == (4, 7, 7)


def test_without_a_validation_part_training_patients_are_held_out(save: Save) -> None:
    base = save(val_images=None, val_labels=None, val_patient=None)
    splits = load(spec(patient_key="patient", validation_fraction=0.4), base)
    assert (len(splits.train), len(splits.validation)) == (6, 4)  # 2 of 5 patients, 2 images each
    assert not set(splits.train.patients.tolist()) & set(splits.validation.patients.tolist())


def test_images_without_patients_each_have_their_own(save: Save) -> None:
    splits = load(spec(), save())
    everyone = [*splits.train.patients, *splits.validation.patients, *splits.test.patients]
    assert len(set(everyone)) == 18


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert messages(tmp_path) == [
        f"data.path: there is no file {tmp_path / 'set.npz'}. Paths are relative to the folder of this file."
    ]


def test_wrong_keys_are_named_with_the_keys_found(tmp_path: Path) -> None:
    np.savez(tmp_path / "set.npz", x_train=np.zeros(1), train_labels=np.zeros(1))
    found = 'its arrays are "x_train", "train_labels".'
    assert messages(tmp_path) == [
        f'data.path: set.npz has no array "train_images"; {found}',
        f'data.path: set.npz has no array "test_images"; {found}',
        f'data.path: set.npz has no array "test_labels"; {found}',
    ]


def test_a_wrong_patient_key_is_a_fault_of_that_setting(save: Save) -> None:
    found = messages(save(), patient_key="patients")
    assert len(found) == 3
    assert found[0].startswith('data.patient_key: set.npz has no array "train_patients"; its arrays are "train_images"')
    assert found[0].endswith('Did you mean "train_patient"?')


def test_python_objects_are_refused_unread(save: Save) -> None:
    base = save(train_source=np.array([{"a": 1}], dtype=object))
    assert messages(base) == [
        'data.path: set.npz holds Python objects in "train_source", which may run code when read. '
        "Save them as plain arrays of numbers or strings."
    ]


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_what_is_packed_otherwise_than_numpy_packs_is_refused(save: Save, method: int) -> None:
    base = save()
    with zipfile.ZipFile(base / "set.npz") as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(base / "set.npz", "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    assert messages(base) == [
        "data.path: set.npz is a zip file that is locked or packed in an unusual way. "
        "Copy it again, or write it again with numpy.savez."
    ]


def test_all_wrong_shapes_are_named_at_once(save: Save) -> None:
    base = save(train_images=np.zeros((10, 4), dtype=np.float64), val_labels=np.zeros((3, 1), dtype=np.uint8))
    assert messages(base) == [
        "data.path: train_images is float64 (10, 4); expected uint8 (n, height, width) or (n, height, width, 3).",
        "data.path: val_labels has shape (3, 1), but val has 4 images.",
    ]


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        ([], "data.classes: the file names no classes, and its labels are of 3 classes. Give 3 names in label order."),
        (
            ["x", "y"],
            'data.classes: 2 names for labels of 3 classes: "x", "y". Give 3 names in label order.',
        ),
        (["x", "y", "x"], 'data.classes: "x" stands there more than once.'),
    ],
)
def test_class_names_must_fit_the_labels(save: Save, classes: list[str], message: str) -> None:
    assert messages(save(), classes=classes) == [message]


def test_labels_of_several_classes_are_zeros_and_ones(save: Save) -> None:
    labels = np.array([[0, 1, 2]] * 10)
    base = save(train_labels=labels, val_labels=labels[:4] % 2, test_labels=labels[:4] % 2)
    assert messages(base) == ["data.path: train_labels holds values other than 0, 1 or NaN."]


@pytest.mark.parametrize("labels", [[0, np.nan, 1, 1], [0, -1, 1, 1], [0, 0.5, 1, 1]])
def test_class_numbers_are_whole_and_not_negative(save: Save, labels: list[float]) -> None:
    assert messages(save(test_labels=np.array(labels))) == [
        "data.path: test_labels holds values other than whole class numbers from 0."
    ]


def test_parts_label_in_the_same_form(save: Save) -> None:
    base = save(test_labels=np.zeros((4, 3), dtype=np.uint8))
    assert messages(base) == [
        "data.path: labels are class numbers in one part and 0/1 per class in another: "
        "train_labels is (10, 1), val_labels is (4, 1), test_labels is (4, 3)."
    ]


def test_patients_in_two_parts_are_named(save: Save) -> None:
    base = save(test_patient=np.array([3, 4, 300, 300]))
    with pytest.raises(BadInput) as caught:
        load(spec(patient_key="patient"), base)
    assert str(caught.value) == (
        'data.patient_key: 2 patients in both train and test: "3", "4". '
        "Put all images of a patient on one side of the split."
    )


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.data())
def test_a_limited_train_part_keeps_each_class_in_proportion(classes: list[int], data: st.DataObject) -> None:
    labels = np.eye(5, dtype=np.float32)[classes]
    limit = data.draw(st.integers(1, len(classes)))
    rows = stratified_rows(labels, limit, seed=3)
    assert len(set(rows.tolist())) == limit
    expected = labels.sum(axis=0) * limit / len(classes)
    # Off by one within a class, and by the rounding of all others together.
    assert np.abs(labels[rows].sum(axis=0) - expected).max() <= 2


def test_only_the_classes_kept_are_labelled_in_their_order_and_no_image_of_several_labels_is_lost(save: Save) -> None:
    labels = np.array([[0, 1, 0], [1, 0, 1]] * 5)
    splits = load(spec(keep=["z", "x"]), save(train_labels=labels, val_labels=labels[:4], test_labels=labels[:4]))
    assert splits.class_names == ("z", "x")
    assert splits.train.labels[:3].tolist() == [[0, 0], [1, 1], [0, 0]]
    assert len(splits.train) == 10


def test_an_image_whose_one_class_is_not_kept_is_left_out(save: Save) -> None:
    splits = load(spec(keep=["z", "x"]), save())
    # classes of the ten: x y z x y z x y z x
    assert splits.train.labels.tolist() == [[0, 1], [1, 0]] * 3 + [[0, 1]]
    np.testing.assert_array_equal(splits.train.images, load(spec(), save()).train.images[[0, 2, 3, 5, 6, 8, 9]])


def test_classes_to_keep_must_be_the_files(save: Save) -> None:
    assert messages(save(), classes=["mass", "nodule", "none"], keep=["nodules", "mass", "mass"]) == [
        'data.keep[0]: "nodules" is not a class of the data, whose classes are "mass", "nodule", "none". '
        'Did you mean "nodule"?',
        'data.keep: "mass" stands there more than once.',
    ]


def test_nothing_is_held_out_where_the_fraction_is_zero(save: Save) -> None:
    base = save(val_images=None, val_labels=None, val_patient=None)
    splits = load(spec(patient_key="patient", validation_fraction=0, image_size=5), base)
    assert (len(splits.train), splits.validation.images.shape, len(splits.test)) == (10, (0, 5, 5), 4)


def test_the_test_part_can_be_limited_like_the_train_part(save: Save) -> None:
    splits = load(spec(train_limit=3, test_limit=3), save())
    assert (len(splits.train), len(splits.validation), len(splits.test)) == (3, 4, 3)
    assert splits.test.labels.sum(axis=0).tolist() == [1, 1, 1]  # of 2, 1 and 1
