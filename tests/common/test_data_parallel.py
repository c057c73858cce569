"""A batch over several devices, which are all this CPU: what several GPUs do with it was never tried."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polyclinic.strategies.engine.coordinator
from polyclinic.client.training import task
from polyclinic.common.errors import BadInput
from polyclinic.common.models import gpu
from polyclinic.common.models.gpu import (
    MIN_IMAGES_PER_GPU,
    PARALLEL_ATTRIBUTE,
    DataParallelBackbone,
    _CopyToDevices,
    compute_backbone_features,
    disable_multi_gpu_batches,
    is_data_parallel,
    split_batches_across_gpus,
)
from polyclinic.common.models.network import SplitNetwork, build_network, set_train_mode
from polyclinic.common.models.zoo.spec import ModelSpec
from polyclinic.server.simulation import simulate
from polyclinic.strategies.privacy.image_gradients import pop_per_image_gradients, record_per_image_gradients
from polyclinic.strategies.registry import STRATEGIES
from tests.federations import federation
from tests.hashed_runs import cases
from tests.server.killing import Killed, kill_at

CPU = torch.device("cpu")
CASES = cases(STRATEGIES)
TRAIN = {"resnet18": 32, "efficientnet_lite0": 32, "densenet121": 32, "unifed_resnet18": 32, "tiny_cnn": 16}


class Calls(_CopyToDevices):
    """Counts the batches that were divided."""

    divided = 0

    @staticmethod
    def forward(context: Any, devices: Sequence[torch.device], *values: Tensor) -> tuple[Tensor, ...]:
        Calls.divided += 1
        return _CopyToDevices.forward(context, devices, *values)


@pytest.fixture(autouse=True)
def cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the first GPUs be this CPU, as often."""
    monkeypatch.setattr(gpu, "list_first_gpus", lambda gpus: (CPU,) * gpus)
    monkeypatch.setattr(gpu, "_CopyToDevices", Calls)
    monkeypatch.setattr(Calls, "divided", 0)


def network(architecture: str = "tiny_cnn", norm: str = "group", **more: object) -> SplitNetwork:
    spec = ModelSpec.model_validate(
        {"architecture": architecture, "channels": 1, "image_size": TRAIN[architecture], "norm": norm, **more}
    )
    model = build_network(spec, ("a", "b"), seed=0).double()
    set_train_mode(model)
    return model


def images(n: int, side: int = 16) -> Tensor:
    return 255 * torch.rand(n, 1, side, side, generator=torch.Generator().manual_seed(n), dtype=torch.float64)


def gradients(of: SplitNetwork, batch: Tensor) -> dict[str, Tensor | None]:
    of.zero_grad(set_to_none=True)
    of(batch).square().sum().backward()
    return {name: value.grad for name, value in of.named_parameters()}


