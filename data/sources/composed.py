"""Data sets built from npz files: images composed of several pictures, and mixtures of several data sets.

A composite shows up to four pictures of a single-label file side by side, and has the labels of all of them. Composites
are for benchmarks that need more multi-label images than public files have. A part (training, validation or test) uses
only pictures of that part. A picture is reused only after all pictures of its class have been used.

A mixture combines data sets, called tasks, into one data set with images of one size and the classes of all tasks.
"""

from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from polyclinic.common.errors import BadInput, Fault, raise_faults
from polyclinic.data.base.image_set import (
    PARTS,
    DatasetSplits,
    ImageSet,
    concatenate_image_sets,
    make_placeholder_patient_names,
)
from polyclinic.data.base.spec import CompositesDatasetSpec, MixtureDatasetSpec, NpzDatasetSpec
from polyclinic.data.images.reading import convert_image_colors, resize_images
from polyclinic.data.images.store import DecodedImageStore
from polyclinic.data.sources.npz import load_npz_dataset, open_npz_parts
from polyclinic.data.tables.class_names import find_repeated_name_faults

CELLS_PER_COMPOSITE = 4
"""Number of cells for pictures in a composed image, a grid of 2x2."""


def find_composite_faults(spec: CompositesDatasetSpec, base: Path) -> list[Fault]:
    """Return a fault if pictures of the training or test part do not have exactly one class.

    Args:
        base: The folder to which the path in ``spec`` is relative.

    Raises:
        BadInput: If the file itself is not valid.
    """
    _, (train, _, test) = open_npz_parts(_make_source_npz_spec(spec), base)
    several = sum(int(((part.labels == 1).sum(axis=1) != 1).sum()) for part in (train, test))
    problem = f"composites are made of pictures with one class each; {several} have none or several."
    return [Fault("data.path", problem, "Take another file.")] if several else []


def load_composites(spec: CompositesDatasetSpec, base: Path, store: DecodedImageStore) -> DatasetSplits:
    """Draw the composed images of all three parts.

    Args:
        base: The folder to which the path in ``spec`` is relative.

    Raises:
        BadInput: If the file is not valid.
    """
    pictures = load_npz_dataset(_make_source_npz_spec(spec), base, store)
    composites = list[ImageSet]()
    for place, (name, part) in enumerate(zip(PARTS, pictures.parts, strict=True)):
        composites.append(draw_composites(part, getattr(spec, name), spec, np.random.default_rng((spec.seed, place))))
    return DatasetSplits(*composites)


def draw_composites(
    pictures: ImageSet, count: int, spec: CompositesDatasetSpec, random: np.random.Generator
) -> ImageSet:
    """Draw ``count`` composed images, each with one to four pictures in random cells of a 2x2 grid.

    Class c, in the file's order, is drawn with a probability proportional to ``spec.falling ** c``.
    """
    classes = len(pictures.class_names)
    share = spec.falling ** np.arange(classes)
    pools = _ShuffledClassPictures(pictures, random)
    height, width = pictures.stored.shape[1:3]
    images = np.zeros((count, 2 * height, 2 * width), np.uint8)
    labels = np.zeros((count, classes), np.float32)
    for image, label in zip(images, labels, strict=True):
        for cell in random.permutation(CELLS_PER_COMPOSITE)[: random.integers(1, CELLS_PER_COMPOSITE + 1)]:
            column = int(random.choice(classes, p=share / share.sum()))
            top, left = cell // 2 * height, cell % 2 * width
            image[top : top + height, left : left + width] = pools.draw_picture(column)
            label[column] = 1
    return ImageSet(
        stored=resize_images(images, spec.image_size, "pad"),
        labels=labels,
        class_names=pictures.class_names,
        patients=make_placeholder_patient_names(count),
        sources=np.full(count, ""),
    )


class _ShuffledClassPictures:
    """Draws the pictures of a class in random order; after all have been drawn, they are shuffled again."""

    def __init__(self, pictures: ImageSet, random: np.random.Generator) -> None:
        self._pictures, self._random = pictures.images, random
        self._rows = [np.flatnonzero(column == 1) for column in pictures.labels.T]
        self._remaining: list[list[int]] = [[] for _ in self._rows]

    def draw_picture(self, column: int) -> NDArray[np.uint8]:
        """Return the next picture of a class, given its label column."""
        if not self._remaining[column]:
            self._remaining[column] = self._random.permutation(self._rows[column]).tolist()
        return np.asarray(self._pictures[self._remaining[column].pop()])


def _make_source_npz_spec(spec: CompositesDatasetSpec) -> NpzDatasetSpec:
    """Return the settings for loading the single pictures; if the file has no validation part, 10 % are held out."""
    return NpzDatasetSpec(
        kind="npz", path=spec.path, classes=spec.classes, validation_fraction=0.1, largest_mb=spec.largest_mb
    )


def find_mixture_faults(spec: MixtureDatasetSpec, base: Path) -> list[Fault]:
    """Check all tasks without reading images; faults name keys like ``"data.tasks.busi.path"``.

    Args:
        spec: Settings of a mixture, which combines several data sets, called tasks.
        base: The folder to which paths in ``spec`` are relative.
    """
    faults: list[Fault] = []
    names: list[str] = []
    for task, file in spec.tasks.items():
        try:
            names += _prefix_class_names_with_task(task, open_npz_parts(file, base)[0])
        except BadInput as bad:
            faults += [_prefix_fault_with_task(task, fault) for fault in bad.faults]
    return faults + find_repeated_name_faults("data.tasks", names)


def load_mixture(spec: MixtureDatasetSpec, base: Path, store: DecodedImageStore) -> DatasetSplits:
    """Load all tasks of a mixture, and join their training, validation and test parts.

    Args:
        spec: Settings of a mixture, which combines several data sets, called tasks.
        base: The folder to which paths in ``spec`` are relative.

    Raises:
        BadInput: If a check fails; it lists all faults.
    """
    raise_faults(find_mixture_faults(spec, base))
    loaded = dict[str, DatasetSplits]()
    for task, file in spec.tasks.items():
        try:
            loaded[task] = load_npz_dataset(file.model_copy(update={"image_size": spec.image_size}), base, store)
        except BadInput as bad:
            raise BadInput(_prefix_fault_with_task(task, fault) for fault in bad.faults) from None
    names = {task: _prefix_class_names_with_task(task, splits.class_names) for task, splits in loaded.items()}
    class_names = tuple(chain.from_iterable(names.values()))
    joined = list[ImageSet]()
    for parts in zip(*(splits.parts for splits in loaded.values()), strict=True):
        extended = list[ImageSet]()
        for task, images in zip(loaded, parts, strict=True):
            labels = np.full((len(images), len(class_names)), np.nan, dtype=np.float32)  # other tasks' are unknown
            labels[:, [class_names.index(name) for name in names[task]]] = images.labels
            extended.append(
                replace(
                    images,
                    stored=convert_image_colors(images.images, spec.color),
                    places=None,
                    labels=labels,
                    class_names=class_names,
                    patients=np.array([f"{task}/{patient}" for patient in images.patients], dtype=np.str_),
                    sources=np.full(len(images), task),
                    drops_color=images.channels == 3 and not spec.color,
                )
            )
        joined.append(concatenate_image_sets(extended))
    return DatasetSplits(*joined)


def _prefix_class_names_with_task(task: str, class_names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{task} {name}" for name in class_names)


def _prefix_fault_with_task(task: str, fault: Fault) -> Fault:
    return replace(fault, where=fault.where.replace("data", f"data.tasks.{task}", 1))
