"""npz files in MedMNIST's layout, or with pictures as JPEG bytes; never with Python objects inside.

What can be wrong is found from the headers of the arrays and from the labels, before pictures are read.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.data.base.decoded_size import LARGEST_MB, largest_content, too_large
from common.data.base.image_set import ImageSet, Splits, own_patients
from common.data.base.spec import NpzSpec
from common.data.base.splits import Names, any_positive, hold_out, shared_patient_faults
from common.data.images.reading import (
    ImageForm,
    ImageStore,
    decode_all,
    picture,
    resized,
    stop_over_budget,
    why_unreadable,
)
from common.data.sources.npz_file import Header, NpzArrays, opened_npz, read_headers
from common.data.tables.presets import known_classes, repeated_faults, unknown_faults
from common.errors import BadInput, Fault, did_you_mean, quoted, stop_on

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
            data, offsets = headers[f"{prefix}_jpeg"], headers[f"{prefix}_offsets"]
            if data.dtype != np.uint8 or len(data.shape) != 1:
                problem = f"{prefix}_jpeg is {data.dtype} {data.shape}; expected uint8 (bytes of all pictures,)."
                faults.append(Fault("data.path", problem))
            if offsets.dtype.kind not in "iu" or len(offsets.shape) != 1:
                problem = f"{prefix}_offsets is {offsets.dtype} {offsets.shape}"
                faults.append(Fault("data.path", f"{problem}; expected whole numbers (pictures + 1,)."))
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
    widths = {
        prefix: int(labels.shape[1]) if not is_single(labels) else int(labels.max()) + 1 if labels.size else 0
        for prefix, labels in raw.items()
    }
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
    """Return whether labels are one class number per image, rather than 0 or 1 per class."""
    return labels.ndim == 1 or labels.shape[1] == 1


def _value_faults(name: str, labels: NDArray[Any]) -> list[Fault]:
    if is_single(labels):
        whole = labels.dtype.kind in "biu" or bool((labels == np.floor(labels)).all())
        expected, fits = "whole class numbers from 0", whole and bool((labels >= 0).all())
    else:
        expected, fits = "0, 1 or NaN", bool((np.isin(labels, (0, 1)) | np.isnan(labels.astype(np.float64))).all())
    return [] if fits else [Fault("data.path", f"{name} holds values other than {expected}.")]


@dataclass(frozen=True)
class NpzPart:
    """All of one part but its images; ``rows`` are places in the arrays that start with ``prefix``."""

    prefix: str
    rows: NDArray[np.intp]
    labels: NDArray[np.float32]
    patients: Names
    sources: Names

    def only(self, index: NDArray[np.intp]) -> "NpzPart":
        """Return the rows at ``index``."""
        return NpzPart(self.prefix, self.rows[index], self.labels[index], self.patients[index], self.sources[index])


@dataclass(frozen=True)
class NpzTable:
    """A checked file, images not yet read."""

    class_names: tuple[str, ...]
    train: NpzPart
    validation: NpzPart
    test: NpzPart


def open_npz(spec: NpzSpec, base: Path) -> NpzTable:
    """Read and check everything but the images.

    Raises:
        BadInput: With all faults of the keys, then of the shapes, then of the values.
    """
    headers = read_headers(base / spec.path)
    class_names, parts = _checked(spec, base / spec.path, headers, present_parts(headers))
    return _with_validation(spec, class_names, parts)


def _checked(
    spec: NpzSpec, path: Path, headers: Mapping[str, Header], prefixes: Sequence[str]
) -> tuple[tuple[str, ...], list[NpzPart]]:
    """Return class names and these parts of a file, with the classes that are kept."""
    stop_on(key_faults(spec, path, headers, prefixes))
    stop_on(shape_faults(spec, headers, prefixes))
    class_names = spec.classes or known_classes(path.stem)
    stop_on(array_size_faults(spec, path, headers, prefixes, len(class_names)))
    with opened_npz(path) as arrays:
        raw = {prefix: arrays[f"{prefix}_labels"] for prefix in prefixes}
        stop_on(label_faults(raw, class_names))
        parts = _parts(spec, arrays, raw, len(class_names))
    stop_on(
        [
            *repeated_faults("data.classes", class_names),
            *unknown_faults("data.keep", spec.keep, class_names),
            *repeated_faults("data.keep", spec.keep),
            *(shared_patient_faults("data.patient_key", {part.prefix: part.patients for part in parts})),
        ]
    )
    kept = spec.keep or class_names
    columns = [class_names.index(name) for name in kept]
    parts = [replace(part, labels=part.labels[:, columns]) for part in parts]
    if all(is_single(labels) for labels in raw.values()):  # an image of another class has none of these to learn from
        parts = [part.only(np.flatnonzero((part.labels == 1).any(axis=1))) for part in parts]
    return kept, parts


def load_npz(spec: NpzSpec, base: Path, store: ImageStore) -> Splits:
    """Read a file.

    Raises:
        BadInput: With all faults.
    """
    table = open_npz(spec, base)
    return Splits(*_images(spec, base, (table.train, table.validation, table.test), table.class_names, store))


def load_npz_test(spec: NpzSpec, base: Path, store: ImageStore) -> ImageSet:
    """Read the test part alone; the file needs no other.

    Raises:
        BadInput: With all faults of it.
    """
    class_names, parts = _checked(spec, base / spec.path, read_headers(base / spec.path), ("test",))
    (test,) = _images(spec, base, parts, class_names, store)
    return test


def _images(
    spec: NpzSpec, base: Path, parts: Sequence[NpzPart], class_names: tuple[str, ...], store: ImageStore
) -> list[ImageSet]:
    with opened_npz(base / spec.path) as arrays:
        sets = [_image_set(spec, arrays, part, class_names, store) for part in parts]
    skipped = [skip for images in sets for skip in images.skipped]
    stop_over_budget("data.path", skipped, sum(map(len, sets)) + len(skipped), spec.skip_budget)
    return sets


def _parts(spec: NpzSpec, arrays: NpzArrays, raw: Mapping[str, NDArray[Any]], classes: int) -> list[NpzPart]:
    def column(prefix: str, key: str | None, otherwise: Names) -> Names:
        if key is None:
            return otherwise
        values = arrays[f"{prefix}_{key}"]
        return np.asarray(values.reshape(len(values)).astype(np.str_))

    parts, start = [], 0
    for prefix, labels in raw.items():
        count = len(labels)
        if is_single(labels):
            labels = labels.reshape(-1, 1) == np.arange(classes)
        parts.append(
            NpzPart(
                prefix,
                rows=np.arange(count),
                labels=labels.astype(np.float32),
                patients=column(prefix, spec.patient_key, own_patients(count, start)),
                sources=column(prefix, spec.source_key, np.full(count, "")),
            )
        )
        start += count
    return parts


def _with_validation(spec: NpzSpec, class_names: tuple[str, ...], parts: list[NpzPart]) -> NpzTable:
    train, test = parts[0], _limited(parts[-1], spec.test_limit, spec.split_seed)
    if len(parts) == 3:
        return NpzTable(class_names, _limited(train, spec.train_limit, spec.split_seed), parts[1], test)
    held = hold_out(train.patients, any_positive(train.labels), spec.validation_fraction, spec.split_seed)
    limited = _limited(train.only(np.flatnonzero(~held)), spec.train_limit, spec.split_seed)
    return NpzTable(class_names, limited, train.only(np.flatnonzero(held)), test)


def _limited(part: NpzPart, limit: int | None, seed: int) -> NpzPart:
    if limit is None or limit >= len(part.rows):
        return part
    return part.only(stratified_rows(part.labels, limit, seed))


def stratified_rows(labels: NDArray[np.float32], limit: int, seed: int) -> NDArray[np.intp]:
    """Draw ``limit`` rows, ascending, of each combination of labels in proportion.

    The r-th of the m shuffled rows of a combination stands at ``(r + u) / m``, u drawn once a combination;
    the first ``limit`` are kept.
    """
    random = np.random.default_rng(seed)
    _, combination = np.unique(labels, axis=0, return_inverse=True)
    combination = combination.reshape(-1)
    place = np.empty(len(labels))
    for group in range(combination.max() + 1):
        members = np.flatnonzero(combination == group)
        place[members] = (random.permutation(len(members)) + random.random()) / len(members)
    return np.sort(np.argsort(place, kind="stable")[:limit])


def _image_set(
    spec: NpzSpec, arrays: NpzArrays, part: NpzPart, class_names: tuple[str, ...], store: ImageStore
) -> ImageSet:
    if f"{part.prefix}_jpeg" not in arrays:
        images = arrays.rows(f"{part.prefix}_images", part.rows)
        if spec.image_size is not None:
            stop_on(
                size_faults(
                    arrays.path, len(images) * spec.image_size**2 * math.prod(images.shape[3:]), spec.largest_mb
                )
            )
        images = resized(images, spec.image_size, spec.resize)
        return ImageSet(images, part.labels, class_names, part.patients, part.sources)
    data, offsets = arrays[f"{part.prefix}_jpeg"], arrays[f"{part.prefix}_offsets"]

    def read(row: int) -> bytes:
        start, end = offsets[part.rows[row] : part.rows[row] + 2]
        return bytes(data[start:end])

    names = [f"{part.prefix}[{row}]" for row in part.rows]
    form = _jpeg_form(spec, bytes(data[slice(*offsets[:2])]))
    stop_on(size_faults(arrays.path, len(names) * math.prod(form.shape), spec.largest_mb))
    decoded = decode_all(names, read, form, store)
    kept = part.only(decoded.kept)
    return ImageSet(decoded.images, kept.labels, class_names, kept.patients, kept.sources, decoded.skipped)


def _jpeg_form(spec: NpzSpec, first: bytes) -> ImageForm:
    """Choose the form of a part's pictures: that of the first one.

    Raises:
        BadInput: If that one cannot be read.
    """
    try:
        image = picture(first)
    except Exception as error:  # any error of a decoder
        problem = f"the first JPEG picture of {spec.path} cannot be read: {why_unreadable(error)}."
        raise BadInput([Fault("data.path", problem, "All pictures take its form: repair or remove it.")]) from None
    return ImageForm(spec.image_size or max(image.size), image.mode == "RGB", spec.resize)
