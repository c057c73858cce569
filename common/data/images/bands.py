"""Pictures in bands of some rows each, which saves memory where a conversion makes larger numbers of them."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

BAND = 1 << 16
"""Numbers in a band, if a row has no more."""


def iterate_row_bands(pixels: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Yield a picture ``(height, width[, samples])`` in bands of some rows each, as views."""
    rows = max(1, BAND // pixels[0].size)
    yield from (pixels[start : start + rows] for start in range(0, len(pixels), rows))


def convert_by_row_bands(
    eight_bit: Callable[[NDArray[Any]], NDArray[np.uint8]], pixels: NDArray[Any]
) -> NDArray[np.uint8]:
    """Convert a picture ``(height, width[, samples])`` to 8 bits band by band."""
    parts = [eight_bit(band) for band in iterate_row_bands(pixels)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def scale_to_8_bits(samples: NDArray[Any], bits: int, source: str) -> NDArray[np.uint8]:
    """Scale samples ``(height, width[, samples])`` of so many bits to 8.

    Args:
        source: What says the number of bits, for the fault.

    Raises:
        ValueError: If a sample has more bits.
    """
    if bits == 8 and samples.dtype == np.uint8:
        return samples
    top = (1 << bits) - 1
    if (brightest := int(samples.max())) > top:
        raise ValueError(f"a sample is {brightest}, which does not fit into the {bits} bits that {source} says")
    table = np.round(np.arange(top + 1) * (255 / top)).astype(np.uint8)
    return convert_by_row_bands(table.take, samples)
