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
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from polyclinic.common.errors import BadInput
from polyclinic.common.system.terminal import ProgressFormat, choose_progress_format
from polyclinic.studies import progress
from polyclinic.studies.progress import ActiveRun, TrialsProgressEvents, TrialsTimeEstimate
from tests.federations import DIGITS
from tests.network.real import flwr_sim
from tests.server.commands import Ended

STEERING = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d$")
LONG_NAME = "surgical aggregation with a long name"


def command(folder: Path, verb: str, *arguments: str) -> list[str]:
    """Return the command line of ``flwr-sim`` on the digits, with three rounds of a long name."""
    (folder / "a.toml").write_text(DIGITS, encoding="utf-8")
    settings = ("--set", f'run.name="{LONG_NAME}"') if verb == "run" else ()
    program = (
        sys.executable,
        "-m",
        "polyclinic.studies.cli",
        verb,
        str(folder / "a.toml"),
        "--out",
        str(folder / "out"),
    )
    return [*program, "--set", "run.rounds=3", *settings, *arguments]


def piped(arguments: Sequence[str], code: int = 0) -> Ended:
    """Type a command in this process, whose streams are no terminal then."""
    ended = flwr_sim(*arguments[3:])
    assert ended.code == code, ended.err
    return ended


def on_terminal(arguments: Sequence[str], columns: int) -> list[str]:
    """Return every line that was ever drawn, without colours."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES", "NO_COLOR")}
    environment["TERM"] = "xterm-256color"
    process = subprocess.Popen(arguments, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    output = b""
    with suppress(OSError):  # how Linux says that the other end is closed
        while part := os.read(ours, 65536):
            output += part
    os.close(ours)
    assert process.wait() == 0, output.decode()
    return [line for line in re.split(r"[\r\n]+", STEERING.sub("", output.decode())) if line.strip()]


def is_moment(text: str) -> bool:
    return STAMP.match(text) is not None and abs(dt.datetime.fromisoformat(text).timestamp() - time.time()) < 600


def objects(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("columns", [80, pytest.param(120, marks=pytest.mark.long)])
def test_bar_round_and_time_left_stand_on_one_line_of_a_terminal(columns: int, tmp_path: Path) -> None:
    # It is drawn twice a second, and three rounds may take less than that.
    drawn = on_terminal(command(tmp_path, "run", "--set", "run.rounds=9"), columns)
    bars = [line for line in drawn if re.search("round [2-7] of 9", line)]
    assert bars, drawn
    assert all("━━━━" in line and re.search(r"\d:\d\d:\d\d left", line) for line in bars)
    assert any("loss" in line and "AUROC" in line for line in drawn)
    assert max(len(line) for line in drawn if not line.startswith("Report")) <= columns


def test_without_a_terminal_a_run_says_each_round_at_once_with_the_time_left(tmp_path: Path) -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command(tmp_path, "run"), stdout=pipe, stderr=pipe, text=True, stdin=subprocess.DEVNULL
    ) as run:
        assert run.stdout is not None
        assert run.stderr is not None
        lines = [(line.rstrip("\n"), (tmp_path / "out" / "summary.json").exists()) for line in run.stderr]
        result = run.stdout.read()
    assert run.returncode == 0
    rounds = [(line, over) for line, over in lines if "  round " in line]
    assert [re.findall(r"round \d of 3", line)[0] for line, _ in rounds] == [f"round {n} of 3" for n in (1, 2, 3)]
    assert not any(over for _, over in rounds)  # the lines came before the run was over
    assert all(is_moment(line.split()[0]) for line, _ in lines)
    assert re.search(r"3 of 3 sites, loss \d\.\d{3}, round before: validation \d\.\d{3}, AUROC \d", rounds[1][0])
    assert re.search(r"about .* left", rounds[1][0])
    assert "AUROC by class" in result
    assert "round 1 of 3" not in result


def test_a_segmentation_names_its_validation_figure_dice(tmp_path: Path) -> None:
    small = [
        "data.images=60",
        "data.image_size=16",
        "model.image_size=16",
        "run.rounds=1",
        'partition={kind="class_subsets", sites=2}',
    ]
    settings = [word for setting in small for word in ("--set", setting)]
    ended = flwr_sim("run", "organs_surgical", "--out", str(tmp_path / "out"), "--backend", "inline", *settings)
    assert ended.code == 0, ended.err
    assert re.search(r"round before: validation \d\.\d{3}, Dice \d", ended.err)
    assert "AUROC" not in ended.err + ended.out


def test_as_json_every_line_of_standard_error_is_one_object_and_standard_output_is_the_result(tmp_path: Path) -> None:
    ended = piped(command(tmp_path, "run", "--progress", "json"))
    lines = objects(ended.err)
    assert [line["event"] for line in lines] == ["began", "round", "round", "round", "ended"]
    assert all(is_moment(line["time"]) and line["run"] == f"{LONG_NAME} seed 3" for line in lines)
    written = objects((tmp_path / "out" / "rounds.jsonl").read_text("utf-8"))
    assert [(line["round"], line["rounds"], len(line["sites"]), line["absent"]) for line in lines[1:4]] == [
        (line["round"], 3, 3, {}) for line in written
    ]
    for line, before in zip(lines[2:4], written, strict=False):  # a line of the file has the model that the round made
        for name in ("validation_loss", "validation_auroc"):
            assert line[name] == before[name]
    assert lines[1]["seconds_left"] > lines[3]["seconds_left"] == 0
    assert "AUROC by class" in ended.out


@pytest.mark.long
def test_none_says_nothing_but_the_result(tmp_path: Path) -> None:
    ended = piped(command(tmp_path, "run", "--progress", "none"))
    assert ended.err == ""
    assert "AUROC by class" in ended.out


@pytest.mark.parametrize("verb", ["run", "compare", "study"])
def test_a_bar_without_a_terminal_is_refused_before_anything_is_read(verb: str, tmp_path: Path) -> None:
    ended = piped(command(tmp_path, verb, "--progress", "bar"), code=2)
    assert "--progress bar: needs a terminal" in ended.err.replace("\n", " ")
    assert not (tmp_path / "out").exists()


def test_a_log_file_gets_no_bar_where_colours_are_forced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with (tmp_path / "log").open("w") as file:
        console = Console(file=file)
        assert console.is_terminal
        assert choose_progress_format(ProgressFormat.auto, console) is ProgressFormat.lines
        with pytest.raises(BadInput, match="needs a terminal"):
            choose_progress_format(ProgressFormat.bar, console)


@pytest.mark.long
def test_compare_speaks_before_its_first_run_ends(tmp_path: Path) -> None:
    ended = piped(command(tmp_path, "compare", "--seeds", "2", "--jobs", "1"))
    lines = [line.split(maxsplit=1) for line in ended.err.splitlines()]
    assert all(is_moment(moment) for moment, _ in lines)
    texts = [text for _, text in lines if not text.startswith("at work: ")]
    assert texts[:2] == ["2 runs to do, 1 at a time", "began  a-seed0, 3 rounds"]
    assert re.fullmatch(r"done  a-seed0  [\d.mins ]+, 1 of 2 runs, about .* left", texts[2])
    assert texts[3] == "began  a-seed1, 3 rounds"
    assert re.fullmatch(r"done  a-seed1  [\d.mins ]+, 2 of 2 runs", texts[4])
    assert "done " not in ended.out


@pytest.mark.long
def test_compare_as_json(tmp_path: Path) -> None:
    ended = piped(command(tmp_path, "compare", "--seeds", "2", "--jobs", "2", "--progress", "json"))
    first, *lines = objects(ended.err)
    first.pop("time")
    assert first == {"event": "runs", "done": 0, "runs": 2, "seconds_left": None, "at_a_time": 2}
    assert {(line["event"], line["run"]) for line in lines[:2]} == {("run_began", "a-seed0"), ("run_began", "a-seed1")}
    ends = [(line["event"], line["ok"], line["done"]) for line in lines[2:] if line["event"] != "at_work"]
    assert ends == [("run_ended", True, 1), ("run_ended", True, 2)]
    assert "Report:" in ended.out


def test_the_table_of_a_grid_is_whole_at_eighty_columns_and_shows_rounds_before_a_run_ends(tmp_path: Path) -> None:
    drawn = on_terminal(command(tmp_path, "compare", "--seeds", "2", "--jobs", "2"), 80)
    first_end = next(n for n, line in enumerate(drawn) if line.startswith("done  "))
    assert any("0 of 2 runs" in line for line in drawn[:first_end])
    assert any(re.search(r"round \d of 3, round \d of 3", line) for line in drawn[:first_end])
    assert max(len(line) for line in drawn[: first_end + 1]) <= 80


def test_those_at_work_are_named_every_thirty_seconds_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    now, told = [100.0], list[tuple[str, Any]]()
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    at_work = [ActiveRun("a", 30.0, 3, 6, "a-seed0"), ActiveRun("b", 30.0, 0, 6, "b-seed0")]
    pace = TrialsTimeEstimate({"a": 1, "b": 1}, {"a": 0, "b": 0}, 2, lambda: at_work)
    with TrialsProgressEvents(lambda line, event: told.append((line, event)), pace) as shown:
        told.clear()
        for _ in range(122):
            now[0] += 0.5
            shown.show_trials_progress()
    lines, written = [line for line, _ in told], [event for _, event in told]
    assert lines == ["at work: a-seed0 round 3 of 6, b-seed0 round 0 of 6; 0 of 2 runs, about 30.0 s left"] * 2
    assert [line["event"] for line in written] == ["at_work", "at_work"]
    assert written[0]["at_work"][0] == {"run": "a-seed0", "round": 3, "rounds": 6, "seconds": 30.0}
