"""A decoded DICOM or NIfTI picture, and the aspect ratio of its pixels."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

SQUARE_TOLERANCE = 0.01
"""A pixel counts as square if its aspect ratio differs from 1 by at most this, because files round their numbers."""
_MAX_ASPECT = 100


@dataclass(frozen=True)
class RenderedPicture:
    """A picture rendered as 8-bit grey values or colours.

    Attributes:
        pixels: uint8 ``(height, width)`` for grey, ``(height, width, 3)`` for colour.
        is_blank: True if all pixels have one grey value although the stored values differ, because the window misses
            all of them.
        pixel_aspect: Height of a pixel divided by its width; 1 for square pixels.
    """

    pixels: NDArray[np.uint8]
    is_blank: bool
    pixel_aspect: float = 1.0


def compute_pixel_aspect(height: float, width: float) -> float:
    """Return the height of a pixel divided by its width; 1 if they differ only by rounding.

    Raises:
        ValueError: If one is more than 100 times the other, because the file must then be wrong.
    """
    aspect = height / width
    if max(aspect, 1 / aspect) > _MAX_ASPECT:
        raise ValueError(f"the file says that a pixel is {height:g} high and {width:g} wide, which cannot be")
    return 1.0 if abs(aspect - 1) <= SQUARE_TOLERANCE else aspect


def find_dicom_pixel_aspect(elements: Sequence[Any]) -> float:
    """Return the height of a DICOM file's pixels divided by their width.

    Args:
        elements: The values of PixelSpacing, ImagerPixelSpacing, NominalScannedPixelSpacing and PixelAspectRatio; each
            has the height first (DICOM PS3.3 C.7.6.3.1.7). The first value with two positive numbers is used.

    Raises:
        ValueError: If height and width differ too much (:func:`compute_pixel_aspect`).
    """
    for value in elements:
        try:
            height, width = (float(number) for number in value)
        except (TypeError, ValueError, OverflowError):  # missing, blank, or no two numbers
            continue
        if math.isfinite(height) and math.isfinite(width) and height > 0 and width > 0:
            return compute_pixel_aspect(height, width)
    return 1.0
