"""The tables of the published runs on docs/results-benchmark.md and docs/results.md are what their program writes."""

import importlib
from types import ModuleType

import pytest

from supply.blocks import list_blocks, replace_block
from tests.studies.published_runs import ROOT, SENTENCES, TABLES

COMMAND = "PYTHONPATH=. python benchmarks/evidence.py --write"


@pytest.fixture
def evidence(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/evidence.py, which is no part of a package."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("evidence")


def test_the_page_of_tables_is_what_its_program_writes(evidence: ModuleType) -> None:
    assert evidence.make_page() == TABLES, COMMAND


def test_the_tables_that_decide_are_those_of_the_page_of_tables(evidence: ModuleType) -> None:
    tables = evidence.list_deciding_tables()
    assert [block.name for block in list_blocks(SENTENCES)] == list(tables)
    stale = [name for name, table in tables.items() if replace_block(SENTENCES, name, table) != SENTENCES]
    assert stale == [], COMMAND
    assert [name for name, table in tables.items() if table not in TABLES] == []
