"""Distributed noise: each site adds its share under its mask, and only the sum carries the noise that is promised.

Kairouz, Liu, Steinke, "The Distributed Discrete Gaussian Mechanism for Federated Learning with Secure Aggregation",
ICML 2021. The promise holds while at least ``honest`` sites of a sum add their share: each share has the variance
sigma^2 / honest, no sum of fewer sites is opened, and more sites make more noise, not less. Departures: an update is
truncated to the grid, not rounded by chance, so that it becomes no longer and needs no rotation before; and a share has
a standard deviation of 2^12 steps of the grid or more.

A sum of discrete Gaussians is no discrete Gaussian. Their theorem 1 bounds the difference: the logarithms of the two
probabilities lie at most tau apart in each number (:func:`bound_log_probability_gap`), which at such shares is below
10^-1000000. So the sum costs what a discrete Gaussian of its variance costs, and that is no more than the continuous
one (Canonne, Kamath, Steinke, NeurIPS 2020, theorem 4).
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from common.config import Plan
from common.wire.secure_aggregation import Integers
from strategies.local.site_method import SiteMethod
from strategies.privacy.mechanism import make_site_privacy
from strategies.privacy.noise import SCALE_BITS, BitStream, draw_discrete_gaussian
from strategies.privacy.secure_aggregation.crypto import SecretsError

LEAST_SCALE_BITS: Final = 12
HALF_RANGE: Final = 2.0**31
"""Sums travel modulo 2^32, as numbers of both signs."""
ROOM: Final = 8.0
"""Standard deviations of the noise for which the range has room; beyond, a number comes back with the other sign."""


@dataclass(frozen=True)
class NoiseShareGrid:
    """The grid of one round.

    Attributes:
        scale_bits: Binary logarithm of the standard deviation of one site's share, in steps of the grid.
        divisor: Number that each update is divided by.
        steps: Steps of the grid in one unit of an update so divided.
        limit: Largest number of steps that a sum can hold.
    """

    scale_bits: int
    divisor: int
    steps: float
    limit: int

    def add_noise_share(self, update: NDArray[np.float32], bits: BitStream) -> Integers:
        """Return one site's addend before its masks: the update on the grid and a share of the noise.

        Args:
            update: An update at most as long as the bound.
        """
        truncated = np.trunc(update.astype(np.float64) * (1 / self.divisor * self.steps)).astype(np.int64)
        noisy = truncated + draw_discrete_gaussian(len(update), bits, self.scale_bits)
        return (noisy & 0xFFFFFFFF).astype(np.uint32)

    def is_plausible_sum(self, total: Integers) -> bool:
        """Return whether these integers can be a sum; with a mask left on, numbers are soon out of range."""
        signed = total.view(np.int32).astype(np.int64)
        return not len(signed) or bool(np.abs(signed).max() <= self.limit)

    def integers_to_values(self, total: Integers) -> NDArray[np.float64]:
        """Return a sum as it was before it was brought to the grid."""
        return total.view(np.int32) / np.float64(self.steps)


@dataclass(frozen=True)
class DistributedNoise:
    """The distributed noise of a run, of which each site adds a share.

    Attributes:
        bound: Longest length of an update.
        noise_multiplier: Standard deviation of the sum's noise, divided by the most that one site can move the sum.
        honest: How many sites of a sum add their share at least.
    """

    bound: float
    noise_multiplier: float
    honest: int

    def make_grid(self, divisor: int) -> NoiseShareGrid:
        """Return the grid for ``divisor`` sites, as fine as the range allows; updates lie up to twice the bound apart.

        All sites of a round have the same, no matter who is lost: noise on a coarser one would hide an update less.

        Raises:
            SecretsError: If there is no room for the noise.
        """
        deviation = self.noise_multiplier * 2 * self.bound * (1 / divisor)
        in_shares = math.sqrt(self.honest) / deviation  # standard deviations of a share in one unit
        needed = self.bound * in_shares + ROOM * math.sqrt(divisor)
        bits = min(SCALE_BITS, math.ceil(math.log2(HALF_RANGE / needed)) - 1)
        if bits < LEAST_SCALE_BITS:
            raise SecretsError("a sum has no room for updates beside so little noise, or for so many sites")
        return NoiseShareGrid(bits, divisor, in_shares * 2.0**bits, math.ceil(needed * 2.0**bits) + divisor)


def make_distributed_noise(plan: Plan, method: SiteMethod) -> DistributedNoise | None:
    """Return the noise that the sites of a run add together; None where each adds its own or there is none."""
    section = plan.privacy
    if section.noise != "distributed":
        return None
    protection = make_site_privacy(plan, method, 1)
    assert protection is not None, "it has a level"
    assert section.honest_sites is not None, "the schema says"
    return DistributedNoise(section.max_update_norm, protection.noise_multiplier, section.honest_sites)


def bound_log_probability_gap(sites: int, deviation: float) -> float:
    """Return tau: the distance in log probability of a sum of discrete Gaussians from one of the same variance.

    Theorem 1 of Kairouz et al., for each number of a vector.

    Args:
        sites: Number of summands.
        deviation: Standard deviation of one site's share, in steps of the grid.
    """
    return 10 * sum(math.exp(-2 * math.pi**2 * deviation**2 * k / (k + 1)) for k in range(1, sites))
