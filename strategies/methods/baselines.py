"""The baselines that the papers compare to (specs 1.6, 2.3, 3.6, 4.2); each differs from FedAvg in a single choice.

The coordinator's half of all of them is FedAvg's; the hospital's half declares the choice.
"""

from functools import cached_property
from typing import Literal

from pydantic import Field

from strategies.aggregation.means import Weighting
from strategies.local.losses import Missing
from strategies.local.site_method import Parameters, Payload, Pooled, SiteMethod, TrunkRule
from strategies.methods.base import Method


class FedAvgParameters(Parameters):
    """The ``[method]`` table of ``fedavg``, whose default is to weigh a site by its images."""

    weighting: Weighting = "samples"


class FedBNParameters(FedAvgParameters):
    trunk: TrunkRule = "fedbn"


class FedBNPlusParameters(FedAvgParameters):
    trunk: TrunkRule = "fedbn_plus"


class FedProxParameters(FedAvgParameters):
    """The ``[method]`` table of ``fedprox``; UniFed's authors take ``proximal_mu`` 0.3 (specs 4.2)."""

    proximal_mu: float = Field(0.01, gt=0)
    missing: Missing = "masked"


class CentralisedParameters(Parameters):
    """The ``[method]`` table of ``centralised``.

    Attributes:
        missing: How a class counts that an image's site does not annotate. ``negative`` counts it as absent, as in the
            paper; ``masked`` leaves it out; ``known`` uses the true label, which no site has, as an upper bound.
    """

    missing: Literal["negative", "masked", "known"] = "negative"


class VanillaSite(SiteMethod):
    name = "vanilla"
    missing = "negative"


class Vanilla(Method):
    """Every site has every head row; a class that a site does not annotate counts as absent."""

    site_class = VanillaSite


class PartialLossSite(SiteMethod):
    name = "partial_loss"


class PartialLoss(Method):
    """Every site has every head row and learns from its own classes; the whole head is averaged over all sites.

    The paper's warm-up counts a missing label as negative, which handicaps this baseline. Here the warm-up, too, leaves
    missing labels out of the loss (specs 1.6).
    """

    site_class = PartialLossSite


class PersonalisedHeadsSite(SiteMethod):
    name = "pfl"
    declared = Payload(head=False, rows="own")


class PersonalisedHeads(Method):
    """Everything but the head is averaged; each site keeps a head of its own classes."""

    site_class = PersonalisedHeadsSite


class IndividualSite(SiteMethod):
    name = "individual"
    declared = Payload(trunk=False, head=False, rows="own")
    selection = "site"


class Individual(Method):
    """Each site trains alone, for the same number of epochs; only losses are exchanged."""

    site_class = IndividualSite


class CentralisedSite(SiteMethod):
    name = "centralised"
    table = CentralisedParameters
    parameters: CentralisedParameters

    @cached_property
    def counts_missing_as(self) -> Missing:
        """Return ``masked``: labels that stay unknown when images are pooled are left out of the loss."""
        return "masked"

    @property
    def pooled(self) -> Pooled:
        """Return how a class counts that an image's site does not annotate."""
        return self.parameters.missing


class Centralised(Method):
    """All images in one place, which no hospital allows: the upper bound of a federation."""

    site_class = CentralisedSite


class FedAvgSite(SiteMethod):
    name = "fedavg"
    table = FedAvgParameters
    full_coverage = True


class FedAvg(Method):
    """McMahan et al., AISTATS 2017: every site annotates every class, and all parts of the model are averaged."""

    site_class = FedAvgSite


class FedBNSite(FedAvgSite):
    name = "fedbn"
    table = FedBNParameters


class FedBN(Method):
    """Li et al., ICLR 2021: FedAvg with batch normalisation kept at the site."""

    site_class = FedBNSite


class FedBNPlusSite(FedAvgSite):
    name = "fedbn_plus"
    table = FedBNPlusParameters


class FedBNPlus(Method):
    """FedAvg with batch normalisation frozen at its initial values (arXiv 2303.06180)."""

    site_class = FedBNPlusSite


class FedProxSite(SiteMethod):
    name = "fedprox"
    table = FedProxParameters


class FedProx(Method):
    """Li et al., MLSys 2020: FedAvg with a pull back to the received model; here with partial labels too."""

    site_class = FedProxSite
