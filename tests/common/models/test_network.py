import copy
import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from polyclinic.common.errors import BadInput
from polyclinic.common.models.network import (
    EVALUATION_BATCH_SIZE,
    SplitNetwork,
    build_network,
    compute_features_and_logits,
    compute_logits,
    freeze_backbone,
    freeze_batch_norm,
    set_train_mode,
    unfreeze_network,
)
from polyclinic.common.models.zoo.networks import is_batch_norm, replace_with_group_norm
from polyclinic.common.models.zoo.spec import (
    SEGMENTATION_NETWORKS,
    TRAITS_BY_ARCHITECTURE,
    Architecture,
    ModelSpec,
    Task,
)
from tests.federations import read_vectors

SURGICAL = read_vectors("surgical.json")


def tiny(names: tuple[str, ...] = ("a", "b"), **more: Any) -> SplitNetwork:
    return build_network(ModelSpec(architecture="tiny_cnn", image_size=16, **more), names, seed=3)


def pixels(channels: int, size: int, batch: int = 2) -> Tensor:
    shape = (batch, channels, size, size)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def parameters(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def trainable_tensors(network: nn.Module) -> int:
    return sum(parameter.requires_grad for parameter in network.parameters())


@pytest.mark.parametrize(
    ("architecture", "channels", "image_size", "classes", "expected"),
    [
        ("fedsld_cnn", 1, 28, 10, 431_080),
        ("femnist_cnn", 1, 32, 23, 3_378_071),
        ("unifed_vgg11", 1, 32, 23, 28_201_623),
        ("unifed_resnet18", 1, 32, 23, 12_563_095),
        ("tiny_cnn", 1, 28, 3, 52_683),  # 9*24 + 9*24*48 + 9*48*96 + 2*(24 + 48 + 96) + 97*3
        ("tiny_cnn_3d", 1, (24, 24, 24), 3, 69_971),  # 27*(16 + 16*32 + 32*64) + 2*(16 + 32 + 64) + 65*3
        # The published 1000-class totals less their classifiers: 7,978,856; 11,689,512; EfficientNet-Lite0 4,652,008.
        ("densenet121", 3, 32, 0, 6_953_856),
        ("resnet18", 3, 32, 0, 11_176_512),
        ("vgg11", 3, 32, 0, 9_225_984),
        ("efficientnet_lite0", 3, 32, 0, 3_371_008),
    ],
)
def test_networks_and_backbones_have_the_published_parameters(
    architecture: Architecture, channels: Literal[1, 3], image_size: Any, classes: int, expected: int
) -> None:
    spec = ModelSpec(architecture=architecture, channels=channels, image_size=image_size)
    network = build_network(spec, [str(index) for index in range(classes or 1)], seed=0)
    assert parameters(network if classes else network.backbone) == expected


@pytest.mark.skipif(not SURGICAL, reason="no shared/vectors here")
def test_densenet_with_neck_trains_as_many_tensors_as_the_authors_model() -> None:
    expected = SURGICAL["densenet121_trainable_tensors"]
    network = build_network(
        ModelSpec(architecture="densenet121", image_size=32, neck=256), [str(i) for i in range(14)], seed=0
    )
    assert trainable_tensors(network) == expected["all"] == 366
    freeze_batch_norm(network)
    assert trainable_tensors(network) == expected["FedBN+_frozen_BN"] == 124


@pytest.mark.parametrize(
    ("architecture", "channels"), [*((name, 1) for name in TRAITS_BY_ARCHITECTURE), ("tiny_cnn", 3)]
)
def test_every_architecture_trains_at_its_minimum_size_even_on_a_single_image(
    architecture: Architecture, channels: Literal[1, 3]
) -> None:
    size: Any = TRAITS_BY_ARCHITECTURE[architecture].minimum_size
    size = (size, size, size) if TRAITS_BY_ARCHITECTURE[architecture].takes_volumes else size
    task: Task = "segmentation" if architecture in SEGMENTATION_NETWORKS else "multi_label"
    spec = ModelSpec(architecture=architecture, channels=channels, image_size=size, task=task)
    network = build_network(spec, ["a", "b"], seed=0)
    set_train_mode(network)
    for batch in (2, 1):
        network.zero_grad()
        images = np.random.default_rng(1).integers(0, 256, (batch, *spec.input_shape), dtype=np.uint8)
        logits = network(torch.from_numpy(images))
        logits.square().sum().backward()
        assert logits.shape[:2] == (batch, 2)
        gradients = [parameter.grad for parameter in network.parameters()]
        assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)


