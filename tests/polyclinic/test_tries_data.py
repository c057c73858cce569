"""Data sets as people have them: accepted with their own values, or refused with the wrong model as reason.

The expected pictures and labels are written by hand beside each form, and compared in all parts.
"""

import random
from collections import UserDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import monai.data
import monai.transforms
import numpy as np
import pandas as pd
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import (
    ChainDataset,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
    TensorDataset,
    random_split,
)
from torchvision import datasets, transforms, tv_tensors
from torchvision.transforms import v2

import polyclinic as pc
from polyclinic.common.errors import BadInput
from polyclinic.common.plugins import DATASETS, register_local_plugin
from polyclinic.custom_parts import wrap_as_dataset_plugin
from polyclinic.data.base.image_set import DatasetSplits
from polyclinic.data.base.spec import PluginDatasetSpec
from polyclinic.data.sources.plugin import load_plugin_dataset

NAN = float("nan")
COUNT = 48
RANDOM = np.random.default_rng(7)
GREY = RANDOM.integers(0, 256, (COUNT, 8, 6), dtype=np.uint8)
COLOR = RANDOM.integers(0, 256, (COUNT, 8, 6, 3), dtype=np.uint8)
NAMES = ("effusion", "mass", "nodule")
NUMBER = np.arange(COUNT) % 3
ONE = np.eye(3, dtype=np.float32)[NUMBER]
"""Each image shows one class."""
MANY = np.array([[row % 2, row % 3 == 0, row % 5 == 0] for row in range(COUNT)], np.float32)
"""Each image shows any number of classes, image 1 exactly one, image 5 all but one."""
SOME = np.where(np.arange(COUNT)[:, None] % 4 == 3, [NAN, 1, 0], MANY).astype(np.float32)
"""As before; of some images one label is unknown."""


class Items(Dataset[Any]):
    """A data set of a function of the row."""

    classes: ClassVar[Any] = list(NAMES)

    def __init__(self, get: Callable[[int], Any], rows: list[int] | None = None) -> None:
        self.get, self.rows = get, list(range(COUNT)) if rows is None else rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.get(self.rows[index])


class Unnamed(Items):
    classes = None


def read(data: Any, lines: list[str] | None = None) -> DatasetSplits:
    """Open what a user gives to ``pc.simulate(dataset=...)``."""
    name = register_local_plugin(DATASETS, wrap_as_dataset_plugin(data))
    tell = (lambda line: None) if lines is None else lines.append
    return load_plugin_dataset(PluginDatasetSpec(kind="plugin", name=name), Path(), tell)


def check_images(splits: DatasetSplits, expected: NDArray[Any]) -> None:
    """Compare all pictures of all parts; each picture of ``expected`` is in one part."""
    every = np.concatenate([part.images for part in splits.parts])
    order = [picture.tobytes() for picture in every]
    assert sorted(order) == sorted(picture.tobytes() for picture in expected)


def check_labels(splits: DatasetSplits, images: NDArray[Any], labels: NDArray[Any]) -> None:
    """Compare the labels of all parts, each by its picture."""
    place = {picture.tobytes(): row for row, picture in enumerate(images)}
    for part in splits.parts:
        pictures = part.images
        rows = [place[picture.tobytes()] for picture in pictures]
        np.testing.assert_array_equal(part.labels, labels[rows])


def names_of(row: int) -> list[str]:
    return [name for name, shown in zip(NAMES, MANY[row], strict=True) if shown]


# ---------------------------------------------------------------------- labels

LABELS: dict[str, tuple[Callable[[int], Any], NDArray[Any]]] = {
    "int": (lambda row: row % 3, ONE),
    "np.int64": (lambda row: np.int64(row % 3), ONE),
    "np.int32 of shape (1,)": (lambda row: np.array([row % 3], np.int32), ONE),
    "uint8": (lambda row: np.uint8(row % 3), ONE),
    "float": (lambda row: float(row % 3), ONE),
    "np.float32": (lambda row: np.float32(row % 3), ONE),
    "torch scalar": (lambda row: torch.tensor(row % 3), ONE),
    "torch float scalar": (lambda row: torch.tensor(float(row % 3)), ONE),
    "torch (1,)": (lambda row: torch.tensor([row % 3]), ONE),
    "torch uint8 (1, 1)": (lambda row: torch.tensor([[row % 3]], dtype=torch.uint8), ONE),
    "name": (lambda row: NAMES[row % 3], ONE),
    "np.str_": (lambda row: np.str_(NAMES[row % 3]), ONE),
    "name in a list": (lambda row: [NAMES[row % 3]], ONE),
    "name in an array": (lambda row: np.array([NAMES[row % 3]]), ONE),
    "names": (names_of, MANY),
    "names in a tuple": (lambda row: tuple(names_of(row)), MANY),
    "names in a set": (lambda row: set(names_of(row)), MANY),
    "one-hot list": (lambda row: ONE[row].astype(int).tolist(), ONE),
    "one-hot tuple": (lambda row: tuple(ONE[row].tolist()), ONE),
    "one-hot uint8": (lambda row: ONE[row].astype(np.uint8), ONE),
    "one-hot bool": (lambda row: ONE[row].astype(bool), ONE),
    "one-hot torch int64": (lambda row: torch.tensor(ONE[row]).long(), ONE),
    "one-hot torch bool": (lambda row: torch.tensor(ONE[row]).bool(), ONE),
    "multi-hot float16": (lambda row: MANY[row].astype(np.float16), MANY),
    "multi-hot bfloat16": (lambda row: torch.tensor(MANY[row]).bfloat16(), MANY),
    "multi-hot double": (lambda row: MANY[row].astype(np.float64), MANY),
    "multi-hot with gradient": (lambda row: torch.tensor(MANY[row], requires_grad=True), MANY),
    "multi-hot (1, classes)": (lambda row: MANY[row][None], MANY),
    "multi-hot (classes, 1)": (lambda row: MANY[row][:, None], MANY),
    "list of bool": (lambda row: MANY[row].astype(bool).tolist(), MANY),
    "list of torch scalars": (lambda row: list(torch.tensor(MANY[row])), MANY),
    "NaN for unknown": (lambda row: SOME[row], SOME),
    "NaN in a list": (lambda row: SOME[row].tolist(), SOME),
    "None for unknown": (lambda row: [None if np.isnan(value) else int(value) for value in SOME[row]], SOME),
    "pd.NA for unknown": (
        lambda row: pd.Series([pd.NA if np.isnan(value) else int(value) for value in SOME[row]], NAMES, "Int64"),
        SOME,
    ),
    "masked array": (lambda row: np.ma.masked_invalid(SOME[row]), SOME),
    "dict of 0 and 1": (lambda row: {name: int(value) for name, value in zip(NAMES, MANY[row], strict=True)}, MANY),
    "dict of bool": (lambda row: {name: bool(value) for name, value in zip(NAMES, MANY[row], strict=True)}, MANY),
    "dict of tensors": (lambda row: dict(zip(NAMES, torch.tensor(SOME[row]), strict=True)), SOME),
    "dict with NaN": (lambda row: dict(zip(NAMES, SOME[row].tolist(), strict=True)), SOME),
    "dict of the known": (
        lambda row: {name: value for name, value in zip(NAMES, SOME[row].tolist(), strict=True) if value == value},
        SOME,
    ),
    "series by name in another order": (lambda row: pd.Series(SOME[row][::-1], index=NAMES[::-1]), SOME),
    "series of objects": (lambda row: pd.Series(SOME[row].astype(object), index=NAMES), SOME),
}


