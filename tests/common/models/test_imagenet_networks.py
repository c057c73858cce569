"""ResNet-18 and DenseNet-121 are torchvision's: its names, its initial weights, its features and gradients."""

from typing import Any

import pytest
import torch
from torch import nn

from polyclinic.common.models.zoo.registry import build_backbone, make_batch_norms_single_value_safe
from polyclinic.common.models.zoo.spec import ModelSpec


def torchvision_backbone(architecture: str, channels: int) -> Any:
    """Build torchvision's network without its last layer; its first convolution is for this number of channels."""
    from torchvision import models  # here: it takes two CPU seconds, each worker collects this module, and one runs it

    network: Any = models.get_model(architecture, weights=None)
    is_dense = architecture == "densenet121"
    if channels != 3:
        stem = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
        nn.init.kaiming_normal_(stem.weight, mode="fan_in" if is_dense else "fan_out", nonlinearity="relu")
        setattr(network.features if is_dense else network, "conv0" if is_dense else "conv1", stem)
    setattr(network, "classifier" if is_dense else "fc", nn.Identity())
    make_batch_norms_single_value_safe(network)
    return network


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("architecture", ["resnet18", "densenet121"])
def test_a_seed_gives_the_network_of_torchvision_to_the_bit(architecture: Any, channels: int) -> None:
    torch.manual_seed(5)
    spec = ModelSpec.model_validate({"architecture": architecture, "channels": channels, "image_size": 64})
    ours = build_backbone(spec).module
    drawn = torch.rand(3)
    torch.manual_seed(5)
    theirs = torchvision_backbone(architecture, channels)
    assert torch.equal(torch.rand(3), drawn)  # as many random numbers were drawn
    assert [name for name, _ in ours.named_modules()] == [name for name, _ in theirs.named_modules()]
    expected = theirs.state_dict()
    assert list(ours.state_dict()) == list(expected)
    assert all(torch.equal(values, expected[name]) for name, values in ours.state_dict().items())

    images = torch.rand(4, channels, 64, 64)
    features, same = ours.train()(images), theirs.train()(images)
    assert torch.equal(features, same)
    features.sum().backward()
    same.sum().backward()
    for parameter, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, other.grad)
