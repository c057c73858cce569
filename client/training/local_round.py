"""The hospital's half of a round: evaluate the received model, train it, and send the update (new minus received).

Noise, masks, limits on metrics, clipping and compression are layers around it; see
:mod:`polyclinic.client.training.layers`.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from polyclinic.client.site.memory import SiteRoundState
from polyclinic.client.site.site import Site
from polyclinic.client.training.task import (
    EvaluateStep,
    LocalTask,
    LocalTrainingResult,
    SiteRoundLayer,
    TrainStep,
    prepare_local_task,
)
from polyclinic.common.errors import WireError, quote_names
from polyclinic.common.metrics.auroc import ClassMetrics
from polyclinic.common.metrics.score_histograms import make_empty_score_counts
from polyclinic.common.models.network import Head, unfreeze_network
from polyclinic.common.models.saved import save_model
from polyclinic.common.models.state import ModelState, read_model_state, write_model_state
from polyclinic.common.system.resources import release_free_memory_of_large_model
from polyclinic.common.wire.bounds import clip_reported_loss
from polyclinic.common.wire.records import (
    UNKNOWN_COUNT,
    Arrays,
    EvaluateReply,
    EvaluateRequest,
    ModelGroups,
    Request,
    TrainReply,
    TrainRequest,
    select_arrays_with_prefix,
)
from polyclinic.strategies.local.objective import ClientContext, LabelledExamples, LocalRound, plain
from polyclinic.strategies.local.optimisation import (
    compute_learning_rate_factor,
    make_optimizer,
    restore_optimizer_state,
    save_optimizer_state,
)
from polyclinic.strategies.local.site_method import SiteMethod
from polyclinic.strategies.local.training import (
    EarlyStopCriterion,
    FrozenNetworkParts,
    LocalTrainingMetrics,
    TrainingTask,
    ValidationMetrics,
    refuse_diverged_training,
    train_epoch,
    train_fixed_epochs,
    train_until_loss_settles,
    validate_network,
)

OWN_MODEL_PREFIX = "own"
"""Prefix of the names under which the state of the own model's optimiser is stored."""


def answer_train_request(site: Site, request: TrainRequest, layers: Sequence[SiteRoundLayer] = ()) -> TrainReply:
    """Evaluate and train the received model; the site's new state is on disk before the reply is returned.

    Args:
        layers: Layers around the training, such as noise and masks, the outermost first.
    """
    began = time.monotonic()
    task = prepare_local_task(site, request, layers)
    # Memory of earlier work is released before the gradients need memory.
    release_free_memory_of_large_model(task.received.trunk.nbytes)
    with task.use_seed_of(request.round, site.name):
        received = task.figures.compute_received_model_metrics(task)
    step: TrainStep = train_received_model
    for layer in reversed(layers):
        step = partial(layer.wrap_training, step)
    result = step(task, request)
    if not request.is_ranking_round:
        write_round_state(task, request, received.own, result)
    return TrainReply(
        run=request.run,
        round=request.round,
        site=site.name,
        train_samples=site.get_train_samples_of_run(request.run),
        train_loss=clip_reported_loss(result.train_loss),
        validation_loss=clip_reported_loss(received.sent.loss),
        validation_auroc=received.sent.mean_auroc,
        seconds=time.monotonic() - began,
        update=result.update,
        epochs=result.epochs,
        statistics=result.statistics,
        test_images=received.test_images,
        test_correct=received.test_correct,
        arithmetic=task.arithmetic,
    )


