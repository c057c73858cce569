"""Convert the stored values of a DICOM image to 8-bit grey: padding, modality transform, VOI window, polarity.

Equal stored values get the same grey. Therefore each distinct value is converted once, into a lookup table, and the
grey of the pixels is taken from that table.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydicom.dataelem import RawDataElement
from pydicom.tag import BaseTag, Tag

from polyclinic.data.base.spec import Window
from polyclinic.data.images.bands import convert_row_bands_to_8_bits, iterate_picture_row_bands

NumberArray = NDArray[Any]
_USUAL_BIT_DEPTHS = (8, 10, 12, 14, 16)


def apply_voi_window(values: NumberArray, center: float, width: float, function: str = "LINEAR") -> NDArray[np.float64]:
    """Apply a VOI window: map values inside it to 0..1, values below to 0, values above to 1.

    The formulas are in DICOM PS3.3 C.11.2.1.2 and C.11.2.1.3.

    Raises:
        ValueError: If the width is too small, or the function is unknown.
    """
    if width <= 0 or (function == "LINEAR" and width < 1):
        raise ValueError(f"window width {width:g} is too small")
    match function:
        case "LINEAR":
            if width == 1:
                return np.asarray(values > center - 0.5, dtype=np.float64)
            return np.clip((values - (center - 0.5)) / (width - 1) + 0.5, 0, 1)
        case "LINEAR_EXACT":
            return np.clip((values - center) / width + 0.5, 0, 1)
        case "SIGMOID":
            exponent = np.clip(-4 * (values - center) / width, -700, 700)  # beyond, exp() overflows
            return np.asarray(1 / (1 + np.exp(exponent)), dtype=np.float64)
    raise ValueError(f"VOI LUT function {function} is not one of LINEAR, LINEAR_EXACT, SIGMOID")


def rescale_to_unit_range(values: NumberArray, low: float, high: float) -> NDArray[np.float64]:
    """Map the range from ``low`` to ``high`` linearly to 0..1; values outside become 0 or 1."""
    return np.clip((values - low) / max(high - low, 1e-9), 0, 1)


@cache
def _get_dicom_tag(keyword: str) -> BaseTag:
    return Tag(keyword)


def read_dicom_element_value(dataset: Any, keyword: str) -> Any:
    """Return the value of a DICOM element; None if it is missing. It is faster than pydicom's access by keyword."""
    tag = _get_dicom_tag(keyword)
    return dataset[tag].value if tag in dataset else None


def read_dicom_unsigned_integer(dataset: Any, keyword: str) -> int | None:
    """Return the value of a DICOM element that holds one unsigned integer; None if it is missing or empty."""
    raw = dataset.get_item(_get_dicom_tag(keyword))
    if isinstance(raw, RawDataElement) and raw.VR == "US" and isinstance(raw.value, bytes) and len(raw.value) == 2:
        return int.from_bytes(raw.value, "little" if raw.is_little_endian else "big")  # faster than pydicom
    value = read_dicom_element_value(dataset, keyword)
    return None if value is None else int(value)


def read_dicom_number(dataset: Any, keyword: str) -> float | None:
    """Return the first number of a DICOM element; None if the element is missing or empty.

    Raises:
        ValueError: If the element holds something other than numbers.
    """
    try:
        value = read_dicom_element_value(dataset, keyword)
        if isinstance(value, bytes):
            raise ValueError
        values: list[Any] = [value] if isinstance(value, str | int | float) or value is None else list(value)
        if all(number is None or str(number).strip() == "" for number in values):
            return None
        if math.isfinite(number := float(values[0])):
            return number
    except (ValueError, TypeError, OverflowError, ArithmeticError):
        pass
    raise ValueError(f"{keyword} is no number")


@dataclass(frozen=True)
class DicomLookupTable:
    """A lookup table (LUT) of a DICOM file (PS3.3 C.11.1.1 and C.11.2.1.1).

    Attributes:
        entries: ``(n,)`` output values.
        first: Input value of the first entry.
        bits: Bits per entry, as the LUT descriptor states.
    """

    entries: NDArray[np.uint16]
    first: int
    bits: int

    def look_up_table_entries(self, numbers: NumberArray) -> NDArray[np.uint16]:
        """Return the table's outputs for input values; inputs outside the table get its first or last entry."""
        return self.entries[np.clip(np.round(numbers).astype(np.int64) - self.first, 0, len(self.entries) - 1)]