def test_the_same_seed_gives_the_same_network_and_leaves_torch_s_own_random_state_alone() -> None:
    before = torch.get_rng_state()
    networks = tiny(), tiny(), build_network(tiny().spec, ("a", "b"), seed=4)
    assert torch.equal(before, torch.get_rng_state())
    first, same, other = (network.state_dict()["backbone.0.0.weight"] for network in networks)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_a_site_s_head_rows_equal_the_coordinator_s_whatever_other_classes_there_are() -> None:
    whole, part = tiny(("a", "b", "c", "d")), tiny(("d", "b"))
    assert torch.equal(whole.head.weight[[3, 1]], part.head.weight)
    assert torch.equal(whole.head.bias[[3, 1]], part.head.bias)
    assert torch.equal(whole.backbone.state_dict()["2.0.weight"], part.backbone.state_dict()["2.0.weight"])


def test_head_rows_are_spread_as_torch_s_linear_layer_spreads_them() -> None:
    network = tiny(tuple(str(index) for index in range(500)))
    bound = 96**-0.5
    assert float(network.head.weight.detach().abs().max()) <= bound
    assert float(network.head.weight.detach().std()) == pytest.approx(bound / 3**0.5, rel=0.02)
    assert float(network.head.bias.detach().std()) == pytest.approx(bound / 3**0.5, rel=0.1)


def test_pixels_are_normalised_inside_and_uint8_and_float_are_alike() -> None:
    network = tiny(channels=1, mean=(0.25,), std=(0.5,)).eval()
    images = pixels(1, 16)
    assert torch.equal(network(images), network(images.float()))
    expected = network.head(network.neck(network.backbone((images / 255 - 0.25) / 0.5)))
    torch.testing.assert_close(network(images), expected)


def test_images_are_brought_to_the_network_s_size() -> None:
    network = tiny(channels=1).eval()
    images = pixels(1, 23).float()
    smaller = functional.interpolate(images, (16, 16), mode="bilinear", antialias=True)
    assert torch.equal(network(images), network(smaller))


def test_grey_is_repeated_for_a_colour_network_and_colour_becomes_luminance_for_a_grey_one() -> None:
    grey, colour = pixels(1, 16), pixels(3, 16)
    wants_colour, wants_grey = tiny(channels=3).eval(), tiny(channels=1).eval()
    assert torch.equal(wants_colour(grey), wants_colour(grey.expand(-1, 3, -1, -1)))
    luminance = 0.299 * colour[:, :1] + 0.587 * colour[:, 1:2] + 0.114 * colour[:, 2:]
    torch.testing.assert_close(wants_grey(colour), wants_grey(luminance))


def trained_for_three_steps(network: SplitNetwork) -> SplitNetwork:
    optimiser = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    for step in range(3):
        optimiser.zero_grad()
        network(pixels(3, 16 + step, batch=4)).square().sum().backward()
        optimiser.step()
    return network


def changed(network: SplitNetwork, part: str) -> set[bool]:
    """Return whether tensors of ``part`` differ from a new network's; both answers where some do and some do not."""
    new, now = tiny(neck=8).state_dict(), network.state_dict()
    return {not torch.equal(new[name], now[name]) for name in new if part in name}


