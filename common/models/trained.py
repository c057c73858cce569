"""The trained and the frozen part of a network (``model.train``), and low-rank adaptation.

Low-rank adaptation gives frozen weights a trained product of two small matrices: Hu et al., "LoRA: Low-Rank Adaptation
of Large Language Models", ICLR 2022, in the form of Sun et al., "Improving LoRA in Privacy-preserving Federated
Learning" (FFA-LoRA), ICLR 2024. The first factor is drawn once and stays, so that the mean of the sites' updates is the
update of the mean weights. With both factors trained it is not: a mean of products is no product of means.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize

from common.errors import BadInput, Fault
from common.models.zoo.spec import ModelSpec

PREFIX = "lora:"
_ORIGINAL = ".parametrizations.weight.original"


class LowRankParametrization(nn.Module):
    """A parametrization ``W + up @ down`` of a weight W; ``down`` stays as drawn, ``up`` is trained from zero.

    Attributes:
        down: ``(rank, columns)``; a convolution's columns are all but its output channels.
        up: Its weight is ``(rows, rank)``.
    """

    down: Tensor

    def __init__(self, name: str, weight: Tensor, rank: int) -> None:
        super().__init__()
        rows, columns = weight.shape[0], weight[0].numel()
        # Uniform, with the variance of torch's dense layers: 1 / (3 columns).
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
        drawn = torch.rand((rank, columns), generator=torch.Generator().manual_seed(seed), device="cpu")
        self.register_buffer("down", ((2 * drawn - 1) / math.sqrt(columns)).to(weight.device))
        self.up = nn.Linear(rank, rows, bias=False, device="meta")  # draws no random numbers there
        self.up.weight = nn.Parameter(torch.zeros(rows, rank, device=weight.device))

    def forward(self, weight: Tensor) -> Tensor:
        """Return the layer's effective weight."""
        return weight + (self.up.weight @ self.down).view(weight.shape)


def add_low_rank(backbone: nn.Module, train: str) -> None:
    """Add low-rank factors to a backbone's weights, in place, where ``model.train`` is ``lora:RANK``.

    Every dense layer and every convolution that is not grouped is adapted, if it has more rows and columns than the
    rank. ``down`` depends on the layer's name and shape alone, so that it need not travel.

    Raises:
        BadInput: If no layer can be adapted.
    """
    if not train.startswith(PREFIX):
        return
    rank = int(train.removeprefix(PREFIX))
    layers = list[tuple[str, nn.Linear | nn.Conv2d]]()
    for name, layer in backbone.named_modules():
        if not isinstance(layer, nn.Linear | nn.Conv2d) or (isinstance(layer, nn.Conv2d) and layer.groups > 1):
            continue
        if rank < min(layer.weight.shape[0], layer.weight[0].numel()):
            layers.append((name, layer))
    if not layers:
        problem = f"asks for rank {rank}, and the backbone has no dense layer or convolution that is larger."
        raise BadInput([Fault("model.train", problem, "Use a smaller rank.")])
    for name, layer in layers:
        parametrize.register_parametrization(layer, "weight", LowRankParametrization(name, layer.weight, rank))


def trained_factors(backbone: nn.Module) -> Iterator[str]:
    """Yield the names of a backbone's trained low-rank factors."""
    for name, module in backbone.named_modules():
        if isinstance(module, LowRankParametrization):
            yield f"{name}.up"


def merge_low_rank(backbone: nn.Module) -> None:
    """Add the low-rank products to the weights and remove the factors, in place."""
    for module in list(backbone.modules()):
        if parametrize.is_parametrized(module, "weight"):
            parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)


