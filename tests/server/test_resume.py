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
from numpy.typing import NDArray

from polyclinic.common.errors import BadInput, Fault
from polyclinic.common.models.state import ModelState
from polyclinic.common.plugins import PluginIdentity
from polyclinic.data.base.image_set import DatasetSplits, ImageSet
from polyclinic.data.load import load_dataset, load_external_test_images
from polyclinic.server.federation import checkpoints
from polyclinic.server.federation.checkpoints import CheckpointFolder
from polyclinic.server.federation.set_up import open_run_folder
from polyclinic.server.runs.folder import RunFolder
from polyclinic.server.runs.verify import verify_run
from polyclinic.server.simulation.backends.inline import InlineGrid
from polyclinic.strategies.engine import coordinator
from polyclinic.strategies.engine.coordinator import Coordinator
from polyclinic.strategies.engine.events import RunStopped
from polyclinic.strategies.engine.state import FederationState, deserialize_federation_state, serialize_federation_state
from polyclinic.strategies.registry import STRATEGIES
from tests.federations import ALL_DIGITS, OWN_IMAGES, experiment, federation, few_digits, finished, needs_of
from tests.network.real import lines_of, warm
from tests.server.killing import Killed, kill_at

ROUNDS = "run.rounds=4"
WRAPPED = (
    ("surgical", "training.reset_optimizer=false", 'training.optimizer="sgd"', "training.momentum=0.9"),
    ("surgical", "method.trunk=fedbn"),
    ("partial_loss", "method.compress_update=int8", "method.compress_model=float16"),
    ("vanilla", "method.compress_model=int8", "participation.sites_per_round=2"),
    ("partial_loss", 'method.server_optimizer={kind="adam"}'),
    ("vanilla", "participation.sites_per_round=2"),
    ("vanilla", "evaluation.test_each_round=true", "model.task=multi_class"),
)
KINDS = {
    "test_every_method_ends_in_the_same_model": "kill in simulation, every method",
    "test_killed_at_any_point_it_ends_in_the_same_model": "kill in simulation at a named point",
    "test_a_process_that_gets_sigkill_again_and_again_ends_in_the_same_model": "SIGKILL of a simulation",
    "test_a_broken_newest_checkpoint_is_passed_over": "broken checkpoint",
}


