"""Drawn organs: synthetic slices or volumes of a trunk with four organs, and the outline of each, for segmentation.

They come from no patient and allow no medical conclusion. The difficulties are those of real outlines: organs of nearly
equal grey, whose place tells them apart; loops of bowel in the grey of organs; edges that no grey step marks; a patient
without a spleen; noise. No organs overlap.

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
Random = np.random.Generator
_MOST_OF_A_PATIENT = 3


@dataclass(frozen=True)
class Organ:
    """The usual form of an organ.

    Attributes:
        centre: Depth, height and width.
        radii: Half the extent along depth, height and width.
        grey: Mean grey, 0 to 255.
        absence: Probability that a patient has none.
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
"""In the order of their names; where two would overlap, the later one wins."""
_BODY, _BOWEL, _BOWELS = 92.0, (128.0, 156.0), 5
_NOISE = 11.0


def load_drawn_organs(spec: DrawnOrgansDatasetSpec) -> DatasetSplits:
    """Draw slices or volumes with the outlines of four organs, and split them by patient."""
    size = spec.image_size
    shape = (size, size) if spec.depth is None else (spec.depth, size, size)
    return split_images_by_patient(draw_organs(spec.images, shape, np.random.default_rng(spec.seed)), spec.split_seed)


def draw_organs(count: int, shape: tuple[int, ...], random: Random) -> ImageSet:
    """Draw ``count`` slices ``(height, width)`` or volumes ``(depth, height, width)``, one to three a patient."""
    patient = np.repeat(np.arange(count), random.integers(1, _MOST_OF_A_PATIENT + 1, size=count))[:count]
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
    """Return the coordinates along depth, height and width, -1 to 1; depth is 0 all over for a slice."""
    axes = [(np.arange(side) + 0.5) / side * 2 - 1 for side in shape]
    planes = list(np.meshgrid(*axes, indexing="ij"))
    return planes if len(shape) == 3 else [np.zeros(shape), *planes]


def _draw_picture(
    grid: list[Plane], has_organ: NDArray[np.bool_], random: Random
) -> tuple[NDArray[np.bool_], NDArray[np.uint8]]:
    """Return the area of each organ, ``(organs, *spatial)``, and the picture."""
    turn, scale = random.uniform(-0.12, 0.12), random.uniform(0.88, 1.08)
    depth, height, width = grid
    cos, sin = np.cos(turn), np.sin(turn)
    moved = [depth, (cos * height - sin * width) / scale, (sin * height + cos * width) / scale]

    picture = np.where(_measure_ellipse(moved, (0, 0, 0), (2.0, 0.74, 0.88)) < 1, _BODY, 8.0)
    for _ in range(_BOWELS):
        centre = (random.uniform(-1, 1), random.uniform(-0.45, 0.5), random.uniform(-0.6, 0.6))
        radius = random.uniform(0.05, 0.12)
        inside = _measure_ellipse(moved, centre, (2 * radius, radius, radius)) < 1
        picture[inside] = random.uniform(*_BOWEL)

    areas = np.zeros((len(ORGANS), *depth.shape), bool)
    for column, organ in enumerate(ORGANS.values()):
        # Drawn for a patient without the organ, too, so that the other organs do not depend on it.
        middle = [place + random.normal(0, 0.04) for place in organ.centre]
        radii = [radius * random.uniform(0.82, 1.18) for radius in organ.radii]
        waves, phase, grey = random.integers(2, 5), random.uniform(0, 2 * np.pi), organ.grey + random.normal(0, 7)
        angle = np.arctan2(moved[1] - middle[1], moved[2] - middle[2])
        edge = 1 + 0.13 * np.sin(waves * angle + phase)
        inside = _measure_ellipse(moved, middle, radii) < edge
        if has_organ[column]:
            areas[:column] &= ~inside
            areas[column] = inside
            picture[inside] = grey

    noise = random.normal(0, _NOISE, depth.shape)
    return areas, np.clip(np.round(picture + noise), 0, 255).astype(np.uint8)


def _measure_ellipse(grid: list[Plane], centre: Sequence[float], radii: Sequence[float]) -> Plane:
    """Return how far each point is from the centre, where 1 is the border of the ellipse."""
    squares = [((plane - place) / radius) ** 2 for plane, place, radius in zip(grid, centre, radii, strict=True)]
    distance: Plane = np.sqrt(sum(squares))
    return distance
