"""Read and check npz files in MedMNIST's layout, or with JPEG bytes instead of pixels; Python objects are refused.

Checks use the array headers and the labels, before pictures are read.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyclinic.common.errors import BadInput, Fault, quote_names, raise_faults, suggest_nearest_name
from polyclinic.data.base.decoded_size import (
    DEFAULT_LARGEST_MB,
    compute_decoded_file_size_limit,
    make_oversized_file_message,
)
from polyclinic.data.base.image_set import DatasetSplits, ImageSet, make_placeholder_patient_names
from polyclinic.data.base.masks import MaskSet, choose_mask_type, make_class_bits, pack_class_areas
from polyclinic.data.base.names import normalize_name_array
from polyclinic.data.base.spec import NpzDatasetSpec, PictureRenderingOptions
from polyclinic.data.base.splits import (
    StringArray,
    find_patient_name_faults,
    find_positive_images,
    find_shared_patient_faults,
    hold_out_patients,
)
from polyclinic.data.base.volume_arrays import is_image_array, is_volume_array
from polyclinic.data.images.bands import scale_values_to_8_bits
from polyclinic.data.images.masks import PictureGrid, fit_mask_to_format
from polyclinic.data.images.reading import (
    DecodedImageFormat,
    decode_picture,
    explain_decoding_error,
    refuse_too_many_skipped_images,
    resize_images,
)
from polyclinic.data.images.store import DecodedImageStore, cache_large_file_pictures, decode_pictures
from polyclinic.data.sources.npz_file import NpyArrayHeader, NpzArrayReader, open_npz_arrays, read_npz_headers
from polyclinic.data.tables.class_names import (
    find_repeated_name_faults,
    find_unknown_class_faults,
    get_public_dataset_classes,
)
from polyclinic.data.tables.copies import check_picture_copies

_PREFIXES = ("train", "val", "test")
_BYTES_PER_VALUE_BYTE = 16
"""Estimated memory for each byte of an array of labels or names, while it is checked and converted to text."""
_BYTES_PER_ROW = 256
"""Estimated memory for each image, for the names of patient and centre and an index, if the file has no such arrays."""
_BYTES_PER_LABEL = 8
MAX_IMAGE_BYTES_IN_MEMORY = 256 << 20
"""If the images of a part are larger than this in total, they are stored in the cache on the disk, not in memory."""
_DIVISION_REMEDY = (
    "Divide it by patients into train_images, train_labels, test_images and so on. Lines of Python that do so, also "
    'with labels that are words: docs/recipes.md, "An npz file that is not divided".'
)
Headers = Mapping[str, NpyArrayHeader]
"""Name of an array in the file -> its header."""


def _has_jpeg_arrays(headers: Headers) -> bool:
    return any(f"{prefix}_jpeg" in headers for prefix in _PREFIXES)


def _count_npz_images(headers: Headers, prefix: str) -> int:
    """Return the number of images of a part; 0 if its array has no axes, which another check reports."""
    if _has_jpeg_arrays(headers):
        offsets = headers[f"{prefix}_offsets"].shape
        return max(0, offsets[0] - 1) if offsets else 0
    images = headers[f"{prefix}_images"].shape
    return images[0] if images else 0


def find_npz_array_name_faults(
    spec: NpzDatasetSpec, path: Path, headers: Headers, prefixes: Sequence[str]
) -> list[Fault]:
    """Return faults for arrays of these parts that are missing, or that hold Python objects.

    Args:
        headers: The headers of the arrays in the file, by array name.
        prefixes: The parts: "train", "val", "test", with which the array names begin.
    """
    pixels = ("jpeg", "offsets") if _has_jpeg_arrays(headers) else ("images",)
    kinds = [(kind, "data.path") for kind in (*pixels, "labels")]
    if spec.patient_key:
        kinds.append((spec.patient_key, "data.patient_key"))
    if spec.source_key:
        kinds.append((spec.source_key, "data.source_key"))
    if any(kind in headers for kind in ("images", "labels")):  # a data set that is not divided into parts
        return [Fault("data.path", f"{path.name} is not divided into {quote_names(prefixes)}.", _DIVISION_REMEDY)]
    required = {f"{prefix}_{kind}": where for kind, where in kinds for prefix in prefixes}
    faults = list[Fault]()
    missing = [name for name in required if name not in headers]
    for name in missing:
        problem = f'{path.name} has no array "{name}"; its arrays are {quote_names(headers)}.'
        remedy = suggest_nearest_name(name, headers.keys() - required.keys())
        faults.append(Fault(required[name], problem, remedy))
    objects = [name for name, header in headers.items() if header.dtype.hasobject]
    if objects:
        problem = f"{path.name} holds Python objects in {quote_names(objects)}, which may run code when read."
        faults.append(Fault("data.path", problem, "Save them as plain arrays of numbers or strings."))
    return faults


def find_npz_array_shape_faults(spec: NpzDatasetSpec, headers: Headers, prefixes: Sequence[str]) -> list[Fault]:
    """Return faults for arrays with a wrong type or shape, or a length that differs from the number of images.

    Args:
        headers: The headers of the arrays in the file, by array name.
        prefixes: The parts: "train", "val", "test", with which the array names begin.
    """
    faults = list[Fault]()
    for prefix in prefixes:
        if _has_jpeg_arrays(headers):
            faults += _find_npz_jpeg_faults(headers, prefix)
        else:
            faults += _find_npz_picture_faults(spec, headers[f"{prefix}_images"], prefix)
        problems = list[str]()
        count = _count_npz_images(headers, prefix)
        for kind in filter(None, ("labels", spec.patient_key, spec.source_key)):
            shape = headers[f"{prefix}_{kind}"].shape
            if not shape or shape[0] != count:
                problems.append(f"{prefix}_{kind} has shape {shape}, but {prefix} has {count} images.")
            elif kind != "labels" and math.prod(shape) != count:
                problems.append(f"{prefix}_{kind} has shape {shape}; expected one entry an image, ({count},).")
        problems += _find_npz_mask_problems(headers, prefix)
        shape = headers[f"{prefix}_labels"].shape
        if len(shape) not in (1, 2):
            problems.append(f"{prefix}_labels has shape {shape}; expected (n,), (n, 1) or (n, classes).")
        faults += [Fault("data.path", problem) for problem in problems]
    return faults


def _find_npz_jpeg_faults(headers: Headers, prefix: str) -> list[Fault]:
    """Return faults if the arrays of JPEG bytes and of the pictures' offsets have a wrong type or shape."""
    problems = list[str]()
    data = headers[f"{prefix}_jpeg"]
    if data.dtype != np.uint8 or len(data.shape) != 1:
        problems.append(f"{prefix}_jpeg is {data}; expected uint8 (bytes of all pictures,).")
    offsets = headers[f"{prefix}_offsets"]
    if offsets.dtype.kind not in "iu" or len(offsets.shape) != 1:
        problems.append(f"{prefix}_offsets is {offsets}; expected whole numbers (pictures + 1,).")
    return [Fault("data.path", problem) for problem in problems]


