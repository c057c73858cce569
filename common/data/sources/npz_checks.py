"""What can be wrong with an npz file, found from the headers of its arrays and from its labels."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.data.base.decoded_size import LARGEST_MB, largest_content, too_large
from common.data.base.spec import NpzSpec
from common.data.sources.npz_file import Header
from common.errors import Fault, did_you_mean, quoted

_PREFIXES = ("train", "val", "test")
_MOST_OF_A_VALUE = 16
"""Bytes in memory for each byte of an array of labels or names, while it is checked and when it is text."""
_OF_A_ROW = 256
"""Bytes of a name of a patient and of a centre, and of a place, where the file itself gives none."""
_OF_A_LABEL = 8


def _is_jpeg(headers: Mapping[str, Header]) -> bool:
    return any(f"{prefix}_jpeg" in headers for prefix in _PREFIXES)


def present_parts(headers: Mapping[str, Header]) -> tuple[str, ...]:
    """Train and test must be there, val may."""
    return tuple(prefix for prefix in _PREFIXES if prefix != "val" or "val_labels" in headers)


def key_faults(spec: NpzSpec, path: Path, headers: Mapping[str, Header], parts: Sequence[str]) -> list[Fault]:
    pixels = ("jpeg", "offsets") if _is_jpeg(headers) else ("images",)
    extra = [(key, f"data.{field}") for field in ("patient_key", "source_key") if (key := getattr(spec, field))]
    kinds = [(kind, "data.path") for kind in (*pixels, "labels")] + extra
    wanted = {f"{prefix}_{kind}": where for kind, where in kinds for prefix in parts}
    lacking = {name: where for name, where in wanted.items() if name not in headers}
    faults = [
        Fault(
            where,
            f'{path.name} has no array "{name}"; its arrays are {quoted(headers)}.',
            did_you_mean(name, headers.keys() - wanted.keys()),
        )
        for name, where in lacking.items()
    ]
    objects = [name for name, header in headers.items() if header.dtype.hasobject]
    if objects:
        problem = f"{path.name} holds Python objects in {quoted(objects)}, which may run code when read."
        faults.append(Fault("data.path", problem, "Save them as plain arrays of numbers or strings."))
    return faults


def shape_faults(spec: NpzSpec, headers: Mapping[str, Header], parts: Sequence[str]) -> list[Fault]:
    faults = []
    for prefix in parts:
        count = _count(headers, prefix)
        if _is_jpeg(headers):
            faults += _jpeg_faults(prefix, headers)
        else:
            faults += _image_faults(f"{prefix}_images", headers[f"{prefix}_images"])
        for kind in ("labels", spec.patient_key, spec.source_key):
            shape = headers[f"{prefix}_{kind}"].shape if kind else (count,)
            if not shape or shape[0] != count:
                problem = f"{prefix}_{kind} has shape {shape}, but {prefix} has {count} images."
                faults.append(Fault("data.path", problem))
            elif kind != "labels" and math.prod(shape) != count:
                problem = f"{prefix}_{kind} has shape {shape}; expected one entry an image, ({count},)."
                faults.append(Fault("data.path", problem))
        if len(headers[f"{prefix}_labels"].shape) not in (1, 2):
            shape = headers[f"{prefix}_labels"].shape
            problem = f"{prefix}_labels has shape {shape}; expected (n,), (n, 1) or (n, classes)."
            faults.append(Fault("data.path", problem))
    return faults


def _count(headers: Mapping[str, Header], prefix: str) -> int:
    if _is_jpeg(headers):
        return max(0, (*headers[f"{prefix}_offsets"].shape, 0)[0] - 1)
    return (*headers[f"{prefix}_images"].shape, 0)[0]


def _jpeg_faults(prefix: str, headers: Mapping[str, Header]) -> list[Fault]:
    data, offsets = headers[f"{prefix}_jpeg"], headers[f"{prefix}_offsets"]
    faults = []
    if data.dtype != np.uint8 or len(data.shape) != 1:
        problem = f"{prefix}_jpeg is {data.dtype} {data.shape}; expected uint8 (bytes of all pictures,)."
        faults.append(Fault("data.path", problem))
    if offsets.dtype.kind not in "iu" or len(offsets.shape) != 1:
        problem = f"{prefix}_offsets is {offsets.dtype} {offsets.shape}; expected whole numbers (pictures + 1,)."
        faults.append(Fault("data.path", problem))
    return faults


def _image_faults(name: str, header: Header) -> list[Fault]:
    grey = len(header.shape) == 3
    color = len(header.shape) == 4 and header.shape[3] == 3
    if header.dtype == np.uint8 and (grey or color) and min(header.shape[1:]) > 0:
        return []
    problem = f"{name} is {header.dtype} {header.shape}; expected uint8 (n, height, width) or (n, height, width, 3)."
    return [Fault("data.path", problem)]


def array_size_faults(
    spec: NpzSpec, path: Path, headers: Mapping[str, Header], parts: Sequence[str], classes: int
) -> list[Fault]:
    """Find out from the headers whether what is read of a file has room, with what is made of each row."""
    claimed = 0
    for prefix in parts:
        claimed += _count(headers, prefix) * (_OF_A_ROW + _OF_A_LABEL * classes)
        pixels = "jpeg" if _is_jpeg(headers) else "images"
        claimed += headers[f"{prefix}_{pixels}"].size
        for kind in {"offsets", "labels", spec.patient_key, spec.source_key} - {None}:
            claimed += _MOST_OF_A_VALUE * headers[name].size if (name := f"{prefix}_{kind}") in headers else 0
    return size_faults(path, claimed, spec.largest_mb)


def size_faults(path: Path, claimed: int, largest_mb: int = LARGEST_MB, where: str = "data.path") -> list[Fault]:
    """Hold the bytes that a file's content takes in memory against what a file of its size may take."""
    bound = largest_content(path.stat().st_size, largest_mb)
    subject = "" if where.endswith(path.name) else f"{path.name}: "
    remedy = "If that is right, raise this key; else get the file again, or divide it."
    return [Fault(where, f"{subject}{too_large(claimed, bound)}.", remedy)] if claimed > bound else []


