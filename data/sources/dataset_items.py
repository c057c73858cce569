"""Parse one item of a user's data set into image, labels, label mask, patient and part.

An item is an image, ``(image, labels)``, a longer tuple that begins with these two, or a dictionary, named tuple or
dataclass with keys of :data:`ITEM_KEYS`. Upper case and signs in the keys are ignored. An item of another form must be
converted by the function ``item`` of ``pc.LabelledImages(..., item=...)``.

An entry "mask" is the label mask if it has one 0 or 1 for each class; otherwise it is a mask of pixels and is ignored.
A text "class_name" is the name of the class whose number is the label.
"""

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from polyclinic.common.errors import quote_names
from polyclinic.data.base.image_set import PARTS
from polyclinic.data.base.names import is_anonymous_patient, normalize_name
from polyclinic.data.base.vocabulary import PART_WORDS
from polyclinic.data.sources.label_array import convert_labels_to_array, convert_to_numpy_array

ITEM_KEYS: Mapping[str, tuple[str, ...]] = {
    "image": ("image", "img", "pixelvalues"),
    "labels": ("labels", "label", "lab", "target", "targets"),
    "mask": ("labelmask", "labelsmask"),
    "patient": (
        *("patient", "patients", "patientid", "patientids", "patientnr", "patientnumber", "pid", "mrn"),
        *("subject", "subjects", "subjectid"),
    ),
    "split": ("split",),
}
"""Meaning of an entry -> its possible keys in a dictionary item, reduced to lower-case letters and digits."""
_CLASS_NAME_KEYS = ("classname", "classnames", "labelname")
"""Keys for the name of the class whose number is the label, reduced to lower-case letters and digits."""
ITEM_FUNCTION_REMEDY = "Bring each item into that form: pc.LabelledImages(dataset, item=lambda x: (x[...], x[...]))."
_MIN_NAME_SIMILARITY = 0.6
"""Minimum similarity (0 to 1) of an unknown class name and a known one that an error message suggests."""


