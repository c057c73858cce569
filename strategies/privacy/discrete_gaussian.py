"""The discrete Gaussian, drawn exactly with integers from a cryptographic stream of bits.

Canonne, Kamath and Steinke, "The Discrete Gaussian for Differential Privacy", NeurIPS 2020, algorithms 1 to 3, for
many values at a time. The standard deviation is a power of two, so that every probability is a comparison of whole
numbers: no float takes part, and the lowest bits of a value tell nothing of what it was added to (Mironov, CCS 2012).
"""

from collections.abc import Callable
from typing import Final

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

KEY_BYTES: Final = 32
WORD_BITS: Final = 64
SCALE_BITS: Final = 24
"""Noise has the standard deviation 2^24 in units of its grid."""
_BLOCK: Final = 1 << 16

Words = NDArray[np.uint64]
Integers = NDArray[np.int64]


class BitStream:
    """Random bits: AES-256 in counter mode, under a key of 256 bits."""

    def __init__(self, key: bytes) -> None:
        """Begin the stream of one key of ``KEY_BYTES`` bytes, which must never be used for another stream."""
        self._stream = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()

    def words(self, count: int) -> Words:
        """The next ``count`` uniform words of 64 bits."""
        return np.frombuffer(self._stream.update(bytes(8 * count)), "<u8").astype(np.uint64, copy=False)

    def multiples(self, count: int, divisor: int) -> NDArray[np.bool_]:
        """``count`` draws that are true with probability 1 / ``divisor`` exactly."""
        words = self.words(count)
        whole = (1 << WORD_BITS) // divisor * divisor
        if whole < 1 << WORD_BITS:
            while (outside := np.flatnonzero(words >= np.uint64(whole))).size:
                words = words.copy()
                words[outside] = self.words(outside.size)
        happened: NDArray[np.bool_] = words % np.uint64(divisor) == 0
        return happened


def discrete_gaussian(count: int, bits: BitStream, scale_bits: int = SCALE_BITS) -> Integers:
    """Independent draws, each the whole number y with probability proportional to ``exp(-y^2 / (2 s^2))``.

    Args:
        scale_bits: Binary logarithm of the standard deviation s, from 0 to 24.

    Returns:
        ``(count,)``.
    """
    found, drawn = np.empty(count, np.int64), 0
    while drawn < count:
        more = _accepted(min(2 * (count - drawn) + 64, _BLOCK), bits, scale_bits)[: count - drawn]
        found[drawn : drawn + more.size] = more
        drawn += more.size
    return found


def _accepted(count: int, bits: BitStream, scale_bits: int) -> Integers:
    """Make ``count`` tries at a discrete Gaussian (algorithm 3, with t = s); return those that are kept."""
    magnitude, positive = _discrete_laplace(count, bits, scale_bits)
    # (|y| - s)^2 / (2 s^2), in units of 2^-(2 scale_bits + 1)
    distance = np.abs(magnitude - (1 << scale_bits)).astype(np.uint64)
    kept = _falls(distance * distance, bits, 2 * scale_bits + 1)
    return np.where(positive, magnitude, -magnitude)[kept]


def _discrete_laplace(count: int, bits: BitStream, scale_bits: int) -> tuple[Integers, NDArray[np.bool_]]:
    """Sizes and signs of those of ``count`` tries that became a discrete Laplace of scale s (algorithm 2)."""
    words = bits.words(count)
    fraction = words >> np.uint64(WORD_BITS - scale_bits) if scale_bits else np.zeros(count, np.uint64)
    kept = _falls(fraction, bits, scale_bits)
    words, fraction = words[kept], fraction[kept]
    magnitude = (_runs(words.size, bits) << scale_bits) + fraction.astype(np.int64)
    positive = (words & np.uint64(1)).astype(bool)
    single = positive | (magnitude != 0)  # else 0 would be drawn twice as often
    return magnitude[single], positive[single]


def _runs(count: int, bits: BitStream) -> Integers:
    """How often in a row an event of probability exp(-1) happened."""
    lengths, active = np.zeros(count, np.int64), np.arange(count)
    while active.size:
        active = active[_falls(np.ones(active.size, np.uint64), bits, 0)]
        lengths[active] += 1
    return lengths


def _falls(exponent: Words, bits: BitStream, unit_bits: int) -> NDArray[np.bool_]:
    """Draws that are true with probability ``exp(-exponent / 2^unit_bits)`` (algorithm 1)."""
    whole, rest = exponent >> np.uint64(unit_bits), exponent & np.uint64((1 << unit_bits) - 1)
    survived = _falls_once(rest, bits, unit_bits)
    active = np.flatnonzero(survived & (whole > 0))
    while active.size:  # exp(-1) for every whole unit of the exponent
        once = _falls_of_one(active.size, bits)
        survived[active[~once]] = False
        whole[active] -= np.uint64(1)
        active = active[once & (whole[active] > 0)]
    return survived


def _falls_once(rest: Words, bits: BitStream, unit_bits: int) -> NDArray[np.bool_]:
    """Draw events of probability ``exp(-rest / 2^unit_bits)``, for exponents below 1."""
    shift = np.uint64(WORD_BITS - unit_bits)

    def happened(active: NDArray[np.intp]) -> NDArray[np.bool_]:
        return bits.words(active.size) >> shift < rest[active] if unit_bits else np.zeros(active.size, bool)

    return _alternating(rest.size, happened, bits)


def _falls_of_one(count: int, bits: BitStream) -> NDArray[np.bool_]:
    """Draw ``count`` events of probability exp(-1)."""
    return _alternating(count, lambda active: np.ones(active.size, bool), bits)


def _alternating(
    count: int, happened: Callable[[NDArray[np.intp]], NDArray[np.bool_]], bits: BitStream
) -> NDArray[np.bool_]:
    """Whether the first of events of probability x/1, x/2, x/3, ... that fails has an odd number: exp(-x).

    Args:
        happened: Draws events of probability x, for some of the places.
    """
    result, active, k = np.zeros(count, bool), np.arange(count), 1
    while active.size:
        passed = happened(active)
        if k > 1:
            passed &= bits.multiples(active.size, k)
        result[active[~passed]] = k % 2 == 1
        active, k = active[passed], k + 1
    return result
