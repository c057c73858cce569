"""When a backbone's graph is used, with a graph that is none: what a GPU itself does is in ``tests/gpu``."""

import contextlib
import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyclinic.client.training import task
from polyclinic.common.models import gpu
from polyclinic.common.models.gpu import (
    BackboneCudaGraph,
    compute_backbone_features,
    move_network_to_device,
    use_cuda_graphs,
    use_deterministic_algorithms,
)
from polyclinic.strategies.local import training
from tests.federations import ALL_DIGITS, federation, finished

GPU = torch.device("cuda")


class Graphs:
    """Stands for torch's: what was recorded, and how often it ran."""

    def __init__(self) -> None:
        self.shapes, self.runs, self.broken = list[tuple[int, ...]](), 0, False

    def make(
        self, forward: Callable[..., Tensor], example: tuple[Tensor, ...], **options: Any
    ) -> Callable[..., Tensor]:
        self.shapes.append(tuple(example[0].shape))
        forward(*example)  # as warming up does
        if self.broken:
            raise RuntimeError("operation not permitted when stream is capturing")

        def replaying(*values: Tensor) -> Tensor:
            self.runs += 1
            return forward(*values)

        return replaying


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    recorded = Graphs()
    monkeypatch.setattr(gpu, "STEPS_BEFORE_RECORDING", 2)
    monkeypatch.setattr(torch.cuda, "graph", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", recorded.make)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: None)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: None)
    return recorded


def new_backbone() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3 * 36, 2))


def images(n: int = 4) -> Tensor:
    return torch.rand(n, 1, 8, 8, generator=torch.Generator().manual_seed(n))


def step(backbone: nn.Module, forward: Callable[[Tensor], Tensor], size: int, views: int) -> Tensor:
    """The gradients of a step of one batch."""
    backbone.zero_grad()
    sum(forward(images(size)).square().sum() for _ in range(views)).backward()
    return torch.cat([value.grad.flatten() for value in backbone.parameters() if value.grad is not None])


def steps(backbone: nn.Module, sizes: list[int], views: int = 1) -> list[Tensor]:
    """An epoch of these batches; the gradients of each."""
    gradients = []
    with use_cuda_graphs(backbone, GPU, "bf16") as begin_step:
        for size in sizes:
            begin_step()
            gradients.append(step(backbone, partial(compute_backbone_features, backbone), size, views))
    return gradients


