"""Types for a method plug-in: a package with two classes, one for the coordinator and one for the sites.

``Method`` is the base of the coordinator's half, a Flower ``Strategy``. Its attribute ``site_class`` names the site's
half, a subclass of ``SiteMethod``. The entry point of the coordinator's half is in the group ``polyclinic.methods``;
``docs/new-method.md`` has an example.
"""

from polyclinic.common.models.network import Model, SplitNetwork
from polyclinic.strategies.aggregation.means import HeadMean, Weighting, Weights
from polyclinic.strategies.local.method_traits import MethodTraits, Parameters, Payload, Statistic
from polyclinic.strategies.local.objective import Batch, ClientContext, LocalRound, Losses, Objective, plain
from polyclinic.strategies.local.site_method import SiteMethod
from polyclinic.strategies.local.stages import RoundDefault, Stage, make_share_of_rounds
from polyclinic.strategies.methods.base import Method, RoundContext, SiteReply, make_method
from polyclinic.strategies.methods.surgical import OwnersMean, SurgicalAggregation

__all__ = [
    "Batch",
    "ClientContext",
    "HeadMean",
    "LocalRound",
    "Losses",
    "Method",
    "MethodTraits",
    "Model",
    "Objective",
    "OwnersMean",
    "Parameters",
    "Payload",
    "RoundContext",
    "RoundDefault",
    "SiteMethod",
    "SiteReply",
    "SplitNetwork",
    "Stage",
    "Statistic",
    "SurgicalAggregation",
    "Weighting",
    "Weights",
    "make_method",
    "make_share_of_rounds",
    "plain",
]
