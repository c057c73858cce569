"""Numbers in fewer bytes: float16, or int8 with a scale a block.

Rounding and packing are two steps. What has been rounded is still float32, and packs and unpacks without any change:
the site knows to the bit what the coordinator will add, and can carry what was lost into its next update.

int8: blocks of :data:`BLOCK` numbers, each of which is a whole number from -127 to 127 times the block's scale, a power
of two, so that scale and numbers are found again from the product exactly. A packed array holds the scales' exponents,
one int8 a block, and then the numbers.

Counts travel as unsigned integers of the fewest bytes that hold the largest of them.
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Form = Literal["float32", "float16", "int8"]
FORMS: tuple[Form, ...] = ("float32", "float16", "int8")
Float32 = NDArray[np.float32]

Counts = NDArray[np.int64]
WIDTHS = (1, 2, 4)
"""Bytes of a count."""

BLOCK = 1024
_LARGEST, _LOWEST = 127, -126  # 2**-126 is float32's smallest normal number


def rounded(values: Float32, form: Form) -> Float32:
    """Return the nearest numbers that the form can hold, ``(n,)``; in float16 what is too large becomes its largest."""
    if form == "float16":
        largest = np.finfo(np.float16).max
        return np.clip(values, -largest, largest).astype(np.float16).astype(np.float32)
    if form == "int8":
        exponents = _exponents(values)
        return _times(_whole(values, exponents), exponents)
    return values


def packed(values: Float32, form: Form) -> bytes:
    """Return the bytes of numbers that were :func:`rounded`, little-endian."""
    if form == "float16":
        return values.astype("<f2").tobytes()
    if form == "int8":
        exponents = _exponents(values)
        return exponents.tobytes() + _whole(values, exponents).tobytes()
    return np.ascontiguousarray(values, "<f4").tobytes()


def unpacked(data: bytes, n: int, form: Form) -> Float32:
    """Invert :func:`packed`.

    Raises:
        ValueError: If that many numbers take another number of bytes, or a block's scale is no float32.
    """
    if len(data) != (expected := packed_bytes(n, form)):
        raise ValueError(f"{n} numbers as {form} take {expected} bytes, not {len(data)}")
    if form == "float16":
        return np.frombuffer(data, "<f2").astype(np.float32)
    if form == "int8":
        blocks = _blocks(n)
        exponents = np.frombuffer(data, np.int8, blocks)
        if (exponents < _LOWEST).any() or (exponents > 127 - 7).any():
            raise ValueError(f"the scale of a block is 2**{_LOWEST} to 2**120")
        return _times(np.frombuffer(data, np.int8, n, blocks), exponents)
    return np.frombuffer(data, "<f4")


def packed_bytes(n: int, form: Form) -> int:
    """Count the bytes that ``n`` numbers take."""
    return {"float32": 4 * n, "float16": 2 * n, "int8": n + _blocks(n)}[form]


def packed_counts(counts: Counts) -> tuple[bytes, int]:
    """Return the bytes of counts from 0 to 2**32 - 1, little-endian, and how many bytes each takes."""
    largest = int(counts.max(initial=0))
    width = next(width for width in WIDTHS if largest < 256**width)
    return counts.astype(f"<u{width}").tobytes(), width


def unpacked_counts(data: bytes, width: int) -> Counts:
    """Invert :func:`packed_counts`.

    Raises:
        ValueError: If no count takes so many bytes, or these are not a whole number of counts.
    """
    if width not in WIDTHS or len(data) % width:
        raise ValueError(f"{len(data)} bytes are no counts of {width} bytes each")
    return np.frombuffer(data, f"<u{width}").astype(np.int64)


def _blocks(n: int) -> int:
    return -(-n // BLOCK)


def _exponents(values: Float32) -> NDArray[np.int8]:
    """Return, for each block, the smallest power of two of which 127 reach its largest number."""
    if not len(values):
        return np.zeros(0, np.int8)
    largest = np.maximum.reduceat(np.abs(values), np.arange(0, len(values), BLOCK)).astype(np.float64)
    with np.errstate(divide="ignore"):
        exponents = np.ceil(np.log2(largest / _LARGEST))
    return np.clip(exponents, _LOWEST, 120).astype(np.int8)


def _whole(values: Float32, exponents: NDArray[np.int8]) -> NDArray[np.int8]:
    whole = np.rint(np.ldexp(values, -_each(exponents, len(values))))
    return np.clip(whole, -_LARGEST, _LARGEST).astype(np.int8)


def _times(whole: NDArray[np.int8], exponents: NDArray[np.int8]) -> Float32:
    return np.ldexp(whole.astype(np.float32), _each(exponents, len(whole)))


def _each(exponents: NDArray[np.int8], n: int) -> NDArray[np.int32]:
    return np.repeat(exponents.astype(np.int32), BLOCK)[:n]
