"""The commands and files that stand on a page of the docs."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[1]


def blocks(page: str, language: str = "") -> list[str]:
    """The fenced blocks of one language, in order; those without a language are commands as they are typed, or text."""
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    both = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [block for own, block in both if own == language]


def lines(page: str) -> list[list[str]]:
    """Every command of the page, in words."""
    return [shlex.split(line) for block in blocks(page, "sh") for line in block.splitlines()]


def saved(page: str, folder: Path) -> None:
    """The files that the page says to save, under the names that it gives them."""
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    names = re.findall(r"[Ss]ave this as `([^`]+)`", text)
    for name, content in zip(names, blocks(page, "toml"), strict=True):
        (folder / name).write_text(content, encoding="utf-8")