@pytest.mark.parametrize(("label", "expected"), LABELS.values(), ids=LABELS)
def test_labels(label: Callable[[int], Any], expected: NDArray[Any]) -> None:
    check_labels(read(Items(lambda row: (GREY[row], label(row)))), GREY, expected)


NO_LABELS: dict[str, tuple[Callable[[int], Any], str]] = {
    # wrong model: -1 could mean unknown, uncertain or absent
    "-1 in a vector": (lambda row: [1, -1, 0], "1 .present., 0 .absent. or NaN"),
    "-1 as the class": (lambda row: -1, "no number of one of 3 classes"),
    # wrong model: an image of no class that the run has
    "class 3 of 0 to 2": (lambda row: 3, "no number of one of 3 classes"),
    "classes from 1": (lambda row: 1 + row % 3, "no number of one of 3 classes"),
    "half a class": (lambda row: 0.5, "no number of one of 3 classes"),
    "another word": (lambda row: "Mass", 'did you mean "mass"'),
    "words in one text": (lambda row: "mass|nodule", "no class"),
    "bytes": (lambda row: b"mass", "no numbers"),
    "None": (lambda row: None, "has no labels"),
    "too few values": (lambda row: [1, 0], "there are 3 classes"),
    "too many values": (lambda row: [1, 0, 0, 0], "there are 3 classes"),
    "soft labels": (lambda row: [0.2, 0.7, 0.1], "1 .present., 0 .absent. or NaN"),
    "two": (lambda row: [2, 0, 1], "1 .present., 0 .absent. or NaN"),
    "a picture of classes": (lambda row: np.zeros((8, 6), int), "there are 3 classes"),
    "a dictionary of another class": (lambda row: {"edema": 1}, "no class"),
    "a dictionary of words": (lambda row: {"mass": "yes"}, "labels are 1, 0 or NaN"),
    "an object": (lambda row: object(), "no numbers"),
}


@pytest.mark.parametrize(("label", "problem"), NO_LABELS.values(), ids=NO_LABELS)
def test_labels_that_would_be_guessed_are_refused(label: Callable[[int], Any], problem: str) -> None:
    with pytest.raises(BadInput, match=problem):
        read(Items(lambda row: (GREY[row], label(row))))


BINARY: dict[str, Callable[[int], Any]] = {
    "int": lambda row: row % 2,
    "bool": lambda row: bool(row % 2),
    "np.bool_": lambda row: np.bool_(row % 2),
    "float": lambda row: float(row % 2),
    "tensor": lambda row: torch.tensor(row % 2),
    "[0] or [1]": lambda row: [row % 2],
    "float tensor (1,)": lambda row: torch.tensor([float(row % 2)]),
    "name or nothing": lambda row: ["sick"] * (row % 2),
    "dictionary": lambda row: {"sick": row % 2},
}


@pytest.mark.parametrize("label", BINARY.values(), ids=BINARY)
def test_labels_of_one_class(label: Callable[[int], Any]) -> None:
    data = pc.LabelledImages(Unnamed(lambda row: (GREY[row], label(row))), class_names=["sick"])
    check_labels(read(data), GREY, (np.arange(COUNT) % 2)[:, None])


# ---------------------------------------------------------------------- pictures


def in_mode(mode: str) -> Callable[[int], Any]:
    return lambda row: Image.fromarray(COLOR[row]).convert(mode)


def to_array(mode: str, shown: str) -> NDArray[Any]:
    return np.stack([np.asarray(in_mode(mode)(row).convert(shown)) for row in range(COUNT)])


