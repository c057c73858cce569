"""VGG-11 with batch normalisation (Simonyan and Zisserman, 2015), in torchvision's and in UniFed's form."""

from collections import OrderedDict

from torch import nn

_CONVOLUTIONS_BY_STAGE = ((64,), (128,), (256, 256), (512, 512), (512, 512))


def _convolutions(channels: int) -> nn.Sequential:
    """The convolutional part; layers are numbered as in torchvision's ``vgg11_bn().features``."""
    layers: list[nn.Module] = []
    for stage in _CONVOLUTIONS_BY_STAGE:
        for width in stage:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers)


def vgg11(channels: int) -> nn.Sequential:
    """VGG-11-BN with global average pooling to 512 features instead of the two dense layers of 4096.

    Those layers hold 119 of its 128 million parameters, all of which would travel every round. Names and initialisation
    of what is left are torchvision's.
    """
    convolutions = _convolutions(channels)
    for layer in convolutions:
        if isinstance(layer, nn.Conv2d):
            assert layer.bias is not None
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            nn.init.zeros_(layer.bias)
    return nn.Sequential(OrderedDict(features=convolutions, pool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten()))


def unifed_vgg11(channels: int) -> nn.Sequential:
    """Hassani and Rekik, "UniFed", 2024: 4096 features; 28,201,623 parameters with 23 classes and one channel.

    PyTorch's default initialisation. At 32 pixels, the paper's size, the pooling to 1x1 changes nothing; it is ours and
    lets larger images in.
    """
    dense = nn.Sequential(
        nn.Linear(512, 4096), nn.ReLU(), nn.Dropout(0.5),
        nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout(0.5),
    )  # fmt: skip
    return nn.Sequential(
        OrderedDict(features=_convolutions(channels), pool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), dense=dense)
    )
