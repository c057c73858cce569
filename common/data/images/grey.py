"""Grey values of a DICOM file to 8 bits, by the elements of its head: padding, modality transform, VOI, polarity.

How a pixel is shown depends on its number alone. So each number that occurs is converted once, into a table, and the
pixels are looked up in it.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydicom.dataelem import RawDataElement
from pydicom.tag import BaseTag, Tag

from common.data.base.spec import Window
from common.data.images.bands import convert_by_row_bands, iterate_row_bands

Numbers = NDArray[Any]
_USUAL_DEPTHS = (8, 10, 12, 14, 16)


def apply_window(values: Numbers, center: float, width: float, function: str = "LINEAR") -> NDArray[np.float64]:
    """Map the values of a window to 0..1, those beside it to 0 or 1 (DICOM PS3.3 C.11.2.1.2 and C.11.2.1.3).

    Raises:
        ValueError: If the width is none, or the function is unknown.
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
            exponent = np.clip(-4 * (values - center) / width, -700, 700)  # exp() of more is infinite
            return np.asarray(1 / (1 + np.exp(exponent)), dtype=np.float64)
    raise ValueError(f"VOI LUT function {function} is not one of LINEAR, LINEAR_EXACT, SIGMOID")


def rescale_to_unit_range(values: Numbers, low: float, high: float) -> NDArray[np.float64]:
    """Map values from ``low`` to ``high`` to 0..1, those beside them to 0 or 1."""
    return np.clip((values - low) / max(high - low, 1e-9), 0, 1)


@cache
def _tag(keyword: str) -> BaseTag:
    return Tag(keyword)


def element_value(dataset: Any, keyword: str) -> Any:
    """Return the value of an element, None where it is missing; pydicom's search for names is slow."""
    tag = _tag(keyword)
    return dataset[tag].value if tag in dataset else None


def unsigned(dataset: Any, keyword: str) -> int | None:
    """Return the value of an element of one unsigned number; None where it is missing or blank."""
    raw = dataset.get_item(_tag(keyword))
    if isinstance(raw, RawDataElement) and raw.VR == "US" and isinstance(raw.value, bytes) and len(raw.value) == 2:
        return int.from_bytes(raw.value, "little" if raw.is_little_endian else "big")  # without pydicom's objects
    value = element_value(dataset, keyword)
    return None if value is None else int(value)


def element_number(dataset: Any, keyword: str) -> float | None:
    """Return the first number of an element; None where the element is missing or blank.

    Raises:
        ValueError: Naming the element, if it holds something else.
    """
    try:
        value = element_value(dataset, keyword)
        if isinstance(value, bytes):
            raise ValueError
        first = value if isinstance(value, str | int | float) or value is None else next(iter(value), None)
        if first is None or str(first).strip() == "":
            return None
        if math.isfinite(number := float(first)):
            return number
    except (ValueError, TypeError, OverflowError, ArithmeticError):
        pass
    raise ValueError(f"{keyword} is no number")


@dataclass(frozen=True)
class LookupTable:
    """A table of a DICOM file (PS3.3 C.11.1.1 and C.11.2.1.1).

    Attributes:
        entries: ``(n,)``, in the order of the file's numbers.
        first: The number that the first entry belongs to.
        bits: Bits of an entry, as the file says.
    """

    entries: NDArray[np.uint16]
    first: int
    bits: int

    def look_up(self, numbers: Numbers) -> NDArray[np.uint16]:
        """Return the entries of whole numbers; numbers outside of the table take its ends."""
        return self.entries[np.clip(np.round(numbers).astype(np.int64) - self.first, 0, len(self.entries) - 1)]


