"""A training step on a GPU: the same bits each time, with CUDA graphs and without, and float32 as on a CPU."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from polyclinic.common.config import TrainingSection
from polyclinic.common.models import gpu
from polyclinic.common.models.gpu import BackboneCudaGraph, compute_backbone_features, move_network_to_device
from polyclinic.common.models.network import (
    MemoryFormat,
    SplitNetwork,
    build_network,
    set_memory_format,
    unfreeze_network,
)
from polyclinic.common.models.state import ModelState, read_model_state, write_model_state
from polyclinic.common.models.zoo.spec import ModelSpec
from polyclinic.data.base.spec import AugmentationSpec
from polyclinic.strategies.local.losses import missing_as_negative_loss
from polyclinic.strategies.local.objective import Batch, LabelledExamples, Objective, plain
from polyclinic.strategies.local.optimisation import make_optimizer
from polyclinic.strategies.local.training import (
    FrozenNetworkParts,
    TrainingTask,
    make_training_reproducible,
    train_epoch,
)

SIDES = {
    "densenet121": 64,
    "resnet18": 64,
    "vgg11": 64,
    "efficientnet_lite0": 64,
    "fedsld_cnn": 28,
    "femnist_cnn": 28,
    "unifed_vgg11": 32,
    "unifed_resnet18": 32,
    "tiny_cnn": 16,
}
BATCH, IMAGES, EPOCHS = 8, 8 * 6 + 3, 3
CLASSES = ("a", "b", "c")
AUGMENTED = AugmentationSpec(rotation=0.1, zoom=0.1, contrast=0.2, horizontal_flip=True, translate=0.1)


def two_views(network: SplitNetwork, batch: Batch) -> Tensor:
    """An objective that compares what the network says of two views, with a third that it does not learn from."""
    first, second = batch.logits(network, batch.view()), batch.logits(network, batch.view())
    with torch.no_grad():
        third = batch.logits(network, batch.view())
    return (
        missing_as_negative_loss(first, batch.labels, batch.annotated)
        + (first - second).square().mean()
        + (second - third).square().mean()
    )


def trained(
    architecture: str,
    device: str,
    *,
    objective: Objective | None = None,
    frozen: FrozenNetworkParts | None = None,
    memory_format: MemoryFormat = "channels_last",
    **training: Any,
) -> tuple[ModelState, SplitNetwork]:
    """Train a new network on the same random images; return its state, and itself."""
    side = SIDES[architecture]
    spec = ModelSpec(architecture=architecture, channels=1, image_size=side, neck=16, dropout=0.3)  # type: ignore[arg-type]
    section = TrainingSection(batch_size=BATCH, lr=0.01, **training)
    draws = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (IMAGES, 1, side, side), dtype=torch.uint8, generator=draws).to(device)
    labels = torch.randint(0, 2, (IMAGES, len(CLASSES)), generator=draws).float().to(device)
    examples = LabelledExamples(images, labels, torch.ones(len(CLASSES), dtype=torch.bool, device=device))
    network = set_memory_format(move_network_to_device(build_network(spec, CLASSES, seed=0), device), memory_format)
    unfreeze_network(network)
    exercise = TrainingTask(
        examples, objective or plain(missing_as_negative_loss), section, AUGMENTED, frozen or FrozenNetworkParts()
    )
    optimizer = make_optimizer(network, section, section.lr)
    with make_training_reproducible(0, 1) as generator:
        for _ in range(EPOCHS):
            train_epoch(network, exercise, optimizer, generator)
    return read_model_state(network), network


def apart(first: ModelState, second: ModelState) -> float:
    """Return the relative distance of two models' trunks and heads."""
    pairs = ((first.trunk, second.trunk), (first.head.weight, second.head.weight))
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs)


def equal(first: ModelState, second: ModelState) -> bool:
    """Return whether all bits are the same."""
    pairs = ((first.trunk, second.trunk), (first.norm, second.norm), (first.head.weight, second.head.weight))
    return all(np.array_equal(a, b) for a, b in pairs)


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Record after three steps; the shapes for which it was done."""
    done, recorded = list[tuple[int, ...]](), gpu.record_cuda_graph

    def record(backbone: nn.Module, images: Tensor) -> Any:
        graph = recorded(backbone, images)
        done.append(tuple(images.shape))
        return graph

    monkeypatch.setattr(gpu, "STEPS_BEFORE_RECORDING", 3)
    monkeypatch.setattr(gpu, "record_cuda_graph", record)
    return done


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No graphs unless a test asks for them."""
    monkeypatch.setattr(gpu, "STEPS_BEFORE_RECORDING", 10**9)
    return monkeypatch