def _find_npz_picture_faults(spec: NpzDatasetSpec, images: NpyArrayHeader, prefix: str) -> list[Fault]:
    """Return faults if an array of pictures or volumes has a wrong type or shape, or an unknown range of values."""
    faults = list[Fault]()
    if is_volume_array(images.shape) and spec.image_size is not None:
        problem = f"{prefix}_images is {images}, of volumes, and image_size resizes pictures."
        faults.append(Fault("data.path", problem, "Leave data.image_size out: the network resizes volumes."))
    has_image_shape = is_image_array(images.shape) and min(images.shape[1:]) >= 1
    if not has_image_shape or images.dtype.kind not in "biuf":
        problem = f"{prefix}_images is {images}; expected uint8 (n, height, width) or (n, height, width, 3)."
        faults.append(Fault("data.path", problem))
    elif images.dtype != np.uint8 and spec.value_range is None:
        problem = f"{prefix}_images is {images}: which values are black and white is unknown."
        example = "[0, 1]" if images.dtype.kind in "bf" else "[0, 4095]"
        remedy = f"Name them: value_range = {example} in [data], for instance."
        faults.append(Fault("data.path", problem, remedy))
    return faults


def _find_npz_mask_problems(headers: Headers, prefix: str) -> list[str]:
    """Return problems with the array of masks of a part, from its header; empty if there are none."""
    if f"{prefix}_masks" not in headers:
        return []
    masks, labels = headers[f"{prefix}_masks"], headers[f"{prefix}_labels"].shape
    if _has_jpeg_arrays(headers):
        return [f"{prefix}_masks goes with {prefix}_images, not with JPEG files of other sizes."]
    images = headers[f"{prefix}_images"].shape
    if len(labels) != 2:
        return [f"{prefix}_labels has shape {labels}; beside masks, expected (n, classes), NaN for not annotated."]
    # Masks have no axis for colours.
    has_channels = len(images) == 5 or (len(images) == 4 and not is_volume_array(images))
    spatial = images[:-1] if has_channels else images
    expected = (*spatial, labels[1])
    if masks.shape != expected or masks.dtype.kind not in "bui":
        return [f"{prefix}_masks is {masks}; expected bool {expected}, one area for each class."]
    return []