@pytest.fixture(autouse=True)
def counted(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> None:
    """Have the table of what was survived count them."""
    if kind := KINDS.get(request.node.originalname):
        record_property("survived", kind)
        record_property("same model", kind)


def killed(
    folder: Path, owner: Any, name: str, call: int, *overrides: str, after: bool = False, resume: bool = False
) -> Path:
    """Run a federation whose process dies there; return its run folder."""
    with pytest.MonkeyPatch.context() as patched:
        kill_at(patched, owner, name, call, after=after)
        with pytest.raises(Killed):
            federation(folder, *overrides, out="killed", resume=resume)
    return folder / "killed"


def resumed(run: Path, *overrides: str) -> dict[str, Any]:
    return federation(run.parent, ROUNDS, *overrides, out=run.name, resume=True)


def timeless(run: Path) -> list[dict[str, Any]]:
    """Return ``rounds.jsonl`` without its times, and without bytes, for times travel as text."""
    lines = lines_of(run / "rounds.jsonl")
    for line in lines:
        for name in ("seconds", "site_seconds", "bytes_up"):
            line.pop(name)
        if line["coordinator"]:
            line["coordinator"].pop("seconds")
    return lines


def events(run: Path, name: str) -> list[dict[str, Any]]:
    return [event for event in lines_of(run / "events.jsonl") if event["event"] == name]


def check_same_end(run: Path, whole: Path, *overrides: str) -> None:
    """Resume a run; it ends as the one that nothing disturbed."""
    summary, expected = resumed(run, *overrides), json.loads((whole / "summary.json").read_text())
    assert summary["model_sha256"] == expected["model_sha256"]
    assert timeless(run) == timeless(whole)
    summary = json.loads((run / "summary.json").read_text())
    for site in (*summary["sites"].values(), *expected["sites"].values()):
        for name in ("seconds", "bytes_up", "bytes_down"):
            site.pop(name, None)
    for key in ("sites", "test", "best_round", "client_accuracy", "learned", "rounds"):
        assert summary[key] == expected[key], key


SHORT = {"fedmlp", "unifed", "individual", "partial_loss method.compress_update=int8 method.compress_model=float16"}
"""What ``make test`` tries; ``make torture`` tries all."""
EVERY = [*((name,) for name in sorted(STRATEGIES)), *WRAPPED]


@pytest.mark.parametrize(
    "choices",
    [
        pytest.param(choices, marks=() if " ".join(choices) in SHORT else pytest.mark.torture, id=" ".join(choices))
        for choices in EVERY
    ],
)
def test_every_method_ends_in_the_same_model(choices: tuple[str, ...], tmp_path: Path) -> None:
    data = [ALL_DIGITS] if choices[0] == "fedmlp" else []  # it would tag none of few digits
    overrides = (f"run.method={choices[0]}", *data, *needs_of(choices[0]), *choices[1:], "run.rounds=3")
    whole = federation(tmp_path, ROUNDS, *overrides, out="whole")
    calls = 3 + 2 * len(whole["sites"])
    # With server_only no site is asked in a round.
    point = (
        (CheckpointFolder, "save_checkpoint", 3)
        if choices[0] == "server_only"
        else (InlineGrid, "answer_message", calls)
    )
    check_same_end(killed(tmp_path, *point, ROUNDS, *overrides), tmp_path / "whole", *overrides)


POINTS = {
    "before the first checkpoint": (checkpoints, "write_atomically", 1, False),
    "between a checkpoint's two files": (checkpoints, "write_atomically", 5, True),
    "before an old checkpoint is removed": (checkpoints, "write_atomically", 6, True),
    "before a round's line": (RunFolder, "append_round_line", 2, False),
    "after a round's line": (RunFolder, "append_round_line", 2, True),
    "before messages are made": (Coordinator, "configure_train", 3, False),
    "in aggregation": (coordinator, "update_global_model", 3, False),
    "after aggregation": (coordinator, "update_global_model", 3, True),
    "in the last validation": (Coordinator, "aggregate_evaluate", 1, False),
    "in the test": (Coordinator, "test_result_model", 1, False),
    "before the summary": (RunFolder, "write_summary", 1, False),
}


@pytest.fixture
def whole() -> Path:
    """The folder of a run that nothing disturbed."""
    return finished(ROUNDS)[0]


@pytest.mark.torture
@pytest.mark.parametrize("point", POINTS)
def test_killed_at_any_point_it_ends_in_the_same_model(point: str, whole: Path, tmp_path: Path) -> None:
    owner, name, call, after = POINTS[point]
    check_same_end(killed(tmp_path, owner, name, call, ROUNDS, after=after), whole)


TURN = dict(zip(POINTS, (1, 3, 4, 1, 1, 1, 1, 1, 1, 1, 1), strict=True))
"""Point -> the call at which a run dies there that has been killed at each of the points before."""


def test_killed_at_each_point_in_turn_it_ends_in_the_same_model(whole: Path, tmp_path: Path) -> None:
    """The short form: one run that dies again wherever it may."""
    for point, (owner, name, _, after) in POINTS.items():
        resume = (tmp_path / "killed").exists()
        killed(tmp_path, owner, name, TURN[point], ROUNDS, after=after, resume=resume)
    check_same_end(tmp_path / "killed", whole)
    assert len(events(tmp_path / "killed", "resumed")) >= 8


def test_a_process_that_gets_sigkill_again_and_again_ends_in_the_same_model(whole: Path, tmp_path: Path) -> None:
    file, out = experiment(tmp_path, ROUNDS).path, tmp_path / "killed"
    command = ["run", str(file), "--out", str(out), "--set", ROUNDS, "--set", f"data={few_digits()}"]
    for kills in range(4):
        again = ["--resume"] * bool(kills)
        process = warm().fork("polyclinic.studies.cli", [*command, *again], os.environ, tmp_path, tmp_path / "log")
        if kills < 3:
            checkpoint, until = out / "checkpoints" / f"round-{kills + 1:06d}.json", time.monotonic() + 120
            while not checkpoint.exists():
                assert process.poll() is None, (tmp_path / "log").read_text()
                assert time.monotonic() < until
                time.sleep(0.002)
            os.kill(process.pid, signal.SIGKILL)
        process.wait(120)
    summaries = [json.loads((run / "summary.json").read_text()) for run in (out, whole)]
    assert summaries[0]["model_sha256"] == summaries[1]["model_sha256"]
    assert len(events(out, "resumed")) == 3


@pytest.fixture(scope="module")
def broken_off(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was killed before its fourth and last round."""
    return killed(tmp_path_factory.mktemp("broken-off"), Coordinator, "configure_train", 4, ROUNDS)


@pytest.fixture
def run(broken_off: Path, tmp_path: Path) -> Path:
    """A copy of it, to be changed."""
    return Path(shutil.copytree(broken_off, tmp_path / "killed"))


STATE, FACTS = "checkpoints/round-000003.safetensors", "checkpoints/round-000003.json"


def edit(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def with_facts(run: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what the newest checkpoint says beside its state, as somebody would who knows its format."""
    about = json.loads((run / FACTS).read_text())
    change(about["facts"])
    about["blake3"] = checkpoints._hash_checkpoint([(run / STATE).read_bytes()], about["facts"])
    (run / FACTS).write_text(json.dumps(about))


def with_state(run: Path, change: Callable[[FederationState], FederationState]) -> None:
    """Change the state of the newest checkpoint, its hash included."""
    edit(run / STATE, lambda data: serialize_federation_state(change(deserialize_federation_state(data))))
    with_facts(run, lambda facts: None)


def with_shifted_model(data: bytes) -> bytes:
    state = deserialize_federation_state(data)
    return serialize_federation_state(replace(state, model=shifted(state.model)))


HARMS: dict[str, Callable[[Path], object]] = {
    "state cut off": lambda run: edit(run / STATE, lambda data: data[:-7]),
    "state changed": lambda run: edit(run / STATE, lambda data: data[:-100] + bytes([data[-100] ^ 1]) + data[-99:]),
    "state of another model": lambda run: edit(run / STATE, with_shifted_model),
    "no state": lambda run: (run / STATE).unlink(),
    "json cut off": lambda run: edit(run / FACTS, lambda data: data[:50]),
    "json without a key": lambda run: (run / FACTS).write_text("{}"),
    "right hash, no run": lambda run: with_facts(run, lambda facts: facts.pop("run")),
    "right hash, books are a number": lambda run: with_facts(run, lambda facts: facts.update(books=3)),
    "right hash, no model": lambda run: with_facts(run, lambda facts: facts["experiment"].pop("model")),
    "right hash, experiment is a list": lambda run: with_facts(run, lambda facts: facts.update(experiment=[])),
    "right hash, another round": lambda run: with_facts(run, lambda facts: facts.update(round=2)),
}


@pytest.mark.parametrize(
    "harm", [pytest.param(harm, marks=() if harm == "state changed" else pytest.mark.torture) for harm in HARMS]
)
def test_a_broken_newest_checkpoint_is_passed_over(harm: str, run: Path, whole: Path) -> None:
    """The one before it serves: here by a method whose sites keep no memory of the round in between."""
    HARMS[harm](run)
    check_same_end(run, whole)
    (broken,) = events(run, "checkpoint_broken")
    assert (broken["file"], bool(broken["reason"])) == ("round-000003.json", True)
    assert [event["round"] for event in events(run, "resumed")] == [2]


@pytest.mark.parametrize("harm", HARMS)
def test_of_the_checkpoints_the_newest_that_is_whole_is_read(harm: str, run: Path) -> None:
    """The short form of each harm: nothing is trained."""
    HARMS[harm](run)
    newest, broken = CheckpointFolder(run, durable=False).read_newest_undamaged_checkpoint()
    assert newest is not None
    assert (newest.state.round, list(broken)) == (2, ["round-000003.json"])


def test_files_under_the_names_of_later_rounds_are_passed_over_and_take_no_places(run: Path, whole: Path) -> None:
    folder = run / "checkpoints"
    for kind in ("safetensors", "json"):
        shutil.copy(folder / f"round-000003.{kind}", folder / f"round-000009.{kind}")
    (folder / "round-000098.json").write_text("{")
    os.mkfifo(folder / "round-000099.json")  # nobody waits for its other end
    check_same_end(run, whole)
    broken = {event["file"]: event["reason"] for event in events(run, "checkpoint_broken")}
    assert list(broken) == ["round-000099.json", "round-000098.json", "round-000009.json"]
    assert [event["round"] for event in events(run, "resumed")] == [3]
    assert {"round-000003.safetensors", "round-000004.safetensors"} <= {path.name for path in folder.iterdir()}


DEEP: dict[str, Callable[[dict[str, Any]], object]] = {
    "books without a key": lambda facts: facts["books"].pop("train_seconds"),
    "a tally of no round": lambda facts: facts["books"].update(tallies={"x": []}),
    "a loss that is a number": lambda facts: facts["last_validation"].update(loss=5),
}


@pytest.mark.parametrize("name", DEEP)
def test_a_checkpoint_that_is_odd_within_stops_with_its_round(name: str, run: Path) -> None:
    with_facts(run, DEEP[name])
    with pytest.raises(RunStopped, match="the checkpoint of round 3"):
        resumed(run)


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
def test_a_model_that_was_changed_in_the_run_folder_is_not_gone_on_with(which: str, run: Path) -> None:
    with_state(run, CHANGED[which])
    before = (run / "audit.jsonl").read_bytes()
    with pytest.raises(RunStopped, match=r"audit\.jsonl"):
        resumed(run)
    assert (run / "audit.jsonl").read_bytes() == before


def test_two_checkpoints_stay_and_a_run_that_is_done_is_not_run_again(whole: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(whole, tmp_path / "done"))
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == [f"round-00000{n}.{kind}" for n in (3, 4) for kind in ("json", "safetensors")]
    before = (run / "events.jsonl").read_bytes()
    assert resumed(run) == json.loads((whole / "summary.json").read_text())
    with pytest.raises(BadInput, match="is done"):
        resumed(run, "run.rounds=3")
    assert (run / "events.jsonl").read_bytes() == before


def test_a_run_may_go_on_for_more_rounds_than_it_began_with(whole: Path, tmp_path: Path) -> None:
    summary = resumed(killed(tmp_path, RunFolder, "write_summary", 1, "run.rounds=2"))
    assert summary["model_sha256"] == finished(ROUNDS)[1]["model_sha256"]


def test_a_run_that_is_done_goes_on_to_the_model_of_one_longer_run(whole: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(finished("run.rounds=2")[0], tmp_path / "extended"))
    for name in ("report.html", "MODEL_CARD.md"):
        (run / name).write_text("of two rounds")
    check_same_end(run, whole)
    assert not (run / "report.html").exists()  # the pages of two rounds; these tests draw no new ones
    assert [event["round"] for event in events(run, "resumed")] == [2]
    summary = json.loads((run / "summary.json").read_text())
    for way in ("bytes_down", "bytes_up"):  # roll call and test come beside the rounds, those before it went on too
        of_rounds = sum(line[way] for line in lines_of(run / "rounds.jsonl"))
        assert sum(site[way] for site in summary["sites"].values()) > of_rounds


RESULTS = ("summary.json", "report.html", "MODEL_CARD.md", "rounds.jsonl", "model.safetensors", "receipt.json")


def results_of(run: Path) -> dict[str, bytes]:
    return {name: (run / name).read_bytes() for name in RESULTS}


POINTS_OF_A_CONTINUATION = (
    (Coordinator, "configure_train", False),
    (coordinator, "update_global_model", True),
    (CheckpointFolder, "save_checkpoint", False),
    (RunFolder, "replace_finished_results", False),  # here round 3 counts already
)


def test_killed_before_a_further_round_counts_a_run_that_is_done_keeps_its_results(whole: Path, tmp_path: Path) -> None:
    federation(tmp_path, "run.rounds=2", out="killed", pages=True)
    before = results_of(tmp_path / "killed")
    for owner, name, after in POINTS_OF_A_CONTINUATION:
        killed(tmp_path, owner, name, 1, ROUNDS, after=after, resume=True)
        assert results_of(tmp_path / "killed") == before, name
        assert federation(tmp_path, "run.rounds=2", out="killed", resume=True) == json.loads(before["summary.json"])
    check_same_end(tmp_path / "killed", whole)


def test_a_continuation_that_stops_before_its_first_round_keeps_the_results(tmp_path: Path) -> None:
    settings = ("run.rounds=1", "training.reset_optimizer=false")
    federation(tmp_path, *settings, out="done", pages=True)
    before = results_of(tmp_path / "done")
    (state,) = (tmp_path / "done" / "sites" / "site-2" / "memory").glob("*/round-000001.safetensors")
    state.unlink()
    with pytest.raises(RunStopped, match="after round 1 is missing"):
        federation(tmp_path, *settings, "run.rounds=2", out="done", resume=True)
    assert results_of(tmp_path / "done") == before
    assert verify_run(tmp_path / "done").faults == []


def test_a_run_that_is_refused_again_and_again_for_one_reason_may_be_tried_again(tmp_path: Path) -> None:
    out = tmp_path / "run"
    for attempt in range(1, 4):
        with (
            pytest.raises(BadInput, match="east: has other pixels"),
            open_run_folder(out, experiment(tmp_path).experiment, resume=False, durable=False),
        ):
            raise BadInput([Fault("east", "has other pixels.")])
        assert len(events(out, "refused")) == attempt
    assert "model_sha256" in federation(tmp_path, "run.rounds=1")


@pytest.mark.parametrize("table", ["server_data", "external_test"])
def test_a_run_does_not_go_on_with_other_images_of_the_coordinator(
    table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = (OWN_IMAGES, OWN_IMAGES.replace("server_data", "external_test"))
    federation(tmp_path, "run.rounds=1", *settings)
    before = (tmp_path / "run" / "summary.json").read_bytes()

    def invert(read: Callable[..., Any]) -> Callable[..., Any]:
        def changed(spec: Any, *arguments: Any) -> Any:
            data = read(spec, *arguments)
            if isinstance(data, ImageSet):
                return replace(data, labels=1 - data.labels)
            if spec.split_seed != 5:
                return data
            return replace(data, train=replace(data.train, labels=1 - data.train.labels))

        return changed

    if table == "server_data":
        monkeypatch.setattr("polyclinic.common.simulation.load_dataset", invert(load_dataset))
    else:
        monkeypatch.setattr(
            "polyclinic.server.simulation.simulate.load_external_test_images", invert(load_external_test_images)
        )
    with pytest.raises(BadInput, match=rf"\[{table}\]: has changed since .* it has other labels now") as refusal:
        federation(tmp_path, "run.rounds=2", *settings, resume=True)
    assert len(refusal.value.faults) == 1
    assert (tmp_path / "run" / "summary.json").read_bytes() == before
    monkeypatch.undo()
    assert federation(tmp_path, "run.rounds=2", *settings, resume=True)["rounds"] == 2


def test_a_run_does_not_go_on_with_another_release_of_a_plug_in(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = PluginIdentity(group="polyclinic.losses", name="mine", package="mine", version="2", sha256="ab" * 32)
    monkeypatch.setattr("polyclinic.server.federation.recorder.list_plugin_identities", lambda experiment: (mine,))
    with pytest.raises(RunStopped, match=r'polyclinic\.losses "mine" is not the one that the run began with'):
        resumed(run)


def test_a_run_that_is_done_without_checkpoints_keeps_its_result(tmp_path: Path) -> None:
    folder, done = finished("run.rounds=1")
    run = Path(shutil.copytree(folder, tmp_path / "done"))
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(BadInput, match="no checkpoint is left"):
        resumed(run, "run.rounds=2")
    assert json.loads((run / "summary.json").read_text())["model_sha256"] == done["model_sha256"]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (("training.schedule=cosine",), "learning rates"),
        (("run.method=polyclinic", "method.mean_rounds=1", "participation.clip=off"), "last 1 rounds"),
    ],
)
def test_a_run_whose_rounds_depend_on_their_number_is_not_extended(
    settings: tuple[str, ...], reason: str, tmp_path: Path
) -> None:
    federation(tmp_path, "run.rounds=1", *settings, out="done")
    before = (tmp_path / "done" / "summary.json").read_bytes()
    with pytest.raises(BadInput, match=reason):
        federation(tmp_path, "run.rounds=2", *settings, out="done", resume=True)
    assert (tmp_path / "done" / "summary.json").read_bytes() == before


def test_a_run_ends_when_its_patience_is_over_and_not_before(tmp_path: Path) -> None:
    """A learning rate of almost 0: the first rounds move running statistics only, later ones hardly anything."""
    still = ("training.lr=1e-30", "run.rounds=9", "evaluation.patience=2")
    summary = federation(tmp_path, *still)
    assert summary["rounds"] == summary["best_round"] + 3 < 9  # a round's model is validated in the round after it
    assert [event["round"] for event in events(tmp_path / "run", "ended_early")] == [summary["rounds"]]
    passed = federation(tmp_path, *still, "run.method=fedseq", out="passed")
    assert passed["rounds"] == passed["best_round"] + 2 < 9  # each pass ends with its validation


def test_another_experiment_another_folder_or_fewer_rounds_are_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"another experiment: training.lr was [0-9.e-]+, is 0.5"):
        resumed(run, "training.lr=0.5")
    for key, value in (("sites_per_round", "1"), ("clip", '"off"'), ("largest_share", "0.5")):
        with pytest.raises(BadInput, match=f"another experiment: participation.{key} was"):
            resumed(run, f"participation.{key}={value}", "participation.min_sites=1")
    with pytest.raises(BadInput, match="has done 3 rounds"):
        resumed(run, "run.rounds=2")
    with pytest.raises(BadInput, match="but no run"):
        federation(tmp_path, ROUNDS, out=".", resume=True)
    newest, broken = CheckpointFolder(run, durable=False).read_newest_undamaged_checkpoint()
    assert newest is not None
    assert (newest.state.round, list(broken)) == (3, [])


@pytest.mark.parametrize(
    "choices",
    [
        pytest.param(("fedmlp",), marks=pytest.mark.long),
        pytest.param(("surgical", "method.trunk=fedbn"), marks=pytest.mark.long),
        WRAPPED[0],
        pytest.param(WRAPPED[2], marks=pytest.mark.long),
    ],
)
def test_a_site_whose_state_is_older_than_the_checkpoint_stops_the_run_by_name(
    choices: tuple[str, ...], tmp_path: Path
) -> None:
    overrides = (f"run.method={choices[0]}", *needs_of(choices[0]), *choices[1:])
    run = killed(tmp_path, Coordinator, "configure_train", 3, ROUNDS, *overrides)
    (state,) = (run / "sites" / "site-2" / "memory").glob("*/round-000002.safetensors")
    content = state.read_bytes()
    state.unlink()
    lost = f"site-2.*its state after round 2 is missing: memory/{state.parent.name}/round-000002.safetensors"
    for _ in range(2):
        with pytest.raises(RunStopped, match=lost):
            resumed(run, *overrides)
    state.write_bytes(content[:-1])
    with pytest.raises(RunStopped, match=r"site-2.*its state after round 2 is damaged"):
        resumed(run, *overrides)
    state.write_bytes(content)
    federation(tmp_path, ROUNDS, *overrides, out="whole")
    check_same_end(run, tmp_path / "whole", *overrides)


def with_one_dark_pixel(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Change the picture before the last one: a sample of the pictures would hardly see it."""
    changed = images.copy()
    changed[-2, 5, 5] ^= 1
    return changed


@pytest.mark.parametrize("part", ["labels", "patients", "pictures"])
def test_a_run_does_not_go_on_with_other_data(part: str, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*arguments: Any) -> DatasetSplits:
        train = load_dataset(*arguments).train
        changed = {
            "labels": lambda: replace(train, labels=1 - train.labels),
            "patients": lambda: replace(train, patients=train.patients[::-1]),
            "pictures": lambda: replace(train, stored=with_one_dark_pixel(train.images), places=None),
        }
        return replace(load_dataset(*arguments), train=changed[part]())

    monkeypatch.setattr("polyclinic.common.simulation.load_dataset", read)
    with pytest.raises(BadInput, match=f"has changed since the run began: it has other {part} now"):
        resumed(run)


@pytest.mark.parametrize("line", ['{"n": 1, "before": "", "event": "aggregated", "round": []}', "[" * 100_000])
def test_odd_lines_of_the_audit_stop_no_run_that_goes_on(line: str, run: Path) -> None:
    first, *others = (run / "audit.jsonl").read_text().splitlines()
    (run / "audit.jsonl").write_text("\n".join([first, line, *others]) + "\n")
    assert resumed(run)["model_sha256"]


def test_nothing_in_the_folder_of_a_run_at_work_changes(run: Path) -> None:
    with (run / "events.jsonl").open("a") as file:
        file.write('{"event": "being writt')
    (run / f".x.{os.getpid()}-1.part").write_bytes(b"half")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with RunFolder(run).lock_run_folder(), pytest.raises(BadInput, match="another run is at work"):
        resumed(run)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_files_that_killed_processes_left_half_written_are_removed_on_resume(run: Path) -> None:
    gone = int(subprocess.run(["sh", "-c", "echo $$"], capture_output=True, check=True).stdout)
    parts = [run / place / f".x.{gone}-1.part" for place in (".", "checkpoints", "sites/north", "updates")]
    for path in parts:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"half")
    (run / f".folder.{gone}-1.part").mkdir()  # nobody's; it stays
    resumed(run)
    assert not any(path.exists() for path in parts)


def test_a_run_does_not_go_on_from_another_weights_file_than_it_began_with(tmp_path: Path) -> None:
    """Hospitals have its hash, which the experiment need not name."""
    file = tmp_path / "trunk.safetensors"
    shutil.copy(finished()[0] / "model.safetensors", file)
    summary = federation(tmp_path, f"model.weights={file}", "run.rounds=1")
    assert summary["experiment"]["model"]["weights_sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    (tmp_path / "run" / "summary.json").unlink()
    shutil.copy(finished("run.rounds=1")[0] / "model.safetensors", file)
    with pytest.raises(BadInput, match=r"model\.weights_sha256"):
        federation(tmp_path, f"model.weights={file}", "run.rounds=2", resume=True)
