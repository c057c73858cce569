"""Data sets in memory (:class:`ImageSet`, :class:`DatasetSplits`); conversion to arrays for other processes."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from polyclinic.common.errors import Fault
from polyclinic.common.system.plain_text import format_count_with_noun, list_first_and_count_rest
from polyclinic.data.base.attributes import ImageAttributes, concatenate_attributes
from polyclinic.data.base.masks import LazyMasks, MaskSet, concatenate_masks
from polyclinic.data.base.names import is_anonymous_patient

PARTS = ("train", "validation", "test")
MAX_SKIPPED_LISTED = 5
PLACEHOLDER_PATIENT_PREFIX = "unknown#"
"""Prefix of placeholder patient names, followed by the image's number."""


def make_placeholder_patient_names(count: int, start: int = 0) -> NDArray[np.str_]:
    """Return placeholder patient names ``(count,)``, one per image, numbered from ``start``, for unknown patients."""
    return np.char.add(PLACEHOLDER_PATIENT_PREFIX, np.arange(start, start + count).astype(np.str_))


def fill_missing_patients_by_study(patients: Sequence[str], studies: Sequence[str]) -> list[str]:
    """Return a patient name for each image; fill in missing names from other images of the same study.

    An image without a name gets the patient of its study if the study has exactly one patient. Otherwise all unnamed
    images of the study get one placeholder name. An unnamed image without a study gets a unique placeholder name.

    Args:
        patients: ``(n,)`` names, empty where unknown; a name such as ``ANON`` counts as unknown.
        studies: ``(n,)`` StudyInstanceUIDs, empty where unknown.
    """
    patients_of_study = defaultdict[str, set[str]](set)
    patients = ["" if is_anonymous_patient(patient) else patient for patient in patients]
    for patient, study in zip(patients, studies, strict=True):
        if patient and study:
            patients_of_study[study].add(patient)
    only_patient = {study: next(iter(names)) for study, names in patients_of_study.items() if len(names) == 1}
    return [
        patient or only_patient.get(study) or f"{PLACEHOLDER_PATIENT_PREFIX}{study or row}"
        for row, (patient, study) in enumerate(zip(patients, studies, strict=True))
    ]


def find_placeholder_patients(patients: NDArray[np.str_]) -> NDArray[np.bool_]:
    """Return a mask ``(n,)``, True where the patient name is a placeholder."""
    return np.asarray(np.char.find(patients, PLACEHOLDER_PATIENT_PREFIX) >= 0)


def are_all_patients_known(patients: NDArray[np.str_]) -> bool:
    """Return True if none of the patient names ``(n,)`` is a placeholder (:func:`find_placeholder_patients`)."""
    return not find_placeholder_patients(patients).any()


@dataclass(frozen=True)
class SkippedImage:
    """An image that could not be read and is left out of the data set, with the reason."""

    name: str
    reason: str


@dataclass(frozen=True)
class SharedPicture:
    """A picture that is in two parts of a data set.

    Attributes:
        part: Part of this copy, one of :data:`PARTS`.
        name: Name of this copy.
        other_part: The other part that has the picture.
        other_name: Name of the first copy in ``other_part``.
    """

    part: str
    name: str
    other_part: str
    other_name: str


MIN_HASH_DIGEST = 2**32
"""A picture whose pixels all have one value has a digest below this number; other pictures have a larger digest."""
DIGEST_BLOCKS = 64
"""Number of blocks into which a set of pictures is divided for hashing; each block is one task of a thread."""


def compute_picture_digest(pixels: NDArray[Any], secret: bytes | None = None) -> int:
    """Return a number below 2^64 that identifies a picture by its pixels.

    If the pixels differ, the number is a hash of them, 2^32 or more. If all pixels have one value, the number is below
    2^32: the value if it is whole, else the bits of its float32.

    A float32 picture of whole numbers has the same digest as the uint8 picture of these numbers.

    Args:
        pixels: uint8, or float32 from 0 to 255.
        secret: Key of the hash. Without the key, nobody can compare a digest with that of a picture they have.
    """
    if pixels.dtype != np.uint8:
        rounded = pixels.clip(0, 255).astype(np.uint8)
        if np.array_equal(rounded, pixels):
            pixels = rounded
    low = pixels.min()
    if low == pixels.max():
        return int(low) if pixels.dtype == np.uint8 else int(np.float32(low).view(np.uint32))
    content = np.ascontiguousarray(pixels).data.cast("B")
    hashed = blake3(content) if secret is None else blake3(content, key=secret)
    return max(int.from_bytes(hashed.digest(8)), MIN_HASH_DIGEST)


