"""Images from map-style torch data sets; an item is read, with its own transforms, when a batch needs it.

An item is ``(image, labels)``, ``(image, labels, mask)``, or a dictionary with such keys. An image is a PIL picture, a
tensor ``([channels,] height, width)`` or an array ``(height, width[, channels])``; its values are uint8, or floats in
one range for the whole data set. Random transforms are drawn anew for each training batch, and are always the same in
evaluation; both follow from the run's seed.
"""

import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import combinations
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, Subset

from polyclinic.common.data.base.image_set import LazyPictures, compute_picture_digest
from polyclinic.common.data.base.names import is_anonymous_patient, normalize_name
from polyclinic.common.data.base.vocabulary import (
    CLASS_LIST_KEYS,
    GEOMETRY_KEYS,
    LABEL_KEY,
    NO_PATIENT_KEY,
    PATIENT_KEY,
)
from polyclinic.common.data.images.store import DecodingProgress
from polyclinic.common.data.sources.label_array import convert_labels_to_array, convert_to_numpy_array
from polyclinic.common.data.sources.plugin import MapStyleDataset
from polyclinic.common.errors import BadInput, Fault, quote_names
from polyclinic.common.system.hashing import derive_seed

_KEYS = {
    "image": ("image", "img", "pixelvalues"),
    "labels": ("labels", "label", "lab", "target", "targets"),
    "mask": ("labelmask", "labelsmask"),
    "segmentation": ("mask",),
    "patient": ("patient", "patients", "patientid", "patientids", "pid", "subject", "subjects", "subjectid"),
}
"""Accepted keys of a dictionary item, by meaning, reduced to lower-case letters and digits."""
_LIST_SIGNS = re.compile("[,;|]")
_CONTAINED = 4
"""Letters and digits of a class name that is recognised among the words of a key."""
_DEPTH = 6
"""Levels of dictionaries, lists and objects inside an entry that are searched for labels and patients."""
_WITHOUT_ENTRIES = ("builtins", "numpy", "torch", "PIL", "pandas", "pathlib", "datetime", "decimal", "uuid")
"""Packages whose objects are values, and have no entries of their own."""
_CLASSES = ("class_names", "classes", "pathologies")
"""Attributes in which data sets store class names."""
_PERSON = re.compile("(labell?er|annotator)s?")
_NOTES = frozenset(("by", "file", "filename", "files", "name", "names", "path", "paths", "source", "uri", "url"))
"""Words of a key beside "label" or "mask" whose text says where labels are from, or names them again."""
_LISTED, _MOST_FAILURES = 5, 100
_GIVE_LABELS = "Return (image, labels), or give labels to pc.LabelledImages."
_REPEATED = 8
"""Number of items that are read again at the start."""
_NEAR_INTEGER = 1e-3
"""Rounding error up to which floats, scaled to 0..255, are taken for 8-bit values."""


@dataclass(frozen=True)
class TorchDatasetItem:
    """One item as the data set returns it; fields that the item lacks are None.

    Attributes:
        mask: Tells for each class whether its label is known.
        unclear: For the keys "labels" and "patient", an error message if that entry of the item is ambiguous.
        unread: Further entries of a dictionary item, by key.
    """

    image: Any
    labels: Any = None
    mask: Any = None
    patient: str | None = None
    unclear: Mapping[str, str] = field(default_factory=dict)
    unread: Mapping[Any, Any] = field(default_factory=dict)


