"""What noise costs: epsilon of all the noisy steps that a site has taken, by Opacus' accountants.

Abadi et al., "Deep Learning with Differential Privacy", CCS 2016. ``rdp``: Mironov, Talwar and Zhang, "Renyi
Differential Privacy of the Sampled Gaussian Mechanism", 2019. ``prv``: Gopi, Lee and Wutschitz, "Numerical Composition
of Differential Privacy", NeurIPS 2021. One step adds Gaussian noise to a sum over images, each drawn by itself with
probability ``sample_rate``; at 1 it is the plain Gaussian mechanism.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

Accountant = Literal["rdp", "prv"]


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
    from opacus.accountants.utils import get_noise_multiplier

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return float(
            get_noise_multiplier(
                target_epsilon=epsilon,
                target_delta=delta,
                sample_rate=sample_rate,
                steps=count,
                accountant=accountant,
            )
        )
