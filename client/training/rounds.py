"""The hospital's half of a round: evaluate what came, train, answer with new minus received."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TypedDict

import numpy as np
import torch

from client.site.disclosure import few_of_rows, told_count, told_metrics, told_statistics
from client.site.site import Site
from client.site.site_state import Memory, MemoryFolder
from client.training.network_cache import empty_network
from client.training.score_release import NOTHING_TOLD, ToldScores, told_scores
from common.config import Plan
from common.data.base.image_set import ImageSet
from common.errors import quoted
from common.metrics.multi_label import ClassMetrics, per_class
from common.models.inference import label_matrix, scores_of
from common.models.network import SplitNetwork
from common.models.saved import save_model
from common.models.state import Head, ModelState, layout_of, read_state, state_sha256, write_state
from common.system.seeds import seed_of
from common.wire.bounds import loss_told
from common.wire.errors import WireError
from common.wire.records import UNKNOWN_COUNT, Arrays, EvaluateReply, EvaluateRequest, Groups, TrainReply, TrainRequest
from strategies.base.method import Method
from strategies.local.clipping import clipped
from strategies.local.compression import compressed
from strategies.local.objective import LocalRound, Situation
from strategies.local.training import (
    Epoch,
    Examples,
    Exercise,
    Frozen,
    Judge,
    Trained,
    Validation,
    examples_of,
    optimizer_arrays,
    optimizer_for,
    plain,
    refuse_diverged,
    reproducible,
    restore_optimizer,
    train,
    train_epoch,
    train_until_settled,
    validate,
)
from strategies.privacy.updates import NoisyReply
from strategies.registry import method_of


@dataclass(frozen=True)
class Work:
    """One request, unpacked: who does what with which network.

    Attributes:
        received: The model as sent, with the parts that never left this site put back.
    """

    site: Site
    plan: Plan
    method: Method
    network: SplitNetwork
    received: ModelState
    folder: MemoryFolder
    memory: Memory
    _examples: dict[str, Examples] = field(default_factory=dict)

    def examples(self, part: str) -> Examples:
        """Images of ``train`` or ``validation`` with the labels of the rows the network has; made once a request."""
        if part not in self._examples:
            images: ImageSet = getattr(self.site, part)
            self._examples[part] = examples_of(images, self.site.pixels(part), self.network.class_names)
        return self._examples[part]

    def exercise(self, local: LocalRound, *, backbone_frozen: bool = False, epoch: Epoch | None = None) -> Exercise:
        """What is trained on, and how."""
        frozen = Frozen(norm=self.method.frozen_norm, backbone=backbone_frozen)
        examples, plan = self.examples("train"), self.plan
        return Exercise(examples, local.objective, plan.training, plan.augmentation, frozen, epoch)


@dataclass(frozen=True)
class Shield:
    """What makes a round private; nothing where both are None.

    Attributes:
        epoch: Trains an epoch.
        reply: Makes an update and a method's statistics noisy.
    """

    epoch: Epoch | None = None
    reply: NoisyReply | None = None


BARE = Shield()


def unpack(site: Site, request: TrainRequest | EvaluateRequest) -> Work:
    """Fill the network with a request's model and with the parts of it that never left this site.

    Raises:
        WireError: If the request's head rows are not those that this site holds in this method.
    """
    plan = Plan.model_validate_json(request.plan)
    method = method_of(plan)
    own = site.declaration.canonical
    if method.traffic.rows == "own" and request.class_names != own:
        raise WireError(f"the request has head rows {quoted(request.class_names)}, this site has {quoted(own)}.")
    folder = MemoryFolder(site.folder / "memory" / request.run, durable=site.durable)
    memory = folder.recall(request.counted, site.tell, forget=isinstance(request, TrainRequest))
    network = empty_network(plan.model, request.class_names, site.device)
    whole = memory.parts.over(request.model).model()
    received = replace(whole, head=whole.head.rows(request.class_names))
    put(network, Groups.of_model(received))
    return Work(site, plan, method, network, received, folder, memory)


def put(network: SplitNetwork, groups: Groups) -> None:
    """Overwrite the groups that are there."""
    write_state(network, trunk=groups.trunk, norm=groups.norm, head=groups.head)


def train_round(site: Site, request: TrainRequest, shield: Shield = BARE) -> TrainReply:
    """Take part in one round; the site's memory of it is on disk before the answer leaves."""
    began = time.monotonic()
    work = unpack(site, request)
    plan, method, network, received = work.plan, work.method, work.network, work.received
    seed = seed_of(plan.run.seed, request.round, site.name)
    with reproducible(seed, plan.training.threads) as generator:
        validation = work.examples("validation")
        found = validated(work, validation)
        tested = counts_right_images(work) and not method.sequential  # else it is no model of a round
        tally = _tally(work) if tested else NOT_TESTED
        examples, told, notes = work.examples("train"), request.statistics, work.memory.notes
        local = method.local_round(Situation(network, examples, told, notes, request.round, plan.training))
        if request.counted == 0:  # the first round that this site takes part in
            warm_up(work, validation, generator)
        trained, optimizer = fine_tune(work, local, None if request.ranks else validation, generator, shield.epoch)
        state = read_state(network)
        refuse_diverged(state, trained.last_loss)
        few = few_of_rows(site.train, network.class_names, site.policy)
        statistics = told_statistics(
            local.statistics(network, trained.losses), method.traffic.statistics, few, site.policy
        )
    update = Groups() if request.ranks else update_of(work, state, received)
    if shield.reply is not None:
        update, statistics = shield.reply(update, statistics)
    update, unsent = compressed(update, work.memory.unsent, method.parameters.compress_update)
    if not request.ranks:
        keep(work, request, found.loss, received, state, Kept(optimizer, local.notes(network), unsent))
    said = found if site.tells("validation") else Validation()
    return TrainReply(
        run=request.run,
        round=request.round,
        site=site.name,
        train_samples=site.train_samples,
        train_loss=loss_told(trained.last_loss),
        validation_loss=loss_told(said.loss),
        validation_auroc=said.mean_auroc,
        seconds=time.monotonic() - began,
        update=update,
        epochs=trained.epochs,
        statistics=statistics,
        **tally,
    )


