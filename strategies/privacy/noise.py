"""Noise for differential privacy: integers on a grid, drawn exactly with a cryptographic key of 256 bits.

The discrete Gaussian: Canonne, Kamath and Steinke, "The Discrete Gaussian for Differential Privacy", NeurIPS 2020,
algorithms 1 to 3, for many values at a time. The standard deviation is a power of two, so that every probability is a
comparison of integers. No float is involved, so the lowest bits of a noisy value do not reveal the value (Mironov, CCS
2012).

The released value is ``grid x (sum + noise)``, where the sum is exact and an integer. With a standard deviation of 2^24
grid steps its privacy equals that of the continuous Gaussian to far more digits than a float has (their theorem 4), so
the accountants of the continuous Gaussian apply.
"""

import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray
from torch import Tensor

KEY_BYTES: Final = 32
WORD_BITS: Final = 64
SCALE_BITS: Final = 24
"""Binary logarithm of the noise's standard deviation, in grid steps."""
_BLOCK: Final = 1 << 16

Words = NDArray[np.uint64]
Integers = NDArray[np.int64]


class SecretBitStream:
    """A stream of random bits: AES-256 in counter mode with a key of 256 bits."""

    def __init__(self, key: bytes) -> None:
        """Start the stream of a key of ``KEY_BYTES`` bytes, which must never be used for another stream."""
        self._stream = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()

    def draw_random_integers(self, count: int) -> Words:
        """Return the next ``count`` uniform random integers of 64 bits."""
        return np.frombuffer(self._stream.update(bytes(8 * count)), "<u8").astype(np.uint64, copy=False)

    def draw_bernoulli_events(self, count: int, divisor: int) -> NDArray[np.bool_]:
        """Draw ``count`` random booleans that are True with probability 1 / ``divisor`` exactly."""
        words = self.draw_random_integers(count)
        whole = (1 << WORD_BITS) // divisor * divisor
        if whole < 1 << WORD_BITS:
            while (outside := np.flatnonzero(words >= np.uint64(whole))).size:
                words = words.copy()
                words[outside] = self.draw_random_integers(outside.size)
        happened: NDArray[np.bool_] = words % np.uint64(divisor) == 0
        return happened


def draw_discrete_gaussian(count: int, bits: SecretBitStream, scale_bits: int = SCALE_BITS) -> Integers:
    """Draw ``count`` independent integers y with probability proportional to ``exp(-y^2 / (2 s^2))``.

    Args:
        bits: Source of the random bits.
        scale_bits: Binary logarithm of the standard deviation s, from 0 to 24.

    Returns:
        int64 ``(count,)``.
    """
    draws = np.empty(count, np.int64)
    drawn = 0
    while drawn < count:
        more = _try_discrete_gaussian(min(2 * (count - drawn) + 64, _BLOCK), bits, scale_bits)[: count - drawn]
        draws[drawn : drawn + more.size] = more
        drawn += more.size
    return draws


def _try_discrete_gaussian(count: int, bits: SecretBitStream, scale_bits: int) -> Integers:
    """Make ``count`` attempts to draw a discrete Gaussian; return the accepted values, at most ``count``.

    Canonne et al., NeurIPS 2020, algorithm 3, with t = s.

    Args:
        scale_bits: Binary logarithm of the standard deviation s.
    """
    # Attempts at a discrete Laplace of scale s (algorithm 2).
    words = bits.draw_random_integers(count)
    fraction = words >> np.uint64(WORD_BITS - scale_bits) if scale_bits else np.zeros(count, np.uint64)
    accepted = _draw_exp_bernoulli_events(fraction, bits, scale_bits)
    words = words[accepted]
    fraction = fraction[accepted]
    runs, active = np.zeros(words.size, np.int64), np.arange(words.size)  # successes in a row, of probability exp(-1)
    while active.size:
        active = active[_draw_exp_bernoulli_events(np.ones(active.size, np.uint64), bits, 0)]
        runs[active] += 1
    magnitude: Integers = (runs << scale_bits) + fraction.astype(np.int64)
    positive = (words & np.uint64(1)).astype(bool)
    single = positive | (magnitude != 0)  # else 0 would be drawn twice as often
    magnitude = magnitude[single]
    positive = positive[single]
    # (|y| - s)^2 / (2 s^2), in units of 2^-(2 scale_bits + 1)
    distance = np.abs(magnitude - (1 << scale_bits)).astype(np.uint64)
    accepted = _draw_exp_bernoulli_events(distance * distance, bits, 2 * scale_bits + 1)
    return np.where(positive, magnitude, -magnitude)[accepted]


def _draw_exp_bernoulli_events(exponent: Words, bits: SecretBitStream, unit_bits: int) -> NDArray[np.bool_]:
    """Draw a random boolean for each exponent, True with probability ``exp(-exponent / 2^unit_bits)``.

    Canonne et al., NeurIPS 2020, algorithm 1.
    """
    whole = exponent >> np.uint64(unit_bits)
    rest = exponent & np.uint64((1 << unit_bits) - 1)
    shift = np.uint64(WORD_BITS - unit_bits)

    def draw_fractional_events(active: NDArray[np.intp]) -> NDArray[np.bool_]:
        return (
            bits.draw_random_integers(active.size) >> shift < rest[active] if unit_bits else np.zeros(active.size, bool)
        )

    survived = _draw_exp_events_by_series(rest.size, draw_fractional_events, bits)
    active = np.flatnonzero(survived & (whole > 0))
    while active.size:  # exp(-1) for every whole unit of the exponent
        once = _draw_exp_events_by_series(active.size, lambda places: np.ones(places.size, bool), bits)
        survived[active[~once]] = False
        whole[active] -= np.uint64(1)
        active = active[once & (whole[active] > 0)]
    return survived