def read_lookup_table_entries(data: Any, count: int, bits: int, order: str, name: str) -> NDArray[np.uint16]:
    """Return the entries of a LUT, which the file stores as 16-bit words or as bytes packed two per word.

    Args:
        data: Value of the DICOM element that holds the entries.
        count: Number of entries that the descriptor states.
        bits: Bits per entry that the descriptor states.
        order: Byte order of a word, "<" or ">".
        name: Name of the element, for the error message.

    Raises:
        ValueError: If there are fewer entries than stated.
    """
    if isinstance(data, bytes):
        size, words = len(data), np.frombuffer(data + bytes(len(data) % 2), f"{order}u2").astype("<u2")
    else:
        words = (np.atleast_1d(np.asarray(data, np.int64)) & 0xFFFF).astype("<u2")
        size = 2 * len(words)
    if size < count:
        raise ValueError(f"{name} has fewer than the {count} entries that its descriptor says")
    return words[:count] if size >= 2 * count else words.view(np.uint8)[:count].astype(np.uint16)


def guess_lookup_table_bit_depth(top: int, stated: int, stored: int, name: str) -> int:
    """Determine how many bits the entries of a LUT really have, because some devices state a wrong number.

    There are three candidates: ``stated``, ``stored``, and the smallest of 8, 10, 12, 14 and 16 bits into which ``top``
    fits. The first plausible one is returned. ``stated`` and ``stored`` are plausible if ``top`` fits and is at least a
    quarter of the range; up to 8 bits, it only has to fit. The third candidate is plausible if it is 16, or if ``top``
    is white at this depth.

    Args:
        top: The largest entry.
        stated: Bits per entry that the LUT descriptor states.
        stored: Bits per pixel (BitsStored).
        name: Name of the table, for the error message.

    Raises:
        ValueError: If no candidate is plausible.
    """
    for bits in (stated, stored):
        if 0 < bits <= 16 and top < 1 << bits and (top >= 1 << bits - 2 or bits <= 8):
            return bits
    usual = next((bits for bits in _USUAL_BIT_DEPTHS if top < 1 << bits), 0)
    if usual and (usual == 16 or top in ((1 << usual) - 1, 255 << usual - 8)):
        return usual
    raise ValueError(f"{name} says {stated} bits, and its largest entry is {top}: its depth cannot be decided")


def read_dicom_lookup_table(dataset: Any, keyword: str, *, signed: bool) -> DicomLookupTable | None:
    """Read the first non-empty LUT of a DICOM sequence; None if there is none.

    Args:
        keyword: Keyword of the sequence.
        signed: True if the table's input values can be negative.

    Raises:
        ValueError: If the LUT is incomplete.
    """
    for item in read_dicom_element_value(dataset, keyword) or ():
        if item.get("LUTDescriptor") is None or item.get("LUTData") in (None, b""):
            continue
        values = item.LUTDescriptor
        if isinstance(values, bytes) or not hasattr(values, "__len__") or len(values) != 3:
            raise ValueError(f"LUTDescriptor of its {keyword} is not three numbers")
        count, first, bits = (int(value) for value in values)
        count = (count & 0xFFFF) or 2**16
        if signed and first >= 2**15:  # a negative number written as unsigned
            first -= 2**16
        elif not signed and first < 0:
            first += 2**16
        order = "<" if dataset.file_meta.TransferSyntaxUID.is_little_endian else ">"
        entries = read_lookup_table_entries(item.LUTData, count, bits, order, f"LUTData of its {keyword}")
        return DicomLookupTable(entries, first, bits)
    return None


@dataclass(frozen=True)
class StoredPixelBits:
    """Position of a pixel's value within the bits of the stored number.

    Attributes:
        stored: Number of bits of the value (BitsStored).
        unused: Number of unused bits below the value; some old files have them (HighBit > BitsStored - 1).
        signed: True if the value is signed.
        lossless: False after lossy compression, whose decoded pixels have no unused bits to remove.
    """

    stored: int
    unused: int
    signed: bool
    lossless: bool

    def extract_pixel_values(self, numbers: NumberArray) -> NumberArray:
        """Return the values of stored pixels, with unused bits removed and the sign applied."""
        if not self.lossless or self.stored == 8 * numbers.itemsize:
            return numbers
        value = (numbers.astype(np.int64) >> self.unused) & ((1 << self.stored) - 1)
        return value - ((value >> self.stored - 1) << self.stored) if self.signed else value

    def correct_header_sign(self, value: int, allocated: int) -> int:
        """Correct a header value whose sign does not match the pixels, such as 65535 for -1 if pixels are signed.

        Args:
            allocated: Number of bits allocated per pixel, unused ones included.
        """
        if self.signed:
            for bits in (self.stored, allocated, 16):
                if 1 << bits - 1 <= value < 1 << bits:
                    return value - (1 << bits)
        return value if self.signed or value >= 0 else value + (1 << allocated)


