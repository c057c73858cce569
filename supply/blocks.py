"""Blocks of the docs that a program writes.

A block stands between ``<!-- begin: NAME, written by COMMAND -->`` and ``<!-- end: NAME -->``, and its name stands
once on all pages. ``make reference`` writes the blocks that follow from the code; the other commands write figures.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

_BEGIN = re.compile(r"^<!-- begin: (?P<name>[^,\n]+), written by (?P<command>.+) -->$", re.MULTILINE)


class Block(NamedTuple):
    """A block of a page.

    Attributes:
        name: Its name on both marks.
        command: The command that writes it, from the root of the repository.
    """

    name: str
    command: str


def list_blocks(page: str) -> list[Block]:
    """Return the blocks of a page's text in their order."""
    return [Block(match["name"], match["command"]) for match in _BEGIN.finditer(page)]


def replace_block(page: str, name: str, text: str) -> str:
    """Return a page's text with another text between the marks of a block.

    Raises:
        ValueError: If the page does not have both marks of the block once.
    """
    begin = rf"<!-- begin: {re.escape(name)}, written by .+ -->\n"
    end = rf"<!-- end: {re.escape(name)} -->\n"
    parts = re.split(rf"({begin}|{end})", page)
    if len(parts) != 5 or not re.fullmatch(begin, parts[1]) or not re.fullmatch(end, parts[3]):
        raise ValueError(f'the page must have the marks "begin: {name}, written by COMMAND" and "end: {name}" once')

    before, begin_mark, _, end_mark, after = parts
    return f"{before}{begin_mark}\n{text.strip()}\n\n{end_mark}{after}"


def format_table(headings: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table in Markdown; a bar in a cell must be escaped already."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def write_block(path: Path, name: str, text: str) -> None:
    """Write a text between the marks of a block of a page.

    Raises:
        ValueError: If the page does not have both marks of the block once.
    """
    page = path.read_text(encoding="utf-8")
    path.write_text(replace_block(page, name, text), encoding="utf-8")
