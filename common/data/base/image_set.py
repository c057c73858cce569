"""Pictures and labels in the one form that the rest of the program reads, and as arrays for other processes."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.data.base.names import is_nobody
from common.system.plain_text import count_with_noun, list_first_and_count_rest

PARTS = ("train", "validation", "test")
MOST_SKIPPED_NAMED = 5
UNKNOWN_PATIENT = "unknown#"
"""Prefix of an image's running number, which stands for its patient where nobody names one."""


def placeholder_patients(count: int, start: int = 0) -> NDArray[np.str_]:
    """Return placeholder patients ``(count,)``, one for each image, numbered from ``start``."""
    return np.char.add(UNKNOWN_PATIENT, np.arange(start, start + count).astype(np.str_))


def patients_by_study(patients: Sequence[str], studies: Sequence[str]) -> list[str]:
    """Return the patient of each image; of one without a name the only patient of its study, else a placeholder.

    A placeholder stands for a study, or for an image without one.

    Args:
        patients: ``(n,)`` names, empty where unknown; ``ANON`` is unknown too.
        studies: ``(n,)`` UIDs, empty where unknown.
    """
    named = defaultdict[str, set[str]](set)
    patients = ["" if is_nobody(patient) else patient for patient in patients]
    for patient, study in zip(patients, studies, strict=True):
        if patient and study:
            named[study].add(patient)
    of_study = {study: next(iter(names)) for study, names in named.items() if len(names) == 1}
    return [
        patient or of_study.get(study) or f"{UNKNOWN_PATIENT}{study or place}"
        for place, (patient, study) in enumerate(zip(patients, studies, strict=True))
    ]


def is_placeholder(patients: NDArray[np.str_]) -> NDArray[np.bool_]:
    """Mark the patients ``(n,)`` that the data does not name."""
    return np.asarray(np.char.find(patients, UNKNOWN_PATIENT) >= 0)


def patients_known(patients: NDArray[np.str_]) -> bool:
    """Return True if ``patients`` ``(n,)`` come from the data, with no placeholder of :func:`placeholder_patients`."""
    return not is_placeholder(patients).any()


@dataclass(frozen=True)
class SkippedImage:
    """An image that could not be read: left out, counted, listed."""

    name: str
    reason: str


class PixelRows(ABC):
    """Pictures that are read when they are needed; like an array ``(n, height, width[, 3])`` of uint8 by its rows.

    Attributes:
        shape: The shape of the array.
        draws: True where each reading may draw pictures anew, by ``seed``; reading then uses the process's random
            numbers, and has to keep to one thread.
    """

    shape: tuple[int, ...]
    draws = False
    dtype = np.dtype(np.uint8)

    @abstractmethod
    def read(self, rows: NDArray[np.intp], seed: int = 0) -> NDArray[Any]:
        """Return the pictures at ``rows``, in that order; uint8, or float32 from 0 to 255."""

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape))

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: NDArray[np.intp] | slice) -> NDArray[np.uint8]:
        return self.read(np.arange(len(self))[rows])


def describe_skipped(skipped: Sequence[SkippedImage]) -> str:
    """Return one sentence that names the first images that could not be read; empty without any."""
    if not skipped:
        return ""
    names = list_first_and_count_rest([f"{skip.name} ({skip.reason})" for skip in skipped], MOST_SKIPPED_NAMED)
    verb = "is" if len(skipped) == 1 else "are"
    return f"{count_with_noun(len(skipped), 'image')} could not be read, and {verb} left out: {names}."


def describe_blank(names: Sequence[str]) -> str:
    """Return one sentence that names the first DICOM files that are one grey; empty without any."""
    if not names:
        return ""
    files = count_with_noun(len(names), "DICOM file is", "DICOM files are")
    reason = "their window or VOI LUT misses all of their values. data.window = [centre, width] sets another"
    return f"{files} one grey all over, because {reason}: {list_first_and_count_rest(names, MOST_SKIPPED_NAMED)}."


