"""docs/results-benchmark.md is what its program prints, and results.md copies its tables without a change."""

import importlib

import pytest

from tests.studies.published_runs import ROOT, SENTENCES, TABLES


def tables_of(page: str) -> list[list[str]]:
    """The lines of each table of a page."""
    paragraphs = (paragraph.splitlines() for paragraph in page.split("\n\n"))
    return [lines for lines in paragraphs if lines and lines[0].startswith("|")]


def test_the_page_of_tables_is_what_its_program_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    assert importlib.import_module("evidence").make_page() == TABLES, (
        "PYTHONPATH=. python benchmarks/evidence.py > docs/results-benchmark.md"
    )


def test_a_table_that_both_pages_have_is_the_same_on_both() -> None:
    whole = tables_of(TABLES)
    heads = {table[0] for table in whole}
    copied = [table for table in tables_of(SENTENCES) if table[0] in heads]
    assert len(copied) == 5, "all methods ranked and not ranked, equal time, ours at equal steps and in equal time"
    assert [table[0] for table in copied if table not in whole] == []
