"""Where noise comes from, and how it is added: whole numbers on a grid, from a key of 256 bits.

What is released is ``grid x (sum + noise)``: the sum is of whole numbers and exact, the noise is the discrete Gaussian
of :mod:`strategies.privacy.discrete_gaussian`. At a standard deviation of 2^24 grid steps its privacy is that of the
continuous Gaussian to far more digits than a float has (Canonne, Kamath and Steinke, NeurIPS 2020, theorem 4), so that
the accountants of the continuous one hold.
"""

import math
import secrets
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from strategies.privacy.discrete_gaussian import KEY_BYTES, SCALE_BITS, BitStream, discrete_gaussian

_RATE_BITS: Final = 53
_FLOAT_BITS: Final = 24
_FINEST: Final = 2.0**-36
"""Of a bound, the finest grid: sums of 100,000 bounded vectors stay below 2^53 steps, where float64 is exact."""
SHRUNK: Final = 1 - 2.0**-20
"""By this factor a clipped vector is made shorter still, against the rounding of its length in floats."""


@dataclass(frozen=True)
class NoiseSource:
    """Draws the noise, which images or patients a step looks at, and all else that training draws for an image.

    Attributes:
        bits: Of one key, which makes nothing else.
    """

    bits: BitStream

    def steps(self, shape: torch.Size | tuple[int, ...], device: torch.device | str = "cpu") -> Tensor:
        """Discrete Gaussian noise with a standard deviation of 2^24, as whole numbers in float64 of this shape."""
        drawn = discrete_gaussian(math.prod(shape), self.bits).astype(np.float64)
        return torch.from_numpy(drawn).reshape(shape).to(device)

    def uniform(self, shape: torch.Size | tuple[int, ...], device: torch.device | str = "cpu") -> Tensor:
        """Numbers in [0, 1), multiples of 2^-24, float32 of this shape."""
        words = self.bits.words(math.prod(shape)) >> np.uint64(64 - _FLOAT_BITS)
        return torch.from_numpy(words.astype(np.float32) * np.float32(2.0**-_FLOAT_BITS)).reshape(shape).to(device)

    def drawn(self, n: int, rate: float) -> Tensor:
        """Which of ``n`` a step looks at, as numbers from 0.

        Each is drawn by itself with probability ``rate``, rounded down to a multiple of 2^-53.
        """
        words = self.bits.words(n) >> np.uint64(64 - _RATE_BITS)
        return torch.from_numpy(np.flatnonzero(words < np.uint64(int(rate * 2**_RATE_BITS))))


@dataclass(frozen=True)
class Grid:
    """The grid of one Gaussian mechanism.

    Attributes:
        deviation: Standard deviation of the noise; 0 adds none.
        longest: Euclidean length that no vector in the sum exceeds.
    """

    deviation: float
    longest: float

    @property
    def step(self) -> float:
        """Distance of neighbouring values. With next to no noise it is coarser than that noise, which then grows."""
        return max(self.deviation / 2**SCALE_BITS, self.longest * _FINEST)

    def steps_of(self, values: Tensor) -> Tensor:
        """Values in whole steps, truncated towards 0, which makes no vector longer; in the type of the values."""
        return (values / self.step).trunc()

    def released(self, total: Tensor, noise: NoiseSource) -> Tensor:
        """What may be seen of a sum: with noise, no longer in steps, float32.

        Args:
            total: Whole numbers of steps, float64.
        """
        noisy = total + noise.steps(total.shape, total.device) if self.deviation else total
        return (noisy * self.step).float()


def seeded(seed: int) -> NoiseSource:
    """Noise that the same seed gives again: for simulations, where nothing leaves anybody."""
    return NoiseSource(BitStream(seed.to_bytes(KEY_BYTES, "big")))


def from_the_system() -> NoiseSource:
    """Noise that nobody can draw again: a hospital's, for the coordinator knows the run's seeds."""
    return NoiseSource(BitStream(secrets.token_bytes(KEY_BYTES)))