def find_npz_memory_faults(
    spec: NpzDatasetSpec,
    path: Path,
    headers: Headers,
    prefixes: Sequence[str],
    classes: int,
    *,
    in_memory: bool = False,
) -> list[Fault]:
    """Return a fault if the arrays would need too much memory, or the images in the cache too much disk space.

    Args:
        headers: The headers of the arrays in the file, by array name.
        prefixes: The parts to load: "train", "val", "test".
        classes: Number of classes.
        in_memory: True if all images stay in memory; otherwise the images of a large part go to the disk.
    """
    memory = 0
    disk = 0
    for prefix in prefixes:
        memory += _count_npz_images(headers, prefix) * (_BYTES_PER_ROW + _BYTES_PER_LABEL * classes)
        for kind in {"offsets", "labels", spec.patient_key, spec.source_key} - {None}:
            name = f"{prefix}_{kind}"
            if name in headers:
                memory += _BYTES_PER_VALUE_BYTE * headers[name].byte_size
        images = headers[f"{prefix}_jpeg" if _has_jpeg_arrays(headers) else f"{prefix}_images"].byte_size
        if in_memory or _has_jpeg_arrays(headers) or images <= MAX_IMAGE_BYTES_IN_MEMORY:
            memory += images
        else:
            disk += images
    in_memory_faults = find_oversized_content_faults(path, memory, spec.largest_mb)
    return in_memory_faults or find_oversized_content_faults(path, disk, spec.largest_mb, on_disk=True)


def find_oversized_content_faults(
    path: Path, claimed: int, largest_mb: int = DEFAULT_LARGEST_MB, where: str = "data.path", *, on_disk: bool = False
) -> list[Fault]:
    """Return a fault if the decoded content, ``claimed`` bytes, is too large for a file of this size.

    Args:
        largest_mb: MiB that are always allowed, even for a very small file.
        where: The configuration key that the fault names.
        on_disk: True if the content is written to the disk in pieces, so that memory sets no limit.
    """
    limit = compute_decoded_file_size_limit(path.stat().st_size, largest_mb, in_memory=not on_disk)
    if claimed <= limit:
        return []
    subject = "" if where.endswith(path.name) else f"{path.name}: "
    remedy = "If that is right, raise this key; else get the file again, or divide it."
    return [Fault(where, f"{subject}{make_oversized_file_message(claimed, limit)}.", remedy)]


