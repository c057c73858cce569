"""Facts about the figures that TensorBoard and MLflow are told."""

import io
import json
import os
import posixpath
import re
import signal
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from polyclinic.common.metrics.auroc import ClassGroupAuroc, ClassMetrics, FinalTestSummary
from polyclinic.common.metrics.multi_class import MultiClassMetrics, RoundAccuracy
from polyclinic.server.runs.schema import CoordinatorTraining, RoundFileLine, SiteLosses
from polyclinic.server.runs.tracking import (
    MLflowTracker,
    TensorBoardTracker,
    TrackingService,
    extract_final_test_scalars,
    extract_round_scalars,
    open_mlflow_store,
)
from polyclinic.server.simulation.simulate import simulate
from tests.federations import DIGITS, experiment, federation
from tests.missing_packages import hide_packages
from tests.network.real import WITHIN_S, eventually, flwr_server, flwr_sim, lines_of, ready_to_lead, warm


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return what TensorBoard shows of a folder: tag -> (step, value) each."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tracked")
    federation(folder)
    return folder / "run"


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    (tmp_path / "e.toml").write_text(DIGITS, encoding="utf-8")
    return tmp_path / "e.toml"


def test_tensorboard_shows_every_round_as_rounds_jsonl_has_it(run: Path) -> None:
    shown, lines = curves(run / "tensorboard"), lines_of(run / "rounds.jsonl")
    assert [line["round"] for line in lines] == [1, 2]
    keys = {"loss/train": "train_loss", "loss/validation": "validation_loss", "auroc/validation": "validation_auroc"}
    for tag, key in {**keys, "bytes/up": "bytes_up", "seconds/round": "seconds"}.items():
        assert shown[tag] == [(line["round"], pytest.approx(line[key])) for line in lines]
    for site in ("site-1", "site-2", "site-3"):
        for part in ("train", "validation"):
            losses = [(line["round"], pytest.approx(line["site_losses"][site][f"{part}_loss"])) for line in lines]
            assert shown[f"site {part} loss/{site}"] == losses


def test_tensorboard_shows_the_final_test_of_every_class(run: Path) -> None:
    shown, test = curves(run / "tensorboard"), json.loads((run / "summary.json").read_text())["test"]
    assert shown["test/mean auroc"] == [(2, pytest.approx(test["mean_auroc"]))]
    assert {tag.removeprefix("test auroc/") for tag in shown if tag.startswith("test auroc/")} == set("0123456789")
    assert shown["test auroc/7"] == [(2, pytest.approx(test["per_class"]["7"]["auroc"]))]
    assert shown["test average precision/7"] == [(2, pytest.approx(test["per_class"]["7"]["average_precision"]))]


def test_figures_are_on_the_disk_before_anything_is_closed(tmp_path: Path) -> None:
    files = TensorBoardTracker(tmp_path / "tensorboard")
    files.store_scalars({"loss/train": 0.75, "test auroc/Ödem | <b>+": 0.25}, 4)
    assert curves(tmp_path / "tensorboard") == {"loss/train": [(4, 0.75)], "test auroc/Ödem | <b>+": [(4, 0.25)]}
    files.close("stopped")
    (file,) = (tmp_path / "tensorboard").iterdir()
    assert socket.gethostname() not in file.name


@pytest.mark.long
def test_a_killed_run_has_the_rounds_that_it_had(digits: Path, tmp_path: Path) -> None:
    """The short form: figures are on the disk before anything is closed."""
    command = ("run", digits.name, "--out", "run", "--set", "run.rounds=999")
    rounds = tmp_path / "run" / "rounds.jsonl"
    killed = warm().fork("polyclinic.studies.cli", command, os.environ, tmp_path, tmp_path / "log")
    eventually(lambda: rounds.is_file() and rounds.read_bytes().count(b"\n") >= 3, "three rounds are over")
    killed.kill()
    assert killed.wait(WITHIN_S) == -signal.SIGKILL
    written = [line["round"] for line in lines_of(rounds)]
    steps = [step for step, _ in curves(tmp_path / "run" / "tensorboard")["loss/train"]]
    assert steps in (written, written[:-1])  # killed between the two, at the worst


