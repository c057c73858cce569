"""The trained and the frozen part of a network (setting ``model.train``), and low-rank adaptation (LoRA).

Low-rank adaptation adds a product of two small matrices to a frozen weight: Hu et al., "LoRA: Low-Rank Adaptation of
Large Language Models", ICLR 2022. We use the variant of Sun et al., "Improving LoRA in Privacy-preserving Federated
Learning" (FFA-LoRA), ICLR 2024: the first factor is random and fixed, only the second is trained. Averaging the second
factors over sites then averages the products, which averaging two trained factors would not.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize

from polyclinic.common.errors import BadInput, Fault, quote_names
from polyclinic.common.models.zoo.spec import ModelSpec
from polyclinic.common.plugins import PLUGIN_PREFIX

LORA_PREFIX = "lora:"
_ORIGINAL_WEIGHT_SUFFIX = ".parametrizations.weight.original"


class LowRankParametrization(nn.Module):
    """The LoRA parametrization ``W + up @ down`` of a frozen weight matrix W.

    Attributes:
        down: Fixed random factor, ``(rank, columns)``; for a convolution columns are inputs times kernel size.
        up: Trained factor as a dense layer; its weight starts at zero, ``(rows, rank)``.
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
        """Return the layer's effective weight ``W + up @ down``."""
        return weight + (self.up.weight @ self.down).view(weight.shape)


def add_low_rank_factors(backbone: nn.Module, train: str) -> None:
    """Add low-rank factors to a backbone's weights, in place, if ``model.train`` is ``lora:RANK``.

    Every dense layer and ungrouped convolution with more rows and columns than the rank gets factors. The fixed factor
    ``down`` depends only on the layer's name and shape, so each site can compute it.

    Raises:
        BadInput: If no layer is large enough.
    """
    if not train.startswith(LORA_PREFIX):
        return
    rank = int(train.removeprefix(LORA_PREFIX))
    layers = list[tuple[str, nn.Linear | nn.Conv2d | nn.Conv3d]]()
    for name, layer in backbone.named_modules():
        if not isinstance(layer, nn.Linear | nn.Conv2d | nn.Conv3d):
            continue
        if not isinstance(layer, nn.Linear) and layer.groups > 1:
            continue
        if rank < min(layer.weight.shape[0], layer.weight[0].numel()):
            layers.append((name, layer))
    if not layers:
        problem = f"asks for rank {rank}, and the backbone has no dense layer or convolution that is larger."
        raise BadInput([Fault("model.train", problem, "Use a smaller rank.")])
    for name, layer in layers:
        parametrize.register_parametrization(layer, "weight", LowRankParametrization(name, layer.weight, rank))


def iterate_low_rank_factor_names(backbone: nn.Module) -> Iterator[str]:
    """Yield the names of the modules in a backbone that contain the trained low-rank (LoRA) factors ``up``.

    The fixed factors ``down`` are buffers, and are left out.
    """
    for name, module in backbone.named_modules():
        if isinstance(module, LowRankParametrization):
            yield f"{name}.up"


def merge_low_rank_factors(backbone: nn.Module) -> None:
    """Add the low-rank products to the backbone's weights and remove the factors, in place."""
    for module in list(backbone.modules()):
        if parametrize.is_parametrized(module, "weight"):
            parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)


