"""DP-SGD at a site: each image's or each patient's gradient is clipped, and noise is added to the sum.

Abadi et al., "Deep Learning with Differential Privacy", CCS 2016, algorithm 1. Batches are Poisson samples, as the
accountants assume: each image is drawn independently, so a batch may be empty; the sum is divided by the expected size.
Opacus computes the gradient of every image in one pass. For privacy of patients, patients are drawn, and the sum over
all images of a patient is clipped: McMahan, Ramage, Talwar, Zhang, "Learning Differentially Private Recurrent Language
Models", ICLR 2018, with patients instead of users.

The random numbers of augmentation and dropout come from the same secret key as the noise, not from the run's seed,
which the coordinator knows: one more patient would shift the random numbers of all later patients, and the sum would
change by more than one clipped gradient.

A network's behaviour must not depend on the number of images in a batch, because a failure (some layers cannot process
a single image) would reveal if a patient was drawn. So images pass through the network in micro-batches of one size,
filled up with repeated images that do not count. Before that, the network is tried with a micro-batch of zeros, and
with random images and weights.

Each image's loss is computed alone. So with unknown labels the loss of a batch is not the mean over its known entries,
because with that divisor one image could change the weight of another.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from polyclinic.common.config import STEP_NOISE_LEVELS, HospitalPlan
from polyclinic.common.errors import BadInput, Fault
from polyclinic.common.models.network import SplitNetwork, autocast, build_network, set_train_mode
from polyclinic.common.models.zoo.spec import is_external_network
from polyclinic.data.base.spec import AugmentationSpec
from polyclinic.data.images.augmentation import apply_weak_augmentation, count_draws_per_image
from polyclinic.strategies.local.losses import LossFunction
from polyclinic.strategies.local.objective import Losses
from polyclinic.strategies.local.site_method import SiteMethod
from polyclinic.strategies.local.training import MiniBatch, TrainingTask
from polyclinic.strategies.privacy.image_gradients import (
    check_image_gradients_separate,
    check_network_state_constant,
    pop_per_image_gradients,
    record_per_image_gradients,
    refuse_plan_on_error,
    refuse_torch_random_draws,
    replace_dropout_layers,
)
from polyclinic.strategies.privacy.noise import (
    ROUNDING_MARGIN_FACTOR,
    NoiseQuantizationGrid,
    NoiseSource,
    make_secret_noise_source,
)

MAX_MICRO_BATCH_IMAGES = 16
"""Largest number of images that pass through a network at a time."""


def choose_micro_batch_size(batch_size: int) -> int:
    """Return how many images pass through the network at a time, for batches of ``batch_size`` images on average."""
    return min(batch_size, MAX_MICRO_BATCH_IMAGES)


def find_network_privacy_faults(plan: HospitalPlan, method: SiteMethod) -> list[Fault]:
    """Return the faults for which training with noise in each step (DP-SGD) would refuse the plan's network.

    The checks are those of training: random images go through a network of random weights, here two at a time. The
    result is empty if the plan adds no noise in each step, or if the network is not from another package.
    """
    spec = plan.model
    if plan.privacy.level not in STEP_NOISE_LEVELS or not is_external_network(spec.architecture):
        return []
    try:
        network = build_network(spec.model_copy(update={"weights": None}), ("",), seed=0)
        set_train_mode(network, frozen_batch_norm=method.parts.freezes_batch_norm)
        with replace_dropout_layers(network, make_secret_noise_source()), refuse_plan_on_error():
            check_image_gradients_separate(network, 2, shape := spec.input_shape)
            check_network_state_constant(network, 2, shape)
    except BadInput as bad:
        return list(bad.faults)
    return []


@dataclass(frozen=True)
class PrivateEpochTrainer:
    """Trains one epoch with DP-SGD, and replaces :func:`polyclinic.strategies.local.training.train_epoch`.

    Attributes:
        max_norm: Largest length of the gradient of one image, or of one patient.
        sample_rate: Probability with which a step draws an image or a patient.
        steps: Number of steps in an epoch.
        expected: Expected number of images in a batch.
        owners: ``(images,)`` int64, the patient of each image, numbered from 0 without gaps; None protects single
            images.
    """

    loss: LossFunction
    max_norm: float
    noise_multiplier: float
    sample_rate: float
    steps: int
    expected: float
    noise: NoiseSource
    owners: Tensor | None = None

    def __call__(
        self,
        network: SplitNetwork,
        task: TrainingTask,
        optimizer: torch.optim.Optimizer,
        generator: torch.Generator,
    ) -> Losses:
        """Train one epoch; return the mean loss of each batch, 0 if the batch is empty.

        Raises:
            BadInput: If the network mixes images, or draws its own random numbers, which depend on the run's seed.
        """
        frozen = task.frozen
        set_train_mode(network, frozen_batch_norm=frozen.norm, frozen_backbone=frozen.backbone)
        losses = np.zeros(self.steps, np.float32)
        rows = group_image_rows_by_owner(torch.arange(len(task.examples)) if self.owners is None else self.owners)
        device = next(network.parameters()).device
        image = task.examples.images[torch.zeros(1, dtype=torch.int64)]
        with replace_dropout_layers(network, self.noise):
            with refuse_plan_on_error():
                size = choose_micro_batch_size(task.spec.batch_size)
                check_image_gradients_separate(network, size, image.shape[1:])
            with refuse_torch_random_draws(device), record_per_image_gradients(network) as learning:
                with refuse_plan_on_error(), refuse_torch_random_draws(device):  # before any image is seen
                    self._try_network_with_zeros(network, task, learning, generator)
                for step in range(self.steps):
                    numbers = self.noise.draw_poisson_sample(len(rows), self.sample_rate).tolist()
                    drawn = [rows[number] for number in numbers]
                    sums, losses[step] = self._compute_clipped_gradient_sums(network, task, drawn, generator)
                    optimizer.zero_grad(set_to_none=True)
                    for parameter, total in zip(learning, sums, strict=True):
                        noisy = self._noise_grid.add_noise_to_sum(total, self.noise)
                        # In the parameter's memory format, because a fused step reads both in memory order.
                        parameter.grad = torch.empty_like(parameter).copy_(noisy / self.expected)
                    optimizer.step()
        return losses

    @property
    def _noise_grid(self) -> NoiseQuantizationGrid:
        return NoiseQuantizationGrid(self.noise_multiplier * self.max_norm, self.max_norm)

    def _compute_clipped_gradient_sums(
        self, network: SplitNetwork, task: TrainingTask, drawn: Sequence[Tensor], generator: torch.Generator
    ) -> tuple[list[Tensor], float]:
        """Return each parameter's sum of clipped gradients, in whole steps of the noise's grid, and the mean loss.

        Args:
            drawn: For each drawn image, its row; for each drawn patient, the rows of the patient's images.
        """
        learning = [parameter for parameter in network.parameters() if parameter.requires_grad]
        sums = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in learning]
        loss = 0.0
        images = sum(map(len, drawn))
        for pack in split_into_micro_batches(drawn, choose_micro_batch_size(task.spec.batch_size)):
            losses, each = self._compute_gradients_per_patient(network, task, pack, learning, generator)
            loss += losses
            clipped = sum_clipped_gradients(each, self._noise_grid)
            sums = [before + more for before, more in zip(sums, clipped, strict=True)]
            del each  # before the next pack needs as much
        return sums, loss / max(images, 1)

    def _try_network_with_zeros(
        self,
        network: SplitNetwork,
        task: TrainingTask,
        learning: Sequence[nn.Parameter],
        generator: torch.Generator,
    ) -> None:
        """Pass a micro-batch of zeros through the network, so that an unsuitable network fails before it sees images.

        Raises:
            Exception: Any error of the network; :func:`refuse_plan_on_error` converts it.
        """
        examples = task.examples
        size = choose_micro_batch_size(task.spec.batch_size)
        rows = torch.zeros(size, dtype=torch.int64, device=examples.images.device)
        nothing = torch.zeros_like(examples.images[rows])
        arithmetic = autocast(nothing.device, task.spec.precision)
        batch = MiniBatch(rows, nothing, examples.labels[rows], examples.annotated, None, arithmetic, generator)
        batch.logits(network, batch.view()).sum().backward()  # type: ignore[no-untyped-call]
        for parameter in learning:
            pop_per_image_gradients(parameter, len(rows))

    def _compute_gradients_per_patient(
        self,
        network: SplitNetwork,
        task: TrainingTask,
        pack: Sequence[Tensor],
        learning: Sequence[nn.Parameter],
        generator: torch.Generator,
    ) -> tuple[float, list[Tensor]]:
        """Return the sum of a micro-batch's losses, and for each parameter one gradient row per image or patient.

        The number of rows is the micro-batch size; unused rows are 0. The memory must not depend on how many patients a
        micro-batch contains, because running out of memory would reveal that number without noise.

        Args:
            pack: The micro-batch: for each image or patient, the rows of its images in the training data.
            learning: The trained parameters.
        """
        size = choose_micro_batch_size(task.spec.batch_size)
        loss = 0.0
        each = [torch.zeros_like(parameter).repeat(size, *[1] * parameter.dim()) for parameter in learning]
        rows = torch.cat(tuple(pack))
        owner = torch.repeat_interleave(torch.tensor([len(owned) for owned in pack]))
        for part, whose in zip(*(torch.split(numbers, size) for numbers in (rows, owner)), strict=True):
            filled = torch.cat([part, part[-1:].expand(size - len(part))])
            losses = self._compute_loss_per_image(network, task, filled, generator)[: len(part)]
            losses.sum().backward()  # type: ignore[no-untyped-call]
            loss += float(losses.detach().sum())
            for parameter, gradients in zip(learning, each, strict=True):
                by_image = pop_per_image_gradients(parameter, size)[: len(part)]
                gradients.index_add_(0, whose.to(gradients.device), by_image)
        return loss, each

    def _compute_loss_per_image(
        self, network: SplitNetwork, task: TrainingTask, rows: Tensor, generator: torch.Generator
    ) -> Tensor:
        """Run the network on augmented images, and return the loss of each image, ``(batch,)``."""
        examples = task.examples
        spec = task.spec
        rows = rows.to(examples.images.device)
        labels = examples.labels[rows]
        annotated = examples.annotated

        def augment_images(images: Tensor) -> Tensor:
            off = task.augmentation == AugmentationSpec()
            draws = None if off else self.noise.draw_uniform((count_draws_per_image(images), len(images)))
            return images if draws is None else apply_weak_augmentation(images, task.augmentation, draws)

        arithmetic = autocast(rows.device, spec.precision)
        batch = MiniBatch(rows, examples.images[rows], labels, annotated, augment_images, arithmetic, generator)
        return compute_losses_by_image(self.loss, batch.logits(network, batch.view()), labels, annotated)


def compute_losses_by_image(loss: LossFunction, logits: Tensor, labels: Tensor, annotated: Tensor) -> Tensor:
    """Return the loss of each image alone, ``(batch,)``."""

    def compute_loss_of_image(row: Tensor, entries: Tensor) -> Tensor:
        return loss(row[None], entries[None], annotated)

    return torch.vmap(compute_loss_of_image)(logits, labels)


def group_image_rows_by_owner(owners: Tensor) -> tuple[Tensor, ...]:
    """Return for each owner (image or patient) the rows of its images, in the order of the owners' numbers.

    Args:
        owners: The number of each image's owner, ``(images,)``.
    """
    return torch.split(torch.argsort(owners, stable=True), torch.bincount(owners).tolist())


def split_into_micro_batches(drawn: Sequence[Tensor], size: int) -> Iterator[list[Tensor]]:
    """Group the rows of drawn images or patients into micro-batches of at most ``size`` rows.

    A patient with more than ``size`` images is a micro-batch alone.

    Args:
        drawn: For each image or patient, the rows of its images in the training data.
    """
    pack = list[Tensor]()
    held = 0
    for rows in drawn:
        if pack and held + len(rows) > size:
            yield pack
            pack = []
            held = 0
        pack.append(rows)
        held += len(rows)
    if pack:
        yield pack


def sum_clipped_gradients(gradients: Sequence[Tensor], grid: NoiseQuantizationGrid) -> list[Tensor]:
    """Add the gradients of images or patients, each clipped to the grid's largest length.

    A gradient that is not finite counts as 0, because otherwise one image could make the whole sum infinite. A gradient
    1e38 times as long as the bound counts as 0, too.

    Args:
        gradients: Gradients by parameter, each ``(images, *its shape)``; an image's length is over all parameters.
        grid: The noise's grid, which has the largest length.

    Returns:
        For each parameter the sum in whole steps of the grid, float64 of the parameter's shape; the sum is exact.
    """
    by_parameter = [
        torch.linalg.vector_norm(gradient.reshape(len(gradient), -1), dim=1, dtype=torch.float64)
        for gradient in gradients
    ]
    lengths = torch.stack(by_parameter).square().sum(dim=0).sqrt()  # (images,)
    factors = (ROUNDING_MARGIN_FACTOR * grid.longest / lengths.clamp(min=1e-12)).clamp(max=1.0)
    finite = lengths.isfinite()
    # A factor below the smallest normal float32 is too coarse: the result could be too long.
    factors = factors.where(finite & (factors >= torch.finfo(torch.float32).tiny), 0.0).float()
    sums = []
    all_finite = bool(finite.all())
    for gradient in gradients:
        short = gradient * factors.view(-1, *[1] * (gradient.dim() - 1))
        if not all_finite:  # 0 times infinity is no number
            short = short.nan_to_num(0.0, 0.0, 0.0)
        sums.append(grid.round_values_to_grid_steps(short).sum(dim=0, dtype=torch.float64))
    return sums
