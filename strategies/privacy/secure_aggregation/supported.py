"""Which methods can do with sums of updates alone."""

from common.config import Plan
from common.errors import Fault
from strategies.base.method import Method

LARGEST_CHANGE = 16.0
"""Where the experiment sets no bound: numbers of an update beyond are cut. The resolution is 1.5e-8."""


def largest_change(plan: Plan, method: Method) -> float:
    """The bound of one number of an update: the experiment's, or the length that updates are clipped to."""
    if plan.privacy.noise == "distributed":
        return plan.privacy.max_update_norm
    return plan.privacy.largest_change or method.parameters.clip_update or LARGEST_CHANGE


def contradictions(method: Method) -> list[Fault]:
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
    return [
        Fault("privacy.secure_aggregation", f"cannot be had with {method.name}: {reason}.", "Leave it out.")
        for reason, holds in reasons.items()
        if holds
    ]
