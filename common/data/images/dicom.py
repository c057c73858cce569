"""One DICOM image to 8 bits, as a viewer would show it: rescaled, windowed, white bone on black air."""

from typing import Any

import numpy as np
import pydicom
from numpy.typing import NDArray
from pydicom.encaps import get_frame
from pydicom.pixels.processing import apply_modality_lut, apply_voi
from pydicom.pixels.utils import get_expected_length, pixel_array
from pydicom.uid import RLELossless

from common.data.base.decoded_size import check_size, picture_limit
from common.data.base.spec import AS_IN_FILE, Frame, Rendering, Window
from common.data.images.headers import (
    encoded_shape,
    jpeg_2000_tables,
    read_dataset,
    refuse_large_elements,
    rle_plane_size,
    tags_by_keyword,
)
from common.data.images.reading import convert_in_bands, iterate_bands
from common.data.images.syntaxes import READ_BY, is_readable, syntax_name

_FRAME_KEYWORDS = {
    "PixelValueTransformationSequence": ("RescaleSlope", "RescaleIntercept"),
    "FrameVOILUTSequence": ("WindowCenter", "WindowWidth", "VOILUTFunction"),
}


def frame_count(dataset: Any) -> int:
    """Return the number of frames of a DICOM file, 1 where it states none."""
    return int(dataset.get("NumberOfFrames") or 1)


def frame_index(frame: Frame | None, count: int, subject: str) -> int:
    """Return the index of the chosen frame or slice, from 0; the middle of an even number is the later of the two.

    Args:
        frame: The choice; None where the user made none.
        count: Number of frames in the file.
        subject: The beginning of a fault's sentence, such as "the DICOM file has 4 frames".

    Raises:
        ValueError: If there are several frames and none is chosen, or there is no such frame.
    """
    if frame == "middle":
        return count // 2
    if frame is None and count > 1:
        raise ValueError(f'{subject}; choose one by data.frame, 1 to {count} or "middle"')
    if frame is not None and frame > count:
        raise ValueError(f"{subject}; data.frame = {frame} is none of them")
    return (frame or 1) - 1


def apply_functional_groups(dataset: Any, index: int) -> None:
    """Copy a frame's rescaling and window, of an enhanced multi-frame file, to where single pictures have theirs.

    Source: DICOM PS3.3 C.7.6.16.2.9 and C.7.6.16.2.10; a value of the frame goes before one that all frames share.
    """
    shared, of_frames = dataset.get("SharedFunctionalGroupsSequence"), dataset.get("PerFrameFunctionalGroupsSequence")
    groups = [*(shared or [])[:1], *(of_frames or [])[index : index + 1]]
    for group in groups:
        for sequence, keywords in _FRAME_KEYWORDS.items():
            for item in (group.get(sequence) or [])[:1]:
                for keyword in keywords:
                    if keyword in item:
                        setattr(dataset, keyword, item[keyword].value)


_GREY = ("MONOCHROME1", "MONOCHROME2")
_COLOR = ("RGB", "YBR_FULL", "YBR_FULL_422", "YBR_ICT", "YBR_RCT")
_PALETTE = "PALETTE COLOR"
_NEEDED = (
    *("Rows", "Columns", "SamplesPerPixel", "PhotometricInterpretation"),
    *("BitsAllocated", "BitsStored", "PixelRepresentation"),
)
_READ = tags_by_keyword(
    *_NEEDED,
    *("NumberOfFrames", "HighBit", "PlanarConfiguration", "PixelPaddingValue", "RescaleSlope", "RescaleIntercept"),
    *("WindowCenter", "WindowWidth", "VOILUTFunction", "VOILUTSequence", "ModalityLUTSequence"),
    *("SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence"),
    *(f"{color}PaletteColorLookupTableDescriptor" for color in ("Red", "Green", "Blue")),
)