def merge_low_rank_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict in which low-rank (LoRA) factors are added to their weights and removed.

    If the shapes of any weight and its factors do not match, the result is a copy without changes.
    """
    plain = dict(tensors)
    for name in tensors:
        stem = name.removesuffix("original")
        names = [name, f"{stem}0.down", f"{stem}0.up.weight"]
        if name.endswith(_ORIGINAL_WEIGHT_SUFFIX) and all(part in tensors for part in names):
            original, down, up = (plain.pop(part) for part in names)
            product = up @ down if up.ndim == down.ndim == 2 and up.shape[1] == len(down) else None
            if product is None or product.numel() != original.numel():
                return dict(tensors)
            plain[name.removesuffix(_ORIGINAL_WEIGHT_SUFFIX) + ".weight"] = original + product.view(original.shape)
    return plain


def list_trained_layers(backbone: nn.Module, train: str) -> frozenset[str]:
    """Return the names of the backbone's trained layers; a layer is a module that directly contains parameters.

    Args:
        backbone: The backbone; for ``lora:RANK`` it must already have its low-rank factors.
        train: The setting :attr:`ModelSpec.train`.

    Raises:
        BadInput: If ``last:N`` asks for more layers than the backbone has.
    """
    if train in ("head", "neck"):
        return frozenset()
    if train.startswith(LORA_PREFIX):
        return frozenset(iterate_low_rank_factor_names(backbone))
    layers = [name for name, module in backbone.named_modules() if list(module.parameters(recurse=False))]
    if train == "all":
        return frozenset(layers)
    # A parametrized layer, with weight normalisation for instance, is one layer with the parts of its weight.
    owners = {name: name.partition(".parametrizations.")[0] for name in layers}
    layer_count = int(train.removeprefix("last:"))
    distinct = list(dict.fromkeys(owners.values()))
    if layer_count > len(distinct):
        problem = f"asks for {layer_count} layers, and the backbone has {len(distinct)} with parameters."
        raise BadInput([Fault("model.train", problem, 'Use "all", or a smaller number.')])
    return frozenset(name for name, owner in owners.items() if owner in distinct[-layer_count:])


def list_frozen_tensor_names(backbone: nn.Module, spec: ModelSpec) -> frozenset[str]:
    """Return the names of a network's frozen float tensors, as in the network's ``state_dict``.

    Raises:
        BadInput: See :func:`list_trained_layers`.
    """
    if spec.train == "all":
        return frozenset()
    trained = list_trained_layers(backbone, spec.train)
    return frozenset(
        f"backbone.{name}"
        for name, tensor in backbone.state_dict().items()
        if tensor.is_floating_point() and name.rpartition(".")[0] not in trained
    )


def register_frozen_constants(backbone: nn.Module, spec: ModelSpec) -> None:
    """Turn a plug-in's frozen parameters into buffers, in place, if ``model.train`` is ``all``.

    No method then trains such constants, for instance a gate or a position embedding. Frozen parameters of torch's
    layers stay parameters; :func:`refuse_unfit_train_setting` rejects them.
    """
    if spec.train != "all" or not spec.architecture.startswith(PLUGIN_PREFIX):
        return
    for layer in list(backbone.modules()):
        if not type(layer).__module__.startswith("torch.nn."):
            for name, value in list(layer.named_parameters(recurse=False)):
                if not value.requires_grad:
                    delattr(layer, name)
                    layer.register_buffer(name, value.detach())


def refuse_unfit_train_setting(backbone: nn.Module, spec: ModelSpec) -> None:
    """Raise :class:`BadInput` if ``model.train`` does not suit a backbone.

    It does not suit if it asks for frozen layers but freezes nothing, or if it would train layers that a plug-in has
    frozen.
    """
    if spec.train != "all" and not list_frozen_tensor_names(backbone, spec):
        raise BadInput([Fault("model.train", f'"{spec.train}" freezes nothing of this backbone.', 'Use "all".')])
    if not spec.architecture.startswith(PLUGIN_PREFIX):
        return
    trained = list_trained_layers(backbone, spec.train)
    parameters = backbone.named_parameters()
    frozen = [name for name, value in parameters if not value.requires_grad and name.rpartition(".")[0] in trained]
    if frozen:
        problem = f'"{spec.train}" would train {quote_names(frozen, limit=4)}, which the network itself has frozen '
        remedy = 'Write model.train = "head" (the head alone) or "last:N" (its last N layers too), or unfreeze them.'
        raise BadInput([Fault("model.train", problem + "(requires_grad=False).", remedy)])


class StandardisingLayer(nn.BatchNorm1d):
    """Batch normalisation of features without trained parameters.

    The running statistics are unweighted means over all batches since the last reset. A batch of one image, which has
    no variance, is standardised by the running statistics and does not change them.
    """

    def __init__(self, width: int) -> None:
        super().__init__(width, affine=False, momentum=None)

    def forward(self, features: Tensor) -> Tensor:
        """Standardise features ``(batch, width)``."""
        if self.training and len(features) == 1:
            return functional.batch_norm(features, self.running_mean, self.running_var, eps=self.eps)
        return super().forward(features)


class ScalingLayer(nn.Module):
    """A layer that divides features by a constant."""

    def __init__(self, divisor: float) -> None:
        super().__init__()
        self.divisor = divisor

    def forward(self, features: Tensor) -> Tensor:
        return features / self.divisor


def make_standardising_layers(width: int, spec: ModelSpec) -> list[nn.Module]:
    """Return the layers that standardise the features of a frozen backbone; empty if the backbone is trained.

    The layer is a :class:`StandardisingLayer`, whose statistics are those of the round's batches and are averaged over
    the sites; with ``norm = "group"`` it is a layer normalisation. If only the head is trained, a second layer divides
    the features by the root of their number. Feature vectors then have length 1, and the biases, which must first learn
    how rare the classes are, learn as fast as the weights.
    """
    if not spec.backbone_frozen:
        return []
    grouped = spec.norm == "group"
    standard = nn.LayerNorm(width, elementwise_affine=False) if grouped else StandardisingLayer(width)
    return [standard, ScalingLayer(math.sqrt(width))] if spec.train == "head" else [standard]
