"""What a Flower user types: ``STRATEGIES[name]`` and ``start`` with a ``state_dict``."""

from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Result, Strategy

from common.config import plan_of
from common.errors import BadInput
from common.models.network import SplitNetwork, build
from common.models.state import layout_of, read_state, state_sha256
from server.simulation.backends import Workers, inline, on_ray, site_app
from strategies.registry import STRATEGIES
from tests.federations import experiment, federation

DIGITS = tuple("0123456789")


def on_ray_here(main: Any, app: ClientApp, sites: int) -> None:
    """A Flower ``ServerApp`` on Ray."""
    on_ray(main, app, sites, Workers(1, 0.0), "")


def started(folder: Path, classes: tuple[str, ...] = DIGITS, run: Any = inline) -> tuple[SplitNetwork, Result]:
    """Three rounds of surgical aggregation over three sites."""
    file = experiment(folder, "run.rounds=3", "evaluation.result=last")
    network = build(file.experiment.model, classes, file.experiment.run.seed)
    results: list[Result] = []

    def main(grid: Any) -> None:
        strategy = STRATEGIES["surgical"]().prepare(plan_of(file.experiment), file.experiment.participation, "run-1")
        arrays = ArrayRecord(network.state_dict())
        results.append(strategy.start(grid=grid, initial_arrays=arrays, num_rounds=3))

    run(main, site_app(file.experiment.model_dump_json(), file.base, folder / "stock"), 3)
    return network, results[0]


def test_every_method_is_a_flower_strategy() -> None:
    assert len(STRATEGIES) == 22
    assert all(issubclass(one, Strategy) and isinstance(one(), Strategy) for one in STRATEGIES.values())


@pytest.mark.parametrize("run", [inline, pytest.param(on_ray_here, marks=[pytest.mark.slow, pytest.mark.network])])
def test_start_calls_the_roll_and_ends_in_the_model_that_our_own_run_ends_in(run: Any, tmp_path: Path) -> None:
    network, result = started(tmp_path, run=run)
    assert result.arrays.keys() == ArrayRecord(network.state_dict()).keys()
    network.load_state_dict(result.arrays.to_torch_state_dict())
    summary = federation(tmp_path, "run.rounds=3", "evaluation.result=last", out="ours")
    assert state_sha256(read_state(network), layout_of(network)) == summary["model_sha256"]
    assert list(result.train_metrics_clientapp) == [1, 2, 3]


def test_a_model_of_other_classes_is_refused_with_the_classes_of_the_run(tmp_path: Path) -> None:
    with pytest.raises(
        BadInput, match=r"initial_arrays: is no state_dict of the plan's network with the classes \"0\""
    ):
        started(tmp_path, classes=("0", "1"))


def test_the_state_dict_is_that_of_an_ordinary_torch_module(tmp_path: Path) -> None:
    network, result = started(tmp_path)
    assert all(isinstance(value, torch.Tensor) for value in result.arrays.to_torch_state_dict().values())
    assert network.state_dict().keys() == result.arrays.to_torch_state_dict().keys()
