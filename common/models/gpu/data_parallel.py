"""One site's batches over several of its GPUs.

Each GPU takes a part of the batch through the backbone; neck, head and loss see the whole batch on the first. That is
where it differs from :class:`torch.nn.parallel.DistributedDataParallel`, which has a process for each GPU and a loss
for each part: methods whose loss compares the images of a batch (FedIRM, RSCFed) would compute something else.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

NAME = "_data_parallel"
SMALLEST_PART = 2
"""Images; a batch that gives some GPU fewer goes through the first alone: batch normalisation needs two."""


def use_gpus(backbone: nn.Module, gpus: int) -> None:
    """Split a backbone's batches across so many GPUs from now on, the first of which it lies on."""
    backbone.__dict__.pop(NAME, None)
    if gpus > 1:
        backbone.__dict__[NAME] = DataParallelBackbone(first_gpus(gpus))


def first_gpus(gpus: int) -> tuple[torch.device, ...]:
    """The first GPUs of those that this process may see."""
    return tuple(torch.device("cuda", index) for index in range(gpus))


def visible_gpus() -> int:
    """How many GPUs this process may use."""
    return torch.cuda.device_count()


def shows(gpus: int) -> str:
    """What a machine with so many GPUs is told that asked for more."""
    return f"this machine shows {gpus or 'no'} {'GPU' if gpus <= 1 else 'GPUs'}."


def is_data_parallel(backbone: nn.Module) -> bool:
    """Whether a backbone's batches are split across several GPUs."""
    return NAME in backbone.__dict__


@contextlib.contextmanager
def on_first_gpu(backbone: nn.Module) -> Iterator[None]:
    """Keep batches on one GPU for a while: hooks on the layers see whole batches then."""
    kept = backbone.__dict__.pop(NAME, None)
    try:
        yield
    finally:
        if kept is not None:
            backbone.__dict__[NAME] = kept


class DataParallelBackbone:
    """A backbone's batches over several devices, in equal parts as far as they can be divided.

    Each step sends the weights to every device and adds up the gradients in the order of the devices, so that equal
    batches give equal bits. Batch normalisation has the statistics of each part; its running statistics are the means
    over the parts.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = tuple(devices)

    def __call__(self, backbone: nn.Module, images: Tensor) -> Tensor:
        """Return features ``(batch, width)``, on the device of ``images``."""
        if images.device != self.devices[0] or len(images) < SMALLEST_PART * len(self.devices):
            return backbone(images)  # type: ignore[no-any-return]
        parameters, buffers = self._parameters(backbone), self._buffers(backbone)
        parts = images.tensor_split(len(self.devices))
        found = []
        for device, part, weights, own in zip(self.devices, parts, parameters, buffers, strict=True):
            with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
                found.append(torch.func.functional_call(backbone, weights | own, (part.to(device),)))
        if any(module.training for module in backbone.modules()):  # layers of a backbone that is frozen in part, too
            _take_over(backbone, buffers)
        return torch.cat([features.to(images.device) for features in found])

    def _parameters(self, backbone: nn.Module) -> list[dict[str, Tensor]]:
        """Each device's weights, by name."""
        learning = {name: value for name, value in backbone.named_parameters() if value.requires_grad}
        copies: Sequence[Tensor] = _Copies.apply(self.devices, *learning.values()) if learning else ()
        found = []
        for number, device in enumerate(self.devices):
            own = copies[number * len(learning) : (number + 1) * len(learning)]
            weights = dict(zip(learning, own, strict=True))
            for name, value in backbone.named_parameters():
                if name not in learning:
                    weights[name] = value.detach().to(device)
            found.append(weights)
        return found

    def _buffers(self, backbone: nn.Module) -> list[dict[str, Tensor]]:
        """Each device's running statistics and other buffers, by name: copies, which a forward pass may write to."""
        named = dict(backbone.named_buffers())
        return [{name: value.to(device, copy=True) for name, value in named.items()} for device in self.devices]


class _Copies(torch.autograd.Function):
    """Copies of tensors on every device: those of the first device, those of the second, and so on.

    Without it the order in which a weight's gradients arrive, and with three devices the sum, would vary.
    """

    @staticmethod
    def forward(context: Any, devices: Sequence[torch.device], *values: Tensor) -> tuple[Tensor, ...]:
        context.devices = devices
        context.set_materialize_grads(False)
        return tuple(
            value.view_as(value) if value.device == device else value.to(device)
            for device in devices
            for value in values
        )

    @staticmethod
    def backward(context: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        many = len(gradients) // len(context.devices)
        return (None, *(_sum(gradients[place::many], context.devices[0]) for place in range(many)))


def _sum(gradients: Sequence[Tensor | None], device: torch.device) -> Tensor | None:
    """Sum of one weight's gradients on the first device; None where it took no part anywhere."""
    total: Tensor | None = None
    for gradient in gradients:
        if gradient is not None:
            total = gradient.to(device) if total is None else total + gradient.to(device)
    return total


@torch.no_grad()
def _take_over(backbone: nn.Module, copies: Sequence[dict[str, Tensor]]) -> None:
    """Write what the forward passes left in the buffers: means where they are numbers, else the first device's."""
    for name, buffer in backbone.named_buffers():
        values = [own[name].to(buffer.device) for own in copies]
        if buffer.is_floating_point():
            buffer += torch.stack([value - buffer for value in values]).mean(dim=0)  # nothing where nothing changed
        else:
            buffer.copy_(values[0])
