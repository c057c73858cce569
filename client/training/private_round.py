"""A round at a site that counts what it tells: within the budget, with noise, and without figures that none covers."""

import math
from collections.abc import Callable
from dataclasses import replace

from client.gate.time_limit import OutOfTime
from client.site.site import Site
from client.training.evaluate_round import Hold, evaluate_round, hold_nothing
from client.training.figures import of_validation
from client.training.privacy_budget import BudgetEntry, PaidReply, PrivacyBudgetLedger, fingerprint
from client.training.train_round import train_round
from common.config import Plan, plan_of_text
from common.errors import BadInput, Fault
from common.system.seeds import seed_of
from common.wire.errors import WireError
from common.wire.records import EvaluateReply, EvaluateRequest, TrainReply, TrainRequest
from strategies.local.site_method import SiteMethod
from strategies.privacy.noise import NoiseSource, from_the_system, seeded
from strategies.privacy.protection import Protection, Shield, protection_of
from strategies.registry import method_of


def ledger_of(site: Site) -> PrivacyBudgetLedger:
    """The site's."""
    return PrivacyBudgetLedger(site.folder, durable=site.durable)


def spent_by(site: Site) -> dict[str, float | None]:
    """What all runs have cost, for the site's status."""
    ledger, policy = ledger_of(site), site.policy
    if not ledger.entries and policy.epsilon is None:
        return {}
    spent = ledger.epsilon(policy.delta)
    return {"epsilon": spent if math.isfinite(spent) else None, "delta": policy.delta, "budget": policy.epsilon}


def refuse_unaffordable(site: Site, plan: Plan, method: SiteMethod) -> None:
    """Raise if the site cannot take part in one round of this plan.

    Raises:
        BadInput: With the reason.
    """
    protection = protection_of(plan, method, site.train_samples)
    if protection is not None:
        _refuse_beyond_budget(site, protection)


def private_round(site: Site, request: TrainRequest) -> TrainReply:
    """Train a round as its plan says.

    Raises:
        BadInput: If the round would cost more than the site's policy allows.
    """
    plan = plan_of_text(request.plan)
    method = method_of(plan)
    protection = protection_of(plan, method, site.train_samples)
    if protection is None:
        reply = train_round(site, request)
        return reply if site.policy.training_figures else without_training_figures(reply)
    ledger, asked, cost = ledger_of(site), fingerprint(request), protection.cost
    entry = BudgetEntry(request.run, request.round, asked, cost.noise_multiplier, cost.sample_rate, cost.count)
    if (same := ledger.reply_to(asked)) is not None:
        ledger.note_again(entry)
        _note_settled(site, request, plan, same.left)
        return same.reply
    _refuse_beyond_plan(ledger, request, plan, method)
    _refuse_beyond_budget(site, protection)
    kept = site.kept_rows(site.trained_on("train", plan))
    patients = site.train.patients if kept is None else site.train.patients[kept]
    shield = protection.shield(method, _noise(site, plan, request.round), patients)
    section = plan.privacy
    spent = ledger.epsilon_of_run(request.run, section.delta, section.accountant, [cost])
    reply = _trained(site, request, shield, lambda: ledger.note_failure(entry))
    reply = replace(reply, epsilon=spent if math.isfinite(spent) else None)
    if not site.policy.metrics_outside_privacy:
        reply = without_figures(reply, plan.training.epochs)
    elif not site.policy.training_figures:
        reply = without_training_figures(reply)
    left = site.memory(request.run).digest(request.round)
    ledger.note(entry, PaidReply(reply, left))
    _note_settled(site, request, plan, left)
    return reply


def _trained(site: Site, request: TrainRequest, shield: Shield, note_failure: Callable[[], None]) -> TrainReply:
    """Train; an error in the middle may be an answer too, and is noted."""
    try:
        return train_round(site, request, shield)
    except (BadInput, WireError):
        raise  # of the request
    except (Exception, OutOfTime):
        note_failure()
        raise


def _note_settled(site: Site, request: TrainRequest, plan: Plan, left: bytes) -> None:
    """Let later rounds go on from what a training left: it is paid for; a masked one has to be opened in a sum too."""
    if not plan.privacy.secure_aggregation:
        site.memory(request.run).note_settled(request.round, left)


def private_evaluation(site: Site, request: EvaluateRequest, hold: Hold = hold_nothing) -> EvaluateReply:
    """Evaluate, for the site's own sake too; what no noise covers stays at home."""
    plan = plan_of_text(request.plan)
    reply = evaluate_round(site, request, hold)
    if not site.policy.training_figures:
        reply = replace(reply, validation_loss=None, validation_auroc=None, **of_validation({}))
    outside = plan.privacy.level != "none" and not site.policy.metrics_outside_privacy
    return without_test(reply) if outside else reply


def without_figures(reply: TrainReply, epochs: int) -> TrainReply:
    """A reply with nothing in it that depends on the data but what noise covers.

    Args:
        epochs: As the plan says; a site that trains until its loss settles would reveal it by their number.
    """
    untold = without_training_figures(reply)
    return replace(untold, test_images=None, test_correct=None, epochs=epochs, seconds=0.0)


def without_training_figures(reply: TrainReply) -> TrainReply:
    """A reply without losses, and without the AUROC on validation images."""
    return replace(reply, train_loss=None, validation_loss=None, validation_auroc=None)


def without_test(reply: EvaluateReply) -> EvaluateReply:
    """A reply that says that the site was there, and nothing of its data."""
    return EvaluateReply(
        run=reply.run,
        round=reply.round,
        site=reply.site,
        validation_loss=None,
        validation_auroc=None,
        class_names=(),
        auroc=(),
        average_precision=(),
        balanced_accuracy=(),
        positives=(),
        negatives=(),
        model_sha256=reply.model_sha256,
    )


def _refuse_beyond_plan(ledger: PrivacyBudgetLedger, request: TrainRequest, plan: Plan, method: SiteMethod) -> None:
    """Hold a run to the epsilon that its plan states: noise is drawn for so many answers, no matter of which rounds.

    Raises:
        BadInput: If the site has given as many.
    """
    answers, most = sum(entry.run == request.run for entry in ledger.entries), plan.run.rounds + method.ranks_sites
    if plan.privacy.epsilon is not None and answers >= most:
        problem = f"this run's plan has noise for {most} answers, and this site has given them."
        raise BadInput([Fault("run.rounds", problem, "It takes no further part.")])


def _refuse_beyond_budget(site: Site, protection: Protection) -> None:
    budget, delta = site.policy.epsilon, site.policy.delta
    if budget is None:
        return
    after = ledger_of(site).epsilon(delta, [protection.cost])
    if after > budget:
        spent = f"another round would bring what all runs have cost to epsilon {after:.2f}"
        problem = f"{spent}; this site allows {budget:g}."
        raise BadInput([Fault("site.toml: policy.epsilon", problem, "It takes no further part.")])


def _noise(site: Site, plan: Plan, server_round: int) -> NoiseSource:
    if site.simulated:
        return seeded(seed_of(plan.run.seed, server_round, site.name, "noise"))
    return from_the_system()