def dicom_pixels(data: bytes, rendering: Rendering = AS_IN_FILE) -> NDArray[np.uint8]:
    """Decode a DICOM file to ``(height, width)`` grey or ``(height, width, 3)`` colour.

    Raises:
        ValueError: If it holds no grey or colour picture, no such frame, or too large a one; or what pydicom raises.
    """
    dataset = read_dataset(data, largest_mb=rendering.largest_mb)
    refuse_large_elements(dataset, _READ, rendering.largest_mb)
    _refuse_other_than_pictures(dataset)
    count = frame_count(dataset)
    index = frame_index(rendering.frame, count, f"the DICOM file has {count} frames")
    apply_functional_groups(dataset, index)
    limit = picture_limit(rendering.largest_mb)
    check_size(_decoded_size(dataset), limit)
    pixels = _decode_frame(dataset, index, limit)
    if dataset.PhotometricInterpretation in _COLOR:
        return convert_in_bands(lambda band: _eight_bit_color(band, int(dataset.BitsStored)), pixels)
    if dataset.PhotometricInterpretation == _PALETTE:
        return convert_in_bands(lambda band: _apply_palette(band, dataset), pixels)
    own_window = dataset.get("WindowCenter") is not None and dataset.get("WindowWidth") is not None
    windowless = rendering.window is None and not dataset.get("VOILUTSequence") and not own_window
    limits = _value_range(pixels, dataset) if windowless else None
    return convert_in_bands(lambda band: _eight_bit_grey(band, dataset, rendering.window, limits), pixels)


