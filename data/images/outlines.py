"""Draw the borders of annotated and predicted areas in colour on a picture, or on one slice of a volume."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

OUTLINED_COLOR = (0, 200, 255)
"""Colour of the border that a person has drawn; red, green and blue, 0 to 255."""
PREDICTED_COLOR = (255, 140, 0)
"""Colour of the predicted border."""
BOTH_COLOR = (255, 255, 255)
"""Colour of pixels that are on both borders."""
COLOR_LEGEND = "Blue is outlined by a person, orange is predicted, white is both"
MIN_SIDE = 160
"""Smaller pictures are enlarged to at least this many pixels on the longer side, so that borders hide little."""


def find_border(area: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return a mask of the pixels of an area ``(*spatial)`` that have a neighbour outside the area or the image."""
    from scipy import ndimage  # imported here, because it takes long and most programs draw nothing

    border: NDArray[np.bool_] = area & ~ndimage.binary_erosion(area)
    return border


def draw_outlines(
    image: NDArray[np.uint8], outlined: NDArray[np.bool_], predicted: NDArray[np.bool_]
) -> NDArray[np.uint8]:
    """Return a picture ``(height, width, 3)`` with the borders of both areas, enlarged if it is small.

    For a volume it shows the axial slice with the most outlined voxels; if no voxel is outlined, the slice with the
    most predicted voxels.

    Args:
        image: ``(height, width[, 3])``, or a volume ``(depth, height, width, 1)``.
        outlined: Mask of the area that a person has outlined, ``(*spatial)``.
        predicted: Mask of the predicted area, ``(*spatial)``.
    """
    if outlined.ndim == 3:
        area = outlined if outlined.any() else predicted
        index = int(area.sum(axis=(1, 2)).argmax())
        image = image[index, ..., 0]
        outlined = outlined[index]
        predicted = predicted[index]
    factor = max(1, -(-MIN_SIDE // max(outlined.shape)))
    image, outlined, predicted = (_enlarge(array, factor) for array in (image, outlined, predicted))
    picture = np.repeat(image[..., None], 3, axis=2) if image.ndim == 2 else image.copy()
    outlined_border = find_border(outlined)
    predicted_border = find_border(predicted)
    picture[outlined_border] = OUTLINED_COLOR
    picture[predicted_border] = PREDICTED_COLOR
    picture[outlined_border & predicted_border] = BOTH_COLOR
    return picture


def _enlarge(values: NDArray[Any], factor: int) -> NDArray[Any]:
    """Repeat each pixel ``factor`` times along both axes."""
    return values.repeat(factor, axis=0).repeat(factor, axis=1)
