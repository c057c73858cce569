"""npz files in MedMNIST's layout, or with pictures as JPEG bytes; never with Python objects inside."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.data.base.image_set import ImageSet, Splits, own_patients
from common.data.base.spec import NpzSpec
from common.data.images.reading import (
    ImageForm,
    ImageStore,
    decode_all,
    picture,
    resized,
    stop_over_budget,
    why_unreadable,
)
from common.data.sources.npz_checks import (
    array_size_faults,
    is_single,
    key_faults,
    label_faults,
    present_parts,
    shape_faults,
    size_faults,
)
from common.data.sources.npz_file import Header, NpzArrays, opened_npz, read_headers
from common.data.splits.patient_disjoint import Names, any_positive, hold_out, shared_patient_faults
from common.data.tables.class_names import repeated_faults, unknown_faults
from common.data.tables.known_classes import known_classes
from common.errors import BadInput, Fault, stop_on


@dataclass(frozen=True)
class NpzPart:
    """All of one part but its images; ``rows`` are places in the arrays that start with ``prefix``."""

    prefix: str
    rows: NDArray[np.intp]
    labels: NDArray[np.float32]
    patients: Names
    sources: Names

    def only(self, index: NDArray[np.intp]) -> "NpzPart":
        """The rows at ``index``."""
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
    """Class names and these parts of a file, with the classes that are kept."""
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


def _one_column_per_class(labels: NDArray[Any], classes: int) -> NDArray[np.float32]:
    if not is_single(labels):
        return labels.astype(np.float32)
    return np.asarray(labels.reshape(-1, 1) == np.arange(classes), dtype=np.float32)


def _parts(spec: NpzSpec, arrays: NpzArrays, raw: Mapping[str, NDArray[Any]], classes: int) -> list[NpzPart]:
    def column(prefix: str, key: str | None, otherwise: Names) -> Names:
        return otherwise if key is None else _strings(arrays[f"{prefix}_{key}"])

    parts, start = [], 0
    for prefix, labels in raw.items():
        count = len(labels)
        parts.append(
            NpzPart(
                prefix,
                rows=np.arange(count),
                labels=_one_column_per_class(labels, classes),
                patients=column(prefix, spec.patient_key, own_patients(count, start)),
                sources=column(prefix, spec.source_key, np.full(count, "")),
            )
        )
        start += count
    return parts


def _strings(values: NDArray[Any]) -> Names:
    return np.asarray(values.reshape(len(values)).astype(np.str_))


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
    return _decoded(spec, arrays, part, class_names, store)


def _decoded(
    spec: NpzSpec, arrays: NpzArrays, part: NpzPart, class_names: tuple[str, ...], store: ImageStore
) -> ImageSet:
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
    """All pictures take the form of the part's first one.

    Raises:
        BadInput: If that one cannot be read.
    """
    try:
        image = picture(first)
    except Exception as error:  # any error of a decoder
        problem = f"the first JPEG picture of {spec.path} cannot be read: {why_unreadable(error)}."
        raise BadInput([Fault("data.path", problem, "All pictures take its form: repair or remove it.")]) from None
    return ImageForm(spec.image_size or max(image.size), image.mode == "RGB", spec.resize)