def test_what_a_round_or_a_class_does_not_have_is_left_out() -> None:
    line = RoundFileLine(
        round=1,
        train_loss=0.5,
        sites=("b",),
        absent={"a": "late", "c": "late"},
        bytes_up=3,
        bytes_down=5,
        seconds=2.0,
        site_losses={"b": SiteLosses(train_loss=0.25)},
        site_seconds={"b": 1.5},
    )
    assert extract_round_scalars(line) == {
        "loss/train": 0.5,
        "sites/took part": 1,
        "sites/absent": 2,
        "bytes/up": 3,
        "bytes/down": 5,
        "seconds/round": 2.0,
        "site train loss/b": 0.25,
        "site seconds/b": 1.5,
    }
    undefined = ClassMetrics(None, None, None, None, None)
    test = FinalTestSummary(
        mean_auroc=None,
        sd_auroc=None,
        mean_average_precision=None,
        mean_balanced_accuracy=None,
        per_class={"rare": undefined, "edema": replace(undefined, auroc=0.75)},
        shared_classes=ClassGroupAuroc(None, None, ()),
        unique_classes=ClassGroupAuroc(None, None, ()),
        multi_class=MultiClassMetrics(accuracy=0.5, sensitivity=0.375, specificity=None, f1=0.25, images=4),
    )
    assert extract_final_test_scalars(test) == {
        "test/accuracy": 0.5,
        "test/sensitivity": 0.375,
        "test/f1": 0.25,
        "test auroc/edema": 0.75,
    }


def test_the_coordinators_own_training_and_accuracies_are_figures_too() -> None:
    coordinator = CoordinatorTraining(train_loss=0.5, epochs=3, seconds=9.0)
    line = RoundFileLine(round=1, coordinator=coordinator, test_accuracy=RoundAccuracy(0.625, 0.75))
    assert extract_round_scalars(line) == {
        "sites/took part": 0,
        "sites/absent": 0,
        "loss/train, coordinator": 0.5,
        "seconds/coordinator": 9.0,
        "test accuracy/mean over sites": 0.625,
        "test accuracy/over all images": 0.75,
    }


