"""Convert pictures to 8 bits in bands of rows, so that the wider types of intermediate results take little memory."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

VALUES_PER_BAND = 1 << 16
"""Maximum number of values in a band, unless a single row has more."""


def iterate_picture_row_bands(pixels: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Yield views of consecutive bands of rows of a picture ``(height, width[, samples])``."""
    rows = max(1, VALUES_PER_BAND // pixels[0].size)
    yield from (pixels[start : start + rows] for start in range(0, len(pixels), rows))


def convert_row_bands_to_8_bits(
    convert: Callable[[NDArray[Any]], NDArray[np.uint8]], pixels: NDArray[Any]
) -> NDArray[np.uint8]:
    """Apply a conversion to 8 bits to each band of rows of a picture ``(height, width[, samples])``."""
    parts = [convert(band) for band in iterate_picture_row_bands(pixels)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def scale_samples_to_8_bits(samples: NDArray[Any], bits: int, source: str) -> NDArray[np.uint8]:
    """Scale samples ``(height, width[, samples])`` with ``bits`` significant bits to 8 bits.

    Args:
        source: The setting or DICOM element that states ``bits``, for the error message.

    Raises:
        ValueError: If a sample needs more bits.
    """
    if bits == 8 and samples.dtype == np.uint8:
        return samples
    white = (1 << bits) - 1
    brightest = int(samples.max())
    if brightest > white:
        raise ValueError(f"a sample is {brightest}, which does not fit into the {bits} bits that {source} says")
    table = np.round(np.arange(white + 1) * (255 / white)).astype(np.uint8)
    return convert_row_bands_to_8_bits(table.take, samples)


def scale_values_to_8_bits(values: NDArray[Any], value_range: tuple[float, float]) -> NDArray[np.uint8]:
    """Scale values of any type to 8 bits; values outside the range are clipped.

    Args:
        value_range: The values of black and white.

    Raises:
        ValueError: If a value is NaN.
    """
    low, high = value_range
    if values.dtype.kind == "u" and values.itemsize <= 2:
        return _scale_to_8_bits(np.arange(1 << 8 * values.itemsize), low, high).take(values)
    if np.isnan(values).any():
        raise ValueError("a value is no number (NaN)")
    return _scale_to_8_bits(values, low, high)


def _scale_to_8_bits(values: NDArray[Any], low: float, high: float) -> NDArray[np.uint8]:
    scaled = (values.astype(np.float64) - low) * (255 / (high - low))
    return np.round(np.clip(scaled, 0, 255)).astype(np.uint8)
