"""Convert labels from users' programs (arrays, masked arrays, tensors, pandas tables) to NumPy arrays."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyclinic.common.errors import quote_names


def convert_to_numpy_array(values: Any) -> NDArray[Any]:
    """Convert values to a NumPy array.

    Tensors are detached, 16-bit floats of tensors become float32, and masked entries become NaN.
    """
    if hasattr(values, "detach"):  # a tensor; this module does not import torch
        values = values.detach().cpu()
        values = values.float() if values.is_floating_point() and values.element_size() == 2 else values
    if isinstance(values, list | tuple) and any(isinstance(entry, np.ma.MaskedArray) for entry in values):
        values = np.ma.stack(values)
    if isinstance(values, np.ma.MaskedArray):
        return np.where(np.ma.getmaskarray(values), np.nan, values.data) if np.ma.is_masked(values) else values.data
    return np.asarray(values)


def has_consecutive_index(rows: Any) -> bool:
    """Return True if the index of a pandas object is 0, 1, 2, ..., so that the order of its rows is unambiguous.

    The result is also True for objects that are not from pandas.
    """
    return not hasattr(rows, "iloc") or list(rows.index) == list(range(len(rows)))


def convert_labels_to_array(labels: Any, class_names: Sequence[str]) -> NDArray[Any]:
    """Convert labels to a NumPy array; masked entries and None become NaN, and columns are sorted as ``class_names``.

    Args:
        labels: Labels of all images ``(n, classes)``, or of one image.

    Raises:
        ValueError: If labels are not numeric, or a table lacks a class.
    """
    if hasattr(labels, "iloc"):  # a pandas table, or a row of it
        columns = list(map(str, labels.index if labels.ndim == 1 else labels.columns))
        if unclear := [name for name in class_names if columns.count(name) != 1]:
            raise ValueError(
                f"has labels in a table without exactly one column for {quote_names(unclear)}; "
                f"its columns are {quote_names(columns)}. Name the columns as the classes, or give labels.to_numpy()."
            )
        if labels.ndim == 2 and not has_consecutive_index(labels):
            raise ValueError(
                "has labels in a table whose index is not 0, 1, 2, ... Give its rows in the order of the images, and "
                "labels.reset_index(drop=True)."
            )
        indices = [columns.index(name) for name in class_names]
        labels = labels.iloc[indices] if labels.ndim == 1 else labels.iloc[:, indices]
    elif hasattr(labels, "columns"):
        raise ValueError(f"has labels in a {type(labels).__module__} table. Give labels as an array, or with pandas.")
    if isinstance(labels, list | tuple) and any(label is None for label in labels):
        labels = [np.nan if label is None else label for label in labels]
    try:
        if hasattr(labels, "iloc"):
            return np.asarray(labels.to_numpy(dtype=np.float64, na_value=np.nan))
        values = convert_to_numpy_array(labels)
    except Exception as error:  # each library raises its own exceptions
        raise ValueError(f"has labels that are no numbers: {_abbreviate_labels(labels)}.") from error
    if values.dtype.kind not in "biuf":
        raise ValueError(f"has labels that are no numbers: {_abbreviate_labels(labels)}.")
    return values


def name_classes_by_number(labels: NDArray[Any], tell: Callable[[str], object]) -> tuple[str, ...]:
    """Return the numbers of the classes as class names, ``("0", "1", ...)``, and print a line about it.

    Args:
        labels: ``(n, classes)``, or ``(n,)`` with the number of each image's only class.
        tell: Function that prints a line for the user.
    """
    classes = labels.shape[1] if labels.ndim > 1 else int(np.nanmax(labels, initial=0)) + 1
    tell(f"the classes have no names and are called 0 to {classes - 1}: pc.LabelledImages(..., class_names=[...])")
    return tuple(map(str, range(classes)))


def convert_class_numbers(labels: NDArray[Any], classes: int) -> NDArray[Any]:
    """Convert a vector of class numbers to one column per class; labels with two axes are returned unchanged.

    Args:
        labels: ``(n,)``, the number of each image's only class, from 0. NaN makes all labels of an image unknown. With
            a single class, the values are its labels 1 and 0.

    Returns:
        float32 ``(n, classes)``: 1 for the class of the image, 0 for the others.

    Raises:
        ValueError: If a number is not the number of a class.
    """
    if labels.ndim != 1:
        return labels
    if classes == 1:
        return labels.reshape(-1, 1)
    is_known = ~np.isnan(labels.astype(float))
    numbers = labels[is_known].astype(float)
    if wrong := sorted({number for number in numbers.tolist() if number not in range(classes)}):
        raise ValueError(f"has the label {wrong[0]:g}, which is no number of one of {classes} classes.")
    rows = np.full((len(labels), classes), np.nan, np.float32)
    rows[is_known] = np.eye(classes, dtype=np.float32)[numbers.astype(int)]
    return rows


def _abbreviate_labels(labels: Any) -> str:
    return " ".join(repr(labels).split())[:60]