class TorchDatasetPictures(LazyPictures):
    """The images of a torch data set, read by index: uint8, or float32 from 0 to 255 if the data set returns floats.

    Args:
        name: Name of the data set in error messages.
        value_range: The float values of black and white.

    Attributes:
        labels: Labels from the first reading of all items, with which later readings must agree; None if the user gave
            labels separately.
        brightest: The highest value of all images at the first reading of all items, from 0 to 255; 0 before it.
    """

    draws = True

    def __init__(self, dataset: MapStyleDataset, name: str, value_range: tuple[float, float]) -> None:
        self.dataset, self.name, self.value_range = dataset, name, value_range
        self._first: NDArray[Any] | None = None
        self.labels: CollectedItemLabels | None = None
        self.picture_digests, self.brightest = np.empty(0, np.uint64), 0.0
        self.first_item = self.read_dataset_item(0)
        self._first = self.convert_item_image(0, self.first_item.image)
        self.shape = (len(dataset), *self._first.shape)

    def read_dataset_item(self, row: int, seed: int | None = 0) -> TorchDatasetItem:
        """Read one item, whose random transforms are determined by the seed.

        Args:
            seed: With a number, each row has random transforms of its own. With None, all rows have the same ones, so
                that equal images stay equal.

        Raises:
            BadInput: If the data set raises an error, or the item has no usable form.
        """
        with _seed_global_random_generators(0 if seed is None else derive_seed(seed, row)):
            try:
                item = self.dataset[row]
            except (Exception, SystemExit) as error:  # somebody else's code: it may raise anything
                raise self._make_item_error(row, f"failed: {type(error).__name__}: {error}.") from error
        if isinstance(item, Mapping):
            return self._parse_dictionary_item(row, item)
        if isinstance(item, tuple | list):
            if len(item) not in (2, 3):
                remedy = "Return (image, labels), (image, labels, mask), or a dictionary."
                raise self._make_item_error(row, f"has {len(item)} entries.", remedy)
            return TorchDatasetItem(*item)
        return TorchDatasetItem(item)

    def _parse_dictionary_item(self, row: int, item: Mapping[Any, Any]) -> TorchDatasetItem:
        plain = {key: _keep_letters_and_digits(key) for key in item}
        keys = {kind: [key for key in item if plain[key] in names] for kind, names in _KEYS.items()}
        if len(keys["image"]) != 1:
            problem = f"is a dictionary without an image; its keys are {quote_names(map(str, item))}."
            if keys["image"]:
                problem = f"is a dictionary with the images {quote_names(map(str, keys['image']))}."
            raise self._make_item_error(row, problem, f"Name one image {quote_names(_KEYS['image'])}.")
        values = {kind: item[names[0]] for kind, names in keys.items() if names}
        unclear = {
            kind: f"has {quote_names(map(str, keys[kind]))}, which all name {kind}. Keep one of them."
            for kind in ("labels", "patient", "mask", "segmentation")
            if len(keys[kind]) > 1
        }
        if "segmentation" in values and not _is_segmentation_mask(values["segmentation"], values["image"]):
            if "mask" in values:
                names = f'"{keys["segmentation"][0]}" and "{keys["mask"][0]}"'
                unclear["mask"] = f"has {names}, neither of an image's size."
            values["mask"] = values["segmentation"]
        unread = {key: item[key] for key in item if not any(key in names for names in keys.values())}
        unclear |= _find_ambiguous_item_entries(unread, keys, values["image"])
        if not keys["labels"]:
            unclear["labels"] = f"has no labels among its keys, {quote_names(map(str, item))}. " + _GIVE_LABELS
        if unclear.keys() & {"mask", "segmentation"}:
            unclear["labels"] = unclear.get("mask") or unclear["segmentation"]
        patient = None
        try:
            patient = _parse_item_patient_name(values.get("patient"))
        except ValueError as error:
            unclear["patient"] = str(error)
        return TorchDatasetItem(values["image"], values.get("labels"), values.get("mask"), patient, unclear, unread)

    def convert_item_image(self, row: int, image: Any) -> NDArray[Any]:
        """Convert an item's image to ``(height, width[, 3])``, uint8 or float32 from 0 to 255.

        Raises:
            BadInput: If it is no image, or its shape or type differs from the first image.
        """
        if isinstance(image, Image.Image):
            if image.mode not in ("1", "L", "RGB"):
                remedy = 'Convert it in your transform: image.convert("L") or image.convert("RGB").'
                raise self._make_item_error(row, f"is a picture of mode {image.mode}.", remedy)
            values = np.asarray(image.convert("L") if image.mode == "1" else image)
        else:
            try:
                values = _convert_to_channels_last(image)
            except Exception as error:  # each library raises its own exceptions
                raise self._make_item_error(row, f"is no image: {type(image).__name__}: {error}.") from error
        if values.ndim not in (2, 3) or (values.ndim == 3 and values.shape[2] != 3) or not values.size:
            problem = f"is no image: {type(image).__name__} of shape {getattr(image, 'shape', ())}."
            remedy = "Images have 1 or 3 channels: a tensor (channels, height, width) or an array (height, width, 3)."
            raise self._make_item_error(row, problem, remedy)
        values = self._scale_pixels_to_255(row, values)
        first = values if self._first is None else self._first
        if (values.shape, values.dtype) != (first.shape, first.dtype):
            problem = f"is {values.dtype} {values.shape}, and {self.name}[0] is {first.dtype} {first.shape}."
            remedy = "Give all images one size and type, with Resize((224, 224)) for instance."
            raise self._make_item_error(row, problem, remedy)
        return values

    def _scale_pixels_to_255(self, row: int, values: NDArray[Any]) -> NDArray[Any]:
        if values.dtype == np.uint8:
            return values
        if values.dtype == np.bool_:
            return values.astype(np.uint8) * np.uint8(255)
        low, high = self.value_range
        if values.dtype.kind != "f":
            remedy = f"Return uint8 from 0 to 255, or floats from {low:g} to {high:g}."
            raise self._make_item_error(row, f"is {values.dtype}.", remedy)
        lowest, highest = float(values.min()), float(values.max())
        margin = _NEAR_INTEGER * (high - low)
        if not (lowest >= low - margin and highest <= high + margin):  # also if a value is NaN
            remedy = f"Floats go from {low:g}, black, to {high:g}, white. Leave Normalize out: the network normalises "
            remedy += "by itself ([model] mean, std). Or name the range: pc.LabelledImages(..., value_range=(a, b))."
            raise self._make_item_error(row, f"has values from {lowest:g} to {highest:g}.", remedy)
        scaled = (values.astype(np.float64) - low) * (255 / (high - low))
        whole = np.round(scaled)
        return np.where(np.abs(scaled - whole) < _NEAR_INTEGER, whole, scaled).clip(0, 255).astype(np.float32)

    def read_picture_digests(self, rows: NDArray[np.intp]) -> NDArray[np.uint64]:
        return self.picture_digests[rows]

    def read_pictures(self, rows: NDArray[np.intp], seed: int = 0) -> NDArray[Any]:
        images = []
        for row in rows.tolist():
            item = self.read_dataset_item(row, seed)
            self.check_item_labels_unchanged(row, item)
            images.append(self.convert_item_image(row, item.image))
        return np.stack(images) if images else np.empty((0, *self.shape[1:]), np.uint8)

    def check_item_labels_unchanged(self, row: int, item: TorchDatasetItem) -> None:
        """Check that an item has the same labels and patient as at its first reading; its image may differ.

        Raises:
            BadInput: If labels or patient differ.
        """
        if self.labels is None:
            return
        try:
            labels = _parse_item_labels(item, self.labels.class_names)
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

    def check_items_repeatable(self) -> None:
        """Read some items again, to check that the same seed gives the same picture, and another seed the same labels.

        Raises:
            BadInput: If an item differs.
        """
        for row in np.unique(np.linspace(0, len(self) - 1, _REPEATED).astype(int)).tolist():
            first, again, other = (self.read_dataset_item(row, seed) for seed in (0, 0, 1))
            pictures = [self.convert_item_image(row, item.image) for item in (first, again)]
            if not np.array_equal(pictures[0], pictures[1]):
                problem = "has another picture when it is read again with the same seed."
                remedy = (
                    "Draw with torch, numpy.random or random and no generator of its own: the run sets their seeds."
                )
                raise self._make_item_error(row, problem, remedy)
            self.check_item_labels_unchanged(row, other)
            if self.labels is not None:
                continue
            try:
                labels = convert_to_numpy_array(first.labels)
                are_equal = np.array_equal(labels, convert_to_numpy_array(other.labels), equal_nan=True)
            except Exception:  # each library has exceptions of its own for what is no array of numbers
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


