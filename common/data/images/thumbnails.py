"""Small pictures for pages that people look at."""

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image


def png(image: NDArray[np.uint8], side: int) -> bytes:
    """A PNG file of an image ``(height, width[, 3])``, at most so many pixels a side and never larger than it is."""
    picture, file = Image.fromarray(image), io.BytesIO()
    picture.thumbnail((side, side))
    picture.save(file, format="PNG", optimize=True)
    return file.getvalue()
