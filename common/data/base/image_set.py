"""The one form in which pictures and labels reach the rest of the program."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

UNKNOWN_PATIENT = "unknown#"
"""In front of an image's running number, where nobody told whose image it is."""


def own_patients(count: int, start: int = 0) -> NDArray[np.str_]:
    """Where no patient is known, each image is its own: names ``(count,)`` by running number."""
    return np.char.add(UNKNOWN_PATIENT, np.arange(start, start + count).astype(np.str_))


def are_known(patients: NDArray[np.str_]) -> bool:
    """Whether the data said of every image, ``(n,)``, whose it is."""
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
        """The images at ``index``, in that order; no picture is copied."""
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
    """The images of all sets, one after the other; they have the same classes, size and colour."""
    return replace(
        sets[0],
        stored=np.concatenate([one.images for one in sets]),
        places=None,
        labels=np.concatenate([one.labels for one in sets]),
        patients=np.concatenate([one.patients for one in sets]),
        sources=np.concatenate([one.sources for one in sets]),
        skipped=tuple(skip for one in sets for skip in one.skipped),
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