@dataclass(frozen=True)
class ImageSet:
    """Pictures with their labels; rows of all arrays belong together.

    Attributes:
        stored: uint8, ``(m, height, width)`` for grey or ``(m, height, width, 3)`` for colour: an array, or rows that
            are read when they are needed. Parts of one data set share it.
        labels: float32 ``(n, classes)``: 1 present, 0 absent, NaN unknown (not annotated or uncertain), never 0 for it.
        class_names: Column names of ``labels``, in the order of the source.
        patients: ``(n,)`` strings; images of one patient never stand on two sides of a split. Where unknown,
            those of :func:`placeholder_patients`.
        sources: ``(n,)`` strings, the centre an image came from; empty strings where unknown.
        skipped: Images of the source that could not be read.
        missing: Number of images that the source's table names but its folder does not hold.
        places: ``(n,)``, the place of each picture in ``stored``; None where they are all of it, in order.
        notes: Sentences on the table of labels and on its pictures that a person has to read, the same for all parts of
            a data set.
    """

    stored: NDArray[np.uint8] | PixelRows
    labels: NDArray[np.float32]
    class_names: tuple[str, ...]
    patients: NDArray[np.str_]
    sources: NDArray[np.str_]
    skipped: tuple[SkippedImage, ...] = ()
    missing: int = 0
    places: NDArray[np.intp] | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        n = len(self)
        assert self.stored.dtype == np.uint8, self.stored.dtype
        assert self.stored.ndim in (3, 4), self.stored.shape
        assert self.labels.dtype == np.float32, self.labels.dtype
        assert self.labels.shape == (n, len(self.class_names)), self.labels.shape
        assert self.patients.shape == (n,), self.patients.shape
        assert self.sources.shape == (n,), self.sources.shape

    def __len__(self) -> int:
        return len(self.stored) if self.places is None else len(self.places)

    @property
    def images(self) -> NDArray[np.uint8]:
        """All pictures in memory, ``(n, height, width[, 3])``: ``stored`` itself, or a new copy of those at ``places``.

        Take some :meth:`select_rows` first where there may be many.
        """
        if self.places is not None:
            return self.stored[self.places]
        return self.stored[:] if isinstance(self.stored, PixelRows) else self.stored

    @property
    def channels(self) -> int:
        """The number of channels: 1 for grey, 3 for colour."""
        return 1 if self.stored.ndim == 3 else int(self.stored.shape[3])

    def select_rows(self, index: NDArray[np.intp]) -> "ImageSet":
        """Return the images at ``index``, in that order; no picture is copied."""
        return replace(
            self,
            places=index if self.places is None else self.places[index],
            labels=self.labels[index],
            patients=self.patients[index],
            sources=self.sources[index],
        )

    def only_classes(self, class_names: tuple[str, ...]) -> "ImageSet":
        """Return the images with the label columns of ``class_names`` only, in that order."""
        columns = [self.class_names.index(name) for name in class_names]
        return replace(self, labels=np.ascontiguousarray(self.labels[:, columns]), class_names=tuple(class_names))


def concatenate(sets: Sequence[ImageSet]) -> ImageSet:
    """Return the images of all sets, one set after the other; the sets have the same classes, size and colour.

    No picture is copied where all sets have theirs in one store.
    """
    shared = all(images.stored is sets[0].stored for images in sets) and len(sets) > 1
    every = [np.arange(len(images)) if images.places is None else images.places for images in sets]
    return replace(
        sets[0],
        stored=sets[0].stored if shared else np.concatenate([images.images for images in sets]),
        places=np.concatenate(every) if shared else None,
        labels=np.concatenate([images.labels for images in sets]),
        patients=np.concatenate([images.patients for images in sets]),
        sources=np.concatenate([images.sources for images in sets]),
        skipped=tuple(skip for images in sets for skip in images.skipped),
        notes=tuple(dict.fromkeys(note for images in sets for note in images.notes)),
    )