def find_npz_label_faults(labels: Mapping[str, NDArray[Any]], class_names: tuple[str, ...]) -> list[Fault]:
    """Return faults if labels have a wrong type or value, differ in kind between parts, or do not fit the class names.

    Args:
        labels: Prefix of the arrays of a part -> its labels.
    """
    if any(array.dtype.kind not in "biuf" for array in labels.values()):
        types = {prefix: "text" if array.dtype.kind in "US" else array.dtype for prefix, array in labels.items()}
        kinds = ", ".join(f"{prefix}_labels is {kind}" for prefix, kind in types.items())
        remedy = "Number them: classes, numbers = numpy.unique(labels, return_inverse=True), for all parts together, "
        remedy += "and write these classes in data.classes."
        return [Fault("data.path", f"labels are numbers; {kinds}.", remedy)]
    faults = list[Fault]()
    for prefix, array in labels.items():
        if are_labels_class_numbers(array):
            is_whole = array.dtype.kind in "biu" or bool((array == np.floor(array)).all())
            expected, fits = "whole class numbers from 0", is_whole and bool((array >= 0).all())
        else:
            expected, fits = "0, 1 or NaN", bool((np.isin(array, (0, 1)) | np.isnan(array.astype(np.float64))).all())
        if not fits:
            faults.append(Fault("data.path", f"{prefix}_labels holds values other than {expected}."))
    if faults:
        return faults
    if len({are_labels_class_numbers(array) for array in labels.values()}) > 1:
        shapes = ", ".join(f"{prefix}_labels is {array.shape}" for prefix, array in labels.items())
        return [Fault("data.path", f"labels are class numbers in one part and 0/1 per class in another: {shapes}.")]
    numbers = all(map(are_labels_class_numbers, labels.values()))
    if numbers:
        widths = [int(array.max()) + 1 if array.size else 0 for array in labels.values()]
    else:
        widths = [int(array.shape[1]) for array in labels.values()]
    needed = max(widths)
    names_fit = set(widths) == {len(class_names)}
    if numbers:
        # The class with the largest number may have no image in this file.
        names_fit = needed <= len(class_names)
    if not class_names:
        problem = f"the file names no classes, and its labels are of {needed} classes."
    elif not names_fit:
        problem = f"{len(class_names)} names for labels of {needed} classes: {quote_names(class_names)}."
    else:
        return []
    return [Fault("data.classes", problem, f"Give {needed} names in label order.")]


def are_labels_class_numbers(labels: NDArray[Any]) -> bool:
    """Return True if labels are one class number per image, ``(n,)`` or ``(n, 1)``, and not 0 or 1 for each class."""
    return labels.ndim == 1 or labels.shape[1] == 1


@dataclass(frozen=True)
class NpzPart:
    """The labels, patients and centres of one part of an npz file, without its images.

    Attributes:
        prefix: "train", "val" or "test", the prefix of the part's array names.
        rows: Indices of the images in the arrays of the file.
        labels: ``(n, classes)``: 1 present, 0 absent, NaN unknown.
        patients: ``(n,)``, the patient of each image.
        sources: ``(n,)``, the centre of each image; empty where unknown.
    """

    prefix: str
    rows: NDArray[np.intp]
    labels: NDArray[np.float32]
    patients: StringArray
    sources: StringArray

    def select_rows(self, index: NDArray[np.intp]) -> "NpzPart":
        """Return the images with these indices."""
        return NpzPart(self.prefix, self.rows[index], self.labels[index], self.patients[index], self.sources[index])

    def sample_stratified_rows(self, limit: int | None, seed: int) -> "NpzPart":
        """Return at most ``limit`` images, sampled in proportion to each combination of labels."""
        if limit is None or limit >= len(self.rows):
            return self
        return self.select_rows(draw_stratified_rows(self.labels, limit, seed))


def open_npz_parts(spec: NpzDatasetSpec, base: Path) -> tuple[tuple[str, ...], tuple[NpzPart, NpzPart, NpzPart]]:
    """Read and check an npz file except for its images; return the class names, training, validation and test part.

    Args:
        base: The folder to which the path in ``spec`` is relative.

    Raises:
        BadInput: With the faults of the first stage that fails: array names, shapes, values.
    """
    headers = read_npz_headers(base / spec.path)
    prefixes = [prefix for prefix in _PREFIXES if prefix != "val" or "val_labels" in headers]
    class_names, parts = _open_npz_parts_by_prefix(spec, base / spec.path, headers, prefixes)
    train, test = parts[0], parts[-1].sample_stratified_rows(spec.test_limit, spec.split_seed)
    if len(parts) == 3:
        return class_names, (train.sample_stratified_rows(spec.train_limit, spec.split_seed), parts[1], test)
    held_out = hold_out_patients(
        train.patients, find_positive_images(train.labels), spec.validation_fraction, spec.split_seed
    )
    rest = train.select_rows(np.flatnonzero(~held_out)).sample_stratified_rows(spec.train_limit, spec.split_seed)
    return class_names, (rest, train.select_rows(np.flatnonzero(held_out)), test)


