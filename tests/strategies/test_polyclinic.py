"""Our own method against sequential training, and each of its changes by itself, on real digits."""

from pathlib import Path

import numpy as np
import pytest

from tests.federations import Traffic, experiment, federation, finished, json_lines
from tests.strategies.leading import lead

PLAIN = ('method.order="name"', "method.mean_rounds=0")
RUN = ("run.method=polyclinic", "run.rounds=3", "partition.shared=2", "training.batch_size=64")


def test_without_its_changes_it_is_sequential_training_that_leaves_missing_labels_out() -> None:
    sequential = ("run.method=fedseq", 'method.missing="masked"', *RUN[1:])
    assert finished(*RUN, *PLAIN)[1]["model_sha256"] == finished(*sequential)[1]["model_sha256"]


@pytest.mark.parametrize("change", ['method.order="drawn"', "method.mean_rounds=1"])
def test_each_change_ends_in_another_model(change: str) -> None:
    assert finished(*RUN, *PLAIN, change)[1]["model_sha256"] != finished(*RUN, *PLAIN)[1]["model_sha256"]


def orders(run: Path) -> list[tuple[str, ...]]:
    return [tuple(line["sites"]) for line in json_lines(run / "rounds.jsonl")]


def test_every_round_has_an_order_of_its_own_that_follows_from_the_seed(tmp_path: Path) -> None:
    drawn = (*RUN, "run.rounds=8", "partition.sites=4")
    passes = orders(finished(*drawn)[0])
    assert {tuple(sorted(sites)) for sites in passes} == {("site-1", "site-2", "site-3", "site-4")}
    assert len(set(passes)) > 3
    assert len({sites[-1] for sites in passes}) > 1
    federation(tmp_path, *drawn)
    assert orders(tmp_path / "run") == passes


def test_the_last_rounds_end_with_the_mean_of_the_models_after_each_stop(tmp_path: Path, traffic: Traffic) -> None:
    """Added up from what was on the wire: a stop begins with the model that left the one before."""
    ran = lead(experiment(tmp_path, *RUN), tmp_path / "run", 3)
    for server_round in (1, 2, 3):
        stops = [
            request.model.trunk.astype(np.float64) + reply.update.trunk
            for request, reply in zip(traffic.requests, traffic.replies, strict=True)
            if request.round == server_round
        ]
        assert len(stops) == 3
        ends = stops[-1] if server_round < 3 else np.mean(stops, axis=0)
        np.testing.assert_allclose(ran.states[server_round - 1].model.trunk, ends, rtol=0, atol=1e-6)
        assert not np.allclose(stops[-1], np.mean(stops, axis=0), rtol=0, atol=1e-4)