def _draw_exp_events_by_series(
    count: int, happened: Callable[[NDArray[np.intp]], NDArray[np.bool_]], bits: SecretBitStream
) -> NDArray[np.bool_]:
    """Draw ``count`` random booleans, each True with probability exp(-x) for its own x from 0 to 1.

    For each boolean, trials of probability x/1, x/2, x/3, ... are made until the first fails. The boolean is True if
    the number of the failed trial is odd (Canonne et al., NeurIPS 2020, algorithm 1).

    Args:
        count: Number of booleans.
        happened: Receives the indices of the undecided booleans, and returns for each index the result of a trial of
            its probability x.
        bits: Source of the random bits for the factors 1/2, 1/3, ...

    Returns:
        bool ``(count,)``.
    """
    result = np.zeros(count, bool)
    active = np.arange(count)
    k = 1
    while active.size:
        passed = happened(active)
        if k > 1:
            passed &= bits.draw_bernoulli_events(active.size, k)
        result[active[~passed]] = k % 2 == 1
        active = active[passed]
        k = k + 1
    return result


# ---------------------------------------------------------------------- noise on a grid

_RATE_BITS: Final = 53
_FLOAT_BITS: Final = 24
_MIN_STEP_TO_BOUND: Final = 2.0**-36
"""Smallest step, relative to the bound: sums of 100,000 bounded vectors stay below 2^53 steps, exact in float64."""
ROUNDING_MARGIN_FACTOR: Final = 1 - 2.0**-20
"""Factor that shortens a clipped vector a little more, to allow for rounding errors of its length."""


@dataclass(frozen=True)
class NoiseSource:
    """Draws all random numbers of private training: noise, sample of images or patients, augmentation and dropout.

    Attributes:
        bits: Random bits of one key, which is used for nothing else.
    """

    bits: SecretBitStream

    def draw_discrete_gaussian_noise(
        self, shape: torch.Size | tuple[int, ...], device: torch.device | str = "cpu"
    ) -> Tensor:
        """Draw discrete Gaussian noise of this shape with a standard deviation of 2^24, as integers in float64."""
        drawn = draw_discrete_gaussian(math.prod(shape), self.bits).astype(np.float64)
        return torch.from_numpy(drawn).reshape(shape).to(device)

    def draw_uniform(self, shape: torch.Size | tuple[int, ...], device: torch.device | str = "cpu") -> Tensor:
        """Draw uniform numbers in [0, 1) of this shape: float32 multiples of 2^-24."""
        words = self.bits.draw_random_integers(math.prod(shape)) >> np.uint64(64 - _FLOAT_BITS)
        return torch.from_numpy(words.astype(np.float32) * np.float32(2.0**-_FLOAT_BITS)).reshape(shape).to(device)

    def draw_poisson_sample(self, n: int, rate: float) -> Tensor:
        """Draw a Poisson sample of ``n`` images or patients; return their indices.

        Each is drawn independently with probability ``rate``, rounded down to a multiple of 2^-53.
        """
        words = self.bits.draw_random_integers(n) >> np.uint64(64 - _RATE_BITS)
        return torch.from_numpy(np.flatnonzero(words < np.uint64(int(rate * 2**_RATE_BITS))))


@dataclass(frozen=True)
class NoiseQuantizationGrid:
    """The grid to which one Gaussian mechanism rounds vectors before they are summed and noise is added.

    Attributes:
        deviation: Standard deviation of the noise; 0 adds none.
        longest: Largest Euclidean length of a vector that is summed.
    """

    deviation: float
    longest: float

    @property
    def step_size(self) -> float:
        """Return the distance of neighbouring grid values: 2^-24 of ``deviation``, but at least 2^-36 of ``longest``.

        The noise always has a standard deviation of 2^24 steps. So it is larger than ``deviation`` if 2^-36 of
        ``longest`` is the step size.
        """
        return max(self.deviation / 2**SCALE_BITS, self.longest * _MIN_STEP_TO_BOUND)

    def round_values_to_grid_steps(self, values: Tensor) -> Tensor:
        """Return values as whole numbers of steps in their own dtype, truncated so that no vector becomes longer."""
        return (values / self.step_size).trunc()

    def add_noise_to_sum(self, total: Tensor, noise: NoiseSource) -> Tensor:
        """Return a sum, given in whole steps as float64, with noise; converted from steps to values, float32."""
        noisy = total + noise.draw_discrete_gaussian_noise(total.shape, total.device) if self.deviation else total
        return (noisy * self.step_size).float()


def make_seeded_noise_source(seed: int) -> NoiseSource:
    """Return a noise source that a seed reproduces, for simulations, where nothing leaves a hospital."""
    return NoiseSource(SecretBitStream(seed.to_bytes(KEY_BYTES, "big")))


def make_secret_noise_source() -> NoiseSource:
    """Return a noise source with a new secret key, for hospitals, because the coordinator knows the run's seeds."""
    return NoiseSource(SecretBitStream(secrets.token_bytes(KEY_BYTES)))