def _open_npz_parts_by_prefix(
    spec: NpzDatasetSpec, path: Path, headers: Headers, prefixes: Sequence[str]
) -> tuple[tuple[str, ...], list[NpzPart]]:
    """Read and check the labels, patients and centres of some parts of an npz file.

    Args:
        headers: The headers of the arrays in the file, by array name.
        prefixes: The parts: "train", "val", "test".

    Returns:
        The names of the classes in use, ``spec.keep`` or else all, and the parts with the labels of these classes only.

    Raises:
        BadInput: With the faults of the first stage that fails: array names, shapes, values.
    """
    raise_faults(find_npz_array_name_faults(spec, path, headers, prefixes))
    raise_faults(find_npz_array_shape_faults(spec, headers, prefixes))
    class_names = spec.classes or get_public_dataset_classes(path.stem)
    raise_faults(find_npz_memory_faults(spec, path, headers, prefixes, len(class_names)))
    with open_npz_arrays(path) as arrays:
        labels = {prefix: arrays[f"{prefix}_labels"] for prefix in prefixes}
        raise_faults(find_npz_label_faults(labels, class_names))
        parts = list[NpzPart]()
        start = 0
        for prefix, values in labels.items():
            count = len(values)
            matrix = values
            if are_labels_class_numbers(values):
                matrix = values.reshape(-1, 1) == np.arange(len(class_names))  # (n, classes)
            patients = make_placeholder_patient_names(count, start)
            sources = np.full(count, "")
            if spec.patient_key is not None:
                patients = normalize_name_array(arrays[f"{prefix}_{spec.patient_key}"].reshape(count))
            if spec.source_key is not None:
                sources = normalize_name_array(arrays[f"{prefix}_{spec.source_key}"].reshape(count))
            parts.append(NpzPart(prefix, np.arange(count), matrix.astype(np.float32), patients, sources))
            start += count
    raise_faults(
        [
            *find_repeated_name_faults("data.classes", class_names),
            *find_unknown_class_faults("data.keep", spec.keep, class_names),
            *find_repeated_name_faults("data.keep", spec.keep),
            *find_shared_patient_faults("data.patient_key", {part.prefix: part.patients for part in parts}),
            *find_patient_name_faults("data.patient_key", np.concatenate([part.patients for part in parts])),
        ]
    )
    selected = spec.keep or class_names
    columns = [class_names.index(name) for name in selected]
    parts = [replace(part, labels=part.labels[:, columns]) for part in parts]
    if all(map(are_labels_class_numbers, labels.values())):
        # Each image has one class. An image without a positive label has a class that is left out.
        parts = [part.select_rows(np.flatnonzero((part.labels == 1).any(axis=1))) for part in parts]
    return selected, parts


def draw_stratified_rows(labels: NDArray[np.float32], limit: int, seed: int) -> NDArray[np.intp]:
    """Draw ``limit`` rows in total, in proportion to each combination of labels; return them in ascending order.

    The m rows of each combination are shuffled. The r-th row gets the position ``(r + u) / m``, where u is a uniform
    random number for each combination. The ``limit`` rows with the lowest positions are drawn.
    """
    random = np.random.default_rng(seed)
    _, combination = np.unique(labels, axis=0, return_inverse=True)
    combination = combination.reshape(-1)
    position = np.empty(len(labels))
    for group in range(combination.max() + 1):
        members = np.flatnonzero(combination == group)
        position[members] = (random.permutation(len(members)) + random.random()) / len(members)
    return np.sort(np.argsort(position, kind="stable")[:limit])


OpenedNpz = tuple[tuple[str, ...], tuple[NpzPart, NpzPart, NpzPart]]
"""The result of :func:`open_npz_parts`: the class names, and the training, validation and test part."""


