"""Large pictures some rows at a time: numbers of 8 bytes of a whole picture would take many times its size."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

BAND = 1 << 20
"""Numbers in a band, if a row has no more."""


def bands(pixels: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Yield the rows of a picture ``(height, width[, samples])``, some at a time, as views."""
    rows = max(1, BAND // pixels[0].size)
    yield from (pixels[start : start + rows] for start in range(0, len(pixels), rows))


def in_bands(eight_bit: Callable[[NDArray[Any]], NDArray[np.uint8]], pixels: NDArray[Any]) -> NDArray[np.uint8]:
    """Bring a picture ``(height, width[, samples])`` to 8 bits, some rows at a time."""
    parts = [eight_bit(band) for band in bands(pixels)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
