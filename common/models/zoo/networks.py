"""Our own backbones (small CNNs, VGG-11, UniFed's ResNet-18, EfficientNet-Lite0) and batch normalisation layers.

The ResNet-18 is that of Hassani and Rekik, "UniFed", 2024 (12,563,095 parameters with 23 classes and one channel). It
differs from He et al.: every convolution has a bias, the shortcut of a striding block is a 3x3 convolution with stride
2 instead of a 1x1, and weights start from PyTorch's default. VGG-11 (Simonyan and Zisserman, 2015) has batch
normalisation; there are two variants, torchvision's and UniFed's.

EfficientNet-Lite0 (Google, 2020; after Tan and Le, "EfficientNet", 2019) is EfficientNet-B0 without
squeeze-and-excitation, with ReLU6, and with stem and last convolution of fixed width. Convolutions use TensorFlow's
"SAME" padding (the odd pixel goes right and below), which the public ImageNet weights expect. Departures: BatchNorm
momentum is PyTorch's 0.1, because the original 0.01 lags behind in short local epochs, and there is no drop-connect.
Layers have the names of the public PyTorch weights without leading underscores.
"""

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

from polyclinic.common.errors import BadInput, Fault


class SingleValueSafeBatchNorm(nn.Module):
    """Mixin that lets a batch normalisation train on a batch with a single value per channel.

    PyTorch raises an error for such a batch, for instance for a single image with 1x1 feature maps. At the smallest
    image size, the last batch of an epoch can be of this kind. A single value has no variance, so this mixin normalises
    it by the running statistics, which do not change. All other batches are normalised as usual.
    """

    def forward(self, maps: Tensor, *more: Any, **options: Any) -> Tensor:
        """Normalise feature maps ``(batch, channels, ...)``; further arguments are passed on to the base class."""
        has_variance = maps.numel() != maps.shape[1]
        # PyTorch accepts two equal images, although these have no variance either.
        if not has_variance and getattr(self, "running_mean", maps) is None:
            return super().forward(torch.cat([maps, maps]), *more, **options)[:1]  # type: ignore[no-any-return]
        if has_variance or not self.training:
            return super().forward(maps, *more, **options)  # type: ignore[no-any-return]
        self.training = False  # not eval(), which would also switch the layers inside timm's BatchNormAct2d
        try:
            return super().forward(maps, *more, **options)  # type: ignore[no-any-return]
        finally:
            self.training = True


_SINGLE_VALUE_SAFE_CLASSES = dict[type[nn.Module], type[nn.Module]]()


