"""docs/benchmarks.md holds what was measured, by the commands of today."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def table() -> ModuleType:
    """benchmarks/table.py, which is no part of a package."""
    spec = importlib.util.spec_from_file_location("benchmarks_table", ROOT / "benchmarks" / "table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def elsewhere(table: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A page and figures of their own, and two commands: one that writes its argument, one that fails."""
    (tmp_path / "page.md").write_text(f"before\n{table.BEGIN}old\n{table.END}after\n", encoding="utf-8")
    script = "import sys; open(sys.argv[-1], 'w').write(sys.argv[1])"
    rows = lambda found: [table.Row("seconds", f"{found} s")]  # noqa: E731
    benches = {
        "good": table.Bench(f'python -c "{script}" 5', rows),
        "other": table.Bench(f'python -c "{script}" 7', rows),
        "bad": table.Bench("python -c 1/0", rows),
    }
    for name, value in (("PAGE", "page.md"), ("MEASURED", "measured.json"), ("RAW", "raw")):
        monkeypatch.setattr(table, name, tmp_path / value)
    monkeypatch.setattr(table, "BENCHES", benches)
    monkeypatch.setattr(table, "commit", lambda: "abc")
    return tmp_path


def typed(table: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["table.py", *arguments])
    table.main()


def test_the_page_holds_what_was_measured(table: ModuleType) -> None:
    found = json.loads((ROOT / "benchmarks" / "measured.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert page.split(table.BEGIN)[1].split(table.END)[0].strip() == table.table_of(found).strip()


def test_every_row_was_measured_by_the_command_of_today(table: ModuleType) -> None:
    found = json.loads((ROOT / "benchmarks" / "measured.json").read_text(encoding="utf-8"))
    assert {name: one["command"] for name, one in found.items()} == {
        name: bench.command for name, bench in table.BENCHES.items()
    }
    assert [name for name, one in found.items() if not one["rows"]] == []


def test_a_command_changes_its_own_rows_alone(
    table: ModuleType, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(table, monkeypatch, "--only", "good,other")
    page = elsewhere / "page.md"
    assert "| seconds | 5 s |  | `good` |" in page.read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads((elsewhere / "measured.json").read_text(encoding="utf-8"))
    found["other"] |= {"date": "2001-01-01", "rows": [["seconds", "8 s", "long ago"]]}
    (elsewhere / "measured.json").write_text(json.dumps(found), encoding="utf-8")
    typed(table, monkeypatch, "--only", "good")
    text = page.read_text(encoding="utf-8")
    assert "| seconds | 8 s | long ago | `other` | 2001-01-01 |" in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")


def test_a_command_that_fails_leaves_page_and_figures_as_they_were(
    table: ModuleType, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (elsewhere / "page.md").read_text(encoding="utf-8")
    with pytest.raises(subprocess.CalledProcessError):
        typed(table, monkeypatch, "--only", "bad")
    assert (elsewhere / "page.md").read_text(encoding="utf-8") == before
    assert not (elsewhere / "measured.json").exists()
    with pytest.raises(SystemExit, match="unknown: none"):
        typed(table, monkeypatch, "--only", "none")


def test_an_aim_that_is_missed_is_called_so(table: ModuleType) -> None:
    assert table.aim(1.0, 1, "1 s") == "aim: 1 s"
    assert table.aim(1.01, 1, "1 s") == "aim, missed: 1 s"
