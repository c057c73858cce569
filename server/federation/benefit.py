"""Whether each site is better off alone, as the sites say after the run's test: a part of ``summary.json``."""

from collections.abc import Collection
from dataclasses import asdict
from typing import Any

from flwr.serverapp import Grid

from common.metrics.benefit import MODELS, OVER_ALONE, Benefit
from common.metrics.bootstrap import Estimate
from common.models.state import ModelState
from common.wire.records import BenefitReply
from server.federation.accounting import Books
from strategies.rounds.benefit import compared, deadline_s
from strategies.rounds.strategy import FederatedAveraging

NOT_TRAINED = "it trained in no round"
NOT_TESTED = "it did not test the model"


def asked_benefits(
    grid: Grid, strategy: FederatedAveraging, initial: ModelState, tested: Collection[str], books: Books
) -> dict[str, Any]:
    """Ask the sites that tested the model and trained in the run; say of the others why they were not asked.

    Returns:
        Empty where the experiment does not ask for it.
    """
    if not strategy.plan.evaluation.alone:
        return {}
    members, drawn = strategy.sites.members, strategy.participation.sites_per_round
    share = min(drawn / len(members), 1.0) if drawn else 1.0
    seconds = deadline_s(strategy.participation.round_deadline_s, books.round_seconds, share)
    epochs = {site: books.epochs[site] for site in tested if books.epochs[site]}
    came = compared(strategy, grid, initial, epochs, seconds)
    strategy.callbacks.on_absent("benefit", came.absent)
    silent = {site: NOT_TRAINED if site in tested else NOT_TESTED for site in members if site not in epochs}
    found = {site: {"benefit": benefit_of(reply), "reason": ""} for site, reply in came.accepted.items()}
    found |= {site: {"benefit": None, "reason": why} for site, why in {**silent, **came.absent}.items()}
    return dict(sorted(found.items()))


def benefit_of(reply: BenefitReply) -> dict[str, Any] | None:
    """A reply as JSON has it; None where the site's policy tells nothing, or no class could be tested."""
    names, aurocs = reply.class_names, iter(reply.auroc)
    if not names:
        return None
    means = zip(MODELS, reply.mean, reply.mean_low, reply.mean_high, strict=True)
    gains = zip(OVER_ALONE, reply.gain, reply.gain_low, reply.gain_high, strict=True)
    benefit = Benefit(
        {model: {name: next(aurocs) for name in names} for model in MODELS},
        {model: Estimate(value, (low, high)) for model, value, low, high in means},
        {model: Estimate(value, (low, high)) for model, value, low, high in gains},
        "patients" if reply.over_patients else "images",
    )
    return asdict(benefit)