@pytest.fixture
def without_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which ``import mlflow`` finds nothing."""
    hide_packages(monkeypatch, "mlflow")


@pytest.mark.usefixtures("without_mlflow")
@pytest.mark.parametrize(
    ("command", "store", "fault"),
    [
        ("run", "mlflow", "pip install 'polyclinic[mlflow]'"),
        ("compare", "mlflow", "pip install 'polyclinic[mlflow]'"),
        ("run", "wandb", "mlflow"),
    ],
)
def test_a_store_that_is_not_installed_or_unknown_is_refused_before_anything_starts(
    command: str, store: str, fault: str, digits: Path, tmp_path: Path
) -> None:
    ended = flwr_sim(command, digits, "--out", tmp_path / "out", "--track", store)
    assert ended.code == 2
    assert fault in ended.err
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("without_mlflow")
def test_a_coordinator_without_mlflow_asks_no_hospital(digits: Path, tmp_path: Path) -> None:
    with ready_to_lead(tmp_path) as folder:
        ended = flwr_server("run", folder, digits, "--out", tmp_path / "out", "--track", "mlflow", "--once")
    assert ended.code == 2
    assert "mlflow is not installed here." in ended.err
    assert not (tmp_path / "out").exists()


# MLflow is an extra: where it is not installed, the tests below are skipped.
@pytest.fixture
def mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A store of this test's own."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    return pytest.importorskip("mlflow", reason="MLflow is an extra")


def stored_runs(mlflow: Any) -> list[Any]:
    """Return all runs in the store."""
    client = mlflow.MlflowClient()
    return list(client.search_runs([client.get_experiment_by_name("polyclinic").experiment_id]))


def mlflow_name(tag: str) -> str:
    return tag.replace(",", "_")


@pytest.mark.filterwarnings("ignore")  # theirs
def test_mlflow_has_the_figures_of_the_event_files_and_the_settings(mlflow: Any, tmp_path: Path) -> None:
    file = experiment(tmp_path, 'run.name="trial <1>"')
    simulate(file, tmp_path / "run", Console(quiet=True), TrackingService.mlflow)
    (run,) = stored_runs(mlflow)
    shown = curves(tmp_path / "run" / "tensorboard")
    assert (run.info.run_name, run.info.status) == ("trial <1> seed 3", "FINISHED")
    assert run.data.params["training.lr"] == "0.003"
    assert {mlflow_name(tag) for tag in shown} == run.data.metrics.keys()
    for tag, points in shown.items():
        history = mlflow.MlflowClient().get_metric_history(run.info.run_id, mlflow_name(tag))
        assert [(each.step, pytest.approx(each.value)) for each in history] == points


@pytest.mark.filterwarnings("ignore")
def test_a_store_that_goes_away_does_not_stop_the_run(
    mlflow: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object, **__: object) -> None:
        raise mlflow.MlflowException("the server is gone\nand more")

    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", gone)
    heard = Console(record=True, file=io.StringIO(), width=200)
    simulate(experiment(tmp_path), tmp_path / "run", heard, TrackingService.mlflow)
    events = lines_of(tmp_path / "run" / "events.jsonl")
    assert [e["reason"] for e in events if e["event"] == "tracking_stopped"] == ["the server is gone"]
    assert "this run, which goes on: the server is gone" in heard.export_text()
    assert (tmp_path / "run" / "report.html").is_file()


@settings(max_examples=settings().max_examples // 2)
@given(st.lists(st.text("./a=\u00e9 ,", min_size=1, max_size=6) | st.just("c" * 200), min_size=1, max_size=4))
def test_no_class_name_makes_a_name_that_mlflow_refuses(class_names: list[str]) -> None:
    run = MLflowTracker(None, "", pytest.fail)
    tags = {f"test {'m' * 60}/{name}" for name in class_names}
    names = {run.make_mlflow_name(tag) for tag in tags}
    assert len(names) == len(tags)
    for name in names:  # MLflow's own rule: a path that means no other one, at most 250 characters
        assert posixpath.normpath(name) == name
        assert re.fullmatch(r"[/\w.\- :]{1,250}", name)


@pytest.mark.filterwarnings("ignore")
def test_two_names_that_mlflow_cannot_tell_apart_stay_two(mlflow: Any, tmp_path: Path) -> None:
    new_run = open_mlflow_store(TrackingService.mlflow)
    assert new_run is not None
    run = new_run(experiment(tmp_path).experiment, pytest.fail)
    run.store_scalars({"test auroc/a+": 0.25, "test auroc/a|": 0.75}, 1)
    run.store_scalars({"test auroc/a|": 0.5}, 2)
    run.close("interrupted")
    (stored,) = stored_runs(mlflow)
    assert stored.info.status == "KILLED"
    assert stored.data.metrics == {"test auroc/a_": 0.25, "test auroc/a_ 2": 0.5}


@pytest.mark.filterwarnings("ignore")
def test_a_store_that_does_not_answer_is_a_fault_at_once(
    mlflow: Any, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/no/such/folder/mlflow.db")
    (tmp_path / "no").write_text("a file", encoding="utf-8")
    ended = flwr_sim("run", digits, "--out", tmp_path / "out", "--track", "mlflow")
    assert ended.code == 2
    assert "cannot be used" in ended.err
    assert not (tmp_path / "out").exists()
