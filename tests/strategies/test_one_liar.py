"""One hospital sends what harms: the run ends about as well as without it, and no other site is left out."""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import polyclinic.strategies.engine.coordinator
import polyclinic.strategies.engine.layers
from polyclinic.client import app
from polyclinic.client.training.layers import train_with_privacy_layers
from polyclinic.common.config import read_experiment
from polyclinic.server.federation.checkpoints import CheckpointFolder
from polyclinic.server.federation.recorder import RunRecorder
from polyclinic.server.runs.verify import verify_run
from polyclinic.server.simulation.simulate import simulate
from polyclinic.strategies.engine.layers import RollbackLayer, TrialSuspects
from polyclinic.strategies.registry import STRATEGIES
from tests.backdoors import Schedule, backdoor, measure_success, with_square
from tests.federations import ALL_DIGITS, federation, given_weights, json_lines, needs_of
from tests.liars import LIES, Answer, Lying, shifted_trunk
from tests.server.killing import Killed, kill_at

pytestmark = pytest.mark.slow
LIAR = "site-2"
QUICK = {("1e30", 3), ("turned round 10 times", 3), ("flipped labels", 3), ("growing", 3)}
QUICK_METHODS = {"fedmlp"}
"""What ``make test`` tries; ``make torture`` tries all."""


@pytest.fixture(autouse=True)
def quietly() -> Iterator[None]:
    """A model of 1e30 overflows at every site."""
    with np.errstate(all="ignore"):
        yield


def lied(monkeypatch: pytest.MonkeyPatch, answer: Answer, liar: str = LIAR) -> None:
    monkeypatch.setitem(vars(app), "train_with_privacy_layers", Lying(liar, answer))


def events(run: Path, name: str) -> list[dict[str, Any]]:
    return [event for event in json_lines(run / "events.jsonl") if event["event"] == name]


def verified(run: Path) -> list[str]:
    """The lines of a receipt without a fault."""
    verdict = verify_run(run)
    assert not verdict.faults
    return verdict.verified


def plan(sites: int, rounds: int = 5) -> tuple[str, ...]:
    return (ALL_DIGITS, f"run.rounds={rounds}", f"partition.sites={sites}", "partition.shared=10")


