"""The baselines that the papers compare to (specs 1.6, 2.3, 3.6, 4.2), each one choice away from another method."""

from typing import Literal

from pydantic import Field

from strategies.aggregation.means import Weighting
from strategies.base.method import (
    Method,
    Parameters,
    Pooled,
    Traffic,
    TrunkRule,
)
from strategies.local.losses import Missing


class FedAvgParameters(Parameters):
    """FedAvg's own default is to weigh a site by its images."""

    weighting: Weighting = "samples"


class FedBNParameters(FedAvgParameters):
    trunk: TrunkRule = "fedbn"


class FedBNPlusParameters(FedAvgParameters):
    trunk: TrunkRule = "fedbn_plus"


class FedProxParameters(FedAvgParameters):
    """``proximal_mu``: specs 4.2; UniFed's authors take 0.3."""

    proximal_mu: float = Field(0.01, gt=0)
    missing: Missing = "masked"


class CentralisedParameters(Parameters):
    """``missing``: what an unannotated class of an image counts as.

    ``negative`` as in the paper; ``masked`` leaves the entry out; ``known`` uses the true label that the site does not
    have: no rival but the upper bound.
    """

    missing: Literal["negative", "masked", "known"] = "negative"


class Vanilla(Method):
    """Every site has every row; a class it does not annotate counts as absent."""

    name = "vanilla"
    missing = "negative"


class PartialLoss(Method):
    """Every site has every row and learns from its own classes; the whole head is averaged over all sites.

    The authors' warm-up takes missing as negative, a handicap; here it uses the partial loss too (specs 1.6).
    """

    name = "partial_loss"


class PersonalisedHeads(Method):
    """Everything but the head is averaged; each site keeps a head of its own classes."""

    name = "pfl"
    declared = Traffic(head=False, rows="own")


class Individual(Method):
    """Each site alone, for the same number of epochs; nothing but losses is exchanged."""

    name = "individual"
    declared = Traffic(trunk=False, head=False, rows="own")
    selection = "site"


class Centralised(Method):
    """All images in one place, which no hospital allows: what federation is measured against."""

    name = "centralised"
    table = CentralisedParameters
    parameters: CentralisedParameters

    @property
    def counts_missing_as(self) -> Missing:
        """Entries that stay unknown when the images are pooled are left out."""
        return "masked"

    @property
    def pooled(self) -> Pooled:
        """What an unannotated class of an image counts as."""
        return self.parameters.missing


class FedAvg(Method):
    """McMahan et al., AISTATS 2017: every site annotates every class and everything is averaged."""

    name = "fedavg"
    table = FedAvgParameters
    full_coverage = True


class FedBN(FedAvg):
    """Li et al., ICLR 2021: FedAvg with batch normalisation kept at the site."""

    name = "fedbn"
    table = FedBNParameters


class FedBNPlus(FedAvg):
    """FedAvg with batch normalisation frozen at its initial values (arXiv 2303.06180)."""

    name = "fedbn_plus"
    table = FedBNPlusParameters


class FedProx(Method):
    """Li et al., MLSys 2020: FedAvg with a pull back to the received model; here it takes partial labels too."""

    name = "fedprox"
    table = FedProxParameters
