"""A small U-Net for segmentation of pictures and volumes (after Ronneberger, Fischer and Brox, MICCAI 2015).

It returns a feature map of the image's size; the run's head, a 1x1 convolution with a row for each class, follows.
Departures: three levels, batch normalisation, and a decoder that resizes maps to the size of the encoder's, so that any
image size from 8 pixels is accepted.
"""

from torch import Tensor, cat, nn
from torch.nn import functional

UNET_WIDTH = 16
"""Number of features of each pixel before the head."""
_CONVOLUTIONS = {2: nn.Conv2d, 3: nn.Conv3d}
_NORMS = {2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
_POOLS = {2: nn.MaxPool2d, 3: nn.MaxPool3d}
_RESIZING = {2: "bilinear", 3: "trilinear"}


class TinyUNet(nn.Module):
    """A U-Net of three levels with 16, 32 and 64 features, about 120,000 parameters in 2D.

    Args:
        channels: Channels of the images.
        dimensions: 2 for pictures ``(batch, channels, height, width)``, 3 for volumes with a depth before the height.
    """

    def __init__(self, channels: int, dimensions: int = 2) -> None:
        super().__init__()
        width = UNET_WIDTH
        self._resizing = _RESIZING[dimensions]
        self.first = _make_double_convolution(channels, width, dimensions)
        self.second = _make_double_convolution(width, 2 * width, dimensions)
        self.third = _make_double_convolution(2 * width, 4 * width, dimensions)
        self.second_up = _make_double_convolution(4 * width + 2 * width, 2 * width, dimensions)
        self.first_up = _make_double_convolution(2 * width + width, width, dimensions)
        self.pool = _POOLS[dimensions](2)

    def forward(self, images: Tensor) -> Tensor:
        """Return features ``(batch, 16, *spatial)``, of the images' height and width (and depth)."""
        first = self.first(images)
        second = self.second(self.pool(first))
        third = self.third(self.pool(second))
        second = self.second_up(cat([self._resize(third, second), second], 1))
        features: Tensor = self.first_up(cat([self._resize(second, first), first], 1))
        return features

    def _resize(self, maps: Tensor, target: Tensor) -> Tensor:
        return functional.interpolate(maps, target.shape[2:], mode=self._resizing)


def _make_double_convolution(narrow: int, wide: int, dimensions: int) -> nn.Sequential:
    layers = list[nn.Module]()
    for channels in (narrow, wide):
        layers += [
            _CONVOLUTIONS[dimensions](channels, wide, 3, padding=1, bias=False),
            _NORMS[dimensions](wide),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers)