def same(gradients: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(gradients[name], value, msg=lambda text, name=name: f"{name}: {text}")


def doubled(of: SplitNetwork, gpus: int = 2) -> SplitNetwork:
    """A copy of a network as it is; the network itself is spread over several GPUs from here on."""
    plain = copy.deepcopy(of)
    split_batches_across_gpus(of.backbone, gpus)
    return plain


@pytest.mark.parametrize(("architecture", "gpus"), [*((architecture, 2) for architecture in TRAIN), ("tiny_cnn", 3)])
def test_gradients_are_those_of_the_whole_batch(architecture: str, gpus: int) -> None:
    of, batch = network(architecture), images(8, TRAIN[architecture])
    for module in of.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    plain = doubled(of, gpus)
    torch.testing.assert_close(of(batch), plain(batch))
    same(gradients(of, batch), gradients(plain, batch))
    assert Calls.divided == 2


def test_equal_batches_give_equal_bits() -> None:
    of = network().float()
    split_batches_across_gpus(of.backbone, 3)
    first, second = (gradients(of, images(7).float()) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_batch_too_small_goes_through_one() -> None:
    of = network()
    split_batches_across_gpus(of.backbone, 3)
    of(images(3 * MIN_IMAGES_PER_GPU - 1))
    assert Calls.divided == 0
    of(images(3 * MIN_IMAGES_PER_GPU))
    assert Calls.divided == 1


def test_what_lies_elsewhere_goes_through_the_backbone_itself() -> None:
    of = network()
    of.backbone.__dict__[PARALLEL_ATTRIBUTE] = DataParallelBackbone((torch.device("cuda", 0), torch.device("cuda", 1)))
    assert of(images(8)).shape == (8, 2)


@pytest.mark.parametrize(
    ("architecture", "more"), [("tiny_cnn", {}), ("tiny_cnn", {"train": "last:3"}), ("resnet18", {"train": "last:3"})]
)
def test_running_statistics_are_means_over_the_parts(architecture: str, more: dict[str, object]) -> None:
    """Also those of a backbone that is frozen in part."""
    of = network(architecture, norm="batch", **more)
    parts, before = [copy.deepcopy(of) for _ in range(2)], {k: v.clone() for k, v in of.backbone.named_buffers()}
    split_batches_across_gpus(of.backbone, 2)
    batch = images(8, TRAIN[architecture])
    of(batch)
    for part, half in zip(parts, batch.tensor_split(2), strict=True):
        part(half)
    for name, value in of.backbone.named_buffers():
        first, second = (dict(part.backbone.named_buffers())[name] for part in parts)
        torch.testing.assert_close(value, (first + second) / 2 if value.is_floating_point() else first)
    assert any(not torch.equal(value, before[name]) for name, value in of.backbone.named_buffers())


@pytest.mark.parametrize("evaluating", [True, False])
def test_statistics_that_are_frozen_stay_to_the_bit(evaluating: bool) -> None:
    of = network(norm="batch").float()
    split_batches_across_gpus(of.backbone, 3)
    of(images(9).float())
    if evaluating:
        of.eval()
    else:
        set_train_mode(of, frozen_batch_norm=True)
    before = {name: value.clone() for name, value in of.backbone.named_buffers()}
    of(images(12).float())
    assert all(torch.equal(value, before[name]) for name, value in of.backbone.named_buffers())


def test_what_does_not_learn_and_what_takes_no_part_has_no_gradient() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
            self.tied = nn.Linear(4, 4)
            self.tied.weight = self.used.weight
            self.frozen.requires_grad_(False)

        def forward(self, values: Tensor) -> Tensor:
            return self.tied(torch.tanh(self.frozen(self.used(values))))

    of = Odd()
    plain, values = copy.deepcopy(of), torch.rand(6, 4)
    split_batches_across_gpus(of, 2)
    compute_backbone_features(of, values).square().sum().backward()
    plain(values).square().sum().backward()
    assert of.unused.weight.grad is None
    assert of.frozen.weight.grad is None
    torch.testing.assert_close(of.used.weight.grad, plain.used.weight.grad)
    torch.testing.assert_close(of.tied.bias.grad, plain.tied.bias.grad)


def test_a_frozen_backbone_and_no_gradients_at_all() -> None:
    of = network()
    plain = doubled(of)
    with torch.no_grad():
        torch.testing.assert_close(of(images(8)), plain(images(8)))
    of.backbone.requires_grad_(False)
    same({"w": gradients(of, images(8))["head.weight"]}, {"w": gradients(plain, images(8))["head.weight"]})


def test_a_copy_divides_too_and_the_setting_can_be_taken_back() -> None:
    of = network()
    split_batches_across_gpus(of.backbone, 2)
    copy.deepcopy(of)(images(8))
    assert Calls.divided == 1
    with disable_multi_gpu_batches(of.backbone):
        assert not is_data_parallel(of.backbone)
        of(images(8))
    assert is_data_parallel(of.backbone)
    split_batches_across_gpus(of.backbone, 1)
    of(images(8))
    assert Calls.divided == 1


def test_gradients_of_single_images_are_as_without() -> None:
    of = network().float()
    gradients = []
    for model in (doubled(of), of):
        with record_per_image_gradients(model) as learning:
            model(images(6).float()).square().sum().backward()
            gradients.append([pop_per_image_gradients(parameter, 6) for parameter in learning])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert Calls.divided == 0
    assert is_data_parallel(of.backbone)


OTHERS = ("fedsld", "fedmlp", "fedirm", "rscfed", "unifed", "polyclinic")


@pytest.mark.parametrize(
    ("name", "rounds"), [("surgical", 2), *(pytest.param(name, 4, marks=pytest.mark.long) for name in OTHERS)]
)
def test_sites_with_two_learn_as_with_one_and_a_run_goes_on_with_as_many_as_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, rounds: int
) -> None:
    settings = (*CASES[name], f"run.rounds={rounds}", "model.norm=group", "training.precision=float32")
    single = federation(tmp_path, *settings, out="single")
    monkeypatch.setattr(simulate, "count_visible_gpus", lambda: 2)
    task.get_cached_networks.cache_clear()
    gpus = "simulation.gpus_per_site"
    two = federation(tmp_path, *settings, f"{gpus}=2", out="two")
    assert abs(two["test"]["mean_auroc"] - single["test"]["mean_auroc"]) < 0.02
    assert {site["arithmetic"] for site in two["sites"].values()} == {"float32, channels_last, 2 GPUs"}
    with pytest.MonkeyPatch.context() as patched:
        kill_at(patched, polyclinic.strategies.engine.coordinator.Coordinator, "_begin_round", 2)
        with pytest.raises(Killed):
            federation(tmp_path, *settings, f"{gpus}=2")
    for other in ("auto", "1"):
        with pytest.raises(BadInput, match=r"simulation.gpus_per_site was 2, is 1"):
            federation(tmp_path, *settings, f"{gpus}={other}", resume=True)
    assert federation(tmp_path, *settings, f"{gpus}=2", resume=True)["model_sha256"] == two["model_sha256"]
    assert Calls.divided > 50
