"""What one image can change in private training, in networks that do something with the batch."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from polyclinic.common.config import TrainingSection
from polyclinic.common.errors import BadInput
from polyclinic.common.models.network import SplitNetwork, build_network, set_train_mode
from polyclinic.common.models.zoo.spec import ModelSpec
from polyclinic.data.base.spec import AugmentationSpec
from polyclinic.strategies.local.losses import PLAIN_LOSSES
from polyclinic.strategies.local.objective import LabelledExamples, plain
from polyclinic.strategies.local.training import FrozenNetworkParts, TrainingTask
from polyclinic.strategies.privacy.gradients import PrivateEpochTrainer, sum_clipped_gradients
from polyclinic.strategies.privacy.image_gradients import (
    check_image_gradients_separate,
    check_network_state_constant,
    pop_per_image_gradients,
    record_per_image_gradients,
    refuse_plan_on_error,
    replace_dropout_layers,
)
from polyclinic.strategies.privacy.noise import NoiseQuantizationGrid, make_seeded_noise_source

SIDE, CLASSES = 8, ("a", "b")
BCE = PLAIN_LOSSES["multi_label", "masked"]


class Windows(nn.Module):
    """A dense layer that sees windows of several images as its batch."""

    def __init__(self, windows_first: bool) -> None:
        super().__init__()
        self.windows_first = windows_first
        self.dense = nn.Linear(16, 8)

    def forward(self, images: Tensor) -> Tensor:
        windows = images.reshape(len(images), 4, 16)
        ordered = windows.transpose(0, 1) if self.windows_first else windows
        values = torch.tanh(self.dense(ordered.reshape(-1, 16))).reshape(*ordered.shape[:2], 8)
        return (values.transpose(0, 1) if self.windows_first else values).mean(dim=1)


class Mixing(nn.Module):
    """A dense layer, and something that one image gets from the others behind a gain that may be 0."""

    def __init__(self, mixed: Callable[[Tensor], Tensor], gain: float) -> None:
        super().__init__()
        self.mixed, self.dense, self.gain = mixed, nn.Linear(64, 8), nn.Linear(8, 8, bias=False)
        nn.init.constant_(self.gain.weight, gain)

    def forward(self, images: Tensor) -> Tensor:
        values = torch.tanh(self.dense(images.flatten(1)))
        return values + self.gain(self.mixed(values))


class KeepsPixels(Windows):
    """A network that keeps a part of an image, in a buffer or a weight, from some call on."""

    def __init__(self, place: str, calls_before: int, persistent: bool = True) -> None:
        super().__init__(windows_first=False)
        self.register_buffer("seen", torch.zeros(SIDE * SIDE), persistent=persistent)
        self.place, self.calls_before = place, calls_before

    def forward(self, images: Tensor) -> Tensor:
        self.calls_before -= 1
        if self.calls_before < 0:
            place = self.seen if self.place == "seen" else next(self.parameters())
            with torch.no_grad():
                place.view(-1)[:8].copy_(images[0].flatten()[:8])
        return super().forward(images)


class Table(nn.Module):
    """A dense layer that sees a table of 15 rows and no image; what it makes of it is added to every image."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.of_table = nn.Linear(64, 8), nn.Linear(2, 8)

    def forward(self, images: Tensor) -> Tensor:
        table = self.of_table(torch.stack(torch.meshgrid(torch.arange(3.0), torch.arange(5.0), indexing="ij"), dim=-1))
        return torch.tanh(self.dense(images.flatten(1))) * table.flatten(0, 1).mean(dim=0)


def network(backbone: nn.Module, neck: nn.Module | None = None) -> SplitNetwork:
    spec = ModelSpec(architecture="tiny_cnn", channels=1, image_size=16, norm="group")
    head = nn.Linear(8 if neck is None else 1, 2)
    with torch.no_grad():
        for parameter in (*backbone.parameters(), *head.parameters()):
            if parameter.any():
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
    result = SplitNetwork(spec, CLASSES, backbone=backbone, neck=neck or nn.Identity(), head=head)
    result.preprocess_images = lambda images: (images - 127.5) / 64
    set_train_mode(result)
    return result


