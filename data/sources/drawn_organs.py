"""Draw synthetic slices or volumes of a trunk with four organs and their masks, for segmentation.

The images show no patient and allow no medical conclusion. They have difficulties of real images: organs of nearly
equal grey, which differ only in position; loops of bowel with the grey of organs; edges without contrast; patients
without a spleen; noise. Organs do not overlap.

Coordinates run from -1 to 1 along each axis, the last axis to the patient's left, as on a viewer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polyclinic.data.base.image_set import DatasetSplits, ImageSet
from polyclinic.data.base.masks import MaskSet, make_class_bits, pack_class_areas
from polyclinic.data.base.spec import DrawnOrgansDatasetSpec
from polyclinic.data.base.splits import split_images_by_patient

Plane = NDArray[np.float64]
RandomGenerator = np.random.Generator
_MAX_IMAGES_PER_PATIENT = 3


@dataclass(frozen=True)
class Organ:
    """The mean shape and grey of an organ.

    Attributes:
        centre: Coordinates along depth, height and width.
        radii: Half the extent along depth, height and width.
        grey: Mean grey value, 0 to 255.
        absence: Probability that a patient does not have the organ.
    """

    centre: tuple[float, float, float]
    radii: tuple[float, float, float]
    grey: float
    absence: float = 0.0


ORGANS: Mapping[str, Organ] = {
    "Kidney": Organ((0.1, 0.42, -0.34), (0.34, 0.17, 0.13), 138.0, 0.05),
    "Liver": Organ((-0.1, -0.12, -0.36), (0.5, 0.36, 0.32), 150.0),
    "Pancreas": Organ((0.0, 0.06, 0.12), (0.2, 0.09, 0.22), 132.0, 0.05),
    "Spleen": Organ((-0.1, 0.14, 0.56), (0.3, 0.24, 0.13), 144.0, 0.1),
}
"""The organs, sorted by name. Where two organs would overlap, the pixels belong to the later one."""
_BODY_GREY = 92.0
_BOWEL_GREY_RANGE = (128.0, 156.0)
_BOWEL_LOOPS = 5
_NOISE_DEVIATION = 11.0
"""Standard deviation of the noise, in grey values."""


def load_drawn_organs(spec: DrawnOrgansDatasetSpec) -> DatasetSplits:
    """Draw slices or volumes with masks of four organs, and split them by patient."""
    size = spec.image_size
    shape = (size, size) if spec.depth is None else (spec.depth, size, size)
    return split_images_by_patient(draw_organs(spec.images, shape, np.random.default_rng(spec.seed)), spec.split_seed)


def draw_organs(count: int, shape: tuple[int, ...], random: RandomGenerator) -> ImageSet:
    """Draw ``count`` slices ``(height, width)`` or volumes ``(depth, height, width)``, one to three per patient."""
    patient = np.repeat(np.arange(count), random.integers(1, _MAX_IMAGES_PER_PATIENT + 1, size=count))[:count]
    grid = _make_grid(shape)
    present = np.stack([random.random(count) >= organ.absence for organ in ORGANS.values()], axis=1)
    pictures = np.empty((count, *shape), np.uint8)
    packed = np.empty((count, *shape), np.uint8)
    for row in range(count):
        has_organ = present[patient[row]]
        areas, pictures[row] = _draw_picture(grid, has_organ, random)
        packed[row] = pack_class_areas(areas)
    names = tuple(ORGANS)
    masks = MaskSet(packed, np.arange(count), make_class_bits(names))
    return ImageSet(
        stored=pictures if len(shape) == 2 else pictures[..., None],
        labels=masks.find_shown_classes(names).astype(np.float32),
        class_names=names,
        patients=np.char.add("drawn-", np.char.zfill(patient.astype(np.str_), 6)),
        sources=np.full(count, "drawn"),
        masks=masks,
    )


def _make_grid(shape: tuple[int, ...]) -> list[Plane]:
    """Return the coordinates of each pixel along depth, height and width, from -1 to 1; for a slice the depth is 0."""
    axes = [(np.arange(side) + 0.5) / side * 2 - 1 for side in shape]
    planes = list(np.meshgrid(*axes, indexing="ij"))
    return planes if len(shape) == 3 else [np.zeros(shape), *planes]


def _draw_picture(
    grid: list[Plane], has_organ: NDArray[np.bool_], random: RandomGenerator
) -> tuple[NDArray[np.bool_], NDArray[np.uint8]]:
    """Return the area of each organ, ``(organs, *spatial)``, and the picture."""
    turn, scale = random.uniform(-0.12, 0.12), random.uniform(0.88, 1.08)
    depth, height, width = grid
    cos, sin = np.cos(turn), np.sin(turn)
    moved = [depth, (cos * height - sin * width) / scale, (sin * height + cos * width) / scale]

    picture = np.where(_measure_ellipse(moved, (0, 0, 0), (2.0, 0.74, 0.88)) < 1, _BODY_GREY, 8.0)
    for _ in range(_BOWEL_LOOPS):
        centre = (random.uniform(-1, 1), random.uniform(-0.45, 0.5), random.uniform(-0.6, 0.6))
        radius = random.uniform(0.05, 0.12)
        inside = _measure_ellipse(moved, centre, (2 * radius, radius, radius)) < 1
        picture[inside] = random.uniform(*_BOWEL_GREY_RANGE)

    areas = np.zeros((len(ORGANS), *depth.shape), bool)
    for column, organ in enumerate(ORGANS.values()):
        # Draw the random numbers even for a missing organ, so that the other organs do not depend on it.
        middle = [coordinate + random.normal(0, 0.04) for coordinate in organ.centre]
        radii = [radius * random.uniform(0.82, 1.18) for radius in organ.radii]
        waves = random.integers(2, 5)
        phase = random.uniform(0, 2 * np.pi)
        grey = organ.grey + random.normal(0, 7)
        angle = np.arctan2(moved[1] - middle[1], moved[2] - middle[2])
        edge = 1 + 0.13 * np.sin(waves * angle + phase)
        inside = _measure_ellipse(moved, middle, radii) < edge
        if has_organ[column]:
            areas[:column] &= ~inside
            areas[column] = inside
            picture[inside] = grey

    noise = random.normal(0, _NOISE_DEVIATION, depth.shape)
    return areas, np.clip(np.round(picture + noise), 0, 255).astype(np.uint8)


def _measure_ellipse(grid: list[Plane], centre: Sequence[float], radii: Sequence[float]) -> Plane:
    """Return the distance of each pixel from the centre of an ellipse, scaled so that it is 1 on the border."""
    squares = [((plane - middle) / radius) ** 2 for plane, middle, radius in zip(grid, centre, radii, strict=True)]
    distance: Plane = np.sqrt(sum(squares))
    return distance
