"""One hospital sends what harms: it is named and left out, nobody else is, and the run ends as without it."""

import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import strategies.rounds.strategy
from client import app
from client.training.private_round import private_round
from common.config import read_experiment
from server.federation.checkpoints import CheckpointFolder
from server.federation.rollback import Backwards
from server.runs.verify import verify
from server.simulation.simulate import simulate
from strategies.registry import STRATEGIES
from tests.federations import federation, given_weights, needs_of
from tests.liars import LIES, Answer, Lying, changed, shifted_trunk
from tests.server.killing import Killed, kill_at

pytestmark = pytest.mark.slow
LIAR = "site-2"
QUICK = {("1e30", 2), ("turned round", 2), ("flipped labels", 3), ("constant", 3), ("100 times", 4), ("noise", 4)}
"""What ``make test`` tries; ``make torture`` tries all."""


@pytest.fixture(autouse=True)
def quietly() -> Iterator[None]:
    """A model of 1e30 overflows at every site."""
    with np.errstate(all="ignore"):
        yield


def lied(monkeypatch: pytest.MonkeyPatch, answer: Answer) -> None:
    monkeypatch.setitem(vars(app), "private_round", Lying(LIAR, answer))


def events(run: Path, name: str) -> list[dict[str, Any]]:
    every = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [event for event in every if event["event"] == name]


def _every() -> list[Any]:
    return [
        pytest.param(kind, sites, marks=() if (kind, sites) in QUICK else pytest.mark.torture)
        for kind in LIES
        for sites in (2, 3, 4)
    ]


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Sites -> mean AUROC of the run in which one of them is not there."""
    return {}


def without_the_liar(sites: int, folder: Path, honest: dict[int, float]) -> float:
    """The same shares of the images, and the liar sends nothing: the guard is told of it beforehand."""
    if sites not in honest:
        with pytest.MonkeyPatch.context() as patched:
            start = strategies.rounds.strategy.FederatedAveraging._beginning

            def beginning(strategy: Any, arrays: Any) -> Any:
                state = start(strategy, arrays)
                return replace(state, guard=state.guard.without({LIAR: "not there"}))

            patched.setattr(strategies.rounds.strategy.FederatedAveraging, "_beginning", beginning)
            patched.setitem(vars(app), "private_round", private_round)
            honest[sites] = federation(folder, *plan(sites), out="honest")["test"]["mean_auroc"]
    return honest[sites]


def plan(sites: int) -> tuple[str, ...]:
    return ("run.rounds=4", f"partition.sites={sites}", "partition.shared=10")


@pytest.mark.parametrize(("kind", "sites"), _every())
def test_the_liar_is_named_and_the_model_is_as_good_as_without_it(
    kind: str, sites: int, honest: dict[int, float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    expected = without_the_liar(sites, tmp_path, honest)
    lied(monkeypatch, LIES[kind])
    summary = federation(tmp_path, *plan(sites))
    assert list(summary["condemned"]) == [LIAR]
    assert summary["test"]["mean_auroc"] > expected - 0.02
    assert [event["site"] for event in events(tmp_path / "run", "condemned")] == [LIAR]
    assert not verify(tmp_path / "run").faults


@pytest.mark.parametrize("least", [0.0, 1e-4])
def test_of_two_the_honest_one_stays_where_the_other_sends_next_to_nothing(
    least: float, honest: dict[int, float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    expected = without_the_liar(2, tmp_path, honest)
    lied(monkeypatch, changed(lambda array, server_round: np.float32(least) * array))
    summary = federation(tmp_path, *plan(2))
    assert list(summary["condemned"]) in ([], [LIAR])
    assert summary["test"]["mean_auroc"] > expected - 0.05  # half a step a round is slower


SAME = {"surgical", "fedmlp"}


@pytest.mark.parametrize(
    "method", [pytest.param(one, marks=() if one in SAME else pytest.mark.torture) for one in sorted(STRATEGIES)]
)
def test_an_honest_run_is_the_same_bit_by_bit_with_the_guard_and_without(method: str, tmp_path: Path) -> None:
    choices = (f"run.method={method}", *needs_of(method), "run.rounds=3")
    on, off = (federation(tmp_path, *choices, f"participation.guard={way}", out=way) for way in ("on", "off"))
    assert on["model_sha256"] == off["model_sha256"]
    assert on["condemned"] == {}
    assert events(tmp_path / "on", "rolled_back") == []


def test_training_that_has_settled_costs_no_honest_site_its_place(tmp_path: Path) -> None:
    """The rehearsal of the README, 20 rounds: updates of a settled model point anywhere."""
    experiment = Path(__file__).parents[2] / "experiments" / "digits_surgical.toml"
    file = read_experiment(experiment, ("run.rounds=20", "simulation.backend=inline"))
    summary = simulate(file, tmp_path / "run", Console(quiet=True))
    assert summary["condemned"] == {}


MASKED = ("run.method=vanilla", "privacy.secure_aggregation=true", "partition.sites=4", "partition.shared=10")


def test_under_secure_aggregation_one_site_after_the_other_is_held_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lied(monkeypatch, LIES["1e30"])
    summary = federation(tmp_path, *MASKED, "run.rounds=2")
    assert list(summary["condemned"]) == [LIAR]
    assert [event["held"] for event in events(tmp_path / "run", "rolled_back")] == [None, "site-1", LIAR]
    assert not verify(tmp_path / "run").faults
    lines = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert [(line["round"], LIAR in line["sites"]) for line in lines] == [(1, False), (2, False)]


KILLS = {
    "before the rollback is written": (Backwards, "go_back", 1, False),
    "after the rollback is written": (Backwards, "go_back", 1, True),
    "between the checkpoint and the removal of later ones": (CheckpointFolder, "save", 2, True),
    "while a site is held back": (strategies.rounds.strategy.FederatedAveraging, "_moved", 3, False),
}


IN_TWO_ROUNDS = (*MASKED, "run.rounds=2")


@cache
def condemned_through() -> str:
    """The model of :data:`IN_TWO_ROUNDS` where nothing is killed; call it while one site lies."""
    with tempfile.TemporaryDirectory() as folder:
        return str(federation(Path(folder), *IN_TWO_ROUNDS)["model_sha256"])


@pytest.mark.parametrize("point", KILLS)
def test_killed_in_a_rollback_it_ends_in_the_same_model(
    point: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lied(monkeypatch, LIES["1e30"])
    through = condemned_through()
    owner, name, call, after = KILLS[point]
    with pytest.MonkeyPatch.context() as patched:
        kill_at(patched, owner, name, call, after=after)
        with pytest.raises(Killed):
            federation(tmp_path, *IN_TWO_ROUNDS, out="killed")
    resumed = federation(tmp_path, *IN_TWO_ROUNDS, out="killed", resume=True)
    assert resumed["model_sha256"] == through
    assert list(resumed["condemned"]) == [LIAR]
    assert not verify(tmp_path / "killed").faults


def test_a_model_that_only_shows_itself_broken_later_is_taken_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As if nothing were odd: the trial takes place only when the round is done again."""
    lied(monkeypatch, LIES["1000 times"])
    held = strategies.rounds.guarded_mean.UpdateTrial.held

    def only_repeated(trial: Any, server_round: int, *others: Any, guard: Any, judges: Any) -> Any:
        if guard.repeated != server_round:
            return guard, {}
        return held(trial, server_round, *others, guard=guard, judges=judges)

    monkeypatch.setattr(strategies.rounds.guarded_mean.UpdateTrial, "held", only_repeated)
    summary = federation(tmp_path, *plan(3))
    assert list(summary["condemned"]) == [LIAR]
    assert events(tmp_path / "run", "rolled_back")
    assert summary["test"]["mean_auroc"] > 0.95
    assert not verify(tmp_path / "run").faults