def table_entries(data: Any, count: int, bits: int, order: str, name: str) -> NDArray[np.uint16]:
    """Return the entries of a table: one a word, or of 8 bits two a word, the first in its low byte.

    Args:
        data: Value of the element with the entries.
        count: Number of entries that the file says.
        bits: Bits of an entry that the file says.
        order: Order of the bytes of a word, "<" or ">".
        name: Name of the element, for the fault.

    Raises:
        ValueError: If there are fewer entries.
    """
    if isinstance(data, bytes):
        size, words = len(data), np.frombuffer(data + bytes(len(data) % 2), f"{order}u2").astype("<u2")
    else:
        words = (np.atleast_1d(np.asarray(data, np.int64)) & 0xFFFF).astype("<u2")
        size = 2 * len(words)
    if size < count:
        raise ValueError(f"{name} has fewer than the {count} entries that its descriptor says")
    return words[:count] if size >= 2 * count else words.view(np.uint8)[:count].astype(np.uint16)


def lookup_entry_bits(top: int, stated: int, stored: int, name: str) -> int:
    """Return the bits of a table's entries, of which the largest is ``top``.

    Devices write 16 into the descriptor of a table of 12 bits, and less than its entries have. The descriptor counts
    where the table uses at least a quarter of its range, then the bits of the pixels, then a usual depth of which the
    largest entry is white. No table becomes brighter than others of its device because it is dim.

    Args:
        stated: Bits that the descriptor says.
        stored: Bits of a pixel.
        name: Name of the table, for the fault.

    Raises:
        ValueError: If the depth cannot be decided.
    """
    for bits in (stated, stored):
        if 0 < bits <= 16 and top < 1 << bits and (top >= 1 << bits - 2 or bits <= 8):
            return bits
    usual = next((bits for bits in _USUAL_DEPTHS if top < 1 << bits), 0)
    if usual and (usual == 16 or top in ((1 << usual) - 1, 255 << usual - 8)):
        return usual
    raise ValueError(f"{name} says {stated} bits, and its largest entry is {top}: its depth cannot be decided")


def lookup_table(dataset: Any, keyword: str, *, signed: bool) -> LookupTable | None:
    """Return the first table of a sequence that holds one; None where there is none.

    Args:
        signed: True where the numbers that are looked up may be negative, and so the first of them.

    Raises:
        ValueError: If a table is incomplete.
    """
    for item in element_value(dataset, keyword) or ():
        if item.get("LUTDescriptor") is None or item.get("LUTData") in (None, b""):
            continue
        values = item.LUTDescriptor
        if isinstance(values, bytes) or not hasattr(values, "__len__") or len(values) != 3:
            raise ValueError(f"LUTDescriptor of its {keyword} is not three numbers")
        count, first, bits = (int(value) for value in values)
        count = (count & 0xFFFF) or 2**16
        if signed and first >= 2**15:  # written as unsigned
            first -= 2**16
        elif not signed and first < 0:
            first += 2**16
        order = "<" if dataset.file_meta.TransferSyntaxUID.is_little_endian else ">"
        entries = table_entries(item.LUTData, count, bits, order, f"LUTData of its {keyword}")
        return LookupTable(entries, first, bits)
    return None


@dataclass(frozen=True)
class StoredPixelBits:
    """What the bits of a pixel mean.

    Attributes:
        stored: Bits of the value.
        unused: Bits below the value; older archives have some (HighBit > BitsStored - 1).
        signed: True if the value is signed.
        exact: True where the bits beside the value are still there.
    """

    stored: int
    unused: int
    signed: bool
    exact: bool

    def extract_values(self, numbers: Numbers) -> Numbers:
        """Return the values of whole pixels without the bits beside them, with their sign."""
        if not self.exact or self.stored == 8 * numbers.itemsize:
            return numbers
        value = (numbers.astype(np.int64) >> self.unused) & ((1 << self.stored) - 1)
        return value - ((value >> self.stored - 1) << self.stored) if self.signed else value

    def wrap_sign(self, value: int, allocated: int) -> int:
        """Return a value that was written as unsigned, or as signed, in the sign of the pixels."""
        if self.signed:
            for bits in (self.stored, allocated, 16):
                if 1 << bits - 1 <= value < 1 << bits:
                    return value - (1 << bits)
        return value if self.signed or value >= 0 else value + (1 << allocated)