FLOATS = GREY.astype(np.float32) / 255
PICTURES: dict[str, tuple[Callable[[int], Any], NDArray[Any]]] = {
    "PIL L": (lambda row: Image.fromarray(GREY[row]), GREY),
    "PIL RGB": (lambda row: Image.fromarray(COLOR[row]), COLOR),
    "PIL 1": (in_mode("1"), to_array("1", "L")),
    "PIL P": (lambda row: in_mode("P")(row), to_array("P", "RGB")),
    "PIL CMYK": (in_mode("CMYK"), to_array("CMYK", "RGB")),
    "PIL YCbCr": (in_mode("YCbCr"), to_array("YCbCr", "RGB")),
    "PIL HSV": (in_mode("HSV"), to_array("HSV", "RGB")),
    "array (h, w)": (lambda row: GREY[row], GREY),
    "array (h, w, 1)": (lambda row: GREY[row][..., None], GREY),
    "array (1, h, w)": (lambda row: GREY[row][None], GREY),
    "array (h, w, 3)": (lambda row: COLOR[row], COLOR),
    "array (3, h, w)": (lambda row: COLOR[row].transpose(2, 0, 1), COLOR),
    "Fortran order": (lambda row: np.asfortranarray(GREY[row]), GREY),
    "a flipped view": (lambda row: GREY[row][::-1], GREY[:, ::-1]),
    "float64": (lambda row: GREY[row] / 255, GREY),
    "float32": (lambda row: FLOATS[row], GREY),
    "float32 big-endian": (lambda row: FLOATS[row].astype(">f4"), GREY),
    "tensor (h, w)": (lambda row: torch.from_numpy(GREY[row]), GREY),
    "tensor (1, h, w)": (lambda row: torch.from_numpy(GREY[row])[None], GREY),
    "tensor (3, h, w)": (lambda row: torch.from_numpy(COLOR[row]).permute(2, 0, 1), COLOR),
    "float tensor": (lambda row: torch.from_numpy(FLOATS[row])[None], GREY),
    "double tensor with gradient": (
        lambda row: torch.from_numpy(FLOATS[row]).double()[None].requires_grad_(),
        GREY,
    ),
    "ToTensor": (lambda row: transforms.ToTensor()(Image.fromarray(COLOR[row])), COLOR),
    "v2 ToImage": (lambda row: v2.ToImage()(Image.fromarray(COLOR[row])), COLOR),
    "v2 ToDtype": (
        lambda row: v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])(Image.fromarray(COLOR[row])),
        COLOR,
    ),
    "tv_tensors.Image": (lambda row: tv_tensors.Image(torch.from_numpy(GREY[row])[None]), GREY),
    "MONAI MetaTensor": (lambda row: monai.data.MetaTensor(torch.from_numpy(FLOATS[row])[None]), GREY),
    "MONAI ScaleIntensity": (
        lambda row: monai.transforms.ScaleIntensityRange(0, 255, 0, 1)(GREY[row][None].astype(np.float32)),
        GREY,
    ),
    "bool": (lambda row: GREY[row] > 127, np.where(GREY > 127, 255, 0).astype(np.uint8)),
}


@pytest.mark.parametrize(("image", "expected"), PICTURES.values(), ids=PICTURES)
def test_pictures(image: Callable[[int], Any], expected: NDArray[Any]) -> None:
    patients = [f"p{row}" for row in range(COUNT)]  # pictures of few grey values are equal
    splits = read(pc.LabelledImages(Items(lambda row: (image(row), MANY[row])), patients=patients))
    for part in splits.parts:
        np.testing.assert_array_equal(part.images, expected[part.places])
        np.testing.assert_array_equal(part.labels, MANY[part.places])


