"""The coordinator's layers are made once, of the model's layout, before the first round."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from polyclinic.common.models.network import build_network
from polyclinic.common.models.state import make_model_layout
from polyclinic.strategies.engine.coordinator import Coordinator
from polyclinic.strategies.engine.layers import CoordinatorRoundLayer, RunningVarianceCheckLayer
from tests.federations import experiment
from tests.strategies.leading import lead


def test_a_run_makes_its_layers_once_and_of_the_models_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[list[CoordinatorRoundLayer]]()
    make_layers = Coordinator._iterate_round_layers

    def note_layers(coordinator: Coordinator) -> Iterator[CoordinatorRoundLayer]:
        made.append(list(make_layers(coordinator)))
        yield from made[-1]

    monkeypatch.setattr(Coordinator, "_iterate_round_layers", note_layers)
    ran = lead(experiment(tmp_path, "run.method=surgical"), tmp_path / "run", 2)
    assert len(made) == 1
    assert isinstance(made[0][0], RunningVarianceCheckLayer)  # it needs the layout
    assert ran.coordinator.layers == tuple(made[0])


def test_a_layout_cannot_change_under_layers_that_are_made(tmp_path: Path) -> None:
    ran = lead(experiment(tmp_path, "run.method=surgical"), tmp_path / "run", 1)
    network = build_network(ran.coordinator.plan.model, ("a", "b"), seed=0)
    with pytest.raises(AssertionError):
        ran.coordinator.fix_run_model_layout(make_model_layout(network))