def gradients(of: SplitNetwork, images: Tensor) -> list[Tensor]:
    with record_per_image_gradients(of) as learning:
        of(images).square().sum().backward()
        return [pop_per_image_gradients(parameter, len(images)) for parameter in learning]


def some(images: int, side: int = SIDE) -> Tensor:
    return torch.randint(0, 256, (images, 1, side, side), generator=torch.Generator().manual_seed(1)).float()


def task(images: Tensor) -> TrainingTask:
    examples = LabelledExamples(images, torch.zeros(len(images), 2), torch.ones(2).bool())
    return TrainingTask(
        examples, plain(BCE), TrainingSection(batch_size=4, lr=0.1), AugmentationSpec(), FrozenNetworkParts()
    )


def refuse(of: SplitNetwork, images: int, side: int = SIDE) -> None:
    check_image_gradients_separate(of, images, (1, side, side))


def influence(of: SplitNetwork, images: Tensor, bound: float) -> float:
    """How far one image moves the clipped sum, in parts of the bound: the most of all images."""
    grid, filled = NoiseQuantizationGrid(0.0, bound), gradients(of, images)
    whole = sum_clipped_gradients(filled, grid)
    distances = []
    for left_out in range(len(images)):
        other = images.clone()
        other[left_out] = images[left_out - 1]  # a pack is filled up with repetitions that count for nothing
        rest = [index for index in range(len(images)) if index != left_out]
        less = sum_clipped_gradients([rows[rest] for rows in gradients(of, other)], grid)
        apart = [(a - b).square().sum() for a, b in zip(whole, less, strict=True)]
        distances.append(float(torch.stack(apart).sum().sqrt()) * grid.step_size / bound)
    return max(distances)


def test_windows_of_an_image_count_together() -> None:
    of, images = network(Windows(windows_first=False)), some(5)
    refuse(of, 5)
    for image, *rows in zip(images, *gradients(of, images), strict=True):
        for alone, row in zip(gradients(of, image[None]), rows, strict=True):
            torch.testing.assert_close(row, alone[0])
    assert influence(of, images, 1e-3) <= 1.0


@pytest.mark.parametrize(("name", "train"), [("timm:mobilevit_xxs", "last:12"), ("timm:tnt_s_patch16_224", "last:14")])
def test_an_image_moves_the_sum_by_no_more_than_the_bound_where_its_parts_are_a_batch(name: str, train: str) -> None:
    spec = ModelSpec(architecture=name, channels=1, image_size=64, norm="batch", train=train)
    of, images = build_network(spec, CLASSES, 0), some(3, 64)
    set_train_mode(of, frozen_batch_norm=True)
    refuse(of, 3, 64)
    assert influence(of, images, 1e-6) <= 1.0 + 1e-3  # rounding in the network


def test_windows_in_another_order_and_a_layer_without_any_gradient_in_the_trial_are_refused() -> None:
    of = network(Windows(windows_first=True))
    assert influence(of, some(5), 1e-3) > 1.1  # what would leave otherwise
    for unlimited, images in ((of, 5), (network(Mixing(torch.zeros_like, 1.0)), 4)):
        with pytest.raises(BadInput, match="cannot be limited"):
            refuse(unlimited, images)