def train_received_model(task: LocalTask, request: TrainRequest) -> LocalTrainingResult:
    """Train the received model, with all random numbers drawn from the round's own seed.

    Raises:
        FloatingPointError: If training diverged.
        WireError: If the method returns a statistic or a state that it does not declare.
    """
    network = task.network
    with task.use_seed_of(request.round, task.site.name) as generator:
        # The images whose loss decides about an early stop; None for the training loss.
        validation = task.make_labelled_examples("validation") if task.validation_chooses else None
        local = task.method.make_local_round(make_client_context(task, request))
        if task.warms_up:
            warm_up_head(task, validation, generator)
        trained, optimizer = train_local_epochs(task, request, local, validation, generator)
        state = read_model_state(network)
        parts = select_local_parts(state, task.method)
        update = compute_update_to_send(task, request, state)  # overwrites the state, to save memory
        # With noise in each step, no noise protects the loss, so it must not decide anything.
        refuse_diverged_training(update, trained.last_loss if task.epoch is None else 0.0)
        refuse_diverged_training(parts, 0.0)
        statistics = local.statistics(network, trained.losses)
        method_state = local.method_state(network)

    own_optimizer: Arrays = {}
    if local.own_objective is not None:
        parts, own_optimizer = train_own_model(task, request, replace(local, objective=local.own_objective))

    if method_state and not task.method.traits.keeps_method_state:
        raise WireError(f"{task.method.name} stores a state and does not declare it: keeps_method_state = True.")
    if undeclared := statistics.keys() - set(task.method.payload.names):
        raise WireError(f"{task.method.name} does not declare {quote_names(sorted(undeclared))}.")

    return LocalTrainingResult(
        parts=parts,
        train_loss=trained.last_loss,
        epochs=trained.epochs,
        optimizer=optimizer,
        method_state=method_state,
        statistics=statistics,
        update=update,
        own_optimizer=own_optimizer,
    )


def train_own_model(task: LocalTask, request: TrainRequest, local: LocalRound) -> tuple[ModelGroups, Arrays]:
    """Train the site's own model on the same batches as the received model.

    Afterwards the network contains the site's own model.

    Args:
        local: The objective of the site's own model.

    Returns:
        The trained model, and the optimiser's state to store.

    Raises:
        FloatingPointError: If training diverged.
    """
    before = get_local_parts_before_training(task)
    write_model_state(task.network, trunk=before.trunk, norm=before.norm, head=before.head)
    stored = select_arrays_with_prefix(OWN_MODEL_PREFIX, task.round_state.optimizer)
    own_task = replace(task, round_state=replace(task.round_state, optimizer=stored))
    with task.use_seed_of(request.round, task.site.name) as generator:
        trained, optimizer = train_local_epochs(own_task, request, local, None, generator)
    model = ModelGroups.from_model(read_model_state(task.network))
    refuse_diverged_training(model, trained.last_loss)
    if not task.plan.keeps_optimizer_state:
        return model, {}
    state = save_optimizer_state(task.network, optimizer)
    return model, {f"{OWN_MODEL_PREFIX}/{name}": array for name, array in state.items()}


def make_client_context(task: LocalTask, request: TrainRequest) -> ClientContext:
    """Collect the method's inputs for this round: network, images, received statistics and stored state."""
    examples = task.make_labelled_examples("train")
    spec = task.plan.training
    return ClientContext(
        network=task.network,
        examples=examples,
        statistics=request.statistics,
        method_state=task.round_state.method_state,
        round=request.round,
        spec=spec,
        schedule_factor=compute_learning_rate_factor(spec, request.round, task.plan.run.rounds),
    )


def make_training_task(task: LocalTask, local: LocalRound, *, backbone_frozen: bool = False) -> TrainingTask:
    """Collect the data and settings for the training loop.

    Args:
        local: The method's objective for this round.
        backbone_frozen: True to train neck and head only.
    """
    frozen = FrozenNetworkParts(norm=task.method.parts.freezes_batch_norm, backbone=backbone_frozen)
    plan = task.plan
    examples = task.make_labelled_examples("train")
    batch_weight = task.method.make_batch_weight(examples, plan.training)
    return TrainingTask(examples, local.objective, plan.training, plan.augmentation, frozen, task.epoch, batch_weight)


