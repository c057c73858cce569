"""Torch data sets as a source: the values that their items say, read when needed, random transforms by the seed."""

import random
from collections import namedtuple
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset

from common.data.base.image_set import GREY_DIGESTS, DatasetSplits, compute_picture_digest, has_known_patients
from common.data.base.spec import PluginDatasetSpec
from common.data.images.pixels import load_pixels_on_device
from common.data.images.store import DecodedImageStore
from common.data.load import load_dataset
from common.data.sources import plugin
from common.data.sources.torch_dataset import TorchDatasetPictures
from common.errors import BadInput
from polyclinic.data import LabelledImages

NAN = float("nan")
COUNT = 60
RANDOM = np.random.default_rng(0)
GREY = RANDOM.integers(0, 256, (COUNT, 6, 5), dtype=np.uint8)
COLOR = RANDOM.integers(0, 256, (COUNT, 6, 5, 3), dtype=np.uint8)
LABELS = np.where(RANDOM.random((COUNT, 2)) < 0.2, np.nan, RANDOM.random((COUNT, 2)) < 0.5).astype(np.float32)


@dataclass
class Items(Dataset[Any]):
    """A data set of a function, which counts how often each item is read."""

    get: Callable[[int], Any]
    count: int = COUNT
    class_names: tuple[str, ...] = ("a", "b")
    reads: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        self.reads.append(index)
        return self.get(index)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Any], DatasetSplits]:
    def open_data(images: Any) -> DatasetSplits:
        given = images if isinstance(images, LabelledImages | Mapping) else LabelledImages(images)
        monkeypatch.setattr(plugin, "load_plugin_entry_point", lambda group, name: lambda folder, options: given)
        return load_dataset(PluginDatasetSpec(kind="plugin", name="stripes"), tmp_path)

    return open_data


def float_tensor(image: NDArray[np.uint8]) -> torch.Tensor:
    """What torchvision's ToTensor makes of a picture."""
    values = torch.from_numpy(image).float() / 255
    return values[None] if values.ndim == 2 else values.permute(2, 0, 1)


