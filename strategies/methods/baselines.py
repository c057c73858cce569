"""The baselines of the papers' comparisons; each differs from FedAvg in one choice.

The hospital's half declares the choice; the coordinator's half of each has the rules of FedAvg.
"""

from dataclasses import replace
from functools import cached_property
from typing import Literal

from pydantic import Field

from polyclinic.common.contract import PooledLabels
from polyclinic.strategies.aggregation.means import Weighting
from polyclinic.strategies.local.losses import Missing
from polyclinic.strategies.local.method_traits import MethodTraits, Parameters, Payload, TrunkRule
from polyclinic.strategies.local.site_method import SiteMethod
from polyclinic.strategies.methods.base import Method, make_method


class FedAvgParameters(Parameters):
    """The ``[method]`` table of ``fedavg``; by default a site's weight is its number of training images."""

    weighting: Weighting = "samples"


class FedBNParameters(FedAvgParameters):
    trunk: TrunkRule = "fedbn"


class FedBNPlusParameters(FedAvgParameters):
    trunk: TrunkRule = "fedbn_plus"


class FedProxParameters(FedAvgParameters):
    """The ``[method]`` table of ``fedprox``; UniFed's authors use ``proximal_mu`` 0.3.

    Attributes:
        missing: How the loss treats classes that a site does not annotate.
    """

    proximal_mu: float = Field(0.01, gt=0)
    missing: Missing = "masked"


class CentralisedTrainingParameters(Parameters):
    """The ``[method]`` table of ``centralised``.

    Attributes:
        missing: How the loss treats classes that an image's site does not annotate: ``negative``, as absent, as in the
            paper; ``masked``, omitted; ``known``, by the true labels, which no site has.
    """

    missing: Literal["negative", "masked", "known"] = "negative"


class VanillaFedAvgSite(SiteMethod):
    """FedAvg with all head rows at every site; classes that a site does not annotate count as negative."""

    traits = MethodTraits("vanilla", missing="negative")


VanillaFedAvg = make_method(Method, VanillaFedAvgSite)


class PartialLossSite(SiteMethod):
    """FedAvg with all head rows at every site; classes that a site does not annotate are omitted from its loss.

    In the paper, the warm-up counts missing labels as negative, which weakens this baseline. Here the warm-up omits
    missing labels, too (docs/papers.md#surgical-baselines).
    """

    traits = MethodTraits("partial_loss")


PartialLoss = make_method(Method, PartialLossSite)


class PersonalisedHeadsSite(SiteMethod):
    """FedAvg without the head; each site keeps a local head for its own classes."""

    traits = MethodTraits("pfl", payload=Payload(head=False, rows="own"))


PersonalisedHeads = make_method(Method, PersonalisedHeadsSite)


class IndividualTrainingSite(SiteMethod):
    """Training of each site alone, for as many epochs as in a federation; sites send metrics, and no updates."""

    traits = MethodTraits("individual", payload=Payload(trunk=False, head=False, rows="own"), selection="site")


IndividualTraining = make_method(Method, IndividualTrainingSite)


class CentralisedTrainingSite(SiteMethod):
    """Training on all sites' images pooled in one place, which no hospital allows: the upper bound of a federation."""

    traits = MethodTraits("centralised", parameters_class=CentralisedTrainingParameters)
    parameters: CentralisedTrainingParameters

    @cached_property
    def missing_labels_count_as(self) -> Missing:
        """Return ``masked``: labels that are unknown after pooling are omitted from the loss."""
        return "masked"

    @property
    def pooled_missing_labels(self) -> PooledLabels:
        """Return how the loss treats classes that an image's site does not annotate."""
        return self.parameters.missing


CentralisedTraining = make_method(Method, CentralisedTrainingSite)


class FedAvgSite(SiteMethod):
    """FedAvg (McMahan et al., AISTATS 2017): every site annotates every class, and the whole model is averaged."""

    traits = MethodTraits("fedavg", parameters_class=FedAvgParameters, needs_full_coverage=True)


FedAvg = make_method(Method, FedAvgSite)


class FedBNSite(FedAvgSite):
    """FedBN (Li et al., ICLR 2021): FedAvg with batch normalisation that stays local at each site."""

    traits = replace(FedAvgSite.traits, name="fedbn", parameters_class=FedBNParameters)


FedBN = make_method(Method, FedBNSite)


class FedBNPlusSite(FedAvgSite):
    """FedBN+: FedAvg with batch normalisation frozen at its initial values (arXiv 2303.06180)."""

    traits = replace(FedAvgSite.traits, name="fedbn_plus", parameters_class=FedBNPlusParameters)


FedBNPlus = make_method(Method, FedBNPlusSite)


class FedProxSite(SiteMethod):
    """FedProx (Li et al., MLSys 2020): FedAvg with a proximal term in the loss; sites may have partial labels."""

    traits = MethodTraits("fedprox", parameters_class=FedProxParameters)


FedProx = make_method(Method, FedProxSite)
