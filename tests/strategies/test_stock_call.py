"""What a Flower user types: ``STRATEGIES[name]`` and ``start`` with a ``state_dict``."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import Result, Strategy

from polyclinic.common.config import ExperimentFile, SimulationSection, make_hospital_plan
from polyclinic.common.errors import BadInput
from polyclinic.common.models.network import SplitNetwork, build_network
from polyclinic.common.models.state import hash_model_state, make_model_layout, read_model_state
from polyclinic.common.simulation import load_undivided_data
from polyclinic.server.simulation.backends.inline import import_client_app, run_with_inline_grid
from polyclinic.server.simulation.backends.ray_grid import SimulatedRunData, run_on_ray
from polyclinic.server.simulation.backends.ray_process import start_ray_driver
from polyclinic.strategies.registry import STRATEGIES
from tests.federations import experiment, federation

DIGITS = tuple("0123456789")
Run = Callable[[Any, ExperimentFile, Path], None]
NAMES = ("site-1", "site-2", "site-3")


def in_this_process(main: Any, file: ExperimentFile, folder: Path) -> None:
    run_with_inline_grid(
        main, import_client_app(file.experiment.model_dump_json(), file.base_folder, folder), len(NAMES)
    )


def on_ray_here(main: Any, file: ExperimentFile, folder: Path) -> None:
    on = file.experiment.model_copy(update={"simulation": SimulationSection(workers=1)})
    images = load_undivided_data(on, file.base_folder)
    with start_ray_driver(on) as process:
        run_on_ray(main, SimulatedRunData(on.model_dump_json(), file.base_folder, folder, NAMES, images), process)


def started(
    folder: Path, classes: tuple[str, ...] = DIGITS, run: Run = in_this_process, rounds: int = 2, **options: Any
) -> tuple[SplitNetwork, Result]:
    """Rounds of surgical aggregation over three sites."""
    file = experiment(folder, "evaluation.checkpoint=last")
    network = build_network(file.experiment.model, classes, file.experiment.run.seed)
    results: list[Result] = []

    def main(grid: Any) -> None:
        strategy = STRATEGIES["surgical"]().prepare(
            make_hospital_plan(file.experiment), file.experiment.participation, "run-1"
        )
        arrays = ArrayRecord(network.state_dict())
        results.append(strategy.start(grid=grid, initial_arrays=arrays, num_rounds=rounds, **options))

    run(main, file, folder / "stock")
    return network, results[0]


def test_every_method_is_a_flower_strategy() -> None:
    assert len(STRATEGIES) == 32
    assert all(issubclass(method, Strategy) and isinstance(method(), Strategy) for method in STRATEGIES.values())


@pytest.mark.parametrize(
    "run", [in_this_process, pytest.param(on_ray_here, marks=[pytest.mark.slow, pytest.mark.network])]
)
def test_start_calls_the_roll_and_ends_in_the_model_that_our_own_run_ends_in(run: Run, tmp_path: Path) -> None:
    network, result = started(tmp_path, run=run)
    assert result.arrays.keys() == ArrayRecord(network.state_dict()).keys()
    network.load_state_dict(result.arrays.to_torch_state_dict())
    summary = federation(tmp_path, "evaluation.checkpoint=last", out="ours")
    assert hash_model_state(read_model_state(network), make_model_layout(network)) == summary["model_sha256"]
    assert list(result.train_metrics_clientapp) == [1, 2]


def test_a_run_ends_after_the_round_at_which_should_stop_returns_true(tmp_path: Path) -> None:
    for name in ("stopped", "one"):
        (tmp_path / name).mkdir()

    def should_stop(server_round: int, result: Result) -> bool:
        return list(result.train_metrics_clientapp) == [server_round]

    _, stopped = started(tmp_path / "stopped", rounds=9, should_stop=should_stop)
    _, one = started(tmp_path / "one", rounds=1)
    assert list(stopped.train_metrics_clientapp) == [1]
    for name, array in one.arrays.items():
        assert stopped.arrays[name].numpy().tobytes() == array.numpy().tobytes()


def test_a_run_goes_on_while_should_stop_returns_false(tmp_path: Path) -> None:
    rounds = list[int]()

    def should_stop(server_round: int, result: Result) -> bool:
        rounds.append(server_round)
        return False

    _, result = started(tmp_path, should_stop=should_stop)
    assert rounds == list(result.train_metrics_clientapp) == [1, 2]


def test_a_model_of_other_classes_is_refused_with_the_classes_of_the_run(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"initial_arrays: .* with the classes \"0\""):
        started(tmp_path, classes=("0", "1"))
