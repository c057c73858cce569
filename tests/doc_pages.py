"""The commands and files that stand on a page of the docs."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[1]


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of one language, in order."""
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def plain_blocks(page: str) -> list[str]:
    """The fenced blocks without a language, in order: commands as they are typed, or text."""
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    return [
        block
        for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        if not language
    ]


def lines(page: str) -> list[list[str]]:
    """Every command of the page, in words."""
    return [shlex.split(line) for block in blocks(page, "sh") for line in block.splitlines()]


def saved(page: str, folder: Path) -> None:
    """The files that the page says to save, under the names that it gives them."""
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    names = re.findall(r"[Ss]ave this as `([^`]+)`", text)
    for name, content in zip(names, blocks(page, "toml"), strict=True):
        (folder / name).write_text(content, encoding="utf-8")