def open_torch_dataset(dataset: Any, name: str, value_range: tuple[float, float] | None) -> TorchDatasetPictures:
    """Check a user's data set, and prepare it for reading by index.

    Args:
        name: Name of the data set in error messages.
        value_range: The float values of black and white; None means 0 and 1.

    Raises:
        BadInput: If it is not map-style or is empty, or its first item is not usable.
    """
    if isinstance(dataset, torch.utils.data.DataLoader):
        raise BadInput([Fault(name, "is a DataLoader, which makes batches.", "Pass its data set: loader.dataset.")])
    if isinstance(dataset, torch.utils.data.IterableDataset) or not is_map_style_dataset(dataset):
        remedy = "Pass a map-style data set, with __len__ and __getitem__, or pc.LabelledImages."
        raise BadInput([Fault(name, f"is {type(dataset).__name__}, whose items cannot be read by number.", remedy)])
    low, high = value_range or (0.0, 1.0)
    if not low < high:
        raise BadInput([Fault("value_range", f"goes from {low:g} to {high:g}.", "Name the darker value first.")])
    try:
        count = len(dataset)
    except Exception as error:  # somebody else's code: it may raise anything
        raise BadInput([Fault(name, f"has no length: {type(error).__name__}: {error}.")]) from error
    if not count:
        raise BadInput([Fault(name, "holds no image.")])
    return TorchDatasetPictures(dataset, name, (low, high))