@pytest.mark.parametrize(
    "mixed",
    [
        pytest.param(lambda values: values.mean(dim=0, keepdim=True).expand_as(values), id="mean"),
        pytest.param(lambda values: values.roll(1, dims=0), id="the image before"),
        pytest.param(lambda values: torch.softmax(values @ values.T, dim=1) @ values, id="attention over the batch"),
        pytest.param(lambda values: values.sort(dim=0).values, id="order"),
        pytest.param(lambda values: values - values.detach().mean(dim=0), id="a mean without gradient"),
    ],
)
@pytest.mark.parametrize("gain", [0.0, 1.0])
@pytest.mark.parametrize("images", [2, 3, 16])
def test_a_network_that_mixes_images_is_refused(mixed: Callable[[Tensor], Tensor], gain: float, images: int) -> None:
    with pytest.raises(BadInput, match="mixes the images"):
        refuse(network(Mixing(mixed, gain)), images)


@pytest.mark.parametrize("place", ["seen", "weight"])
def test_a_state_that_keeps_images_from_the_first_call_on_or_after_some_is_refused(place: str) -> None:
    with pytest.raises(BadInput, match=rf'changes "[a-z.]*{place}" by itself'):
        check_network_state_constant(network(KeepsPixels(place, 12)), 2, (1, SIDE, SIDE))
    check_network_state_constant(network(Windows(windows_first=False)), 2, (1, SIDE, SIDE))
    with pytest.raises(BadInput, match='changes "seen" by itself'):
        refuse(network(KeepsPixels("seen", 0)), 4)
    refuse(network(KeepsPixels("seen", 0, persistent=False)), 4)  # never leaves


def test_a_weight_that_is_used_outside_its_layer_is_named_and_no_class_of_ours() -> None:
    class Borrows(Windows):
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images) + self.dense.weight.sum()

    with pytest.raises(BadInput, match='uses "weight" of a layer outside the call'), refuse_plan_on_error():
        refuse(network(Borrows(windows_first=False)), 4)


@pytest.mark.parametrize("images", [3, 5, 14, 15, 16])
def test_a_layer_that_sees_no_images_is_refused_also_where_it_has_as_many_rows_as_there_are_images(images: int) -> None:
    with pytest.raises(BadInput, match="mixes the images"):
        refuse(network(Table()), images)


def test_a_narrow_neck_hides_no_mixing_behind_a_unit_that_is_closed() -> None:
    for _ in range(30):  # with a closed unit in every second trial
        neck = nn.Sequential(nn.Linear(8, 1), nn.ReLU())
        with pytest.raises(BadInput, match="mixes the images"):
            refuse(network(Mixing(lambda values: values.roll(1, dims=0), 0.0), neck), 3)
        refuse(network(Windows(windows_first=False), neck), 3)


@pytest.mark.parametrize(("mixed_in", "other"), [(0, 11), (11, 0), (6, 7), (8, 15)])
def test_every_pair_of_images_is_tried(mixed_in: int, other: int) -> None:
    def mixed(values: Tensor) -> Tensor:
        far = torch.zeros_like(values)
        far[other] = values[mixed_in]
        return far

    with pytest.raises(BadInput, match="mixes the images"):
        refuse(network(Mixing(mixed, 0.0)), 16)


def test_the_trial_leaves_network_and_random_numbers_as_they_were() -> None:
    of = network(Windows(windows_first=False))
    before, state = {name: value.clone() for name, value in of.state_dict().items()}, torch.get_rng_state()
    refuse(of, 4)
    assert all(torch.equal(value, before[name]) for name, value in of.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in of.parameters())


def test_private_training_of_such_a_network_ends_before_any_image_is_seen() -> None:
    batches = list[Tensor]()

    def mixed(values: Tensor) -> Tensor:
        batches.append(values)
        return values.roll(1, dims=0)

    of = network(Mixing(mixed, 0.0))
    epoch = PrivateEpochTrainer(BCE, 1.0, 1.0, 1.0, 1, 6, make_seeded_noise_source(3))
    images = torch.full((6, 1, SIDE, SIDE), 255, dtype=torch.uint8)
    with pytest.raises(BadInput, match="mixes the images"):
        epoch(of, task(images), torch.optim.SGD(of.parameters(), lr=0.1), torch.Generator())
    white = of.backbone.dense(torch.full((1, 64), 127.5 / 64)).tanh()
    assert batches
    assert not any(torch.isclose(values, white, atol=1e-3).all(dim=1).any() for values in batches)