def same_as_without(backbone: nn.Module, sizes: list[int], views: int = 1) -> None:
    """The gradients of an epoch, and the running means after it, are those of a backbone without graphs."""
    plain = copy.deepcopy(backbone)
    plain.__dict__.pop(gpu.GRAPH_ATTRIBUTE, None)
    expected = [step(plain, plain, size, views) for size in sizes]
    assert all(map(torch.equal, steps(backbone, sizes, views), expected))
    for (name, value), other in zip(backbone.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(value, other), name


def one_step_of(backbone: nn.Module, precision: str = "bf16") -> None:
    with use_cuda_graphs(backbone, GPU, precision) as begin_step:
        begin_step()
        compute_backbone_features(backbone, images())


@pytest.fixture
def replayed(graphs: Graphs) -> nn.Sequential:
    """A backbone with a graph."""
    backbone = new_backbone()
    steps(backbone, [4, 4, 4])
    return backbone


@pytest.mark.parametrize(
    ("epochs", "batches", "views", "runs"),
    [(1, [4, 4, 4, 4, 3], 1, 2), (3, [4, 3], 1, 1), (1, [4, 4, 4, 4], 2, 2)],
    ids=["each full batch after some of its shape", "small sites with few full batches", "of two views one"],
)
def test_a_graph_replays_full_batches_and_changes_no_gradient(
    epochs: int, batches: list[int], views: int, runs: int, graphs: Graphs
) -> None:
    backbone = new_backbone()
    for _ in range(epochs):
        same_as_without(backbone, batches, views)
    assert (graphs.shapes, graphs.runs) == ([(4, 1, 8, 8)], runs)


def test_a_graph_lasts_for_the_next_epochs(graphs: Graphs, replayed: nn.Sequential) -> None:
    before = graphs.runs
    steps(replayed, [4, 4, 3, 4])
    assert (len(graphs.shapes), graphs.runs) == (1, before + 3)


def test_outside_a_step_and_without_gradients_nothing_is_replayed(graphs: Graphs, replayed: nn.Sequential) -> None:
    before = graphs.runs
    compute_backbone_features(replayed, images())
    with use_cuda_graphs(replayed, GPU, "bf16") as begin_step:
        begin_step()
        with torch.no_grad():
            compute_backbone_features(replayed, images())
        compute_backbone_features(replayed, images().requires_grad_())
    assert graphs.runs == before


@pytest.mark.parametrize(
    ("change", "precision"),
    [
        (lambda backbone: backbone[0].requires_grad_(False), "bf16"),
        (lambda backbone: backbone[1].eval(), "bf16"),
        (lambda backbone: setattr(backbone[3].weight, "data", backbone[3].weight.data.clone()), "bf16"),
        (lambda backbone: None, "float32"),
    ],
    ids=["frozen_layer", "frozen_norm", "moved", "precision"],
)
def test_a_backbone_that_is_trained_in_another_way_is_recorded_anew(
    change: Callable[[nn.Sequential], object], precision: str, graphs: Graphs, replayed: nn.Sequential
) -> None:
    before = graphs.runs
    change(replayed)
    one_step_of(replayed, precision)
    assert graphs.runs == before


def test_a_copy_has_no_graph(graphs: Graphs, replayed: nn.Sequential) -> None:
    other, before = copy.deepcopy(replayed), graphs.runs
    one_step_of(other)
    assert graphs.runs == before
    assert isinstance(other.__dict__[gpu.GRAPH_ATTRIBUTE], BackboneCudaGraph)


def test_what_cannot_be_recorded_is_trained_as_ever(graphs: Graphs) -> None:
    graphs.broken = True
    same_as_without(new_backbone(), [4, 4, 4, 4])
    assert (len(graphs.shapes), graphs.runs) == (1, 0)


def test_a_cpu_and_a_frozen_backbone_have_no_graphs(graphs: Graphs) -> None:
    backbone = new_backbone()
    with use_cuda_graphs(backbone, torch.device("cpu"), "float32") as begin_step:
        begin_step()
    backbone.requires_grad_(False)
    with use_cuda_graphs(backbone, GPU, "float32") as begin_step:
        begin_step()
    assert gpu.GRAPH_ATTRIBUTE not in backbone.__dict__


def test_exact_gpus_leave_torchs_settings_as_they_belong_together(monkeypatch: pytest.MonkeyPatch) -> None:
    cudnn = torch.backends.cudnn
    for name in ("deterministic", "allow_tf32"):
        monkeypatch.setattr(cudnn, name, getattr(cudnn, name))  # as it was at the end of the test
    use_deterministic_algorithms()
    with cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):  # as torch.export does
        pass
    assert (cudnn.deterministic, cudnn.allow_tf32) == (True, False)


def test_a_cpu_changes_no_setting_of_gpus() -> None:
    before = torch.backends.cudnn.deterministic
    assert move_network_to_device(new_backbone(), "cpu") is not None
    assert torch.backends.cudnn.deterministic == before


def test_sites_and_rounds_share_one_graph(graphs: Graphs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, plain = finished(ALL_DIGITS, "training.batch_size=32")
    monkeypatch.setattr(
        training, "use_cuda_graphs", lambda backbone, device, more: use_cuda_graphs(backbone, GPU, more)
    )
    monkeypatch.setattr(training, "GRAPH_DEVICES", ("cpu",))
    task.get_cached_networks.cache_clear()
    assert federation(tmp_path, ALL_DIGITS, "training.batch_size=32")["model_sha256"] == plain["model_sha256"]
    assert len(graphs.shapes) == 1
    assert graphs.runs > 50