def _make_safe_norm_subclass(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a cached subclass of a batch normalisation class with the mixin :class:`SingleValueSafeBatchNorm`."""
    if kind not in _SINGLE_VALUE_SAFE_CLASSES:
        later = getattr(kind, "cls_to_become", None)  # the class that torch gives a lazy layer at its first call
        attributes = {"cls_to_become": _make_safe_norm_subclass(later)} if later else {}
        _SINGLE_VALUE_SAFE_CLASSES[kind] = type(f"Steady{kind.__name__}", (SingleValueSafeBatchNorm, kind), attributes)
    return _SINGLE_VALUE_SAFE_CLASSES[kind]


_HAS_STATISTICS_CACHE = WeakKeyDictionary[nn.Module, bool]()
_MAX_NUMBERS_PER_CHANNEL = 4
"""Maximum number of values per channel in a parameter of a normalisation layer; a larger one is a layer's weight
matrix.
"""


def is_batch_norm(layer: nn.Module) -> bool:
    """Return True if a layer is a batch normalisation, of any class and library; its buffers decide.

    A layer with a buffer ``running_var`` is one. So is a layer whose float buffers are statistics that training
    computes from its inputs and evaluation uses, if its parameters have at most a few values per channel.
    """
    if isinstance(layer, nn.modules.batchnorm._BatchNorm):
        return True
    # The two buffers of spectral norm belong to weights, not to images.
    if type(layer).__module__ == "torch.nn.utils.parametrizations":
        return False
    buffers = {name: value for name, value in layer.named_buffers(recurse=False) if value.is_floating_point()}
    if "running_var" in buffers:
        return True
    # The second largest side of each parameter, which is 1 for a vector or a number.
    if not buffers or any(sorted([1, 1, *value.shape])[-2] > _MAX_NUMBERS_PER_CHANNEL for value in layer.parameters()):
        return False
    if layer not in _HAS_STATISTICS_CACHE:
        _HAS_STATISTICS_CACHE[layer] = _has_running_statistics(layer, list(buffers))
    return _HAS_STATISTICS_CACHE[layer]


def _has_running_statistics(layer: nn.Module, buffers: list[str]) -> bool:
    """Return True if training changes a layer's buffers depending on its inputs, and evaluation uses the changed
    buffers.

    The check passes inputs of several shapes through copies of the layer.

    Args:
        layer: The layer.
        buffers: Names of the layer's float buffers.
    """

    def call_copy_in_training(maps: Tensor) -> nn.Module:
        copied = copy.deepcopy(layer).to_empty(device="cpu").train()  # the layer may be on the meta device
        for value in (*copied.parameters(), *copied.buffers()):
            value.fill_(1)
        torch.default_generator.manual_seed(0)
        copied(maps)
        return copied

    values = [*(layer.get_buffer(name) for name in buffers), *layer.parameters()]
    sides = {side for value in values for side in value.shape if side > 1} or {1, 3}
    shapes = [(4, *value.shape) for value in values if value.ndim > 1]  # statistics of each position
    for channels in sorted(sides, reverse=True):
        shapes += [(4, channels, 3, 3), (4, channels, 3), (4, channels), (4, 3, 3, channels)]
    for shape in shapes:
        maps = torch.linspace(0, 3, math.prod(shape), dtype=values[0].dtype).reshape(shape)
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                probe, other = map(call_copy_in_training, (maps, maps.square()))
                changed = [name for name in buffers if not torch.equal(probe.get_buffer(name), other.get_buffer(name))]
                outputs = list[Tensor]()
                for number in (1, 2):
                    for name in changed:
                        probe.get_buffer(name).fill_(number)
                    outputs.append(probe.eval()(maps))
            if changed and not torch.equal(*outputs):
                return True
        except Exception:  # the layer does not accept this shape; code of another package may raise anything
            continue
    return False


def find_statistics_beside_batch_norm(network: nn.Module, size: tuple[int, ...]) -> list[str]:
    """Return the names of float buffers outside batch normalisation layers whose values depend on training images.

    Such a buffer may, for instance, belong to a layer that combines batch normalisation and a convolution. The check
    passes two batches of noise through copies of the network.

    Args:
        network: The network.
        size: Shape of a batch of images, ``(batch, channels, height, width)``.
    """
    norms = {name for name, layer in network.named_modules() if is_batch_norm(layer)}
    device = next((value.device for value in network.parameters()), torch.device("cpu"))
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        first, second = torch.rand((2, *size), device=device)
        copies = list[dict[str, Tensor]]()
        for images in (first, second.square()):
            probe = copy.deepcopy(network).train()
            torch.default_generator.manual_seed(0)
            for _ in range(2):
                probe(images)
            copies.append(dict(probe.named_buffers()))
    return [
        name
        for name, value in copies[0].items()
        if value.is_floating_point()
        and not value.is_meta
        and name.rpartition(".")[0] not in norms
        and not torch.equal(value, copies[1][name])
    ]


def make_batch_norms_single_value_safe(module: nn.Module) -> None:
    """Turn every batch normalisation inside ``module`` into a :class:`SingleValueSafeBatchNorm`, in place."""
    for layer in module.modules():
        if is_batch_norm(layer) and not isinstance(layer, SingleValueSafeBatchNorm):
            layer.__class__ = _make_safe_norm_subclass(type(layer))


MAX_NORM_GROUPS = 32
_PLAIN_BATCH_NORMS: tuple[type[nn.Module], ...] = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_PLAIN_BATCH_NORMS += tuple(map(_make_safe_norm_subclass, _PLAIN_BATCH_NORMS))


def replace_with_group_norm(module: nn.Module) -> None:
    """Replace every batch normalisation inside ``module`` by group normalisation, in place; weight and bias are kept.

    The number of groups is the greatest common divisor of the number of channels and 32, the number in Wu and He,
    "Group Normalization", ECCV 2018.

    Raises:
        BadInput: If a batch normalisation also does something else, such as timm's with an activation.
    """
    for name, child in module.named_children():
        if is_batch_norm(child):
            kind = type(child) if isinstance(child, SingleValueSafeBatchNorm) else _make_safe_norm_subclass(type(child))
            if kind not in _PLAIN_BATCH_NORMS:  # timm's BatchNormAct2d applies an activation, too
                name = kind.__name__.removeprefix("Steady")
                problem = f"group normalisation cannot take the place of {name}, which is not torch's or does more."
                raise BadInput([Fault("model.norm", problem, 'Use "batch".')])
            assert isinstance(child, nn.modules.batchnorm._BatchNorm)
            grouped = nn.GroupNorm(math.gcd(MAX_NORM_GROUPS, child.num_features), child.num_features, eps=child.eps)
            grouped.load_state_dict({key: child.state_dict()[key] for key in ("weight", "bias")})
            setattr(module, name, grouped)
        replace_with_group_norm(child)


def _build_two_conv_features(channels: int, image_size: int, maps: tuple[int, int], width: int) -> nn.Sequential:
    """Build two unpadded 5x5 convolutions, each with 2x2 max pooling and ReLU, then one dense layer with ReLU.

    ReLU comes after pooling, which gives the same numbers at a quarter of the cost.

    Args:
        maps: Numbers of output channels of the two convolutions.
        width: Number of outputs of the dense layer.
    """
    side = ((image_size - 4) // 2 - 4) // 2
    return nn.Sequential(
        nn.Conv2d(channels, maps[0], 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(maps[0], maps[1], 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Flatten(),
        nn.Linear(maps[1] * side * side, width), nn.ReLU(),
    )  # fmt: skip


def fedsld_cnn(channels: int, image_size: int) -> nn.Sequential:
    """Build the network of Luo and Wu, "FedSLD", 2021: 500 features; 431,080 parameters with 10 classes at 1x28x28."""
    return _build_two_conv_features(channels, image_size, maps=(20, 50), width=500)


def femnist_cnn(channels: int, image_size: int) -> nn.Sequential:
    """Build LEAF's FEMNIST network, "CNN" of Hassani and Rekik, "UniFed", 2024, with 2048 features.

    3,378,071 parameters with 23 classes at 1x32x32.
    """
    return _build_two_conv_features(channels, image_size, maps=(32, 64), width=2048)


def tiny_cnn(channels: int) -> nn.Sequential:
    """Build a small network for the demo and tests: 96 features, about 53,000 parameters, images of at least
    16 pixels.
    """
    return _build_tiny_features((channels, 24, 48, 96), nn.Conv2d, nn.BatchNorm2d, nn.MaxPool2d, nn.AdaptiveAvgPool2d)


def tiny_cnn_3d(channels: int) -> nn.Sequential:
    """Build a small network of volumes for demos and tests: 64 features, about 70,000 parameters, at least 8 voxels a
    side.
    """
    return _build_tiny_features((channels, 16, 32, 64), nn.Conv3d, nn.BatchNorm3d, nn.MaxPool3d, nn.AdaptiveAvgPool3d)


def _build_tiny_features(
    widths: Sequence[int],
    convolution: Callable[..., nn.Module],
    norm: Callable[[int], nn.Module],
    pooling: Callable[[int], nn.Module],
    mean: Callable[[int], nn.Module],
) -> nn.Sequential:
    """Build a block of convolution, normalisation and pooling for each pair of widths, then the mean over all
    positions.
    """
    blocks = [
        nn.Sequential(convolution(narrow, wide, 3, padding=1, bias=False), norm(wide), pooling(2), nn.ReLU())
        for narrow, wide in pairwise(widths)
    ]
    return nn.Sequential(*blocks, mean(1), nn.Flatten())


_CONVOLUTIONS_BY_STAGE = ((64,), (128,), (256, 256), (512, 512), (512, 512))


def _build_vgg11_convolutions(channels: int) -> nn.Sequential:
    """Build the convolutional part of VGG-11, with the layer numbers of torchvision's ``vgg11_bn().features``."""
    layers: list[nn.Module] = []
    for stage in _CONVOLUTIONS_BY_STAGE:
        for width in stage:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers)


