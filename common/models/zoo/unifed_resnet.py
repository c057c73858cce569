"""The ResNet-18 of Hassani and Rekik, "UniFed", 2024: 12,563,095 parameters with 23 classes and one channel.

It differs from He et al.: every convolution has a bias, the shortcut of a striding block is a 3x3 convolution with
stride 2 instead of a 1x1, and weights start from PyTorch's default.
"""

from torch import Tensor, nn
from torch.nn import functional


def _convolution(narrow: int, wide: int, stride: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(narrow, wide, 3, stride=stride, padding=1), nn.BatchNorm2d(wide))


class _ResidualBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    def __init__(self, narrow: int, wide: int, stride: int) -> None:
        super().__init__()
        self.first = _convolution(narrow, wide, stride)
        self.second = _convolution(wide, wide, 1)
        self.shortcut = nn.Identity() if stride == 1 else _convolution(narrow, wide, stride)

    def forward(self, maps: Tensor) -> Tensor:
        inner: Tensor = self.second(functional.relu(self.first(maps)))
        return functional.relu(inner + self.shortcut(maps))


def unifed_resnet18(channels: int) -> nn.Sequential:
    """512 globally pooled features."""
    stages = [
        nn.Sequential(_ResidualBlock(narrow, wide, stride), _ResidualBlock(wide, wide, 1))
        for narrow, wide, stride in ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2))
    ]
    stem = nn.Sequential(
        nn.Conv2d(channels, 64, 7, stride=2, padding=3), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)
    )
    return nn.Sequential(stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten())