def label_faults(raw: Mapping[str, NDArray[Any]], class_names: tuple[str, ...]) -> list[Fault]:
    if any(array.dtype.kind not in "biuf" for array in raw.values()):
        kinds = ", ".join(
            f"{prefix}_labels is {'text' if array.dtype.kind in 'US' else array.dtype}" for prefix, array in raw.items()
        )
        return [Fault("data.path", f"labels are numbers; {kinds}.")]
    faults = [fault for prefix, array in raw.items() for fault in _value_faults(f"{prefix}_labels", array)]
    return faults or _width_faults(raw, class_names)


def _width_faults(raw: Mapping[str, NDArray[Any]], class_names: tuple[str, ...]) -> list[Fault]:
    if len({is_single(array) for array in raw.values()}) > 1:
        shapes = ", ".join(f"{prefix}_labels is {array.shape}" for prefix, array in raw.items())
        return [Fault("data.path", f"labels are class numbers in one part and 0/1 per class in another: {shapes}.")]
    widths = {prefix: _width(array) for prefix, array in raw.items()}
    needed = max(widths.values())
    if not class_names:
        problem = f"the file names no classes, and its labels are of {needed} classes."
        return [Fault("data.classes", problem, f"Give {needed} names in label order.")]
    if any(is_single(array) for array in raw.values()):
        fits = needed <= len(class_names)
    else:
        fits = set(widths.values()) == {len(class_names)}
    if not fits:
        problem = f"{len(class_names)} names for labels of {needed} classes: {quoted(class_names)}."
        return [Fault("data.classes", problem, f"Give {needed} names in label order.")]
    return []


def is_single(labels: NDArray[Any]) -> bool:
    """One class index per image, rather than 0/1 per class."""
    return labels.ndim == 1 or labels.shape[1] == 1


def _width(labels: NDArray[Any]) -> int:
    if not is_single(labels):
        return int(labels.shape[1])
    return int(labels.max()) + 1 if labels.size else 0


def _value_faults(name: str, labels: NDArray[Any]) -> list[Fault]:
    if is_single(labels):
        whole = labels.dtype.kind in "biu" or bool((labels == np.floor(labels)).all())
        expected, fits = "whole class numbers from 0", whole and bool((labels >= 0).all())
    else:
        expected, fits = "0, 1 or NaN", bool((np.isin(labels, (0, 1)) | np.isnan(labels.astype(np.float64))).all())
    return [] if fits else [Fault("data.path", f"{name} holds values other than {expected}.")]
