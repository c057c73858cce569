"""Composites: up to four pictures of a file with one class a picture side by side, every class a yes or no.

Real pixels in drawn arrangements, for benchmarks that need more multi-label images than a public file has. No
composite is an image that anybody took. Each part is made of the pictures of the same part of the file, so no picture
stands in two parts; within a part a picture is used again only once all of its class were used.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.data.base.image_set import ImageSet, Splits, own_patients
from common.data.base.spec import CompositesSpec, NpzSpec
from common.data.images.reading import ImageStore, resized
from common.data.sources.npz import load_npz, open_npz
from common.errors import Fault

CELLS = 4
"""Two rows of two."""


def composite_faults(spec: CompositesSpec, base: Path) -> list[Fault]:
    """Pictures that do not have exactly one class.

    Raises:
        BadInput: With what is wrong with the file.
    """
    table = open_npz(_pictures_of(spec), base)
    several = sum(int(((part.labels == 1).sum(axis=1) != 1).sum()) for part in (table.train, table.test))
    problem = f"composites are made of pictures with one class each; {several} have none or several."
    return [Fault("data.path", problem, "Take another file.")] if several else []


def load_composites(spec: CompositesSpec, base: Path, store: ImageStore) -> Splits:
    """Draw the composites of the three parts.

    Raises:
        BadInput: With what is wrong with the file.
    """
    single = load_npz(_pictures_of(spec), base, store)
    sizes = (spec.train, spec.validation, spec.test)
    parts = (single.train, single.validation, single.test)
    train, validation, test = (
        drawn(part, size, spec, np.random.default_rng((spec.seed, place)))
        for place, (part, size) in enumerate(zip(parts, sizes, strict=True))
    )
    return Splits(train, validation, test)


def drawn(pictures: ImageSet, count: int, spec: CompositesSpec, random: np.random.Generator) -> ImageSet:
    """Draw ``count`` composites: one to four pictures each, in cells drawn without repetition.

    Class c, in the file's order, is drawn with a probability in proportion to ``spec.falling ** c``.
    """
    classes = len(pictures.class_names)
    share = spec.falling ** np.arange(classes)
    pools = _Pools(pictures, random)
    height, width = pictures.stored.shape[1:3]
    images = np.zeros((count, 2 * height, 2 * width), np.uint8)
    labels = np.zeros((count, classes), np.float32)
    for image, label in zip(images, labels, strict=True):
        for cell in random.permutation(CELLS)[: random.integers(1, CELLS + 1)]:
            column = int(random.choice(classes, p=share / share.sum()))
            top, left = cell // 2 * height, cell % 2 * width
            image[top : top + height, left : left + width] = pools.next_of(column)
            label[column] = 1
    return ImageSet(
        stored=resized(images, spec.image_size, "pad"),
        labels=labels,
        class_names=pictures.class_names,
        patients=own_patients(count),
        sources=np.full(count, ""),
    )


class _Pools:
    """The pictures of each class in random order, anew once all were used."""

    def __init__(self, pictures: ImageSet, random: np.random.Generator) -> None:
        self._pictures, self._random = pictures.images, random
        self._rows = [np.flatnonzero(column == 1) for column in pictures.labels.T]
        self._left: list[list[int]] = [[] for _ in self._rows]

    def next_of(self, column: int) -> NDArray[np.uint8]:
        if not self._left[column]:
            self._left[column] = self._random.permutation(self._rows[column]).tolist()
        return np.asarray(self._pictures[self._left[column].pop()])


def _pictures_of(spec: CompositesSpec) -> NpzSpec:
    """The file of the single pictures; a tenth of its training part makes the validation part where it has none."""
    return NpzSpec(
        kind="npz", path=spec.path, classes=spec.classes, validation_fraction=0.1, largest_mb=spec.largest_mb
    )