@pytest.mark.parametrize(
    ("frozen", "still", "moving"),
    [
        # Weight, bias, running mean and variance, and counter of batch normalisation.
        ({"frozen_batch_norm": True}, "backbone.0.1.", ("backbone.0.0.", "neck", "head")),
        ({"frozen_backbone": True}, "backbone", ("neck", "head")),
    ],
)
def test_frozen_parts_do_not_move_and_all_else_does(
    frozen: dict[str, bool], still: str, moving: tuple[str, ...]
) -> None:
    network = tiny(neck=8)
    set_train_mode(network, **frozen)
    trained_for_three_steps(network)
    assert changed(network, still) == {False}
    assert [changed(network, part) for part in moving] == [{True}] * len(moving)


@pytest.mark.parametrize("undo", [set_train_mode, unfreeze_network])
def test_train_mode_and_unfreeze_undo_a_freeze(undo: Callable[[SplitNetwork], None]) -> None:
    network = tiny(neck=8)
    freeze_backbone(network)
    if undo is unfreeze_network:
        freeze_batch_norm(network)
    undo(network)
    assert trainable_tensors(network) == 13  # 3 blocks of a convolution and BatchNorm's two; neck 2; head 2
    assert all(module.training for module in network.modules())


class CountingNorm(nn.Module):
    """A running mean over all batches, which an integer buffer counts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(()))
        self.register_buffer("running_var", torch.ones(()))
        self.register_buffer("batches", torch.tensor(3))

    def forward(self, features: Tensor) -> Tensor:
        if self.training:
            self.batches += 1
        return features


@pytest.mark.parametrize("norm", [lambda: nn.BatchNorm1d(4, momentum=None), CountingNorm])
def test_counters_restart_in_each_round_and_under_each_head(norm: Callable[[], nn.Module]) -> None:
    spec = ModelSpec(architecture="tiny_cnn", channels=1, image_size=16)
    neck = norm()
    parts = nn.Sequential(nn.Linear(256, 4), neck)
    first = SplitNetwork(spec, ["a"], backbone=nn.Flatten(), neck=parts, head=nn.Linear(4, 1))
    (counter,) = (value for value in neck.buffers() if not value.is_floating_point())
    initial = counter.item()
    first.train()(pixels(1, 16, batch=2))
    second = first.with_head(["b", "c"], nn.Linear(4, 2))
    assert counter.item() == initial + 1
    unfreeze_network(second)
    assert counter.item() == initial


def test_a_lone_image_is_normalised_as_in_evaluation_and_leaves_the_statistics_alone() -> None:
    network = build_network(ModelSpec(architecture="resnet18", image_size=32), ["a"], seed=0)
    set_train_mode(network)
    last = network.backbone.get_submodule("layer4.1.bn2")
    network(pixels(3, 32, batch=1))
    assert int(last.get_buffer("num_batches_tracked")) == 0
    network(pixels(3, 32, batch=2))
    assert int(last.get_buffer("num_batches_tracked")) == 1


@pytest.mark.parametrize("images", [1, EVALUATION_BATCH_SIZE + 1])
def test_an_image_that_is_left_over_is_judged_by_a_network_that_takes_no_batch_of_one(images: int) -> None:
    """Its number modulo the batch would else show in which sites fail."""

    def refuse_one(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if len(inputs[0]) == 1:
            raise ValueError("Expected more than 1 value per channel")

    network = tiny()
    pictures = pixels(network.spec.channels, 16, images)
    plain = compute_logits(network, pictures)
    network.backbone.register_forward_pre_hook(refuse_one)
    assert torch.equal(compute_logits(network, pictures), plain)
    torch.testing.assert_close(compute_features_and_logits(network, pictures)[1], plain)


class OwnBatchNorm(nn.Module):
    """Batch normalisation as a researcher writes it; or, with a temperature, what training lowers without a batch."""

    def __init__(self, shape: tuple[int, ...], axes: tuple[int, ...], *, temperature: bool = False) -> None:
        super().__init__()
        self.axes, self.temperature = axes, temperature
        self.scale = nn.Parameter(torch.ones(shape if max(shape, default=1) == math.prod(shape) else ()))
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("var", torch.ones(shape))

    def forward(self, maps: Tensor) -> Tensor:
        if self.training and self.temperature:
            self.var.mul_(0.99)
        elif self.training:
            axes = self.axes or tuple(range(maps.ndim))
            mean, var = maps.mean(axes, keepdim=True), maps.var(axes, keepdim=True)
            self.mean = self.mean.lerp(mean.detach().reshape(self.mean.shape), 0.1)
            self.var.lerp_(var.detach().reshape(self.var.shape), 0.1)
            return (maps - mean) / (var + 1e-5).sqrt() * self.scale
        return (maps - self.mean) / (self.var + 1e-5).sqrt() * self.scale  # type: ignore[no-any-return]


class Normalize(nn.Module):
    """Constants of the pixels, as many models have in front."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.full((3,), 0.5))
        self.register_buffer("std", torch.full((3,), 0.5))

    def forward(self, images: Tensor) -> Tensor:
        return (images - self.mean[:, None, None]) / self.std[:, None, None]  # type: ignore[index]


