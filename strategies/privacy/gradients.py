"""DP-SGD: every image's gradient clipped, noise on their sum.

Abadi et al., "Deep Learning with Differential Privacy", CCS 2016, algorithm 1. Batches are Poisson samples, as the
accountants assume: each image is drawn by itself, so that a batch's size varies and may be 0; the sum is divided by
the size expected. Opacus gives the gradient of every image in one pass.

An image's loss is that of a batch of this image alone. Where some labels of a batch are unknown, that weighs its
entries otherwise than the mean over all known entries of the batch does, which no image may influence for another.
"""

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from common.data.augmentation.weak import augment
from common.models.network import SplitNetwork, train_mode
from strategies.local.losses import Loss
from strategies.local.training import Batch, Exercise, Losses
from strategies.privacy.noise import NoiseSource


@dataclass(frozen=True)
class PrivateEpochs:
    """Trains an epoch in the place of :func:`strategies.local.training.train_epoch`.

    Attributes:
        max_norm: Longest length of one image's gradient.
        sample_rate: Probability with which a step looks at an image.
        steps: In an epoch.
        expected: Images of a batch, on average.
    """

    loss: Loss
    max_norm: float
    noise_multiplier: float
    sample_rate: float
    steps: int
    expected: float
    noise: NoiseSource

    def __call__(
        self, network: SplitNetwork, exercise: Exercise, optimizer: torch.optim.Optimizer, generator: torch.Generator
    ) -> Losses:
        """Train; return the mean loss of each batch, 0 where it is empty."""
        frozen = exercise.frozen
        train_mode(network, frozen_batch_norm=frozen.norm, frozen_backbone=frozen.backbone)
        losses = np.zeros(self.steps, np.float32)
        with gradients_by_image(network) as learning:
            for step in range(self.steps):
                rows = self.noise.drawn(len(exercise.examples), self.sample_rate)
                sums, total = self._sums(network, exercise, rows, generator)
                optimizer.zero_grad(set_to_none=True)
                for parameter, value in zip(learning, sums, strict=True):
                    noisy = value + self.noise.like(value, self.noise_multiplier * self.max_norm)
                    # Like the parameter in memory too: a fused step reads both as they lie there.
                    parameter.grad = torch.empty_like(parameter).copy_(noisy / self.expected)
                optimizer.step()
                losses[step] = total / max(len(rows), 1)
        return losses

    def _sums(
        self, network: SplitNetwork, exercise: Exercise, rows: Tensor, generator: torch.Generator
    ) -> tuple[list[Tensor], float]:
        """The sum of clipped gradients, parameter by parameter, and of losses; no more images at a time than a batch
        of the experiment has.
        """
        learning = [parameter for parameter in network.parameters() if parameter.requires_grad]
        sums, total = [torch.zeros_like(parameter) for parameter in learning], 0.0
        for part in torch.split(rows, exercise.spec.batch_size) if len(rows) else ():
            losses = self._losses(network, exercise, part, generator)
            losses.sum().backward()  # type: ignore[no-untyped-call]
            each = [_taken_gradients(parameter) for parameter in learning]
            sums = [before + more for before, more in zip(sums, clipped_sum(each, self.max_norm), strict=True)]
            total += float(losses.detach().sum())
        return sums, total

    def _losses(self, network: SplitNetwork, exercise: Exercise, rows: Tensor, generator: torch.Generator) -> Tensor:
        """Every image's own loss, ``(batch,)``."""
        examples, spec = exercise.examples, exercise.spec
        rows = rows.to(examples.images.device)
        augmented = partial(augment, spec=exercise.augmentation, generator=generator)
        labels, annotated = examples.labels[rows], examples.annotated
        batch = Batch(rows, examples.images[rows], labels, annotated, augmented, spec.precision, generator)
        return losses_by_image(self.loss, batch.logits(network, batch.view()), labels, annotated)


def losses_by_image(loss: Loss, logits: Tensor, labels: Tensor, annotated: Tensor) -> Tensor:
    """What a loss makes of each image alone, ``(batch,)``."""

    def of_one(row: Tensor, known: Tensor) -> Tensor:
        return loss(row[None], known[None], annotated)

    return torch.vmap(of_one)(logits, labels)


def clipped_sum(gradients: Sequence[Tensor], max_norm: float) -> list[Tensor]:
    """Sum over images of gradients, each image's shortened to ``max_norm`` where it is longer.

    Args:
        gradients: One a parameter, ``(images, *its shape)``; an image's length runs over all of them.
    """
    squares = [gradient.flatten(1).square().sum(dim=1) for gradient in gradients]
    lengths = torch.stack(squares).sum(dim=0).sqrt()  # (images,)
    factors = (max_norm / lengths.clamp(min=1e-12)).clamp(max=1.0)
    return [torch.tensordot(factors, gradient, dims=1) for gradient in gradients]


class _Copied(nn.Module):
    """A layer in a form that Opacus 1.6 can take.

    Its output may be overwritten, as some networks do: Opacus hands out a view that may not. Its input lies channels
    first: of a convolution's input in another order Opacus takes the wrong pixels, without a word.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, values: Tensor) -> Tensor:
        copied: Tensor = self.layer(values.contiguous()).clone()
        return copied


@contextlib.contextmanager
def gradients_by_image(network: SplitNetwork) -> Iterator[list[nn.Parameter]]:
    """Have every backward pass leave each image's gradient behind; yields the parameters that learn."""
    from opacus.grad_sample import GradSampleModule

    overwriting = [module for module in network.modules() if getattr(module, "inplace", False)]
    learning = [
        (parent, name, child)
        for parent in network.modules()
        for name, child in parent.named_children()
        if any(parameter.requires_grad for parameter in child.parameters(recurse=False))
    ]
    for module in overwriting:
        setattr(module, "inplace", False)  # noqa: B010 - torch's types do not know it
    for parent, name, layer in learning:
        setattr(parent, name, _Copied(layer))
    hooked = GradSampleModule(network, loss_reduction="sum", strict=False)  # pixel statistics are buffers
    try:
        with warnings.catch_warnings():
            # The first layer's input has no gradient, and needs none.
            warnings.filterwarnings("ignore", "Full backward hook is firing", UserWarning)
            yield [parameter for parameter in network.parameters() if parameter.requires_grad]
    finally:
        hooked.to_standard_module()
        for parent, name, layer in learning:
            setattr(parent, name, layer)
        for module in overwriting:
            setattr(module, "inplace", True)  # noqa: B010


def _taken_gradients(parameter: torch.nn.Parameter) -> Tensor:
    """Each image's gradient of a parameter, and nothing left for the next batch."""
    gradients: Tensor = parameter.grad_sample.float()  # type: ignore[attr-defined]
    parameter.grad_sample = None  # type: ignore[attr-defined]
    parameter.grad = None
    return gradients
