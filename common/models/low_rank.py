"""Low-rank adaptation: a frozen network whose weights gain a trained product of two small matrices.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022, in the form of Sun et al., "Improving LoRA
in Privacy-preserving Federated Learning" (FFA-LoRA), ICLR 2024: the first factor is drawn once and stays, so that the
mean of the sites' updates is the update of the mean weights. With both factors trained it is not: a mean of products is
no product of means.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from common.errors import BadInput, Fault

PREFIX = "lora:"
_ORIGINAL = ".parametrizations.weight.original"


class LowRank(nn.Module):
    """``W + up @ down`` in the place of a weight W; ``down`` stays as drawn, ``up`` is trained, from zero.

    Attributes:
        down: ``(rank, columns)``; a convolution's columns are all but its output channels.
        up: Its weight is ``(rows, rank)``.
    """

    down: Tensor

    def __init__(self, name: str, weight: Tensor, rank: int) -> None:
        super().__init__()
        rows, columns = weight.shape[0], weight[0].numel()
        self.register_buffer("down", _drawn(name, (rank, columns)).to(weight.device))
        self.up = nn.Linear(rank, rows, bias=False, device="meta")  # draws no random numbers there
        self.up.weight = nn.Parameter(torch.zeros(rows, rank, device=weight.device))

    def forward(self, weight: Tensor) -> Tensor:
        """The weight that the layer works with."""
        return weight + (self.up.weight @ self.down).view(weight.shape)


def adapt(backbone: nn.Module, train: str) -> None:
    """Give the weights of a backbone their trained products, in place, where ``model.train`` is ``lora:RANK``.

    Every dense layer and every convolution that is not grouped is adapted, if it has more rows and columns than the
    rank. ``down`` depends on the layer's name and shape alone, so that who has the weights has all that is frozen.

    Raises:
        BadInput: If there is no such layer.
    """
    if not train.startswith(PREFIX):
        return
    rank = int(train.removeprefix(PREFIX))
    layers = [(name, layer) for name, layer in backbone.named_modules() if _takes(layer, rank)]
    if not layers:
        problem = f"asks for rank {rank}, and the backbone has no dense layer or convolution that is larger."
        raise BadInput([Fault("model.train", problem, "Use a smaller rank.")])
    for name, layer in layers:
        parametrize.register_parametrization(layer, "weight", LowRank(name, layer.weight, rank))


def trained_factors(backbone: nn.Module) -> Iterator[str]:
    """The names of the layers that hold what is trained."""
    for name, module in backbone.named_modules():
        if isinstance(module, LowRank):
            yield f"{name}.up"


def merge(backbone: nn.Module) -> None:
    """Write the products into the weights and take them off, in place: the same network without adaptation."""
    for module in list(backbone.modules()):
        if parametrize.is_parametrized(module, "weight"):
            parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)


def merged(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a network after :func:`merge`, by their names then; those that do not fit together stay."""
    found = dict(tensors)
    for name in tensors:
        parts = name.removesuffix("original")
        names = [name, f"{parts}0.down", f"{parts}0.up.weight"]
        if name.endswith(_ORIGINAL) and all(one in tensors for one in names):
            original, down, up = (found.pop(one) for one in names)
            product = up @ down if up.ndim == down.ndim == 2 and up.shape[1] == len(down) else None
            if product is None or product.numel() != original.numel():
                return dict(tensors)
            found[name.removesuffix(_ORIGINAL) + ".weight"] = original + product.view(original.shape)
    return found


def _takes(layer: nn.Module, rank: int) -> bool:
    if not isinstance(layer, nn.Linear | nn.Conv2d) or (isinstance(layer, nn.Conv2d) and layer.groups > 1):
        return False
    return rank < min(layer.weight.shape[0], layer.weight[0].numel())


def _drawn(name: str, shape: tuple[int, int]) -> Tensor:
    """Uniform with the variance of torch's dense layers, ``1 / (3 columns)``."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
    values = torch.rand(shape, generator=torch.Generator().manual_seed(seed), device="cpu")
    return (2 * values - 1) / math.sqrt(shape[1])
