"""Plain words: what a person reads has none of the words in ``tests/style.toml``."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("client", "common", "docker", "docs", "experiments", "polyclinic", "server", "strategies", "studies")
FOLDERS += ("supply", "benchmarks")
SUFFIXES = {".py", ".md", ".j2", ".toml", ".sh", ".ipynb", ".svg", ".js", ".yaml"}


def test_no_text_has_a_word_of_the_list() -> None:
    instead = tomllib.loads((ROOT / "tests" / "style.toml").read_text(encoding="utf-8"))["instead"]
    words = {re.compile(rf"(?<![\w-])({pattern})(?![\w-])", re.IGNORECASE): plain for pattern, plain in instead.items()}
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    matches = []
    for path in (*ROOT.glob("*.md"), *paths):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            for pattern, plain in words.items():
                if word := pattern.search(line):
                    matches.append(f'{path.relative_to(ROOT)}:{number}: "{word[0]}"; write: {plain}')
    assert len(paths) > 300
    assert not matches, "\n".join(matches)
