"""docs/methods.md has each method once, and the table of what goes with what that the methods give."""

import re
import runpy
from pathlib import Path

from polyclinic.strategies.registry import STRATEGIES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")


def test_the_table_of_what_goes_with_what_is_made_from_the_methods() -> None:
    written = runpy.run_path(str(ROOT / "supply" / "method_table.py"))
    assert f"{written['BEGIN']}{written['make_method_table']()}{written['END']}" in PAGE


def test_each_method_stands_in_one_family() -> None:
    families = PAGE.partition("## All methods by family")[2].partition("## Wrappers")[0]
    rows = re.findall(r"^(?:\| )?`(\w+)`(?: \| |, ours too)", families, re.MULTILINE)
    assert sorted(rows) == sorted(STRATEGIES)
