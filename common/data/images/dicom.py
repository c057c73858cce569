"""One DICOM image to 8 bits, as a viewer would show it: rescaled, windowed, white bone on black air."""

from typing import Any

import numpy as np
import pydicom
from numpy.typing import NDArray
from pydicom.encaps import get_frame
from pydicom.pixels.processing import apply_modality_lut, apply_voi
from pydicom.pixels.utils import get_expected_length, pixel_array
from pydicom.uid import RLELossless

from common.data.base.image_set import MAX_PIXELS
from common.data.base.spec_base import AS_IN_FILE, Rendering, Window
from common.data.images.dataset import dataset_of
from common.data.images.frame_size import frame_size, plane_size
from common.data.images.frames import frame_count, frame_index, take_over_groups
from common.data.images.syntaxes import READ_BY, in_words, is_readable

_GREY = ("MONOCHROME1", "MONOCHROME2")
_COLOR = ("RGB", "YBR_FULL", "YBR_FULL_422", "YBR_ICT", "YBR_RCT")
_PALETTE = "PALETTE COLOR"
_NEEDED = (
    *("Rows", "Columns", "SamplesPerPixel", "PhotometricInterpretation"),
    *("BitsAllocated", "BitsStored", "PixelRepresentation"),
)


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
        return _colors_of_palette(pixels, dataset)
    shown = _displayed(pixels, dataset, rendering.window)  # (height, width), 0 to 1
    if dataset.PhotometricInterpretation == "MONOCHROME1":
        shown = 1 - shown
    return np.round(255 * shown).astype(np.uint8)


def _refuse_other_than_pictures(dataset: Any) -> None:
    if "PixelData" not in dataset:
        raise ValueError("the DICOM file holds no pixels")
    if missing := [name for name in _NEEDED if dataset.get(name) is None]:
        raise ValueError(f"the DICOM file does not give {', '.join(missing)}")
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
    if not syntax.is_encapsulated:
        _refuse_more_than_told(dataset)
    elif syntax == RLELossless:
        _refuse_larger_planes(dataset, index)
    else:
        _refuse_another_size(dataset, index)
    unused = 0 if syntax.is_encapsulated and syntax != RLELossless else _unused_low_bits(dataset)
    dataset.BitsStored += unused  # pydicom keeps the low ones of a pixel; codecs have no unused ones
    try:
        return pixel_array(dataset, index=index, decoding_plugin=READ_BY[syntax]) >> unused
    except (RuntimeError, NotImplementedError):
        raise ValueError(f"its pixels, packed as {in_words(syntax)}, are damaged") from None
    finally:
        dataset.BitsStored -= unused


def _unused_low_bits(dataset: Any) -> int:
    """How many bits of a pixel lie below its value, as in some older archives (HighBit above BitsStored - 1).

    Raises:
        ValueError: If the value reaches below or above the bits that a pixel has.
    """
    stored, allocated = int(dataset.BitsStored), int(dataset.BitsAllocated)
    high = int(dataset.get("HighBit", stored - 1))
    if not stored <= high + 1 <= allocated:
        raise ValueError(f"the file says {stored} bits up to bit {high} of {allocated} for a pixel, which cannot be")
    return high + 1 - stored


def _refuse_more_than_told(dataset: Any) -> None:
    """Pixels of another width than the file says would be a sheared picture; a few bytes more are padding."""
    told, held = get_expected_length(dataset), len(dataset.PixelData)
    row = told // (int(dataset.Rows) * frame_count(dataset))
    if held - told >= max(row, 1):
        named = f"{dataset.Rows} rows and {dataset.Columns} columns"
        raise ValueError(f"the file says {named}, which are {told} bytes of pixels, and holds {held}")


def _refuse_larger_planes(dataset: Any, index: int) -> None:
    """Run lengths may unpack to more pixels than the file says: a sheared picture."""
    packed = get_frame(dataset.PixelData, index, number_of_frames=frame_count(dataset))
    rows, columns, held = int(dataset.Rows), int(dataset.Columns), plane_size(packed)
    if held - rows * columns >= max(columns, 1):
        raise ValueError(f"the file says {rows} rows and {columns} columns, and holds {held} pixels")


def _refuse_another_size(dataset: Any, index: int) -> None:
    """A frame that unpacks to more than the file says would take memory that nobody has looked at."""
    told = (int(dataset.Rows), int(dataset.Columns), int(dataset.SamplesPerPixel))
    packed = get_frame(dataset.PixelData, index, number_of_frames=frame_count(dataset))
    if (inside := frame_size(packed)) != told:
        named = (" × ".join(map(str, size)) for size in (told, inside))
        raise ValueError("the file says {} for rows, columns and samples, its packed pixels {}".format(*named))


def _colors_of_palette(pixels: NDArray[Any], dataset: Any) -> NDArray[np.uint8]:
    """Colours ``(height, width, 3)`` of numbers in a palette (DICOM PS3.3 C.7.6.3.1.5 and C.7.6.3.1.6)."""
    entries, first, bits = (int(value) for value in dataset.RedPaletteColorLookupTableDescriptor)
    entries = entries or 2**16
    place = np.clip(pixels.astype(np.int64) - first, 0, entries - 1)
    order = "<" if dataset.file_meta.TransferSyntaxUID.is_little_endian else ">"
    tables = [dataset[f"{name}PaletteColorLookupTableData"].value for name in ("Red", "Green", "Blue")]
    words = [np.frombuffer(table, dtype=f"{order}u2").astype("<u2") for table in tables]
    if min(map(len, words)) >= entries:
        in_low_byte = bits == 8 and max(int(table[:entries].max()) for table in words) <= 255
        return np.stack([_eight_bit_color(table[place], 8 if in_low_byte else 16) for table in words], axis=-1)
    packed = [table.view(np.uint8) for table in words]  # two entries a word, the first in its low byte
    if min(map(len, packed)) < entries:
        raise ValueError(f"its palette has fewer than the {entries} entries that it says")
    return np.stack([table[place] for table in packed], axis=-1)


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
