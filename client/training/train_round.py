"""The hospital's half of a round: evaluate what came, train, answer with new minus received."""

import time
from dataclasses import replace
from functools import partial

import torch

from client.site.site import Site
from client.training.figures import covers_local_parts, validation_figures_leave
from client.training.model_and_images import Work, unpack
from client.training.personal_parts import Kept, keep
from client.training.trained_here import (
    Answer,
    TrainedHere,
    judged_here,
    own_statistics,
    situation_of,
    trained_or_nothing,
)
from common.models.network import unfreeze
from common.models.state import Head, ModelState, read_state, write_state
from common.system.seeds import seed_of
from common.wire.bounds import loss_told
from common.wire.records import Groups, TrainReply, TrainRequest
from strategies.local.objective import LocalRound
from strategies.local.optimisation import optimizer_for, rate_factor, restore_optimizer
from strategies.local.site_method import SiteMethod
from strategies.local.training import (
    Epoch,
    Examples,
    StopCriterion,
    Trained,
    plain,
    reproducible,
    train,
    train_epoch,
    train_until_settled,
    validate,
)
from strategies.local.updates import clipped, compressed
from strategies.privacy.protection import BARE, Shield


def train_round(site: Site, request: TrainRequest, shield: Shield = BARE) -> TrainReply:
    """Take part in one round; the site's memory of it is on disk before the answer leaves."""
    began = time.monotonic()
    work = unpack(site, request)
    hides = work.plan.privacy.secure_aggregation or shield.reply is not None
    trained = partial(_trained, work, request, shield, hides=hides)
    ((found, told), tally), result = trained_or_nothing(work, request, trained, hides=hides)
    update = Groups() if request.ranks else update_of(work, result.state)
    statistics = result.statistics
    if shield.reply is not None:
        update, statistics = shield.reply(update, statistics)
    update, unsent = compressed(update, work.memory.unsent, work.method.parameters.compress_update)
    if not request.ranks:
        keep(work, request, found, result.state, Kept(result.optimizer, result.notes, unsent))
    return TrainReply(
        run=request.run,
        round=request.round,
        site=site.name,
        train_samples=site.train_samples,
        train_loss=None if covers_local_parts(work) else loss_told(result.last_loss),
        validation_loss=loss_told(told.loss),
        validation_auroc=told.mean_auroc,
        seconds=0.0 if work.plan.privacy.secure_aggregation else time.monotonic() - began,
        update=update,
        epochs=result.epochs,
        statistics=statistics,
        arithmetic=site.computes_as(work.plan),
        **tally,
    )


def _trained(work: Work, request: TrainRequest, shield: Shield, *, hides: bool) -> Answer:
    """StopCriterion the received model, then train it; every random number is drawn from the round's own seed.

    Args:
        hides: Whether masks or noise on the update have to hide that training diverged.
    """
    site, plan, network = work.site, work.plan, work.network
    seed, masked = seed_of(plan.run.seed, request.round, site.name), plan.privacy.secure_aggregation
    with reproducible(seed, plan.training.threads) as generator:
        validation = work.examples("validation")
        chosen_on = validation if validation_figures_leave(work) else None  # see StopCriterion
        judged = judged_here(work, validation)
        local = work.method.local_round(situation_of(work, request))
        # Sites that mask together do the same; what each counts for itself is the coordinator's word.
        if (request.round == 1) if masked else (request.counted == 0):
            warm_up(work, chosen_on, generator)
        trained, optimizer = fine_tune(work, request, local, chosen_on, generator, shield.epoch)
        noisy_steps = shield.epoch is not None and not site.simulated  # they have to hide it, too
        instead = site.tell if hides or noisy_steps else None
        state = shield.outcome(network, work.received, trained.last_loss, optimizer, instead)
        statistics = own_statistics(work, local, trained.losses)
    kept = local.notes(network)
    return judged, TrainedHere(state, trained.last_loss, trained.epochs, optimizer, kept, statistics)


def warm_up(work: Work, validation: Examples | None, generator: torch.Generator) -> None:
    """Train neck and head with the backbone frozen; keep the epoch with the lowest loss (specs 1.4)."""
    spec, method, network = work.plan.training, work.method, work.network
    if not method.warm_up.epochs:
        return
    optimizer = optimizer_for(network, spec, method.warm_up.lr)
    minimised = method.training_loss(work.examples("train"), spec)
    exercise = work.exercise(LocalRound(plain(minimised)), backbone_frozen=True)
    best, best_loss = read_state(network), float("inf")
    for _ in range(method.warm_up.epochs):
        losses = train_epoch(network, exercise, optimizer, generator)
        loss = validate(network, validation, method.loss, spec).loss if validation is not None else float(losses.mean())
        if loss is None or loss < best_loss:
            best, best_loss = read_state(network), best_loss if loss is None else loss
    write_state(network, trunk=best.trunk, norm=best.norm, head=best.head)


def fine_tune(
    work: Work,
    request: TrainRequest,
    local: LocalRound,
    validation: Examples | None,
    generator: torch.Generator,
    epoch: Epoch | None = None,
) -> tuple[Trained, torch.optim.Optimizer]:
    """Train the local epochs of a round: as many as the plan says, until the loss settles, or one."""
    spec, method, network = work.plan.training, work.method, work.network
    unfreeze(network)
    factor = local.lr_factor * rate_factor(spec, request.round, work.plan.run.rounds)
    optimizer = optimizer_for(network, spec, spec.lr * factor)
    if work.plan.keeps_optimizer:
        restore_optimizer(network, optimizer, work.memory.optimizer)
    exercise = work.exercise(local, epoch=epoch)
    if request.ranks:
        once = replace(exercise, spec=spec.model_copy(update={"epochs": 1}))
        return train(network, once, optimizer, generator), optimizer
    if method.settling is None:
        return train(network, exercise, optimizer, generator), optimizer
    judge = StopCriterion(validation, method.loss, method.settling)
    return train_until_settled(network, exercise, optimizer, generator, judge), optimizer


def update_of(work: Work, trained: ModelState) -> Groups:
    """New minus received, for the groups and rows that the method averages, clipped if it says so."""
    method = work.method
    update = difference(trained, work.received, method, work.site.declaration.canonical)
    return update if (longest := method.parameters.clip_update) is None else clipped(update, longest)


def difference(trained: ModelState, received: ModelState, method: SiteMethod, annotated: tuple[str, ...]) -> Groups:
    """New minus received, for the groups and head rows that the method averages."""
    sent = method.rows_sent(trained.head.class_names, annotated)
    now, before = trained.head.rows(sent), received.head.rows(sent)
    head = Head(sent, now.weight - before.weight, now.bias - before.bias)
    return Groups(
        trained.trunk - received.trunk if method.traffic.trunk else None,
        trained.norm - received.norm if method.sends_norm else None,
        head if method.traffic.head else None,
    )