class RunningNorm(nn.Module):
    """Running statistics of 8 channels in an unusual form: stacked, a mean alone, or with a counter of floats."""

    def __init__(self, form: str, *, used: bool = True) -> None:
        super().__init__()
        self.form, self.used = form, used
        self.scale = nn.Parameter(torch.ones(2, 8) if form == "stacked scale" else torch.ones(8))
        self.register_buffer("running", torch.zeros(8) if form == "mean" else torch.stack([torch.zeros(8)] * 2))
        if form == "counter":
            self.register_buffer("steps", torch.zeros(()))

    def forward(self, maps: Tensor) -> Tensor:
        now = torch.stack([maps.mean((0, 2, 3)), maps.var((0, 2, 3))]).detach()
        if self.training:
            self.running.lerp_(now[0] if self.form == "mean" else now, 0.1)
            if self.form == "counter":
                self.steps.add_(1)
        mean = self.running.reshape(-1, 8)[0] if self.used else now[0]
        return (maps - mean[:, None, None]) * self.scale.reshape(-1, 8)[0][:, None, None]  # type: ignore[no-any-return]


RUNNING = ("stacked", "stacked scale", "mean", "counter")
REPLACED_BY_NOTHING = [OwnBatchNorm((1, 5, 1, 1), (0, 2, 3)), *map(RunningNorm, RUNNING)]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        *((layer, True) for layer in REPLACED_BY_NOTHING),
        (OwnBatchNorm((5, 1, 1), (0, 2, 3)), True),
        (OwnBatchNorm((1, 5, 1), (0, 2)), True),
        (OwnBatchNorm((5,), (0,)), True),
        (OwnBatchNorm((1, 1, 1, 5), (0, 1, 2)), True),
        (Normalize(), False),
        *((RunningNorm(form, used=False), False) for form in RUNNING),
        (OwnBatchNorm((8, 7, 7), (0,)), True),
        (OwnBatchNorm((2, 5), (0,)), True),
        (OwnBatchNorm((), ()), True),
        (OwnBatchNorm((), (), temperature=True), False),
        (OwnBatchNorm((8, 1, 1), (), temperature=True), False),
    ],
)
def test_a_batch_normalisation_of_any_form_is_recognised_by_what_it_does(
    layer: nn.Module, expected: bool, device: str
) -> None:
    before, moved = torch.get_rng_state(), copy.deepcopy(layer).to(device)
    assert is_batch_norm(moved) == expected
    assert moved.training
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("layer", REPLACED_BY_NOTHING)
def test_an_own_batch_normalisation_is_not_replaced_by_group_normalisation(layer: nn.Module) -> None:
    with pytest.raises(BadInput, match=f"cannot take the place of {type(layer).__name__}"):
        replace_with_group_norm(nn.Sequential(layer, Normalize()))
    replace_with_group_norm(nn.Sequential(Normalize()))
