"""One hospital of five sends its update turned round and ten times as long: the plain mean breaks, robust ones hold."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client import app
from common.data.images.pixels import channels_first
from common.metrics.auroc import mean_auroc
from common.models.inference import label_matrix, scores_of
from common.models.network import build
from common.models.state import Head, write_state
from common.simulation import simulated_data
from common.wire.records import Groups, TrainReply, TrainRequest
from tests.federations import experiment
from tests.strategies.leading import lead

pytestmark = pytest.mark.slow
LIAR, TIMES = "site-3", np.float32(-10)
ROUNDS = 3
HOLDING = {
    "coordinate-wise median": "method.mean=coordinate_median",
    "trimmed mean": 'method.mean={kind = "trimmed_mean", fraction = 0.2}',
    "Krum": 'method.mean={kind = "krum", byzantine = 1}',
    "far updates dropped": "participation.far_updates=drop",
}


def auroc(folder: Path, *overrides: str) -> float:
    """Of the last model, over all classes, on the test part."""
    folder.mkdir()
    five = ("partition.sites=5", "partition.shared=10", "participation.min_sites=3", "participation.guard=off")
    file = experiment(folder, f"run.rounds={ROUNDS}", *five, *overrides)
    model = lead(file, folder / "run", ROUNDS).strategy.state.model
    network, test = (
        build(file.experiment.model, model.head.class_names, 0),
        simulated_data(file.experiment, folder).test,
    )
    write_state(network, trunk=model.trunk, norm=model.norm, head=model.head)
    found = mean_auroc(
        scores_of(network, channels_first(test.images)), label_matrix(test, model.head.class_names).numpy()
    )
    assert found is not None
    return found


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> float:
    return auroc(tmp_path_factory.mktemp("honest") / "plain")


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    train = app.private_round

    def lying(at: Any, request: TrainRequest) -> TrainReply:
        reply = train(at, request)
        return replace(reply, update=turned(reply.update)) if at.name == LIAR else reply

    monkeypatch.setattr(app, "private_round", lying)


def turned(update: Groups) -> Groups:
    head = update.head
    assert head is not None
    assert update.trunk is not None
    assert update.norm is not None
    rows = Head(head.class_names, TIMES * head.weight, TIMES * head.bias)
    return Groups(TIMES * update.trunk, TIMES * update.norm, rows)


def test_the_plain_mean_breaks(honest: float, poisoned: None, tmp_path: Path) -> None:
    assert honest > 0.9
    assert auroc(tmp_path / "plain") < 0.7


@pytest.mark.parametrize("way", HOLDING)
def test_what_is_robust_holds(way: str, honest: float, poisoned: None, tmp_path: Path, record_property: Any) -> None:
    record_property("survived", f"poisoned site of five: {way}")
    assert auroc(tmp_path / "robust", HOLDING[way]) > honest - 0.03