def warm_up_head(task: LocalTask, validation: LabelledExamples | None, generator: torch.Generator) -> None:
    """Train neck and head with a frozen backbone; keep the weights of the epoch with the lowest loss.

    Args:
        validation: Images whose loss decides; None to decide by the epoch's mean training loss.
    """
    spec = task.plan.training
    method = task.method
    network = task.network
    if not method.parameters.warm_up_epochs:
        return
    optimizer = make_optimizer(network, spec, method.parameters.warm_up_lr)
    training_loss = method.choose_training_loss(task.make_labelled_examples("train"), spec)
    training_task = make_training_task(task, LocalRound(plain(training_loss)), backbone_frozen=True)
    best = read_model_state(network)
    best_loss = float("inf")
    for _ in range(method.parameters.warm_up_epochs):
        losses = train_epoch(network, training_task, optimizer, generator)
        loss = (
            validate_network(network, validation, method.loss, spec).loss
            if validation is not None
            else float(losses.mean())
        )
        if loss is None or loss < best_loss:
            best = read_model_state(network)
            best_loss = best_loss if loss is None else loss
    write_model_state(network, trunk=best.trunk, norm=best.norm, head=best.head)


def train_local_epochs(
    task: LocalTask,
    request: TrainRequest,
    local: LocalRound,
    validation: LabelledExamples | None,
    generator: torch.Generator,
) -> tuple[LocalTrainingMetrics, torch.optim.Optimizer]:
    """Train the plan's number of local epochs or, if the method stops early, until the loss settles.

    In round 0, which only ranks the sites by their loss (UniFed), train one epoch.

    Args:
        local: The method's objective and factor of the learning rate for this round.
        validation: Images whose loss must settle; None for the training loss.
    """
    spec = task.plan.training
    method = task.method
    network = task.network
    unfreeze_network(network)
    factor = local.lr_factor * compute_learning_rate_factor(spec, request.round, task.plan.run.rounds)
    optimizer = make_optimizer(network, spec, spec.lr * factor)
    if task.plan.keeps_optimizer_state:
        restore_optimizer_state(network, optimizer, task.round_state.optimizer)
    exercise = make_training_task(task, local)
    if method.early_stopping is not None and not request.is_ranking_round:
        criterion = EarlyStopCriterion(validation, method.loss, method.early_stopping)
        trained = train_until_loss_settles(network, exercise, optimizer, generator, criterion)
    else:
        if request.is_ranking_round:
            exercise = replace(exercise, spec=spec.model_copy(update={"epochs": 1}))
        trained = train_fixed_epochs(network, exercise, optimizer, generator)
    optimizer.zero_grad(set_to_none=True)  # frees memory for the update, which takes as much as the gradients
    release_free_memory_of_large_model(task.received.trunk.nbytes)
    return trained, optimizer


def compute_update_to_send(task: LocalTask, request: TrainRequest, trained: ModelState) -> ModelGroups:
    """Return the update to send; it is empty in round 0, which only ranks the sites by their loss (UniFed).

    Args:
        trained: The trained model, whose memory the update reuses (:func:`compute_model_difference`).
    """
    if request.is_ranking_round:
        return ModelGroups()
    return compute_model_difference(trained, task.received, task.method, task.site.declaration.canonical_names)


def compute_model_difference(
    trained: ModelState, received: ModelState, method: SiteMethod, annotated: tuple[str, ...]
) -> ModelGroups:
    """Return the trained minus the received model, for the model groups and head rows that the method averages.

    The groups are trunk, batch normalisation and head. A group that is not averaged is None.

    Args:
        trained: The trained model. The update overwrites its averaged trunk and batch normalisation, which saves
            the memory of a model; do not use them afterwards.
        annotated: The classes that the site annotates.
    """
    trunk = norm = head = None
    with np.errstate(over="ignore"):  # a difference may overflow to infinity
        if method.payload.trunk:
            trunk = np.subtract(trained.trunk, received.trunk, out=trained.trunk)
        if method.parts.sends_batch_norm:
            norm = np.subtract(trained.norm, received.norm, out=trained.norm)
        if method.payload.head:
            sent = method.parts.select_sent_rows(trained.head.class_names, annotated)
            after = trained.head.select_rows(sent)
            before = received.head.select_rows(sent)
            head = Head(sent, after.weight - before.weight, after.bias - before.bias)
    return ModelGroups(trunk, norm, head)