def vgg11(channels: int) -> nn.Sequential:
    """Build VGG-11 with batch normalisation, and global average pooling to 512 features in place of its dense layers.

    The two dense layers of 4096 would add 119 million parameters to every message. Layer names and initialisation are
    torchvision's.
    """
    convolutions = _build_vgg11_convolutions(channels)
    for layer in convolutions:
        if isinstance(layer, nn.Conv2d):
            assert layer.bias is not None
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            nn.init.zeros_(layer.bias)
    return nn.Sequential(OrderedDict(features=convolutions, pool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten()))


def unifed_vgg11(channels: int) -> nn.Sequential:
    """Build the VGG-11 of Hassani and Rekik (UniFed, 2024): 4096 features; 28,201,623 parameters with 23 classes.

    Initialisation is PyTorch's default. Departure from the paper: we pool to 1x1 before the dense layers, to accept
    images larger than the paper's 32 pixels, for which pooling has no effect.
    """
    dense = nn.Sequential(
        nn.Linear(512, 4096), nn.ReLU(), nn.Dropout(0.5),
        nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout(0.5),
    )  # fmt: skip
    return nn.Sequential(
        OrderedDict(
            features=_build_vgg11_convolutions(channels),
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            dense=dense,
        )
    )


def _make_convolution_with_batch_norm(narrow: int, wide: int, stride: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(narrow, wide, 3, stride=stride, padding=1), nn.BatchNorm2d(wide))


