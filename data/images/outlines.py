"""Show people outlined and predicted areas: their borders in colour on the picture, or on one slice of a volume."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

OUTLINED, PREDICTED, BOTH = (0, 200, 255), (255, 140, 0), (255, 255, 255)
"""Colours of the borders: of a person's outline, of the prediction, and where the two are one."""
WORDS_OF_COLOURS = "Blue is outlined by a person, orange is predicted, white is both"
SMALLEST_SIDE = 160
"""Side in pixels up to which small pictures are enlarged, so that a border hides little."""


def find_border(area: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return the pixels of an area ``(*spatial)`` with a neighbour along an axis outside of it, or of the image."""
    from scipy import ndimage  # here: a program that draws and measures nothing does not pay for its import

    border: NDArray[np.bool_] = area & ~ndimage.binary_erosion(area)
    return border


def draw_outlines(
    image: NDArray[np.uint8], outlined: NDArray[np.bool_], predicted: NDArray[np.bool_]
) -> NDArray[np.uint8]:
    """Return a picture ``(height, width, 3)`` with the borders of both areas, enlarged if it is small.

    Of a volume it shows the axial slice with most outlined voxels; where nothing is outlined, most predicted ones.

    Args:
        image: ``(height, width[, 3])``, or a volume ``(depth, height, width, 1)``.
        outlined, predicted: The areas, ``(*spatial)``.
    """
    if outlined.ndim == 3:
        shown = outlined if outlined.any() else predicted
        place = int(shown.sum(axis=(1, 2)).argmax())
        image, outlined, predicted = image[place, ..., 0], outlined[place], predicted[place]
    factor = max(1, -(-SMALLEST_SIDE // max(outlined.shape)))
    image, outlined, predicted = (_enlarge(each, factor) for each in (image, outlined, predicted))
    colours = np.repeat(image[..., None], 3, axis=2) if image.ndim == 2 else image.copy()
    borders = find_border(outlined), find_border(predicted)
    colours[borders[0]] = OUTLINED
    colours[borders[1]] = PREDICTED
    colours[borders[0] & borders[1]] = BOTH
    return colours


def _enlarge(values: NDArray[Any], factor: int) -> NDArray[Any]:
    """Return every pixel ``factor`` times along both axes."""
    return values.repeat(factor, axis=0).repeat(factor, axis=1)
