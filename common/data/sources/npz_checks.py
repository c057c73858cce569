"""What can be wrong with an npz file, found from the headers of its arrays and from its labels."""

import math
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.data.base.spec import NpzSpec
from common.errors import BadInput, Fault, did_you_mean, quoted, stop_on
from common.system.files import missing_file

_PREFIXES = ("train", "val", "test")
_MOST_THAT_DEFLATE_SAVES = 1100
_AGAIN = "Copy it again, or write it again with numpy.savez."


@dataclass(frozen=True)
class Header:
    """What an array looks like, known without reading it."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


@contextmanager
def reading(where: str, name: str) -> Iterator[None]:
    """Read of an npz file inside: any error of zipfile, zlib and numpy on damaged bytes is one fault of the file."""
    subject = "" if where.endswith(name) else f"{name} "
    try:
        yield
    except (NotImplementedError, RuntimeError):
        problem = f"{subject}is a zip file that is locked or packed in an unusual way."
        raise BadInput([Fault(where, problem, _AGAIN)]) from None
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError, ValueError, SyntaxError, LookupError, MemoryError):
        raise BadInput([Fault(where, f"{subject}is damaged, cut off, or no npz file.", _AGAIN)]) from None


class NpzArrays:
    """The arrays of an open npz file, each read when it is asked for.

    Raises:
        BadInput: Where what is asked for cannot be read.
    """

    def __init__(self, arrays: Any, where: str, name: str) -> None:
        self._arrays, self._where, self._name = arrays, where, name

    def __contains__(self, key: str) -> bool:
        return key in self._arrays

    def __getitem__(self, key: str) -> NDArray[Any]:
        with reading(self._where, self._name):
            return np.asarray(self._arrays[key])


@contextmanager
def opened_npz(path: Path, where: str = "data.path") -> Iterator[NpzArrays]:
    """Open a file whose headers :func:`read_headers` has found to be in order."""
    with reading(where, path.name):
        arrays = np.load(path, allow_pickle=False)
    with arrays:
        yield NpzArrays(arrays, where, path.name)


def read_headers(path: Path, where: str = "data.path") -> dict[str, Header]:
    """What each array looks like, by its name.

    Raises:
        BadInput: If there is no such file, it is no npz file, or an array has another size than it announces.
    """
    stop_on(missing_file(where, path))
    with reading(where, path.name), zipfile.ZipFile(path) as archive:
        return {name.removesuffix(".npy"): _header(archive, name) for name in archive.namelist()}


def _header(archive: zipfile.ZipFile, name: str) -> Header:
    """Read one array's header; the file must have as many bytes as it announces before memory is allocated."""
    info = archive.getinfo(name)
    with archive.open(info) as member:
        version = np.lib.format.read_magic(member)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(member)
        held = info.file_size - member.tell()
    possible = info.compress_size * _MOST_THAT_DEFLATE_SAVES
    if not dtype.hasobject and (held != math.prod(shape) * dtype.itemsize or info.file_size > possible):
        raise ValueError(f"{name} announces another size than it has")
    return Header(shape, dtype)


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
