"""``flwr-server runs``: what a coordinator has led, from the lines that its runs leave."""

import json
import os
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from server.cli import app
from server.coordinator.folder import read_coordinator
from server.coordinator.init import make_folder
from server.deployment.status import runs_table
from server.runs.live_status import HISTORY, PresentRun, add_to_run_history, run_history
from server.runs.reporter import RunReporter


def led(state: Path, folder: Path, name: str, error: BaseException | None = None) -> None:
    """One run of two rounds that ends by itself, or by an error after the first."""
    folder.mkdir(exist_ok=True)
    (folder / "events.jsonl").touch()
    present = PresentRun(str(folder), name)
    try:
        with RunReporter(present, state, lambda line: None, note=partial(add_to_run_history, state)) as reporter:
            reporter.began(["east", "west"], 2)
            present.round = 1
            if error:
                raise error
            present.round = 2
    except (RuntimeError, SystemExit):
        pass


def test_each_run_is_listed_once_with_its_end(tmp_path: Path) -> None:
    led(tmp_path, tmp_path / "one", "whole")
    led(tmp_path, tmp_path / "two", "too few", RuntimeError("1 of 2 sites answered"))
    led(tmp_path, tmp_path / "two", "resumed", SystemExit(130))
    whole, failed, stopped = run_history(tmp_path)
    assert [run["state"] for run in (whole, failed, stopped)] == ["done", "stopped", "interrupted"]
    assert [(run["round"], run["rounds"]) for run in (whole, failed)] == [(2, 2), (1, 2)]
    assert failed["last_error"] == "1 of 2 sites answered"
    assert whole["ended"] >= whole["began"]


def test_a_run_whose_process_was_killed_is_interrupted_and_one_at_work_is_running(tmp_path: Path) -> None:
    lines = [{**vars(PresentRun("folder", name)), "pid": pid, "began": 1.0, "noted": 1.0} for name, pid in PROCESSES]
    text = "".join(json.dumps({**line, "run_folder": line["name"]}) + "\n" for line in lines)
    (tmp_path / HISTORY).write_text(text + '{"cut off by a ki')
    assert [(run["name"], run["state"], run["ended"]) for run in run_history(tmp_path)] == [
        ("killed", "interrupted", None),
        ("at work", "running", None),
    ]


PROCESSES = (("killed", 2**22 + 1), ("at work", os.getpid()))


def test_a_folder_that_is_gone_is_said(tmp_path: Path) -> None:
    led(tmp_path, tmp_path / "kept", "kept")
    led(tmp_path, tmp_path / "archived", "archived")
    (tmp_path / "archived").rename(tmp_path / "elsewhere")
    console = Console(width=400, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(runs_table(run_history(tmp_path)))
    kept, archived = (line for line in console.export_text().splitlines() if "done" in line)
    assert "(moved or removed)" in archived
    assert "(moved or removed)" not in kept


@pytest.mark.parametrize("as_json", [False, True])
def test_the_command_lists_them(tmp_path: Path, as_json: bool) -> None:
    make_folder(tmp_path / "trial", "trial", ["127.0.0.1"], listen="127.0.0.1", port=9999)
    state = read_coordinator(tmp_path / "trial").state
    arguments = ["runs", str(tmp_path / "trial"), *(["--json"] if as_json else [])]
    before = CliRunner().invoke(app, arguments)
    assert (before.exit_code, before.stdout.strip()) == (0, "[]" if as_json else "no run yet")
    led(state, tmp_path / "one", "whole")
    after = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert after.exit_code == 0
    assert "whole" in after.stdout
    assert not as_json or json.loads(after.stdout)[0]["state"] == "done"
