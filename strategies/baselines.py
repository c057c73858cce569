"""The baselines that surgical aggregation is compared to (specs 1.6), each one choice away from it."""

from typing import Literal

from strategies.losses import known_entries, missing_as_negative
from strategies.method import Method, Parameters, TrunkRule, Weighting, shared_choices


class FedAvgParameters(Parameters):
    """FedAvg's own default is to weigh a site by its images."""

    weighting: Weighting = "samples"


class FedBNParameters(FedAvgParameters):
    trunk: TrunkRule = "fedbn"


class FedBNPlusParameters(FedAvgParameters):
    trunk: TrunkRule = "fedbn_plus"


class CentralisedParameters(Parameters):
    """``missing``: what an unannotated class of an image counts as.

    ``negative`` as in the paper; ``masked`` leaves the entry out; ``known`` uses the true label that the site does not
    have: no rival but the upper bound.
    """

    missing: Literal["negative", "masked", "known"] = "negative"


def vanilla(parameters: Parameters) -> Method:
    """Every site has every row; a class it does not annotate counts as absent."""
    return Method("vanilla", missing_as_negative, **shared_choices(parameters))


def partial_loss(parameters: Parameters) -> Method:
    """Every site has every row and learns from its own classes; the whole head is averaged over all sites.

    The authors' warm-up takes missing as negative, a handicap; here it uses the partial loss too (specs 1.6).
    """
    return Method("partial_loss", known_entries, **shared_choices(parameters))


def pfl(parameters: Parameters) -> Method:
    """Personalised: everything but the head is averaged; each site keeps a head of its own classes."""
    return Method(
        "pfl",
        known_entries,
        sends_head=False,
        rows="own",
        **shared_choices(parameters),
    )


def individual(parameters: Parameters) -> Method:
    """Each site alone, for the same number of epochs; nothing but losses is exchanged."""
    return Method(
        "individual",
        known_entries,
        sends_trunk=False,
        sends_head=False,
        rows="own",
        selection="site",
        **shared_choices(parameters),
    )


def centralised(parameters: CentralisedParameters) -> Method:
    """All images in one place, which no hospital allows: what federation is measured against."""
    return Method(
        "centralised",
        known_entries,
        pooled=parameters.missing,
        **shared_choices(parameters),
    )


def fedavg(parameters: FedAvgParameters) -> Method:
    """McMahan et al., AISTATS 2017: every site annotates every class and everything is averaged."""
    return _full_coverage("fedavg", parameters)


def fedbn(parameters: FedBNParameters) -> Method:
    """Li et al., ICLR 2021: FedAvg with batch normalisation kept at the site."""
    return _full_coverage("fedbn", parameters)


def fedbn_plus(parameters: FedBNPlusParameters) -> Method:
    """FedAvg with batch normalisation frozen at its initial values (arXiv 2303.06180)."""
    return _full_coverage("fedbn_plus", parameters)


def _full_coverage(name: str, parameters: Parameters) -> Method:
    return Method(
        name,
        known_entries,
        needs_full_coverage=True,
        **shared_choices(parameters),
    )
