"""The training loop of all methods, at hospitals and at a coordinator that trains; it knows no messages."""

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from polyclinic.common.config import TrainingSection
from polyclinic.common.metrics.auroc import compute_mean_auroc
from polyclinic.common.metrics.segmentation import compute_mean_dice
from polyclinic.common.models.gpu import GRAPH_DEVICES, is_data_parallel, use_cuda_graphs
from polyclinic.common.models.network import (
    Model,
    SplitNetwork,
    autocast,
    compute_logits,
    logits_to_probabilities,
    set_train_mode,
)
from polyclinic.common.models.segmenting import compare_with_masks
from polyclinic.common.models.state import read_model_state, write_model_state
from polyclinic.common.models.zoo.spec import is_external_network
from polyclinic.common.plugins import PLUGIN_PREFIX
from polyclinic.common.wire.records import ModelGroups
from polyclinic.data.base.spec import AugmentationSpec
from polyclinic.data.images.augmentation import augment_images_weakly, augment_images_with_labels
from polyclinic.data.images.pixels import ImageTensors
from polyclinic.strategies.local.early_stopping import EarlyStopping
from polyclinic.strategies.local.losses import BatchWeight, LossFunction, count_known_labels
from polyclinic.strategies.local.objective import LabelledExamples, Losses, Objective
from polyclinic.strategies.local.optimisation import make_gradient_scaler

CPU = torch.device("cpu")


@dataclass(frozen=True)
class FrozenNetworkParts:
    """Flags for the parts of a network that are not trained: batch normalisation, or the backbone during warm-up."""

    norm: bool = False
    backbone: bool = False


@dataclass(frozen=True)
class MiniBatch:
    """The :class:`polyclinic.strategies.local.objective.Batch` that the training loop makes.

    Attributes:
        augmented: Function that returns a random view of images; None without augmentation.
        arithmetic: Context of :func:`polyclinic.common.models.network.autocast` in which the network computes.
    """

    rows: Tensor
    images: Tensor
    labels: Tensor
    annotated: Tensor
    augmented: Callable[[Tensor], Tensor] | None
    arithmetic: contextlib.AbstractContextManager[None]
    generator: torch.Generator

    def view(self) -> Tensor:
        images = self.images.float()
        return images if self.augmented is None else self.augmented(images)

    def logits(self, model: Model, view: Tensor) -> Tensor:
        with self.arithmetic:
            return model(view).float()


@dataclass(frozen=True)
class TrainingTask:
    """The data and settings of local training, equal for all epochs of a round.

    Attributes:
        epoch: Function that trains one epoch; None for :func:`train_epoch`.
        batch_weight: Function that weighs the batches whose gradients one optimiser step adds up.
    """

    examples: LabelledExamples
    objective: Objective
    spec: TrainingSection
    augmentation: AugmentationSpec
    frozen: FrozenNetworkParts
    epoch: "EpochTrainer | None" = None
    batch_weight: BatchWeight = count_known_labels


class EpochTrainer(Protocol):
    """A function that trains one epoch and can replace :func:`train_epoch`."""

    def __call__(
        self,
        network: SplitNetwork,
        task: TrainingTask,
        optimizer: torch.optim.Optimizer,
        generator: torch.Generator,
    ) -> Losses: ...


def train_epoch(
    network: SplitNetwork, task: TrainingTask, optimizer: torch.optim.Optimizer, generator: torch.Generator
) -> Losses:
    """Train one epoch in newly shuffled order; return the loss of every batch.

    Args:
        generator: CPU generator for order and augmentation, so that these do not depend on the device.
    """
    examples = task.examples.draw_patches(generator)
    spec = task.spec
    frozen = task.frozen
    set_train_mode(network, frozen_batch_norm=frozen.norm, frozen_backbone=frozen.backbone)
    device = examples.images.device
    augmented = None
    if task.augmentation != AugmentationSpec():
        augmented = partial(augment_images_weakly, spec=task.augmentation, generator=generator)
    losses = []
    parts = shuffle_into_batches(len(examples), spec.batch_size, generator, device)
    scaler = make_gradient_scaler(device, spec.precision)
    arithmetic = autocast(device, spec.precision)
    # No CUDA graph for an external network: it would repeat the first decisions of the network's Python code. None for
    # gradients summed over batches or stored by a plug-in's optimiser: the next batch's graph may overwrite them.
    steps = spec.gradient_accumulation_steps
    shares = compute_batch_shares(task, examples, parts) if steps > 1 else None
    as_graph = (
        device.type in GRAPH_DEVICES
        and steps == 1
        and not is_external_network(network.spec.architecture)
        and not spec.optimizer.startswith(PLUGIN_PREFIX)
        and not is_data_parallel(network.backbone)
    )
    graphs: contextlib.AbstractContextManager[Callable[[], None] | None] = contextlib.nullcontext()
    if as_graph:
        graphs = use_cuda_graphs(network.backbone, device, spec.precision)
    with graphs as begin_step:
        for number, (rows, images) in enumerate(zip(parts, examples.prefetch_images(parts), strict=True), start=1):
            if begin_step is not None:
                begin_step()
            labels = examples.get_labels(rows)
            if examples.masks is not None and augmented is not None:
                images, labels = augment_images_with_labels(images.float(), labels, task.augmentation, generator)
            of_batch = None if examples.masks is not None else augmented
            batch = MiniBatch(
                examples.find_images(rows), images, labels, examples.annotated, of_batch, arithmetic, generator
            )
            value = task.objective(network, batch)
            if (number - 1) % steps == 0:
                optimizer.zero_grad(set_to_none=True)
            added = value if shares is None else value * shares[number - 1]
            scaler.scale(added).backward()  # type: ignore[no-untyped-call]
            if number % steps == 0 or number == len(parts):
                if spec.clip_gradients is not None:
                    scaler.unscale_(optimizer)
                    clip_grad_norm_(network.parameters(), spec.clip_gradients)
                scaler.step(optimizer)
                scaler.update()
            losses.append(value.detach())
    return torch.stack(losses).cpu().numpy()


