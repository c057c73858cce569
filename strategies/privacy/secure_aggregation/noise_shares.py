"""Distributed noise: each site adds a share of the noise under its mask; only the sum has the full noise.

Kairouz, Liu, Steinke, "The Distributed Discrete Gaussian Mechanism for Federated Learning with Secure Aggregation",
ICML 2021. The privacy holds if at least ``honest`` sites of a sum add their shares: each share has the variance sigma^2
/ honest, no sum of fewer sites is unmasked, and more sites only add more noise. Departures: an update is truncated to
the grid instead of randomly rounded, so that it does not become longer and needs no rotation; and a share has a
standard deviation of at least 2^12 grid steps.

A sum of discrete Gaussians is not a discrete Gaussian. Their theorem 1 bounds the difference: in each value, the
logarithms of the two probabilities differ by at most tau (:func:`bound_log_probability_gap`), which is below
10^-1000000 for such shares. So the sum has the privacy cost of a discrete Gaussian of the same variance, which is at
most that of the continuous Gaussian (Canonne, Kamath, Steinke, NeurIPS 2020, theorem 4).
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from polyclinic.common.config import HospitalPlan
from polyclinic.common.wire.secure_aggregation import Integers
from polyclinic.strategies.local.site_method import SiteMethod
from polyclinic.strategies.privacy.mechanism import make_site_privacy_settings
from polyclinic.strategies.privacy.noise import SCALE_BITS, SecretBitStream, draw_discrete_gaussian
from polyclinic.strategies.privacy.secure_aggregation.crypto import SecretsError

LEAST_SCALE_BITS: Final = 12
HALF_RANGE: Final = 2.0**31
"""Sums are sent modulo 2^32, as signed integers."""
NOISE_RANGE_DEVIATIONS: Final = 8.0
"""Number of standard deviations of the noise that fit into the range; beyond it, the sign would change."""


@dataclass(frozen=True)
class NoiseShareGrid:
    """The grid of integers that one round's updates and noise shares are converted to.

    Attributes:
        scale_bits: Binary logarithm of the standard deviation of one site's share, in grid steps.
        divisor: Divisor of each update.
        steps: Number of grid steps in one unit of a divided update.
        limit: Largest absolute number of steps in a plausible sum.
    """

    scale_bits: int
    divisor: int
    steps: float
    limit: int

    def add_noise_share(self, update: NDArray[np.float32], bits: SecretBitStream) -> Integers:
        """Return a site's update in whole grid steps plus a share of the noise, before masking, modulo 2**32.

        Args:
            update: Values of the update, whose length is at most the bound.
            bits: Source of the random bits of the noise.
        """
        truncated = np.trunc(update.astype(np.float64) * (1 / self.divisor * self.steps)).astype(np.int64)
        noisy = truncated + draw_discrete_gaussian(len(update), bits, self.scale_bits)
        return (noisy & 0xFFFFFFFF).astype(np.uint32)

    def convert_integers_to_values(self, total: Integers) -> NDArray[np.float64]:
        """Convert a sum from grid steps to floats."""
        return total.view(np.int32) / np.float64(self.steps)


@dataclass(frozen=True)
class DistributedNoise:
    """The distributed noise of a run, of which each site adds a share.

    Attributes:
        bound: Largest length of an update.
        noise_multiplier: Standard deviation of the sum's noise over the largest change by one site.
        honest: Smallest number of sites of a sum that add their share and keep it secret.
    """

    bound: float
    noise_multiplier: float
    honest: int

    def make_noise_share_grid(self, divisor: int) -> NoiseShareGrid:
        """Return the integer grid of a round: the finest in which the sum of all updates and noise shares still fits.

        Sums are 32-bit integers. The grid is never finer than ``2**SCALE_BITS`` steps for the standard deviation of one
        site's share. The noise is scaled to twice the bound, because replacing one site's update changes the sum of
        the undivided updates by at most that.

        All sites of a round use the same grid, which stays the same if sites drop out.

        Args:
            divisor: Number of sites in the round's first attempt, by which each update is divided.

        Raises:
            SecretsError: If the grid would have to be so coarse that the standard deviation of one share were less than
                ``2**LEAST_SCALE_BITS`` steps.
        """
        deviation = self.noise_multiplier * 2 * self.bound * (1 / divisor)
        in_shares = math.sqrt(self.honest) / deviation  # standard deviations of a share in one unit
        needed = self.bound * in_shares + NOISE_RANGE_DEVIATIONS * math.sqrt(divisor)
        bits = min(SCALE_BITS, math.ceil(math.log2(HALF_RANGE / needed)) - 1)
        if bits < LEAST_SCALE_BITS:
            raise SecretsError("a sum has no room for updates beside so little noise, or for so many sites")
        return NoiseShareGrid(bits, divisor, in_shares * 2.0**bits, math.ceil(needed * 2.0**bits) + divisor)


def make_distributed_noise(plan: HospitalPlan, method: SiteMethod) -> DistributedNoise | None:
    """Return the noise that the sites of a run add jointly; None if each site adds its own, or without noise."""
    section = plan.privacy
    if section.noise != "distributed":
        return None
    protection = make_site_privacy_settings(plan, method, 1)
    assert protection is not None, "it has a level"
    assert section.honest_sites is not None, "the schema says"
    return DistributedNoise(section.max_update_norm, protection.noise_multiplier, section.honest_sites)


def bound_log_probability_gap(sites: int, deviation: float) -> float:
    """Return tau, a bound on how a sum of discrete Gaussians differs from one discrete Gaussian of its variance.

    The logarithms of the probabilities that both give to a value differ by at most tau, for each value of a vector
    (Kairouz et al., theorem 1).

    Args:
        sites: Number of summands.
        deviation: Standard deviation of one site's share, in grid steps.
    """
    return 10 * sum(math.exp(-2 * math.pi**2 * deviation**2 * k / (k + 1)) for k in range(1, sites))
