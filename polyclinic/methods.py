"""What a package needs to bring a method of its own: two classes with these bases, the first one as an entry point.

The entry point stands in the group ``polyclinic.methods``; ``docs/new-method.md`` builds such classes. ``Method`` is
the coordinator's half, a Flower ``Strategy``; its ``site_class`` names the hospital's half, a ``SiteMethod``.
"""

from common.models.network import SplitNetwork
from strategies.aggregation.means import Weighting, Weights
from strategies.local.objective import ClientContext, LocalRound
from strategies.local.site_method import Parameters, Payload, SiteMethod, Statistic
from strategies.local.training import Batch, Objective, plain
from strategies.methods.base import Method, RoundContext

__all__ = [
    "Batch",
    "ClientContext",
    "LocalRound",
    "Method",
    "Objective",
    "Parameters",
    "Payload",
    "RoundContext",
    "SiteMethod",
    "SplitNetwork",
    "Statistic",
    "Weighting",
    "Weights",
    "plain",
]
