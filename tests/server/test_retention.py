"""Working files of old runs are removed, and the verification says so."""

import json
import shutil
from pathlib import Path

import pytest

from polyclinic.common.errors import BadInput
from polyclinic.server.coordinator.folder import COORDINATOR_FILE, read_coordinator_folder, write_coordinator_toml
from polyclinic.server.runs.folder import RunFolder
from polyclinic.server.runs.live_status import HISTORY_FILE, CurrentRun, add_to_run_history
from polyclinic.server.runs.retention import DAY_S, find_retention_day, remove_old_working_files
from polyclinic.server.runs.verify import verify_run
from tests.federations import finished, json_lines
from tests.network.real import flwr_server


def add_run(state: Path, folder: Path, status: str = "done") -> Path:
    """A run's folder in the history, with working files."""
    for name in ("updates", "checkpoints", "sites"):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "file").write_bytes(b"x")
    (folder / "summary.json").write_text("{}")
    (folder / "events.jsonl").touch()
    state.mkdir(exist_ok=True)
    add_to_run_history(state, CurrentRun(run_folder=str(folder), name="first", state=status, began=1.0))
    return folder


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


def ended(state: Path) -> float:
    return float(json_lines(state / HISTORY_FILE)[-1]["noted"])


def test_working_files_go_after_the_days_and_not_before(state: Path, tmp_path: Path) -> None:
    folder = add_run(state, tmp_path / "run")
    assert remove_old_working_files(state, 60, ended(state) + 60 * DAY_S - 1) == []
    (removed,) = remove_old_working_files(state, 60, ended(state) + 60 * DAY_S + 1)
    assert (removed.run_folder, removed.folders) == (folder, ("updates", "checkpoints"))
    assert sorted(path.name for path in folder.iterdir()) == ["events.jsonl", "sites", "summary.json"]
    (event,) = json_lines(folder / "events.jsonl")
    assert (event["event"], event["folders"], event["days"]) == (
        "working_files_removed",
        ["updates", "checkpoints"],
        60,
    )
    assert find_retention_day(folder, "updates") == event["time"][:10]
    assert remove_old_working_files(state, 60, ended(state) + 90 * DAY_S) == []


@pytest.mark.parametrize("status", ["stopped", "interrupted", "running"])
def test_a_run_that_is_not_done_keeps_them(state: Path, tmp_path: Path, status: str) -> None:
    folder = add_run(state, tmp_path / "run", status)
    assert remove_old_working_files(state, 1, ended(state) + 9 * DAY_S) == []
    assert (folder / "checkpoints" / "file").is_file()


def test_a_folder_in_which_a_run_is_at_work_again_keeps_them(state: Path, tmp_path: Path) -> None:
    folder = add_run(state, tmp_path / "run")
    with RunFolder(folder).lock_run_folder():
        assert remove_old_working_files(state, 1, ended(state) + 9 * DAY_S) == []
    assert (folder / "updates" / "file").is_file()


def test_the_verification_says_removed_by_retention_in_place_of_changed(state: Path, tmp_path: Path) -> None:
    original, _ = finished("run.keep_updates=true", "run.rounds=1")
    folder = Path(shutil.copytree(original, tmp_path / "run"))
    state.mkdir()
    add_to_run_history(state, CurrentRun(run_folder=str(folder), name="first", state="done", began=1.0))
    remove_old_working_files(state, 1, ended(state) + 2 * DAY_S)
    report = verify_run(folder)
    assert not report.faults
    assert any("removed by retention on 2" in line for line in report.unverified)
    events = (folder / "events.jsonl").read_text().splitlines()
    kept = [line for line in events if json.loads(line)["event"] != "working_files_removed"]
    (folder / "events.jsonl").write_text("".join(f"{line}\n" for line in kept))
    assert verify_run(folder).faults  # whoever removes them otherwise is noticed


def test_the_days_are_a_table_of_coordinator_toml_that_renewal_keeps(tmp_path: Path) -> None:
    folder = tmp_path / "trial"
    assert flwr_server("init", folder, "--name", "trial", "--host", "127.0.0.1").code == 0
    assert "retention" not in (folder / COORDINATOR_FILE).read_text()
    assert read_coordinator_folder(folder).file.retention.working_files_days is None
    with (folder / COORDINATOR_FILE).open("a") as file:
        file.write("[retention]\nworking_files_days = 60\n")
    coordinator = read_coordinator_folder(folder)
    assert write_coordinator_toml(folder, coordinator.file).file == read_coordinator_folder(folder).file
    assert read_coordinator_folder(folder).file.retention.working_files_days == 60
    (folder / COORDINATOR_FILE).write_text((folder / COORDINATOR_FILE).read_text().replace("= 60", "= 0"))
    with pytest.raises(BadInput):
        read_coordinator_folder(folder)