@cache
def without_the_liar(sites: int) -> float:
    """Mean AUROC where the liar's reply never counts, with the same shares of the images."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        lied(patched, LIES["negative variances"])
        return float(federation(Path(folder), *plan(sites))["test"]["mean_auroc"])


@pytest.mark.parametrize(
    ("kind", "sites"),
    [
        pytest.param(kind, sites, marks=() if (kind, sites) in QUICK else pytest.mark.torture)
        for kind in LIES
        for sites in (3, 4)
    ],
)
def test_one_liar_costs_nothing_and_nobody_else_is_left_out(
    kind: str, sites: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    expected = without_the_liar(sites)
    lied(monkeypatch, LIES[kind])
    summary = federation(tmp_path, *plan(sites), "run.keep_updates=true")
    assert summary["test"]["mean_auroc"] > expected - 0.02
    assert set(summary["excluded"]) <= {LIAR}
    assert {event["site"] for event in events(tmp_path / "run", "shortened_update")} <= {LIAR}
    assert sum("updates make the model" in line for line in verified(tmp_path / "run")) == 5


@pytest.mark.parametrize("kind", ["1e30", pytest.param("turned round 10 times", marks=pytest.mark.torture)])
def test_a_liar_without_figures_is_left_out_too(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    expected = without_the_liar(3)
    answer = LIES[kind]
    lied(monkeypatch, lambda site, request: replace(answer(site, request), validation_loss=None, validation_auroc=None))
    summary = federation(tmp_path, *plan(3))
    assert summary["test"]["mean_auroc"] > expected - 0.02
    assert set(summary["excluded"]) == {LIAR}


def test_a_negative_variance_is_refused_and_the_site_told_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lied(monkeypatch, LIES["negative variances"])
    federation(tmp_path, *plan(3, rounds=1))
    assert "variance of batch normalisation negative" in events(tmp_path / "run", "absent")[0]["reason"]


@pytest.mark.parametrize(("clip", "least", "most"), [("off", 0.6, 1.0), ("3.0", 0.0, 0.5)])
def test_a_bound_at_least_halves_what_a_backdoor_of_the_last_round_can_do(
    clip: str, least: float, most: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lied(monkeypatch, backdoor(Schedule(times=10, from_round=6), with_square, "3"))
    choices = (*plan(5, rounds=6), "evaluation.checkpoint=last", "run.seed=0", f"participation.clip={clip}")
    federation(tmp_path, *choices)
    assert least <= measure_success(tmp_path, choices, with_square, "3") <= most


@pytest.mark.parametrize(
    "method",
    [pytest.param(name, marks=() if name in QUICK_METHODS else pytest.mark.torture) for name in sorted(STRATEGIES)],
)
def test_an_honest_run_is_the_same_bit_by_bit_with_the_bound_and_without(method: str, tmp_path: Path) -> None:
    choices = (f"run.method={method}", *needs_of(method), "run.rounds=3")
    on, off = (federation(tmp_path, *choices, f"participation.clip={clip}", out=clip) for clip in ("3.0", "off"))
    assert on["model_sha256"] == off["model_sha256"]
    assert on["excluded"] == {}
    assert events(tmp_path / "3.0", "shortened_update") == []


@pytest.mark.parametrize("rounds", [8, pytest.param(20, marks=pytest.mark.long)])
def test_training_that_has_settled_costs_no_honest_site_its_place(rounds: int, tmp_path: Path) -> None:
    """The rehearsal of the README, 20 rounds: updates of a settled model point anywhere."""
    experiment = Path(__file__).parents[2] / "experiments" / "digits_surgical.toml"
    file = read_experiment(experiment, (f"run.rounds={rounds}", "simulation.backend=inline"))
    summary = simulate(file, tmp_path / "run", Console(quiet=True))
    assert summary["excluded"] == {}


COLLAPSING = plan(3, rounds=3)
"""With a liar of 1e30, whose model collapses where no update is tried before it has."""


@pytest.fixture
def only_after_a_collapse(monkeypatch: pytest.MonkeyPatch) -> None:
    find = RollbackLayer.find_trial_suspects
    monkeypatch.setattr(
        RollbackLayer,
        "find_trial_suspects",
        lambda self, state, losses, lengths: (
            find(self, state, losses, lengths) if state.repeated == state.round + 1 else TrialSuspects()
        ),
    )
    lied(monkeypatch, LIES["1e30"])


@pytest.mark.usefixtures("only_after_a_collapse")
def test_a_model_that_collapses_is_taken_back_and_the_site_whose_update_did_it_left_out(tmp_path: Path) -> None:
    summary = federation(tmp_path, *COLLAPSING, "run.keep_updates=true")
    (back,) = events(tmp_path / "run", "rolled_back")
    assert back["to"] == back["round"] - 1
    assert list(summary["excluded"]) == [LIAR]
    verified(tmp_path / "run")
    lines = json_lines(tmp_path / "run" / "rounds.jsonl")
    assert [LIAR in line["sites"] for line in lines] == [line["round"] < back["round"] for line in lines]


KILLS = {
    "before the rollback is written": (RunRecorder, "on_state_reset", 1, False),
    "after the rollback is written": (RunRecorder, "on_state_reset", 1, True),
    "between the checkpoint and the removal of later ones": (CheckpointFolder, "save_checkpoint", 2, True),
    "while models are tried": (polyclinic.strategies.engine.layers, "update_global_model", 2, False),
}
QUICK_KILLS = {"after the rollback is written", "while models are tried"}


@cache
def through() -> str:
    """The model where nothing is killed; call it while one site lies."""
    with tempfile.TemporaryDirectory() as folder:
        return str(federation(Path(folder), *COLLAPSING)["model_sha256"])


@pytest.mark.usefixtures("only_after_a_collapse")
@pytest.mark.parametrize(
    "point", [pytest.param(point, marks=() if point in QUICK_KILLS else pytest.mark.torture) for point in KILLS]
)
def test_killed_in_a_rollback_it_ends_in_the_same_model(point: str, tmp_path: Path) -> None:
    expected = through()
    owner, name, call, after = KILLS[point]
    with pytest.MonkeyPatch.context() as patched:
        kill_at(patched, owner, name, call, after=after)
        with pytest.raises(Killed):
            federation(tmp_path, *COLLAPSING, out="killed")
    resumed = federation(tmp_path, *COLLAPSING, out="killed", resume=True)
    assert resumed["model_sha256"] == expected
    assert list(resumed["excluded"]) == [LIAR]
    verified(tmp_path / "killed")


@pytest.mark.parametrize("also", [(), ("privacy.secure_aggregation=true",)], ids=["seen", "masked"])
def test_noise_that_breaks_every_model_takes_none_back(also: tuple[str, ...], tmp_path: Path) -> None:
    noise = (
        "method.trunk=fedbn_plus", given_weights(),
        "privacy.level=update", "privacy.noise_multiplier=0.5", "evaluation.checkpoint=last",
    )  # fmt: skip
    summary = federation(tmp_path, "run.rounds=3", "partition.shared=2", *noise, *also)
    assert summary["rounds"] == 3
    assert events(tmp_path / "run", "rolled_back") == []
    assert summary["excluded"] == {}


@pytest.mark.parametrize("liar", ["site-1", *(pytest.param(f"site-{n}", marks=pytest.mark.torture) for n in (2, 3))])
def test_in_a_pass_a_hop_of_1e30_is_left_out(liar: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lied(monkeypatch, LIES["1e30"], liar)
    summary = federation(tmp_path, "run.method=fedseq", *plan(3), "run.keep_updates=true")
    assert summary["rounds"] == 5
    absences = {(event["round"], event["site"]) for event in events(tmp_path / "run", "absent")}
    assert absences == {(number, liar) for number in range(1, 6)}
    assert summary["test"]["mean_auroc"] > 0.95
    assert sum("updates make the model" in line for line in verified(tmp_path / "run")) == 5


def test_a_resumed_pass_knows_the_lengths_of_visits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lied(monkeypatch, shifted_trunk, "site-3")
    choices = ("run.method=fedseq", *plan(3, rounds=3))
    whole = federation(tmp_path, *choices, out="whole")
    with pytest.MonkeyPatch.context() as patched:
        kill_at(patched, CheckpointFolder, "save_checkpoint", 2, after=True)
        with pytest.raises(Killed):
            federation(tmp_path, *choices, out="killed")
    assert federation(tmp_path, *choices, out="killed", resume=True)["model_sha256"] == whole["model_sha256"]
    assert events(tmp_path / "whole", "shortened_update")


def test_wrong_aurocs_do_not_choose_the_untrained_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It states 1 of the model before round 1 and 0 of all later ones, over the real wire."""

    def praising(site: Any, request: Any) -> Any:
        return replace(train_with_privacy_layers(site, request), validation_auroc=float(request.round == 1))

    lied(monkeypatch, praising)
    summary = federation(tmp_path, *plan(3, rounds=4))
    assert summary["best_round"] >= 3
