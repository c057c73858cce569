"""The baselines of the papers' comparisons; each differs from FedAvg in one choice.

The coordinator's half of each is that of FedAvg; the hospital's half declares the choice.
"""

from functools import cached_property
from typing import Literal

from pydantic import Field

from polyclinic.strategies.aggregation.means import Weighting
from polyclinic.strategies.local.losses import Missing
from polyclinic.strategies.local.site_method import Parameters, Payload, Pooled, SiteMethod, TrunkRule
from polyclinic.strategies.methods.base import Method


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
    name = "vanilla"
    missing = "negative"


class VanillaFedAvg(Method):
    """FedAvg with all head rows at every site; classes that a site does not annotate count as negative."""

    site_class = VanillaFedAvgSite


class PartialLossSite(SiteMethod):
    name = "partial_loss"


class PartialLoss(Method):
    """FedAvg with all head rows at every site; classes that a site does not annotate are omitted from its loss.

    In the paper, the warm-up counts missing labels as negative, which weakens this baseline. Here the warm-up omits
    missing labels, too (docs/papers.md#surgical-baselines).
    """

    site_class = PartialLossSite


class PersonalisedHeadsSite(SiteMethod):
    name = "pfl"
    declared = Payload(head=False, rows="own")


class PersonalisedHeads(Method):
    """FedAvg without the head; each site keeps a local head for its own classes."""

    site_class = PersonalisedHeadsSite


class IndividualTrainingSite(SiteMethod):
    name = "individual"
    declared = Payload(trunk=False, head=False, rows="own")
    selection = "site"


class IndividualTraining(Method):
    """Training of each site alone, for as many epochs as in a federation; sites send metrics, and no updates."""

    site_class = IndividualTrainingSite


class CentralisedTrainingSite(SiteMethod):
    name = "centralised"
    table = CentralisedTrainingParameters
    parameters: CentralisedTrainingParameters

    @cached_property
    def missing_labels_count_as(self) -> Missing:
        """Return ``masked``: labels that are unknown after pooling are omitted from the loss."""
        return "masked"

    @property
    def pooled_missing_labels(self) -> Pooled:
        """Return how the loss treats classes that an image's site does not annotate."""
        return self.parameters.missing


class CentralisedTraining(Method):
    """Training on all sites' images pooled in one place, which no hospital allows: the upper bound of a federation."""

    site_class = CentralisedTrainingSite


class FedAvgSite(SiteMethod):
    name = "fedavg"
    table = FedAvgParameters
    full_coverage = True


class FedAvg(Method):
    """FedAvg (McMahan et al., AISTATS 2017): every site annotates every class, and the whole model is averaged."""

    site_class = FedAvgSite


class FedBNSite(FedAvgSite):
    name = "fedbn"
    table = FedBNParameters


class FedBN(Method):
    """FedBN (Li et al., ICLR 2021): FedAvg with batch normalisation that stays local at each site."""

    site_class = FedBNSite


class FedBNPlusSite(FedAvgSite):
    name = "fedbn_plus"
    table = FedBNPlusParameters


class FedBNPlus(Method):
    """FedBN+: FedAvg with batch normalisation frozen at its initial values (arXiv 2303.06180)."""

    site_class = FedBNPlusSite


class FedProxSite(SiteMethod):
    name = "fedprox"
    table = FedProxParameters


class FedProx(Method):
    """FedProx (Li et al., MLSys 2020): FedAvg with a proximal term in the loss; sites may have partial labels."""

    site_class = FedProxSite
