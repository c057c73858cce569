"""From pixels to logits, and from labels to the rows of a head: the same on both sides."""

import contextlib
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.data.base.image_set import ImageSet
from common.data.images.pixels import Pixels
from common.models.network import SplitNetwork
from common.models.zoo.spec import Task

EVALUATION_BATCH = 256
Precision = Literal["auto", "float32", "bf16", "fp16", "fastest"]
HALF_ON = ("cuda",)
"""Kinds of device on which all kinds of half precision are used."""
BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})
"""CPUs with one of these have instructions that multiply bfloat16; others emulate it."""
CPU_FACTS = Path("/proc/cpuinfo")


def label_matrix(images: ImageSet, class_names: tuple[str, ...]) -> Tensor:
    """Return labels for these head rows, float32 ``(n, rows)``; NaN for classes the images have no column for."""
    position = {name: column for column, name in enumerate(images.class_names)}
    matrix = torch.full((len(images), len(class_names)), float("nan"))
    for row, name in enumerate(class_names):
        if name in position:
            matrix[:, row] = torch.from_numpy(images.labels[:, position[name]])
    return matrix


@torch.no_grad()
def logits_of(network: SplitNetwork, images: Tensor | Pixels, precision: Precision = "auto") -> Tensor:
    """Return logits ``(n, rows)`` of uint8 images ``(n, channels, height, width)``, in evaluation mode."""
    network.eval()
    parts = []
    for batch in _batches(images):
        with autocast(batch.device, precision):
            parts.append(never_alone(network, batch.float()).float())
    return torch.cat(parts)


@torch.no_grad()
def features_and_logits(
    network: SplitNetwork, images: Tensor | Pixels, precision: Precision = "auto"
) -> tuple[Tensor, Tensor]:
    """Return what the head sees ``(n, features)`` and says ``(n, rows)``, of uint8 images, in evaluation mode."""
    network.eval()
    features = []
    for batch in _batches(images):
        with autocast(batch.device, precision):
            features.append(never_alone(network.features, batch.float()).float())
    seen = torch.cat(features)
    return seen, network.head(seen)


def never_alone(network: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:
    """Apply a network to a batch, and to one image as to two: some layers fail on a single value a channel."""
    return network(batch) if len(batch) > 1 else network(torch.cat([batch, batch]))[:1]


def _batches(images: Tensor | Pixels) -> Iterable[Tensor]:
    return images.batches(EVALUATION_BATCH) if isinstance(images, Pixels) else torch.split(images, EVALUATION_BATCH)


def probabilities(logits: Tensor, task: Task) -> Tensor:
    """Return probabilities ``(n, rows)``: one yes or no a class, or one of the rows an image."""
    return logits.softmax(dim=1) if task == "multi_class" else logits.sigmoid()


def scores_of(network: SplitNetwork, images: Tensor | Pixels, precision: Precision = "auto") -> NDArray[np.float32]:
    """:func:`probabilities` of uint8 images ``(n, channels, height, width)``, on the CPU."""
    scores = probabilities(logits_of(network, images, precision), network.spec.task)
    return scores.cpu().numpy()


def autocast(device: torch.device, precision: Precision) -> contextlib.AbstractContextManager[None]:
    """Compute in the precision of :func:`precision_on`; parameters, sums of losses and steps stay float32."""
    if (kind := precision_on(device.type, precision)) == "float32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=torch.float16 if kind == "fp16" else torch.bfloat16)


def precision_on(device: str, precision: Precision) -> Literal["float32", "bf16", "fp16"]:
    """Return what a precision means on ``cpu`` or ``cuda``.

    ``auto`` is bfloat16 on a GPU and float32 on a CPU, so that a CPU's runs are the same on each. ``bf16`` is float32
    on a CPU without instructions for it, ``fp16`` on any CPU. ``fastest`` has to be chosen by measurement before it
    gets here (:mod:`strategies.local.arithmetic`); where nobody has, it is ``auto``.
    """
    if device in HALF_ON and precision != "float32":
        return "fp16" if precision == "fp16" else "bf16"
    return "bf16" if precision == "bf16" and device == "cpu" and cpu_has_bf16() else "float32"


def cpu_has_bf16() -> bool:
    """Return whether this machine's CPU has instructions for bfloat16; false where the system does not tell."""
    return bool(cpu_facts()[1])


@lru_cache(maxsize=1)
def cpu_facts() -> tuple[str, frozenset[str]]:
    """Return the CPU's name, and which of :data:`BF16_FLAGS` it has; both empty where the system does not tell."""
    try:
        lines = CPU_FACTS.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return "", frozenset()
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    return name, BF16_FLAGS.intersection(flags)
