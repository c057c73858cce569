"""One DICOM image to 8 bits, as a viewer would show it: rescaled, windowed, white bone on black air."""

from typing import Any

import numpy as np
import pydicom
from numpy.typing import NDArray
from pydicom.encaps import get_frame
from pydicom.pixels.processing import apply_color_lut, apply_modality_lut, apply_voi
from pydicom.pixels.utils import pixel_array
from pydicom.uid import RLELossless

from common.data.base.image_set import MAX_PIXELS
from common.data.base.spec_base import AS_IN_FILE, Rendering, Window
from common.data.images.dataset import dataset_of
from common.data.images.frame_size import frame_size
from common.data.images.frames import frame_count, frame_index, take_over_groups
from common.data.images.syntaxes import READ_BY, in_words, is_readable

_GREY = ("MONOCHROME1", "MONOCHROME2")
_COLOR = ("RGB", "YBR_FULL", "YBR_FULL_422", "YBR_ICT", "YBR_RCT")
_PALETTE = "PALETTE COLOR"


def dicom_pixels(data: bytes, rendering: Rendering = AS_IN_FILE) -> NDArray[np.uint8]:
    """Return ``(height, width)`` grey or ``(height, width, 3)`` colour.

    Raises:
        ValueError: If it is no chosen grey or colour image, or too large a one; what pydicom raises passes.
    """
    dataset = dataset_of(data)
    _refuse_other_than_pictures(dataset)
    index = frame_index(dataset, rendering.frame)
    take_over_groups(dataset, index)
    if int(dataset.Rows) * int(dataset.Columns) > MAX_PIXELS:
        raise ValueError(f"more than {MAX_PIXELS // 10**6} million pixels")
    pixels = _unpacked(dataset, index)
    if dataset.PhotometricInterpretation in _COLOR:
        return _eight_bit_color(pixels, int(dataset.BitsStored))
    if dataset.PhotometricInterpretation == _PALETTE:
        colors = apply_color_lut(pixels, dataset)
        return _eight_bit_color(colors, 8 * colors.itemsize)
    shown = _displayed(pixels, dataset, rendering.window)  # (height, width), 0 to 1
    if dataset.PhotometricInterpretation == "MONOCHROME1":
        shown = 1 - shown
    return np.round(255 * shown).astype(np.uint8)


def _refuse_other_than_pictures(dataset: Any) -> None:
    if "PixelData" not in dataset:
        raise ValueError("the DICOM file holds no pixels")
    if dataset.PhotometricInterpretation not in (*_GREY, *_COLOR, _PALETTE):
        kind = str(dataset.PhotometricInterpretation)[:20]
        raise ValueError(f"its pixels are of the kind {kind}, which is neither grey, palette, RGB nor YBR")
    if "SegmentedRedPaletteColorLookupTableData" in dataset:  # a few bytes of it may grow to any number of entries
        raise ValueError("its palette is segmented, which is not read here")
    if dataset.PhotometricInterpretation == _PALETTE and "RedPaletteColorLookupTableDescriptor" not in dataset:
        raise ValueError("its pixels are numbers in a palette, and the file holds no palette")


def _unpacked(dataset: Any, index: int) -> NDArray[Any]:
    syntax = dataset.file_meta.TransferSyntaxUID
    if not is_readable(syntax):
        raise ValueError(f"its pixels are packed as {in_words(syntax)}, which cannot be decoded here")
    if syntax.is_encapsulated and syntax != RLELossless:
        _refuse_another_size(dataset, index)
    try:
        return pixel_array(dataset, index=index, decoding_plugin=READ_BY[syntax])
    except (RuntimeError, NotImplementedError):
        raise ValueError(f"its pixels, packed as {in_words(syntax)}, are damaged") from None


def _refuse_another_size(dataset: Any, index: int) -> None:
    """A frame that unpacks to more than the file says would take memory that nobody has looked at."""
    told = (int(dataset.Rows), int(dataset.Columns), int(dataset.SamplesPerPixel))
    packed = get_frame(dataset.PixelData, index, number_of_frames=frame_count(dataset))
    if (inside := frame_size(packed)) != told:
        named = (" × ".join(map(str, size)) for size in (told, inside))
        raise ValueError("the file says {} for rows, columns and samples, its packed pixels {}".format(*named))


def _eight_bit_color(pixels: NDArray[Any], bits: int) -> NDArray[np.uint8]:
    return np.round(pixels * (255 / ((1 << bits) - 1))).astype(np.uint8)


def _displayed(pixels: NDArray[Any], dataset: Any, window: Window | None) -> NDArray[np.float64]:
    """Apply the modality transform, then this window, or the first VOI table or window; else the range of pixels."""
    values = np.asarray(apply_modality_lut(pixels, dataset))
    if window is not None:
        return windowed(values, *window)
    if dataset.get("VOILUTSequence"):
        bits = int(dataset.VOILUTSequence[0].LUTDescriptor[2])
        table_input = np.round(values).astype(np.int64)
        return np.clip(np.asarray(apply_voi(table_input, dataset), dtype=np.float64) / ((1 << bits) - 1), 0, 1)
    if dataset.get("WindowCenter") is not None and dataset.get("WindowWidth") is not None:
        center, width = _first(dataset.WindowCenter), _first(dataset.WindowWidth)
        return windowed(values, center, width, function=str(dataset.get("VOILUTFunction") or "LINEAR"))
    return stretched(values, padding=pixels == dataset.get("PixelPaddingValue"))


def _first(value: Any) -> float:
    """A window may come as one number or as several; viewers show the first."""
    return float(value[0] if isinstance(value, pydicom.multival.MultiValue) else value)


def windowed(values: NDArray[Any], center: float, width: float, function: str = "LINEAR") -> NDArray[np.float64]:
    """Map a window to 0..1 (DICOM PS3.3 C.11.2.1.2 and C.11.2.1.3).

    Raises:
        ValueError: If the width is none, or the function is unknown.
    """
    if width <= 0 or (function == "LINEAR" and width < 1):
        raise ValueError(f"window width {width:g} is too small")
    match function:
        case "LINEAR":
            return np.clip((values - (center - 0.5)) / max(width - 1, 1e-9) + 0.5, 0, 1)
        case "LINEAR_EXACT":
            return np.clip((values - center) / width + 0.5, 0, 1)
        case "SIGMOID":
            return np.asarray(1 / (1 + np.exp(-4 * (values - center) / width)), dtype=np.float64)
    raise ValueError(f"VOI LUT function {function} is not one of LINEAR, LINEAR_EXACT, SIGMOID")


def stretched(values: NDArray[Any], padding: NDArray[np.bool_] | bool) -> NDArray[np.float64]:
    """Map the range of the pixels, padding aside, to 0..1.

    Raises:
        ValueError: If there is nothing but padding.
    """
    inside = values[~np.broadcast_to(padding, values.shape)]
    if not inside.size:
        raise ValueError("the file holds nothing but padding")
    low, high = float(inside.min()), float(inside.max())
    return np.clip((values - low) / max(high - low, 1e-9), 0, 1)