class GreyscalePipeline:
    """Transforms the stored pixel values of one DICOM image to 8-bit grey values (DICOM PS3.4 N.2).

    Args:
        dataset: The elements of the file. In a multi-frame file those of the frame must have been copied to the top
            level of the data set, where a single-frame file has them.
        numbers: The bits of a stored pixel that hold its value.
        allocated: Number of bits in which a pixel is stored, with those beside its value.
        window: Window to apply instead of the file's own; None for the file's own.

    Raises:
        ValueError: Naming the element that is missing, wrong or contradicts another, if the transform is not defined.
    """

    def __init__(self, dataset: Any, numbers: StoredPixelBits, allocated: int, window: Window | None) -> None:
        self.numbers = numbers
        self.inverted = element_value(dataset, "PhotometricInterpretation") == "MONOCHROME1"
        if not self.inverted and str(element_value(dataset, "PresentationLUTShape") or "").strip() == "INVERSE":
            raise ValueError("PresentationLUTShape INVERSE contradicts MONOCHROME2: black and white may be exchanged")
        ends = [element_number(dataset, f"PixelPadding{name}") for name in ("Value", "RangeLimit")]
        wrapped = [numbers.wrap_sign(int(end), allocated) for end in ends if end is not None and ends[0] is not None]
        self.padding = (min(wrapped), max(wrapped)) if wrapped else None
        self.modality_table = lookup_table(dataset, "ModalityLUTSequence", signed=numbers.signed)
        self.slope, self.intercept = self._rescale(dataset)
        lowest = self.slope * (-(1 << numbers.stored - 1) if numbers.signed else 0) + self.intercept
        self.window, self.voi_table, self.function = window, None, "LINEAR"
        if window is None:
            self.voi_table = lookup_table(dataset, "VOILUTSequence", signed=not self.modality_table and lowest < 0)
        if self.voi_table:
            self.top = (
                1
                << lookup_entry_bits(int(self.voi_table.entries.max()), self.voi_table.bits, numbers.stored, "VOI LUT")
            ) - 1
        elif window is None:
            self.window = _number_pair(dataset, "WindowCenter", "WindowWidth")  # the first, as viewers show it
            self.function = str(element_value(dataset, "VOILUTFunction") or "LINEAR")

    def _rescale(self, dataset: Any) -> tuple[float, float]:
        """Return RescaleSlope and RescaleIntercept; 1 and 0 where the file has neither.

        Raises:
            ValueError: If it has one without the other, or a slope of 0.
        """
        rescaling = None if self.modality_table else _number_pair(dataset, "RescaleSlope", "RescaleIntercept")
        if rescaling and rescaling[0] == 0:
            raise ValueError("RescaleSlope is 0, which makes all pixels the same")
        return rescaling or (1.0, 0.0)

    @property
    def uses_own_range(self) -> bool:
        """True where the picture's own range of values is its window, because the file names none."""
        return self.voi_table is None and self.window is None

    def modality_values(self, numbers: Numbers) -> Numbers:
        """Return the output of the modality transform."""
        values = self.numbers.extract_values(numbers)
        if self.modality_table:
            return self.modality_table.look_up(values)
        return values if (self.slope, self.intercept) == (1, 0) else values * self.slope + self.intercept

    def keeps_order(self, low: int, high: int) -> bool:
        """Return True if numbers from ``low`` to ``high`` are their own values, and none is padding."""
        numbers = self.numbers
        plain = not numbers.exact or (numbers.unused == 0 and low >= 0 and high < 1 << numbers.stored - numbers.signed)
        return plain and self.padding is None and self.modality_table is None

    def is_padding(self, numbers: Numbers) -> NDArray[np.bool_]:
        """Mark pixels that fill a picture up to a rectangle (PS3.3 C.7.5.1.1.2)."""
        if self.padding is None:
            return np.zeros(numbers.shape, np.bool_)
        low, high = self.padding
        values = self.numbers.extract_values(numbers)
        return ((numbers >= low) & (numbers <= high)) | ((values >= low) & (values <= high))

    def display_values(self, numbers: Numbers, limits: tuple[float, float]) -> NDArray[np.uint8]:
        """Return 8 bits for each number; padding is black.

        Args:
            limits: The picture's smallest and largest value, of which a file without a window is in need.
        """
        values = self.modality_values(numbers)
        if self.voi_table:
            shown = np.clip(self.voi_table.look_up(values) / self.top, 0, 1)
        elif self.window:
            shown = apply_window(values, *self.window, self.function)
        else:
            shown = rescale_to_unit_range(values, *limits)
        grey = np.round(255 * (1 - shown if self.inverted else shown)).astype(np.uint8)
        grey[self.is_padding(numbers)] = 0
        return grey


