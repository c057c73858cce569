"""docs/benchmarks.md holds what was measured, by the commands of today."""

import importlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from supply.blocks import replace_block

ROOT = Path(__file__).parents[1]


MEASURED = json.loads((ROOT / "benchmarks" / "measured.json").read_text(encoding="utf-8"))


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/table.py, which is no part of a package."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("table")


@pytest.fixture
def measure(table: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Call the program for some of three commands, with a page of its own: two write their argument, one fails."""
    marks = ("<!-- begin: benchmarks, written by make bench -->\n", "<!-- end: benchmarks -->\n")
    (tmp_path / "page.md").write_text(f"before\n{marks[0]}old\n{marks[1]}after\n", encoding="utf-8")
    script = "import sys; open(sys.argv[-1], 'w').write(sys.argv[1])"

    def rows(value: object) -> list[Any]:
        return [table.Row("seconds", f"{value} s")]

    benches = {
        "good": table.Bench(f'python -c "{script}" 5', rows),
        "other": table.Bench(f'python -c "{script}" 7', rows),
        "bad": table.Bench("python -c 1/0", rows),
    }
    for name, value in (("PAGE", "page.md"), ("MEASURED", "measured.json"), ("RAW", "raw")):
        monkeypatch.setattr(table, name, tmp_path / value)
    monkeypatch.setattr(table, "BENCHES", benches)
    monkeypatch.setattr(table, "commit", lambda: "abc")

    def call(names: str) -> None:
        monkeypatch.setattr(sys, "argv", ["table.py", "--only", names])
        table.main()

    return call


def test_the_page_holds_what_was_measured_by_the_commands_of_today(table: ModuleType) -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert replace_block(page, table.BLOCK, table.table_of(MEASURED)) == page
    commands = {name: bench.command for name, bench in table.BENCHES.items()}
    assert {name: measured["command"] for name, measured in MEASURED.items()} == commands
    assert [name for name, measured in MEASURED.items() if not measured["rows"]] == []


def test_a_command_changes_its_own_rows_alone(measure: Callable[[str], None], tmp_path: Path) -> None:
    measure("good,other")
    page, figures = tmp_path / "page.md", tmp_path / "measured.json"
    assert "| seconds | 5 s |  | `good` |" in page.read_text(encoding="utf-8")
    measured = json.loads(figures.read_text(encoding="utf-8"))
    measured["other"] |= {"date": "2001-01-01", "rows": [["seconds", "8 s", "long ago"]]}
    figures.write_text(json.dumps(measured), encoding="utf-8")
    measure("good")
    text = page.read_text(encoding="utf-8")
    assert "| seconds | 8 s | long ago | `other` | 2001-01-01 |" in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")


def test_a_command_that_fails_changes_neither_page_nor_figures(measure: Callable[[str], None], tmp_path: Path) -> None:
    before = (tmp_path / "page.md").read_text(encoding="utf-8")
    with pytest.raises(subprocess.CalledProcessError):
        measure("bad")
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == before
    assert not (tmp_path / "measured.json").exists()
    with pytest.raises(SystemExit, match="unknown: none"):
        measure("none")


def test_an_aim_that_is_missed_is_called_so(table: ModuleType) -> None:
    assert table.aim(1.0, 1, "1 s") == "aim: 1 s"
    assert table.aim(1.01, 1, "1 s") == "aim, missed: 1 s"


@pytest.fixture
def backdoors(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/backdoors.py, which is no part of a package."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("backdoors")


def test_the_page_holds_the_range_of_each_backdoor_over_three_triggers_and_three_seeds_or_more(
    backdoors: ModuleType,
) -> None:
    measured = json.loads((ROOT / "benchmarks" / "backdoors.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert replace_block(page, backdoors.BLOCK, backdoors.draw_tables(measured)) == page
    cells = [backdoors.Cell(*fields) for fields in measured["cells"]]
    figures: dict[tuple[Any, ...], list[int]] = {}
    for cell in cells:
        figures.setdefault(cell[:4], []).append(len(cell.successes))
    assert {min(len(seeds), *seeds) >= 3 for seeds in figures.values()} == {True}
    for sites in (5, 10):
        assert {schedule for *row, schedule in figures if row == [1, sites, backdoors.DEFAULT]} >= {
            *("no attack", "as trained", "3.5 times in the last", "last round only, 3.5 times"),
        }


def test_a_row_of_which_a_run_is_missing_is_not_drawn(backdoors: ModuleType) -> None:
    successes = dict(zip(backdoors.TRIGGERS, (0.1, 0.2, 0.3, 0.4), strict=True))
    trials = {
        key: backdoors.Trial(0.9, {key.trigger: 0.5} if key.trigger else successes)
        for key in backdoors.list_planned_trials()
        if (key.population, key.rule) in ((backdoors.ONE_OF_5, backdoors.DEFAULT), (backdoors.TWO_OF_5, "median"))
    }
    whole = backdoors.collect_cells(trials)
    assert {(cell.attackers, cell.rule) for cell in whole} == {(1, "clip 3.0"), (2, "median")}
    page = backdoors.draw_tables({"cells": whole})
    # Honest runs of four triggers have 0.1 to 0.4, attacks 0.5; median was measured as trained only.
    assert "| 2 of 5 | median | 0.50, **0.50**, 0.50 |  |  |  |  |  | 0.10, **0.25**, 0.40 | +0.000 to +0.000 |" in page
    key = backdoors.TrialKey(backdoors.TWO_OF_5, "median", "as trained", 1, "stripe")
    del trials[key]
    assert {(cell.attackers, cell.rule) for cell in backdoors.collect_cells(trials)} == {(1, "clip 3.0")}


def gpu_lines(out: Path, *options: str) -> list[dict[str, Any]]:
    """What benchmarks/gpu_all.py writes on a CPU."""
    command = [sys.executable, "benchmarks/gpu_all.py", "--device", "cpu", "--out", str(out), *options]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def test_a_part_of_the_gpu_benchmark_stops_when_its_share_of_the_budget_is_over(tmp_path: Path) -> None:
    began = time.monotonic()
    lines = gpu_lines(tmp_path / "gpu.jsonl", "--budget", "4", "--only", "rounds,copies")
    assert time.monotonic() - began < 30  # the budget, and the time that programs take to start
    assert [(line["part"], "stopped" in line, "skipped" in line) for line in lines[-2:]] == [
        ("rounds", True, False),
        ("copies", False, True),
    ]
    assert {(line["device"], line["torch"]) for line in lines} == {("cpu", version("torch"))}


@pytest.mark.long
def test_each_part_of_the_gpu_benchmark_measures_something_on_a_cpu(tmp_path: Path) -> None:
    lines = gpu_lines(tmp_path / "gpu.jsonl", "--budget", "600")
    assert [line for line in lines if "failed" in line or "stopped" in line] == []
    assert {line["part"] for line in lines} == {"rounds", "model", "copies", "workers", "batches", "graphs"}
    contenders = [line["contender"] for line in lines if "sha256" in line and line["part"] == "rounds"]
    assert contenders == ["bare", "resident", "inline"]
    assert len({line["sha256"] for line in lines if line["part"] == "rounds"}) == 1
