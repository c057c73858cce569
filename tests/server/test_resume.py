"""A simulated run that is killed anywhere and resumed ends in the same model, with the same books."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import server.federation.checkpoints
import strategies.engine.coordinator
from common.errors import BadInput
from common.models.state import ModelState
from server.federation import checkpoints
from server.federation.checkpoints import CheckpointFolder
from server.runs.folder import RunFolder
from server.simulation.backends import inline as backends
from strategies.engine.events import RunStopped
from strategies.engine.state import FederationState, deserialize_state, serialize_state
from strategies.registry import STRATEGIES
from tests.federations import experiment, federation, finished, needs_of
from tests.network.real import warm
from tests.server.killing import Killed, kill_at

ROUNDS = "run.rounds=4"
WRAPPED = (
    ("surgical", "training.reset_optimizer=false", 'training.optimizer="sgd"', "training.momentum=0.9"),
    ("surgical", "method.trunk=fedbn"),
    ("partial_loss", "method.compress_update=int8"),
    ("partial_loss", 'method.server_optimizer={kind="adam"}'),
    ("vanilla", "participation.sites_per_round=2"),
    ("vanilla", "evaluation.test_each_round=true", "model.task=multi_class"),
)


KINDS = {
    "test_every_method_ends_in_the_same_model": "kill in simulation, every method",
    "test_killed_at_any_point_it_ends_in_the_same_model": "kill in simulation at a named point",
    "test_a_process_that_gets_sigkill_again_and_again_ends_in_the_same_model": "SIGKILL of a simulation",
    "test_a_broken_newest_checkpoint_is_passed_over_and_said": "broken checkpoint",
}


@pytest.fixture(autouse=True)
def counted(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> None:
    """Have the table of what was survived count them."""
    if kind := KINDS.get(request.node.originalname):
        record_property("survived", kind)
        record_property("same model", kind)


def killed(folder: Path, owner: Any, name: str, call: int, *overrides: str, after: bool = False) -> None:
    """A run whose process dies there."""
    with pytest.MonkeyPatch.context() as patched:
        kill_at(patched, owner, name, call, after=after)
        with pytest.raises(Killed):
            federation(folder, *overrides, out="killed")


def lines(run: Path) -> list[dict[str, Any]]:
    """``rounds.jsonl`` without its times."""
    found = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    for line in found:
        for timed in ("seconds", "site_seconds", "bytes_up"):  # how long it took is told as text
            line.pop(timed)
        if line["coordinator"]:
            line["coordinator"].pop("seconds")
    return found


def events(run: Path, name: str) -> list[dict[str, Any]]:
    every = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [event for event in every if event["event"] == name]


def same_end(folder: Path, through: dict[str, Any], overrides: tuple[str, ...]) -> None:
    resumed = federation(folder, *overrides, out="killed", resume=True)
    assert resumed["model_sha256"] == through["model_sha256"]
    assert lines(folder / "killed") == lines(folder / "through")
    timed = ("seconds", "bytes_up", "bytes_down")
    for site, facts in through["sites"].items():
        assert {k: v for k, v in resumed["sites"][site].items() if k not in timed} == {
            k: v for k, v in facts.items() if k not in timed
        }
    for key in ("test", "best_round", "client_accuracy", "learned", "rounds"):
        assert resumed[key] == through[key], key


SHORT = {"fedmlp", "unifed", "individual", "partial_loss method.compress_update=int8"}
"""What ``make test`` tries; ``make torture`` tries all."""


def _every() -> list[Any]:
    found = [*((name,) for name in sorted(STRATEGIES)), *WRAPPED]
    marks = [() if " ".join(choices) in SHORT else (pytest.mark.torture,) for choices in found]
    return [pytest.param(one, marks=mark, id=" ".join(one)) for one, mark in zip(found, marks, strict=True)]


@pytest.mark.parametrize("choices", _every())
def test_every_method_ends_in_the_same_model(choices: tuple[str, ...], tmp_path: Path) -> None:
    overrides = (f"run.method={choices[0]}", *needs_of(choices[0]), ROUNDS, *choices[1:])
    through = federation(tmp_path, *overrides, out="through")
    if choices[0] == "server_only":  # no site is asked in a round
        killed(tmp_path, CheckpointFolder, "save", 3, *overrides)
    else:
        killed(tmp_path, backends.InlineGrid, "_call", 3 + 2 * len(through["sites"]), *overrides)
    same_end(tmp_path, through, overrides)


POINTS = {
    "before the first checkpoint": (server.federation.checkpoints, "write_atomically", 1, False),
    "between a checkpoint's two files": (server.federation.checkpoints, "write_atomically", 5, True),
    "before an old checkpoint is removed": (server.federation.checkpoints, "write_atomically", 6, True),
    "before a round's line": (RunFolder, "round", 2, False),
    "after a round's line": (RunFolder, "round", 2, True),
    "before messages are made": (strategies.engine.coordinator.Coordinator, "configure_train", 3, False),
    "in aggregation": (strategies.engine.coordinator.Coordinator, "moved", 3, False),
    "after aggregation": (strategies.engine.coordinator.Coordinator, "moved", 3, True),
    "in the last validation": (strategies.engine.coordinator.Coordinator, "aggregate_evaluate", 1, False),
    "in the test": (strategies.engine.coordinator.Coordinator, "test", 1, False),
    "before the summary": (RunFolder, "summary", 1, False),
}


@pytest.fixture
def undisturbed() -> tuple[Path, dict[str, Any]]:
    return finished(ROUNDS)


@pytest.mark.parametrize("point", POINTS)
def test_killed_at_any_point_it_ends_in_the_same_model(
    point: str, undisturbed: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, through = undisturbed
    (tmp_path / "through").symlink_to(folder)
    owner, name, call, after = POINTS[point]
    killed(tmp_path, owner, name, call, ROUNDS, after=after)
    same_end(tmp_path, through, (ROUNDS,))


def test_a_process_that_gets_sigkill_again_and_again_ends_in_the_same_model(
    undisturbed: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    _, through = undisturbed
    file, out = experiment(tmp_path, ROUNDS).path, tmp_path / "killed"
    command, kills = ["run", str(file), "--out", str(out), "--set", ROUNDS], 0
    for wanted in (1, 2, 3, None):
        again = ["--resume"] * bool(kills)
        process = warm().fork("studies.cli", [*command, *again], os.environ, tmp_path, tmp_path / "log")
        until = time.monotonic() + 120
        while wanted and not (out / "checkpoints" / f"round-{wanted:06d}.json").exists():
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < until
            time.sleep(0.002)
        if wanted:
            os.kill(process.pid, signal.SIGKILL)
            kills += 1
        process.wait(120)
    assert json.loads((out / "summary.json").read_text())["model_sha256"] == through["model_sha256"]
    assert len(events(out, "resumed")) == kills == 3


@pytest.mark.parametrize("harm", ["state cut off", "state changed", "json cut off", "json without a key", "no state"])
def test_a_broken_newest_checkpoint_is_passed_over_and_said(
    harm: str, undisturbed: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """The one before it serves: here by a method whose sites keep no memory of the round in between."""
    folder, through = undisturbed
    (tmp_path / "through").symlink_to(folder)
    killed(tmp_path, strategies.engine.coordinator.Coordinator, "configure_train", 4, ROUNDS)
    state, facts = (tmp_path / "killed" / "checkpoints" / f"round-000003.{kind}" for kind in ("safetensors", "json"))
    content = bytearray(state.read_bytes())
    if harm == "state cut off":
        state.write_bytes(content[:-7])
    elif harm == "state changed":
        content[-100] ^= 1
        state.write_bytes(content)
    elif harm == "json cut off":
        facts.write_bytes(facts.read_bytes()[:50])
    elif harm == "json without a key":
        facts.write_text("{}")
    else:
        state.unlink()
    same_end(tmp_path, through, (ROUNDS,))
    (said,) = events(tmp_path / "killed", "checkpoint_broken")
    assert said["file"] == "round-000003.json"
    assert said["reason"]
    assert [event["round"] for event in events(tmp_path / "killed", "resumed")] == [2]


def test_two_checkpoints_are_kept_and_a_run_that_is_done_is_not_run_again(tmp_path: Path) -> None:
    through = federation(tmp_path, ROUNDS)
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == [f"round-00000{n}.{kind}" for n in (3, 4) for kind in ("json", "safetensors")]
    before = (tmp_path / "run" / "events.jsonl").read_bytes()
    assert federation(tmp_path, ROUNDS, resume=True) == json.loads(json.dumps(through))
    with pytest.raises(BadInput, match=r"is done: a run of \d+ rounds. The experiment asks for 9."):
        federation(tmp_path, "run.rounds=9", resume=True)
    assert (tmp_path / "run" / "events.jsonl").read_bytes() == before


def test_a_run_may_go_on_for_more_rounds_than_it_began_with(
    undisturbed: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    killed(tmp_path, RunFolder, "summary", 1, "run.rounds=2")
    longer = federation(tmp_path, ROUNDS, out="killed", resume=True)
    assert longer["model_sha256"] == undisturbed[1]["model_sha256"]


def test_another_experiment_another_folder_or_fewer_rounds_are_refused(tmp_path: Path) -> None:
    killed(tmp_path, RunFolder, "summary", 1, ROUNDS)
    with pytest.raises(BadInput, match='began with another experiment: "training" differ'):
        federation(tmp_path, ROUNDS, "training.lr=0.5", out="killed", resume=True)
    with pytest.raises(BadInput, match="has done 4 rounds; the experiment asks for 3"):
        federation(tmp_path, "run.rounds=3", out="killed", resume=True)
    with pytest.raises(BadInput, match="holds something, but no run"):
        federation(tmp_path, ROUNDS, out=".", resume=True)
    newest, broken = CheckpointFolder(tmp_path / "killed", durable=False).newest()
    assert newest is not None
    assert newest.state.round == 4
    assert not broken


def rewritten(
    run: Path, server_round: int, change: Callable[[dict[str, Any], FederationState], FederationState]
) -> None:
    """Write a checkpoint again as somebody would who knows its format, its hash included."""
    state, about = (run / "checkpoints" / f"round-{server_round:06d}.{kind}" for kind in ("safetensors", "json"))
    whole = json.loads(about.read_text())
    content = serialize_state(change(whole["facts"], deserialize_state(state.read_bytes())))
    whole["blake3"] = checkpoints._hash_checkpoint([content], whole["facts"])
    state.write_bytes(content)
    about.write_text(json.dumps(whole))


def with_facts(run: Path, server_round: int, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what a checkpoint says beside its state."""

    def changed(facts: dict[str, Any], state: FederationState) -> FederationState:
        change(facts)
        return state

    rewritten(run, server_round, changed)