class MapStyleDataset(Protocol):
    """A map-style data set: anything with ``__getitem__`` and ``__len__``, such as a ``torch.utils.data.Dataset``."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class DatasetItem:
    """One item of a user's data set; missing fields are None.

    Attributes:
        mask: The label mask: for each class 1 if its label is known, else 0.
        possible_mask: An entry "mask" that is a vector of 0 and 1; it is the label mask if it has a value for each
            class.
        patient: Name of the patient.
        split: ``train``, ``validation`` or ``test``.
        class_name: Name of the class whose number is the label.
        unread: Name of an entry that is ignored -> the entry; the name is a key, or "entry 3" of a tuple.
    """

    image: Any
    labels: Any = None
    mask: Any = None
    possible_mask: Any = None
    patient: str | None = None
    split: str | None = None
    class_name: str | None = None
    unread: Mapping[str, Any] = field(default_factory=dict)


def parse_item(item: Any, class_names: Sequence[str] = ()) -> DatasetItem:
    """Parse an item into its fields.

    Args:
        item: The item that the data set, or the user's ``item`` function, returned.
        class_names: Names of the classes, if known. A dictionary without labels may have one entry for each class.

    Raises:
        ValueError: If the item has no image, or two entries with the same meaning, or an invalid patient or part.
    """
    if hasattr(item, "_asdict"):  # a named tuple
        item = item._asdict()
    if is_dataclass(item) and not isinstance(item, type):
        item = {part.name: getattr(item, part.name) for part in fields(item)}
    if isinstance(item, Mapping):
        return _parse_dictionary(item, class_names)
    if not isinstance(item, tuple | list):
        return DatasetItem(item)
    if not item:
        raise ValueError(f"is an empty {type(item).__name__}. Return (image, labels).")
    if all(isinstance(entry, Mapping) for entry in item):
        problem = f"is a list of {len(item)} dictionaries, and an item is one picture. Transforms such as"
        remedy = "RandSpatialCropSamplesd return a list of crops: take RandSpatialCropd, which returns one, or"
        raise ValueError(f"{problem} {remedy} pc.LabelledImages(dataset, item=lambda crops: crops[0]).")
    unread = {f"entry {number}": entry for number, entry in enumerate(item[2:], start=3)}
    return DatasetItem(item[0], item[1] if len(item) > 1 else None, unread=unread)


def _parse_dictionary(item: Mapping[Any, Any], class_names: Sequence[str]) -> DatasetItem:
    keys = {
        meaning: [key for key in item if keep_letters_and_digits(key) in names] for meaning, names in ITEM_KEYS.items()
    }
    if not keys["image"]:
        listed = quote_names(map(str, item))
        raise ValueError(
            f'is a dictionary without an image; its keys are {listed}. Call it "image". {ITEM_FUNCTION_REMEDY}'
        )
    for meaning, names in keys.items():
        if len(names) > 1:
            word = "labels" if meaning == "labels" else f"the {meaning}"
            raise ValueError(f"has {quote_names(map(str, names))}, which all name {word}. {ITEM_FUNCTION_REMEDY}")
    entries = {meaning: item[names[0]] for meaning, names in keys.items() if names}
    masks = [key for key in item if keep_letters_and_digits(key) == "mask" and not keys["mask"]]
    possible_mask = item[masks[0]] if masks and _is_vector_of_zeros_and_ones(item[masks[0]]) else None
    by_class = [] if keys["labels"] else [key for key in item if str(key) in class_names]
    if by_class:
        entries["labels"] = {str(key): item[key] for key in by_class}
    named = [key for key in item if keep_letters_and_digits(key) in _CLASS_NAME_KEYS and isinstance(item[key], str)]
    if len(named) != 1 or read_class_number(entries.get("labels")) is None:
        named = []
    read = {key for names in keys.values() for key in names}.union(by_class, named)
    return DatasetItem(
        entries["image"],
        entries.get("labels"),
        entries.get("mask"),
        possible_mask,
        _parse_patient(entries.get("patient")),
        _parse_split(entries.get("split")),
        class_name=str(item[named[0]]) if named else None,
        unread={str(key): value for key, value in item.items() if key not in read},
    )


def parse_item_labels(item: DatasetItem, class_names: Sequence[str]) -> NDArray[np.float32]:
    """Return the labels of an item, float32 ``(classes,)``: 1 present, 0 absent, NaN unknown.

    Labels may be: a value for each class; the number or the name of the only class that is present; a list with the
    names of all present classes; a dictionary from class name to value, in which a missing class is unknown.

    Raises:
        ValueError: If the labels are missing or do not fit the classes.
    """
    row = _convert_labels(item.labels, class_names)
    if item.class_name is not None and item.class_name in class_names and len(class_names) > 1:
        _refuse_other_class_name(item.class_name, row, class_names)
    mask = find_label_mask(item, len(class_names))
    if mask is not None:
        row = np.where(_parse_mask(mask, len(class_names)), row, np.float32(np.nan))
    if not (np.isnan(row) | np.isin(row, (0, 1))).all():
        raise ValueError(f"has labels {row.tolist()}; they are 1 (present), 0 (absent) or NaN (unknown).")
    return row.astype(np.float32)


def _convert_labels(labels: Any, class_names: Sequence[str]) -> NDArray[np.float32]:
    classes = len(class_names)
    if labels is None:
        raise ValueError(
            f"has no labels. Return (image, labels), or give labels to pc.LabelledImages. {ITEM_FUNCTION_REMEDY}"
        )
    if isinstance(labels, Mapping):
        return _convert_labels_by_name(labels, class_names)
    if (names := list_label_names(labels)) is not None:
        return _convert_labels_by_name(dict.fromkeys(names, 1.0), class_names, others=0.0)
    values = convert_labels_to_array(labels, class_names).squeeze()
    if values.ndim == 0 and classes > 1:
        return _convert_class_number(values, classes)
    if values.size != classes or values.ndim > 1:
        raise ValueError(f"has labels of shape {values.shape}, and there are {classes} classes.")
    return values.reshape(classes).astype(np.float32)


def _refuse_other_class_name(class_name: str, row: NDArray[np.float32], class_names: Sequence[str]) -> None:
    """Raise ``ValueError`` if the class name in an item is not the name of its class number.

    This happens if the classes of each part of a data set were numbered separately.
    """
    numbered = [name for name, label in zip(class_names, row, strict=True) if label == 1]
    if class_name not in numbered:
        raise ValueError(f'names its class "{class_name}", and its number is that of {quote_names(numbered)}.')


def read_class_number(labels: Any) -> int | None:
    """Return the class number if the labels of an item are one integer; otherwise None."""
    if labels is None or isinstance(labels, str | Mapping):
        return None
    try:
        values = convert_labels_to_array(labels, ()).squeeze()
    except ValueError:
        return None
    return int(values) if values.ndim == 0 and float(values).is_integer() else None


def find_names_of_class_numbers(items: Iterable[DatasetItem]) -> tuple[str, ...]:
    """Return the class names in the order of the class numbers, from items that have both a number and a name.

    If no item has a number below the largest one, that number itself is the name. The result is empty if an item with a
    number has no name, if a number has two names, or if two numbers have the same name.
    """
    names = dict[int, str]()
    for item in items:
        number = read_class_number(item.labels)
        if number is None:
            continue
        if number < 0 or item.class_name is None or names.setdefault(number, item.class_name) != item.class_name:
            return ()
    listed = [names.get(number, str(number)) for number in range(max(names, default=-1) + 1)]
    return tuple(listed) if len(set(listed)) == len(listed) else ()


def list_label_names(labels: Any) -> list[str] | None:
    """Return the class names if labels are a text, or a list, tuple, set or array of texts; otherwise None.

    An empty list means that no class is present.
    """
    if isinstance(labels, str):
        return [str(labels)]
    if isinstance(labels, np.ndarray) and labels.dtype.kind == "U":
        return [str(label) for label in labels.reshape(-1)]
    is_list = isinstance(labels, list | tuple | set | frozenset)
    return list(labels) if is_list and all(isinstance(label, str) for label in labels) else None


def find_class_names_in_labels(labels: Iterable[Any]) -> tuple[str, ...]:
    """Return the class names in the labels of all items, in alphabetical order.

    Labels name classes as a text, a list of texts, or a dictionary. The result is empty if the labels of an item have
    another form.

    Args:
        labels: The labels of each item, as the data set returns them.
    """
    names = set[str]()
    for item_labels in labels:
        listed = list(map(str, item_labels)) if isinstance(item_labels, Mapping) else list_label_names(item_labels)
        if listed is None:
            return ()
        names.update(listed)
    return tuple(sorted(names))


def _convert_labels_by_name(
    labels: Mapping[Any, Any], class_names: Sequence[str], others: float = np.nan
) -> NDArray[np.float32]:
    """Return the labels ``(classes,)`` from a dictionary by class name; a missing class has the label ``others``."""
    values = {str(name): value for name, value in labels.items()}
    if unknown := [name for name in values if name not in class_names]:
        close = difflib.get_close_matches(unknown[0], class_names, 1, _MIN_NAME_SIMILARITY)
        hint = f'; did you mean "{close[0]}"?' if close else "."
        listed = f"The classes are {quote_names(class_names)}{hint}"
        raise ValueError(f'has a label for "{unknown[0]}", which is no class. {listed}')
    row = np.full(len(class_names), others, np.float32)
    for column, name in enumerate(class_names):
        if name in values:
            value = values[name]
            try:
                row[column] = np.nan if value is None else float(value)
            except (TypeError, ValueError):
                raise ValueError(f'has the label {value!r} for "{name}"; labels are 1, 0 or NaN.') from None
    return row


def _convert_class_number(value: NDArray[Any], classes: int) -> NDArray[np.float32]:
    """Return the labels ``(classes,)`` of an item with one class, given the number of the class from 0.

    The value NaN makes all classes unknown.
    """
    if np.isnan(float(value)):
        return np.full(classes, np.nan, np.float32)
    number = int(value)
    if number != float(value) or not 0 <= number < classes:
        raise ValueError(f"has the label {value!s}, which is no number of one of {classes} classes.")
    row = np.zeros(classes, np.float32)
    row[number] = 1
    return row


def find_label_mask(item: DatasetItem, classes: int) -> Any:
    """Return the label mask of an item; None if it has none, or if its entry "mask" is a mask of pixels."""
    if item.mask is not None:
        return item.mask
    possible = item.possible_mask
    return possible if possible is not None and convert_to_numpy_array(possible).size == classes else None


def _is_vector_of_zeros_and_ones(value: Any) -> bool:
    """Return True if a value may be a label mask; a mask of pixels has more axes, or values other than 0 and 1."""
    try:
        values = convert_to_numpy_array(value).squeeze()
    except Exception:  # each library raises its own exceptions
        return False
    return values.ndim <= 1 and bool(np.isin(values, (0, 1)).all())


def _parse_mask(mask: Any, classes: int) -> NDArray[np.bool_]:
    """Return a label mask as bool ``(classes,)``, True where the label is known."""
    try:
        values = convert_to_numpy_array(mask).squeeze()
    except Exception as error:  # each library raises its own exceptions
        raise ValueError(f"has a label mask that is no array: {type(mask).__name__}.") from error
    if values.size != classes or values.ndim > 1 or not np.isin(values, (0, 1)).all():
        raise ValueError("has a label mask that is not 1 (label known) or 0 (unknown) for each class.")
    return np.asarray(values.reshape(classes) == 1)


def _parse_patient(value: Any) -> str | None:
    """Return the name of a patient, given as a text or a whole number; None if the patient is unknown."""
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:  # a number of NumPy or torch
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


def _parse_split(value: Any) -> str | None:
    """Return the part of the data that an item belongs to: ``train``, ``validation`` or ``test``.

    Raises:
        ValueError: If the value is not a known word for a part.
    """
    if value is None:
        return None
    part = PART_WORDS.get(str(value).strip().lower())
    if part is None:
        raise ValueError(f'has {value!r} as its "split"; the parts are {quote_names(PARTS)}.')
    return part


def keep_letters_and_digits(text: object) -> str:
    """Return a text in lower case with only its letters and digits."""
    return "".join(filter(str.isalnum, str(text).lower()))


ConvertItem = Callable[[Any], Any]
"""A user's function that converts an item of the data set to ``(image, labels)``, or to a dictionary with known keys.
"""