def load_npz_dataset(
    spec: NpzDatasetSpec, base: Path, store: DecodedImageStore, opened: OpenedNpz | None = None
) -> DatasetSplits:
    """Load an npz file with its images.

    Args:
        base: The folder to which the path in ``spec`` is relative.
        opened: The result of :func:`open_npz_parts`; None to call it here.

    Raises:
        BadInput: If a check fails; it lists all faults.
    """
    class_names, parts = opened or open_npz_parts(spec, base)
    splits = DatasetSplits(*_read_npz_images(spec, base, parts, class_names, store))
    return check_picture_copies("data.path", splits, spec.duplicates, by_part=True)


def load_npz_test_part(spec: NpzDatasetSpec, base: Path, store: DecodedImageStore) -> ImageSet:
    """Load only the test part of an npz file; the file may lack the other parts.

    Args:
        base: The folder to which the path in ``spec`` is relative.

    Raises:
        BadInput: If a check fails; it lists all faults.
    """
    class_names, parts = _open_npz_parts_by_prefix(
        spec, base / spec.path, read_npz_headers(base / spec.path), ("test",)
    )
    (test,) = _read_npz_images(spec, base, parts, class_names, store)
    return test


def _read_npz_images(
    spec: NpzDatasetSpec, base: Path, parts: Sequence[NpzPart], class_names: tuple[str, ...], store: DecodedImageStore
) -> list[ImageSet]:
    sets = []
    path = base / spec.path
    if store.folder is None:
        prefixes = list(dict.fromkeys(part.prefix for part in parts))
        raise_faults(
            find_npz_memory_faults(spec, path, read_npz_headers(path), prefixes, len(class_names), in_memory=True)
        )
    with open_npz_arrays(path) as arrays:
        for part in parts:
            read = _read_npz_jpeg_images if f"{part.prefix}_jpeg" in arrays else _read_npz_array_images
            images = read(spec, arrays, part, class_names, store)
            if f"{part.prefix}_masks" in arrays:
                images = _add_npz_masks(images, spec, arrays, part)
            sets.append(images)
    skipped = [skip for images in sets for skip in images.skipped]
    refuse_too_many_skipped_images("data.path", skipped, sum(map(len, sets)) + len(skipped), spec.skip_budget)
    return sets


def _read_npz_array_images(
    spec: NpzDatasetSpec, arrays: NpzArrayReader, part: NpzPart, class_names: tuple[str, ...], store: DecodedImageStore
) -> ImageSet:
    key = f"{part.prefix}_images"
    header = arrays.read_array_header_by_name(key)
    shape = header.shape[1:]
    if spec.image_size is not None:
        shape = (spec.image_size, spec.image_size, *header.shape[3:])
    if is_volume_array(header.shape) and len(shape) == 3:
        shape = (*shape, 1)  # one channel
    size = len(part.rows) * math.prod(shape)
    if size > MAX_IMAGE_BYTES_IN_MEMORY:

        def read_resized_blocks(numbers: NDArray[np.intp]) -> Iterator[NDArray[np.uint8]]:
            for block in _iterate_8_bit_blocks(spec, arrays, key, part.rows[numbers]):
                if is_volume_array(header.shape):
                    yield block.reshape(len(block), *shape)
                else:
                    yield resize_images(block, spec.image_size, spec.resize)

        form: dict[str, Any] = {"shape": list(shape), "resize": spec.resize, "kind": "npz"}
        if spec.value_range is not None:
            form["value_range"] = list(spec.value_range)
        names = [f"{key}[{row}]" for row in part.rows]
        cached = cache_large_file_pictures(store, arrays.path, form, names, read_resized_blocks)
        if cached:
            pictures, places = cached
            return ImageSet(pictures, part.labels, class_names, part.patients, part.sources, places=places)
    raise_faults(find_oversized_content_faults(arrays.path, max(size, header.byte_size), spec.largest_mb))
    if spec.value_range is None:
        stored = arrays.read_array_rows(key, part.rows)
    else:
        no_images = np.empty((0, *header.shape[1:]), np.uint8)  # gives the result its shape if the part is empty
        stored = np.concatenate([no_images, *_iterate_8_bit_blocks(spec, arrays, key, part.rows)])
    if is_volume_array(stored.shape):
        images = stored.reshape(len(stored), *shape)
    else:
        images = resize_images(stored, spec.image_size, spec.resize)
    return ImageSet(images, part.labels, class_names, part.patients, part.sources)