def is_map_style_dataset(dataset: object) -> bool:
    """Return True if an object has ``__getitem__`` and ``__len__``."""
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")


def read_dataset_class_names(dataset: Any, name: str) -> tuple[str, ...]:
    """Return the class names that a data set defines as an attribute; empty if it defines none.

    For ``Subset`` and ``ConcatDataset`` the data sets inside are searched, because these two return labels unchanged.

    Args:
        name: Name of the data set in error messages.

    Raises:
        BadInput: If the data sets of a ``ConcatDataset`` have different classes.
    """
    for attribute in _CLASSES:
        names = getattr(dataset, attribute, None)
        if isinstance(names, Sequence | np.ndarray) and not isinstance(names, str) and len(names):
            return tuple(map(str, names))
    if isinstance(dataset, Subset):
        return read_dataset_class_names(dataset.dataset, name)
    if not isinstance(dataset, ConcatDataset):
        return ()
    every = [read_dataset_class_names(inner, name) for inner in dataset.datasets]
    distinct = sorted({names for names in every if names})
    if len(distinct) > 1:
        problem = f"joins data sets of different classes: {'; '.join(quote_names(names) for names in distinct[:3])}."
        raise BadInput([Fault(name, problem, "Bring all to one list of classes, in one order.")])
    return distinct[0] if distinct and () not in every else ()


def find_shared_item_faults(where: str, parts: Mapping[str, Any]) -> list[Fault]:
    """Return a fault for each pair of parts that contain the same items.

    Args:
        where: Name of the data set in the faults.
        parts: The data set of each part, by the part's name.
    """
    items = {name: set(_iterate_innermost_items(dataset)) for name, dataset in parts.items()}
    return [
        Fault(where, f'has {shared} of the items of "{first}" in "{second}" too.', "Give each part items of its own.")
        for first, second in combinations(items, 2)
        if (shared := len(items[first] & items[second]))
    ]


def find_repeated_item_faults(where: str, dataset: Any) -> list[Fault]:
    """Return a fault if a data set contains an item several times, for instance to oversample rare classes.

    Args:
        where: Name of the data set in the fault.
    """
    items = list(_iterate_innermost_items(dataset))
    if not (repeated := len(items) - len(set(items))):
        return []
    problem = f"holds {repeated} items again, and names no patients: an image would be for training and for tests."
    return [Fault(where, problem, "Give each item once, or patients=[...].")]


