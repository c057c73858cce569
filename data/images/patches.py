"""Patches: crops of equal size from images, on which a network is trained instead of whole images.

Patches are drawn anew in every epoch. Since an organ fills little of a volume, a share of the patches is centred on a
pixel of an annotated class, as in MONAI's ``RandCropByPosNegLabel`` and in nnU-Net: first a class is drawn from the
classes in the image, then one of its pixels. All other patches are anywhere in the image.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(frozen=True)
class PatchSampling:
    """Settings for drawing patches.

    Attributes:
        sides: Size of a patch: height and width, or depth, height and width.
        per_image: Number of patches from each image in an epoch.
        foreground: Probability that a patch is centred on a pixel of a class.
    """

    sides: tuple[int, ...]
    per_image: int
    foreground: float


@dataclass(frozen=True)
class PatchPositions:
    """The positions of the patches of an epoch.

    Attributes:
        sides: Size of a patch, one number for each axis.
        rows: ``(patches,)``, the index of each patch's image.
        corners: ``(patches, axes)``, the index of the first pixel of each patch along each axis.
    """

    sides: tuple[int, ...]
    rows: NDArray[np.intp]
    corners: NDArray[np.intp]

    def __len__(self) -> int:
        return len(self.rows)

    def make_slices(self, patch: int) -> tuple[slice, ...]:
        """Return the slices, one for each axis, that cut patch number ``patch`` out of its image."""
        corner = self.corners[patch].tolist()
        return tuple(slice(first, first + side) for first, side in zip(corner, self.sides, strict=True))


FindPixels = Callable[[int, int], NDArray[np.intp]]
"""Function of the index of an image and the index of a class. It returns the ascending indices of the pixels of the
class in the flattened image."""


def draw_patch_positions(
    sampling: PatchSampling,
    image_sides: tuple[int, ...],
    shows: NDArray[np.bool_],
    find_pixels: FindPixels,
    generator: torch.Generator,
) -> PatchPositions:
    """Draw the positions of the patches of one epoch, in the order of the images.

    Each patch takes the same number of random numbers, so that a patch does not depend on the images before it.

    Args:
        image_sides: Size of an image, which must not be smaller than a patch along any axis.
        shows: ``(images, classes)``, True if an image has a pixel of an annotated class.
        find_pixels: Called only for images and classes for which ``shows`` is True.
        generator: A CPU generator.
    """
    images = len(shows)
    axes = len(image_sides)
    max_corner = np.array(image_sides) - np.array(sampling.sides)
    assert (max_corner >= 0).all(), (image_sides, sampling.sides)
    count = images * sampling.per_image
    drawn = torch.rand(count, 3 + axes, generator=generator, dtype=torch.float64).numpy()
    rows = np.repeat(np.arange(images), sampling.per_image)
    corners = np.floor(drawn[:, 3:] * (max_corner + 1)).astype(np.intp)
    for row in np.unique(rows[drawn[:, 0] < sampling.foreground]).tolist():
        classes = np.flatnonzero(shows[row])
        if not len(classes):
            continue
        # Class -> its pixels in this image. The pixels of all images would not fit into memory.
        pixels = dict[int, NDArray[np.intp]]()
        for patch in range(row * sampling.per_image, (row + 1) * sampling.per_image):
            if drawn[patch, 0] >= sampling.foreground:
                continue
            column = int(classes[int(drawn[patch, 1] * len(classes))])
            if column not in pixels:
                pixels[column] = find_pixels(row, column)
            if not len(pixels[column]):  # the class is labelled as present, but has no pixel
                continue
            pixel = pixels[column][int(drawn[patch, 2] * len(pixels[column]))]
            centre = np.array(np.unravel_index(pixel, image_sides))
            corners[patch] = np.clip(centre - np.array(sampling.sides) // 2, 0, max_corner)
    return PatchPositions(sampling.sides, rows, corners)
