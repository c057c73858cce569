"""The threat model names only what there is."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "threat-model.md").read_text(encoding="utf-8")


def test_every_file_that_it_names_is_there() -> None:
    paths = set(re.findall(r"`((?:common|strategies|server|client|tests|supply)/[\w/.*-]+)`", PAGE))
    assert len(paths) > 20
    assert [path for path in sorted(paths) if not list(ROOT.glob(path.rstrip("/")))] == []


def test_every_test_that_it_names_is_there() -> None:
    names = set(re.findall(r"`(test_\w+)`", PAGE))
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(names) > 10
    assert [name for name in sorted(names) if f"def {name}(" not in tests] == []
