"""Plain words: what a person reads has none of the words in ``tests/style.toml``."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = (
    "client",
    "common",
    "docker",
    "docs",
    "experiments",
    "polyclinic",
    "server",
    "strategies",
    "studies",
    "supply",
    "benchmarks",
)
SUFFIXES = {".py", ".md", ".j2", ".toml", ".sh", ".ipynb", ".svg", ".js", ".yaml"}


def texts() -> Iterator[Path]:
    yield from ROOT.glob("*.md")
    for folder in FOLDERS:
        yield from (path for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES)


def test_no_text_has_a_word_of_the_list() -> None:
    instead = tomllib.loads((ROOT / "tests" / "style.toml").read_text(encoding="utf-8"))["instead"]
    words = {re.compile(rf"(?<![\w-])({pattern})(?![\w-])", re.IGNORECASE): plain for pattern, plain in instead.items()}
    found, searched = [], 0
    for path in texts():
        searched += 1
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            for pattern, plain in words.items():
                if word := pattern.search(line):
                    found.append(f'{path.relative_to(ROOT)}:{number}: "{word[0]}"; write: {plain}')
    assert searched > 300
    assert not found, "\n".join(found)