class Dropping(nn.Module):
    """Dropout between two dense layers, with a parameter beside them or without, or on a table that all images get."""

    def __init__(self, beside: bool, of_table: bool) -> None:
        super().__init__()
        self.first, self.second, self.dropout = nn.Linear(64, 16), nn.Linear(16, 8), nn.Dropout(0.5)
        self.beside = nn.Parameter(torch.zeros(16)) if beside else 0.0
        self.table = torch.ones(16, 16)
        self.of_table = of_table

    def forward(self, images: Tensor) -> Tensor:
        values = torch.tanh(self.first(images.flatten(1))) + self.beside
        return self.second(values * self.dropout(self.table).mean(dim=0) if self.of_table else self.dropout(values))


class DroppedWindows(Windows):
    """Windows of an image, of which dropout leaves some out."""

    def __init__(self) -> None:
        super().__init__(windows_first=False)
        self.dense = nn.Sequential(nn.Linear(16, 8), nn.Dropout1d(0.5))


def masks_of_equal_images(of: SplitNetwork, images: int) -> int:
    """How many images of a pack of the same image have a gradient of their own."""
    with replace_dropout_layers(of, make_seeded_noise_source(1)):
        refuse(of, images)
        rows = gradients(of, some(1).expand(images, -1, -1, -1).contiguous())
    return len({tuple(row.tolist()) for row in torch.cat([of_layer.flatten(1) for of_layer in rows], dim=1)})


@pytest.mark.parametrize("images", [2, 15, 16])
@pytest.mark.parametrize(("beside", "of_table"), [(True, False), (False, True), (True, True)])
def test_images_that_would_share_a_dropout_mask_are_refused(images: int, beside: bool, of_table: bool) -> None:
    with pytest.raises(BadInput, match="one dropout mask for several"):
        masks_of_equal_images(network(Dropping(beside, of_table)), images)


@pytest.mark.parametrize("backbone", [Dropping(beside=False, of_table=False), DroppedWindows()])
def test_every_image_of_a_pack_has_a_dropout_mask_of_its_own(backbone: nn.Module) -> None:
    assert masks_of_equal_images(network(backbone), 8) == 8


def test_a_frozen_part_draws_no_mask_and_may_lie_in_any_layer() -> None:
    of = network(Dropping(beside=True, of_table=False))
    of.backbone.requires_grad_(False)
    set_train_mode(of, frozen_backbone=True)
    assert masks_of_equal_images(of, 8) == 1


@pytest.mark.parametrize("level", ["sample", "patient"])
@pytest.mark.parametrize("images", [[1] * 7, [2, *[1] * 5], [9], [1, 8, 3]])
def test_a_step_holds_as_many_gradients_no_matter_whose_images_were_drawn(
    level: str, images: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    clipped = set[int]()

    def noting(rows: list[Tensor], grid: NoiseQuantizationGrid) -> list[Tensor]:
        clipped.update(map(len, rows))
        return sum_clipped_gradients(rows, grid)

    monkeypatch.setattr("polyclinic.strategies.privacy.gradients.sum_clipped_gradients", noting)
    owners = torch.repeat_interleave(torch.arange(len(images)), torch.tensor(images))
    of, count = network(Windows(windows_first=False)), sum(images)
    epoch = PrivateEpochTrainer(
        BCE, 1.0, 1.0, 1.0, 1, count, make_seeded_noise_source(3), owners if level == "patient" else None
    )
    pixels = torch.randint(0, 256, (count, 1, SIDE, SIDE), dtype=torch.uint8)
    epoch(of, task(pixels), torch.optim.SGD(of.parameters(), lr=0.1), torch.Generator())
    assert clipped == {4}