def _compute_digests_of_rows(pictures: NDArray[Any], rows: NDArray[np.intp]) -> list[int]:
    return [compute_picture_digest(pictures[row]) for row in rows.tolist()]


class LazyPictures(ABC):
    """Base class of pictures that are read from the disk, or from a user's data set, only when they are needed.

    Such an object behaves like a uint8 array ``(n, height, width[, 3])`` that is indexed along its first axis.

    Attributes:
        shape: The shape of that array.
        draws: True if reading applies random transforms, which the ``seed`` of :meth:`read_pictures` determines. Only
            one thread may then read, because the transforms use the process's global random generators.
        reproducible: False if reading a picture twice with one seed gave different pixels.
        is_augmented: True if reading a picture with two seeds gave different pixels.
    """

    shape: tuple[int, ...]
    draws = False
    reproducible = True
    is_augmented = False
    dtype = np.dtype(np.uint8)

    @abstractmethod
    def read_pictures(self, rows: NDArray[np.intp], seed: int = 0) -> NDArray[Any]:
        """Return the pictures with these indices, in the given order; uint8, or float32 from 0 to 255.

        Args:
            seed: Determines the random transforms, if reading applies any.
        """

    def view_picture(self, row: int) -> NDArray[Any]:
        """Return one picture, which the caller must not change; it is not copied if it is in an unencrypted file."""
        picture: NDArray[Any] = self.read_pictures(np.array([row], np.intp))[0]
        return picture

    @abstractmethod
    def read_picture_digests(self, rows: NDArray[np.intp]) -> NDArray[np.uint64]:
        """Return the digest (:func:`compute_picture_digest`) of each picture with these indices."""

    def read_brightest_values(self, rows: NDArray[np.intp]) -> NDArray[Any]:
        """Return the largest value of each picture with these indices, 0 to 255."""
        return np.array([self.read_pictures(np.array([row])).max() for row in rows.tolist()])

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape))

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: NDArray[np.intp] | slice) -> NDArray[np.uint8]:
        return self.read_pictures(np.arange(len(self))[rows])


def describe_skipped_images(skipped: Sequence[SkippedImage]) -> str:
    """Return a sentence that lists the first images that could not be read; empty if there are none."""
    if not skipped:
        return ""
    descriptions = [f"{image.name} ({image.reason})" for image in skipped]
    names = list_first_and_count_rest(descriptions, MAX_SKIPPED_LISTED)
    verb = "is" if len(skipped) == 1 else "are"
    return f"{format_count_with_noun(len(skipped), 'image')} could not be read, and {verb} left out: {names}."


def describe_blank_pictures(names: Sequence[str]) -> str:
    """Return a sentence that lists the first files rendered in one uniform grey; empty if there are none."""
    if not names:
        return ""
    files = format_count_with_noun(len(names), "DICOM or NIfTI file is", "DICOM or NIfTI files are")
    reason = "their window or VOI LUT misses all of their values. data.window = [centre, width] sets another"
    return f"{files} one grey all over, because {reason}: {list_first_and_count_rest(names, MAX_SKIPPED_LISTED)}."


