"""The backbones by name: images in, one vector of features per image out."""

from collections.abc import Callable
from typing import Literal, NamedTuple, cast

import torch
from torch import nn

from common.errors import BadInput
from common.models.zoo.batch_norm import make_steady
from common.models.zoo.efficientnet_lite import WIDTH, EfficientNetLite0
from common.models.zoo.external import external_backbone
from common.models.zoo.small_cnns import fedsld_cnn, femnist_cnn, tiny_cnn
from common.models.zoo.spec import Architecture, is_external
from common.models.zoo.unifed_resnet import unifed_resnet18
from common.models.zoo.vgg import unifed_vgg11, vgg11


class Backbone(NamedTuple):
    """A module ``(batch, channels, size, size) -> (batch, width)``."""

    module: nn.Module
    width: int


def _densenet121(channels: int) -> nn.Module:
    """torchvision's, 1024 features after ReLU and global average pooling; its own head is taken off."""
    from torchvision.models import densenet121  # takes seconds to import

    network = densenet121(weights=None)
    if channels != 3:
        network.features.conv0 = _stem(channels, mode="fan_in")
    network.classifier = nn.Identity()
    return cast(nn.Module, network)


def _resnet18(channels: int) -> nn.Module:
    """torchvision's, 512 features after global average pooling; its own head is taken off."""
    from torchvision.models import resnet18

    network = resnet18(weights=None)
    if channels != 3:
        network.conv1 = _stem(channels, mode="fan_out")
    network.fc = nn.Identity()
    return cast(nn.Module, network)


def _stem(channels: int, mode: Literal["fan_in", "fan_out"]) -> nn.Conv2d:
    """The 7x7 convolution of both, for another number of channels, initialised as torchvision does."""
    stem = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
    nn.init.kaiming_normal_(stem.weight, mode=mode, nonlinearity="relu")
    return stem


_BACKBONES: dict[Architecture, Callable[[int, int], Backbone]] = {
    "densenet121": lambda channels, size: Backbone(_densenet121(channels), 1024),
    "resnet18": lambda channels, size: Backbone(_resnet18(channels), 512),
    "vgg11": lambda channels, size: Backbone(vgg11(channels), 512),
    "efficientnet_lite0": lambda channels, size: Backbone(EfficientNetLite0(channels), WIDTH),
    "fedsld_cnn": lambda channels, size: Backbone(fedsld_cnn(channels, size), 500),
    "femnist_cnn": lambda channels, size: Backbone(femnist_cnn(channels, size), 2048),
    "unifed_vgg11": lambda channels, size: Backbone(unifed_vgg11(channels), 4096),
    "unifed_resnet18": lambda channels, size: Backbone(unifed_resnet18(channels), 512),
    "tiny_cnn": lambda channels, size: Backbone(tiny_cnn(channels), 96),
}


def new_backbone(architecture: Architecture, channels: int, image_size: int) -> Backbone:
    """Return a freshly initialised backbone; draws from torch's current random state.

    Raises:
        BadInput: If it is one of others' and cannot be made.
    """
    if is_external(architecture):
        backbone = Backbone(*external_backbone(architecture, channels, image_size))
    else:
        backbone = _BACKBONES[architecture](channels, image_size)
    make_steady(backbone.module)
    return backbone


def outline(architecture: Architecture, channels: int, image_size: int) -> Backbone:
    """Return a backbone to be looked at, for its names and shapes: on the meta device, whose tensors take no memory.

    Only a plug-in whose code looks at values, as ``item`` does, is made with memory. torch's random state stays.

    Raises:
        BadInput: If it is one of others' and cannot be made.
    """
    with torch.random.fork_rng(devices=[]):
        try:
            with torch.device("meta"):
                return new_backbone(architecture, channels, image_size)
        except BadInput:
            if not architecture.startswith("plugin:"):
                raise
            return new_backbone(architecture, channels, image_size)


def first_convolution(backbone: nn.Module) -> str:
    """Return the name of the weight that meets the image; empty where there is no convolution."""
    found = (f"{name}.weight" for name, module in backbone.named_modules() if isinstance(module, nn.Conv2d))
    return next(found, "")