def _iterate_innermost_items(dataset: Any, rows: Iterable[int] | None = None) -> Iterator[tuple[int, int]]:
    """Yield for each item the data set that really holds it, behind ``Subset``, ``ConcatDataset`` and wrappers.

    Args:
        rows: Indices of the items; None for all.

    Yields:
        The ``id`` of the innermost data set, and the index of the item in it.
    """
    if hasattr(dataset, "__len__"):  # the data set inside a Subset needs no length
        rows = range(len(dataset)) if rows is None else [row % len(dataset) for row in rows]
    assert rows is not None
    if isinstance(dataset, Subset):
        yield from _iterate_innermost_items(dataset.dataset, [int(dataset.indices[row]) for row in rows])
    elif isinstance(dataset, ConcatDataset):
        ends = np.array([0, *dataset.cumulative_sizes])
        for row in rows:
            place = int(np.searchsorted(ends, row, side="right")) - 1
            yield from _iterate_innermost_items(dataset.datasets[place], [row - int(ends[place])])
    else:
        for attribute in ("dataset", "subset"):
            inner: Any = getattr(dataset, attribute, None)
            is_wrapper = isinstance(inner, Dataset) and inner is not dataset and is_map_style_dataset(inner)
            if is_wrapper and is_map_style_dataset(dataset) and len(inner) == len(dataset):  # a wrapper of all items
                yield from _iterate_innermost_items(inner, rows)
                return
        yield from ((id(dataset), row) for row in rows)


@dataclass(frozen=True)
class CollectedItemLabels:
    """Labels and patients from the items of a data set.

    Attributes:
        labels: float32 ``(n, classes)``, NaN for unknown.
        patients: Names of the patients; None if the items name none, or patients are given separately.
        class_names: Column names of ``labels``.
    """

    labels: NDArray[np.float32]
    patients: list[str] | None
    class_names: tuple[str, ...]


def read_all_items(
    images: TorchDatasetPictures,
    class_names: Sequence[str],
    tell: Callable[[str], object],
    *,
    labels: bool = True,
    patients: bool = True,
) -> CollectedItemLabels:
    """Read each item once to check it, and to collect its labels and its patient if these are requested.

    Some items are read again with another seed, to check that random transforms do not change the labels.

    Args:
        tell: Prints a progress line.
        labels: True reads the labels; else they are all unknown.
        patients: True reads the patients.

    Raises:
        BadInput: With the items that cannot be read, or whose labels do not fit the classes.
    """
    progress = DecodingProgress(len(images), tell)
    of_items = np.full((len(images), len(class_names)), np.nan, np.float32)
    digests = np.empty(len(images), np.uint64)
    names, faults, brightest = list[str | None](), list[Fault](), 0.0
    for row in range(len(images)):
        try:
            item = images.read_dataset_item(row, seed=None)
            pixels = images.convert_item_image(row, item.image)
            digests[row], brightest = compute_picture_digest(pixels), max(brightest, float(pixels.max()))
            if labels:
                of_items[row] = _parse_item_labels(item, class_names)
            if patients and row == 0 and item.patient is None and item.unread:
                keys = list(map(str, item.unread))
                verb = "is" if len(keys) == 1 else "are"
                tell(f'{quote_names(keys)} of the items {verb} not read: a patient\'s name is called "patient"')
            if patients and "patient" in item.unclear:
                raise ValueError(item.unclear["patient"])
            names.append(item.patient if patients else None)
        except BadInput as bad:
            faults += bad.faults
        except ValueError as error:
            faults.append(Fault(f"{images.name}[{row}]", str(error)))
        if len(faults) >= _MOST_FAILURES:
            break
        progress.count_decoded_picture()
    if faults:
        counted = f"{'at least ' if len(faults) >= _MOST_FAILURES else ''}{len(faults)} of {len(images)} items"
        raise BadInput([*faults[:_LISTED], Fault(images.name, f"{counted} cannot be used; the first are listed.")])
    named = [name for name in names if name is not None]
    if named and len(named) < len(images):
        problem = f"{len(images) - len(named)} of {len(images)} items name no patient."
        raise BadInput([Fault(images.name, problem, "Name one for each item, or for none.")])
    images.picture_digests, images.brightest = digests, brightest
    read = CollectedItemLabels(of_items, named or None, tuple(class_names))
    images.labels = read if labels else None
    images.check_items_repeatable()
    return read