class GreyscalePipeline:
    """Transforms the stored pixel values of one DICOM image to 8-bit grey values (DICOM PS3.4 N.2).

    Args:
        dataset: The elements of the file, after
            :func:`polyclinic.data.images.dicom.apply_frame_functional_groups` for a multi-frame file.
        bits: Position of a pixel's value within the stored number.
        allocated: Number of bits allocated per pixel, including unused bits.
        window: Centre and width; None for the window of the file, if it has one.

    Raises:
        ValueError: If an element that defines the transform is missing, wrong or contradicts another.
    """

    def __init__(self, dataset: Any, bits: StoredPixelBits, allocated: int, window: Window | None) -> None:
        self.bits = bits
        kind = read_dicom_element_value(dataset, "PhotometricInterpretation")
        self.inverted = kind == "MONOCHROME1"
        shape = str(read_dicom_element_value(dataset, "PresentationLUTShape") or "").strip().upper()
        if shape not in ("", "INVERSE" if self.inverted else "IDENTITY"):
            raise ValueError(f"PresentationLUTShape {shape} contradicts {kind}: black and white may be exchanged")
        if read_dicom_element_value(dataset, "PresentationLUTSequence"):
            raise ValueError("its PresentationLUTSequence is not read here: black and white may be exchanged")
        ends = [read_dicom_number(dataset, f"PixelPadding{name}") for name in ("Value", "RangeLimit")]
        corrected = [
            bits.correct_header_sign(int(end), allocated) for end in ends if end is not None and ends[0] is not None
        ]
        self.padding = (min(corrected), max(corrected)) if corrected else None
        self.modality_table = read_dicom_lookup_table(dataset, "ModalityLUTSequence", signed=bits.signed)
        self.slope, self.intercept = 1.0, 0.0
        if not self.modality_table:
            rescaling = read_dicom_number_pair(dataset, "RescaleSlope", "RescaleIntercept")
            self.slope, self.intercept = rescaling or (1.0, 0.0)
        if self.slope == 0:
            raise ValueError("RescaleSlope is 0, which makes all pixels the same")
        lowest = self.slope * (-(1 << bits.stored - 1) if bits.signed else 0) + self.intercept
        self.window = window
        self.voi_table = None
        self.function = "LINEAR"
        if window is None:
            self.voi_table = read_dicom_lookup_table(
                dataset, "VOILUTSequence", signed=not self.modality_table and lowest < 0
            )
        if self.voi_table:
            largest, stated = int(self.voi_table.entries.max()), self.voi_table.bits
            self.voi_table_white = (1 << guess_lookup_table_bit_depth(largest, stated, bits.stored, "VOI LUT")) - 1
        elif window is None:
            # The first window, as in viewers.
            self.window = read_dicom_number_pair(dataset, "WindowCenter", "WindowWidth")
            self.function = str(read_dicom_element_value(dataset, "VOILUTFunction") or "LINEAR")

    @property
    def has_no_window_or_voi_lut(self) -> bool:
        """True without window and VOI LUT; black and white are then the image's smallest and largest value."""
        return self.voi_table is None and self.window is None

    def apply_modality_transform(self, numbers: NumberArray) -> NumberArray:
        """Return the output of the modality transform for stored pixels, such as Hounsfield units in CT."""
        values = self.bits.extract_pixel_values(numbers)
        if self.modality_table:
            return self.modality_table.look_up_table_entries(values)
        return values if (self.slope, self.intercept) == (1, 0) else values * self.slope + self.intercept

    def is_linear_without_padding(self, low: int, high: int) -> bool:
        """Return True if the modality transform is linear for stored numbers from ``low`` to ``high``, without padding.

        Then ``low`` and ``high`` have the extreme modality values, and no other number needs to be examined.
        """
        bits = self.bits
        has_no_unused_bits = bits.unused == 0 and low >= 0 and high < 1 << bits.stored - bits.signed
        is_value = has_no_unused_bits or not bits.lossless
        return is_value and self.padding is None and self.modality_table is None

    def find_padding_pixels(self, numbers: NumberArray) -> NDArray[np.bool_]:
        """Return a mask that is True at padding pixels, which extend a picture to a rectangle (PS3.3 C.7.5.1.1.2)."""
        if self.padding is None:
            return np.zeros(numbers.shape, np.bool_)
        low, high = self.padding
        values = self.bits.extract_pixel_values(numbers)
        return ((numbers >= low) & (numbers <= high)) | ((values >= low) & (values <= high))

    def compute_display_grey(self, numbers: NumberArray, limits: tuple[float, float]) -> NDArray[np.uint8]:
        """Return the 8-bit grey of each stored number; padding becomes black.

        Args:
            limits: Smallest and largest modality value of the image, used if there is neither a window nor a VOI LUT.
        """
        values = self.apply_modality_transform(numbers)
        if self.voi_table:
            shown = np.clip(self.voi_table.look_up_table_entries(values) / self.voi_table_white, 0, 1)
        elif self.window:
            shown = apply_voi_window(values, *self.window, self.function)
        else:
            shown = rescale_to_unit_range(values, *limits)
        grey = np.round(255 * (1 - shown if self.inverted else shown)).astype(np.uint8)
        grey[self.find_padding_pixels(numbers)] = 0
        return grey