@dataclass(frozen=True)
class ImageSet:
    """Images with their labels, patients and centres; index i of each array belongs to image i.

    Attributes:
        stored: The pictures: a uint8 array ``(m, height, width[, 3])``, or a :class:`LazyPictures` of that shape.
            Volumes have five axes, ``(m, depth, height, width, channels)``. The training, validation and test part of
            a data set share one ``stored``.
        labels: float32 ``(n, classes)``: 1 present, 0 absent, NaN unknown (not annotated, or uncertain).
        class_names: Column names of ``labels``, in the order of the source.
        patients: ``(n,)`` strings. All images of a patient are in the same part of a split. Unknown patients have the
            names of :func:`make_placeholder_patient_names`.
        sources: ``(n,)`` strings, the centre that each image came from; empty strings where unknown.
        skipped: Images that could not be read and are left out.
        missing: Number of images that are in the label table but not in the image folder.
        places: ``(n,)``, the index of each image's picture in ``stored``; None if image i has picture i.
        notes: Remarks for the user about the label table and the pictures; the same in all parts of a data set.
        omissions: Sentences that count the images, labels or classes that are left out; the same in all parts.
        drops_color: True if some of the data set's pictures have colour in their files, but are stored in grey.
        shared: Pictures that are in two parts of the data set; the same in all parts.
        white_of_dark: The value that is probably white if the data set's pictures are nearly black, else 0
            (:mod:`polyclinic.data.base.dark_pictures`); the same in all parts.
        attributes: Sex, age, year and device of each image; None if they are unknown.
        lines: int32 ``(n,)``, the line number of each image in the label table; None without a table.
        masks: The area of each class in each image; None if the images have labels only. With masks, a label is 1 if
            the class has a pixel in the image, 0 if it has none, and NaN if it is not annotated there.
    """

    stored: NDArray[np.uint8] | LazyPictures
    labels: NDArray[np.float32]
    class_names: tuple[str, ...]
    patients: NDArray[np.str_]
    sources: NDArray[np.str_]
    skipped: tuple[SkippedImage, ...] = ()
    missing: int = 0
    places: NDArray[np.intp] | None = None
    notes: tuple[str, ...] = ()
    omissions: tuple[str, ...] = ()
    drops_color: bool = False
    shared: tuple[SharedPicture, ...] = ()
    white_of_dark: int = 0
    attributes: ImageAttributes | None = None
    lines: NDArray[np.int32] | None = None
    masks: MaskSet | None = None

    def __post_init__(self) -> None:
        n = len(self)
        assert self.stored.dtype == np.uint8, self.stored.dtype
        assert self.stored.ndim in (3, 4, 5), self.stored.shape
        assert self.labels.dtype == np.float32, self.labels.dtype
        assert self.labels.shape == (n, len(self.class_names)), self.labels.shape
        assert self.patients.shape == (n,), self.patients.shape
        assert self.sources.shape == (n,), self.sources.shape
        if self.masks is not None:
            assert len(self.masks) == n, (len(self.masks), n)
            assert set(self.class_names) <= set(self.masks.bits), (self.class_names, tuple(self.masks.bits))

    def __len__(self) -> int:
        return len(self.stored) if self.places is None else len(self.places)

    @property
    def images(self) -> NDArray[np.uint8]:
        """All pictures in memory, ``(n, height, width[, 3])``: ``stored`` itself, or a copy of those at ``places``.

        For a large set, call :meth:`select_rows` first, because all selected pictures are loaded.
        """
        if self.places is not None:
            return self.stored[self.places]
        return self.stored[:] if isinstance(self.stored, LazyPictures) else self.stored

    @property
    def is_reproducible(self) -> bool:
        """Return False if the user's data set gave different pixels for one picture and one seed."""
        return not isinstance(self.stored, LazyPictures) or self.stored.reproducible

    @cached_property
    def picture_digests(self) -> NDArray[np.uint64]:
        """The digest (:func:`compute_picture_digest`) of each picture, ``(n,)``."""
        rows = np.arange(len(self)) if self.places is None else self.places
        if isinstance(self.stored, LazyPictures):
            return self.stored.read_picture_digests(rows)
        pictures = self.stored
        # Identical files share a row of the array, so that each row is hashed once.
        distinct_rows, inverse = np.unique(rows, return_inverse=True)
        # A task for each picture would cost more than hashing a small one.
        blocks = np.array_split(distinct_rows, max(1, min(DIGEST_BLOCKS, len(distinct_rows))))
        with ThreadPoolExecutor() as pool:
            digests_of_blocks = pool.map(partial(_compute_digests_of_rows, pictures), blocks)
            digests = [digest for block in digests_of_blocks for digest in block]
        return np.array(digests, np.uint64)[inverse]

    @property
    def channels(self) -> int:
        """The number of channels: 1 for grey, 3 for colour."""
        return 1 if self.stored.ndim == 3 else int(self.stored.shape[-1])

    def select_rows(self, index: NDArray[np.intp]) -> "ImageSet":
        """Return the images with these indices, in the given order, without copying pictures."""
        return replace(
            self,
            places=index if self.places is None else self.places[index],
            labels=self.labels[index],
            patients=self.patients[index],
            sources=self.sources[index],
            attributes=None if self.attributes is None else self.attributes.select_rows(index),
            lines=None if self.lines is None else self.lines[index],
            masks=None if self.masks is None else self.masks.select_rows(index),
        )

    def rename_classes(self, class_names: Sequence[str]) -> "ImageSet":
        """Return the same images with new names of the label columns, in the order of the columns."""
        names = tuple(class_names)
        masks = self.masks
        if masks is not None:
            masks = masks.merge_classes({new: [old] for new, old in zip(names, self.class_names, strict=True)})
        return replace(self, class_names=names, masks=masks)

    def select_label_columns(self, class_names: tuple[str, ...]) -> "ImageSet":
        """Return the same images with only the label columns of ``class_names``, in that order."""
        columns = [self.class_names.index(name) for name in class_names]
        return replace(self, labels=np.ascontiguousarray(self.labels[:, columns]), class_names=tuple(class_names))

    def merge_label_columns(self, groups: Iterable[Sequence[str]]) -> "ImageSet":
        """Return the same images; each group of label columns that mean one class becomes one column.

        The merged column has the position and the name of the group's first column. Its label is 1 where one of the
        columns is 1, else 0 where one is 0, else NaN.
        """
        labels = self.labels.copy()
        dropped = set[str]()
        columns_of_class: dict[str, Sequence[str]] = {name: [name] for name in self.class_names}
        for group in groups:
            columns = [self.class_names.index(name) for name in group]
            labels[:, columns[0]] = np.fmax.reduce(labels[:, columns], axis=1)
            dropped.update(group[1:])
            columns_of_class[group[0]] = group
        names = tuple(name for name in self.class_names if name not in dropped)
        masks = None if self.masks is None else self.masks.merge_classes(columns_of_class)
        return replace(self, labels=labels, masks=masks).select_label_columns(names)


