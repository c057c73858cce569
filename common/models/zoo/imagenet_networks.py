"""ResNet-18 and DenseNet-121 without their last dense layer, with torchvision's tensor names and initial weights.

ResNet: He, Zhang, Ren, Sun, CVPR 2016. DenseNet: Huang, Liu, van der Maaten, Weinberger, CVPR 2017. Both are built
here, because importing torchvision also imports torch's compiler and sympy: 1.7 s of CPU time and 92 MB in each program
of a federation. The tensors have torchvision's names, so that its weights fit. Random numbers are drawn in
torchvision's order, even for values that are overwritten, so that equal seeds give equal models.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

RGB_CHANNELS = 3
IMAGENET_CLASSES = 1000
STEM_WIDTH = 64
"""Number of feature maps of the first convolution of both networks."""
RESNET18_WIDTHS = (64, 128, 256, 512)
"""Number of feature maps of each stage; a stage has two blocks."""
DENSENET121_LAYERS = (6, 12, 24, 16)
"""Number of layers in each dense block."""
GROWTH_RATE = 32
"""Number of feature maps that each layer of a dense block adds."""
BOTTLENECK_WIDTH = 128
"""Number of feature maps inside a layer of a dense block."""


def _make_stem_convolution(channels: int) -> nn.Conv2d:
    return nn.Conv2d(channels, STEM_WIDTH, 7, stride=2, padding=3, bias=False)


def _initialise_convolutions(network: nn.Module, mode: Literal["fan_in", "fan_out"]) -> None:
    """Draw the weights of all convolutions by He's rule (He, Zhang, Ren, Sun, ICCV 2015)."""
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode=mode, nonlinearity="relu")


# ---------------------------------------------------------------------- ResNet-18


class _BasicBlock(nn.Module):
    """A residual block of two 3x3 convolutions; a 1x1 convolution adapts the shortcut if the shape changes."""

    def __init__(self, narrow: int, wide: int, stride: int) -> None:
        super().__init__()
        downsample: nn.Sequential | None = None
        if stride != 1 or narrow != wide:  # torchvision also draws its weights before those of the block
            downsample = nn.Sequential(nn.Conv2d(narrow, wide, 1, stride=stride, bias=False), nn.BatchNorm2d(wide))
        self.conv1 = nn.Conv2d(narrow, wide, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(wide)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(wide, wide, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(wide)
        self.downsample = downsample

    def forward(self, maps: Tensor) -> Tensor:
        """Return feature maps ``(batch, wide, size / stride, size / stride)``."""
        inner = self.relu(self.bn1(self.conv1(maps)))
        inner = self.bn2(self.conv2(inner))
        inner += maps if self.downsample is None else self.downsample(maps)
        return self.relu(inner)  # type: ignore[no-any-return]


class ResNet18(nn.Module):
    """ResNet-18, which returns 512 globally average-pooled features."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = _make_stem_convolution(RGB_CHANNELS)
        self.bn1 = nn.BatchNorm2d(STEM_WIDTH)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        narrow = STEM_WIDTH
        for stage, wide in enumerate(RESNET18_WIDTHS, start=1):
            blocks = _BasicBlock(narrow, wide, stride=1 if stage == 1 else 2), _BasicBlock(wide, wide, stride=1)
            self.add_module(f"layer{stage}", nn.Sequential(*blocks))
            narrow = wide
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        nn.Linear(narrow, IMAGENET_CLASSES)  # draws random numbers for torchvision's last layer, too
        self.fc = nn.Identity()
        _initialise_convolutions(self, "fan_out")
        if channels != RGB_CHANNELS:
            self.conv1 = _make_stem_convolution(channels)
            _initialise_convolutions(self.conv1, "fan_out")

    def forward(self, images: Tensor) -> Tensor:
        """Return features ``(batch, 512)`` of images ``(batch, channels, size, size)``."""
        maps = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        for stage in range(1, len(RESNET18_WIDTHS) + 1):
            maps = getattr(self, f"layer{stage}")(maps)
        return self.fc(torch.flatten(self.avgpool(maps), 1))  # type: ignore[no-any-return]


# ---------------------------------------------------------------------- DenseNet-121


class _DenseLayer(nn.Module):
    """Computes new feature maps from all feature maps before it in its dense block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(width)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(width, BOTTLENECK_WIDTH, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(BOTTLENECK_WIDTH)
        self.relu2 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(BOTTLENECK_WIDTH, GROWTH_RATE, 3, padding=1, bias=False)

    def forward(self, maps: list[Tensor]) -> Tensor:
        """Return ``(batch, 32, size, size)``."""
        inner = self.conv1(self.relu1(self.norm1(torch.cat(maps, 1))))
        return self.conv2(self.relu2(self.norm2(inner)))  # type: ignore[no-any-return]


class _DenseBlock(nn.ModuleDict):
    """A block of layers in which each layer reads the feature maps of all layers before it."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        for index in range(layers):
            self.add_module(f"denselayer{index + 1}", _DenseLayer(width + index * GROWTH_RATE))

    def forward(self, maps: Tensor) -> Tensor:
        """Return the block's input and the feature maps of all its layers, concatenated: ``(batch, wide, size,
        size)``.
        """
        all_maps = [maps]
        for layer in self.values():
            all_maps.append(layer(all_maps))
        return torch.cat(all_maps, 1)


class _Transition(nn.Sequential):
    """Halves the number and the size of the feature maps."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv = nn.Conv2d(width, width // 2, 1, bias=False)
        self.pool = nn.AvgPool2d(2, stride=2)


class DenseNet121(nn.Module):
    """DenseNet-121, which returns 1024 globally average-pooled features."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.features = nn.Sequential()
        self.features.add_module("conv0", _make_stem_convolution(RGB_CHANNELS))
        self.features.add_module("norm0", nn.BatchNorm2d(STEM_WIDTH))
        self.features.add_module("relu0", nn.ReLU(inplace=True))
        self.features.add_module("pool0", nn.MaxPool2d(3, stride=2, padding=1))
        width = STEM_WIDTH
        for number, layers in enumerate(DENSENET121_LAYERS, start=1):
            self.features.add_module(f"denseblock{number}", _DenseBlock(layers, width))
            width += layers * GROWTH_RATE
            if number < len(DENSENET121_LAYERS):
                self.features.add_module(f"transition{number}", _Transition(width))
                width //= 2
        self.features.add_module("norm5", nn.BatchNorm2d(width))
        nn.Linear(width, IMAGENET_CLASSES)  # draws random numbers for torchvision's last layer, too
        self.classifier = nn.Identity()
        _initialise_convolutions(self, "fan_in")
        if channels != RGB_CHANNELS:
            self.features.conv0 = _make_stem_convolution(channels)
            _initialise_convolutions(self.features.conv0, "fan_in")

    def forward(self, images: Tensor) -> Tensor:
        """Return features ``(batch, 1024)`` of images ``(batch, channels, size, size)``."""
        maps = functional.relu(self.features(images), inplace=True)
        return self.classifier(torch.flatten(functional.adaptive_avg_pool2d(maps, (1, 1)), 1))  # type: ignore[no-any-return]
