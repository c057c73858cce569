"""Where a network computes: on the CPU, on a GPU, or its backbone on several GPUs at once."""

from typing import TypeVar

import torch
from torch import Tensor, nn

from common.models.gpu import data_parallel, graph

Network = TypeVar("Network", bound=nn.Module)


def on_device(network: Network, device: str) -> Network:
    """Move a network to ``cpu`` or ``cuda``.

    On a GPU this process computes convolutions of float32 in float32 from now on, not in TensorFloat-32 with its 10
    bits, and by algorithms that give equal bits each time.
    """
    if device != "cpu":
        be_exact()
    return network.to(device)


def be_exact() -> None:
    """Have cuDNN compute as :func:`on_device` says."""
    # The older of torch's two switches: with the newer one, for convolutions alone, torch.export stops.
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True


def features_through(backbone: nn.Module, images: Tensor) -> Tensor:
    """Return features ``(batch, width)`` of images as a backbone sees them: by several GPUs or a graph where it may."""
    computes = backbone.__dict__.get(data_parallel.NAME) or backbone.__dict__.get(graph.NAME)
    return backbone(images) if computes is None else computes(backbone, images)  # type: ignore[no-any-return]
