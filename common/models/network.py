"""The network every method trains: backbone, neck, and a head whose rows have names."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from common.errors import BadInput, Fault
from common.models.gpu import features_through
from common.models.head import initial_head
from common.models.trained import (
    adapt,
    forget_batches,
    frozen_names,
    refuse_all_trained,
    standardising,
    trained_layers,
)
from common.models.weights import copy_into_backbone, read_backbone_weights
from common.models.zoo.networks import make_grouped
from common.models.zoo.registry import new_backbone, outline
from common.models.zoo.spec import ModelSpec, is_external

MemoryFormat = Literal["channels_last", "contiguous"]
"""The order of an image's numbers in memory: a pixel's channels side by side, or each channel's pixels."""
BATCH_NORM = nn.modules.batchnorm._BatchNorm
_LUMINANCE = (0.299, 0.587, 0.114)  # ITU-R BT.601


class SplitNetwork(nn.Module):
    """Pixels 0..255 in, one logit per class name out.

    Attributes:
        spec: What it was built from.
        class_names: Names of the head's rows, in their order.
        backbone: Images to vectors.
        neck: Identity, or a dense layer with ReLU and dropout; averaged over sites like the backbone. Behind a frozen
            backbone it begins with the layer that standardises features.
        head: One row per class.
        frozen: Names of the tensors that nobody trains, see :attr:`ModelSpec.train`.
    """

    pixel_mean: Tensor
    pixel_std: Tensor

    def __init__(
        self, spec: ModelSpec, class_names: Sequence[str], *, backbone: nn.Module, neck: nn.Module, head: nn.Linear
    ) -> None:
        super().__init__()
        assert head.out_features == len(class_names), (head.out_features, class_names)
        self.spec = spec
        self.class_names = tuple(class_names)
        self.backbone = backbone
        self.neck = neck
        self.head = head
        self.frozen = frozen_names(backbone, spec)
        normalisation = spec.normalisation
        # Not persistent: they follow from the spec and are no part of a model's state.
        self.register_buffer("pixel_mean", _per_channel(normalisation.mean), persistent=False)
        self.register_buffer("pixel_std", _per_channel(normalisation.std), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits ``(batch, classes)`` of uint8 or float pixels 0..255, ``(batch, 1 or 3, height, width)``."""
        logits: Tensor = self.head(self.features(images))
        return logits

    def features(self, images: Tensor) -> Tensor:
        """Return what the head sees, ``(batch, features)``."""
        features: Tensor = self.neck(features_through(self.backbone, self._prepared(images)))
        return features

    def _prepared(self, images: Tensor) -> Tensor:
        """Bring pixels to the backbone's channels, size and scale."""
        return (as_seen(images.to(self.pixel_mean.dtype), self.spec) - self.pixel_mean) / self.pixel_std


def as_seen(images: Tensor, spec: ModelSpec) -> Tensor:
    """Return float pixels 0..255 in the channels and the size of a backbone; it sees them shifted and scaled."""
    pixels = images
    if (images.shape[1], spec.channels) == (1, 3):
        pixels = images.expand(-1, spec.channels, -1, -1)
    elif images.shape[1] != spec.channels:
        assert images.shape[1] == 3, f"expected images of 1 or 3 channels, got {tuple(images.shape)}"
        pixels = (images * images.new_tensor(_LUMINANCE).reshape(1, 3, 1, 1)).sum(1, keepdim=True)
    size = (spec.image_size, spec.image_size)
    if pixels.shape[2:] != size:
        pixels = functional.interpolate(pixels, size, mode="bilinear", antialias=True)
    return pixels


def build(spec: ModelSpec, class_names: Sequence[str], seed: int, base: Path = Path()) -> SplitNetwork:
    """Return a new network, the same for the same seed; torch's own random state is left as it was.

    Args:
        spec: The experiment's model.
        class_names: Names of the head's rows, at least one.
        seed: Each head row depends on it and on its own name only, no matter which other classes there are.
        base: Folder that ``spec.weights`` is relative to.

    Raises:
        BadInput: If the weights file is missing, has another hash or does not fit, or nothing is frozen where
            ``model.train`` says so.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed GPUs too
        backbone, width = new_backbone(spec.architecture, spec.channels, spec.image_size)
        dense = [nn.Linear(width, spec.neck), nn.ReLU(), nn.Dropout(spec.dropout)] if spec.neck else []
        layers = [*standardising(width, spec), *dense]
        neck = nn.Sequential(*layers) if layers else nn.Identity()
    if spec.weights is not None:
        copy_into_backbone(backbone, read_backbone_weights(backbone, base / spec.weights, spec.weights_sha256))
    if spec.norm == "group" and not spec.norm_frozen:  # frozen, it mixes no images and must stay as published
        make_grouped(backbone)
    adapt(backbone, spec.train)
    refuse_all_trained(backbone, spec)
    rows = initial_head(class_names, spec.neck or width, seed)
    head = head_of(torch.from_numpy(rows.weight), torch.from_numpy(rows.bias))
    # Most convolutions and poolings read channels last faster, on a CPU too.
    return in_format(SplitNetwork(spec, class_names, backbone=backbone, neck=neck, head=head), "channels_last")


def in_format(network: SplitNetwork, memory_format: MemoryFormat) -> SplitNetwork:
    """Keep the weights of convolutions in this order, in place; images take it from them."""
    wanted = torch.channels_last if memory_format == "channels_last" else torch.contiguous_format
    return network.to(memory_format=wanted)


def model_faults(spec: ModelSpec, base: Path) -> list[Fault]:
    """Return what would stop :func:`build`, in no memory: a network that is not there, the weights file, its tensors.

    An image size below the architecture's minimum is refused by :class:`ModelSpec` already.
    """
    if spec.weights is None and spec.train == "all" and not is_external(spec.architecture):
        return []
    try:
        refuse_all_trained(adapted_outline(spec), spec)
    except BadInput as bad:
        return list(bad.faults)
    if spec.weights is None:
        return []
    try:
        plain = outline(spec.architecture, spec.channels, spec.image_size).module
        read_backbone_weights(plain, base / spec.weights, spec.weights_sha256)
    except BadInput as bad:
        return [replace(fault, where=f"model.weights ({spec.weights})") for fault in bad.faults]
    return []


def adapted_outline(spec: ModelSpec) -> nn.Module:
    """Return a backbone to be looked at, with what ``model.train`` adds to it; see :func:`outline`.

    Raises:
        BadInput: If it cannot be made, or has nothing to adapt.
    """
    backbone = outline(spec.architecture, spec.channels, spec.image_size).module
    adapt(backbone, spec.train)
    return backbone


def unfreeze(network: SplitNetwork) -> None:
    """Undo :func:`freeze_backbone` and :func:`freeze_batch_norm`: all is trained that ``model.train`` names."""
    network.requires_grad_(True).train()
    forget_batches(network)
    _keep_frozen(network)


def _keep_frozen(network: SplitNetwork) -> None:
    """No gradients in frozen layers, which behave as in evaluation; no dropout of the backbone is at work then."""
    if not network.frozen:
        return
    for name, parameter in network.named_parameters():
        if name in network.frozen:
            parameter.requires_grad_(False)
    training = network.training
    network.backbone.eval()
    for name in trained_layers(network.backbone, network.spec.train):
        network.backbone.get_submodule(name).train(training)


def freeze_backbone(network: SplitNetwork) -> None:
    """Train neck and head only: no gradients in the backbone, its BatchNorm and dropout as in evaluation."""
    network.backbone.requires_grad_(False).eval()


def freeze_batch_norm(network: SplitNetwork) -> None:
    """FedBN+ (Kulkarni et al. 2023): BatchNorm keeps weight, bias, mean and variance.

    ``network.train()`` undoes half of it; use :func:`train_mode`.
    """
    for module in network.modules():
        if isinstance(module, BATCH_NORM):
            module.requires_grad_(False).eval()


def train_mode(network: SplitNetwork, *, frozen_batch_norm: bool = False, frozen_backbone: bool = False) -> None:
    """Go into training; call it wherever one would call ``network.train()``.

    ``model.train`` and the two flags alone decide what of the backbone is trained; what was frozen before does not
    count. Neck and head keep their ``requires_grad``.
    """
    network.train()
    network.backbone.requires_grad_(True)
    _keep_frozen(network)
    if frozen_backbone:
        freeze_backbone(network)
    if frozen_batch_norm:
        freeze_batch_norm(network)


def head_of(weight: Tensor, bias: Tensor) -> nn.Linear:
    """Return a dense layer of these values, ``(rows, features)`` and ``(rows,)``, without drawing any others."""
    rows, features = weight.shape
    head = nn.Linear(features, rows, device="meta")  # draws no random numbers there; its to_empty would import sympy
    head.weight, head.bias = nn.Parameter(weight), nn.Parameter(bias)
    return head


def _per_channel(values: Sequence[float]) -> Tensor:
    return 255 * torch.tensor(values, dtype=torch.float32).reshape(1, -1, 1, 1)
