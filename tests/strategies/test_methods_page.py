"""docs/methods.md has each method once."""

import re
from pathlib import Path

from polyclinic.strategies.registry import STRATEGIES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")


def test_each_method_stands_in_one_family() -> None:
    families = PAGE.partition("## All methods by family")[2].partition("## Wrappers")[0]
    rows = re.findall(r"^(?:\| )?`(\w+)`(?: \| |, ours too)", families, re.MULTILINE)
    assert sorted(rows) == sorted(STRATEGIES)
