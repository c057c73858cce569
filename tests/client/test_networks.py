"""A process builds one network and fills it anew: no request sees anything of the one before."""

import numpy as np

from client.training.task import network_without_values
from common.models.network import build, freeze_backbone
from common.models.state import read_state, write_state
from common.models.zoo.spec import ModelSpec

SPEC = ModelSpec(architecture="tiny_cnn", channels=1, image_size=16, neck=8)


def test_a_filled_network_is_as_one_that_was_built_for_it() -> None:
    for names, seed in ((("a", "b"), 1), (("b",), 2), (("a", "b"), 3)):
        built = read_state(build(SPEC, names, seed))
        network = network_without_values(SPEC, names, "cpu")
        write_state(network, trunk=built.trunk, norm=built.norm, head=built.head)
        filled = read_state(network)
        assert filled.head.class_names == names
        for name in ("trunk", "norm"):
            np.testing.assert_array_equal(getattr(filled, name), getattr(built, name))
        np.testing.assert_array_equal(filled.head.weight, built.head.weight)
        np.testing.assert_array_equal(filled.head.bias, built.head.bias)


def test_what_was_frozen_learns_again_and_gradients_are_gone() -> None:
    network = network_without_values(SPEC, ("a", "b"), "cpu")
    network.head.weight.sum().backward()  # type: ignore[no-untyped-call]
    freeze_backbone(network)
    again = network_without_values(SPEC, ("a", "b"), "cpu")
    assert all(parameter.requires_grad and parameter.grad is None for parameter in again.parameters())


def test_of_other_classes_only_the_head_is_another_and_of_another_model_everything() -> None:
    first, second = network_without_values(SPEC, ("a", "b"), "cpu"), network_without_values(SPEC, ("c",), "cpu")
    assert first.backbone is second.backbone
    assert first.head is not second.head
    other = network_without_values(SPEC.model_copy(update={"neck": 4}), ("a", "b"), "cpu")
    assert other.backbone is not first.backbone
