"""Torch data sets as a source: the values that their items say, read when needed, random transforms by the seed."""

import random
from collections import namedtuple
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import monai.data
import monai.transforms
import numpy as np
import pandas as pd
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset
from torchvision.transforms import v2

from polyclinic.common.errors import BadInput
from polyclinic.data import LabelledImages
from polyclinic.data.base.image_set import (
    MIN_HASH_DIGEST,
    DatasetSplits,
    are_all_patients_known,
    compute_picture_digest,
)
from polyclinic.data.base.spec import PluginDatasetSpec
from polyclinic.data.images.pixels import load_pixels_on_device
from polyclinic.data.images.store import DecodedImageStore
from polyclinic.data.load import load_dataset
from polyclinic.data.sources import plugin
from polyclinic.data.sources.item_notes import NOT_REPRODUCIBLE_NOTE
from polyclinic.data.sources.torch_dataset import TorchDatasetPictures

NAN = float("nan")
COUNT = 60
RANDOM = np.random.default_rng(0)
GREY = RANDOM.integers(0, 256, (COUNT, 6, 5), dtype=np.uint8)
COLOR = RANDOM.integers(0, 256, (COUNT, 6, 5, 3), dtype=np.uint8)
LABELS = np.where(RANDOM.random((COUNT, 2)) < 0.2, np.nan, RANDOM.random((COUNT, 2)) < 0.5).astype(np.float32)
PAIRS = [f"p{row // 2}" for row in range(COUNT)]


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


def plain(row: int) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    return GREY[row], LABELS[row]


def of(item: Callable[[int], Any], names: tuple[str, ...] = ("a", "b"), **more: Any) -> LabelledImages:
    return LabelledImages(Items(item, COUNT, names), **more)


def entries(names: tuple[str, ...] = ("a", "b"), given: Mapping[str, Any] | None = None, **more: Any) -> LabelledImages:
    """Items that are dictionaries of an image, labels and these entries, of which a function is one of the row."""

    def item(row: int) -> dict[str, Any]:
        own = {key: value(row) if callable(value) else value for key, value in more.items()}
        return {"image": GREY[row], "label": LABELS[row], **own}

    return of(item, names, **(given or {}))


def check_labels(splits: DatasetSplits, expected: NDArray[Any] = LABELS) -> None:
    for part in splits.parts:
        np.testing.assert_array_equal(part.labels, expected[part.places])


Open = Callable[[Any], DatasetSplits]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Open:
    def open_data(images: Any, *store: DecodedImageStore) -> DatasetSplits:
        data = images if isinstance(images, LabelledImages | Mapping) else LabelledImages(images)
        monkeypatch.setattr(plugin, "load_plugin_entry_point", lambda group, name: lambda folder, options: data)
        return load_dataset(PluginDatasetSpec(kind="plugin", name="stripes"), tmp_path, *store)

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
    opened: Open, images: NDArray[np.uint8], form: Callable[[NDArray[np.uint8]], Any]
) -> None:
    arrays = opened(LabelledImages(images, LABELS, ("a", "b")))
    lazy = opened(Items(lambda row: (form(images[row]), LABELS[row])))
    for part, same in zip(arrays.parts, lazy.parts, strict=True):
        np.testing.assert_array_equal(part.images, same.images)
        np.testing.assert_array_equal(part.labels, same.labels)
        (pixels,), (read,) = (load_pixels_on_device(data, "cpu").iterate_batches(COUNT) for data in (part, same))
        assert torch.equal(pixels.float(), read.float())
        assert pixels.stride() == read.stride()
    assert isinstance(lazy.train.stored, TorchDatasetPictures)
    assert lazy.train.stored is lazy.test.stored


class Unsized(Dataset[Any]):
    """Items of a data set without a length, from which a Subset may choose."""

    dataset = LABELS

    def __getitem__(self, index: int) -> Any:
        return plain(index)


def with_labels(form: Callable[[NDArray[np.float32]], tuple[Any, ...]]) -> LabelledImages:
    return of(lambda row: (GREY[row], *form(LABELS[row])))