def compute_batch_shares(task: TrainingTask, examples: LabelledExamples, parts: Sequence[Tensor]) -> Tensor:
    """Return each batch's share of the loss of its optimiser step, float32 ``(batches,)``; a step's shares sum to 1.

    A batch's loss is a mean over its known labels. The mean over several batches weighs each by its known labels, so
    that the step is that of one large batch. The last step of an epoch may have fewer batches than the others.

    Args:
        examples: Those of the epoch: images, or patches of them.
        parts: Indices of the examples of each batch, in the order of training.
    """
    steps = task.spec.gradient_accumulation_steps
    weights = torch.stack([task.batch_weight(examples.get_labels(rows), examples.annotated) for rows in parts])
    shares = [
        window / window.sum().clamp(min=torch.finfo(torch.float32).tiny) for window in torch.split(weights, steps)
    ]
    return torch.cat(shares)


@dataclass(frozen=True)
class LocalTrainingMetrics:
    """Figures of a round's local training.

    Attributes:
        losses: Losses of every batch of all epochs.
        last_loss: Mean training loss of the last epoch, or with early stopping of the epoch whose weights are returned.
        epochs: Number of epochs that were trained.
    """

    losses: Losses
    last_loss: float
    epochs: int


def train_fixed_epochs(
    network: SplitNetwork, task: TrainingTask, optimizer: torch.optim.Optimizer, generator: torch.Generator
) -> LocalTrainingMetrics:
    """Train the experiment's number of epochs."""
    epoch = task.epoch or train_epoch
    every = list[Losses]()
    for _ in range(task.spec.epochs):
        every.append(epoch(network, task, optimizer, generator))
    return LocalTrainingMetrics(np.concatenate(every), float(every[-1].mean()), len(every))


@dataclass(frozen=True)
class EarlyStopCriterion:
    """The data, loss and rule that decide when local training stops.

    Attributes:
        validation: The validation images; None to decide by each epoch's training loss, so that the stopping epoch
            reveals nothing about validation images.
    """

    validation: LabelledExamples | None
    loss: LossFunction
    early_stopping: EarlyStopping

    @property
    def lacks_validation_labels(self) -> bool:
        """Return True if validation images should decide but none of them has a known label."""
        return self.validation is not None and not self.validation.has_known_labels

    def compute_loss_after_epoch(self, network: SplitNetwork, losses: Losses, spec: TrainingSection) -> float:
        """Return the loss after which training may stop: on the validation images; NaN if they have no known label.

        If there are no validation images in this criterion, return the mean of ``losses``, the epoch's training losses.
        """
        if self.validation is None:
            return float(losses.mean())
        loss = validate_network(network, self.validation, self.loss, spec).loss
        return np.nan if loss is None else loss


def train_until_loss_settles(
    network: SplitNetwork,
    task: TrainingTask,
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator,
    criterion: EarlyStopCriterion,
) -> LocalTrainingMetrics:
    """Train until the loss settles, and restore the weights of the lowest loss (docs/papers.md#unifed-settled).

    If validation images should decide but none has a known label, train the experiment's number of epochs.
    """
    if criterion.lacks_validation_labels:
        return train_fixed_epochs(network, task, optimizer, generator)
    epoch = task.epoch or train_epoch
    every = list[Losses]()
    settling = criterion.early_stopping
    best = read_model_state(network)
    while not settling.stopped:
        every.append(epoch(network, task, optimizer, generator))
        settling = settling.after(criterion.compute_loss_after_epoch(network, every[-1], task.spec))
        if settling.best_epoch == settling.epochs - 1:
            best = read_model_state(network)
    write_model_state(network, trunk=best.trunk, norm=best.norm, head=best.head)
    if not np.isfinite(every[-1]).all():  # diverged after its best point: momentum would never be finite again
        optimizer.state.clear()
    return LocalTrainingMetrics(np.concatenate(every), float(every[settling.best_epoch].mean()), len(every))