def _decoded_size(dataset: Any) -> int:
    """Return the number of bytes of one frame's pixels."""
    samples = int(dataset.Rows) * int(dataset.Columns) * int(dataset.SamplesPerPixel)
    return samples * -(-int(dataset.BitsAllocated) // 8)


def _refuse_other_than_pictures(dataset: Any) -> None:
    """Refuse a file that lacks what a picture needs, or is of a kind that is not read.

    Raises:
        ValueError: Naming what is missing or unusual.
    """
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


def _decode_frame(dataset: Any, index: int, limit: int) -> NDArray[Any]:
    """Decode one frame to its stored values, ``(rows, columns[, samples])``.

    Raises:
        ValueError: If it cannot be decoded here, or has another size than the file says.
    """
    syntax = dataset.file_meta.TransferSyntaxUID
    if not is_readable(syntax):
        raise ValueError(f"its pixels are packed as {syntax_name(syntax)}, which cannot be decoded here")
    _refuse_another_size(dataset, index, limit)
    unused = 0 if syntax.is_encapsulated and syntax != RLELossless else _unused_low_bits(dataset)
    dataset.BitsStored += unused  # pydicom keeps the low ones of a pixel; codecs have no unused ones
    try:
        pixels = pixel_array(dataset, index=index, decoding_plugin=READ_BY[syntax])
        return pixels >> unused if unused else pixels
    except (RuntimeError, NotImplementedError):
        raise ValueError(f"its pixels, packed as {syntax_name(syntax)}, are damaged") from None
    finally:
        dataset.BitsStored -= unused


def _unused_low_bits(dataset: Any) -> int:
    """Return the number of unused bits below the value of a pixel; older archives have some (HighBit > BitsStored - 1).

    Raises:
        ValueError: If the value reaches below or above the bits that a pixel has.
    """
    stored, allocated = int(dataset.BitsStored), int(dataset.BitsAllocated)
    high = int(dataset.get("HighBit", stored - 1))
    if not stored <= high + 1 <= allocated:
        raise ValueError(f"the file says {stored} bits up to bit {high} of {allocated} for a pixel, which cannot be")
    return high + 1 - stored


def _refuse_another_size(dataset: Any, index: int, limit: int) -> None:
    """Refuse pixels of another size than the file states: the picture would be sheared, or the memory limit passed.

    Raises:
        ValueError: Naming both sizes.
    """
    syntax, rows, columns = dataset.file_meta.TransferSyntaxUID, int(dataset.Rows), int(dataset.Columns)
    if not syntax.is_encapsulated:
        expected, actual = get_expected_length(dataset), len(dataset.PixelData)
        row = expected // (rows * frame_count(dataset))
        if actual - expected >= max(row, 1):  # a few bytes more are padding
            size = f"{rows} rows and {columns} columns"
            raise ValueError(f"the file says {size}, which are {expected} bytes of pixels, and holds {actual}")
        return
    packed = get_frame(dataset.PixelData, index, number_of_frames=frame_count(dataset))
    if syntax == RLELossless:
        pixels = rle_plane_size(packed)
        if pixels - rows * columns >= max(columns, 1):
            raise ValueError(f"the file says {rows} rows and {columns} columns, and holds {pixels} pixels")
        return
    stated = (rows, columns, int(dataset.SamplesPerPixel))
    if (inside := encoded_shape(packed)) != stated:
        sizes = (" × ".join(map(str, size)) for size in (stated, inside))
        raise ValueError("the file says {} for rows, columns and samples, its packed pixels {}".format(*sizes))
    check_size(_decoded_size(dataset) + jpeg_2000_tables(packed), limit)


def _apply_palette(pixels: NDArray[Any], dataset: Any) -> NDArray[np.uint8]:
    """Look numbers up in the file's palette; return colours ``(height, width, 3)``.

    Source: DICOM PS3.3 C.7.6.3.1.5 and C.7.6.3.1.6.
    """
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


def _eight_bit_grey(
    pixels: NDArray[Any], dataset: Any, window: Window | None, limits: tuple[float, float] | None
) -> NDArray[np.uint8]:
    shown = _apply_display_transforms(pixels, dataset, window, limits)  # (height, width), 0 to 1
    return np.round(255 * (1 - shown if dataset.PhotometricInterpretation == "MONOCHROME1" else shown)).astype(np.uint8)


def _value_range(pixels: NDArray[Any], dataset: Any) -> tuple[float, float]:
    """Return the smallest and the largest value of a picture without its padding.

    Raises:
        ValueError: If there is nothing but padding.
    """
    padding, limits = dataset.get("PixelPaddingValue"), list[tuple[float, float]]()
    for band in iterate_bands(pixels):
        values = np.asarray(apply_modality_lut(band, dataset))
        inside = values if padding is None else values[band != padding]
        if inside.size:
            limits.append((float(inside.min()), float(inside.max())))
    if not limits:
        raise ValueError("the file holds nothing but padding")
    return min(low for low, _ in limits), max(high for _, high in limits)


def _apply_display_transforms(
    pixels: NDArray[Any], dataset: Any, window: Window | None, limits: tuple[float, float] | None
) -> NDArray[np.float64]:
    """Map stored pixels to 0..1: modality transform, then ``limits``, ``window``, or the file's first VOI window."""
    values = np.asarray(apply_modality_lut(pixels, dataset))
    if limits is not None:
        return stretch(values, *limits)
    if window is not None:
        return apply_window(values, *window)
    if dataset.get("VOILUTSequence"):
        bits = int(dataset.VOILUTSequence[0].LUTDescriptor[2])
        table_input = np.round(values).astype(np.int64)
        return np.clip(np.asarray(apply_voi(table_input, dataset), dtype=np.float64) / ((1 << bits) - 1), 0, 1)
    center, width = (  # the first of several windows, as viewers show it
        float(value[0] if isinstance(value, pydicom.multival.MultiValue) else value)
        for value in (dataset.WindowCenter, dataset.WindowWidth)
    )
    return apply_window(values, center, width, function=str(dataset.get("VOILUTFunction") or "LINEAR"))


def apply_window(values: NDArray[Any], center: float, width: float, function: str = "LINEAR") -> NDArray[np.float64]:
    """Map the values of a window to 0..1, those beside it to 0 or 1 (DICOM PS3.3 C.11.2.1.2 and C.11.2.1.3).

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


def stretch(values: NDArray[Any], low: float, high: float) -> NDArray[np.float64]:
    """Map values from ``low`` to ``high`` to 0..1, those beside them to 0 or 1."""
    return np.clip((values - low) / max(high - low, 1e-9), 0, 1)
