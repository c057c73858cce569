"""The baselines that the papers compare to (specs 1.6, 2.3, 3.6, 4.2), each one choice away from another method."""

from typing import Literal

from pydantic import Field

from common.models.zoo.spec import Task
from strategies.base.method import Method, Parameters, TrunkRule, Weighting, shared_choices
from strategies.local.losses import Missing, loss_for


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


def vanilla(parameters: Parameters, task: Task) -> Method:
    """Every site has every row; a class it does not annotate counts as absent."""
    return Method("vanilla", loss_for(task, "negative"), **shared_choices(parameters))


def partial_loss(parameters: Parameters, task: Task) -> Method:
    """Every site has every row and learns from its own classes; the whole head is averaged over all sites.

    The authors' warm-up takes missing as negative, a handicap; here it uses the partial loss too (specs 1.6).
    """
    return Method("partial_loss", loss_for(task, "masked"), **shared_choices(parameters))


def pfl(parameters: Parameters, task: Task) -> Method:
    """Personalised: everything but the head is averaged; each site keeps a head of its own classes."""
    return Method(
        "pfl",
        loss_for(task, "masked"),
        sends_head=False,
        rows="own",
        **shared_choices(parameters),
    )


def individual(parameters: Parameters, task: Task) -> Method:
    """Each site alone, for the same number of epochs; nothing but losses is exchanged."""
    return Method(
        "individual",
        loss_for(task, "masked"),
        sends_trunk=False,
        sends_head=False,
        rows="own",
        selection="site",
        **shared_choices(parameters),
    )


def centralised(parameters: CentralisedParameters, task: Task) -> Method:
    """All images in one place, which no hospital allows: what federation is measured against."""
    return Method(
        "centralised",
        loss_for(task, "masked"),
        pooled=parameters.missing,
        **shared_choices(parameters),
    )


def fedavg(parameters: FedAvgParameters, task: Task) -> Method:
    """McMahan et al., AISTATS 2017: every site annotates every class and everything is averaged."""
    return _full_coverage("fedavg", parameters, task)


def fedbn(parameters: FedBNParameters, task: Task) -> Method:
    """Li et al., ICLR 2021: FedAvg with batch normalisation kept at the site."""
    return _full_coverage("fedbn", parameters, task)


def fedbn_plus(parameters: FedBNPlusParameters, task: Task) -> Method:
    """FedAvg with batch normalisation frozen at its initial values (arXiv 2303.06180)."""
    return _full_coverage("fedbn_plus", parameters, task)


def fedprox(parameters: FedProxParameters, task: Task) -> Method:
    """Li et al., MLSys 2020: FedAvg with a pull back to the received model; here it takes partial labels too."""
    return Method("fedprox", loss_for(task, parameters.missing), **shared_choices(parameters))


def _full_coverage(name: str, parameters: Parameters, task: Task) -> Method:
    return Method(
        name,
        loss_for(task, "masked"),
        needs_full_coverage=True,
        **shared_choices(parameters),
    )
