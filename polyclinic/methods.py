"""The types of a package that brings a method of its own: two classes with these bases, the first as an entry point.

The entry point stands in the group ``polyclinic.methods``; ``docs/new-method.md`` builds such classes. ``Method`` is
the coordinator's half, a Flower ``Strategy``; its ``site_class`` names the hospital's half, a ``SiteMethod``.
"""

from common.models.network import Model, SplitNetwork
from strategies.aggregation.means import HeadMean, Weighting, Weights
from strategies.local.objective import Batch, ClientContext, LocalRound, Losses, Objective, plain
from strategies.local.site_method import Parameters, Payload, SiteMethod, Statistic
from strategies.methods.base import Method, RoundContext, SiteReply
from strategies.methods.surgical import OwnersMean, SurgicalAggregation

__all__ = [
    "Batch",
    "ClientContext",
    "HeadMean",
    "LocalRound",
    "Losses",
    "Method",
    "Model",
    "Objective",
    "OwnersMean",
    "Parameters",
    "Payload",
    "RoundContext",
    "SiteMethod",
    "SiteReply",
    "SplitNetwork",
    "Statistic",
    "SurgicalAggregation",
    "Weighting",
    "Weights",
    "plain",
]