FIRST_CLASS = np.eye(2, dtype=np.float32)[(LABELS[:, 0] == 1).astype(int)]
"""Labels of items that show one class."""
MASKED = np.where(np.isnan(LABELS), np.nan, [1, 0])
Triple = namedtuple("Triple", "image labels label_mask")
SIZES = {"age": 50, "bbox": [1, 2, 3, 4], "file": "a.png", "lung_mask": GREY[0] > 9, "weight": 70.5}
TEXTS = ("label_path", "mask_path", "labeler", "annotator", "labeled_by", "label_file")
META = {"filename_or_obj": "a.png", "spatial_shape": np.array([12, 12]), "affine": np.eye(4), "0008|0060": "DX"}
META |= {"spacing": [1.0, 1.0], "pixdim": (0.5, 0.5), "original_size": (1, 1), "scanlines": 1, "w": [1, 0]}
MONAI = {"image_meta_dict": META, "spacing": [1.0, 1.0], "original_size": (12, 12), "scanlines": 512, "bars": 512}
MONAI |= {"invalid_pixels": 0, "valid": True, "hangar_bars_count": 3, "patient": str}
MONAI["image_transforms"] = [
    {"class": "RandFlipd", "id": 1, "orig_size": (12, 12), "do_transforms": True, "extra_info": {}}
]
"""As MONAI's transforms leave them: one dictionary of the file, one entry a transform."""
LABELLED: dict[str, tuple[Any, NDArray[Any]]] = {
    "nan": (with_labels(lambda row: (row,)), LABELS),
    "list": (with_labels(lambda row: (row.tolist(),)), LABELS),
    "double tensor": (with_labels(lambda row: (torch.tensor(row).double(),)), LABELS),
    "named tuple with mask": (
        of(lambda row: Triple(GREY[row], np.nan_to_num(LABELS[row]), torch.tensor(1.0 - np.isnan(LABELS[row])))),
        LABELS,
    ),
    "class": (with_labels(lambda row: (int(row[0] == 1),)), FIRST_CLASS),
    "class as float": (with_labels(lambda row: (float(row[0] == 1),)), FIRST_CLASS),
    "class by name": (with_labels(lambda row: ("ab"[int(row[0] == 1)],)), FIRST_CLASS),
    "classes by name": (with_labels(lambda row: (["ab"[int(row[0] == 1)]],)), FIRST_CLASS),
    "no class by name": (with_labels(lambda row: (["a", "b"],)), np.ones_like(LABELS)),
    "values by name": (with_labels(lambda row: (dict(zip("ab", row.tolist(), strict=True)),)), LABELS),
    "values of some by name": (with_labels(lambda row: ({"a": 1, "b": None},)), np.array([[1, NAN]] * COUNT)),
    "class and mask": (
        of(lambda row: {"image": GREY[row], "label": int(LABELS[row, 0] == 1), "label_mask": [1, 0]}),
        np.where([1, 0], FIRST_CLASS, np.nan),
    ),
    "mask of the classes": (entries(label=[1, 0], mask=lambda row: ~np.isnan(LABELS[row])), MASKED),
    "mask of the pixels": (entries(mask=GREY[0] > 9), LABELS),
    "one key a class": (of(lambda row: {"image": GREY[row], "a": LABELS[row, 0], "b": LABELS[row, 1]}), LABELS),
    "a third entry": (with_labels(lambda row: (row, [0, 1])), LABELS),
    "an index": (of(lambda row: (*plain(row), row)), LABELS),
    "a path and more": (of(lambda row: (*plain(row), f"p{row}", {"sex": 1}, None)), LABELS),
    "one row of labels": (with_labels(lambda row: (row[None],)), LABELS),
    "a function of the item": (
        LabelledImages(Items(lambda row: {"scan": GREY[row], "y": LABELS[row]}), item=lambda x: (x["scan"], x["y"])),
        LABELS,
    ),
    "masked array": (with_labels(lambda row: (np.ma.masked_invalid(row),)), LABELS),
    "half with gradient": (
        with_labels(lambda row: (torch.tensor(row, dtype=torch.bfloat16, requires_grad=True),)),
        LABELS,
    ),
    "row of a table": (with_labels(lambda row: (pd.Series(row[::-1], index=["b", "a"]),)), LABELS),
    "mask in a row": (entries(label=[1, 0], label_mask=lambda row: ~np.isnan(LABELS[row])[None]), MASKED),
    "mask in a column": (
        entries(label=[1, 0], label_mask=lambda row: torch.tensor(~np.isnan(LABELS[row]))[:, None]),
        MASKED,
    ),
    "unread entries of other sizes": (entries(**SIZES), LABELS),
    **{key: (entries(**{key: "R{}.png".format, "patient": str}), LABELS) for key in TEXTS},
    "metadata in dictionaries": (entries(("lines", "bars"), **MONAI), LABELS),
    "a list of items": (LabelledImages([plain(row) for row in range(COUNT)], class_names=("a", "b")), LABELS),
    "a subset of what has no length": (
        LabelledImages(Subset(Unsized(), list(range(COUNT))), class_names=("a", "b")),
        LABELS,
    ),
}


@pytest.mark.parametrize(("images", "expected"), LABELLED.values(), ids=LABELLED)
def test_labels_are_those_of_the_items(opened: Open, images: Any, expected: NDArray[Any]) -> None:
    check_labels(opened(images), expected)