def test_where_a_model_is_passed_on_an_absurd_hop_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lied(monkeypatch, LIES["1e30"])
    summary = federation(tmp_path, "run.method=fedseq", *plan(3))
    assert list(summary["condemned"]) == [LIAR]
    assert not verify(tmp_path / "run").faults


@pytest.mark.torture
def test_a_trunk_that_drifts_without_odd_rows_is_found_when_the_model_gets_worse(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lied(monkeypatch, shifted_trunk)
    summary = federation(tmp_path, "run.rounds=5", "partition.sites=3", "partition.shared=0")
    assert list(summary["condemned"]) == [LIAR]


@pytest.mark.parametrize("also", [(), ("privacy.secure_aggregation=true",)], ids=["seen", "masked"])
def test_a_run_in_which_noise_breaks_every_model_ends_and_never_goes_back_further(
    also: tuple[str, ...], tmp_path: Path
) -> None:
    noise = (
        "method.trunk=fedbn_plus",
        given_weights(),
        "privacy.level=update",
        "privacy.noise_multiplier=0.5",
        "evaluation.result=last",
    )
    summary = federation(tmp_path, "run.rounds=3", "partition.shared=2", *noise, *also)
    assert summary["rounds"] == 3
    broken = [event["round"] for event in events(tmp_path / "run", "rolled_back")]
    assert broken == sorted(broken) != []
    assert max(map(broken.count, broken)) <= 1 + 3 + 1  # as it was, without each site, as it was
    assert summary["condemned"] == {}


def test_a_site_that_states_wrong_aurocs_does_not_have_the_untrained_model_chosen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It says 1 of the model before round 1 and 0 of all later ones, over the real wire."""

    def praising(site: Any, request: Any) -> Any:
        return replace(private_round(site, request), validation_auroc=float(request.round == 1))

    lied(monkeypatch, praising)
    summary = federation(tmp_path, "run.rounds=4", "partition.sites=3", "partition.shared=10")
    assert summary["best_round"] >= 3
