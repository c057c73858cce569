"""Convert DICOM pixels that are floats, as in parametric maps, to 8-bit grey (PS3.3 C.7.6.24 and C.7.6.25)."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyclinic.data.base.spec import Window
from polyclinic.data.images.grey import (
    apply_voi_window,
    read_dicom_element_value,
    read_dicom_lookup_table,
    read_dicom_number,
    read_dicom_number_pair,
    rescale_to_unit_range,
)

FLOAT_PIXELS = {"FloatPixelData": 4, "DoubleFloatPixelData": 8}
"""DICOM element that holds pixels as floats -> bytes per pixel."""
_MAX_VALUE = 1e30
"""Absolute values above this are clipped, because differences between them could overflow."""


def find_float_pixel_element(dataset: Any) -> str | None:
    """Return the name of the element that holds pixels as floats; None if there is none."""
    return next((keyword for keyword in FLOAT_PIXELS if read_dicom_element_value(dataset, keyword)), None)


def read_float_frame(dataset: Any, keyword: str, shape: tuple[int, int], frames: int, index: int) -> NDArray[Any]:
    """Return the values of one frame as floats ``(rows, columns)``.

    Args:
        keyword: Name of the element that holds the pixels.
        shape: Rows and columns.
        frames: Number of frames in the file.
        index: Number of the frame, from 0.

    Raises:
        ValueError: If the element has another length than the header says.
    """
    pixels = read_dicom_element_value(dataset, keyword)
    size = FLOAT_PIXELS[keyword]
    count = shape[0] * shape[1]
    expected = frames * count * size
    if len(pixels) != expected:
        stated = f"{frames} × {shape[0]} rows and {shape[1]} columns, which are {expected} bytes"
        raise ValueError(f"the file says {stated} of {keyword}, and holds {len(pixels)}")
    order = "<" if dataset.file_meta.TransferSyntaxUID.is_little_endian else ">"
    return np.frombuffer(pixels, f"{order}f{size}", count, index * count * size).reshape(shape)


def render_floats_as_8_bit_grey(
    numbers: NDArray[Any], dataset: Any, keyword: str, window: Window | None
) -> NDArray[np.uint8]:
    """Convert the values of a frame to 8-bit grey with a window; without a window, black and white are their range.

    Padding and values that are not finite become black, and are not part of the range.

    Args:
        dataset: The elements of the file; the elements of the frame are at its top level.
        keyword: Name of the element that holds the pixels.
        window: Centre and width; None for the window of the file, if it has one.

    Raises:
        ValueError: If an element that defines the transform is wrong, or no value is a number.
    """
    values = numbers.astype(np.float64)
    inside = np.isfinite(values)
    name = keyword.removesuffix("PixelData")
    low = read_dicom_number(dataset, f"{name}PixelPaddingValue")
    if low is not None:
        limit = read_dicom_number(dataset, f"{name}PixelPaddingRangeLimit")
        other_end = low if limit is None else limit
        inside &= ~((values >= min(low, other_end)) & (values <= max(low, other_end)))
    if not inside.any():
        raise ValueError("the file holds nothing but padding, or values that are no numbers")
    slope, intercept = read_dicom_number_pair(dataset, "RescaleSlope", "RescaleIntercept") or (1.0, 0.0)
    with np.errstate(all="ignore"):
        values = np.where(inside, values * slope + intercept, 0).clip(-_MAX_VALUE, _MAX_VALUE)
    if window is None and read_dicom_lookup_table(dataset, "VOILUTSequence", signed=True):
        raise ValueError(f"its VOI LUT is for whole numbers, and {keyword} holds floats; data.window sets a window")
    function = "LINEAR"
    if window is None:
        window = read_dicom_number_pair(dataset, "WindowCenter", "WindowWidth")
        function = str(read_dicom_element_value(dataset, "VOILUTFunction") or "LINEAR")
    if window:
        # Maps often range from 0 to 1. LINEAR, which is for whole numbers, would cut one unit off the width.
        function = "LINEAR_EXACT" if function == "LINEAR" else function
        shown = apply_voi_window(values, *window, function)
    else:
        shown = rescale_to_unit_range(values, float(values[inside].min()), float(values[inside].max()))
    if read_dicom_element_value(dataset, "PhotometricInterpretation") == "MONOCHROME1":
        shown = 1 - shown
    grey = np.round(255 * shown).astype(np.uint8)
    grey[~inside] = 0
    return grey