def shuffle_into_batches(n: int, size: int, generator: torch.Generator, device: torch.device = CPU) -> Sequence[Tensor]:
    """Return the indices 0 to ``n - 1``, shuffled and split into batches.

    If the last batch has one image, the image joins the batch before, because batch normalisation needs two images.
    """
    parts = list(torch.split(torch.randperm(n, generator=generator), size))
    if len(parts) > 1 and len(parts[-1]) == 1:
        last = parts.pop()
        parts[-1] = torch.cat([parts[-1], last])
    if device.type == "cpu" or not parts:
        return parts
    return torch.split(torch.cat(parts).to(device), [len(part) for part in parts])  # each transfer waits for the GPU


def count_batches(n: int, size: int) -> int:
    """Return the number of batches of :func:`shuffle_into_batches`."""
    batches = -(-n // size)
    has_single_image_left = batches > 1 and n - (batches - 1) * size == 1
    return batches - 1 if has_single_image_left else batches


@dataclass(frozen=True)
class ValidationMetrics:
    """Loss and mean AUROC of a network on validation images; in segmentation the mean Dice is in place of the AUROC.

    Attributes:
        loss: Mean loss; None if no label is known.
        mean_auroc: Mean over classes; None if no class has both positives and negatives, or an output is not finite.
            In segmentation the mean over classes of the mean Dice over patients; None if no class is outlined.
    """

    loss: float | None = None
    mean_auroc: float | None = None


def validate_network(
    network: SplitNetwork,
    examples: LabelledExamples,
    loss: LossFunction,
    spec: TrainingSection,
    but: Collection[str] = (),
) -> ValidationMetrics:
    """Return the loss over all examples, and the mean AUROC over the annotated classes except those in ``but``."""
    if not examples.has_known_labels:
        return ValidationMetrics()
    if examples.masks is not None:
        return _validate_segmentation(network, examples, loss, spec, but)
    logits = compute_logits(network, examples.images, spec.precision)
    return judge_logits(network, logits, examples, loss, but)


def _validate_segmentation(
    network: SplitNetwork, examples: LabelledExamples, loss: LossFunction, spec: TrainingSection, but: Collection[str]
) -> ValidationMetrics:
    """Return the mean loss over the known pixels, and the mean Dice over the annotated classes except those in ``but``.

    The images are read in batches, because the logits of all pixels would not fit into memory.
    """
    assert isinstance(examples.images, ImageTensors), type(examples.images)
    assert examples.masks is not None
    assert examples.patients is not None

    def compute_batch_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return loss(logits, labels, examples.annotated), count_known_labels(labels, examples.annotated)

    compared = compare_with_masks(
        network, examples.images, examples.masks, examples.labels, spec.precision, loss=compute_batch_loss
    )
    if compared.loss is None or not np.isfinite(compared.loss):
        return ValidationMetrics(compared.loss)
    is_counted = examples.annotated.cpu().numpy()
    columns = [c for c, name in enumerate(network.class_names) if is_counted[c] and name not in but]
    return ValidationMetrics(compared.loss, compute_mean_dice(compared, examples.patients, columns))


def judge_logits(
    network: SplitNetwork,
    logits: Tensor,
    examples: LabelledExamples,
    loss: LossFunction,
    but: Collection[str] = (),
) -> ValidationMetrics:
    """Return the figures of :func:`validate_network` for logits ``(n, rows)`` that are already computed."""
    if not examples.has_known_labels:
        return ValidationMetrics()
    value = float(examples.simplify_loss(loss)(logits, examples.labels, examples.annotated))
    if not logits.isfinite().all():
        return ValidationMetrics(value)
    counted = examples.annotated.clone()
    for name in set(but).intersection(network.class_names):
        counted[network.class_names.index(name)] = False
    rows = counted.nonzero().flatten()
    scores = logits_to_probabilities(logits, network.spec.task)[:, rows].cpu().numpy()
    return ValidationMetrics(value, compute_mean_auroc(scores, examples.labels[:, rows].cpu().numpy()))


@contextlib.contextmanager
def use_thread_count(threads: int) -> Iterator[None]:
    """Let torch compute with this number of CPU threads inside the context; restore the number afterwards.

    By default torch uses all cores even to copy a small array, and the idle threads then burn the CPU time of training.
    """
    before = torch.get_num_threads()
    if before == threads:
        yield
        return
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def make_training_reproducible(seed: int, threads: int) -> Iterator[torch.Generator]:
    """Fix thread count and seeds inside the context, which yields a seeded CPU generator; restore both afterwards."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    with use_thread_count(threads), torch.random.fork_rng(devices):
        # Dropout draws from the global generators. torch.manual_seed, without a GPU, notes a stack trace each time.
        torch.default_generator.manual_seed(seed)
        if devices:
            torch.cuda.manual_seed_all(seed)
        yield torch.Generator().manual_seed(seed)


def refuse_diverged_training(trained: ModelGroups, loss: float) -> None:
    """Check that the trained values, or the update, and the loss are finite, so that a diverged round is not stored.

    Raises:
        FloatingPointError: With advice, if any is not finite.
    """
    if not trained.is_finite or not np.isfinite(loss):
        problem = "training diverged: not all numbers are finite."
        raise FloatingPointError(f"{problem} A lower training.lr usually helps.")