class _ResidualBlock(nn.Module):
    """A residual block of UniFed's ResNet-18: two 3x3 convolutions and a shortcut."""

    def __init__(self, narrow: int, wide: int, stride: int) -> None:
        super().__init__()
        self.first = _make_convolution_with_batch_norm(narrow, wide, stride)
        self.second = _make_convolution_with_batch_norm(wide, wide, 1)
        self.shortcut = nn.Identity() if stride == 1 else _make_convolution_with_batch_norm(narrow, wide, stride)

    def forward(self, maps: Tensor) -> Tensor:
        inner: Tensor = self.second(functional.relu(self.first(maps)))
        return functional.relu(inner + self.shortcut(maps))


def unifed_resnet18(channels: int) -> nn.Sequential:
    """Build the ResNet-18 of Hassani and Rekik (UniFed, 2024), with 512 globally pooled features."""
    stages = [
        nn.Sequential(_ResidualBlock(narrow, wide, stride), _ResidualBlock(wide, wide, 1))
        for narrow, wide, stride in ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2))
    ]
    stem = nn.Sequential(
        nn.Conv2d(channels, 64, 7, stride=2, padding=3), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)
    )
    return nn.Sequential(stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten())


EFFICIENTNET_WIDTH = 1280
"""Number of features of EfficientNet-Lite0."""


@dataclass(frozen=True)
class _EfficientNetStage:
    repeats: int
    kernel: int
    stride: int
    expansion: int
    narrow: int
    wide: int


_EFFICIENTNET_STAGES = (
    _EfficientNetStage(1, 3, 1, 1, 32, 16),
    _EfficientNetStage(2, 3, 2, 6, 16, 24),
    _EfficientNetStage(2, 5, 2, 6, 24, 40),
    _EfficientNetStage(3, 3, 2, 6, 40, 80),
    _EfficientNetStage(3, 5, 1, 6, 80, 112),
    _EfficientNetStage(4, 5, 2, 6, 112, 192),
    _EfficientNetStage(1, 3, 1, 6, 192, 320),
)


