"""The one form in which pictures and labels reach the rest of the program; and as arrays that many processes read."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

UNKNOWN_PATIENT = "unknown#"
"""In front of an image's running number, where nobody told whose image it is."""


def own_patients(count: int, start: int = 0) -> NDArray[np.str_]:
    """Return where no patient is known, each image is its own: names ``(count,)`` by running number."""
    return np.char.add(UNKNOWN_PATIENT, np.arange(start, start + count).astype(np.str_))


def are_known(patients: NDArray[np.str_]) -> bool:
    """Return whether the data said of every image, ``(n,)``, whose it is."""
    return not (np.char.find(patients, UNKNOWN_PATIENT) >= 0).any()


@dataclass(frozen=True)
class Skipped:
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
            those of :func:`own_patients`.
        sources: ``(n,)`` strings, the centre an image came from; empty strings where unknown.
        skipped: Images of the source that could not be read.
        missing: Number of images that the source's table names but its folder does not hold.
        places: ``(n,)``, where each picture lies in ``stored``; None where they are all of it, in order.
    """

    stored: NDArray[np.uint8]
    labels: NDArray[np.float32]
    class_names: tuple[str, ...]
    patients: NDArray[np.str_]
    sources: NDArray[np.str_]
    skipped: tuple[Skipped, ...] = ()
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
        """1 for grey, 3 for colour."""
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


def joined(sets: Sequence[ImageSet]) -> ImageSet:
    """Return the images of all sets, one after the other; they have the same classes, size and colour."""
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
    def class_names(self) -> tuple[str, ...]:
        return self.train.class_names


PARTS = ("train", "validation", "test")
_ARRAYS = ("stored", "labels", "patients", "sources", "places")
Facts = dict[str, Any]


def taken_apart(splits: Splits) -> tuple[Facts, list[NDArray[Any]]]:
    """Return a data set as facts and arrays; an array that several parts share is there once."""
    arrays: list[NDArray[Any]] = []
    places: dict[int, int] = {}
    facts: Facts = {}
    for part in PARTS:
        images: ImageSet = getattr(splits, part)
        facts[part] = {
            "class_names": list(images.class_names),
            "skipped": [asdict(skip) for skip in images.skipped],
            "missing": images.missing,
        }
        for name in _ARRAYS:
            array = getattr(images, name)
            if array is not None and id(array) not in places:
                places[id(array)] = len(arrays)
                arrays.append(array)
            facts[part][name] = None if array is None else places[id(array)]
    return facts, arrays


def put_together(facts: Facts, arrays: Sequence[NDArray[Any]]) -> Splits:
    """Return the inverse of :func:`taken_apart`; no array is copied."""
    sets = []
    for part in (facts[name] for name in PARTS):
        given: dict[str, Any] = {name: None if part[name] is None else arrays[part[name]] for name in _ARRAYS}
        skipped = tuple(Skipped(**skip) for skip in part["skipped"])
        sets.append(ImageSet(class_names=tuple(part["class_names"]), skipped=skipped, missing=part["missing"], **given))
    return Splits(*sets)


def raw(array: NDArray[Any]) -> NDArray[np.uint8]:
    """Return the bytes of an array, one after the other."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def shapes(arrays: Sequence[NDArray[Any]]) -> list[tuple[str, tuple[int, ...]]]:
    """Return what else :func:`of_raw` needs of each array: type and shape."""
    return [(array.dtype.str, array.shape) for array in arrays]


def of_raw(data: Any, dtype: str, shape: Sequence[int]) -> NDArray[Any]:
    """Return the inverse of :func:`raw`, read-only, without a copy."""
    return np.frombuffer(data, dtype).reshape(shape)