@dataclass(frozen=True)
class Splits:
    """Training, validation and test part of one data set; no patient stands in two of them."""

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
        """The names of the classes, which are the same in all parts."""
        return self.train.class_names


SAMPLED_PICTURES = 64
"""Pictures of each part that :func:`sample_sha256` reads."""


def sample_sha256(splits: Splits) -> str:
    """Hash all labels, patients and sources of a data set, and pixels of pictures at equal steps through each part."""
    digest = hashlib.sha256(json.dumps(splits.class_names).encode())
    for images in splits.parts:
        steps = np.linspace(0, len(images) - 1, min(SAMPLED_PICTURES, len(images))).astype(np.intp)
        digest.update(json.dumps([images.patients.tolist(), images.sources.tolist()]).encode())
        digest.update(np.ascontiguousarray(images.labels).tobytes())
        digest.update(np.ascontiguousarray(images.select_rows(steps).images).tobytes())
    return digest.hexdigest()


_ARRAYS = ("stored", "labels", "patients", "sources", "places")
Layout = dict[str, Any]


def flatten_splits(
    splits: Splits, describe: Callable[[PixelRows], Any] = lambda stored: None
) -> tuple[Layout, list[NDArray[Any]]]:
    """Return a data set, for another process, as a layout for JSON and its arrays; a shared array is there once.

    Args:
        describe: Returns what another process needs to read these pictures itself, as JSON; None to copy them.
    """
    arrays: list[NDArray[Any]] = []
    numbers: dict[int, Any] = {}
    layout: Layout = {}
    for part, images in zip(PARTS, splits.parts, strict=True):
        layout[part] = {
            "class_names": list(images.class_names),
            "skipped": [asdict(skip) for skip in images.skipped],
            "missing": images.missing,
            "notes": list(images.notes),
        }
        for name in _ARRAYS:
            array = getattr(images, name)
            if array is not None and id(array) not in numbers:
                place = describe(array) if isinstance(array, PixelRows) else None
                numbers[id(array)] = len(arrays) if place is None else place
                if place is None:
                    arrays.append(array[:])
            layout[part][name] = None if array is None else numbers[id(array)]
    return layout, arrays


def rebuild_splits(
    layout: Layout, arrays: Sequence[NDArray[Any]], opened: Callable[[Any], PixelRows] | None = None
) -> Splits:
    """Rebuild the data set from the results of :func:`flatten_splits`, without copying an array.

    Args:
        opened: Opens the pictures that ``describe`` described.
    """
    sets, stores = list[ImageSet](), dict[str, PixelRows]()
    for part in (layout[name] for name in PARTS):
        fields: dict[str, Any] = {}
        for name in _ARRAYS:
            place = part[name]
            if isinstance(place, dict) and opened is not None:
                key = str(place)
                fields[name] = stores[key] = stores[key] if key in stores else opened(place)
            else:
                fields[name] = None if place is None else arrays[place]
        skipped = tuple(SkippedImage(**skip) for skip in part["skipped"])
        fields |= {"skipped": skipped, "missing": part["missing"], "notes": tuple(part["notes"])}
        sets.append(ImageSet(class_names=tuple(part["class_names"]), **fields))
    return Splits(*sets)


def view_array_bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    """Return the bytes of an array as a flat view."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def array_forms(arrays: Sequence[NDArray[Any]]) -> list[tuple[str, tuple[int, ...]]]:
    """Return the type and the shape of each array, by which :func:`array_from_bytes` rebuilds it from its bytes."""
    return [(array.dtype.str, array.shape) for array in arrays]


def array_from_bytes(data: Any, dtype: str, shape: Sequence[int]) -> NDArray[Any]:
    """Return a read-only array over bytes of :func:`view_array_bytes`, without a copy."""
    return np.frombuffer(data, dtype).reshape(shape)