def _parse_item_labels(item: TorchDatasetItem, class_names: Sequence[str]) -> NDArray[np.float32]:
    """Return the labels of an item as float32 ``(classes,)``; a single whole number is the index of its only class.

    Raises:
        ValueError: If the labels are missing or ambiguous, or do not fit the classes.
    """
    if "labels" in item.unclear:
        raise ValueError(item.unclear["labels"])
    if item.labels is None:
        raise ValueError("has no labels. " + _GIVE_LABELS)
    values = convert_labels_to_array(item.labels, class_names)
    if values.size == 1 and values.ndim <= 1 and len(class_names) > 1:
        value = values.reshape(())
        if values.dtype.kind == "f" or not 0 <= value < len(class_names):
            raise ValueError(f"has the label {value!s}, which is no number of one of {len(class_names)} classes.")
        row = np.zeros(len(class_names), np.float32)
        row[int(value)] = 1
    else:
        row = (values.reshape(1) if values.ndim == 0 else values).astype(np.float32)
    if row.shape != (len(class_names),):
        raise ValueError(f"has labels of shape {row.shape}, and there are {len(class_names)} classes.")
    if item.mask is not None:
        row = np.where(parse_item_label_mask(item, len(class_names)), row, np.float32(np.nan))
    present = [name for name, value in zip(class_names, row, strict=True) if value == 1]
    for key, value in item.unread.items():
        _refuse_unread_label_entry(f'"{key}"', key, value, class_names, present)
        for nested_key, nested_value in _iterate_nested_entries(value):
            if nested_key is not None:
                name = f'"{nested_key}" in "{key}"'
                _refuse_unread_label_entry(name, nested_key, nested_value, class_names, present, nested=True)
    if not (np.isnan(row) | np.isin(row, (0, 1))).all():
        raise ValueError(f"has labels {row.tolist()}; they are 1 (present), 0 (absent) or NaN (unknown).")
    return row


def parse_item_label_mask(item: TorchDatasetItem, classes: int) -> NDArray[np.bool_]:
    """Return the label mask of an item, ``(classes,)``, True where the label is known.

    Raises:
        ValueError: If the mask does not have a 0 or 1 for each class.
    """
    try:
        mask = convert_to_numpy_array(item.mask).squeeze()
    except Exception as error:  # each library raises its own exceptions
        raise ValueError(f"has a mask that is no array: {type(item.mask).__name__}.") from error
    if mask.size != classes or mask.ndim > 1 or not np.isin(mask, (0, 1)).all():
        raise ValueError("has a mask that is not 1 (label known) or 0 (unknown) for each class.")
    return np.asarray(mask.reshape(classes) == 1)


def _is_segmentation_mask(mask: Any, image: Any) -> bool:
    """Return True if a mask has the height and width of the image, so that it is a segmentation, not a label mask."""
    try:
        shape = convert_to_numpy_array(mask).squeeze().shape
        is_pillow = isinstance(image, Image.Image)
        size = (image.height, image.width) if is_pillow else _convert_to_channels_last(image).shape[:2]
    except Exception:  # the image itself is checked later
        return False
    size = tuple(length for length in size if length != 1)
    return len(shape) >= len(size) > 0 and len(shape) <= 3 and size in (shape, shape[1:], shape[:-1])


def _refuse_unread_label_entry(
    name: str, key: Any, value: Any, class_names: Sequence[str], present: Sequence[str], *, nested: bool = False
) -> None:
    """Refuse an entry of a dictionary item that may say something about its labels, but is not read as such.

    Args:
        name: Name of the entry for the message.
        present: The classes that are present by the item's labels; a text that names only these adds nothing.
        nested: True for an entry inside another one, which is probably metadata. Its numbers are refused only if they
            may be a label mask: 0 or 1 per class under a name such as ``label_mask``, but not a single ``True``.

    Raises:
        ValueError: If the entry names a class, or has a number for each class that may be a label.
    """
    if _entry_may_name_class(key, value, class_names, present):
        problem = f"has {name}, which names a class and is not read. "
        raise ValueError(problem + "Put it into the labels, or leave it out.")
    words = _split_key_into_words(key)
    numbers = _read_number_vector(value)
    if numbers is None or numbers.size != len(class_names) or not GEOMETRY_KEYS.isdisjoint(words):
        return
    is_mask = _is_label_key(words) and bool(np.isin(numbers, (0, 1)).all())
    is_label = len(class_names) > 1 and bool((np.isnan(numbers) | (np.abs(numbers) <= 1)).all())
    if (is_mask and not _is_boolean_true(value)) if nested else is_label:
        problem = f'has {name} with a value a class, which is not read. Call it "label_mask" if it says which '
        raise ValueError(problem + "labels are known (1) and unknown (0); else leave it out of the dictionary.")