# ---------------------------------------------------------------------- evaluation


def answer_evaluate_request(
    site: Site, request: EvaluateRequest, layers: Sequence[SiteRoundLayer] = ()
) -> EvaluateReply:
    """Answer a request to evaluate with the validation loss and, if the request asks for a test, metrics of each class.

    Args:
        layers: Layers around the evaluation, such as disclosure limits and masks, the outermost first.
    """
    step: EvaluateStep = evaluate_received_model
    for layer in reversed(layers):
        step = partial(layer.wrap_evaluation, step)
    return step(prepare_local_task(site, request, layers), request)


def evaluate_received_model(task: LocalTask, request: EvaluateRequest) -> EvaluateReply:
    """Evaluate the received model on the validation part, and on the test part if the request asks for it.

    A model that is tested gets the parts that stayed at this site as they were after the best round.
    """
    site = task.site
    figures = task.figures

    def evaluate_and_make_reply() -> EvaluateReply:
        with task.use_seed_of(request.round, site.name, "test"):
            validation = task.validate_current_network()
            if not request.test:
                images, correct = figures.count_correct_test_images(task)
                reply = _make_evaluate_reply(task, request, figures.compute_validation_metrics(task, validation), {})
                return replace(reply, test_images=images, test_correct=correct)
            if task.method.parts.keeps_local_parts:
                load_best_local_parts(task, request, validation)
                validation = task.validate_current_network()
                save_model(
                    site.folder / "model",
                    task.whole,
                    label_contract_sha256=request.contract,
                    pixels=site.pixel_form,
                    private=True,
                )
            metrics, tested = figures.compute_test_metrics(task)
            histograms = {"": tested, "validation_": figures.compute_validation_histograms(task)}
            reply = _make_evaluate_reply(task, request, figures.compute_validation_metrics(task, validation), metrics)
        scores = dict[str, Any]()
        for part, by_class in histograms.items():
            positives = [histogram.positives for histogram in by_class.values()]
            negatives = [histogram.negatives for histogram in by_class.values()]
            scores[f"{part}positive_scores"] = np.concatenate([make_empty_score_counts(), *positives])
            scores[f"{part}negative_scores"] = np.concatenate([make_empty_score_counts(), *negatives])
        validation_classes = tuple(histograms["validation_"])
        return replace(reply, histogram_classes=tuple(tested), validation_classes=validation_classes, **scores)

    reply = figures.run_metric_computation(task, evaluate_and_make_reply, None)
    return reply or _make_evaluate_reply(task, request, ValidationMetrics(), {})


def _make_evaluate_reply(
    task: LocalTask, request: EvaluateRequest, validation: ValidationMetrics, metrics: Mapping[str, ClassMetrics]
) -> EvaluateReply:
    """Make the reply with these metrics; NaN stands for a metric that is not defined."""
    rows = metrics.values()
    plugin_metrics = tuple(next((row.more for row in rows), ()))

    def nan_if_none(value: float | None) -> float:
        return np.nan if value is None else float(value)

    def unknown_count_if_none(value: int | None) -> int:
        return UNKNOWN_COUNT if value is None else value

    # The hash identifies a model with local parts, which only the site has; other models are known to the coordinator.
    names_own_model = request.test and not task.method.parts.has_global_model
    return EvaluateReply(
        run=request.run,
        round=request.round,
        site=task.site.name,
        validation_loss=clip_reported_loss(validation.loss),
        validation_auroc=validation.mean_auroc,
        class_names=tuple(metrics),
        auroc=tuple(nan_if_none(row.auroc) for row in rows),
        average_precision=tuple(nan_if_none(row.average_precision) for row in rows),
        balanced_accuracy=tuple(nan_if_none(row.balanced_accuracy) for row in rows),
        positives=tuple(unknown_count_if_none(row.positives) for row in rows),
        negatives=tuple(unknown_count_if_none(row.negatives) for row in rows),
        model_sha256=task.figures.hash_evaluated_model(task, request) if names_own_model else "",
        metric_names=plugin_metrics,
        metric_values=tuple(nan_if_none(row.more[name]) for row in rows for name in plugin_metrics),
    )