def read_dicom_number_pair(dataset: Any, first: str, second: str) -> tuple[float, float] | None:
    """Return the first number of each of two elements that belong together; None if both elements are missing.

    Raises:
        ValueError: If only one of the two is missing.
    """
    numbers = read_dicom_number(dataset, first), read_dicom_number(dataset, second)
    if numbers[0] is None and numbers[1] is None:
        return None
    if numbers[0] is None or numbers[1] is None:
        missing, present = (first, second) if numbers[0] is None else (second, first)
        raise ValueError(f"the DICOM file gives {present}, and {missing} is missing or blank")
    return numbers[0], numbers[1]


def render_dicom_as_8_bit_grey(numbers: NumberArray, display: GreyscalePipeline) -> NDArray[np.uint8]:
    """Convert stored pixels ``(height, width)`` to 8-bit grey.

    Args:
        display: The transform for this image.

    Raises:
        ValueError: If all pixels are padding, and there is neither a window nor a VOI LUT.
    """
    low, high = int(numbers.min()), int(numbers.max())
    if high - low >= max(numbers.size, 256):  # the table would be larger than the picture
        limits = _find_modality_value_range(iterate_picture_row_bands(numbers), display)
        return convert_row_bands_to_8_bits(lambda band: display.compute_display_grey(band, limits), numbers)
    table_numbers = np.arange(low, high + 1)
    unsigned = numbers.view(f"u{numbers.itemsize}")
    cells = table_numbers.astype(numbers.dtype).view(unsigned.dtype)
    limits = _find_modality_value_range(
        [_find_extreme_stored_numbers(unsigned, table_numbers, cells, display)], display
    )
    table = np.zeros(1 << 8 * numbers.itemsize, np.uint8)
    table[cells] = display.compute_display_grey(table_numbers, limits)
    return convert_row_bands_to_8_bits(table.take, unsigned)


def _find_extreme_stored_numbers(
    unsigned: NumberArray, table_numbers: NumberArray, cells: NumberArray, display: GreyscalePipeline
) -> NDArray[np.int64]:
    """Return stored numbers that include the numbers with the smallest and the largest modality value of a picture.

    With a window or a VOI LUT, the smallest and the largest number are returned, because the modality values are not
    needed.

    Args:
        unsigned: The picture, with its numbers reinterpreted as unsigned.
        table_numbers: All integers from the picture's smallest to its largest number.
        cells: ``table_numbers`` reinterpreted as unsigned, so that they can index a lookup table.
    """
    ends = table_numbers[[0, -1]]
    if not display.has_no_window_or_voi_lut or display.is_linear_without_padding(*ends.tolist()):
        return ends
    inside = np.flatnonzero(~display.find_padding_pixels(table_numbers))
    steps = np.diff(display.apply_modality_transform(table_numbers).astype(np.float64))
    if len(inside) and ((steps >= 0).all() or (steps <= 0).all()):
        first, last = inside[0], inside[-1]
        if first > 0:  # differences are unsigned, so those of smaller numbers are large
            first += int((unsigned - cells[first]).min())
        if last < len(cells) - 1:
            last -= int((cells[last] - unsigned).min())
        if max(first, last) < len(cells) and min(first, last) >= 0 and np.isin([first, last], inside).all():
            return table_numbers[[first, last]]
    present = np.zeros(1 << 8 * unsigned.itemsize, np.bool_)
    for band in iterate_picture_row_bands(unsigned):
        present[band] = True
    return table_numbers[present[cells]]


def _find_modality_value_range(bands: Any, display: GreyscalePipeline) -> tuple[float, float]:
    """Return the smallest and the largest modality value of a picture, without padding.

    With a window or a VOI LUT both results are 0, because they are not needed.

    Args:
        bands: Arrays of stored numbers that together make the picture.

    Raises:
        ValueError: If all pixels are padding.
    """
    if not display.has_no_window_or_voi_lut:
        return 0.0, 0.0
    limits = list[tuple[float, float]]()
    for band in bands:
        inside = display.apply_modality_transform(band)[~display.find_padding_pixels(band)]
        if inside.size:
            limits.append((float(inside.min()), float(inside.max())))
    if not limits:
        raise ValueError("the file holds nothing but padding")
    return min(low for low, _ in limits), max(high for _, high in limits)
