"""What noise costs: epsilon of all the noisy steps that a site has taken, by Opacus' accountants.

Abadi et al., "Deep Learning with Differential Privacy", CCS 2016. ``rdp``: Mironov, Talwar and Zhang, "Renyi
Differential Privacy of the Sampled Gaussian Mechanism", 2019. ``prv``: Gopi, Lee and Wutschitz, "Numerical Composition
of Differential Privacy", NeurIPS 2021, or ``rdp`` where that is smaller, for each is an upper bound. One step adds
Gaussian noise to a sum over images or patients, each drawn by itself with probability ``sample_rate``; at 1 it is the
plain Gaussian mechanism.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal

Accountant = Literal["rdp", "prv"]
PRV_MOST_EPSILON: Final = 50.0
PRV_MOST_STEPS: Final = 1_000_000
"""Beyond either, Renyi divergences alone are used: the privacy loss distribution would not fit into memory."""
_TOLERANCE: Final = 0.01


@dataclass(frozen=True)
class Steps:
    """Noisy steps that are alike.

    Attributes:
        noise_multiplier: Standard deviation of the noise over the sensitivity.
        sample_rate: From above 0 to 1.
    """

    noise_multiplier: float
    sample_rate: float
    count: int


def epsilon_of(taken: Sequence[Steps], delta: float, accountant: Accountant) -> float:
    """What these steps cost together; infinite where one of them has no noise."""
    if not taken:
        return 0.0
    if any(not steps.noise_multiplier for steps in taken):
        return math.inf
    safe = _epsilon(tuple(taken), delta, "rdp")
    beyond = safe > PRV_MOST_EPSILON or sum(steps.count for steps in taken) > PRV_MOST_STEPS
    found = safe if accountant == "rdp" or beyond else min(safe, _epsilon(tuple(taken), delta, "prv"))
    return max(found, 0.0)  # with a large delta an accountant can come out below


@lru_cache(maxsize=256)  # it takes 0.1 s, and a ledger asks for the same steps several times a round
def _epsilon(taken: tuple[Steps, ...], delta: float, accountant: Accountant) -> float:
    from opacus.accountants import create_accountant

    counting = create_accountant(mechanism=accountant)
    counting.history = [(steps.noise_multiplier, steps.sample_rate, steps.count) for steps in taken]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a wider range of orders could give a smaller epsilon
        return float(counting.get_epsilon(delta=delta))


@lru_cache(maxsize=64)
def noise_multiplier_for(
    epsilon: float, delta: float, *, sample_rate: float, count: int, accountant: Accountant
) -> float:
    """The least noise, to within 0.01 of epsilon, with which so many steps cost no more."""
    enough = _enough_by_rdp(epsilon, delta, sample_rate, count)
    if accountant == "rdp":
        return enough

    def cost(noise_multiplier: float) -> float:
        return epsilon_of([Steps(noise_multiplier, sample_rate, count)], delta, accountant)

    too_little = enough / 2
    while cost(too_little) <= epsilon:
        too_little /= 2
    while epsilon - cost(enough) > _TOLERANCE and enough - too_little > _TOLERANCE**2 * enough:
        middle = (enough + too_little) / 2
        enough, too_little = (middle, too_little) if cost(middle) <= epsilon else (enough, middle)
    return enough


def _enough_by_rdp(epsilon: float, delta: float, sample_rate: float, count: int) -> float:
    from opacus.accountants.utils import get_noise_multiplier

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = get_noise_multiplier(
            target_epsilon=epsilon, target_delta=delta, sample_rate=sample_rate, steps=count, accountant="rdp"
        )
    return float(found)
