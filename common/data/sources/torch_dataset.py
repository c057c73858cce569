"""Map-style torch data sets as a source of images: items are read when a batch needs them, with their own transforms.

An item is ``(image, labels)``, ``(image, labels, mask)``, or a dictionary with such keys. An image is a PIL picture, a
tensor ``([channels,] height, width)`` or an array ``(height, width[, channels])``: uint8, or floats in a range that is
the same for the whole data set. Training sees a new draw of random transforms each time, evaluation always the same
one; both follow from the run's seed.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from common.data.base.image_set import PixelRows
from common.data.images.store import DecodingProgress
from common.data.sources.plugin import MapDataset
from common.errors import BadInput, Fault, quoted
from common.system.hashing import derive_seed

_KEYS = {
    "image": ("image", "img", "pixel_values"),
    "labels": ("labels", "label", "lab", "target", "targets"),
    "mask": ("label_mask", "labels_mask", "mask"),
    "patient": ("patient", "patient_id", "patientid"),
}
"""Keys of a dictionary, by their meaning; the first that is there counts."""
_CLASSES = ("class_names", "classes", "pathologies")
"""Attributes by which data sets name their classes."""
_LISTED, _MOST_FAILURES = 5, 100
_NEAR_INTEGER = 1e-3
"""Floats that were made of 8 bits are whole numbers up to rounding once they are scaled to 0..255."""


@dataclass(frozen=True)
class Item:
    """One item of a data set, its image and labels as the data set gives them; None for what it does not give."""

    image: Any
    labels: Any = None
    mask: Any = None
    patient: str | None = None


class DatasetRows(PixelRows):
    """Images of a torch data set, read by row: uint8, or float32 from 0 to 255 where the data set gives floats.

    Args:
        name: What errors call the data set.
        value_range: The values of black and white where images are floats.
    """

    draws = True

    def __init__(self, dataset: MapDataset, name: str, value_range: tuple[float, float]) -> None:
        self.dataset, self.name, self.value_range = dataset, name, value_range
        self._first: NDArray[Any] | None = None
        self._first = self.pixels(0, self.item(0).image)
        self.shape = (len(dataset), *self._first.shape)

    def item(self, row: int, seed: int = 0) -> Item:
        """Read an item; its random transforms follow from the seed.

        Raises:
            BadInput: If the data set fails, or its items have another form.
        """
        with _seeded(derive_seed(seed, row)):
            try:
                item = self.dataset[row]
            except Exception as error:  # somebody else's code: it may raise anything
                raise self._fault(row, f"failed: {type(error).__name__}: {error}.") from error
        if isinstance(item, Mapping):
            keys = {kind: next((key for key in names if key in item), None) for kind, names in _KEYS.items()}
            if keys["image"] is None:
                problem = f"is a dictionary without an image; its keys are {quoted(map(str, item))}."
                raise self._fault(row, problem, f"Name the image {quoted(_KEYS['image'])}.")
            values = {kind: item[key] for kind, key in keys.items() if key is not None}
            if "mask" in values and np.shape(values["mask"]) != np.shape(values.get("labels", ())):
                values.pop("mask", None)  # that of a segmentation
            if "patient" in values:
                values["patient"] = str(values["patient"])
            return Item(**values)
        if isinstance(item, tuple | list):
            if len(item) not in (2, 3):
                remedy = "Return (image, labels), (image, labels, mask), or a dictionary."
                raise self._fault(row, f"has {len(item)} entries.", remedy)
            return Item(*item)
        return Item(item)

    def pixels(self, row: int, image: Any) -> NDArray[Any]:
        """Bring the image of an item to ``(height, width[, 3])``, uint8 or float32 from 0 to 255.

        Raises:
            BadInput: If it is none, or of another form than those before.
        """
        if isinstance(image, Image.Image):
            if image.mode not in ("1", "L", "RGB"):
                remedy = 'Convert it in your transform: image.convert("L") or image.convert("RGB").'
                raise self._fault(row, f"is a picture of mode {image.mode}.", remedy)
            values = np.asarray(image.convert("L") if image.mode == "1" else image)
        else:
            values = _channels_last(image)
        if values.ndim not in (2, 3) or (values.ndim == 3 and values.shape[2] != 3) or not values.size:
            remedy = "Images have 1 or 3 channels: a tensor (channels, height, width) or an array (height, width, 3)."
            raise self._fault(row, f"is no image: {type(image).__name__} of shape {np.shape(image)}.", remedy)
        values = self._scaled(row, values)
        first = values if self._first is None else self._first
        if (values.shape, values.dtype) != (first.shape, first.dtype):
            problem = f"is {values.dtype} {values.shape}, and {self.name}[0] is {first.dtype} {first.shape}."
            raise self._fault(row, problem, "Give all images one size and type, with Resize((224, 224)) for instance.")
        return values

    def _scaled(self, row: int, values: NDArray[Any]) -> NDArray[Any]:
        if values.dtype == np.uint8:
            return values
        if values.dtype == np.bool_:
            return values.astype(np.uint8) * np.uint8(255)
        low, high = self.value_range
        if values.dtype.kind != "f":
            remedy = f"Return uint8 from 0 to 255, or floats from {low:g} to {high:g}."
            raise self._fault(row, f"is {values.dtype}.", remedy)
        lowest, highest = float(values.min()), float(values.max())
        margin = _NEAR_INTEGER * (high - low)
        if not (lowest >= low - margin and highest <= high + margin):  # also where one is NaN
            remedy = f"Floats go from {low:g}, black, to {high:g}, white. Leave Normalize out: the network normalises "
            remedy += "by itself ([model] mean, std). Or name the range: pc.LabelledImages(..., value_range=(a, b))."
            raise self._fault(row, f"has values from {lowest:g} to {highest:g}.", remedy)
        scaled = (values.astype(np.float64) - low) * (255 / (high - low))
        whole = np.round(scaled)
        return np.where(np.abs(scaled - whole) < _NEAR_INTEGER, whole, scaled).clip(0, 255).astype(np.float32)

    def read(self, rows: NDArray[np.intp], seed: int = 0) -> NDArray[Any]:
        images = [self.pixels(row, self.item(row, seed).image) for row in rows.tolist()]
        return np.stack(images) if images else np.empty((0, *self.shape[1:]), np.uint8)

    def __getitem__(self, rows: NDArray[np.intp] | slice) -> NDArray[np.uint8]:
        """Return images in 8 bits, to be shown."""
        return np.round(super().__getitem__(rows)).astype(np.uint8)

    def _fault(self, row: int, problem: str, remedy: str = "") -> BadInput:
        return BadInput([Fault(f"{self.name}[{row}]", problem, remedy)])


def open_dataset(dataset: Any, name: str, value_range: tuple[float, float] | None) -> DatasetRows:
    """Open a data set, and read its first image.

    Raises:
        BadInput: If it is no map-style data set, or its first item has another form.
    """
    if isinstance(dataset, torch.utils.data.DataLoader):
        raise BadInput([Fault(name, "is a DataLoader, which makes batches.", "Pass its data set: loader.dataset.")])
    if isinstance(dataset, torch.utils.data.IterableDataset) or not is_map_dataset(dataset):
        remedy = "Pass a map-style data set, with __len__ and __getitem__, or pc.LabelledImages."
        raise BadInput([Fault(name, f"is {type(dataset).__name__}, whose items cannot be read by number.", remedy)])
    low, high = value_range or (0.0, 1.0)
    if not low < high:
        raise BadInput([Fault("value_range", f"goes from {low:g} to {high:g}.", "Name the darker value first.")])
    if not len(dataset):
        raise BadInput([Fault(name, "holds no image.")])
    return DatasetRows(dataset, name, (low, high))


def is_map_dataset(dataset: object) -> bool:
    """Return True if items can be read by number."""
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")


def class_names_of(dataset: Any) -> tuple[str, ...]:
    """Return the names of the classes as the data set itself or the one inside it names them; empty where it does not.

    ``torch.utils.data.Subset`` and its like hold another data set.
    """
    for _ in range(8):
        for attribute in _CLASSES:
            names = getattr(dataset, attribute, None)
            if isinstance(names, Sequence | np.ndarray) and not isinstance(names, str) and len(names):
                return tuple(map(str, names))
        dataset = getattr(dataset, "dataset", None)
    return ()


@dataclass(frozen=True)
class DatasetLabels:
    """The labels of a data set.

    Attributes:
        labels: float32 ``(n, classes)``, NaN for unknown.
        patients: Names of the patients; None where items do not name any.
    """

    labels: NDArray[np.float32]
    patients: list[str] | None


def read_labels(images: DatasetRows, class_names: Sequence[str], tell: Callable[[str], object]) -> DatasetLabels:
    """Read the labels of all items, for which each item is read once; check all images on the way.

    Raises:
        BadInput: With the items that cannot be read, or whose labels do not fit the classes.
    """
    progress = DecodingProgress(len(images), tell)
    labels = np.full((len(images), len(class_names)), np.nan, np.float32)
    patients, faults = list[str | None](), list[Fault]()
    for row in range(len(images)):
        try:
            item = images.item(row)
            images.pixels(row, item.image)
            labels[row] = _label_row(item, class_names)
            patients.append(item.patient)
        except BadInput as bad:
            faults += bad.faults
        except ValueError as error:
            faults.append(Fault(f"{images.name}[{row}]", str(error)))
        if len(faults) >= _MOST_FAILURES:
            break
        progress.advance()
    if faults:
        counted = f"{'at least ' if len(faults) >= _MOST_FAILURES else ''}{len(faults)} of {len(images)} items"
        raise BadInput([*faults[:_LISTED], Fault(images.name, f"{counted} cannot be used; the first are listed.")])
    named = [patient for patient in patients if patient is not None]
    if named and len(named) < len(images):
        problem = f"{len(images) - len(named)} of {len(images)} items name no patient."
        raise BadInput([Fault(images.name, problem, "Name one for each item, or for none.")])
    return DatasetLabels(labels, named or None)


def _label_row(item: Item, class_names: Sequence[str]) -> NDArray[np.float32]:
    """Return the labels of an item, float32 ``(classes,)``; a whole number is the number of the one class it shows.

    Raises:
        ValueError: If they do not fit the classes.
    """
    if item.labels is None:
        raise ValueError("has no labels: return (image, labels), or give labels to pc.LabelledImages.")
    values = np.asarray(item.labels)
    if values.dtype.kind not in "biuf":
        raise ValueError(f"has labels that are no numbers: {item.labels!r:.60}.")
    if values.ndim == 0 or values.shape == (1,):
        value = values.reshape(())
        if len(class_names) > 1:
            if values.dtype.kind == "f" or not 0 <= value < len(class_names):
                raise ValueError(f"has the label {value!s}, which is no number of one of {len(class_names)} classes.")
            row = np.zeros(len(class_names), np.float32)
            row[int(value)] = 1
            return row
        values = values.reshape(1)
    row = values.astype(np.float32)
    if row.shape != (len(class_names),):
        raise ValueError(f"has labels of shape {row.shape}, and there are {len(class_names)} classes.")
    if item.mask is not None:
        mask = np.asarray(item.mask)
        if mask.shape != row.shape or not np.isin(mask, (0, 1)).all():
            raise ValueError("has a mask that is not 1 (label known) or 0 (unknown) for each class.")
        row = np.where(mask == 1, row, np.float32(np.nan))
    if not (np.isnan(row) | np.isin(row, (0, 1))).all():
        raise ValueError(f"has labels {row.tolist()}; they are 1 (present), 0 (absent) or NaN (unknown).")
    return row


def _channels_last(image: Any) -> NDArray[Any]:
    """Return a tensor ``([channels,] height, width)`` or an array with channels last as ``(height, width[, 3])``."""
    values = np.asarray(image)
    first_is_channels = isinstance(image, torch.Tensor) or (values.ndim == 3 and values.shape[2] not in (1, 3))
    if values.ndim == 3 and first_is_channels:
        values = values.transpose(1, 2, 0)
    return values[..., 0] if values.ndim == 3 and values.shape[2] == 1 else values


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Let all random numbers follow from a seed, and go on afterwards as if none had been drawn."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