def shifted(model: ModelState) -> ModelState:
    return replace(model, trunk=model.trunk + np.float32(1e-4))


CHANGED: dict[str, Callable[[FederationState], FederationState]] = {
    "model": lambda state: replace(state, model=shifted(state.model)),
    "best": lambda state: replace(state, best=shifted(state.best or state.model)),
    "the best is said to be the model": lambda state: replace(
        state, model=shifted(state.model), best=state.model, best_round=state.round
    ),
    "the best is of a round to come": lambda state: replace(state, best=shifted(state.model), best_round=9),
    "shorter": lambda state: replace(state, model=replace(state.model, trunk=state.model.trunk[:-3])),
}


@pytest.mark.parametrize("which", CHANGED)
def test_a_model_that_was_changed_in_the_run_folder_is_not_gone_on_with(which: str, tmp_path: Path) -> None:
    killed(tmp_path, strategies.engine.coordinator.Coordinator, "configure_train", 4, ROUNDS)
    run = tmp_path / "killed"
    rewritten(run, 3, lambda facts, state: CHANGED[which](state))
    before = (run / "audit.jsonl").read_bytes()
    with pytest.raises(RunStopped, match=r"is not the one that audit\.jsonl has noted: one of them was changed"):
        federation(tmp_path, ROUNDS, out="killed", resume=True)
    assert (run / "audit.jsonl").read_bytes() == before