def find_missing_mask_faults(sets: Mapping[str, ImageSet | None]) -> list[Fault]:
    """Return a fault for each image set without masks, which a segmentation task needs.

    Args:
        sets: Configuration key -> the images that the key names; None if the key is not set.
    """
    remedy = (
        "Name the masks: data.mask_column with data.mask_values, or data.mask_columns, of a folder; arrays of masks in "
        "an npz file. docs/segmentation.md has examples."
    )
    problem = "has no masks, and model.task asks for a label for each pixel."
    return [
        Fault(where, problem, remedy) for where, images in sets.items() if images is not None and images.masks is None
    ]


def concatenate_image_sets(sets: Sequence[ImageSet]) -> ImageSet:
    """Join several image sets, which have the same classes, image size and colour, into one.

    No picture is copied if all sets have the same ``stored``.
    """
    shared = all(images.stored is sets[0].stored for images in sets) and len(sets) > 1
    lines = [images.lines for images in sets if images.lines is not None]
    places = [np.arange(len(images)) if images.places is None else images.places for images in sets]
    attributes = [images.attributes for images in sets if images.attributes is not None]
    masks = [images.masks for images in sets if images.masks is not None]
    return replace(
        sets[0],
        stored=sets[0].stored if shared else np.concatenate([images.images for images in sets]),
        places=np.concatenate(places) if shared else None,
        labels=np.concatenate([images.labels for images in sets]),
        patients=np.concatenate([images.patients for images in sets]),
        sources=np.concatenate([images.sources for images in sets]),
        lines=np.concatenate(lines) if len(lines) == len(sets) else None,
        skipped=tuple(skip for images in sets for skip in images.skipped),
        notes=tuple(dict.fromkeys(note for images in sets for note in images.notes)),
        omissions=tuple(dict.fromkeys(sentence for images in sets for sentence in images.omissions)),
        drops_color=any(images.drops_color for images in sets),
        attributes=concatenate_attributes(attributes) if len(attributes) == len(sets) else None,
        masks=concatenate_masks(masks) if len(masks) == len(sets) else None,
    )