@pytest.mark.parametrize("key", ["PatientID", "patient id", "subject_id", "pid", "Patients"])
def test_keys_count_without_case_spaces_and_signs(opened: Open, key: str) -> None:
    items = Items(lambda row: {"Image": GREY[row], "Labels": LABELS[row], key: np.float64(row // 2), "PatientSex": "F"})
    for part in opened(items).parts:
        assert part.patients.tolist() == [str(row // 2) for row in part.places]


def test_a_dictionary_names_image_labels_mask_and_patient(opened: Open) -> None:
    def item(row: int) -> dict[str, Any]:
        labels = {"lab": np.nan_to_num(LABELS[row]), "label_mask": ~np.isnan(LABELS[row])}
        return {"img": float_tensor(GREY[row]), **labels, "patient_id": row // 2, "mask": GREY[row] > 9}

    splits = opened(Items(item))
    check_labels(splits)
    for part in splits.parts:
        assert part.patients.tolist() == [str(row // 2) for row in part.places]


def test_one_number_a_class_of_two_and_a_yes_or_no_of_one(opened: Open) -> None:
    splits = opened(of(lambda row: (GREY[row], row % 2), ("sick",)))
    assert splits.train.labels[:, 0].tolist() == [row % 2 for row in splits.train.places]


OTHER_ENTRIES: dict[str, Any] = {
    "valid": torch.tensor([1, 0]),
    "weight": [0.5, 1.0],
    "box_labels": [[0, 1]],
    "annotated": {"lines": 1, "bars": 0},
    "finding": "Lines|other",
    "meta": {"label_mask": [1, 0], "patient_id": 3},
    "lines_present": True,
    "hospital_number": "3",
}


@pytest.mark.parametrize(("key", "entry"), OTHER_ENTRIES.items())
def test_other_entries_are_not_read_and_named(opened: Open, key: str, entry: Any) -> None:
    splits = opened(entries(("lines", "bars"), **{key: entry}))
    check_labels(splits)
    assert not any(are_all_patients_known(part.patients) for part in splits.parts)
    for part in splits.parts:
        (note,) = part.notes
        assert note.startswith(f'"{key}" of the items is not read. To use one: pc.LabelledImages(dataset, patients=')


def test_entries_of_a_tuple_after_the_labels_are_named(opened: Open) -> None:
    splits = opened(of(lambda row: (*plain(row), row, "a.png")))
    assert [note[:44] for note in splits.train.notes] == ['"entry 3", "entry 4" of the items are not re']


def test_what_is_not_read_is_named_once_for_all_parts(opened: Open) -> None:
    first, second = (
        Items(lambda row, start=start: {"image": GREY[start + row], "label": LABELS[row], "lesion": "x"}, 30)
        for start in (0, 30)
    )
    splits = opened({"train": LabelledImages(first), "test": LabelledImages(second)})
    assert [len(part.notes) for part in splits.parts] == [1, 1, 1]


def test_an_entry_that_the_user_gives_by_an_argument_is_not_named(opened: Open) -> None:
    lesions = [f"L{row // 2}" for row in range(COUNT)]
    images = entries(lesion=lambda row: lesions[row], center="a", given={"patients": lesions})
    (note,) = opened(images).train.notes
    assert note.startswith('"center" of the items is not read. To use one: pc.LabelledImages(dataset, sources=[...]')
    centers = entries(lesion=lambda row: lesions[row], center="a", given={"patients": lesions, "sources": ["a"] * 60})
    assert opened(centers).train.notes == ()


def test_the_remedies_for_what_is_not_read_take_it(opened: Open) -> None:
    def as_known_keys(x: dict[str, Any]) -> dict[str, Any]:
        return {"image": x["image"], "label": x["label"], "patient": x["lesion"]}

    items = Items(lambda row: {"image": GREY[row], "label": LABELS[row], "lesion": f"L{row // 2}"})
    splits = opened(LabelledImages(items, item=as_known_keys))
    assert splits.train.notes == ()
    assert splits.train.patients.tolist() == [f"L{row // 2}" for row in splits.train.places]


def test_a_cache_of_a_part_of_the_items_is_named(opened: Open) -> None:
    rows = [{"image": GREY[row], "label": row % 2} for row in range(COUNT)]
    cached = monai.data.SmartCacheDataset(rows, lambda row: row, cache_num=40, progress=False)
    splits = opened(LabelledImages(cached, class_names=("a", "b")))
    assert sum(map(len, splits.parts)) == 40
    (note,) = splits.train.notes
    assert note.startswith("SmartCacheDataset: 40 of its 60 items are used")
    whole = monai.data.CacheDataset(rows, lambda row: row, progress=False)
    whole_splits = opened(LabelledImages(whole, class_names=("a", "b")))
    assert whole_splits.train.notes == ()
    assert sum(map(len, whole_splits.parts)) == COUNT


def test_patients_of_the_items_count_where_labels_are_given(opened: Open) -> None:
    items = Items(lambda row: {"image": GREY[row], "patient": row // 2})
    for part in opened(LabelledImages(items, LABELS)).parts:
        assert part.patients.tolist() == [str(row // 2) for row in part.places]


@pytest.mark.parametrize("words", [("train", "val", "test"), ("Training", "valid", "TEST")])
def test_an_entry_split_divides_the_items(opened: Open, words: tuple[str, str, str]) -> None:
    splits = opened(entries(split=lambda row: words[0 if row < 40 else 1 if row < 50 else 2]))
    assert [sorted(part.places.tolist()) for part in splits.parts] == [
        list(range(40)),
        list(range(40, 50)),
        list(range(50, 60)),
    ]


@pytest.mark.parametrize("name", ["val", "valid", "validation", "Val"])
def test_a_validation_part_has_any_of_its_names(opened: Open, name: str) -> None:
    third = {part: Items(lambda row, first=first: plain(first + row), 20) for part, first in (("train", 0), (name, 20))}
    splits = opened({part: LabelledImages(items) for part, items in (*third.items(), ("test", last_third()))})
    np.testing.assert_array_equal(splits.validation.images, GREY[20:40])
    given_parts = ["train"] * 20 + [name] * 20 + ["test"] * 20
    np.testing.assert_array_equal(opened(given(GREY, parts=given_parts)).validation.images, GREY[20:40])


def last_third() -> Items:
    return Items(lambda row: plain(40 + row), 20)


# ---------------------------------------------------------------------- names of the classes


class HuggingFace(Items):
    features: ClassVar = {"image": None, "label": SimpleNamespace(names=["cat", "dog"])}
    class_names = ()


class MedMnist(Items):
    info: ClassVar = {"label": {"1": "dog", "0": "cat"}, "task": "binary-class"}
    class_names = ()


def numbered(row: int) -> tuple[NDArray[np.uint8], int]:
    return GREY[row], row % 2


NAMED: dict[str, tuple[Any, tuple[str, ...]]] = {
    "Hugging Face": (HuggingFace(numbered, COUNT, ()), ("cat", "dog")),
    "MedMNIST": (MedMnist(lambda row: (GREY[row], np.array([row % 2])), COUNT, ()), ("cat", "dog")),
    "texts": (Items(lambda row: (GREY[row], ("dog", "cat")[row % 2]), COUNT, ()), ("cat", "dog")),
    "dictionaries": (Items(lambda row: (GREY[row], {"dog": 1, "cat": 0}), COUNT, ()), ("cat", "dog")),
    "numbers": (Items(numbered, COUNT, ()), ("0", "1")),
    "vectors": (Items(plain, COUNT, ()), ("0", "1")),
    "table": (LabelledImages(GREY, pd.DataFrame(LABELS, columns=["cat", "dog"])), ("cat", "dog")),
    "vector of numbers": (LabelledImages(GREY, np.arange(COUNT) % 3), ("0", "1", "2")),
}


@pytest.mark.parametrize(("images", "names"), NAMED.values(), ids=NAMED)
def test_classes_have_the_names_that_the_data_hold(opened: Open, images: Any, names: tuple[str, ...]) -> None:
    assert opened(images).class_names == names


def test_a_vector_of_class_numbers_has_one_class_an_image(opened: Open) -> None:
    for images in (GREY, Items(lambda row: GREY[row])):
        splits = opened(LabelledImages(images, np.arange(COUNT) % 3, ("a", "b", "c")))
        check_labels(splits, np.eye(3)[np.arange(COUNT) % 3])
    with pytest.raises(BadInput, match="the label 2, which is no number of one of 2 classes"):
        opened(LabelledImages(GREY, np.arange(COUNT) % 3, ("a", "b")))


# ---------------------------------------------------------------------- pictures


PICTURE_MODES = {
    "P": Image.fromarray(COLOR[0]).quantize(256).convert("RGB").quantize(256),
    "CMYK": Image.fromarray(COLOR[0]).convert("CMYK"),
    "1": Image.fromarray(GREY[0]).convert("1"),
}


@pytest.mark.parametrize("picture", PICTURE_MODES.values(), ids=PICTURE_MODES)
def test_pictures_without_transparency_convert_by_themselves(opened: Open, picture: Image.Image) -> None:
    splits = opened(of(lambda row: (picture, LABELS[row]), patients=[*"abc"] * 20, parts=[*THREE_PARTS] * 20))
    mode = "L" if picture.mode == "1" else "RGB"
    np.testing.assert_array_equal(splits.train.images[0], np.asarray(picture.convert(mode)))


THREE_PARTS = ("train", "validation", "test")
DEEP = GREY.astype(np.uint16) * 257
"""The same pictures with 16 bits."""


@pytest.mark.parametrize(
    "form",
    [
        lambda row: Image.fromarray(DEEP[row]),
        lambda row: DEEP[row],
        lambda row: torch.tensor(DEEP[row].tolist()),
    ],
)
def test_pictures_of_16_bits_need_the_values_of_black_and_white(opened: Open, form: Callable[[int], Any]) -> None:
    item = Items(lambda row: (form(row), LABELS[row]))
    splits = opened(LabelledImages(item, value_range=(0, 65535)))
    np.testing.assert_array_equal(splits.train.images, GREY[splits.train.places])
    with pytest.raises(BadInput, match=r"which values are black and white is unknown.*value_range="):
        opened(item)


@pytest.mark.parametrize("images", [GREY / 255, GREY.astype(np.float32) / 255], ids=["double", "float"])
def test_an_array_of_floats_is_taken_as_pictures(opened: Open, images: NDArray[Any]) -> None:
    splits = opened(given(images))
    np.testing.assert_array_equal(splits.train.images, GREY[splits.train.places])


def test_a_range_of_values_applies_to_8_bits_too(opened: Open) -> None:
    dim = GREY // 25  # 0 to 10
    for images in (dim, Items(lambda row: (dim[row], LABELS[row]))):
        splits = opened(given(images, value_range=(0, 10)))
        assert splits.train.images.max() == 255


# ---------------------------------------------------------------------- random transforms

TRANSFORM = monai.transforms.Compose(
    [
        monai.transforms.RandRotate(0.4, prob=0.9),
        monai.transforms.RandFlip(prob=0.5),
        monai.transforms.RandZoom(prob=0.5),
    ]
)
GENERATORS: dict[str, Callable[[], Callable[[NDArray[np.uint8]], Any]]] = {
    "MONAI": lambda: monai.transforms.Compose(
        [monai.transforms.RandRotate(0.4, prob=0.9), monai.transforms.RandGaussianNoise(prob=0.9, std=0.01)]
    ),
    "a global transform": lambda: lambda image: TRANSFORM(image),
    "torchvision": lambda: v2.RandomAffine(40, scale=(0.5, 1)),
    "numpy": lambda: partial(shift_rows, np.random.default_rng(3)),
    "legacy numpy": lambda: partial(shift_rows, np.random.RandomState(3)),
    "random": lambda: partial(brighten, random.Random(3)),
    "torch": lambda: partial(add_noise, torch.Generator().manual_seed(4)),
}


def shift_rows(generator: Any, image: Any) -> Any:
    return image * generator.uniform(0.5, 1)


def brighten(generator: random.Random, image: Any) -> Any:
    return image * (1 - generator.random() / 4)


def add_noise(generator: torch.Generator, image: Any) -> Any:
    return torch.as_tensor(image) * torch.rand((), generator=generator)


@dataclass
class Augmented(Items):
    transform: Any = None

    def __getitem__(self, index: int) -> Any:
        image = torch.from_numpy(GREY[index][None].astype(np.float32) / 255)
        return self.apply(image), LABELS[index]

    def apply(self, image: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.transform(image)).clamp(0, 1)


@pytest.mark.parametrize("make", GENERATORS.values(), ids=GENERATORS)
def test_generators_of_transforms_are_seeded_for_each_item(opened: Open, make: Callable[[], Any]) -> None:
    splits = opened(LabelledImages(Augmented(plain, transform=make()), patients=PAIRS))
    stored = splits.train.stored
    assert isinstance(stored, TorchDatasetPictures)
    rows = np.arange(12)
    first, again, other = (stored.read_pictures(rows, seed) for seed in (5, 5, 6))
    backwards = stored.read_pictures(rows[::-1], 5)[::-1]
    assert stored.reproducible
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(first, backwards)  # an item depends on the seed alone, not on those read before
    assert not np.array_equal(first, other)


def test_a_generator_out_of_reach_is_named_and_the_run_goes_on(opened: Any) -> None:
    splits = opened(LabelledImages(Items(shuffled), patients=PAIRS))
    for part in splits.parts:
        assert not part.is_reproducible
        assert part.notes[0] == NOT_REPRODUCIBLE_NOTE
        assert len(part.notes) == 2  # the other is that test pictures are augmented
    assert opened(LabelledImages(Items(noisy), patients=PAIRS)).train.is_reproducible


def test_a_transform_that_leaves_the_range_now_and_then_is_cut_to_it(opened: Open) -> None:
    def item(row: int) -> Any:
        return float_tensor(GREY[row]) * (1.5 if row in (3, 17) else 1), LABELS[row]

    splits = opened(of(item))
    assert splits.train.images.max() <= 255
    (read,) = load_pixels_on_device(splits.train, "cpu").iterate_batches(COUNT)
    assert read.max() <= 255


@pytest.mark.parametrize(("low", "other", "equal"), [(100.2, 100.8, False), (100.2, 100.2, True), (100, 100.0, True)])
def test_a_picture_of_one_grey_is_known_by_its_value(low: float, other: float, equal: bool) -> None:
    pictures = [np.full((4, 4), low, np.uint8 if low == 100 else np.float32), np.full((4, 4), other, np.float32)]
    first, second = map(compute_picture_digest, pictures)
    assert (first == second) == equal
    assert max(first, second) < MIN_HASH_DIGEST


DARK = of(lambda row: GREY[row] / 65535, labels=LABELS, value_range=(0, 255 / 65535))
WIDE = GREY.astype(np.float32) / 255 * 2048 - 1024
"""As TorchXRayVision's data sets, which go from -1024 to 1024."""


@pytest.mark.parametrize(
    "images", [DARK, of(lambda row: {"img": WIDE[row][None], "lab": LABELS[row]}, value_range=(-1024, 1024))]
)
def test_a_range_of_values_is_brought_to_black_and_white(opened: Open, images: LabelledImages) -> None:
    splits = opened(images)
    np.testing.assert_array_equal(splits.train.images, GREY[splits.train.places])


@pytest.mark.parametrize("patients", [None, PAIRS], ids=["unknown", "known"])
def test_pictures_that_a_data_set_repeats_need_patients(opened: Open, patients: list[str] | None) -> None:
    images = of(lambda row: plain(row // 2), patients=patients)
    with pytest.raises(BadInput, match="holds 30 pictures again") if patients is None else nullcontext():
        train, _, test = opened(images).parts
        assert not set(train.places // 2) & set(test.places // 2)


def test_a_patient_without_a_name_is_unknown(opened: Open) -> None:
    empty = [None, "", NAN, " ", np.float32(NAN), pd.NA]
    splits = opened(entries(patient=lambda row: empty[row % len(empty)]))
    assert not any(are_all_patients_known(part.patients) for part in splits.parts)


@pytest.mark.parametrize("images", [GREY, Items(lambda row: GREY[row]), list(GREY)], ids=["array", "items", "list"])
def test_given_labels_may_be_a_table_or_masked(opened: Open, images: Any) -> None:
    table = pd.DataFrame(LABELS[:, ::-1], columns=["b", "a"]).astype("Int64")
    for labels in (table, np.ma.masked_invalid(LABELS), list(np.ma.masked_invalid(LABELS))):
        check_labels(opened(LabelledImages(images, labels, ("a", "b"))))


def test_classes_are_those_of_the_data_sets_inside_subsets_and_joined_ones(opened: Open) -> None:
    halves = [Subset(Items(plain, class_names=("x", "y")), list(rows)) for rows in (range(30), range(30, 60))]
    assert opened(halves[0]).class_names == opened(ConcatDataset(halves)).class_names == ("x", "y")


def test_labels_that_change_later_are_refused(opened: Open) -> None:
    items = Items(plain)
    splits = opened(items)
    items.get = lambda row: (GREY[row], 1 - LABELS[row])
    with pytest.raises(BadInput, match="at first"):
        splits.train.stored.read_pictures(splits.train.places, 1)  # type: ignore[union-attr, arg-type]


def test_items_are_read_once_for_their_labels_and_then_when_they_are_needed(opened: Open) -> None:
    items, pictures = Items(plain), Items(lambda row: GREY[row])
    splits = opened(items)
    assert items.reads[: COUNT + 1] == [0, *range(COUNT)]
    assert len(items.reads) == COUNT + 1 + 3 * 8  # some again, to see that they stay
    items.reads.clear()
    load_pixels_on_device(splits.train, "cpu")[torch.tensor([3, 1])]
    assert items.reads == splits.train.places[[3, 1]].tolist()
    check_labels(opened(LabelledImages(pictures, LABELS, ("a", "b"), patients=PAIRS)))
    assert len(pictures.reads) == 1 + COUNT + 3 * 8


def noisy(row: int) -> tuple[torch.Tensor, NDArray[np.float32]]:
    """An item that draws from all three global generators."""
    value = torch.rand(()) / 3 + random.random() / 3 + np.random.random() / 3
    return value.float() * torch.ones(1, 4, 4), LABELS[row]


@pytest.mark.parametrize(
    "label",
    [
        lambda row: row % 3,
        lambda row: ("left", "right")[row % 2],
        lambda row: [["left"], ["left", "right"]][row % 2],
        lambda row: {"left": 1, "right": row % 2},
        lambda row: LABELS[row],
    ],
    ids=["number", "name", "names", "dictionary", "vector"],
)
def test_each_item_is_read_once_at_the_start_if_its_classes_have_no_names(
    opened: Open, label: Callable[[int], Any]
) -> None:
    items = Items(lambda row: (GREY[row], label(row)), class_names=())
    opened(items)
    assert items.reads[: COUNT + 1] == [0, *range(COUNT)]
    assert len(items.reads) == COUNT + 1 + 3 * 8


def test_training_draws_anew_by_the_seed_and_evaluation_draws_the_same(opened: Open) -> None:
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


def third(get: Callable[[int], Any], start: int) -> LabelledImages:
    return LabelledImages(Items(lambda row: get(start + row), 20), patients=PAIRS[start : start + 20])


def test_augmented_validation_and_test_pictures_are_named(opened: Open) -> None:
    whole = opened(Items(noisy))
    train = LabelledImages(Items(noisy, 40), patients=[f"a{row}" for row in range(40)])
    train_and_test = opened({"train": train, "test": third(plain_floats, 40)})
    starts = [part.notes[0].partition(" are ")[0] for splits in (whole, train_and_test) for part in splits.parts]
    assert starts == [*["Validation and test pictures"] * 3, *["Validation pictures"] * 3]
    assert [len(part.notes) for part in (*whole.parts, *train_and_test.parts)] == [1] * 6
    assert "the test figures" in whole.test.notes[0]
    assert "the test figures" not in train_and_test.test.notes[0]


def test_plain_validation_and_test_pictures_have_no_note(opened: Open) -> None:
    thirds = {"train": third(noisy, 0), "validation": third(plain_floats, 20), "test": third(plain_floats, 40)}
    assert opened(thirds).test.notes == ()
    assert opened(Items(plain)).test.notes == ()


def plain_floats(row: int) -> tuple[torch.Tensor, NDArray[np.float32]]:
    return torch.from_numpy(GREY[row, None, :4, :4].astype(np.float32) / 255), LABELS[row]


NUMBERED = ("AbdomenCT", "CXR", "Hand")
"""Classes in the form of MONAI's MedNISTDataset: a number, and its name beside it."""


def medical_mnist(row: int) -> dict[str, Any]:
    return {"image": GREY[row], "label": row % 3, "class_name": NUMBERED[row % 3]}


@pytest.mark.parametrize("key", ["class_name", "class_names", "label_name"])
def test_a_name_beside_a_class_number_names_the_class(opened: Open, key: str) -> None:
    splits = opened(Items(lambda row: {"image": GREY[row], "label": row % 3, key: NUMBERED[row % 3]}, class_names=()))
    assert splits.class_names == NUMBERED
    check_labels(splits, np.eye(3, dtype=np.float32)[np.arange(COUNT) % 3])
    assert splits.train.notes == ()


OTHER_NAMES: dict[str, Callable[[int], Any]] = {
    "two names of a number": lambda row: medical_mnist(row) | {"class_name": f"name {row % 6}"},
    "one name of two numbers": lambda row: medical_mnist(row) | {"class_name": "diagnosis"},
    "not all items": lambda row: medical_mnist(row) | {"class_name": "CXR" if row else None},
    "another key": lambda row: {"image": GREY[row], "label": row % 3, "name": NUMBERED[row % 3]},
}


@pytest.mark.parametrize("get", OTHER_NAMES.values(), ids=OTHER_NAMES)
def test_names_that_are_not_one_for_each_number_do_not_count(opened: Open, get: Callable[[int], Any]) -> None:
    assert opened(Items(get, class_names=())).class_names == ("0", "1", "2")


def test_a_number_that_no_item_has_is_the_name_of_its_class(opened: Open) -> None:
    def without_chests(row: int) -> dict[str, Any]:
        return {**medical_mnist(row % 2 * 2), "image": GREY[row]}

    assert opened(Items(without_chests, class_names=())).class_names == ("AbdomenCT", "1", "Hand")


def test_given_class_names_come_before_those_beside_the_numbers(opened: Open) -> None:
    assert opened(Items(medical_mnist, class_names=("x", "y", "z"))).class_names == ("x", "y", "z")


def test_parts_that_number_the_classes_in_another_order_are_refused(opened: Open) -> None:
    def other(row: int) -> dict[str, Any]:
        return {"image": GREY[40 + row], "label": 2 - row % 3, "class_name": NUMBERED[row % 3]}

    train, test = Items(medical_mnist, 40, ()), Items(other, 20, ())
    with pytest.raises(BadInput, match='names its class "AbdomenCT", and its number is that of "Hand"'):
        opened({"train": LabelledImages(train), "test": LabelledImages(test)})


def test_floats_are_not_rounded_for_the_network(opened: Open) -> None:
    value = 100.37 / 255
    image = torch.tensor([[[0.0, value], [1.0, value]]])
    splits = opened(of(lambda row: (image, LABELS[row]), patients=PAIRS))
    (read,) = load_pixels_on_device(splits.train, "cpu").iterate_batches(COUNT)
    assert read.unique().tolist() == pytest.approx([0.0, 100.37, 255.0])
    assert splits.train.images.dtype == np.uint8
    assert set(np.unique(splits.train.images)) == {0, 100, 255}


def test_parts_have_data_sets_of_their_own(opened: Open) -> None:
    """Those for training augment, those for tests do not."""
    test = Items(lambda row: plain(row + 40), 20)
    splits = opened({"train": LabelledImages(Items(plain, 40)), "test": LabelledImages(test)})
    assert (len(splits.train) + len(splits.validation), len(splits.test)) == (40, 20)
    assert 0 < len(splits.validation) < 12
    np.testing.assert_array_equal(splits.test.images, GREY[40:])
    assert not set(splits.train.patients) & set(splits.test.patients)


def parts(**more: Any) -> dict[str, LabelledImages]:
    return {"train": of(plain), "test": of(plain), **more}


def given(images: Any, labels: Any = LABELS, **more: Any) -> LabelledImages:
    return LabelledImages(images, labels, ("a", "b"), **more)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


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


def failing(row: int) -> Any:
    raise FileNotFoundError(f"{row}.png")


def brightened(row: int) -> Any:
    factor = 0.9 + 0.1 * np.random.random()
    return GREY[row % 20].astype(np.float32) / 255 * factor, LABELS[row % 20]


def shuffled(row: int) -> Any:
    """An item that draws with a generator of its own."""
    return np.random.default_rng().permutation(GREY[row].reshape(-1)).reshape(GREY[row].shape), LABELS[row]


SHARED = Items(plain)
TABLE = pd.DataFrame(LABELS, columns=["a", "b"])
P = "data.name: plugin:stripes"
EQUAL = "has 60 of 60 pictures of its test part in its train part too"
NO_MASK, BLACK = "has a label mask that is not 1", "is nearly black: its brightest value is"
REFUSED: dict[str, tuple[Any, str]] = {
    "loader": (DataLoader(Items(lambda row: row)), "is a DataLoader"),
    "stream": (Stream(), "is Stream, whose items cannot be read by number"),
    "nothing": (Items(lambda row: row, 0), "holds no image"),
    "fails": (of(failing), f"{P}[0]: failed: FileNotFoundError: 0.png"),
    "later": (of(lambda row: failing(row) if row in (7, 9) else plain(row)), "2 of 60 items cannot"),
    "normalised": (of(lambda row: (float_tensor(GREY[row]) * 4 - 2, LABELS[row])), "Leave Normalize out"),
    "wide": (
        of(lambda row: (GREY[row].astype(np.float32), LABELS[row])),
        "by more than a quarter of that, in 99% of its pixels",
    ),
    "nan": (of(lambda row: (np.full((4, 4), np.nan), LABELS[row])), "has pixels that are NaN or infinite"),
    "16 bits": (
        of(lambda row: (GREY[row].astype(np.int32), LABELS[row])),
        "is int32: which values",
    ),
    "four channels": (of(lambda row: (torch.zeros(4, 6, 5), 1)), "is no image: Tensor of shape"),
    "sizes": (
        of(lambda row: (GREY[row][: 6 - row % 2], LABELS[row])),
        f"[1]: has the shape (5, 5), and {P}[0]",
    ),
    "string": (of(lambda row: ("a.png", 1)), "is no image: str of shape ()"),
    "no image": (
        of(lambda row: {"picture": GREY[row], "label": 1}),
        'without an image; its keys are "picture", "label"',
    ),
    "no labels": (of(lambda row: {"image": GREY[row]}), "has no labels"),
    "width": (of(lambda row: (GREY[row], [1, 0, 1])), "has labels of shape (3,), and there are 2 classes"),
    "minus": (of(lambda row: (GREY[row], [1, -1])), "has labels [1.0, -1.0]; they are 1 (present), 0 (absent) or NaN"),
    "class number": (of(lambda row: (GREY[row], 2)), "has the label 2, which is no number of one of 2 classes"),
    "mask of other width": (entries(label_mask=[1]), NO_MASK),
    "two labels": (entries(target=1), 'has "label", "target", which all name labels'),
    "some patients": (
        of(lambda row: {"image": GREY[row], "label": LABELS[row], **({"patient": row} if row else {})}),
        "1 of 60 items name no patient",
    ),
    "half of the patients": (entries(patient=lambda row: row if row % 2 else NAN), "30 of 60 items name no patient"),
    "two patients": (entries(patient=3, pid=4), 'has "patient", "pid", which all name the patient'),
    "patient list": (entries(patient=["p"]), "names its patient by list"),
    "repeated items": (Subset(SHARED, [*range(COUNT), 3, 3]), "holds 2 items again, and names no patients"),
    "repeated in a wrapper": (given(ConcatDataset([Wrapper(SHARED), SHARED]), None), "holds 60 items again"),
    "repeated behind random transforms": (of(brightened), "holds 40 pictures again"),
    "repeated where labels are given": (given(Items(brightened)), "holds 40 pictures again"),
    "drawn labels": (of(lambda row: plain(np.random.randint(COUNT))), "at first. An item always has the same labels"),
    "drawn row where labels are given": (
        given(Items(lambda row: plain(int(torch.randint(COUNT, ()))))),
        "An item always has the same labels",
    ),
    "dark array": (given(GREY // 64), BLACK),
    "dark floats": (given(Items(lambda row: GREY[row] / 65535)), BLACK),
    "bits": (given(Items(lambda row: (GREY[row] > 9).astype(np.uint8))), BLACK),
    "table": (given(SHARED, TABLE.rename(columns={"b": "c"})), 'without exactly one column for "b"'),
    "table index": (
        given(SHARED, TABLE.sample(frac=1, random_state=0)),
        "has labels in a table whose index is not 0, 1, 2, ...",
    ),
    "patient index": (
        given(SHARED, patients=pd.Series(map(str, range(COUNT)), range(COUNT, 0, -1))),
        "patients must be in the order of the images",
    ),
    "crops": (of(lambda row: [{"image": GREY[row], "label": 1}] * 4), "is a list of 4 dictionaries"),
    "parts as one data set": (
        LabelledImages({"train": SHARED, "test": SHARED}),  # type: ignore[arg-type]
        'is a dictionary of "train", "test", not one data set. Leave pc.LabelledImages out',
    ),
    "system exit": (of(leaving), "failed: SystemExit: 0"),
    "length": (Endless(lambda row: row), "has no length: TypeError"),
    "joined": (
        given(ConcatDataset([SHARED, Items(plain, class_names=("b", "a"))]), None),
        'joins data sets of different classes: "a", "b"; "b", "a"',
    ),
    "range": (given(SHARED, value_range=(1, 0)), "goes from 1 to 0"),
    "labels": (given(SHARED, LABELS[:5]), "labels must have the shape (60, 2)"),
    "part items": (
        {
            "train": LabelledImages(Subset(SHARED, list(range(40)))),
            "test": given(Subset(Wrapper(SHARED), list(range(39, 60))), None),
        },
        'has 1 of the items of "train" in "test" too',
    ),
    "part pictures": (parts(), EQUAL),
    "part arrays": ({"train": given(GREY), "test": given(GREY)}, EQUAL),
    "part pictures with labels": (parts(train=given(Items(plain)), test=given(Items(plain))), EQUAL),
    "part pictures as uint8 and float": (
        parts(test=given(Items(lambda row: GREY[row].astype(np.float32) / 255))),
        EQUAL,
    ),
    "part names": ({"train": of(plain), "exam": of(plain)}, 'has the parts "train", "exam"'),
    "part classes": (parts(test=of(lambda row: (GREY[row], 1), ("b", "a"))), "parts of different classes"),
    "part sizes": (parts(test=of(lambda row: (COLOR[row], LABELS[row]))), "parts of different classes or sizes"),
    "part patients": (
        parts(
            train=given(Items(lambda row: GREY[row]), patients=["x"] * 60),
            test=given(Items(lambda row: 255 - GREY[row]), patients=["x"] * 60),
        ),
        "1 patient in both train and test",
    ),
    "part fails": (parts(train=of(failing), test=of(failing)), f'{P}["train"][0]: failed'),
    "other channels": (
        of(lambda row: (COLOR[row] if row == 9 else GREY[row], 1)),
        "np.repeat(image.reshape(*image.shape[:2], 1), 3, axis=2)",
    ),
    "transparent": (of(lambda row: (Image.fromarray(GREY[row]).convert("LA"), 1)), "is a picture of mode LA"),
    "empty tuple": (of(lambda row: ()), "is an empty tuple"),
    "unknown word": (of(lambda row: (GREY[row], "A")), 'has a label for "A", which is no class'),
    "unknown word in a dictionary": (of(lambda row: (GREY[row], {"aa": 1})), 'did you mean "a"?'),
    "label of a word": (of(lambda row: (GREY[row], {"a": "yes"})), "has the label 'yes' for \"a\""),
    "half a class": (of(lambda row: (GREY[row], 0.5)), "has the label 0.5, which is no number"),
    "split": (entries(split="fold 3"), "has 'fold 3' as its \"split\""),
    "some splits": (
        of(lambda row: {"image": GREY[row], "label": LABELS[row], **({"split": "train"} if row else {})}),
        "1 of 60 items name no split",
    ),
    "two images": (entries(img=GREY[0]), 'has "image", "img", which all name the image'),
    "item function": (LabelledImages(Items(plain), item=lambda x: x["image"]), "failed: TypeError"),
    "no numbers and no names": (Items(lambda row: (GREY[row], [[1], [0, 2]]), COUNT, ()), "Items names no classes"),
}


@pytest.mark.parametrize(("images", "problem"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_used_is_named(opened: Open, images: Any, problem: str) -> None:
    with pytest.raises(BadInput) as refused:
        opened(images)
    assert problem in str(refused.value)


def test_faults_of_all_items_are_listed_together(opened: Open) -> None:
    with pytest.raises(BadInput) as refused:
        opened(of(lambda row: (GREY[row], [1, 3]) if row % 20 == 5 else plain(row)))
    assert [fault.where for fault in refused.value.faults] == [f"{P}[5]", f"{P}[25]", f"{P}[45]", P]
