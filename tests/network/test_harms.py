"""A site that does harm in every round of one run, each time in another way, over the real wire."""

from pathlib import Path
from typing import Any

import pytest

from polyclinic.client import app
from polyclinic.common.wire.records import TrainReply, TrainRequest
from tests.network.adversary import HARMS
from tests.network.conftest import Survives
from tests.network.federated import connected, events
from tests.network.real import PARTIAL, eventually, flwr_client, flwr_server, flwr_sim, settings, summary_of, written

pytestmark = pytest.mark.torture
FOUR = f'{PARTIAL}west = ["2", "3", "8"]\n'
LIAR = "south"
CHANGES = (f"run.rounds={len(HARMS)}", "participation.min_sites=3")


def test_a_site_that_sends_something_else_that_cannot_count_in_every_round_changes_nothing_and_is_told_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, survives: Survives
) -> None:
    for harm in HARMS:
        survives(harm.kind)
    experiment = written(FOUR, tmp_path)
    with connected(experiment, tmp_path / "machine", {LIAR: "tests.network.adversary"}) as (coordinator, sites):
        (liar,) = (site for site in sites if site.name == LIAR)
        run = coordinator.run(experiment, tmp_path / "run", *CHANGES)
        eventually(lambda: not run.runs, "the run ends", within_s=900)
        run.succeeds()
        status, words = coordinator.now["run"], flwr_server("status", coordinator.folder).out
        at_site = flwr_client("status", liar.folder).out
    absent = {event["round"]: event for event in events(tmp_path / "run", "absent")}
    assert {event["site"] for event in absent.values()} == {LIAR}
    for number, harm in enumerate(HARMS, start=1):
        reason = absent[number]["reason"]
        assert harm.reason in reason, harm.kind
        assert f"round {number} went without {LIAR}: {reason}" in run.output
        assert f"the reply of this site did not count in round {number}: {reason}" in liar.program.output
    last = f"round {len(HARMS)}: {absent[len(HARMS)]['reason']}"
    assert status["left_out"] == {LIAR: last}
    assert f"{LIAR} was left out of {last}" in words
    assert f"did not count in {last}" in at_site
    train = app.train_with_privacy_layers

    def train_or_fail(at: Any, request: TrainRequest, masks: Any) -> TrainReply:
        if at.name == LIAR:
            raise OSError("not there")
        return train(at, request, masks)

    monkeypatch.setattr(app, "train_with_privacy_layers", train_or_fail)
    out = tmp_path / "simulation"
    done = flwr_sim("run", experiment, "--backend", "inline", "--out", out, *settings(*CHANGES))
    assert done.code == 0, done.err
    facts = [(summary["rounds"], summary["model_sha256"]) for summary in map(summary_of, (tmp_path / "run", out))]
    assert facts[0] == facts[1]
    assert facts[0][0] == len(HARMS)
