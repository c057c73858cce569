"""A network whose convolutions hand the image on, so that its dense units can look at pixels."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from common.data.base.image_set import ImageSet
from common.data.images.pixels import channels_first
from common.models.network import SplitNetwork

DENSE = "backbone.7"
"""The dense layer of ``fedsld_cnn``, behind two convolutions with pooling."""
AT_A_TIME = 64


class Layers(NamedTuple):
    """The layers of ``fedsld_cnn``."""

    first: nn.Conv2d
    second: nn.Conv2d
    dense: nn.Linear


def layers_of(network: SplitNetwork) -> Layers:
    """Find the layers of a ``fedsld_cnn``."""
    first, second, dense = (network.get_submodule(f"backbone.{place}") for place in (0, 3, 7))
    assert isinstance(first, nn.Conv2d)
    assert isinstance(second, nn.Conv2d)
    assert isinstance(dense, nn.Linear)
    return Layers(first, second, dense)


@torch.no_grad()
def hand_images_on(network: SplitNetwork) -> None:
    """Set all to 0 but one number of each convolution, and the head: the dense layer then sees pixels from 0 to 1."""
    for value in network.parameters():
        value.zero_()
    layers, normalisation = layers_of(network), network.spec.normalisation
    layers.first.weight[0, 0, 2, 2], layers.second.weight[0, 0, 2, 2] = normalisation.std[0], 1.0
    assert layers.first.bias is not None
    layers.first.bias[0] = normalisation.mean[0]
    # Other weights for each class: of no image do the errors of all classes cancel one another.
    weights = torch.randn(len(network.class_names), 1, generator=torch.Generator().manual_seed(2))
    network.head.weight.copy_(1e-3 * weights.expand_as(network.head.weight))


@torch.no_grad()
def handed_on(network: SplitNetwork, images: ImageSet) -> Tensor:
    """What the dense layer sees of each image, ``(n, side, side)``."""
    backbone = network.backbone
    assert isinstance(backbone, nn.Sequential)
    convolutions, pixels = backbone[:6], channels_first(images.images).float()
    starts = range(0, len(pixels), AT_A_TIME)
    parts = [convolutions(network._prepared(pixels[start : start + AT_A_TIME]))[:, 0] for start in starts]
    return torch.cat(parts)
