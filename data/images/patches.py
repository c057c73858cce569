"""Patches: parts of images, of one size, that training reads in place of whole images.

Patches are drawn anew in every epoch. A share of them lies around a pixel of an outlined class, as MONAI's
``RandCropByPosNegLabel`` and nnU-Net draw them, because an organ fills little of a volume: first a class is drawn among
those that the image shows, then one of its pixels. All others lie anywhere in the image.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(frozen=True)
class PatchSampling:
    """How patches are drawn.

    Attributes:
        sides: Size of a patch: height and width, or depth, height and width.
        per_image: Number of patches of each image in an epoch.
        foreground: Probability that a patch is drawn around a pixel of a class that the image shows.
    """

    sides: tuple[int, ...]
    per_image: int
    foreground: float


@dataclass(frozen=True)
class PatchPlaces:
    """Where the patches of an epoch lie.

    Attributes:
        sides: Size of a patch, one number for each axis.
        rows: ``(patches,)``, the image of each patch.
        corners: ``(patches, axes)``, the first pixel of each patch along each axis.
    """

    sides: tuple[int, ...]
    rows: NDArray[np.intp]
    corners: NDArray[np.intp]

    def __len__(self) -> int:
        return len(self.rows)

    def make_slices(self, patch: int) -> tuple[slice, ...]:
        """Return the part of its image that a patch covers."""
        corner = self.corners[patch].tolist()
        return tuple(slice(first, first + side) for first, side in zip(corner, self.sides, strict=True))


FindPixels = Callable[[int, int], NDArray[np.intp]]
"""Image and class (a column) -> the indices of the class's pixels in the flattened image, in ascending order."""


def draw_patch_places(
    sampling: PatchSampling,
    image_sides: tuple[int, ...],
    shows: NDArray[np.bool_],
    find_pixels: FindPixels,
    generator: torch.Generator,
) -> PatchPlaces:
    """Draw the patches of one epoch: ``per_image`` of each image, in the order of the images.

    Each patch takes the same number of random numbers, so that a patch does not depend on the images before it.

    Args:
        image_sides: Size of an image, along no axis smaller than a patch.
        shows: ``(images, classes)``, True where an image shows an annotated class.
        find_pixels: Called only for classes that an image shows.
        generator: Generator of a CPU.
    """
    images, axes = len(shows), len(image_sides)
    room = np.array(image_sides) - np.array(sampling.sides)  # the last first pixel along each axis
    assert (room >= 0).all(), (image_sides, sampling.sides)
    count = images * sampling.per_image
    drawn = torch.rand(count, 3 + axes, generator=generator, dtype=torch.float64).numpy()
    rows = np.repeat(np.arange(images), sampling.per_image)
    corners = np.floor(drawn[:, 3:] * (room + 1)).astype(np.intp)
    for row in np.unique(rows[drawn[:, 0] < sampling.foreground]).tolist():
        classes = np.flatnonzero(shows[row])
        if not len(classes):
            continue
        pixels = dict[int, NDArray[np.intp]]()  # of this image alone: those of all images would not fit into memory
        for patch in range(row * sampling.per_image, (row + 1) * sampling.per_image):
            if drawn[patch, 0] >= sampling.foreground:
                continue
            column = int(classes[int(drawn[patch, 1] * len(classes))])
            if column not in pixels:
                pixels[column] = find_pixels(row, column)
            if not len(pixels[column]):  # the label says that the class is there, and no pixel shows it
                continue
            pixel = pixels[column][int(drawn[patch, 2] * len(pixels[column]))]
            middle = np.array(np.unravel_index(pixel, image_sides))
            corners[patch] = np.clip(middle - np.array(sampling.sides) // 2, 0, room)
    return PatchPlaces(sampling.sides, rows, corners)
