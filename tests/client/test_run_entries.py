"""Entries of a site about its runs: one file a run, and no name of a run leads out of their folder."""

from pathlib import Path

import pytest

from polyclinic.client.site.run_entries import RunEntryFolder


@pytest.mark.parametrize("run", ["", ".", "..", "../run", "a/b", "/tmp/run", "A", "run.json", "r" * 65, "run\n"])
def test_a_name_that_no_run_may_have_is_neither_read_nor_written(run: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"count": 1}', encoding="utf-8")
    (tmp_path / "earlier.json").write_text(f'{{"{run.strip()}": {{"count": 1}}}}', encoding="utf-8")
    entries = RunEntryFolder(tmp_path / "runs", tmp_path / "earlier.json")
    assert entries.read_entry(run) is None
    with pytest.raises(ValueError, match="a name must be 1 to 64"):
        entries.write_entry(run, {"count": 2})
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["earlier.json", "run.json"]


def test_an_entry_counts_before_that_of_an_earlier_release(tmp_path: Path) -> None:
    (tmp_path / "earlier.json").write_text('{"run": {"count": 1}, "odd": [1]}', encoding="utf-8")
    entries = RunEntryFolder(tmp_path / "runs", tmp_path / "earlier.json")
    assert [entries.read_entry(run) for run in ("run", "odd", "other")] == [{"count": 1}, None, None]
    entries.write_entry("run", {"count": 2})
    assert entries.read_entry("run") == {"count": 2}