def _read_number_vector(value: Any) -> NDArray[np.float64] | None:
    """Return the numbers of a value with at most one axis longer than 1, as labels or a mask have; else None."""
    if isinstance(value, str | Mapping) or value is None:
        return None
    try:
        values = convert_to_numpy_array(value)
    except Exception:  # each library raises its own exceptions
        return None
    is_vector = values.dtype.kind in "biuf" and values.squeeze().ndim <= 1
    return values.reshape(-1).astype(np.float64) if is_vector else None


def _is_boolean_true(value: Any) -> bool:
    return isinstance(value, bool | np.bool_) and bool(value)


def _is_label_key(words: Sequence[str]) -> bool:
    return any(LABEL_KEY.match(word) and not _PERSON.fullmatch(word) for word in words)


def _split_key_into_words(key: object) -> list[str]:
    """Split a key at signs, digits and capitals into lower-case words: ``isKnown_0`` is ``is``, ``known``, ``0``."""
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", str(key))
    return re.findall(r"[^\W\d_]+|\d+", spaced.lower())


def _find_ambiguous_item_entries(
    unread: Mapping[Any, Any], keys: Mapping[str, Sequence[Any]], image: Any
) -> dict[str, str]:
    """Return error messages about entries that are not read, although they may hold the labels or the patient.

    Args:
        unread: The entries of an item that are not read.
        keys: The keys of the item that are read, by their meaning: "image", "labels", "patient" and so on.
        image: The image of the item.

    Returns:
        A message for "labels" and one for "patient", each only if there is such an entry.
    """
    unclear = dict[str, str]()
    for key, value in unread.items():
        name = _keep_letters_and_digits(key)
        if not keys["patient"] and _is_patient_key(name):
            unclear["patient"] = f'has "{key}", which may name its patient. Call it "patient", or leave it out.'
        words = _split_key_into_words(key)
        is_note = isinstance(value, str) and bool(_NOTES & {*words}) and _convert_to_named_entries(value) is None
        is_note |= value is None or (_is_boolean_true(value) and "valid" in name) or _is_segmentation_mask(value, image)
        if keys["labels"] and _is_label_key(words) and not is_note:
            problem = f'has "{key}" beside "{keys["labels"][0]}". '
            unclear["labels"] = problem + 'Call a mask "label_mask"; leave others out.'
        for nested_key, nested_value in _iterate_nested_entries(value):
            name = _keep_letters_and_digits(nested_key)
            remedy = f'Put it beside "{keys["image"][0]}", or leave it out.'
            problem = f'has "{nested_key}" in "{key}", whose entries are not read. {remedy}'
            if not keys["patient"] and (name in _KEYS["patient"] or _is_patient_key(name)):
                unclear["patient"] = problem
            if name in _KEYS["labels"] and nested_value is not None:
                unclear["labels"] = problem
    return unclear


def _iterate_nested_entries(value: Any, depth: int = _DEPTH) -> Iterator[tuple[Any, Any]]:
    """Yield key and value of the entries inside dictionaries, lists and objects, down to ``depth`` levels.

    Named tuples, data classes, objects with attributes, lists of pairs and JSON texts are searched as dictionaries.
    """
    if not depth:
        return
    if (entries := _convert_to_named_entries(value)) is not None:
        for key, entry in entries.items():
            yield key, entry
            yield from _iterate_nested_entries(entry, depth - 1)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _iterate_nested_entries(entry, depth - 1)