def _compute_same_padding(side: int, kernel: int, stride: int) -> tuple[int, int]:
    """Return the padding before and after one dimension that makes a convolution's output ``ceil(side / stride)``."""
    total = max((math.ceil(side / stride) - 1) * stride + kernel - side, 0)
    return total // 2, total - total // 2


class _SamePaddingConv2d(nn.Conv2d):
    """A square convolution without bias, with the padding that TensorFlow calls "SAME"."""

    def __init__(self, narrow: int, wide: int, kernel: int, *, stride: int = 1, groups: int = 1) -> None:
        super().__init__(narrow, wide, kernel, stride=stride, groups=groups, bias=False)
        fan_out = kernel * kernel * wide // groups
        nn.init.normal_(self.weight, std=math.sqrt(2 / fan_out))

    def forward(self, maps: Tensor) -> Tensor:
        kernel = self.kernel_size[0]
        stride = self.stride[0]
        vertical = _compute_same_padding(maps.shape[2], kernel, stride)
        horizontal = _compute_same_padding(maps.shape[3], kernel, stride)
        return super().forward(functional.pad(maps, (*horizontal, *vertical)))


def _make_efficientnet_batch_norm(width: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(width, eps=1e-3)


class _InvertedResidualBlock(nn.Module):
    """An inverted residual block (MBConv): 1x1 expansion, depthwise convolution, 1x1 projection."""

    def __init__(self, narrow: int, wide: int, stride: int, stage: _EfficientNetStage) -> None:
        super().__init__()
        inner = narrow * stage.expansion
        self.widens = stage.expansion > 1
        self.has_shortcut = stride == 1 and narrow == wide
        if self.widens:
            self.expand_conv = _SamePaddingConv2d(narrow, inner, 1)
            self.bn0 = _make_efficientnet_batch_norm(inner)
        self.depthwise_conv = _SamePaddingConv2d(inner, inner, stage.kernel, stride=stride, groups=inner)
        self.bn1 = _make_efficientnet_batch_norm(inner)
        self.project_conv = _SamePaddingConv2d(inner, wide, 1)
        self.bn2 = _make_efficientnet_batch_norm(wide)

    def forward(self, maps: Tensor) -> Tensor:
        inner: Tensor = functional.relu6(self.bn0(self.expand_conv(maps))) if self.widens else maps
        inner = functional.relu6(self.bn1(self.depthwise_conv(inner)))
        inner = self.bn2(self.project_conv(inner))
        return inner + maps if self.has_shortcut else inner


class EfficientNetLite0(nn.Module):
    """The EfficientNet-Lite0 backbone: images ``(batch, channels, height, width)`` to features ``(batch, 1280)``."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv_stem = _SamePaddingConv2d(channels, 32, 3, stride=2)
        self.bn0 = _make_efficientnet_batch_norm(32)
        blocks = list[_InvertedResidualBlock]()
        for stage in _EFFICIENTNET_STAGES:  # only the first block of a stage strides and changes the width
            blocks.append(_InvertedResidualBlock(stage.narrow, stage.wide, stage.stride, stage))
            blocks += [_InvertedResidualBlock(stage.wide, stage.wide, 1, stage) for _ in range(stage.repeats - 1)]
        self.blocks = nn.Sequential(*blocks)
        self.conv_head = _SamePaddingConv2d(320, EFFICIENTNET_WIDTH, 1)
        self.bn1 = _make_efficientnet_batch_norm(EFFICIENTNET_WIDTH)

    def forward(self, images: Tensor) -> Tensor:
        maps: Tensor = self.blocks(functional.relu6(self.bn0(self.conv_stem(images))))
        maps = functional.relu6(self.bn1(self.conv_head(maps)))  # (batch, 1280, height / 32, width / 32)
        return maps.mean((2, 3))