FORMS: dict[str, Callable[[NDArray[np.uint8]], Any]] = {
    "uint8 array": lambda image: image,
    "uint8 tensor": lambda image: torch.from_numpy(image if image.ndim == 2 else image.transpose(2, 0, 1)),
    "float tensor": float_tensor,
    "float array": lambda image: image / 255,
    "channels first": lambda image: image[None] if image.ndim == 2 else image.transpose(2, 0, 1),
    "picture": lambda image: Image.fromarray(image),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("images", [GREY, COLOR], ids=["grey", "color"])
def test_pixels_are_those_of_the_arrays(
    opened: Callable[[Any], DatasetSplits], images: NDArray[np.uint8], form: Callable[[NDArray[np.uint8]], Any]
) -> None:
    arrays = opened(LabelledImages(images, LABELS, ("a", "b")))
    lazy = opened(Items(lambda row: (form(images[row]), LABELS[row])))
    for part, same in zip(arrays.parts, lazy.parts, strict=True):
        np.testing.assert_array_equal(part.images, same.images)
        np.testing.assert_array_equal(part.labels, same.labels)
        (pixels,), (read,) = (load_pixels_on_device(data, "cpu").iterate_batches(COUNT) for data in (part, same))
        assert torch.equal(pixels.float(), read.float())
        assert pixels.stride() == read.stride()


FIRST_CLASS = np.eye(2, dtype=np.float32)[(LABELS[:, 0] == 1).astype(int)]
"""Labels of items that show one class."""
LABEL_FORMS: dict[str, tuple[Callable[[NDArray[np.float32]], tuple[Any, ...]], NDArray[np.float32]]] = {
    "nan": (lambda row: (row,), LABELS),
    "list": (lambda row: (row.tolist(),), LABELS),
    "double tensor": (lambda row: (torch.tensor(row).double(),), LABELS),
    "mask": (lambda row: (np.nan_to_num(row), ~np.isnan(row)), LABELS),
    "mask of numbers": (lambda row: (np.nan_to_num(row), torch.tensor(1.0 - np.isnan(row))), LABELS),
    "class": (lambda row: (int(row[0] == 1),), FIRST_CLASS),
    "class and mask": (lambda row: (int(row[0] == 1), [1, 0]), np.where([True, False], FIRST_CLASS, np.nan)),
    "masked array": (lambda row: (np.ma.masked_invalid(row),), LABELS),
    "half with gradient": (lambda row: (torch.tensor(row, dtype=torch.bfloat16, requires_grad=True),), LABELS),
    "row of a table": (lambda row: (pd.Series(row[::-1], index=["b", "a"]),), LABELS),
}


@pytest.mark.parametrize(("form", "expected"), LABEL_FORMS.values(), ids=LABEL_FORMS)
def test_labels_are_those_of_the_items(
    opened: Callable[[Any], DatasetSplits],
    form: Callable[[NDArray[np.float32]], tuple[Any, ...]],
    expected: NDArray[np.float32],
) -> None:
    splits = opened(Items(lambda row: (GREY[row], *form(LABELS[row]))))
    for part in splits.parts:
        np.testing.assert_array_equal(part.labels, expected[part.places])


def test_a_dictionary_names_image_labels_mask_and_patient(opened: Callable[[Any], DatasetSplits]) -> None:
    splits = opened(
        Items(
            lambda row: {
                "img": float_tensor(GREY[row]),
                "lab": np.nan_to_num(LABELS[row]),
                "label_mask": ~np.isnan(LABELS[row]),
                "patient_id": row // 2,
                "mask": GREY[row] > 9,
            }
        )
    )
    for part in splits.parts:
        np.testing.assert_array_equal(part.labels, LABELS[part.places])
        assert part.patients.tolist() == [str(row // 2) for row in part.places]


def test_one_number_a_class_of_two_and_a_yes_or_no_of_one(opened: Callable[[Any], DatasetSplits]) -> None:
    splits = opened(Items(lambda row: (GREY[row], row % 2), class_names=("sick",)))
    assert splits.train.labels[:, 0].tolist() == [row % 2 for row in splits.train.places]


@pytest.mark.parametrize("key", ["PatientID", "patient id", "subject_id", "pid", "Patients"])
def test_keys_count_without_case_spaces_and_signs(opened: Callable[[Any], DatasetSplits], key: str) -> None:
    items = Items(lambda row: {"Image": GREY[row], "Labels": LABELS[row], key: np.float64(row // 2), "PatientSex": "F"})
    for part in opened(items).parts:
        assert part.patients.tolist() == [str(row // 2) for row in part.places]


@pytest.mark.parametrize("form", [lambda mask: mask[None], lambda mask: torch.tensor(mask)[:, None]])
def test_a_mask_may_have_axes_of_size_one(opened: Callable[[Any], DatasetSplits], form: Callable[[Any], Any]) -> None:
    items = Items(lambda row: {"image": GREY[row], "labels": [1, 0], "label_mask": form(~np.isnan(LABELS[row]))})
    for part in opened(items).parts:
        np.testing.assert_array_equal(part.labels, np.where(np.isnan(LABELS), np.nan, [1, 0])[part.places])


UNREAD = ("valid", "valid_mask", "is_valid", "observed", "weight", "missing", "y_mask", "loss_mask", "has_label", "w")


@pytest.mark.parametrize("key", UNREAD)
def test_an_unread_entry_of_one_value_a_class_is_refused_by_its_name(
    opened: Callable[[Any], DatasetSplits], key: str
) -> None:
    items = Items(lambda row: {"image": GREY[row], "labels": LABELS[row], key: torch.tensor([1, 0])})
    with pytest.raises(BadInput, match=f'has "{key}" .*"label_mask".*leave (it|others) out'):
        opened(items)


def test_unread_entries_of_other_sizes_are_left(opened: Callable[[Any], DatasetSplits]) -> None:
    more = {"age": 50, "bbox": [1, 2, 3, 4], "file": "a.png", "lung_mask": GREY[0] > 9, "weight": 70.5}
    for part in opened(Items(lambda row: {"image": GREY[row], "labels": LABELS[row], **more})).parts:
        np.testing.assert_array_equal(part.labels, LABELS[part.places])


def test_unread_keys_are_named_once_where_patients_are_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    more = {"case_id": "p", "path": "p/a.png"}
    items = Items(lambda row: {"image": GREY[row], "labels": LABELS[row], **more})
    monkeypatch.setattr(
        plugin, "load_plugin_entry_point", lambda group, name: lambda folder, options: LabelledImages(items)
    )
    lines = list[str]()
    load_dataset(PluginDatasetSpec(kind="plugin", name="stripes"), tmp_path, DecodedImageStore(tell=lines.append))
    assert [line for line in lines if "not read" in line] == [
        '"case_id", "path" of the items are not read: a patient\'s name is called "patient"'
    ]


LABELS_BY_OTHER_DOORS: dict[str, dict[str, Any]] = {
    "known": {"known": ["lines"]},
    "valid": {"valid": False},
    "annotated": {"annotated": {"lines": 1, "bars": 0}},
    "meta": {"meta": {"label_mask": [1, 0]}},
    "is_known": {"meta": {"more": [{"is_known": np.array([1, 0])}]}},
    "w": {"w": np.array([1, 0])},
    "certainty": {"certainty": [0.5, 1.0]},
    "ignored_classes": {"ignored_classes": [1]},
    "other": {"meta": {"other": "lines"}},
    "annotations": {"annotations": [{"class": 0}]},
    "reader": {"reader": ["lines"]},
    "finding": {"finding": "Lines|other"},
    "bars": {"bars": 1},
    "lines_present": {"lines_present": True},
}


@pytest.mark.parametrize(("key", "entry"), LABELS_BY_OTHER_DOORS.items(), ids=LABELS_BY_OTHER_DOORS)
def test_an_entry_that_may_say_what_is_known_is_refused_by_its_name(
    opened: Callable[[Any], DatasetSplits], key: str, entry: dict[str, Any]
) -> None:
    items = Items(lambda row: {"image": GREY[row], "labels": LABELS[row], **entry}, class_names=("lines", "bars"))
    with pytest.raises(BadInput, match=rf'\[\d\]: has ("\S+" in )?"{key}"'):
        opened(LabelledImages(items, patients=[f"p{row}" for row in range(COUNT)]))


def test_metadata_in_dictionaries_is_left(opened: Callable[[Any], DatasetSplits]) -> None:
    """As MONAI's transforms leave them: one dictionary of the file, one entry a transform."""
    meta = {"filename_or_obj": "a.png", "spatial_shape": np.array([12, 12]), "affine": np.eye(4), "0008|0060": "DX"}
    transforms = [{"class": "RandFlipd", "id": 1, "orig_size": (12, 12), "do_transforms": True, "extra_info": {}}]
    meta |= {"spacing": [1.0, 1.0], "pixdim": (0.5, 0.5), "original_size": (1, 1), "scanlines": 1, "w": [1, 0]}
    more = {"image_meta_dict": meta, "image_transforms": transforms, "spacing": [1.0, 1.0], "original_size": (12, 12)}
    more |= {"scanlines": 512, "bars": 512, "invalid_pixels": 0, "valid": True, "hangar_bars_count": 3}
    class_names = ("lines", "bars")
    items = Items(lambda row: {"image": GREY[row], "labels": LABELS[row], "patient": row, **more}, COUNT, class_names)
    for part in opened(items).parts:
        np.testing.assert_array_equal(part.labels, LABELS[part.places])


@pytest.mark.parametrize("key", ["label_path", "mask_path", "labeler", "annotator", "labeled_by", "label_file"])
def test_texts_about_the_labels_are_no_labels(opened: Callable[[Any], DatasetSplits], key: str) -> None:
    items = Items(lambda row: {"image": GREY[row], "labels": LABELS[row], "patient": row, key: f"R{row}.png"})
    for part in opened(items).parts:
        np.testing.assert_array_equal(part.labels, LABELS[part.places])


@pytest.mark.parametrize("key", ["class_name", "label_name", "finding", "folder"])
def test_a_text_may_repeat_the_labels_and_not_contradict_them(opened: Callable[[Any], DatasetSplits], key: str) -> None:
    names = ("lines", "bars")
    repeated = Items(
        lambda row: {"image": GREY[row], "label": row % 2, "patient": row, key: names[row % 2]}, COUNT, names
    )
    assert len(opened(repeated).train)
    other = Items(
        lambda row: {"image": GREY[row], "label": row % 2, "patient": row, key: names[row // 7 % 2]}, COUNT, names
    )
    with pytest.raises(BadInput, match=rf'has "{key}", which names a class'):
        opened(other)


NamedPatient = namedtuple("NamedPatient", "patient_id site")


@pytest.mark.parametrize(
    "entry",
    [
        {"meta": NamedPatient(3, "east")},
        {"meta": SimpleNamespace(study=SimpleNamespace(patient_id=3))},
        {"meta": '{"patient_id": 3}'},
        {"meta": '[{"patient_id": 3}]'},
        {"meta": [("site", "east"), ("patient_id", 3)]},
        {"meta": {"patient_id": 3}},
        {"meta": [{"0010|0020": "3"}]},
        {"hospital_number": "3"},
        {"MedicalRecordNr": 3},
    ],
)
def test_an_entry_that_may_name_a_patient_is_refused_unless_patients_are_named(
    opened: Callable[[Any], DatasetSplits], entry: dict[str, Any]
) -> None:
    items = Items(lambda row: {"image": GREY[row], **entry})
    with pytest.raises(BadInput, match="items with patients, which are not read"):
        opened(LabelledImages(items, LABELS))
    assert opened(LabelledImages(items, LABELS, patients=[f"p{row}" for row in range(COUNT)]))


def test_a_mask_is_refused_where_labels_are_given(opened: Callable[[Any], DatasetSplits]) -> None:
    items = Items(lambda row: {"image": GREY[row], "label_mask": [1, 0]})
    with pytest.raises(BadInput, match="has a mask"):
        opened(LabelledImages(items, LABELS, patients=[f"p{row}" for row in range(COUNT)]))


def brightened(row: int) -> Any:
    factor = 0.9 + 0.1 * np.random.random()
    return GREY[row % 20].astype(np.float32) / 255 * factor, LABELS[row % 20]


@pytest.mark.parametrize("images", [LabelledImages(Items(brightened)), LabelledImages(Items(brightened), LABELS)])
def test_repeated_pictures_are_found_behind_random_transforms_and_given_labels(
    opened: Callable[[Any], DatasetSplits], images: LabelledImages
) -> None:
    with pytest.raises(BadInput, match="holds 40 pictures again"):
        opened(images)


def test_parts_that_share_pictures_are_refused_where_labels_are_given(opened: Callable[[Any], DatasetSplits]) -> None:
    for make in (lambda: GREY, lambda: Items(lambda row: GREY[row])):
        with pytest.raises(BadInput, match='has 60 equal pictures in "train" and "test"'):
            opened({part: LabelledImages(make(), LABELS, ("a", "b")) for part in ("train", "test")})


@pytest.mark.parametrize(
    "images", [GREY // 64, Items(lambda row: GREY[row] / 65535), Items(lambda row: (GREY[row] > 9).astype(np.uint8))]
)
def test_images_that_are_all_nearly_black_are_refused(opened: Callable[[Any], DatasetSplits], images: Any) -> None:
    with pytest.raises(BadInput, match="is nearly black: its brightest value is"):
        opened(LabelledImages(images, LABELS, ("a", "b")))


def test_parts_that_share_pictures_as_uint8_and_float_are_refused(opened: Callable[[Any], DatasetSplits]) -> None:
    parts = {"train": Items(lambda row: GREY[row]), "test": Items(lambda row: GREY[row].astype(np.float32) / 255)}
    with pytest.raises(BadInput, match='has 60 equal pictures in "train" and "test"'):
        opened({part: LabelledImages(images, LABELS, ("a", "b")) for part, images in parts.items()})


@pytest.mark.parametrize(("low", "other", "equal"), [(100.2, 100.8, False), (100.2, 100.2, True), (100, 100.0, True)])
def test_a_picture_of_one_grey_is_known_by_its_value(low: float, other: float, equal: bool) -> None:
    pictures = [np.full((4, 4), low, np.uint8 if low == 100 else np.float32), np.full((4, 4), other, np.float32)]
    first, second = map(compute_picture_digest, pictures)
    assert (first == second) == equal
    assert max(first, second) < GREY_DIGESTS


def test_dark_floats_of_a_named_range_are_accepted(opened: Callable[[Any], DatasetSplits]) -> None:
    images = LabelledImages(Items(lambda row: GREY[row] / 65535), LABELS, value_range=(0, 255 / 65535))
    splits = opened(images)
    np.testing.assert_array_equal(splits.train.images, GREY[splits.train.places])


@pytest.mark.parametrize("patients", [None, [f"p{row // 2}" for row in range(COUNT)]], ids=["unknown", "known"])
def test_pictures_that_a_data_set_repeats_need_patients(
    opened: Callable[[Any], DatasetSplits], patients: list[str] | None
) -> None:
    images = LabelledImages(Items(lambda row: (GREY[row // 2], LABELS[row // 2])), patients=patients)
    with pytest.raises(BadInput, match="holds 30 pictures again") if patients is None else nullcontext():
        train, _, test = opened(images).parts
        assert not set(train.places // 2) & set(test.places // 2)


def test_a_patient_without_a_name_is_unknown(opened: Callable[[Any], DatasetSplits]) -> None:
    empty = [None, "", NAN, " ", np.float32(NAN), pd.NA]
    items = Items(lambda row: {"image": GREY[row], "labels": LABELS[row], "patient": empty[row % len(empty)]})
    assert not any(has_known_patients(part.patients) for part in opened(items).parts)


@pytest.mark.parametrize("images", [GREY, Items(lambda row: GREY[row]), list(GREY)], ids=["array", "items", "list"])
def test_given_labels_may_be_a_table_or_masked(opened: Callable[[Any], DatasetSplits], images: Any) -> None:
    table = pd.DataFrame(LABELS[:, ::-1], columns=["b", "a"]).astype("Int64")
    for labels in (table, np.ma.masked_invalid(LABELS), list(np.ma.masked_invalid(LABELS))):
        for part in opened(LabelledImages(images, labels, ("a", "b"))).parts:
            np.testing.assert_array_equal(part.labels, LABELS[part.places])


def test_a_list_of_items_is_a_data_set(opened: Callable[[Any], DatasetSplits]) -> None:
    splits = opened(LabelledImages([(GREY[row], LABELS[row]) for row in range(COUNT)], class_names=("a", "b")))
    np.testing.assert_array_equal(splits.test.labels, LABELS[splits.test.places])


def test_joined_data_sets_name_their_classes_together(opened: Callable[[Any], DatasetSplits]) -> None:
    halves = [Subset(Items(lambda row: (GREY[row], LABELS[row])), list(rows)) for rows in (range(30), range(30, 60))]
    assert opened(ConcatDataset(halves)).class_names == ("a", "b")


class Unsized(Dataset[Any]):
    """Items of a data set without a length, from which a Subset may choose."""

    dataset = LABELS

    def __getitem__(self, index: int) -> Any:
        return GREY[index], LABELS[index]


def test_a_subset_may_choose_from_a_data_set_without_a_length(opened: Callable[[Any], DatasetSplits]) -> None:
    splits = opened(LabelledImages(Subset(Unsized(), list(range(COUNT))), class_names=("a", "b")))
    np.testing.assert_array_equal(splits.test.labels, LABELS[splits.test.places])


def test_labels_that_change_later_are_refused(opened: Callable[[Any], DatasetSplits]) -> None:
    items = Items(lambda row: (GREY[row], LABELS[row]))
    splits = opened(items)
    items.get = lambda row: (GREY[row], 1 - LABELS[row])
    with pytest.raises(BadInput, match="at first"):
        splits.train.stored.read_pictures(splits.train.places, 1)  # type: ignore[union-attr, arg-type]


def test_items_are_read_once_for_their_labels_and_then_when_they_are_needed(
    opened: Callable[[Any], DatasetSplits],
) -> None:
    items = Items(lambda row: (GREY[row], LABELS[row]))
    splits = opened(items)
    assert items.reads[: COUNT + 1] == [0, *range(COUNT)]
    assert len(items.reads) == COUNT + 1 + 3 * 8  # some again, to see that they stay
    items.reads.clear()
    load_pixels_on_device(splits.train, "cpu")[torch.tensor([3, 1])]
    assert items.reads == splits.train.places[[3, 1]].tolist()


def test_with_labels_given_items_are_read_once_for_their_pictures(opened: Callable[[Any], DatasetSplits]) -> None:
    items = Items(lambda row: GREY[row])
    splits = opened(LabelledImages(items, LABELS, ("a", "b"), patients=[f"p{row // 3}" for row in range(COUNT)]))
    assert len(items.reads) == 1 + COUNT + 3 * 8
    np.testing.assert_array_equal(splits.test.labels, LABELS[splits.test.places])


@pytest.mark.parametrize("labels", [None, LABELS])
def test_an_item_that_draws_with_a_generator_of_its_own_is_refused_by_its_row(
    labels: Any, opened: Callable[[Any], DatasetSplits]
) -> None:
    random = np.random.default_rng()
    items = Items(lambda row: (random.permutation(GREY[row].reshape(-1)).reshape(GREY[row].shape), LABELS[row]))
    with pytest.raises(BadInput, match=r"\[0\]: has another picture when it is read again with the same seed"):
        opened(LabelledImages(items, labels, ("a", "b")))


def test_an_item_that_draws_which_picture_it_is_is_refused_where_labels_are_given(
    opened: Callable[[Any], DatasetSplits],
) -> None:
    def draw(row: int) -> Any:
        other = int(torch.randint(COUNT, ()))
        return GREY[other], LABELS[other]

    with pytest.raises(BadInput, match="An item always has the same labels"):
        opened(LabelledImages(Items(draw), LABELS, ("a", "b")))


def test_classes_are_those_of_the_data_set_inside_a_subset(opened: Callable[[Any], DatasetSplits]) -> None:
    items = Items(lambda row: (GREY[row], LABELS[row]), class_names=("x", "y"))
    assert opened(Subset(items, list(range(10, 50)))).class_names == ("x", "y")


def noisy(row: int) -> tuple[torch.Tensor, NDArray[np.float32]]:
    """An item that draws from all three global generators."""
    value = torch.rand(()) / 3 + random.random() / 3 + np.random.random() / 3
    return value.float() * torch.ones(1, 4, 4), LABELS[row]


def test_training_draws_anew_by_the_seed_and_evaluation_draws_the_same(opened: Callable[[Any], DatasetSplits]) -> None:
    pixels = load_pixels_on_device(opened(Items(noisy)).train, "cpu")
    rows = torch.tensor([0, 1, 0])

    def draws(seed: int) -> list[torch.Tensor]:
        torch.default_generator.manual_seed(seed)
        return [pixels[rows], *pixels.prefetch_batches([rows, rows])]

    first, again, other = draws(1), draws(1), draws(2)
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], other[0])
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[union-attr]
    assert torch.equal(torch.cat(list(pixels.iterate_batches(7))), torch.cat(list(pixels.iterate_batches(9))))
    assert torch.equal(before[0], torch.get_rng_state())
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]  # type: ignore[union-attr]


def test_floats_are_not_rounded_for_the_network(opened: Callable[[Any], DatasetSplits]) -> None:
    value = 100.37 / 255
    items = Items(lambda row: (torch.full((1, 4, 4), value), LABELS[row]))
    splits = opened(LabelledImages(items, patients=[f"p{row}" for row in range(COUNT)]))
    (read,) = load_pixels_on_device(splits.train, "cpu").iterate_batches(COUNT)
    assert read.unique().item() == pytest.approx(100.37)
    assert splits.train.images.dtype == np.uint8
    assert set(np.unique(splits.train.images)) == {100}


def test_a_range_of_values_is_brought_to_black_and_white(opened: Callable[[Any], DatasetSplits]) -> None:
    """TorchXRayVision's data sets go from -1024 to 1024."""
    images = GREY.astype(np.float32) / 255 * 2048 - 1024
    items = Items(lambda row: {"img": images[row][None], "lab": LABELS[row]})
    splits = opened(LabelledImages(items, value_range=(-1024, 1024)))
    np.testing.assert_array_equal(splits.train.images, GREY[splits.train.places])


def test_parts_have_data_sets_of_their_own(opened: Callable[[Any], DatasetSplits]) -> None:
    """Those for training augment, those for tests do not."""
    test = Items(lambda row: (GREY[row + 40], LABELS[row + 40]), 20)
    train = Items(lambda row: (GREY[row], LABELS[row]), 40)
    splits = opened({"train": LabelledImages(train), "test": LabelledImages(test)})
    assert (len(splits.train) + len(splits.validation), len(splits.test)) == (40, 20)
    assert len(splits.validation) in (3, 4)
    np.testing.assert_array_equal(splits.test.images, GREY[40:])
    assert not set(splits.train.patients) & set(splits.test.patients)


def parts(**more: Any) -> dict[str, LabelledImages]:
    items = LabelledImages(Items(lambda row: (GREY[row], LABELS[row])))
    return {"train": items, "test": items, **more}


def of(item: Callable[[int], Any], **more: Any) -> Any:
    return LabelledImages(Items(item), **more)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


def labelled(**more: Any) -> Any:
    return of(lambda row: {"image": GREY[row], "label": LABELS[row], **more})


@dataclass
class Wrapper(Dataset[Any]):
    dataset: Items

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        image, labels = self.dataset[index]
        return image, labels[::-1]


class Endless(Items):
    def __len__(self) -> Any:
        return 2.5


def leaving(row: int) -> Any:
    raise SystemExit(row)


def drawn(row: int) -> Any:
    drawn_row = np.random.randint(COUNT)
    return GREY[drawn_row], LABELS[drawn_row]


SHARED = Items(lambda row: (GREY[row], LABELS[row]))


def failing(row: int) -> Any:
    raise FileNotFoundError(f"{row}.png")


P = "data.name: plugin:stripes"
REFUSED: dict[str, tuple[Any, str]] = {
    "loader": (DataLoader(Items(lambda row: row)), "is a DataLoader"),
    "stream": (Stream(), "is Stream, whose items cannot be read by number"),
    "nothing": (Items(lambda row: row, 0), "holds no image"),
    "no classes": (Items(lambda row: (GREY[row], 1), class_names=()), "Items names no classes"),
    "fails": (of(failing), f"{P}[0]: failed: FileNotFoundError: 0.png"),
    "later": (of(lambda row: failing(row) if row in (7, 9) else (GREY[row], LABELS[row])), "2 of 60 items cannot"),
    "normalised": (of(lambda row: (float_tensor(GREY[row]) * 4 - 2, LABELS[row])), "Leave Normalize out"),
    "wide": (of(lambda row: (GREY[row].astype(np.float32), LABELS[row])), "Floats go from 0, black, to 1, white"),
    "nan": (of(lambda row: (np.full((4, 4), np.nan), LABELS[row])), "has values from nan to nan"),
    "16 bits": (of(lambda row: (GREY[row].astype(np.int32), LABELS[row])), "is int32"),
    "palette": (of(lambda row: (Image.fromarray(GREY[row]).convert("P"), 1)), "is a picture of mode P"),
    "four channels": (of(lambda row: (torch.zeros(4, 6, 5), 1)), "is no image: Tensor of shape"),
    "sizes": (of(lambda row: (GREY[row][: 6 - row % 2], LABELS[row])), f"{P}[1]: is uint8 (5, 5), and {P}[0] is"),
    "string": (of(lambda row: ("a.png", 1)), "is no image: str of shape ()"),
    "four entries": (of(lambda row: (GREY[row], 1, 2, 3)), "has 4 entries"),
    "no image": (
        of(lambda row: {"picture": GREY[row], "label": 1}),
        'without an image; its keys are "picture", "label"',
    ),
    "no labels": (of(lambda row: {"image": GREY[row]}), "has no labels"),
    "words": (of(lambda row: (GREY[row], "Effusion")), "has labels that are no numbers: 'Effusion'"),
    "width": (of(lambda row: (GREY[row], [1, 0, 1])), "has labels of shape (3,), and there are 2 classes"),
    "minus": (of(lambda row: (GREY[row], [1, -1])), "has labels [1.0, -1.0]; they are 1 (present), 0 (absent) or NaN"),
    "class number": (of(lambda row: (GREY[row], 2)), "has the label 2, which is no number of one of 2 classes"),
    "float class": (of(lambda row: (GREY[row], 1.0)), "has the label 1.0, which is no number"),
    "mask": (of(lambda row: (GREY[row], [1, 0], [1, 2])), "has a mask that is not 1"),
    "some patients": (
        of(lambda row: {"image": GREY[row], "label": LABELS[row], **({"patient": row} if row else {})}),
        "1 of 60 items name no patient",
    ),
    "mask of an index": (of(lambda row: (GREY[row], LABELS[row], row)), "has a mask that is not 1"),
    "mask of a name": (of(lambda row: (GREY[row], 1, f"p{row}")), "has a mask that is not 1"),
    "mask of other width": (labelled(label_mask=[1]), "has a mask that is not 1"),
    "bare mask": (labelled(mask=[1, 0, 1]), "has a mask that is not 1"),
    "other mask": (labelled(annotated=[1, 0]), 'has "annotated" beside "label"'),
    "two labels": (labelled(target=1), 'has "label", "target", which all name labels'),
    "two images": (labelled(img=GREY[0]), 'with the images "image", "img"'),
    "like a patient": (labelled(patient_nr=3), 'has "patient_nr", which may name its patient'),
    "two patients": (labelled(patient=3, pid=4), 'has "patient", "pid", which all name patient'),
    "patient list": (labelled(patient=["p"]), "names its patient by list"),
    "patients beside labels": (
        of(lambda row: {"image": GREY[row], "patient": row}, labels=LABELS),
        "has items with patients, which are not read where labels are given",
    ),
    "name beside labels": (
        of(lambda row: (GREY[row], 1, f"p{row}"), labels=LABELS),
        "has a mask, or a third entry, which is not read where labels are given",
    ),
    "repeated items": (Subset(SHARED, [*range(COUNT), 3, 3]), "holds 2 items again, and names no patients"),
    "repeated in a wrapper": (
        LabelledImages(ConcatDataset([Wrapper(SHARED), SHARED]), class_names=("a", "b")),
        "holds 60 items again",
    ),
    "labels of another name": (
        of(lambda row: {"image": GREY[row], "disease": 1}),
        'has no labels among its keys, "image", "disease"',
    ),
    "half of the patients": (
        of(lambda row: {"image": GREY[row], "label": LABELS[row], "patient": row if row % 2 else NAN}),
        "30 of 60 items name no patient",
    ),
    "table": (
        of(lambda row: GREY[row], labels=pd.DataFrame(LABELS, columns=["a", "c"])),
        'without exactly one column for "b"',
    ),
    "drawn labels": (of(drawn), "at first. An item always has the same labels"),
    "system exit": (of(leaving), "failed: SystemExit: 0"),
    "length": (Endless(lambda row: row), "has no length: TypeError"),
    "list": ([(GREY[row], 1) for row in range(COUNT)], "list names no classes"),
    "wrapper": (Wrapper(SHARED), "Wrapper names no classes"),
    "joined": (
        LabelledImages(ConcatDataset([SHARED, Items(SHARED.get, class_names=("b", "a"))]), class_names=("a", "b")),
        'joins data sets of different classes: "a", "b"; "b", "a"',
    ),
    "part items": (
        {
            "train": LabelledImages(Subset(SHARED, list(range(40)))),
            "test": LabelledImages(Subset(Wrapper(SHARED), list(range(39, 60))), class_names=("a", "b")),
        },
        'has 1 of the items of "train" in "test" too',
    ),
    "part pictures": (
        {name: of(lambda row: (GREY[row], LABELS[row])) for name in ("train", "test")},
        'has 60 equal pictures in "train" and "test"',
    ),
    "table index": (
        of(lambda row: GREY[row], labels=pd.DataFrame(LABELS, columns=["a", "b"]).sample(frac=1, random_state=0)),
        "has labels in a table whose index is not 0, 1, 2, ...",
    ),
    "patient index": (
        of(lambda row: GREY[row], labels=LABELS, patients=pd.Series(map(str, range(COUNT)), range(COUNT, 0, -1))),
        "patients must be in the order of the images",
    ),
    "range": (of(lambda row: GREY[row], value_range=(1, 0)), "goes from 1 to 0"),
    "labels": (of(lambda row: GREY[row], labels=LABELS[:5]), "labels must have the shape (60, 2)"),
    "part names": ({"train": parts()["train"], "exam": parts()["test"]}, 'has the parts "train", "exam"'),
    "part classes": (parts(test=of(lambda row: (GREY[row], 1), class_names=("b", "a"))), "parts of different classes"),
    "part sizes": (parts(test=of(lambda row: (COLOR[row], LABELS[row]))), "parts of different classes or sizes"),
    "part patients": (
        parts(
            train=of(lambda row: GREY[row], labels=LABELS, patients=["x"] * 60),
            test=of(lambda row: 255 - GREY[row], labels=LABELS, patients=["x"] * 60),
        ),
        "1 patient in both train and test",
    ),
    "part fails": (parts(train=of(failing), test=of(failing)), f'{P}["train"][0]: failed'),
}


@pytest.mark.parametrize(("images", "problem"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_used_is_named(opened: Callable[[Any], DatasetSplits], images: Any, problem: str) -> None:
    with pytest.raises(BadInput) as refused:
        opened(images)
    assert problem in str(refused.value)


def test_faults_of_all_items_are_listed_together(opened: Callable[[Any], DatasetSplits]) -> None:
    with pytest.raises(BadInput) as refused:
        opened(of(lambda row: (GREY[row], [1, 3]) if row % 20 == 5 else (GREY[row], LABELS[row])))
    assert [fault.where for fault in refused.value.faults] == [f"{P}[5]", f"{P}[25]", f"{P}[45]", P]


def test_images_are_rows_that_a_network_reads(opened: Callable[[Any], DatasetSplits]) -> None:
    splits = opened(Items(lambda row: (GREY[row], LABELS[row])))
    assert isinstance(splits.train.stored, TorchDatasetPictures)
    assert splits.train.stored is splits.test.stored
