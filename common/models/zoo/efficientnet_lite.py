"""EfficientNet-Lite0 (Google, 2020; after Tan and Le, "EfficientNet", 2019).

EfficientNet-B0 without squeeze-and-excitation, with ReLU6, and with stem and last convolution of fixed width.
Convolutions pad as TensorFlow does ("SAME": the odd pixel goes right and below), as the public ImageNet weights expect.
Departures: BatchNorm momentum is PyTorch's 0.1 (the original's 0.01 lags behind in short local epochs), and there is no
drop-connect. Names of layers are those of the public PyTorch weights without their leading underscores.
"""

import math
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

WIDTH = 1280


@dataclass(frozen=True)
class _Stage:
    repeats: int
    kernel: int
    stride: int
    expansion: int
    narrow: int
    wide: int


_STAGES = (
    _Stage(1, 3, 1, 1, 32, 16),
    _Stage(2, 3, 2, 6, 16, 24),
    _Stage(2, 5, 2, 6, 24, 40),
    _Stage(3, 3, 2, 6, 40, 80),
    _Stage(3, 5, 1, 6, 80, 112),
    _Stage(4, 5, 2, 6, 112, 192),
    _Stage(1, 3, 1, 6, 192, 320),
)


def _same_padding(side: int, kernel: int, stride: int) -> tuple[int, int]:
    """Pixels to add before and after so that the output has ``ceil(side / stride)``."""
    total = max((math.ceil(side / stride) - 1) * stride + kernel - side, 0)
    return total // 2, total - total // 2


class _SameConv2d(nn.Conv2d):
    """A square convolution without bias, padded as TensorFlow's "SAME"."""

    def __init__(self, narrow: int, wide: int, kernel: int, *, stride: int = 1, groups: int = 1) -> None:
        super().__init__(narrow, wide, kernel, stride=stride, groups=groups, bias=False)
        fan_out = kernel * kernel * wide // groups
        nn.init.normal_(self.weight, std=math.sqrt(2 / fan_out))

    def forward(self, maps: Tensor) -> Tensor:
        kernel, stride = self.kernel_size[0], self.stride[0]
        vertical = _same_padding(maps.shape[2], kernel, stride)
        horizontal = _same_padding(maps.shape[3], kernel, stride)
        return super().forward(functional.pad(maps, (*horizontal, *vertical)))


def _norm(width: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(width, eps=1e-3)


class _Block(nn.Module):
    """Inverted residual: widen by 1x1, convolve each channel by itself, narrow by 1x1."""

    def __init__(self, narrow: int, wide: int, stride: int, stage: _Stage) -> None:
        super().__init__()
        inner = narrow * stage.expansion
        self.widens = stage.expansion > 1
        self.has_shortcut = stride == 1 and narrow == wide
        if self.widens:
            self.expand_conv = _SameConv2d(narrow, inner, 1)
            self.bn0 = _norm(inner)
        self.depthwise_conv = _SameConv2d(inner, inner, stage.kernel, stride=stride, groups=inner)
        self.bn1 = _norm(inner)
        self.project_conv = _SameConv2d(inner, wide, 1)
        self.bn2 = _norm(wide)

    def forward(self, maps: Tensor) -> Tensor:
        inner: Tensor = functional.relu6(self.bn0(self.expand_conv(maps))) if self.widens else maps
        inner = functional.relu6(self.bn1(self.depthwise_conv(inner)))
        inner = self.bn2(self.project_conv(inner))
        return inner + maps if self.has_shortcut else inner


def _blocks(stage: _Stage) -> list[_Block]:
    """A stage's blocks; only the first of them strides and changes the width."""
    first = _Block(stage.narrow, stage.wide, stage.stride, stage)
    return [first, *(_Block(stage.wide, stage.wide, 1, stage) for _ in range(stage.repeats - 1))]


class EfficientNetLite0(nn.Module):
    """Images ``(batch, channels, height, width)`` to globally pooled features ``(batch, 1280)``."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv_stem = _SameConv2d(channels, 32, 3, stride=2)
        self.bn0 = _norm(32)
        self.blocks = nn.Sequential(*(block for stage in _STAGES for block in _blocks(stage)))
        self.conv_head = _SameConv2d(320, WIDTH, 1)
        self.bn1 = _norm(WIDTH)

    def forward(self, images: Tensor) -> Tensor:
        maps: Tensor = self.blocks(functional.relu6(self.bn0(self.conv_stem(images))))
        maps = functional.relu6(self.bn1(self.conv_head(maps)))  # (batch, 1280, height / 32, width / 32)
        return maps.mean((2, 3))