def _add_npz_masks(images: ImageSet, spec: NpzDatasetSpec, arrays: NpzArrayReader, part: NpzPart) -> ImageSet:
    """Add the masks of a part to its images, and set each known label to 1 if its class has a pixel, else to 0."""
    key = f"{part.prefix}_masks"
    names = images.class_names
    all_names = spec.classes or get_public_dataset_classes(arrays.path.stem)
    columns = [all_names.index(name) for name in names]
    shape = tuple(images.stored.shape[1:-1] if images.stored.ndim == 5 else images.stored.shape[1:3])
    stored = np.zeros((len(images), *shape), choose_mask_type(len(names)))
    row = 0
    for block in arrays.iterate_array_blocks(key, part.rows):
        for areas in block:
            planes = np.moveaxis(areas != 0, -1, 0)[columns]  # (classes, *spatial)
            if planes.shape[1:] != shape:
                form = DecodedImageFormat(int(shape[0]), False, spec.resize)
                grid = PictureGrid(int(planes.shape[1]), int(planes.shape[2]))
                planes = np.stack([fit_mask_to_format(plane, grid, form) for plane in planes])
            stored[row] = pack_class_areas(planes)
            row += 1
    masks = MaskSet(stored, np.arange(len(images)), make_class_bits(names))
    shown = masks.find_shown_classes(names)
    labels = np.where(np.isnan(images.labels), np.nan, shown).astype(np.float32)
    return replace(images, labels=labels, masks=masks)


def _iterate_8_bit_blocks(
    spec: NpzDatasetSpec, arrays: NpzArrayReader, key: str, rows: NDArray[np.intp]
) -> Iterator[NDArray[np.uint8]]:
    """Yield the images at these ascending indices in blocks, scaled to 8 bits by ``spec.value_range`` if it is set.

    Raises:
        BadInput: If a value is NaN.
    """
    for block in arrays.iterate_array_blocks(key, rows):
        if spec.value_range is None:
            yield block
            continue
        try:
            yield scale_values_to_8_bits(block, spec.value_range)
        except ValueError as error:
            raise BadInput([Fault("data.path", f"{key}: {error}.", "Give every pixel a value.")]) from None


def _read_npz_jpeg_images(
    spec: NpzDatasetSpec, arrays: NpzArrayReader, part: NpzPart, class_names: tuple[str, ...], store: DecodedImageStore
) -> ImageSet:
    """Decode the JPEG pictures of a part; the first picture defines the size and colour of all."""
    data = arrays[f"{part.prefix}_jpeg"]
    offsets = arrays[f"{part.prefix}_offsets"]
    rendering = PictureRenderingOptions(value_range=spec.value_range)
    try:
        first = decode_picture(bytes(data[slice(*offsets[:2])]), rendering)
    except Exception as error:  # any error of a decoder
        problem = f"the first JPEG picture of {spec.path} cannot be read: {explain_decoding_error(error)}."
        raise BadInput([Fault("data.path", problem, "All pictures take its form: repair or remove it.")]) from None
    form = DecodedImageFormat(spec.image_size or max(first.size), first.mode == "RGB", spec.resize, rendering)
    raise_faults(find_oversized_content_faults(arrays.path, len(part.rows) * math.prod(form.shape), spec.largest_mb))

    def read_jpeg_bytes(row: int) -> bytes:
        start, end = offsets[part.rows[row] : part.rows[row] + 2]
        return bytes(data[start:end])

    decoded = decode_pictures([f"{part.prefix}[{row}]" for row in part.rows], read_jpeg_bytes, form, store)
    part = part.select_rows(decoded.rows)
    return ImageSet(
        decoded.stored, part.labels, class_names, part.patients, part.sources, decoded.skipped, places=decoded.places
    )