# ---------------------------------------------------------------------- parts that never leave the site


def select_local_parts(state: ModelState, method: SiteMethod) -> ModelGroups:
    """Return the model groups (trunk, batch normalisation, head) that are trained at the site and never leave it."""
    return ModelGroups(
        None if method.payload.trunk else state.trunk,
        None if method.parts.sends_batch_norm or method.parts.freezes_batch_norm else state.norm,
        None if method.payload.head else state.head,
    )


def get_local_parts_before_training(task: LocalTask) -> ModelGroups:
    """Return the model groups that never leave the site, with their values before this round.

    If the method trains a whole model at each site, that model starts as the first received model.
    """
    if not task.method.traits.trains_own_model:
        return select_local_parts(task.received, task.method)
    return task.round_state.parts.fill_missing_model_groups(ModelGroups.from_model(task.received))


def write_round_state(
    task: LocalTask, request: TrainRequest, received: ValidationMetrics, result: LocalTrainingResult
) -> None:
    """Write the site's state after this round, if the run stores one.

    Args:
        received: Validation metrics before training. If each site chooses its own best round, they decide if the local
            parts before training are the best so far.
    """
    method = task.method
    round_state = task.round_state
    if not method.stores_site_state(task.plan):
        return
    before = get_local_parts_before_training(task)
    if method.traits.selection == "site":
        loss = compute_selection_loss(task, received)
        if loss is not None and loss < round_state.best_loss:
            round_state = replace(round_state, best=before, best_round=request.round - 1, best_loss=loss)
    elif (best := find_best_local_parts(round_state, request, before)) is not None:
        round_state = replace(round_state, best=best, best_round=request.best)
    trained = save_optimizer_state(task.network, result.optimizer) if task.plan.keeps_optimizer_state else {}
    task.folder.store_state_of_round(
        replace(
            round_state,
            round=request.round,
            parts=result.parts,
            evaluated=before,
            evaluated_round=request.round - 1,
            optimizer={**trained, **result.own_optimizer},
            method_state=result.method_state,
            unsent=result.unsent,
        )
    )


def load_best_local_parts(task: LocalTask, request: Request, last: ValidationMetrics) -> None:
    """Load the local parts of the best round into the network; if they are not stored, the current local parts.

    Args:
        last: Validation metrics with the current parts. If each site chooses its own best round, the current parts are
            the best if these metrics are better than in all earlier rounds.
    """
    round_state = task.round_state
    if task.method.traits.selection == "site":
        loss = compute_selection_loss(task, last)
        is_better = loss is not None and loss < round_state.best_loss  # False if the last round diverged
        best = round_state.parts if is_better else round_state.best
    else:
        best = find_best_local_parts(round_state, request, round_state.parts) or round_state.parts
    task.forget_logits()
    write_model_state(task.network, trunk=best.trunk, norm=best.norm, head=best.head)


def find_best_local_parts(round_state: SiteRoundState, request: Request, current: ModelGroups) -> ModelGroups | None:
    """Return the local parts of the federation's best round; None if the site has not stored them.

    Local parts change only in rounds in which the site's reply counted. So ``current`` is returned if the site's last
    such round is the best round or an earlier one.

    Args:
        current: The site's current local parts.
    """
    if round_state.round == request.counted <= request.best:
        return current
    return {round_state.best_round: round_state.best, round_state.evaluated_round: round_state.evaluated}.get(
        request.best
    )


def compute_selection_loss(task: LocalTask, validation: ValidationMetrics) -> float | None:
    """Return the loss by which a site chooses its own best round; None without validation labels.

    The loss is 1 minus the AUROC if the run's criterion is the AUROC and the validation part defines one.
    """
    auroc = validation.mean_auroc if task.method.choose_selection_criterion(task.plan.evaluation) == "auroc" else None
    return validation.loss if auroc is None else 1 - auroc
