"""Our method for few rounds: passing as in ``polyclinic``, then rows that all sites solve at once."""

from pathlib import Path

import numpy as np
import pytest

from polyclinic.common.errors import BadInput
from polyclinic.common.models.network import Head
from polyclinic.strategies.engine.layers import UpdateNormBoundLayer
from polyclinic.strategies.methods.polyclinic_passing import ChangedRowsMean
from tests.federations import Traffic, experiment, federation, finished
from tests.strategies.leading import lead

RUN = ("run.method=polyclinic_passing", "run.rounds=4", "partition.shared=2", "training.batch_size=64")
STAGES = ("method.training_rounds=3", "method.mean_rounds=2")


def test_a_row_is_averaged_over_the_sites_that_changed_it_by_hand() -> None:
    mean = ChangedRowsMean(("a", "b", "c"), 2)
    mean.add(Head(("a", "b"), np.array([[2.0, 0.0], [0.0, 0.0]], np.float32), np.array([1.0, 0.0], np.float32)), 1.0)
    mean.add(Head(("b", "a"), np.array([[0.0, 0.0], [4.0, -2.0]], np.float32), np.array([-5.0, 0.0], np.float32)), 3.0)
    weight, bias, sent = mean.mean
    # Row a: (1 (2, 0) + 3 (4, -2)) / 4, biases (1 + 3 * 0) / 4; row b: the second site's alone, its bias.
    assert weight.tolist() == [[3.5, -1.5], [0.0, 0.0], [0.0, 0.0]]
    assert bias.tolist() == [0.25, -5.0, 0.0]
    assert sent.tolist() == [True, True, False]


@pytest.mark.parametrize("mean_rounds", [1, 2])
def test_without_solved_rows_it_is_polyclinic_of_one_round_less_bit_for_bit(mean_rounds: int) -> None:
    mean = f"method.mean_rounds={mean_rounds}"
    plain = finished("run.method=polyclinic", *RUN[1:], "run.rounds=3", mean)[1]["model_sha256"]
    assert finished(*RUN, mean, "method.solved_share=0")[1]["model_sha256"] == plain


@pytest.mark.parametrize("part", ["method.solved_share=0", "method.shrinkage=1"])
def test_each_part_ends_in_another_model(part: str) -> None:
    last = (*RUN, 'evaluation.checkpoint="last"')
    assert finished(*last)[1]["model_sha256"] != finished(*last, part)[1]["model_sha256"]


def test_in_the_last_round_all_sites_receive_one_model_and_move_rows_alone(tmp_path: Path, traffic: Traffic) -> None:
    ran = lead(experiment(tmp_path, *RUN, *STAGES), tmp_path / "run", 4)
    trained, solved = ran.states[2].model, ran.states[3].model
    last = [request for request in traffic.requests if request.round == 4]
    replies = {reply.site: reply for reply in traffic.replies if reply.round == 4}
    assert [request.model.trunk.tobytes() for request in last] == [trained.trunk.tobytes()] * 3
    assert solved.trunk.tobytes() == trained.trunk.tobytes()
    assert solved.norm.tobytes() == trained.norm.tobytes()
    contract = ran.coordinator.sites.contract
    for row, name in enumerate(contract.class_names):
        owners = [site for site in sorted(replies) if name in contract.sites[site]]
        moves = [replies[site].update.head.select_rows((name,)).weight[0] for site in owners]
        np.testing.assert_allclose(
            solved.head.weight[row], trained.head.weight[row] + np.mean(moves, axis=0), rtol=1e-5, atol=1e-6
        )


def test_the_solved_model_is_validated_and_may_be_the_result(tmp_path: Path, traffic: Traffic) -> None:
    ran = lead(experiment(tmp_path, *RUN, *STAGES), tmp_path / "run", 4)
    assert [reply.round for reply in traffic.evaluations if reply.round == 4] == [4, 4, 4]
    state = ran.coordinator.state
    assert state.best_round == 4
    assert state.best is not None
    assert state.best.head.weight.tobytes() == state.model.head.weight.tobytes()


@pytest.mark.parametrize(("method", "bounds"), [("polyclinic_passing", 1), ("polyclinic", 0)])
def test_the_length_of_updates_is_bounded_in_the_round_of_averaging(method: str, bounds: int, tmp_path: Path) -> None:
    stages = STAGES if method == "polyclinic_passing" else STAGES[1:]
    ran = lead(experiment(tmp_path, *RUN, *stages, f"run.method={method}"), tmp_path / "run", 1)
    assert sum(isinstance(layer, UpdateNormBoundLayer) for layer in ran.coordinator.layers) == bounds


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("run.rounds=1", "the head rows are solved in round 2"),
        ("model.task=multi_class", "polyclinic_passing asks of each class by itself"),
        ("privacy.secure_aggregation=true", "the model is passed on from site to site"),
    ],
)
def test_what_would_end_in_another_model_is_refused(setting: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput) as refused:
        federation(tmp_path, *RUN, setting)
    assert says in str(refused.value)