@pytest.mark.parametrize("precision", ["float32", "bf16", "fp16"])
@pytest.mark.parametrize("architecture", SIDES)
def test_equal_work_gives_equal_bits_also_with_graphs(
    eager: pytest.MonkeyPatch, architecture: str, precision: str
) -> None:
    without, again = (trained(architecture, "cuda", precision=precision)[0] for _ in range(2))
    eager.setattr(gpu, "STEPS_BEFORE_RECORDING", 3)
    replayed, network = trained(architecture, "cuda", precision=precision)
    assert network.backbone.__dict__[gpu.GRAPH_ATTRIBUTE]._recorded is not None
    assert equal(without, again), "without graphs, twice"
    assert equal(without, replayed), f"with graphs: apart by {apart(replayed, without)}"


OTHERWISE: dict[str, dict[str, Any]] = {
    "two views": {"objective": two_views},
    "clipped": {"clip_gradients": 0.1},
    "accumulated": {"gradient_accumulation_steps": 2},
    "contiguous": {"memory_format": "contiguous"},
    "frozen norm": {"frozen": FrozenNetworkParts(norm=True)},
    "frozen backbone": {"frozen": FrozenNetworkParts(backbone=True)},
    "sgd": {"optimizer": "sgd", "momentum": 0.9},
    "adamw": {"optimizer": "adamw", "weight_decay": 0.01},
}


@pytest.mark.parametrize("name", OTHERWISE)
@pytest.mark.parametrize("architecture", ["resnet18", "efficientnet_lite0"])
def test_however_it_is_trained_graphs_change_no_bit(eager: pytest.MonkeyPatch, architecture: str, name: str) -> None:
    without, _ = trained(architecture, "cuda", **OTHERWISE[name])
    eager.setattr(gpu, "STEPS_BEFORE_RECORDING", 3)
    assert equal(without, trained(architecture, "cuda", **OTHERWISE[name])[0])


def test_a_graph_is_recorded_once_for_all_rounds_and_heads(recordings: list[tuple[int, ...]]) -> None:
    _, network = trained("resnet18", "cuda")
    assert recordings == [(BATCH, 1, 64, 64)]
    state = read_model_state(network)
    write_model_state(network, trunk=state.trunk, norm=state.norm, head=state.head)  # as the next round does
    replay: BackboneCudaGraph = network.backbone.__dict__[gpu.GRAPH_ATTRIBUTE]
    replay.discard_outdated_graph(network.backbone, "auto")
    assert replay._recorded is not None


def test_a_copy_of_a_network_does_not_write_into_the_graph_of_the_first(recordings: list[tuple[int, ...]]) -> None:
    _, network = trained("resnet18", "cuda")
    other = copy.deepcopy(network)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert other.backbone.__dict__[gpu.GRAPH_ATTRIBUTE]._recorded is None
    assert float(read_model_state(network).trunk.std()) > 0


class Waiting(nn.Module):
    """A layer that no graph can hold: it looks at a number on the GPU."""

    def forward(self, values: Tensor) -> Tensor:
        return values * (1.0 if float(values.detach().sum()) > 0 else 2.0)


def test_a_backbone_that_cannot_be_recorded_is_trained_without(recordings: list[tuple[int, ...]]) -> None:
    backbone = nn.Sequential(
        nn.Conv2d(1, 4, 3), Waiting(), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 2)
    ).cuda()
    images = torch.rand(BATCH, 1, 8, 8, device="cuda")
    with gpu.use_cuda_graphs(backbone, torch.device("cuda"), "float32") as begin_step:
        for _ in range(6):
            begin_step()
            nn.functional.dropout(compute_backbone_features(backbone, images), 0.5).square().sum().backward()
    assert recordings == []
    assert torch.isfinite(torch.cat([parameter.flatten() for parameter in backbone.parameters()])).all()


def test_a_convolution_in_float32_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorFloat-32, which torch takes by default, is a hundred times further from the exact sum."""
    draws = torch.Generator().manual_seed(0)
    images, layer = torch.randn(8, 64, 16, 16, generator=draws), nn.Conv2d(64, 64, 3)
    exact, layer = layer.double()(images.double()), move_network_to_device(layer.float(), "cuda")
    far = (layer(images.cuda()).double().cpu() - exact).norm() / exact.norm()
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    otherwise = (layer(images.cuda()).double().cpu() - exact).norm() / exact.norm()
    assert far < 1e-6 < 1e-5 < otherwise


@pytest.mark.parametrize("architecture", SIDES)
def test_float32_is_as_near_to_a_cpu_s_as_that_cpu_s_two_orders_in_memory_are_to_each_other(architecture: str) -> None:
    """Plain SGD, for Adam turns the sign of rounding errors into steps."""
    options: dict[str, Any] = {"precision": "float32", "optimizer": "sgd"}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(f"{__name__}.EPOCHS", 1)
        patched.setattr("torch.nn.functional.dropout", lambda values, *arguments, **more: values)
        here, _ = trained(architecture, "cpu", **options)
        otherwise, _ = trained(architecture, "cpu", memory_format="contiguous", **options)
        there, _ = trained(architecture, "cuda", **options)
    print(architecture, apart(there, here), apart(otherwise, here))
    assert apart(there, here) < max(4 * apart(otherwise, here), 1e-6)