@dataclass(frozen=True)
class DatasetSplits:
    """The training, validation and test part of one data set; each patient is in only one part."""

    train: ImageSet
    validation: ImageSet
    test: ImageSet

    def __post_init__(self) -> None:
        assert self.train.class_names == self.validation.class_names == self.test.class_names

    @property
    def parts(self) -> tuple[ImageSet, ImageSet, ImageSet]:
        """The three parts, in the order of :data:`PARTS`."""
        return self.train, self.validation, self.test

    @property
    def class_names(self) -> tuple[str, ...]:
        """The class names, which are the same in all parts."""
        return self.train.class_names


def hash_dataset(*parts: ImageSet) -> str:
    """Return a SHA-256 that identifies a data set: its classes, and every label, patient, centre and picture.

    Args:
        parts: The parts of the data set, which have the same classes.
    """
    digest = hashlib.sha256(json.dumps(parts[0].class_names).encode())
    for images in parts:
        digest.update(json.dumps([images.patients.tolist(), images.sources.tolist()]).encode())
        digest.update(np.ascontiguousarray(images.labels).tobytes())
        digest.update(images.picture_digests.tobytes())
        if images.masks is not None:
            digest.update(json.dumps(dict(images.masks.bits)).encode())
            for place in images.masks.places:
                digest.update(images.masks.stored[place : place + 1].tobytes())
    return digest.hexdigest()


def hash_dataset_components(*parts: ImageSet) -> dict[str, str]:
    """Return hashes of single components of a data set, which show where two data sets differ.

    They are useful if :func:`hash_dataset` differs. They do not depend on the order of the images, because one changed
    label can move all patients to other parts.

    Args:
        parts: The parts of the data set, which have the same classes.

    Returns:
        Name of a component -> its hash, or the number of images. The components are all pictures, all labels, all
        patients, the pairs of picture and labels, the pairs of picture and patient, and the images of each hospital.
    """
    labels = [row.tobytes() for part in parts for row in part.labels]
    digests = [digest.tobytes() for part in parts for digest in part.picture_digests]
    patients = [json.dumps(name).encode() for part in parts for name in part.patients.tolist()]
    sources = [name for part in parts for name in part.sources.tolist()]
    pairs = {"labels by picture": zip(digests, labels, strict=True)}
    pairs["patients by picture"] = zip(digests, patients, strict=True)
    contents = {"pictures": digests, "labels": labels, "patients": patients}
    contents |= {kind: list(map(b"".join, entries)) for kind, entries in pairs.items()}
    for source, entries in zip(sources, zip(digests, labels, patients, strict=True), strict=True):
        if source:
            contents.setdefault(f"hospital {source}", []).append(b"".join(entries))
    return {"images": str(len(labels))} | {
        key: hashlib.sha256(b"".join(sorted(content))).hexdigest()[:16] for key, content in contents.items()
    }


_ARRAY_FIELDS = ("stored", "labels", "patients", "sources", "places")
_MASK_ARRAY_FIELDS = ("stored", "places", "spacing")
Layout = dict[str, Any]
"""Description of a data set as JSON, in which each array is an index into a list of arrays."""


def serialize_dataset_splits(
    splits: DatasetSplits, describe: Callable[[LazyPictures], Any] = lambda stored: None
) -> tuple[Layout, list[NDArray[Any]]]:
    """Convert a data set for another process: to JSON, and to a list of arrays to which the JSON refers by index.

    An array that several parts share is in the list once.

    Args:
        describe: Given a :class:`LazyPictures`, returns JSON with which the other process opens the pictures itself,
            or None to copy all pictures into an array.
    """
    arrays: list[NDArray[Any]] = []
    # id() of an array -> its index in ``arrays``, or the JSON of ``describe``.
    references: dict[int, Any] = {}
    layout: Layout = {}
    for part, images in zip(PARTS, splits.parts, strict=True):
        layout[part] = {
            "class_names": list(images.class_names),
            "skipped": [asdict(skip) for skip in images.skipped],
            "missing": images.missing,
            "notes": list(images.notes),
            "omissions": list(images.omissions),
            "drops_color": images.drops_color,
            "white_of_dark": images.white_of_dark,
        }
        for name in _ARRAY_FIELDS:
            array = getattr(images, name)
            if array is not None and id(array) not in references:
                description = describe(array) if isinstance(array, LazyPictures) else None
                references[id(array)] = len(arrays) if description is None else description
                if description is None:
                    arrays.append(array[:])
            layout[part][name] = None if array is None else references[id(array)]
        masks = images.masks
        layout[part]["mask_bits"] = None if masks is None else dict(masks.bits)
        for name in _MASK_ARRAY_FIELDS:
            array = getattr(masks, name, None)
            if array is not None and id(array) not in references:
                description = _describe_masks(array, describe) if isinstance(array, LazyMasks) else None
                references[id(array)] = len(arrays) if description is None else description
                if description is None:
                    arrays.append(array[:])
            layout[part][f"mask_{name}"] = None if array is None else references[id(array)]
    return layout, arrays