ODD: dict[str, Callable[[dict[str, Any]], object]] = {
    "no run": lambda facts: facts.pop("run"),
    "books are a number": lambda facts: facts.update(books=3),
    "an experiment without a model": lambda facts: facts["experiment"].pop("model"),
    "an experiment that is a list": lambda facts: facts.update(experiment=[]),
    "another round": lambda facts: facts.update(round=2),
}


@pytest.mark.parametrize("name", ODD)
def test_a_checkpoint_with_odd_facts_and_the_right_hash_is_passed_over(name: str, tmp_path: Path) -> None:
    killed(tmp_path, strategies.engine.coordinator.Coordinator, "configure_train", 4, ROUNDS)
    with_facts(tmp_path / "killed", 3, ODD[name])
    federation(tmp_path, ROUNDS, out="killed", resume=True)
    (said,) = events(tmp_path / "killed", "checkpoint_broken")
    assert said["file"] == "round-000003.json"


DEEP: dict[str, Callable[[dict[str, Any]], object]] = {
    "books without a key": lambda facts: facts["books"].pop("train_seconds"),
    "a tally of no round": lambda facts: facts["books"].update(tallies={"x": []}),
    "a loss that is a number": lambda facts: facts["last_validation"].update(loss=5),
}


@pytest.mark.parametrize("name", DEEP)
def test_a_checkpoint_that_is_odd_within_stops_with_the_reason(name: str, tmp_path: Path) -> None:
    killed(tmp_path, strategies.engine.coordinator.Coordinator, "configure_train", 4, ROUNDS)
    with_facts(tmp_path / "killed", 3, DEEP[name])
    with pytest.raises(RunStopped, match="the checkpoint of round 3 is not what a run writes"):
        federation(tmp_path, ROUNDS, out="killed", resume=True)