def _number_pair(dataset: Any, first: str, second: str) -> tuple[float, float] | None:
    """Return the first numbers of two elements that belong together; None where the file has neither.

    Raises:
        ValueError: If it has one without the other.
    """
    numbers = element_number(dataset, first), element_number(dataset, second)
    if numbers[0] is None and numbers[1] is None:
        return None
    if numbers[0] is None or numbers[1] is None:
        missing, there = (first, second) if numbers[0] is None else (second, first)
        raise ValueError(f"the DICOM file gives {there}, and {missing} is missing or blank")
    return numbers[0], numbers[1]


def render_grey(numbers: Numbers, display: GreyscalePipeline) -> NDArray[np.uint8]:
    """Return a picture ``(height, width)`` in grey of 8 bits.

    Raises:
        ValueError: If there is nothing but padding.
    """
    low, high = int(numbers.min()), int(numbers.max())
    if high - low >= max(numbers.size, 256):  # few pixels of a wide range, or of 32 bits
        limits = _extreme_values(iterate_row_bands(numbers), display)
        return convert_by_row_bands(lambda band: display.display_values(band, limits), numbers)
    table_numbers = np.arange(low, high + 1)
    unsigned = numbers.view(f"u{numbers.itemsize}")
    cells = table_numbers.astype(numbers.dtype).view(unsigned.dtype)
    limits = _extreme_values([_numbers_with_extremes(unsigned, table_numbers, cells, display)], display)
    table = np.zeros(1 << 8 * numbers.itemsize, np.uint8)
    table[cells] = display.display_values(table_numbers, limits)
    return convert_by_row_bands(table.take, unsigned)


def _numbers_with_extremes(
    unsigned: Numbers, table_numbers: Numbers, cells: Numbers, display: GreyscalePipeline
) -> NDArray[np.int64]:
    """Return numbers of a picture among which are those of its smallest and its largest value.

    Args:
        unsigned: The picture, its numbers without their sign.
        table_numbers: All whole numbers from the picture's smallest to its largest.
        cells: The same without their sign.
    """
    ends = table_numbers[[0, -1]]
    if not display.uses_own_range or display.keeps_order(*ends.tolist()):
        return ends
    inside = np.flatnonzero(~display.is_padding(table_numbers))
    steps = np.diff(display.modality_values(table_numbers).astype(np.float64))
    if len(inside) and ((steps >= 0).all() or (steps <= 0).all()):
        first, last = inside[0], inside[-1]
        if first > 0:  # of numbers below the first, the difference is large, because it has no sign
            first += int((unsigned - cells[first]).min())
        if last < len(cells) - 1:
            last -= int((cells[last] - unsigned).min())
        if max(first, last) < len(cells) and min(first, last) >= 0 and np.isin([first, last], inside).all():
            return table_numbers[[first, last]]
    present = np.zeros(1 << 8 * unsigned.itemsize, np.bool_)
    for band in iterate_row_bands(unsigned):
        present[band] = True
    return table_numbers[present[cells]]


def _extreme_values(bands: Any, display: GreyscalePipeline) -> tuple[float, float]:
    """Return the smallest and the largest value of a picture without its padding.

    Raises:
        ValueError: If a file without a window holds nothing but padding.
    """
    if not display.uses_own_range:
        return 0.0, 0.0
    limits = list[tuple[float, float]]()
    for band in bands:
        inside = display.modality_values(band)[~display.is_padding(band)]
        if inside.size:
            limits.append((float(inside.min()), float(inside.max())))
    if not limits:
        raise ValueError("the file holds nothing but padding")
    return min(low for low, _ in limits), max(high for _, high in limits)
