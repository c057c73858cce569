"""What a run asks of a machine: bytes of disk, of memory and of a GPU, by its model and this site's images."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from common.config import BY_STEP, Plan
from common.models.network import SplitNetwork

FLOAT = 4
GB = 10**9
DISK_FLOOR = 1 * GB
"""Logs, the message at work, and room for the file system itself."""
MEMORIES = 24
"""Models' worth of disk that a site's memory may take: two runs, two rounds each, and in each at most six models: own
parts now, when evaluated and when best, what was not sent, and the optimiser's two.
"""
PROGRAM = 1 * GB
"""Python, torch and Flower, without a model; on a GPU its libraries, without one too."""
COPIES = 6
"""Models in memory at once: as received, network, update, the bytes of it on their way, and the optimiser's two."""
ON_GPU = 4
"""Models on a GPU at once: weights, gradients, Adam's two."""


@dataclass(frozen=True)
class Needs:
    """Bytes.

    Attributes:
        model: One copy of its numbers.
        gpu: For training on a GPU; more than enough in bf16.
    """

    model: int
    disk: int
    memory: int
    gpu: int


def needs_of(network: SplitNetwork, plan: Plan, sample: Tensor, images: int, gpus: int = 1) -> Needs:
    """Reckon what training takes.

    Args:
        sample: One image as it lies in memory, uint8 ``(1, channels, height, width)``.
        images: Number of them in all parts.
        gpus: How many GPUs each batch is split across.
    """
    model = FLOAT * sum(tensor.numel() for tensor in network.state_dict().values())
    resident = images * sample.numel()
    # Each output of a layer is kept for the way back, where its gradient is of the same size.
    batch = 2 * plan.training.batch_size * FLOAT * _outputs(network, sample)
    of_gpu = batch if plan.privacy.level in BY_STEP else batch // gpus  # all of it on one for noise in each step
    return Needs(
        model=model,
        disk=DISK_FLOOR + MEMORIES * model,
        memory=PROGRAM + COPIES * model + resident + batch,
        gpu=PROGRAM + ON_GPU * model + resident + of_gpu,
    )


def _outputs(network: SplitNetwork, sample: Tensor) -> int:
    """Numbers that all layers together put out for one image."""
    sizes = list[int]()

    def note(module: nn.Module, given: object, output: object) -> None:
        if isinstance(output, Tensor):
            sizes.append(output.numel())

    leaves = [module for module in network.modules() if not list(module.children())]
    hooks = [leaf.register_forward_hook(note) for leaf in leaves]
    network.eval()
    try:
        with torch.no_grad():
            network(sample.float())
    finally:
        for hook in hooks:
            hook.remove()
    return sum(sizes)


def in_words(size: float) -> str:
    """Bytes for a person."""
    return f"{size / GB:.1f} GB" if size >= GB / 2 else f"{size / 1e6:.1f} MB"