def test_later_checkpoints_that_cannot_be_read_do_not_take_the_places_of_new_ones(tmp_path: Path) -> None:
    killed(tmp_path, strategies.engine.coordinator.Coordinator, "configure_train", 4, ROUNDS)
    folder = tmp_path / "killed" / "checkpoints"
    for number in (98, 99):
        (folder / f"round-{number:06d}.json").write_text("{")
    federation(tmp_path, ROUNDS, out="killed", resume=True)
    assert sorted(path.name for path in folder.glob("*.safetensors")) == [
        "round-000003.safetensors",
        "round-000004.safetensors",
    ]


def test_a_pipe_in_the_place_of_a_checkpoint_is_not_waited_for(tmp_path: Path) -> None:
    killed(tmp_path, strategies.engine.coordinator.Coordinator, "configure_train", 4, ROUNDS)
    os.mkfifo(tmp_path / "killed" / "checkpoints" / "round-000099.json")
    federation(tmp_path, ROUNDS, out="killed", resume=True)
    (said,) = events(tmp_path / "killed", "checkpoint_broken")
    assert said["reason"] == "round-000099.json is no file"


@pytest.mark.parametrize("line", ['{"n": 1, "before": "", "event": "aggregated", "round": []}', "[" * 100_000])
def test_odd_lines_of_the_audit_stop_no_run_that_goes_on(line: str, tmp_path: Path) -> None:
    killed(tmp_path, strategies.engine.coordinator.Coordinator, "configure_train", 4, ROUNDS)
    audit = tmp_path / "killed" / "audit.jsonl"
    first, *others = audit.read_text().splitlines()
    audit.write_text("\n".join([first, line, *others]) + "\n")
    assert federation(tmp_path, ROUNDS, out="killed", resume=True)["model_sha256"]


def test_a_checkpoint_under_the_name_of_another_round_is_passed_over(tmp_path: Path) -> None:
    killed(tmp_path, strategies.engine.coordinator.Coordinator, "configure_train", 4, ROUNDS)
    folder = tmp_path / "killed" / "checkpoints"
    for kind in ("safetensors", "json"):
        (folder / f"round-000009.{kind}").write_bytes((folder / f"round-000003.{kind}").read_bytes())
    federation(tmp_path, ROUNDS, out="killed", resume=True)
    (said,) = events(tmp_path / "killed", "checkpoint_broken")
    assert said["file"] == "round-000009.json"


def test_nothing_in_the_folder_of_a_run_at_work_changes(tmp_path: Path) -> None:
    killed(tmp_path, strategies.engine.coordinator.Coordinator, "configure_train", 4, ROUNDS)
    run = tmp_path / "killed"
    with (run / "events.jsonl").open("a") as file:
        file.write('{"event": "being writt')
    (run / f".x.{os.getpid()}-1.part").write_bytes(b"half")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with RunFolder(run).held(), pytest.raises(BadInput, match="another run is at work"):
        federation(tmp_path, ROUNDS, out="killed", resume=True)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_what_killed_processes_left_half_written_is_removed_on_resume(tmp_path: Path) -> None:
    killed(tmp_path, strategies.engine.coordinator.Coordinator, "configure_train", 4, ROUNDS)
    run, gone = tmp_path / "killed", subprocess.run(["sh", "-c", "echo $$"], capture_output=True, check=True).stdout
    left = [run / place / f".x.{int(gone)}-1.part" for place in (".", "checkpoints", "sites/north", "updates")]
    for path in left:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"half")
    (run / f".folder.{int(gone)}-1.part").mkdir()  # nobody's; it stays
    federation(tmp_path, ROUNDS, out="killed", resume=True)
    assert not any(path.exists() for path in left)


def test_a_run_does_not_go_on_from_another_weights_file_than_it_began_with(tmp_path: Path) -> None:
    """Hospitals were told its hash, which the experiment need not name."""
    weights = f"model.weights={tmp_path / 'trunk.safetensors'}"
    shutil.copy(finished()[0] / "model.safetensors", tmp_path / "trunk.safetensors")
    began = federation(tmp_path, weights, "run.rounds=1")
    sha256 = hashlib.sha256((tmp_path / "trunk.safetensors").read_bytes()).hexdigest()
    assert began["experiment"]["model"]["weights_sha256"] == sha256
    (tmp_path / "run" / "summary.json").unlink()
    shutil.copy(finished("run.rounds=1")[0] / "model.safetensors", tmp_path / "trunk.safetensors")
    with pytest.raises(BadInput, match=r"model\.weights_sha256"):
        federation(tmp_path, weights, "run.rounds=2", resume=True)
