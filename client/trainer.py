"""The training loop: one for every method, on plain tensors."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.augmentation import AugmentationSpec, augment
from common.config import TrainingSection
from common.inference import autocast, logits_of
from common.metrics import mean_and_sd, per_class
from common.models.network import SplitNetwork, train_mode
from strategies.losses import Loss


@dataclass(frozen=True)
class Examples:
    """Images and labels of one part of a site's data, on its device.

    Attributes:
        images: uint8 ``(n, channels, height, width)``.
        labels: float32 ``(n, rows)``, NaN for unknown.
        annotated: bool ``(rows,)``, the head rows whose class the site annotates.
    """

    images: Tensor
    labels: Tensor
    annotated: Tensor

    def __len__(self) -> int:
        return len(self.images)


@dataclass(frozen=True)
class Frozen:
    """What does not learn: batch normalisation, and the backbone during warm-up."""

    norm: bool = False
    backbone: bool = False


def optimizer_for(network: SplitNetwork, spec: TrainingSection, lr: float) -> torch.optim.Optimizer:
    """The optimiser over the parameters that learn; Adam with Keras' epsilon, as in specs 1.4."""
    learning = [parameter for parameter in network.parameters() if parameter.requires_grad]
    if spec.optimizer == "adam":
        return torch.optim.Adam(learning, lr=lr, eps=1e-7, weight_decay=spec.weight_decay)
    return torch.optim.SGD(learning, lr=lr, momentum=spec.momentum, weight_decay=spec.weight_decay)


def train_epoch(
    network: SplitNetwork,
    examples: Examples,
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    spec: TrainingSection,
    augmentation: AugmentationSpec,
    frozen: Frozen,
    generator: torch.Generator,
) -> float:
    """Train over all examples once, reshuffled; return the mean loss over the batches.

    ``generator`` lives on the CPU and draws order and augmentation, so that these do not depend on the device.
    """
    train_mode(network, frozen_batch_norm=frozen.norm, frozen_backbone=frozen.backbone)
    total, count = torch.zeros((), device=examples.images.device), 0
    for rows in batches(len(examples), spec.batch_size, generator):
        rows = rows.to(examples.images.device)
        images = augment(examples.images[rows].float(), augmentation, generator)  # (batch, channels, height, width)
        with autocast(examples.images.device, spec.precision):
            logits = network(images)  # (batch, rows)
        value = loss(logits.float(), examples.labels[rows], examples.annotated)
        optimizer.zero_grad(set_to_none=True)
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        total += value.detach()
        count += 1
    return float(total / count)


def batches(n: int, size: int, generator: torch.Generator) -> list[Tensor]:
    """Shuffled rows in batches; a last batch of one joins its neighbour, for batch normalisation needs two."""
    parts = list(torch.split(torch.randperm(n, generator=generator), size))
    if len(parts) > 1 and len(parts[-1]) == 1:
        last = parts.pop()
        parts[-1] = torch.cat([parts[-1], last])
    return parts


@dataclass(frozen=True)
class Validation:
    """How good a network is on the validation part; None where there are no images, no labels, or one kind only."""

    loss: float | None = None
    mean_auroc: float | None = None


def validate(network: SplitNetwork, examples: Examples, loss: Loss, spec: TrainingSection) -> Validation:
    """The objective over all examples, and the mean AUROC over the classes the site annotates."""
    if len(examples) == 0 or bool(examples.labels.isnan().all()):
        return Validation()
    logits = logits_of(network, examples.images, spec.precision)
    value = float(loss(logits, examples.labels, examples.annotated))
    if not logits.isfinite().all():
        return Validation(value)
    rows = examples.annotated.nonzero().flatten().tolist()
    names = [network.class_names[row] for row in rows]
    results = per_class(logits[:, rows].cpu().numpy(), examples.labels[:, rows].cpu().numpy(), names)
    return Validation(value, mean_and_sd(one.auroc for one in results.values())[0])


@contextlib.contextmanager
def reproducible(seed: int, threads: int) -> Iterator[torch.Generator]:
    """Fixed threads and seeds inside, the process's own state outside; yields a CPU generator."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    devices = list(range(torch.cuda.device_count()))
    try:
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed)  # dropout draws from the global generators
            yield torch.Generator().manual_seed(seed)
    finally:
        torch.set_num_threads(before)


def optimizer_arrays(network: SplitNetwork, optimizer: torch.optim.Optimizer) -> dict[str, NDArray[np.float32]]:
    """The optimiser's state as ``parameter/key`` arrays, for the site's memory."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in network.named_parameters()}
    return {
        f"{names[parameter]}/{key}": value.detach().cpu().numpy().copy()
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, Tensor)
    }


def restore_optimizer(
    network: SplitNetwork, optimizer: torch.optim.Optimizer, arrays: Mapping[str, NDArray[np.float32]]
) -> None:
    """Put :func:`optimizer_arrays` back, for the parameters that still are there and of that shape."""
    parameters = dict(network.named_parameters())
    for path, array in arrays.items():
        name, _, key = path.rpartition("/")
        parameter = parameters.get(name)
        if parameter is None or (array.ndim and array.shape != tuple(parameter.shape)):
            continue
        device = "cpu" if key == "step" else parameter.device
        optimizer.state[parameter][key] = torch.from_numpy(array.copy()).to(device)
