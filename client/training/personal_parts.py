"""What a site remembers of a round: the parts of its model that never leave it, its optimiser, its notes."""

from dataclasses import dataclass, replace

import torch

from client.site.memory import Memory
from client.training.model_and_images import Work
from common.models.state import ModelState
from common.wire.records import Arrays, Groups, Request, TrainRequest
from strategies.local.optimisation import optimizer_arrays
from strategies.local.site_method import SiteMethod
from strategies.local.training import Validation


def own_parts(state: ModelState, method: SiteMethod) -> Groups:
    """The groups that never leave the site and do change there."""
    return Groups(
        None if method.traffic.trunk else state.trunk,
        None if method.sends_norm or method.frozen_norm else state.norm,
        None if method.traffic.head else state.head,
    )


@dataclass(frozen=True)
class Kept:
    """What else a site remembers of a round: its optimiser, what the method noted down, what rounding left."""

    optimizer: torch.optim.Optimizer
    notes: Arrays
    unsent: Groups


def keep(
    work: Work,
    request: TrainRequest,
    found: Validation,
    trained: ModelState,
    kept: Kept,
) -> None:
    """Write the site's memory of this round, if the method or the optimiser has any."""
    method, memory = work.method, work.memory
    remembers_optimizer = work.plan.keeps_optimizer
    if not (method.keeps_local_parts or remembers_optimizer or kept.notes or kept.unsent.trunk is not None):
        return
    before = own_parts(work.received, method)
    if method.selection == "site":
        memory = _chosen_here(memory, before, request.round - 1, loss_here(work, found))
    elif (best := parts_in_best_round(memory, request, before)) is not None:
        memory = replace(memory, best=best, best_round=request.best)
    work.folder.keep(
        replace(
            memory,
            round=request.round,
            parts=own_parts(trained, method),
            evaluated=before,
            evaluated_round=request.round - 1,
            optimizer=optimizer_arrays(work.network, kept.optimizer) if remembers_optimizer else {},
            notes=kept.notes,
            unsent=kept.unsent,
        )
    )


def parts_in_best_round(memory: Memory, request: Request, now: Groups) -> Groups | None:
    """This site's own parts as they were in the federation's best round; None where a lost disk held them.

    They change only in rounds in which the site counted, so from the last of these on they are what they are ``now``.
    """
    if memory.round == request.counted <= request.best:
        return now
    return {memory.best_round: memory.best, memory.evaluated_round: memory.evaluated}.get(request.best)


def loss_here(work: Work, found: Validation) -> float | None:
    """What counts as the loss of a model where the site chooses by itself; None where the model cannot be judged.

    It is 1 minus the AUROC if that is the run's criterion and the site's validation part shows both kinds of image.
    """
    auroc = found.mean_auroc if work.method.chosen_by(work.plan.evaluation) == "auroc" else None
    return found.loss if auroc is None else 1 - auroc


def _chosen_here(memory: Memory, parts: Groups, server_round: int, loss: float | None) -> Memory:
    """The site's own choice of the best round, where every site trains for itself."""
    if loss is None or not loss < memory.best_loss:
        return memory
    return replace(memory, best=parts, best_round=server_round, best_loss=loss)