def warm_up(work: Work, validation: Examples, generator: torch.Generator) -> None:
    """Train neck and head with the backbone frozen; keep the epoch with the lowest validation loss (specs 1.4)."""
    spec, method, network = work.plan.training, work.method, work.network
    if not method.warm_up.epochs:
        return
    optimizer = optimizer_for(network, spec, method.warm_up.lr)
    exercise = work.exercise(LocalRound(plain(method.loss)), backbone_frozen=True)
    best, best_loss = read_state(network), float("inf")
    for _ in range(method.warm_up.epochs):
        train_epoch(network, exercise, optimizer, generator)
        loss = validate(network, validation, method.loss, spec).loss
        if loss is None or loss < best_loss:
            best, best_loss = read_state(network), best_loss if loss is None else loss
    write_state(network, trunk=best.trunk, norm=best.norm, head=best.head)


def validated(work: Work, validation: Examples) -> Validation:
    """How good the network is on the validation part; no class of few patients counts in the AUROC."""
    hidden = work.site.hides("validation")
    return validate(work.network, validation, work.method.loss, work.plan.training, hidden)


def fine_tune(
    work: Work,
    local: LocalRound,
    validation: Examples | None,
    generator: torch.Generator,
    epoch: Epoch | None = None,
) -> tuple[Trained, torch.optim.Optimizer]:
    """Train the local epochs of a round: as many as the experiment says, or until the validation loss settles.

    Args:
        validation: None for the one epoch of a ranking.
    """
    spec, method, network = work.plan.training, work.method, work.network
    network.requires_grad_(True)
    optimizer = optimizer_for(network, spec, spec.lr * local.lr_factor)
    if not spec.reset_optimizer:
        restore_optimizer(network, optimizer, work.memory.optimizer)
    exercise = work.exercise(local, epoch=epoch)
    if validation is None:
        once = replace(exercise, spec=spec.model_copy(update={"epochs": 1}))
        return train(network, once, optimizer, generator), optimizer
    if method.settling is None:
        return train(network, exercise, optimizer, generator), optimizer
    judge = Judge(validation, method.loss, method.settling)
    return train_until_settled(network, exercise, optimizer, generator, judge), optimizer


def update_of(work: Work, trained: ModelState, received: ModelState) -> Groups:
    """New minus received, for the groups and rows that the method averages, clipped if it says so."""
    method = work.method
    update = difference(trained, received, method, work.site.declaration.canonical)
    return update if (longest := method.parameters.clip_update) is None else clipped(update, longest)


def difference(trained: ModelState, received: ModelState, method: Method, annotated: tuple[str, ...]) -> Groups:
    """New minus received, for the groups and head rows that the method averages."""
    sent = method.rows_sent(trained.head.class_names, annotated)
    now, before = trained.head.rows(sent), received.head.rows(sent)
    head = Head(sent, now.weight - before.weight, now.bias - before.bias)
    return Groups(
        trained.trunk - received.trunk if method.traffic.trunk else None,
        trained.norm - received.norm if method.sends_norm else None,
        head if method.traffic.head else None,
    )


def own_parts(state: ModelState, method: Method) -> Groups:
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
    validation_loss: float | None,
    received: ModelState,
    trained: ModelState,
    kept: Kept,
) -> None:
    """Write the site's memory of this round, if the method or the optimiser has any."""
    method, memory = work.method, work.memory
    remembers_optimizer = not work.plan.training.reset_optimizer
    if not (method.keeps_local_parts or remembers_optimizer or kept.notes or kept.unsent.trunk is not None):
        return
    before = own_parts(received, method)
    if method.selection == "site":
        memory = _chosen_here(memory, before, request.round - 1, validation_loss)
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


def parts_in_best_round(memory: Memory, request: TrainRequest | EvaluateRequest, now: Groups) -> Groups | None:
    """This site's own parts as they were in the federation's best round; None where a lost disk held them.

    They change only in rounds in which the site counted, so from the last of these on they are what they are ``now``.
    """
    if memory.round == request.counted <= request.best:
        return now
    return {memory.best_round: memory.best, memory.evaluated_round: memory.evaluated}.get(request.best)