def merged_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Merge low-rank factors among tensors by name; return all unchanged if some factors do not fit together."""
    plain = dict(tensors)
    for name in tensors:
        stem = name.removesuffix("original")
        names = [name, f"{stem}0.down", f"{stem}0.up.weight"]
        if name.endswith(_ORIGINAL) and all(part in tensors for part in names):
            original, down, up = (plain.pop(part) for part in names)
            product = up @ down if up.ndim == down.ndim == 2 and up.shape[1] == len(down) else None
            if product is None or product.numel() != original.numel():
                return dict(tensors)
            plain[name.removesuffix(_ORIGINAL) + ".weight"] = original + product.view(original.shape)
    return plain


def trained_layer_names(backbone: nn.Module, train: str) -> frozenset[str]:
    """Return the names of the backbone's trained layers; a layer is a module with parameters of its own.

    Args:
        backbone: The backbone, with its factors under ``lora:RANK``.
        train: The setting :attr:`ModelSpec.train`.

    Raises:
        BadInput: If ``last:N`` names more layers than there are.
    """
    if train in ("head", "neck"):
        return frozenset()
    if train.startswith(PREFIX):
        return frozenset(trained_factors(backbone))
    layers = [name for name, module in backbone.named_modules() if list(module.parameters(recurse=False))]
    if train == "all":
        return frozenset(layers)
    last = int(train.removeprefix("last:"))
    if last > len(layers):
        problem = f"asks for {last} layers, and the backbone has {len(layers)} with parameters."
        raise BadInput([Fault("model.train", problem, 'Use "all", or a smaller number.')])
    return frozenset(layers[-last:])


def frozen_tensor_names(backbone: nn.Module, spec: ModelSpec) -> frozenset[str]:
    """Return the names of the frozen tensors in the whole network's ``state_dict``, without counters.

    Raises:
        BadInput: See :func:`trained_layer_names`.
    """
    if spec.train == "all":
        return frozenset()
    trained = trained_layer_names(backbone, spec.train)
    return frozenset(
        f"backbone.{name}"
        for name, tensor in backbone.state_dict().items()
        if tensor.is_floating_point() and name.rpartition(".")[0] not in trained
    )


def refuse_nothing_frozen(backbone: nn.Module, spec: ModelSpec) -> None:
    """Raise :class:`BadInput` where ``model.train`` is not ``all`` and yet nothing is frozen."""
    if spec.train != "all" and not frozen_tensor_names(backbone, spec):
        raise BadInput([Fault("model.train", f'"{spec.train}" freezes nothing of this backbone.', 'Use "all".')])


class StandardisingLayer(nn.BatchNorm1d):
    """A layer that standardises features; its running statistics are plain means over batches.

    A single image, which has no variance, is standardised by the running statistics and does not change them.
    """

    def __init__(self, width: int) -> None:
        super().__init__(width, affine=False, momentum=None)

    def forward(self, features: Tensor) -> Tensor:
        """Standardise ``(batch, width)``."""
        if self.training and len(features) == 1:
            return functional.batch_norm(features, self.running_mean, self.running_var, eps=self.eps)
        return super().forward(features)


def reset_statistics(network: nn.Module) -> None:
    """Reset the running statistics, so that they are the means over the coming batches only."""
    for module in network.modules():
        if isinstance(module, StandardisingLayer) and module.num_batches_tracked is not None:
            module.num_batches_tracked.zero_()


class ScalingLayer(nn.Module):
    """A layer that divides features by a constant."""

    def __init__(self, divisor: float) -> None:
        super().__init__()
        self.divisor = divisor

    def forward(self, features: Tensor) -> Tensor:
        """Return ``features / divisor``."""
        return features / self.divisor


def standardising_layers(width: int, spec: ModelSpec) -> list[nn.Module]:
    """Return the layers that bring a frozen backbone's features to mean 0 and variance 1; none for other networks.

    They are batch normalisation without parameters. After each round a site's mean and variance are those over the
    round's batches, see :func:`reset_statistics`, and are averaged over the sites. With ``norm = "group"`` each image's
    features are standardised by themselves. For a head alone features are divided by the root of their number, so that
    a vector has length 1 and the head's biases, which first have to learn how rare the classes are, move as fast as all
    its weights together.
    """
    if not spec.backbone_frozen:
        return []
    grouped = spec.norm == "group"
    standard = nn.LayerNorm(width, elementwise_affine=False) if grouped else StandardisingLayer(width)
    return [standard, ScalingLayer(math.sqrt(width))] if spec.train == "head" else [standard]
