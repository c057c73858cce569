"""Images from map-style torch data sets; an item is read, with its own transforms, when a batch needs it.

:mod:`polyclinic.data.sources.dataset_items` defines the supported forms of an item. An image is a PIL picture, a tensor
``([channels,] height, width)`` or an array ``(height, width[, channels])``; its values are uint8, or numbers in one
range for the whole data set. Random transforms are drawn anew for each training batch, and are always the same in
evaluation; both depend only on the seed of the run.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import ConcatDataset, Subset

from polyclinic.common.errors import BadInput, Fault, quote_names
from polyclinic.common.system.hashing import derive_seed
from polyclinic.data.base.image_set import LazyPictures, compute_picture_digest
from polyclinic.data.images.random_generators import RandomGenerators
from polyclinic.data.images.store import DecodingProgress
from polyclinic.data.sources.dataset_items import (
    ConvertItem,
    DatasetItem,
    MapStyleDataset,
    find_class_names_in_labels,
    find_names_of_class_numbers,
    parse_item,
    parse_item_labels,
)
from polyclinic.data.sources.item_notes import describe_partial_cache, describe_unread_entries
from polyclinic.data.sources.label_array import convert_labels_to_array, convert_to_numpy_array, name_classes_by_number
from polyclinic.data.sources.shared_items import is_map_style_dataset
from polyclinic.data.tables.class_names import NAME_CLASSES_REMEDY

_CLASS_NAME_ATTRIBUTES = ("class_names", "classes", "pathologies")
"""Attributes in which data sets store class names."""
_MAX_FAULTS_LISTED = 5
_MAX_FAILED_ITEMS = 100
"""Number of unusable items after which reading stops."""
_ITEMS_READ_TWICE = 8
"""Number of items that are read again at the start, to check that they are reproducible."""
_INTEGER_TOLERANCE = 1e-3
"""Floats, scaled to 0..255, are rounded to an integer if they differ from it by at most this."""
_MAX_OVERSHOOT = 0.25
"""A pixel is far outside the range of values if it is outside by more than this share of the range."""
_MAX_SHARE_OUTSIDE = 0.01
"""The range of values is refused as wrong if more than this share of the pixels is far outside."""
_USUAL_WHITE_VALUES = (255, 4095, 65535)
"""Largest values of pixels with 8, 12 and 16 bits."""
_OPAQUE_MODES = {"1": "L", "P": "RGB", "CMYK": "RGB", "YCbCr": "RGB", "HSV": "RGB", "LAB": "RGB"}
"""Pillow mode -> "L" or "RGB", for modes that can be converted in only one way."""
_RESIZE_CODE = {
    "PIL": "image.resize((224, 224))",
    "tensor": "torchvision.transforms.functional.resize(image, [224, 224])",
    "array": "np.asarray(PIL.Image.fromarray(image).resize((224, 224)))",
}
"""Kind of an image -> Python code that resizes it, for an error message."""
_COLOR_CONVERSION_CODE = {
    "PIL": 'image.convert("RGB")',
    "tensor": "image.expand(3, *image.shape[-2:])",
    "array": "np.repeat(image.reshape(*image.shape[:2], 1), 3, axis=2)",
}
"""Kind of an image -> Python code that converts it from grey to three channels, for an error message."""
_NUMBER_MODES = ("I", "I;16", "I;16B", "I;16L", "I;16N", "F")
"""Pillow modes in which the values of black and white are not defined."""


class TorchDatasetPictures(LazyPictures):
    """The images of a torch data set, read by index: uint8, or float32 from 0 to 255 if the items are not uint8.

    Args:
        dataset: The data set.
        name: Name of the data set, for error messages.
        value_range: The values of black and white of images that are not uint8; None means floats from 0 to 1.
        item: The user's function that converts an item; None if items have a supported form.

    Attributes:
        class_names: Names of the classes; set before labels are read.
        labels: Labels from the first reading of all items, which later readings must repeat; None if the user passed
            labels separately.
        lowest, highest: Smallest and largest value that the data set returned, for images that are not uint8.
        darkest, brightest: Smallest and largest value of all images that were read at the start, from 0 to 255.
        white_share: Fraction of white pixels in all images.
        reproducible: False if reading an item twice with one seed gave different pictures.
        is_augmented: True if reading an item with two seeds gave different pictures.
    """

    draws = True

    def __init__(
        self, dataset: MapStyleDataset, name: str, value_range: tuple[float, float] | None, item: ConvertItem | None
    ) -> None:
        self.dataset, self.name = dataset, name
        self.value_range = value_range
        self.convert_item = item
        self.class_names: tuple[str, ...] = ()
        self._generators = RandomGenerators(dataset if item is None else (dataset, item))
        self._first: NDArray[Any] | None = None
        self.labels: CollectedItems | None = None
        self.picture_digests = np.empty(0, np.uint64)
        self.darkest, self.brightest, self.white_share = 255.0, 0.0, 0.0
        self.share_outside = 0.0
        self.lowest, self.highest = np.inf, -np.inf
        self.reproducible = True
        self.is_augmented = False
        self._first = self.convert_item_image(0, self.read_item(0).image)
        self.shape = (len(dataset), *self._first.shape)

    def read_item(self, row: int, seed: int | None = 0) -> DatasetItem:
        """Read one item; the seed determines its random transforms.

        Args:
            seed: With a number, each row has different random transforms. With None, all rows have the same random
                transforms, so that equal images stay equal.

        Raises:
            BadInput: If the data set raises an error, or the item does not have a supported form.
        """
        with self._generators.use_seed(0 if seed is None else derive_seed(seed, row)):
            try:
                item = self.dataset[row]
                item = item if self.convert_item is None else self.convert_item(item)
            except (Exception, SystemExit) as error:  # code of the user or of a library may raise anything
                raise self._make_item_error(row, f"failed: {type(error).__name__}: {error}.") from error
        try:
            return parse_item(item, self.class_names)
        except ValueError as error:
            raise self._make_item_error(row, str(error)) from error

    def convert_item_image(self, row: int, image: Any) -> NDArray[Any]:
        """Convert the image of an item to ``(height, width[, 3])``, uint8 or float32 from 0 to 255.

        Raises:
            BadInput: If ``image`` is not an image, or its shape or type differs from the first image.
        """
        if isinstance(image, Image.Image):
            values = self._convert_pillow_picture(row, image)
        else:
            try:
                values = _convert_to_channels_last(image)
            except Exception as error:  # each library raises its own exceptions
                raise self._make_item_error(row, f"is no image: {type(image).__name__}: {error}.") from error
        is_volume = values.ndim == 4 and values.shape[3] == 1
        is_picture = values.ndim == 2 or (values.ndim == 3 and values.shape[2] == 3)
        if not (is_picture or is_volume) or not values.size:
            problem = f"is no image: {type(image).__name__} of shape {getattr(image, 'shape', ())}."
            remedy = "Images have 1 or 3 channels: a tensor (channels, height, width) or an array (height, width, 3)."
            if values.ndim == 4:
                remedy = "Volumes have one channel: (1, depth, height, width)."
            raise self._make_item_error(row, problem, remedy)
        values = self._scale_pixels_to_255(row, values)
        first = values if self._first is None else self._first
        if values.shape != first.shape:
            self._refuse_other_shape(row, image, values, first)
        if values.dtype != first.dtype:
            problem = f"is {values.dtype}, and {self.name}[0] is {first.dtype}."
            raise self._make_item_error(row, problem, "Give all images one type.")
        return values

    def _convert_pillow_picture(self, row: int, image: Image.Image) -> NDArray[Any]:
        if image.mode in _OPAQUE_MODES and "transparency" not in image.info:
            return np.asarray(image.convert(_OPAQUE_MODES[image.mode]))
        if image.mode in ("L", "RGB", *_NUMBER_MODES):
            return np.asarray(image)
        remedy = "What shows where it is transparent is unknown: paste it on black or white in your transform."
        raise self._make_item_error(row, f"is a picture of mode {image.mode}.", remedy)

    def _refuse_other_shape(self, row: int, image: Any, values: NDArray[Any], first: NDArray[Any]) -> None:
        problem = f"has the shape {values.shape}, and {self.name}[0] has {first.shape}."
        kind = "PIL" if isinstance(image, Image.Image) else "tensor" if isinstance(image, torch.Tensor) else "array"
        remedy = f"Give all images one size: {_RESIZE_CODE[kind]} for instance."
        if values.ndim != first.ndim:
            remedy = f"Give all images one number of channels: {_COLOR_CONVERSION_CODE[kind]} for each of them in grey."
        raise self._make_item_error(row, problem, remedy)

    def _scale_pixels_to_255(self, row: int, values: NDArray[Any]) -> NDArray[Any]:
        """Return values as uint8, or as float32 clipped to 0 to 255; count values that are far outside the range."""
        if values.dtype == np.bool_:
            return values.astype(np.uint8) * np.uint8(255)
        if values.dtype == np.uint8 and self.value_range is None:
            return values
        if values.dtype.kind != "f" and self.value_range is None:
            problem = f"is {values.dtype}: which values are black and white is unknown."
            remedy = "Name them: pc.LabelledImages(dataset, value_range=(0, 4095)) for pictures of 12 bits."
            raise self._make_item_error(row, problem, remedy)
        low, high = self.value_range or (0.0, 1.0)
        scaled = (values.astype(np.float64) - low) * (255 / (high - low))
        if not np.isfinite(scaled).all():
            raise self._make_item_error(row, "has pixels that are NaN or infinite.", "Give every pixel a value.")
        self.lowest, self.highest = min(self.lowest, float(values.min())), max(self.highest, float(values.max()))
        self.share_outside += float((np.abs(scaled - 127.5) > (0.5 + _MAX_OVERSHOOT) * 255).mean()) / len(self.dataset)
        rounded = np.round(scaled)
        return np.where(np.abs(scaled - rounded) < _INTEGER_TOLERANCE, rounded, scaled).clip(0, 255).astype(np.float32)

    def read_picture_digests(self, rows: NDArray[np.intp]) -> NDArray[np.uint64]:
        return self.picture_digests[rows]

    def read_brightest_values(self, rows: NDArray[np.intp]) -> NDArray[Any]:
        return np.full(len(rows), self.brightest)  # of all pictures together, which were read already

    def read_pictures(self, rows: NDArray[np.intp], seed: int = 0) -> NDArray[Any]:
        images = []
        for row in rows.tolist():
            item = self.read_item(row, seed)
            self.check_item_labels_unchanged(row, item)
            images.append(self.convert_item_image(row, item.image))
        return np.stack(images) if images else np.empty((0, *self.shape[1:]), np.uint8)

    def check_item_labels_unchanged(self, row: int, item: DatasetItem) -> None:
        """Check that an item has the same labels and patient as at its first reading; its image may differ.

        Raises:
            BadInput: If labels or patient differ.
        """
        if self.labels is None:
            return
        try:
            labels = parse_item_labels(item, self.class_names)
        except ValueError as error:
            raise self._make_item_error(row, str(error)) from error
        patient = None if self.labels.patients is None else self.labels.patients[row]
        if not np.array_equal(labels, self.labels.labels[row], equal_nan=True):
            problem = f"has the labels {labels.tolist()}, and had {self.labels.labels[row].tolist()} at first."
        elif self.labels.patients is not None and item.patient != patient:
            problem = "has another patient than at its first reading."
        else:
            return
        remedy = "An item always has the same labels and patient; only its picture may vary."
        raise self._make_item_error(row, problem, remedy)

    def note_brightness(self, pixels: NDArray[Any]) -> None:
        """Update :attr:`darkest` and :attr:`brightest` with the values of a picture."""
        self.darkest = min(self.darkest, float(pixels.min()))
        self.brightest = max(self.brightest, float(pixels.max()))

    def check_items_repeatable(self) -> None:
        """Read some items again, to check that another seed gives the same labels.

        If the same seed gives another picture, :attr:`reproducible` becomes False. If another seed gives another
        picture, :attr:`is_augmented` becomes True.

        Raises:
            BadInput: If the labels of an item differ.
        """
        for row in np.unique(np.linspace(0, len(self) - 1, _ITEMS_READ_TWICE).astype(int)).tolist():
            first, again, other = (self.read_item(row, seed) for seed in (0, 0, 1))
            # Convert the picture of the other seed too: a random size, for instance, would stop the run in round 1.
            pictures = [self.convert_item_image(row, item.image) for item in (first, again, other)]
            self.reproducible &= bool(np.array_equal(pictures[0], pictures[1]))
            self.is_augmented |= not np.array_equal(pictures[0], pictures[2])
            self.note_brightness(pictures[2])  # a random transform may make one picture black
            self.check_item_labels_unchanged(row, other)
            if self.labels is not None:
                continue
            try:
                labels = convert_to_numpy_array(first.labels)
                are_equal = np.array_equal(labels, convert_to_numpy_array(other.labels), equal_nan=True)
            except Exception:  # labels that are not arrays of numbers: each library raises its own exceptions
                continue
            if not are_equal:
                problem = f"has the labels {other.labels}, and had {first.labels} before."
                remedy = "An item always has the same labels; only its picture may vary."
                raise self._make_item_error(row, problem, remedy)

    def __getitem__(self, rows: NDArray[np.intp] | slice) -> NDArray[np.uint8]:
        """Return images rounded to uint8, for display."""
        return np.round(super().__getitem__(rows)).astype(np.uint8)

    def _make_item_error(self, row: int, problem: str, remedy: str = "") -> BadInput:
        return BadInput([Fault(f"{self.name}[{row}]", problem, remedy)])


def open_torch_dataset(
    dataset: Any, name: str, value_range: tuple[float, float] | None, item: ConvertItem | None = None
) -> TorchDatasetPictures:
    """Check a user's data set, and prepare it for reading by index.

    Args:
        name: Name of the data set, for error messages.
        value_range: The values of black and white of images that are not uint8; None means floats from 0 to 1.
        item: The user's function that converts an item; None if items have a supported form.

    Raises:
        BadInput: If the data set is not map-style or is empty, or its first item is not usable.
    """
    if isinstance(dataset, torch.utils.data.DataLoader):
        raise BadInput([Fault(name, "is a DataLoader, which makes batches.", "Pass its data set: loader.dataset.")])
    if isinstance(dataset, torch.utils.data.IterableDataset) or not is_map_style_dataset(dataset):
        remedy = "Pass a map-style data set, with __len__ and __getitem__, or pc.LabelledImages."
        raise BadInput([Fault(name, f"is {type(dataset).__name__}, whose items cannot be read by number.", remedy)])
    if value_range is not None and not value_range[0] < value_range[1]:
        problem = f"goes from {value_range[0]:g} to {value_range[1]:g}."
        raise BadInput([Fault("value_range", problem, "Name the darker value first.")])
    if isinstance(dataset, Mapping) and any(isinstance(key, str) for key in dataset):
        remedy = 'Leave pc.LabelledImages out: dataset={"train": ..., "test": ...}. Each part may be one of its own.'
        raise BadInput([Fault(name, f"is a dictionary of {quote_names(map(str, dataset))}, not one data set.", remedy)])
    try:
        count = len(dataset)
    except Exception as error:  # code of the user or of a library may raise anything
        raise BadInput([Fault(name, f"has no length: {type(error).__name__}: {error}.")]) from error
    if not count:
        raise BadInput([Fault(name, "holds no image.")])
    return TorchDatasetPictures(dataset, name, value_range, item)


def read_dataset_class_names(dataset: Any, name: str) -> tuple[str, ...]:
    """Return the class names that a data set defines; empty if it defines none.

    Class names are searched in this order: the attribute ``class_names``, ``classes`` or ``pathologies``; the keys of
    ``class_to_idx`` (torchvision); the names of a ``ClassLabel`` in ``features`` (Hugging Face); ``info["label"]``
    (MedMNIST). For ``Subset`` and ``ConcatDataset``, the inner data sets are searched.

    Args:
        name: Name of the data set in error messages.

    Raises:
        BadInput: If the data sets of a ``ConcatDataset`` have different classes.
    """
    for attribute in _CLASS_NAME_ATTRIBUTES:
        names = getattr(dataset, attribute, None)
        if isinstance(names, Sequence | np.ndarray) and not isinstance(names, str) and len(names):
            return tuple(map(str, names))
    numbers = getattr(dataset, "class_to_idx", None)
    if isinstance(numbers, Mapping) and sorted(numbers.values()) == [*range(len(numbers))]:
        return tuple(str(name) for name in sorted(numbers, key=numbers.__getitem__))
    features = getattr(dataset, "features", None)
    if isinstance(features, Mapping):
        named = [list(feature.names) for feature in features.values() if isinstance(getattr(feature, "names", 0), list)]
        if len(named) == 1:
            return tuple(map(str, named[0]))
    info = getattr(dataset, "info", None)
    if isinstance(info, Mapping) and isinstance(info.get("label"), Mapping):
        numbered = info["label"]
        return tuple(str(numbered[key]) for key in sorted(numbered, key=int))
    if isinstance(dataset, Subset):
        return read_dataset_class_names(dataset.dataset, name)
    if not isinstance(dataset, ConcatDataset):
        return ()
    names_of_inner = [read_dataset_class_names(inner, name) for inner in dataset.datasets]
    distinct = sorted({names for names in names_of_inner if names})
    if len(distinct) > 1:
        problem = f"joins data sets of different classes: {'; '.join(quote_names(names) for names in distinct[:3])}."
        raise BadInput([Fault(name, problem, "Bring all to one list of classes, in one order.")])
    return distinct[0] if distinct and () not in names_of_inner else ()


@dataclass(frozen=True)
class CollectedItems:
    """The labels, patients and parts from the items of a data set, and notes for the user.

    Attributes:
        labels: float32 ``(n, classes)``, NaN for unknown.
        patients: Name of the patient of each item; None if the items have no patients.
        parts: ``train``, ``validation`` or ``test`` for each item; None if the items have no parts.
        notes: Sentences for the user about entries that are ignored.
    """

    labels: NDArray[np.float32]
    patients: list[str] | None
    parts: list[str] | None
    notes: tuple[str, ...] = ()


def read_all_items(
    images: TorchDatasetPictures, tell: Callable[[str], object], given: Mapping[str, Any], *, labels: bool = True
) -> CollectedItems:
    """Read each item once to check it, and to collect its labels, its patient and its part.

    If the class names are unknown, they are taken from the labels, or are the numbers of the classes. Some items are
    read again with another seed, to check that random transforms do not change the labels.

    Args:
        tell: Function that prints a progress line.
        given: The user's arguments ``patients``, ``sources`` and ``parts``, for :func:`describe_unread_entries`.
        labels: True to read the labels; False leaves them all unknown.

    Raises:
        BadInput: With the items that cannot be read, or whose labels do not fit the classes.
    """
    progress = DecodingProgress(len(images), tell)
    digests, images.share_outside = np.empty(len(images), np.uint64), 0.0
    items, faults = list[DatasetItem](), list[Fault]()
    for row in range(len(images)):
        try:
            item = images.read_item(row, seed=None)
            pixels = images.convert_item_image(row, item.image)
            digests[row] = compute_picture_digest(pixels)
            images.note_brightness(pixels)
            images.white_share += float((pixels == 255).mean()) / len(images)
            if labels and images.class_names:
                parse_item_labels(item, images.class_names)  # a wrong label stops the reading early
            items.append(replace(item, image=None, unread=item.unread if row == 0 else {}))
        except BadInput as bad:
            faults += bad.faults
        except ValueError as error:
            faults.append(Fault(f"{images.name}[{row}]", str(error)))
        if len(faults) >= _MAX_FAILED_ITEMS:
            break
        progress.count_decoded_picture()
    _refuse_unusable_items(images, faults)
    refuse_wrong_value_range(images)
    if labels and not images.class_names:
        images.class_names = _name_classes(images, items, tell)
    rows = _parse_all_labels(images, items) if labels else np.full((len(items), len(images.class_names)), np.nan)
    unread = describe_unread_entries(items[0], len(images.class_names), given, labels_are_read=labels)
    notes = tuple(filter(None, (unread, describe_partial_cache(images.dataset))))
    named_patients = _take_for_all_or_none(images.name, [item.patient for item in items], "patient")
    named_splits = _take_for_all_or_none(images.name, [item.split for item in items], "split")
    images.picture_digests = digests
    collected = CollectedItems(rows.astype(np.float32), named_patients, named_splits, notes)
    images.labels = collected if labels else None
    images.check_items_repeatable()
    return collected


def _refuse_unusable_items(images: TorchDatasetPictures, faults: Sequence[Fault]) -> None:
    """Raise :class:`BadInput` with the first faults and the number of unusable items, if there are faults."""
    if faults:
        counted = f"{'at least ' if len(faults) >= _MAX_FAILED_ITEMS else ''}{len(faults)} of {len(images)} items"
        raise BadInput(
            [*faults[:_MAX_FAULTS_LISTED], Fault(images.name, f"{counted} cannot be used; the first are listed.")]
        )


def _name_classes(
    images: TorchDatasetPictures, items: Sequence[DatasetItem], tell: Callable[[str], object]
) -> tuple[str, ...]:
    """Return the class names that the labels or the items contain, or otherwise the numbers of the classes.

    Raises:
        BadInput: If the labels contain no class names, and are not numbers of equal shape.
    """
    names = find_class_names_in_labels(item.labels for item in items) or find_names_of_class_numbers(items)
    if names:
        return names
    try:
        rows = np.stack([convert_labels_to_array(item.labels, ()).squeeze() for item in items])
        if rows.ndim > 2:
            raise ValueError
    except ValueError:
        remedy = f"{NAME_CLASSES_REMEDY}."
        problem = f"{type(images.dataset).__name__} names no classes."
        raise BadInput([Fault(images.name, problem, remedy)]) from None
    return name_classes_by_number(rows, tell)


def _parse_all_labels(images: TorchDatasetPictures, items: Sequence[DatasetItem]) -> NDArray[np.float32]:
    """Return the labels of all items, ``(n, classes)``.

    Raises:
        BadInput: With the items whose labels do not fit the classes.
    """
    rows = np.full((len(items), len(images.class_names)), np.nan, np.float32)
    faults = list[Fault]()
    for row, item in enumerate(items):
        try:
            rows[row] = parse_item_labels(item, images.class_names)
        except ValueError as error:
            faults.append(Fault(f"{images.name}[{row}]", str(error)))
    _refuse_unusable_items(images, faults)
    return rows


def refuse_wrong_value_range(images: TorchDatasetPictures) -> None:
    """Refuse a data set in which many values are far outside ``value_range``, because they would be clipped.

    Normalised pixels, or pixels with another range, are far outside. Noise of an augmentation is not.

    Raises:
        BadInput: If more than :data:`_MAX_SHARE_OUTSIDE` of the pixels are far outside.
    """
    if images.share_outside <= _MAX_SHARE_OUTSIDE:
        return
    low, high = images.value_range or (0.0, 1.0)
    share = f"{images.share_outside:.0%} of its pixels"
    problem = f"has values outside {low:g} (black) to {high:g} (white), by more than a quarter of that, in {share}."
    problem += f" They go from {images.lowest:.4g} to {images.highest:.4g}."
    remedy = "Name black and white: pc.LabelledImages(dataset, value_range=({:g}, {:g}))."
    full = next((white for white in _USUAL_WHITE_VALUES if images.highest <= white), None)
    if images.lowest >= 0 and full is not None:
        raise BadInput([Fault(images.name, problem, remedy.format(0, full))])
    remedy = remedy.format(math.floor(images.lowest), math.ceil(images.highest))
    normalize = "Leave Normalize out, if there is one: the network normalises by itself ([model] mean, std). Else "
    raise BadInput([Fault(images.name, problem, f"{normalize}{remedy[0].lower()}{remedy[1:]}")])


def _take_for_all_or_none(where: str, values: Sequence[str | None], what: str) -> list[str] | None:
    """Return the values if all items have one; None if no item has one.

    Args:
        what: Noun for a value, for the error message.

    Raises:
        BadInput: If only some items have a value.
    """
    named = [value for value in values if value is not None]
    if named and len(named) < len(values):
        problem = f"{len(values) - len(named)} of {len(values)} items name no {what}."
        raise BadInput([Fault(where, problem, "Name one for each item, or for none.")])
    return named or None


def _convert_to_channels_last(image: Any) -> NDArray[Any]:
    """Convert an image to an array ``(height, width[, channels])``, and drop the axis of a single channel.

    Channels are the first axis of a tensor, and of an array with three axes whose last axis is neither 1 nor 3 long. A
    volume ``(1, depth, height, width)`` becomes ``(depth, height, width, 1)``.
    """
    values = convert_to_numpy_array(image)
    if values.ndim == 4 and values.shape[0] == 1:
        return np.moveaxis(values, 0, -1)
    first_is_channels = isinstance(image, torch.Tensor) or (values.ndim == 3 and values.shape[2] not in (1, 3))
    if values.ndim == 3 and first_is_channels:
        values = values.transpose(1, 2, 0)
    return values[..., 0] if values.ndim == 3 and values.shape[2] == 1 else values
