"""Which methods can do with sums of updates alone."""

from collections.abc import Mapping, Sequence

from common.config import Plan
from common.errors import Fault
from strategies.local.site_method import SiteMethod

MAX_UPDATE_VALUE = 16.0
"""Where the experiment sets no bound: numbers of an update beyond are cut. The resolution is 1.5e-8."""


def max_update_value(plan: Plan, method: SiteMethod) -> float:
    """The bound of one number of an update: the experiment's, or the length that updates are clipped to."""
    if plan.privacy.noise == "distributed":
        return plan.privacy.max_update_norm
    return plan.privacy.max_update_value or method.parameters.clip_update or MAX_UPDATE_VALUE


def alike(sites: Sequence[str], counted: Mapping[str, int], method: SiteMethod) -> list[str]:
    """The sites that can be masked together: all, or where they keep parts of the model, most of those of one past.

    A site that missed a round goes on from other parts than the others do, and a model could be made in which its
    update alone does not vanish in the sum (``client/training/secure_aggregation.py`` has the hospital's half).
    """
    pasts = {site: counted.get(site, 0) if method.keeps_local_parts else 0 for site in sites}
    most = max(sorted(set(pasts.values()), reverse=True), key=list(pasts.values()).count, default=0)
    return [site for site in sites if pasts[site] == most]


def contradictions(method: SiteMethod) -> list[Fault]:
    """Why this method cannot do with sums of updates alone; empty where it can."""
    reasons = {
        "there is one pseudo-site": method.pooled != "no",
        "the model is passed on from site to site": method.sequential,
        "every site trains by itself, and nothing is summed": method.shares_nothing,
        "it weighs each update by what that update is": method.weighs_updates,
        "a robust mean looks at each update by itself (method.mean)": method.parameters.mean is not None,
        "its statistics would travel beside the update, unmasked": bool(method.traffic.statistics),
        "masked numbers take the same room however coarse they are (method.compress_update)": (
            method.parameters.compress_update != "float32"
        ),
    }
    found = [
        Fault("privacy.secure_aggregation", f"cannot be had with {method.name}: {reason}.", "Leave it out.")
        for reason, holds in reasons.items()
        if holds
    ]
    if method.parameters.weighting != "uniform" and not found:
        problem = "is needed where updates are masked: known weights that differ tell in a sum which part is whose."
        found.append(Fault("method.weighting", f'"uniform" {problem}', 'Set method.weighting = "uniform".'))
    return found
