"""Pictures and labels in the one form that the rest of the program reads, and as arrays for other processes."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

PARTS = ("train", "validation", "test")
UNKNOWN_PATIENT = "unknown#"
"""Prefix of an image's running number, which stands for its patient where nobody names one."""


def unknown_patients(count: int, start: int = 0) -> NDArray[np.str_]:
    """Return placeholder patients ``(count,)``, one for each image, numbered from ``start``."""
    return np.char.add(UNKNOWN_PATIENT, np.arange(start, start + count).astype(np.str_))


def patients_known(patients: NDArray[np.str_]) -> bool:
    """Return True if ``patients`` ``(n,)`` come from the data, with no placeholder of :func:`unknown_patients`."""
    return not (np.char.find(patients, UNKNOWN_PATIENT) >= 0).any()


@dataclass(frozen=True)
class SkippedImage:
    """An image that could not be read: left out, counted, listed."""

    name: str
    reason: str


@dataclass(frozen=True)
class ImageSet:
    """Pictures with their labels; rows of all arrays belong together.

    Attributes:
        stored: uint8, ``(m, height, width)`` for grey or ``(m, height, width, 3)`` for colour; may be a memmap. Parts
            of one data set share it.
        labels: float32 ``(n, classes)``: 1 present, 0 absent, NaN unknown (not annotated or uncertain), never 0 for it.
        class_names: Column names of ``labels``, in the order of the source.
        patients: ``(n,)`` strings; images of one patient never stand on two sides of a split. Where unknown,
            those of :func:`unknown_patients`.
        sources: ``(n,)`` strings, the centre an image came from; empty strings where unknown.
        skipped: Images of the source that could not be read.
        missing: Number of images that the source's table names but its folder does not hold.
        places: ``(n,)``, the place of each picture in ``stored``; None where they are all of it, in order.
    """

    stored: NDArray[np.uint8]
    labels: NDArray[np.float32]
    class_names: tuple[str, ...]
    patients: NDArray[np.str_]
    sources: NDArray[np.str_]
    skipped: tuple[SkippedImage, ...] = ()
    missing: int = 0
    places: NDArray[np.intp] | None = None

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
        """The pictures, ``(n, height, width[, 3])``: ``stored`` itself, or a new copy of those at ``places``."""
        return self.stored if self.places is None else self.stored[self.places]

    @property
    def channels(self) -> int:
        """The number of channels: 1 for grey, 3 for colour."""
        return 1 if self.stored.ndim == 3 else int(self.stored.shape[3])

    def rows(self, index: NDArray[np.intp]) -> "ImageSet":
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
    """Return the images of all sets, one set after the other; the sets have the same classes, size and colour."""
    return replace(
        sets[0],
        stored=np.concatenate([images.images for images in sets]),
        places=None,
        labels=np.concatenate([images.labels for images in sets]),
        patients=np.concatenate([images.patients for images in sets]),
        sources=np.concatenate([images.sources for images in sets]),
        skipped=tuple(skip for images in sets for skip in images.skipped),
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


_ARRAYS = ("stored", "labels", "patients", "sources", "places")
Layout = dict[str, Any]


def flatten(splits: Splits) -> tuple[Layout, list[NDArray[Any]]]:
    """Return a data set, for another process, as a layout for JSON and its arrays; a shared array is there once."""
    arrays: list[NDArray[Any]] = []
    numbers: dict[int, int] = {}
    layout: Layout = {}
    for part, images in zip(PARTS, splits.parts, strict=True):
        layout[part] = {
            "class_names": list(images.class_names),
            "skipped": [asdict(skip) for skip in images.skipped],
            "missing": images.missing,
        }
        for name in _ARRAYS:
            array = getattr(images, name)
            if array is not None and id(array) not in numbers:
                numbers[id(array)] = len(arrays)
                arrays.append(array)
            layout[part][name] = None if array is None else numbers[id(array)]
    return layout, arrays


def unflatten(layout: Layout, arrays: Sequence[NDArray[Any]]) -> Splits:
    """Rebuild the data set from the results of :func:`flatten`, without copying an array."""
    sets = []
    for part in (layout[name] for name in PARTS):
        fields: dict[str, Any] = {name: None if part[name] is None else arrays[part[name]] for name in _ARRAYS}
        skipped = tuple(SkippedImage(**skip) for skip in part["skipped"])
        sets.append(
            ImageSet(class_names=tuple(part["class_names"]), skipped=skipped, missing=part["missing"], **fields)
        )
    return Splits(*sets)


def array_bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    """Return the bytes of an array as a flat view."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def array_forms(arrays: Sequence[NDArray[Any]]) -> list[tuple[str, tuple[int, ...]]]:
    """Return the type and the shape of each array, by which :func:`array_from_bytes` rebuilds it from its bytes."""
    return [(array.dtype.str, array.shape) for array in arrays]


def array_from_bytes(data: Any, dtype: str, shape: Sequence[int]) -> NDArray[Any]:
    """Return a read-only array over bytes of :func:`array_bytes`, without a copy."""
    return np.frombuffer(data, dtype).reshape(shape)
