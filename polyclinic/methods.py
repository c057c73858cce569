"""What a package needs to bring a method of its own: a class with this base, as an entry point.

The entry point stands in the group ``polyclinic.methods``; ``docs/new-method.md`` builds such classes. The same class
runs on the coordinator, where it is a Flower ``Strategy``, and at the hospitals, where ``client`` is its half.
"""

from common.models.network import SplitNetwork
from strategies.base.method import Parameters, Statistic, Traffic, Weighting, Weights
from strategies.base.round_context import RoundContext
from strategies.local.objective import LocalRound, Situation
from strategies.local.training import Batch, Objective, plain
from strategies.rounds.strategy import FederatedAveraging

__all__ = [
    "Batch",
    "FederatedAveraging",
    "LocalRound",
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
