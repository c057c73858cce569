"""What a network draws by chance in private training: from the site's secret, never from the run's seed."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn

from common.errors import BadInput, Fault
from strategies.privacy.noise import NoiseSource

DROPOUT: Final = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


class SecretDropout(nn.Module):
    """Dropout whose masks are drawn from a secret; of whole channels where the layer it stands for drops those.

    Attributes:
        p: The rate; networks that fuse their layers read it by this name.
        sizes: Where it is a list, each forward pass in training adds how many numbers its mask has, and so do copies.
    """

    def __init__(self, rate: float, channels: bool, noise: NoiseSource, sizes: list[int] | None = None) -> None:
        super().__init__()
        self.p, self.channels, self.noise, self.sizes = rate, channels, noise, sizes

    def __deepcopy__(self, memo: dict[int, Any]) -> "SecretDropout":
        return SecretDropout(self.p, self.channels, self.noise, self.sizes).train(self.training)

    def forward(self, values: Tensor) -> Tensor:
        if not self.training:
            return values
        shape = (*values.shape[:2], *[1] * (values.dim() - 2)) if self.channels else values.shape
        if self.sizes is not None:
            self.sizes.append(math.prod(shape))
        if self.p == 0:
            return values
        kept = self.noise.uniform(shape, values.device) >= self.p
        return values * kept / max(1 - self.p, 1e-12)


@contextlib.contextmanager
def secret_dropout(network: nn.Module, noise: NoiseSource) -> Iterator[None]:
    """Have every dropout layer draw from the noise's source, not from torch's generator."""
    found = [
        (parent, name, layer)
        for parent in network.modules()
        for name, layer in parent.named_children()
        if isinstance(layer, DROPOUT) and layer.p
    ]
    for parent, name, layer in found:
        secret = SecretDropout(layer.p, not isinstance(layer, nn.Dropout), noise)
        setattr(parent, name, secret.train(layer.training))
    try:
        yield
    finally:
        for parent, name, layer in found:
            setattr(parent, name, layer)


@contextlib.contextmanager
def refused_draws(device: torch.device) -> Iterator[None]:
    """Refuse what draws from torch's own generators meanwhile: functional dropout, stochastic depth.

    Raises:
        BadInput: If something did.
    """
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index or 0])
    before = [generator.get_state() for generator in generators]
    yield
    if not all(torch.equal(state, generator.get_state()) for state, generator in zip(before, generators, strict=True)):
        problem = "draws random numbers of its own in training, which follow from the run's seed, not from a secret."
        raise BadInput([Fault("model.architecture", problem, "Take a network without stochastic depth.")])