def _chosen_here(memory: Memory, parts: Groups, server_round: int, loss: float | None) -> Memory:
    """The site's own choice of the best round, where every site trains for itself."""
    if loss is None or not loss < memory.best_loss:
        return memory
    return replace(memory, best=parts, best_round=server_round, best_loss=loss)


def evaluate_round(site: Site, request: EvaluateRequest) -> EvaluateReply:
    """Answer with the validation loss and, for a test, with the metrics of the site's own classes on its test part."""
    work = unpack(site, request)
    plan, method, network = work.plan, work.method, work.network
    with reproducible(seed_of(plan.run.seed, request.round, site.name, "test"), plan.training.threads):
        validation = work.examples("validation")
        found = validated(work, validation)
        tally = _tally(work) if counts_right_images(work) and not request.test else NOT_TESTED
        if request.test and method.keeps_local_parts:
            found = _put_best(work, request, validation, found)
            save_model(site.folder / "model", network, label_contract_sha256=request.contract)
        metrics, spread = _tested(work) if request.test else ({}, NOTHING_TOLD)
    found = found if site.tells("validation") else Validation()
    reply = _evaluation(request, site.name, found, metrics, state_sha256(read_state(network), layout_of(network)))
    return replace(reply, **tally, **spread)


class TestCounts(TypedDict):
    """How many images of the site's test part there are, and how many the network puts into the right class."""

    test_images: int | None
    test_correct: int | None


NOT_TESTED = TestCounts(test_images=None, test_correct=None)


def counts_right_images(work: Work) -> bool:
    """Whether the experiment asks for that every round, and the site's policy lets it be told."""
    return work.plan.evaluation.test_each_round and work.site.policy.test_metrics


def _tally(work: Work) -> TestCounts:
    test, network = work.site.test, work.network
    if not work.site.tells("test"):
        return NOT_TESTED
    labels = label_matrix(test, network.class_names).nan_to_num().numpy()
    known = labels.any(axis=1)
    if not known.any():
        return TestCounts(test_images=0, test_correct=0)
    scores = scores_of(network, work.site.pixels("test"), work.plan.training.precision)
    right = scores.argmax(axis=1) == labels.argmax(axis=1)
    images, correct = (told_count(int(count), work.site.policy) for count in (known.sum(), (right & known).sum()))
    return TestCounts(test_images=images, test_correct=correct)


def _put_best(work: Work, request: EvaluateRequest, validation: Examples, current: Validation) -> Validation:
    """Put this site's own parts of the best round in place; return how good the network is with them."""
    memory, method = work.memory, work.method
    if method.selection == "site":
        better = current.loss is not None and current.loss < memory.best_loss  # False where the last round diverged
        best = memory.parts if better else memory.best
    else:
        best = parts_in_best_round(memory, request, memory.parts) or memory.parts
    put(work.network, best)
    return validated(work, validation)


def _tested(work: Work) -> tuple[dict[str, ClassMetrics], ToldScores]:
    """Metrics and spread of scores on the test part, for the classes the site annotates and the network has."""
    test, network = work.site.test, work.network
    if not len(test) or not work.site.policy.test_metrics:
        return {}, NOTHING_TOLD
    scores = scores_of(network, work.site.pixels("test"), work.plan.training.precision)
    rows = [row for row, name in enumerate(network.class_names) if name in test.class_names]
    names = tuple(network.class_names[row] for row in rows)
    own, labels = scores[:, rows], label_matrix(test, names).numpy()
    hidden, policy = work.site.hides("test"), work.site.policy
    metrics = {
        name: told_metrics(one, policy, hidden=name in hidden) for name, one in per_class(own, labels, names).items()
    }
    return metrics, told_scores(policy, own, labels, names, hidden) if work.plan.evaluation.pooled else NOTHING_TOLD


def _evaluation(
    request: EvaluateRequest, site: str, found: Validation, metrics: dict[str, ClassMetrics], sha256: str
) -> EvaluateReply:
    names = tuple(metrics)
    column: Callable[[str], tuple[float, ...]] = lambda key: tuple(_columns(metrics, key))  # noqa: E731
    return EvaluateReply(
        run=request.run,
        round=request.round,
        site=site,
        validation_loss=loss_told(found.loss),
        validation_auroc=found.mean_auroc,
        class_names=names,
        auroc=column("auroc"),
        average_precision=column("average_precision"),
        balanced_accuracy=column("balanced_accuracy"),
        positives=tuple(_count(metrics[name].positives) for name in names),
        negatives=tuple(_count(metrics[name].negatives) for name in names),
        model_sha256=sha256,
    )


def _count(count: int | None) -> int:
    return UNKNOWN_COUNT if count is None else count


def _columns(metrics: dict[str, ClassMetrics], key: str) -> Iterator[float]:
    for one in metrics.values():
        value = getattr(one, key)
        yield np.nan if value is None else float(value)
