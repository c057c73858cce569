"""What a person or a program sees while ``flwr-sim`` works: on a terminal, in a log, as JSON."""

import datetime as dt
import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from common.errors import BadInput
from common.system.terminal import ProgressForm, progress_form
from studies import progress
from studies.progress import ActiveRun, GridLines, GridObjects, GridPace
from tests.federations import DIGITS

STEERING = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d$")
LONG_NAME = "surgical aggregation with a long name"


def command(folder: Path, verb: str, *arguments: str) -> list[str]:
    """``flwr-sim`` on the digits, with three rounds of a long name."""
    (folder / "a.toml").write_text(DIGITS, encoding="utf-8")
    settings = ("--set", f'run.name="{LONG_NAME}"') if verb == "run" else ()
    program = (sys.executable, "-m", "studies.cli", verb, str(folder / "a.toml"), "--out", str(folder / "out"))
    return [*program, "--set", "run.rounds=3", *settings, *arguments]


def piped(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments, capture_output=True, text=True, timeout=300, check=False, stdin=subprocess.DEVNULL)


def on_terminal(arguments: Sequence[str], columns: int) -> list[str]:
    """Every line that was ever drawn, without colours."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        arguments, stdin=theirs, stdout=theirs, stderr=theirs, env=environment | {"TERM": "xterm-256color"}
    )
    os.close(theirs)
    got = b""
    try:
        while part := os.read(ours, 65536):
            got += part
    except OSError:  # how Linux says that the other end is closed
        pass
    os.close(ours)
    assert process.wait() == 0, got.decode()
    return [line for line in re.split(r"[\r\n]+", STEERING.sub("", got.decode())) if line.strip()]


def is_moment(text: str) -> bool:
    return STAMP.match(text) is not None and abs(dt.datetime.fromisoformat(text).timestamp() - time.time()) < 600


# ------------------------------------------------------------------ one run


@pytest.mark.parametrize("columns", [80, pytest.param(120, marks=pytest.mark.long)])
def test_bar_round_and_time_left_stand_on_one_line_of_a_terminal(columns: int, tmp_path: Path) -> None:
    # It is drawn twice a second, and three rounds may take less than that.
    drawn = on_terminal(command(tmp_path, "run", "--set", "run.rounds=15"), columns)
    bars = [line for line in drawn if re.search(r"round ([2-9]|1[0-3]) of 15", line)]
    assert bars, drawn
    assert all("━━━━" in line and re.search(r"\d:\d\d:\d\d left", line) for line in bars)
    assert any("loss" in line and "AUROC" in line for line in drawn)
    assert max(len(line) for line in drawn if not line.startswith("Report")) <= columns


def test_without_a_terminal_a_run_says_each_round_at_once_with_the_time_left(tmp_path: Path) -> None:
    process = subprocess.Popen(
        command(tmp_path, "run"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL
    )
    assert process.stdout is not None
    assert process.stderr is not None
    told = []
    while line := process.stderr.readline():
        told.append((line.rstrip("\n"), (tmp_path / "out" / "summary.json").exists()))
    result = process.stdout.read()
    process.stdout.close()
    process.stderr.close()
    assert process.wait() == 0
    rounds = [(line, over) for line, over in told if "  round " in line]
    assert [re.search(r"round \d of 3", line)[0] for line, _ in rounds] == [f"round {n} of 3" for n in (1, 2, 3)]  # type: ignore[index]
    assert not any(over for _, over in rounds)  # the lines came before the run was over
    assert all(is_moment(line.split()[0]) for line, _ in told)
    assert re.search(r"3 of 3 sites, loss \d\.\d{3}, round before: validation \d\.\d{3}, AUROC \d", rounds[1][0])
    assert re.search(r"about .* left", rounds[1][0])
    assert "AUROC by class" in result
    assert "round 1 of 3" not in result


def test_as_json_every_line_of_standard_error_is_one_object_and_standard_output_is_the_result(tmp_path: Path) -> None:
    ended = piped(command(tmp_path, "run", "--progress", "json"))
    assert ended.returncode == 0, ended.stderr
    told: list[dict[str, Any]] = [json.loads(line) for line in ended.stderr.splitlines()]
    assert [one["event"] for one in told] == ["began", "round", "round", "round", "ended"]
    assert all(is_moment(one["time"]) and one["run"] == f"{LONG_NAME} seed 3" for one in told)
    written = [json.loads(line) for line in (tmp_path / "out" / "rounds.jsonl").read_text("utf-8").splitlines()]
    assert [(one["round"], one["rounds"], len(one["sites"]), one["absent"]) for one in told[1:4]] == [
        (line["round"], 3, 3, {}) for line in written
    ]
    for one, before in zip(told[2:4], written, strict=False):  # a line of the file has the model that the round made
        assert one["validation_loss"] == before["validation_loss"]
        assert one["validation_auroc"] == before["validation_auroc"]
    assert told[1]["seconds_left"] > 0
    assert told[3]["seconds_left"] == 0
    assert "AUROC by class" in ended.stdout


@pytest.mark.long
def test_none_says_nothing_but_the_result(tmp_path: Path) -> None:
    ended = piped(command(tmp_path, "run", "--progress", "none"))
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "AUROC by class" in ended.stdout


@pytest.mark.parametrize("verb", ["run", "compare", "study"])
def test_a_bar_without_a_terminal_is_refused_before_anything_is_read(verb: str, tmp_path: Path) -> None:
    ended = piped(command(tmp_path, verb, "--progress", "bar"))
    assert ended.returncode == 2
    assert "--progress bar: needs a terminal" in ended.stderr.replace("\n", " ")
    assert not (tmp_path / "out").exists()


def test_a_log_file_gets_no_bar_where_a_build_server_forces_colours(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with (tmp_path / "log").open("w") as file:
        console = Console(file=file)
        assert console.is_terminal
        assert progress_form(ProgressForm.auto, console) is ProgressForm.lines
        with pytest.raises(BadInput, match="needs a terminal"):
            progress_form(ProgressForm.bar, console)


# ------------------------------------------------------------- grids of runs


@pytest.mark.long
def test_compare_speaks_before_its_first_run_ends(tmp_path: Path) -> None:
    ended = piped(command(tmp_path, "compare", "--seeds", "2", "--jobs", "1"))
    assert ended.returncode == 0, ended.stderr
    lines = ended.stderr.splitlines()
    assert all(is_moment(line.split()[0]) for line in lines)
    said = [text for line in lines if not (text := line.split(maxsplit=1)[1]).startswith("at work: ")]
    assert said[:2] == ["2 runs to do, 1 at a time", "began  a-seed0, 3 rounds"]
    assert re.fullmatch(r"done  a-seed0  [\d.mins ]+, 1 of 2 runs, about .* left", said[2])
    assert said[3] == "began  a-seed1, 3 rounds"
    assert re.fullmatch(r"done  a-seed1  [\d.mins ]+, 2 of 2 runs", said[4])
    assert "done " not in ended.stdout


@pytest.mark.long
def test_compare_as_json(tmp_path: Path) -> None:
    ended = piped(command(tmp_path, "compare", "--seeds", "2", "--jobs", "2", "--progress", "json"))
    assert ended.returncode == 0, ended.stderr
    told: list[dict[str, Any]] = [json.loads(line) for line in ended.stderr.splitlines()]
    assert told[0] | {"time": ""} == {
        "time": "",
        "event": "runs",
        "done": 0,
        "runs": 2,
        "seconds_left": None,
        "at_a_time": 2,
    }
    assert {(one["event"], one["run"]) for one in told[1:3]} == {("run_began", "a-seed0"), ("run_began", "a-seed1")}
    assert [(one["event"], one["ok"], one["done"]) for one in told[3:] if one["event"] != "at_work"] == [
        ("run_ended", True, 1),
        ("run_ended", True, 2),
    ]
    assert "Report:" in ended.stdout


def test_the_table_of_a_grid_is_whole_at_eighty_columns_and_shows_rounds_before_a_run_ends(tmp_path: Path) -> None:
    drawn = on_terminal(command(tmp_path, "compare", "--seeds", "2", "--jobs", "2"), 80)
    first_end = next(n for n, line in enumerate(drawn) if line.startswith("done  "))
    assert any("0 of 2 runs" in line for line in drawn[:first_end])
    assert any(re.search(r"round \d of 3, round \d of 3", line) for line in drawn[:first_end])
    assert max(len(line) for line in drawn[: first_end + 1]) <= 80


class Clock:
    """Time that passes when it is told to."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


def test_those_at_work_are_named_every_thirty_seconds_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, lines, objects = Clock(), list[str](), list[Any]()
    monkeypatch.setattr(progress, "time", clock)
    at_work = [ActiveRun("a", 30.0, 3, 6, "a-seed0"), ActiveRun("b", 30.0, 0, 6, "b-seed0")]
    pace = GridPace({"a": 1, "b": 1}, {"a": 0, "b": 0}, 2, lambda: at_work)
    with GridLines(lines.append, pace) as told, GridObjects(objects.append, pace) as written:
        lines.clear()
        objects.clear()
        for _ in range(122):
            clock.now += 0.5
            told.update()
            written.update()
    assert lines == ["at work: a-seed0 round 3 of 6, b-seed0 round 0 of 6; 0 of 2 runs, about 30.0 s left"] * 2
    assert [one["event"] for one in objects] == ["at_work", "at_work"]
    assert objects[0]["at_work"][0] == {"run": "a-seed0", "round": 3, "rounds": 6, "seconds": 30.0}