def _convert_to_named_entries(value: Any) -> Mapping[Any, Any] | None:
    """Return the named entries of a value as a dictionary; None if it has no names."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, str):
        if value.lstrip()[:1] not in ("{", "["):
            return None
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError):
            return None
        return parsed if isinstance(parsed, dict) else {"": parsed} if isinstance(parsed, list) else None
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    if isinstance(value, list | tuple):
        are_pairs = all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in value)
        are_pairs = are_pairs and all(isinstance(name, str) for name, _ in value)
        return dict(value) if value and are_pairs else None
    if is_dataclass(value) and not isinstance(value, type):
        return {part.name: getattr(value, part.name, None) for part in fields(value)}
    if isinstance(value, type | torch.Tensor | np.ndarray) or callable(value):
        return None
    is_plain = any(kind.__module__.split(".")[0] in _WITHOUT_ENTRIES for kind in type(value).__mro__[:-1])
    return None if is_plain else getattr(value, "__dict__", None)


def _is_patient_key(name: str) -> bool:
    return bool(PATIENT_KEY.search(name)) and not NO_PATIENT_KEY.search(name)


def _entry_may_name_class(key: Any, value: Any, class_names: Sequence[str], present: Sequence[str]) -> bool:
    """Return True if an entry of an item probably says which classes are present.

    There are three cases. The key contains the name of a class; but a value with numbers beyond -1 to 1 is no label.
    The value is the name of a class that is not in ``present``, or a list with the name of a class. Or the value is a
    list of class numbers, and the key has a word for classes.

    Args:
        present: The classes that are present by the item's labels.
    """
    names = {_keep_letters_and_digits(name) for name in class_names} - {""}
    key_words = _split_key_into_words(key)
    runs = ("".join(key_words[first:last]) for last in range(len(key_words) + 1) for first in range(last))
    contained = any(run in names and len(run) >= _CONTAINED for run in runs)
    if contained or _keep_letters_and_digits(key) in names:
        numbers = _read_number_vector(value)
        return numbers is None or not (np.abs(numbers) > 1).any()
    if not CLASS_LIST_KEYS.isdisjoint(key_words) and isinstance(value, list | tuple | set | np.ndarray | torch.Tensor):
        numbers = _read_number_vector(list(value) if isinstance(value, set) else value)
        if numbers is not None and numbers.size and np.isin(numbers, range(len(class_names))).all():
            return True
    texts = [value] if isinstance(value, str) else value if isinstance(value, list | tuple | set) else []
    words = [word for text in texts if isinstance(text, str) for word in _LIST_SIGNS.split(text)]
    if isinstance(value, str):
        names -= set(map(_keep_letters_and_digits, present))
    return any(_keep_letters_and_digits(word) in names for word in words)


def _keep_letters_and_digits(text: object) -> str:
    return "".join(filter(str.isalnum, str(text).lower()))


def _parse_item_patient_name(value: Any) -> str | None:
    """Convert an item's patient, a text or a whole number, to a name; None if the item names no patient.

    Raises:
        ValueError: If the patient is neither a text nor a whole number.
    """
    if (isinstance(value, torch.Tensor | np.ndarray) and value.ndim == 0) or isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bytes):
        value = value.decode("utf-8", "backslashreplace")
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value is None or is_anonymous_patient(normalize_name(str(value))):
        return None
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise ValueError(f"names its patient by {type(value).__name__}; a patient's name is a text or a whole number.")
    return str(value)


def _convert_to_channels_last(image: Any) -> NDArray[Any]:
    """Convert an image to an array ``(height, width[, channels])``, and drop the axis of a single channel.

    The channels come first in a tensor, and in an array of three axes whose last one is neither 1 nor 3 long.
    """
    values = convert_to_numpy_array(image)
    first_is_channels = isinstance(image, torch.Tensor) or (values.ndim == 3 and values.shape[2] not in (1, 3))
    if values.ndim == 3 and first_is_channels:
        values = values.transpose(1, 2, 0)
    return values[..., 0] if values.ndim == 3 and values.shape[2] == 1 else values


@contextmanager
def _seed_global_random_generators(seed: int) -> Iterator[None]:
    """Seed the global generators of Python, NumPy and torch inside the ``with`` block, and restore them afterwards."""
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