def _describe_masks(masks: LazyMasks, describe: Callable[[LazyPictures], Any]) -> Any:
    """Return JSON with which another process opens these masks on the disk; None if the masks must be copied."""
    rows = describe(masks.rows) if isinstance(masks.rows, LazyPictures) else None
    if rows is None:
        return None
    return {
        "rows": rows,
        "sides": list(masks.sides),
        "dtype": masks.dtype.str,
        "any_bits": masks.any_bits.tolist(),
    }


def _open_described_masks(description: Mapping[str, Any], open_pictures: Callable[[Any], LazyPictures]) -> LazyMasks:
    """Open the masks that :func:`_describe_masks` described in another process."""
    return LazyMasks(
        rows=open_pictures(description["rows"]),
        sides=tuple(description["sides"]),
        dtype=np.dtype(description["dtype"]),
        any_bits=np.array(description["any_bits"], np.int64),
    )


def deserialize_dataset_splits(
    layout: Layout, arrays: Sequence[NDArray[Any]], open_pictures: Callable[[Any], LazyPictures] | None = None
) -> DatasetSplits:
    """Rebuild a data set from the JSON and the arrays of :func:`serialize_dataset_splits`, without copying an array.

    Args:
        open_pictures: Opens pictures from the JSON that ``describe`` of :func:`serialize_dataset_splits` returned; None
            if all pictures are in ``arrays``.
    """
    sets = list[ImageSet]()
    # Parts that share pictures or masks on the disk must share the opened object too.
    pictures_on_disk = dict[str, LazyPictures]()
    masks_on_disk = dict[str, LazyMasks]()
    for part in (layout[name] for name in PARTS):
        fields: dict[str, Any] = {}
        for name in _ARRAY_FIELDS:
            reference = part[name]
            if isinstance(reference, dict) and open_pictures is not None:
                key = str(reference)
                if key not in pictures_on_disk:
                    pictures_on_disk[key] = open_pictures(reference)
                fields[name] = pictures_on_disk[key]
            else:
                fields[name] = None if reference is None else arrays[reference]
        fields["skipped"] = tuple(SkippedImage(**image) for image in part["skipped"])
        fields["missing"] = part["missing"]
        fields["notes"] = tuple(part["notes"])
        fields["omissions"] = tuple(part["omissions"])
        fields["drops_color"] = part["drops_color"]
        fields["white_of_dark"] = part["white_of_dark"]
        if part["mask_bits"] is not None:
            spacing = part["mask_spacing"]
            reference = part["mask_stored"]
            if isinstance(reference, dict) and open_pictures is not None:
                key = str(reference["rows"])
                if key not in masks_on_disk:
                    masks_on_disk[key] = _open_described_masks(reference, open_pictures)
                stored: NDArray[Any] | LazyMasks = masks_on_disk[key]
            else:
                stored = arrays[reference]
            fields["masks"] = MaskSet(
                stored,
                arrays[part["mask_places"]],
                part["mask_bits"],
                None if spacing is None else arrays[spacing],
            )
        sets.append(ImageSet(class_names=tuple(part["class_names"]), **fields))
    return DatasetSplits(*sets)


def view_array_as_bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    """Return the bytes of an array as a flat uint8 array, without a copy if the array is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def list_array_dtypes_and_shapes(arrays: Sequence[NDArray[Any]]) -> list[tuple[str, tuple[int, ...]]]:
    """Return the dtype and the shape of each array, which :func:`restore_array_from_bytes` needs to restore it."""
    return [(array.dtype.str, array.shape) for array in arrays]


def restore_array_from_bytes(data: Any, dtype: str, shape: Sequence[int]) -> NDArray[Any]:
    """Restore a read-only array from the bytes of :func:`view_array_as_bytes`, without a copy."""
    return np.frombuffer(data, dtype).reshape(shape)
