"""Three small convolutional networks, PyTorch's default initialisation."""

from itertools import pairwise

from torch import nn


def _conv_conv_dense(channels: int, image_size: int, maps: tuple[int, int], width: int) -> nn.Sequential:
    """Two unpadded 5x5 convolutions, each with ReLU and 2x2 pooling, then one dense layer with ReLU.

    ReLU comes after pooling, as the larger of two is not changed by it: the same numbers, a quarter of the ReLUs.
    """
    side = ((image_size - 4) // 2 - 4) // 2
    return nn.Sequential(
        nn.Conv2d(channels, maps[0], 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(maps[0], maps[1], 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Flatten(),
        nn.Linear(maps[1] * side * side, width), nn.ReLU(),
    )  # fmt: skip


def fedsld_cnn(channels: int, image_size: int) -> nn.Sequential:
    """Luo and Wu, "FedSLD", 2021: 500 features; 431,080 parameters with 10 classes at 1x28x28."""
    return _conv_conv_dense(channels, image_size, maps=(20, 50), width=500)


def femnist_cnn(channels: int, image_size: int) -> nn.Sequential:
    """LEAF's FEMNIST network, "CNN" of Hassani and Rekik, "UniFed", 2024: 2048 features; 3,378,071 parameters
    with 23 classes at 1x32x32.
    """
    return _conv_conv_dense(channels, image_size, maps=(32, 64), width=2048)


def tiny_cnn(channels: int) -> nn.Sequential:
    """Our own, for the demo and for tests: 96 features, about 53,000 parameters, any image of 16 pixels or more."""
    widths = (channels, 24, 48, 96)
    blocks = [
        nn.Sequential(
            nn.Conv2d(narrow, wide, 3, padding=1, bias=False), nn.BatchNorm2d(wide), nn.MaxPool2d(2), nn.ReLU()
        )
        for narrow, wide in pairwise(widths)
    ]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten())