DEEP = GREY.astype(np.int32) * 16
"""The same pictures with 12 bits, where 4080 is white."""
RANGED: dict[str, tuple[Callable[[int], Any], tuple[float, float]]] = {
    "uint16": (lambda row: DEEP[row].astype(np.uint16), (0, 4080)),
    "int16": (lambda row: DEEP[row].astype(np.int16), (0, 4080)),
    "int16 of a CT": (lambda row: (DEEP[row] - 1024).astype(np.int16), (-1024, 3056)),
    "big-endian uint16": (lambda row: DEEP[row].astype(">u2"), (0, 4080)),
    "int32 tensor": (lambda row: torch.from_numpy(DEEP[row]), (0, 4080)),
    "PIL I;16": (lambda row: Image.fromarray(DEEP[row].astype(np.uint16)), (0, 4080)),
    "PIL I": (lambda row: Image.fromarray(DEEP[row]), (0, 4080)),
    "PIL F": (lambda row: Image.fromarray(DEEP[row].astype(np.float32)), (0, 4080)),
    "float 0 to 255": (lambda row: GREY[row].astype(np.float32), (0, 255)),
    "float -1 to 1": (lambda row: 2 * FLOATS[row] - 1, (-1, 1)),
    "uint8 of 0 to 15": (lambda row: GREY[row] // 17, (0, 15)),
}


@pytest.mark.parametrize(("image", "values"), RANGED.values(), ids=RANGED)
def test_pictures_with_black_and_white_named(image: Callable[[int], Any], values: tuple[float, float]) -> None:
    splits = read(pc.LabelledImages(Items(lambda row: (image(row), MANY[row])), value_range=values))
    expected = GREY // 17 * 17 if values[1] == 15 else GREY
    for part in splits.parts:
        np.testing.assert_array_equal(part.images, expected[part.places])


NO_PICTURES: dict[str, tuple[Callable[[int], Any], str]] = {
    # wrong model: white or black pictures
    **{
        f"{name} without a range": (image, "black and white|nearly black|values outside")
        for name, (image, _) in RANGED.items()
    },
    "nested lists": (lambda row: GREY[row].tolist(), "black and white"),
    "Normalize": (
        lambda row: transforms.Normalize([0.485], [0.229])(torch.from_numpy(FLOATS[row])[None]),
        "Leave Normalize out",
    ),
    "all white": (lambda row: np.full((8, 6), 255, np.uint8), "shows nothing"),
    "all black": (lambda row: np.zeros((8, 6), np.uint8), "shows nothing"),
    "NaN": (lambda row: np.where(GREY[row] > 9, FLOATS[row], np.nan), "NaN or infinite"),
    "infinite": (lambda row: np.where(GREY[row] > 9, FLOATS[row], np.inf), "NaN or infinite"),
    # wrong model: what shows through is unknown
    "RGBA": (in_mode("RGBA"), "mode RGBA"),
    "LA": (in_mode("LA"), "mode LA"),
    "four channels": (lambda row: np.dstack([COLOR[row], GREY[row]]), "1 or 3 channels"),
    "two channels": (lambda row: np.dstack([GREY[row]] * 2), "1 or 3 channels"),
    # no batch
    "two volumes": (lambda row: np.stack([np.stack([GREY[row]] * 4)] * 2), "is no image"),
    "a vector": (lambda row: GREY[row].reshape(-1), "is no image"),
    "no pixel": (lambda row: GREY[row][:0], "is no image"),
    "a path": (lambda row: "scan.png", "is no image"),
    "bytes of a file": (lambda row: b"\x89PNG", "is no image"),
    "None": (lambda row: None, "is no image"),
    "complex": (lambda row: FLOATS[row].astype(complex), "complex|black and white"),
    "two sizes": (lambda row: GREY[row] if row % 2 else GREY[row].T, "one size"),
    "grey and colour": (lambda row: GREY[row] if row % 2 else COLOR[row], "number of channels"),
    "two types": (lambda row: GREY[row] if row % 2 else FLOATS[row], "one type"),
}


@pytest.mark.parametrize(("image", "problem"), NO_PICTURES.values(), ids=NO_PICTURES)
def test_pictures_that_a_network_would_see_wrongly_are_refused(image: Callable[[int], Any], problem: str) -> None:
    patients = [f"p{row}" for row in range(COUNT)]
    with pytest.raises(BadInput, match=problem):
        read(pc.LabelledImages(Items(lambda row: (image(row), MANY[row])), patients=patients))


def test_pictures_that_are_mostly_white_are_named() -> None:
    lines = list[str]()
    read(Items(lambda row: (np.where(GREY[row] > 60, 255, GREY[row]).astype(np.uint8), MANY[row])), lines)
    assert any("white (255)" in line for line in lines)


# ---------------------------------------------------------------------- items

Pair = namedtuple("Pair", "image label")
Weird = namedtuple("Weird", "label image")


@dataclass
class Sample:
    image: Any
    label: Any
    patient_id: str
    path: str = "a.png"


class Typed(dict[str, Any]):
    pass


ITEMS: dict[str, Callable[[int], Any]] = {
    "tuple": lambda row: (GREY[row], MANY[row]),
    "list": lambda row: [GREY[row], MANY[row]],
    "with an index": lambda row: (GREY[row], MANY[row], row),
    "with a path": lambda row: (GREY[row], MANY[row], f"{row}.png"),
    "with metadata": lambda row: (GREY[row], MANY[row], {"age": 3, "patient": f"p{row}"}),
    "with a sex of 0 and 1": lambda row: (GREY[row], MANY[row], row % 2),
    "with another vector": lambda row: (GREY[row], MANY[row], [1, 1, 0]),
    "with a mask of pixels": lambda row: (GREY[row], MANY[row], GREY[row] > 9),
    "namedtuple": lambda row: Pair(GREY[row], MANY[row]),
    "namedtuple in another order": lambda row: Weird(MANY[row], GREY[row]),
    "dataclass": lambda row: Sample(GREY[row], MANY[row], f"p{row}"),
    "image and label": lambda row: {"image": GREY[row], "label": MANY[row]},
    "img and target": lambda row: {"img": GREY[row], "target": MANY[row]},
    "Image and Labels": lambda row: {"Image": GREY[row], "Labels": MANY[row]},
    "pixel_values and labels": lambda row: {"pixel_values": GREY[row], "labels": MANY[row]},
    "a dictionary of one's own type": lambda row: Typed(image=GREY[row], label=MANY[row]),
    "UserDict": lambda row: UserDict(image=GREY[row], label=MANY[row]),
    "with boxes": lambda row: {"image": GREY[row], "label": MANY[row], "boxes": [[0, 0, 1, 1]], "box_labels": [1]},
    "one key a class": lambda row: {"image": GREY[row], **dict(zip(NAMES, MANY[row], strict=True))},
    "with a segmentation": lambda row: {"image": GREY[row], "label": MANY[row], "mask": GREY[row] > 9, "seg": 1},
    "with MONAI's meta": lambda row: {"image": GREY[row], "label": MANY[row], "image_meta_dict": {"filename": "a"}},
    "with an id": lambda row: {"image": GREY[row], "label": MANY[row], "id": row, "idx": row, "file_name": "x"},
}


@pytest.mark.parametrize("item", ITEMS.values(), ids=ITEMS)
def test_items(item: Callable[[int], Any]) -> None:
    splits = read(Items(item))
    check_images(splits, GREY)
    check_labels(splits, GREY, MANY)


NO_ITEMS: dict[str, tuple[Callable[[int], Any], str]] = {
    "two labels": (lambda row: {"image": GREY[row], "label": MANY[row], "target": MANY[row]}, "all name labels"),
    "two pictures": (lambda row: {"image": GREY[row], "img": GREY[row], "label": 1}, "all name the image"),
    "no picture": (lambda row: {"x": GREY[row], "y": MANY[row]}, "item=lambda"),
    "an empty tuple": (lambda row: (), "empty tuple"),
    "a picture alone": (lambda row: GREY[row], "has no labels"),
    "labels before the picture": (lambda row: (row % 3, GREY[row]), "is no image"),
    "two patients": (lambda row: {"image": GREY[row], "label": 1, "patient": 1, "subject": 2}, "all name the patient"),
    "some patients": (
        lambda row: {"image": GREY[row], "label": MANY[row], "patient": f"p{row}" if row % 2 else None},
        "name no patient",
    ),
    "a split of another word": (lambda row: {"image": GREY[row], "label": MANY[row], "split": "fold 1"}, '"split"'),
    "a mask of other size": (lambda row: {"image": GREY[row], "label": MANY[row], "label_mask": [1, 0]}, "label mask"),
    "labels that change": (lambda row: (GREY[row], [random.random() < 0.5] * 3), "labels"),
    "an exception": (lambda row: GREY[99], "failed: IndexError"),
}


@pytest.mark.parametrize(("item", "problem"), NO_ITEMS.values(), ids=NO_ITEMS)
def test_items_that_would_be_guessed_are_refused(item: Callable[[int], Any], problem: str) -> None:
    with pytest.raises(BadInput, match=problem):
        read(Items(item))


OWN_ITEMS: dict[str, tuple[Callable[[int], Any], Callable[[Any], Any]]] = {
    "x and y": (lambda row: {"x": GREY[row], "y": MANY[row]}, lambda item: (item["x"], item["y"])),
    "labels first": (lambda row: (MANY[row], GREY[row]), lambda item: item[::-1]),
    "nested": (
        lambda row: {"data": {"scan": GREY[row]}, "meta": {"y": MANY[row]}},
        lambda item: (item["data"]["scan"], item["meta"]["y"]),
    ),
    "object": (lambda row: type("Scan", (), {"pixels": GREY[row], "y": MANY[row]}), lambda item: (item.pixels, item.y)),
    "classes from 1": (lambda row: (GREY[row], 1 + row % 3), lambda item: (item[0], item[1] - 1)),
    "-1 is unknown": (lambda row: (GREY[row], np.nan_to_num(SOME[row], nan=-1)), lambda item: (item[0], [
        NAN if value == -1 else value for value in item[1]
    ])),
    "words in one text": (
        lambda row: (GREY[row], "|".join(names_of(row))),
        lambda item: (item[0], item[1].split("|") if item[1] else []),
    ),
}  # fmt: skip
OWN_LABELS = {"classes from 1": ONE, "-1 is unknown": SOME}


@pytest.mark.parametrize("form", OWN_ITEMS)
def test_items_by_a_function(form: str) -> None:
    get, item = OWN_ITEMS[form]
    splits = read(pc.LabelledImages(Items(get), item=item))
    check_labels(splits, GREY, OWN_LABELS.get(form, MANY))


# ---------------------------------------------------------------------- data sets


class HuggingFace(Unnamed):
    features: ClassVar[Any] = {"image": None, "label": type("ClassLabel", (), {"names": list(NAMES)})()}


class MedMnist(Unnamed):
    info: ClassVar[Any] = {"label": {"2": "nodule", "0": "effusion", "1": "mass"}, "task": "multi-class"}


class Pathologies(Unnamed):
    pathologies: ClassVar[Any] = np.array(NAMES)


class ByIndex(Unnamed):
    """Maps names to numbers, as ImageFolder does."""

    class_to_idx: ClassVar[Any] = {"nodule": 2, "effusion": 0, "mass": 1}


def numbered(row: int) -> tuple[Any, int]:
    return GREY[row], row % 3


NAMED_SETS: dict[str, Callable[[], Any]] = {
    "classes as a list": lambda: Items(numbered),
    "Hugging Face": lambda: HuggingFace(numbered),
    "MedMNIST": lambda: MedMnist(lambda row: (GREY[row], np.array([row % 3]))),
    "pathologies in an array": lambda: Pathologies(numbered),
    "class_to_idx": lambda: ByIndex(numbered),
    "Subset": lambda: Subset(Items(numbered), range(COUNT)),
    "Subset of a Subset": lambda: Subset(Subset(HuggingFace(numbered), list(range(COUNT))), np.arange(COUNT)),
    "ConcatDataset": lambda: ConcatDataset([Items(numbered, [*range(20)]), Items(numbered, [*range(20, COUNT)])]),
    "random_split joined": lambda: ConcatDataset(random_split(Items(numbered), [30, COUNT - 30])),
    "list": lambda: pc.LabelledImages([numbered(row) for row in range(COUNT)], class_names=NAMES),
    "tuple of tuples": lambda: pc.LabelledImages(tuple(map(numbered, range(COUNT))), class_names=list(NAMES)),
    "TensorDataset": lambda: pc.LabelledImages(
        TensorDataset(torch.from_numpy(GREY)[:, None], torch.from_numpy(NUMBER)), class_names=np.array(NAMES)
    ),
    "StackDataset": lambda: pc.LabelledImages(
        StackDataset(image=torch.from_numpy(GREY), label=torch.from_numpy(NUMBER)), class_names=NAMES
    ),
    "names of the items": lambda: Unnamed(lambda row: (GREY[row], NAMES[row % 3])),
    "dictionaries of the items": lambda: Unnamed(lambda row: (GREY[row], dict(zip(NAMES, ONE[row], strict=True)))),
    "MONAI Dataset": lambda: pc.LabelledImages(
        monai.data.Dataset([{"image": GREY[row], "label": row % 3} for row in range(COUNT)]), class_names=NAMES
    ),
    "MONAI CacheDataset": lambda: pc.LabelledImages(
        monai.data.CacheDataset(
            [{"image": GREY[row].astype(np.float32), "label": row % 3} for row in range(COUNT)],
            monai.transforms.Compose(
                [
                    monai.transforms.EnsureChannelFirstd("image", channel_dim="no_channel"),
                    monai.transforms.ScaleIntensityRanged("image", 0, 255, 0, 1),
                ]
            ),
            progress=False,
        ),
        class_names=NAMES,
    ),
    "MONAI ArrayDataset": lambda: pc.LabelledImages(
        monai.data.ArrayDataset(FLOATS[:, None], None, NUMBER[:, None], None), class_names=NAMES
    ),
    "arrays": lambda: pc.LabelledImages(GREY, ONE, NAMES),
    "arrays and numbers": lambda: pc.LabelledImages(GREY, NUMBER, NAMES),
    "arrays and a list of numbers": lambda: pc.LabelledImages(GREY, NUMBER.tolist(), NAMES),  # type: ignore[arg-type]
    "arrays and names": lambda: pc.LabelledImages(GREY, [NAMES[number] for number in NUMBER]),  # type: ignore[arg-type]
    "arrays and an array of names": lambda: pc.LabelledImages(GREY, np.array(NAMES)[NUMBER], NAMES),  # type: ignore[arg-type]
    "arrays and a table": lambda: pc.LabelledImages(GREY, pd.DataFrame(ONE, columns=NAMES)),  # type: ignore[arg-type]
    "arrays and a column of names": lambda: pc.LabelledImages(GREY, pd.Series(np.array(NAMES)[NUMBER])),  # type: ignore[arg-type]
    "arrays and a column of categories": lambda: pc.LabelledImages(
        GREY,
        pd.Series(np.array(NAMES)[NUMBER], dtype="category"),  # type: ignore[arg-type]
    ),
    "arrays and a tensor": lambda: pc.LabelledImages(GREY, torch.from_numpy(NUMBER), NAMES),  # type: ignore[arg-type]
    "float arrays": lambda: pc.LabelledImages(FLOATS, ONE, NAMES),  # type: ignore[arg-type]
    "tensors": lambda: pc.LabelledImages(torch.from_numpy(GREY)[:, None], torch.from_numpy(ONE), NAMES),  # type: ignore[arg-type]
    "12 bits": lambda: pc.LabelledImages(DEEP.astype(np.uint16), ONE, NAMES, value_range=(0, 4080)),  # type: ignore[arg-type]
    "memory map": lambda: pc.LabelledImages(np.asarray(GREY).view(np.memmap), ONE, NAMES),
    "list of arrays": lambda: pc.LabelledImages(list(GREY), ONE, NAMES),
    "list of pictures": lambda: pc.LabelledImages([Image.fromarray(picture) for picture in GREY], NUMBER, NAMES),
}


@pytest.mark.parametrize("make", NAMED_SETS.values(), ids=NAMED_SETS)
def test_data_sets(make: Callable[[], Any]) -> None:
    splits = read(make())
    assert splits.train.class_names == NAMES
    check_images(splits, GREY)
    check_labels(splits, GREY, ONE)


@pytest.mark.parametrize(
    "wrap", [lambda data: data, lambda data: Subset(data, list(range(COUNT)))], ids=["whole", "Subset"]
)
def test_image_folder(wrap: Callable[[Any], Any], tmp_path: Path) -> None:
    for row in range(COUNT):
        (tmp_path / NAMES[row % 3]).mkdir(exist_ok=True)
        Image.fromarray(COLOR[row]).save(tmp_path / NAMES[row % 3] / f"{row:02d}.png")
    splits = read(wrap(datasets.ImageFolder(tmp_path, transforms.ToTensor())))
    assert splits.train.class_names == NAMES
    check_images(splits, COLOR)
    check_labels(splits, COLOR, ONE)


def test_a_data_set_without_names_has_numbers() -> None:
    data = datasets.FakeData(COUNT, (3, 8, 8), 3, transforms.ToTensor())
    splits = read(data)
    assert splits.train.class_names == ("0", "1", "2")
    for part in splits.parts:
        expected = [int(data[place][1]) for place in part.places]
        np.testing.assert_array_equal(part.labels, np.eye(3)[expected])


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([(GREY[0], MANY[0])])


class Endless(Items):
    def __len__(self) -> int:
        raise TypeError("no length")


NO_SETS: dict[str, tuple[Callable[[], Any], str]] = {
    "IterableDataset": (Stream, "cannot be read by number"),
    "ChainDataset": (lambda: ChainDataset([Stream()]), "cannot be read by number"),
    "DataLoader": (lambda: DataLoader(Items(numbered)), "loader.dataset"),
    "without a length": (lambda: Endless(numbered), "has no length"),
    "empty": (lambda: Items(numbered, []), "holds no image"),
    "oversampled": (lambda: Subset(Items(numbered), [0, 0, *range(COUNT)]), "holds 2 items again"),
    "joined of other classes": (
        lambda: ConcatDataset([Items(numbered), pc_named(["a", "b", "c"])]),
        "data sets of different classes",
    ),
    "labels of another length": (lambda: pc.LabelledImages(GREY, ONE[:-1], NAMES), "labels must have the shape"),
    "labels in another order": (
        lambda: pc.LabelledImages(GREY, pd.DataFrame(ONE, columns=NAMES).sample(frac=1, random_state=0)),  # type: ignore[arg-type]
        "index is not 0, 1, 2",
    ),
    "names beside other labels": (lambda: pc.LabelledImages(GREY, ONE, NAMES[:2]), "shape|classes"),
    "class names in another order": (
        lambda: pc.LabelledImages(pc_named(["a", "b", "c"]), class_names=["b", "a", "c"]),
        'class_names has "a" as number 1, and the data set itself has it as number 0',
    ),
    "some class names in another order": (
        lambda: pc.LabelledImages(pc_named(["a", "b", "c"]), class_names=["x", "a", "z"]),
        "Leave class_names out",
    ),
    "floats from 0 to 255": (lambda: Items(lambda row: (as_tensor(row) * 255, MANY[row])), r"value_range=\(0, 255\)"),
    "a class twice": (lambda: pc.LabelledImages(GREY, ONE, ("a", "a", "b")), "more than once"),
    "an unknown word": (lambda: pc.LabelledImages(GREY, ["edema"] * COUNT, NAMES), "no class"),  # type: ignore[arg-type]
}


def pc_named(names: list[str]) -> Items:
    data = Items(numbered)
    data.classes = names  # type: ignore[misc]
    return data


def test_other_names_for_the_classes_of_a_data_set_are_taken() -> None:
    for names in (["x", "y", "z"], ["a", "b", "z"]):
        assert read(pc.LabelledImages(pc_named(["a", "b", "c"]), class_names=names)).class_names == tuple(names)


def test_names_in_the_labels_do_not_depend_on_the_order_of_class_names() -> None:
    data = Items(lambda row: (GREY[row], "abc"[row % 3]))
    data.classes = ["a", "b", "c"]  # type: ignore[misc]
    splits = read(pc.LabelledImages(data, class_names=["c", "b", "a"]))
    for part in splits.parts:
        np.testing.assert_array_equal(part.labels, np.eye(3)[[2 - place % 3 for place in part.places]])


@pytest.mark.parametrize(("make", "problem"), NO_SETS.values(), ids=NO_SETS)
def test_data_sets_that_would_train_something_else_are_refused(make: Callable[[], Any], problem: str) -> None:
    with pytest.raises(BadInput, match=problem):
        read(make())


# ---------------------------------------------------------------------- parts, patients


def third(first: int, count: int = 16) -> Items:
    return Items(numbered, [*range(first, first + count)])


@pytest.mark.parametrize(
    "names",
    [
        ("train", "val", "test"),
        ("train", "valid", "test"),
        ("train", "validation", "test"),
        ("Train", "Val", "Test"),
        ("TRAIN", "VALID", "TEST"),
        ("training", "validation", "test"),
        ("train", "dev", "test"),
        ("training", "validation", "testing"),
    ],
    ids="/".join,
)
def test_parts_by_name(names: tuple[str, str, str]) -> None:
    splits = read({name: third(16 * place) for place, name in enumerate(names)})
    for place, part in enumerate(splits.parts):
        np.testing.assert_array_equal(part.images, GREY[16 * place : 16 * place + 16])
        np.testing.assert_array_equal(part.labels, ONE[16 * place : 16 * place + 16])
    whole = read(Items(lambda row: {"image": GREY[row], "label": row % 3, "split": names[row // 16]}))
    assert [part.places.tolist() for part in whole.parts] == [[*range(n, n + 16)] for n in (0, 16, 32)]
    given = read(pc.LabelledImages(Items(numbered), parts=np.repeat(names, 16)))
    assert [part.places.tolist() for part in given.parts] == [[*range(n, n + 16)] for n in (0, 16, 32)]


def test_train_and_test_alone_hold_out_a_validation_part() -> None:
    splits = read({"train": third(0, 32), "test": third(32)})
    check_images(splits, GREY)
    np.testing.assert_array_equal(splits.test.labels, ONE[32:])


def test_a_part_without_the_last_class_has_the_same_numbers() -> None:
    """Numbers of one data set: a part that has no image of the last class does not have fewer classes."""

    def part(first: int, classes: int) -> Unnamed:
        return Unnamed(lambda row: (GREY[row], row % classes), [*range(first, first + 16)])

    splits = read({"train": part(0, 3), "val": part(16, 2), "test": part(32, 3)})
    assert splits.validation.class_names == ("0", "1", "2")


NO_PARTS: dict[str, tuple[Callable[[], Any], str]] = {
    "no test": (lambda: {"train": third(0), "val": third(16)}, 'Give "train" and "test"'),
    "a stranger": (lambda: {"train": third(0), "test": third(16), "extra": third(32)}, "has the parts"),
    "one part twice": (
        lambda: {"train": third(0), "val": third(16), "valid": third(16), "test": third(32)},
        "has the parts",
    ),
    "shared pictures": (lambda: {"train": third(0, 32), "test": third(16)}, "train"),
    "shared patients": (
        lambda: pc.LabelledImages(Items(numbered), parts=["train"] * 24 + ["test"] * 24, patients=["p"] * COUNT),
        "patient",
    ),
}


@pytest.mark.parametrize(("make", "problem"), NO_PARTS.values(), ids=NO_PARTS)
def test_parts_whose_test_would_be_of_training_images_are_refused(make: Callable[[], Any], problem: str) -> None:
    with pytest.raises(BadInput, match=problem):
        read(make())


PATIENTS: dict[str, Any] = {
    "list": [f"p{row // 2}" for row in range(COUNT)],
    "array": np.array([f"p{row // 2}" for row in range(COUNT)]),
    "numbers": [row // 2 for row in range(COUNT)],
    "column": pd.Series([f"p{row // 2}" for row in range(COUNT)]),
    "column of numbers": pd.Series(np.arange(COUNT) // 2),
}


@pytest.mark.parametrize("patients", PATIENTS.values(), ids=PATIENTS)
def test_patients(patients: Any) -> None:
    splits = read(pc.LabelledImages(GREY, ONE, NAMES, patients=patients))
    groups = [{place // 2 for place in part.places.tolist()} for part in splits.parts]
    assert not groups[0] & groups[1] | groups[0] & groups[2] | groups[1] & groups[2]
    assert sum(map(len, groups)) == COUNT // 2


@pytest.mark.parametrize("key", ["patient", "patient_id", "PatientID", "subject", "Subject ID", "pid", "mrn"])
@pytest.mark.parametrize("kind", [str, int, np.int64, float], ids=["text", "int", "int64", "float"])
def test_patients_of_items(key: str, kind: Callable[[Any], Any]) -> None:
    splits = read(Items(lambda row: {"image": GREY[row], "label": row % 3, key: kind(row // 2)}))
    for part in splits.parts:
        assert [name.removesuffix(".0") for name in part.patients] == [str(place // 2) for place in part.places]


# ---------------------------------------------------------------------- random transforms


class Augmentations:
    """As albumentations: named arguments, a dictionary, a generator of its own."""

    def __init__(self) -> None:
        self.random_generator, self.py_random = np.random.default_rng(1), random.Random(2)

    def __call__(self, *, image: NDArray[Any]) -> dict[str, Any]:
        turned = image[:, ::-1] if self.py_random.random() < 0.5 else image
        return {"image": (turned * self.random_generator.uniform(0.7, 1)).astype(np.uint8)}


@dataclass
class Kornia:
    """A transform whose parameters are drawn by torch."""

    strength: float = 0.3
    drawn: list[float] = field(default_factory=list)

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        return image * (1 - self.strength * torch.rand(()))


def as_tensor(row: int) -> torch.Tensor:
    return torch.from_numpy(FLOATS[row])[None]


def applied(move: Any, prepare: Callable[[int], Any] = as_tensor) -> Callable[[int], Any]:
    return lambda row: move(prepare(row))


def as_picture(row: int) -> Image.Image:
    return Image.fromarray(COLOR[row])


TRANSFORMS: dict[str, Callable[[], Callable[[int], Any]]] = {
    "torchvision v1": lambda: applied(
        transforms.Compose([transforms.RandomRotation(30), transforms.RandomHorizontalFlip()])
    ),
    "torchvision v2": lambda: applied(v2.RandomAffine(30, (0.1, 0.1))),
    "torchvision ColorJitter": lambda: applied(
        transforms.Compose([transforms.ColorJitter(0.3, 0.3), transforms.ToTensor()]), as_picture
    ),
    "torchvision RandomErasing": lambda: applied(v2.RandomErasing(1.0)),
    "TrivialAugmentWide": lambda: applied(
        transforms.Compose([v2.TrivialAugmentWide(), transforms.ToTensor()]), as_picture
    ),
    "MONAI": lambda: applied(monai.transforms.RandRotate(0.4, prob=1.0)),
    "MONAI noise": lambda: applied(monai.transforms.RandGaussianNoise(prob=1.0, std=0.05)),
    "albumentations-like": lambda: (lambda move: lambda row: move(image=GREY[row])["image"])(Augmentations()),
    "kornia-like": lambda: applied(Kornia()),
    "random": lambda: lambda row: GREY[row][:, ::-1] if random.random() < 0.5 else GREY[row],
    "numpy": lambda: lambda row: (GREY[row] * np.random.uniform(0.5, 1)).astype(np.uint8),
}


@pytest.mark.parametrize("make", TRANSFORMS.values(), ids=TRANSFORMS)
def test_random_transforms_follow_from_the_seed(make: Callable[[], Callable[[int], Any]]) -> None:
    move = make()
    splits = read(Items(lambda row: (move(row), MANY[row])))
    stored: Any = splits.train.stored
    rows = splits.train.places
    first, other, again = (stored.read_pictures(np.asarray(rows), seed) for seed in (1, 2, 1))
    assert splits.train.is_reproducible
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    assert first.min() >= 0
    assert first.max() <= 255


def test_a_transform_that_leaves_the_range_later_is_cut_and_does_not_end_the_run() -> None:
    strength = [0.0]
    data = Items(lambda row: (as_tensor(row) + strength[0] * (torch.rand(1, 8, 6) - 0.5), MANY[row]))
    splits = read(data)
    strength[0] = 3.0
    pictures = splits.train.stored.read_pictures(np.asarray(splits.train.places), 5)  # type: ignore[union-attr]
    assert pictures.min() == 0
    assert pictures.max() == 255


def test_a_transform_of_random_size_is_refused_at_the_start() -> None:
    def crop(row: int) -> Any:
        return GREY[row][: 8 - int(np.random.randint(3))], MANY[row]

    with pytest.raises(BadInput, match="one size"):
        read(Items(crop))
