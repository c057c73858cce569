"""What a package needs to bring a method of its own: a class with this base, as an entry point.

The entry point stands in the group ``polyclinic.methods``; ``docs/new-method.md`` builds such classes. The same class
runs on the coordinator, where it is a Flower ``Strategy``, and at the hospitals, where ``client`` is its half.
"""

from common.models.network import SplitNetwork
from strategies.aggregation.means import (
    Weighting,
    Weights,
)
from strategies.base.method import (
    Method,
    Parameters,
    Statistic,
    Traffic,
)
from strategies.base.round_context import RoundContext
from strategies.local.objective import LocalRound, Situation
from strategies.local.training import Batch, Objective, plain

__all__ = [
    "Batch",
    "LocalRound",
    "Method",
    "Objective",
    "Parameters",
    "RoundContext",
    "Situation",
    "SplitNetwork",
    "Statistic",
    "Traffic",
    "Weighting",
    "Weights",
    "plain",
]
