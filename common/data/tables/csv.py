"""CSV tables as columns of strings. The meaning of a cell stands in :mod:`common.data.tables.cells`."""

import csv
import gzip
import io
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, cast

import numpy as np

from common.data.base.decoded_size import LARGEST_MB, content_limit, size_problem
from common.data.base.splits import Names
from common.errors import PICTURE, SAVE_AS_UTF8, BadInput, Fault, did_you_mean, not_utf8_in, quoted, stop_on
from common.system.files import missing_file
from common.system.plain_text import counted

Columns = Mapping[str, Names]

_LONGEST_LINE = 1 << 20
"""Letters."""
_BLOCK = 1 << 20
"""Letters that are in memory as Python's objects."""
_OF_AN_ARRAY = 128
"""Bytes of an array beside its cells."""
_HEAD = 132
"""Bytes that show a file of another kind."""


def read_columns(path: Path, where: str, largest_mb: int = LARGEST_MB) -> Columns:
    """Read a ``.csv`` or ``.csv.gz`` into one array of strings per column.

    Args:
        where: The key of the config file that names the table, for faults.
        largest_mb: MiB that the table may take in any case, see :mod:`common.data.base.decoded_size`.

    Raises:
        BadInput: If the file is missing, empty, not UTF-8, ragged, or takes more memory than it may.
    """
    stop_on(missing_file(where, path))
    try:
        try:
            return _read_blocks(path, where, content_limit(path.stat().st_size, largest_mb))
        except UnicodeDecodeError:
            problem = _not_utf8_problem(path)
        remedy = "Name a csv file." if problem == PICTURE else f"{SAVE_AS_UTF8} In Excel: CSV UTF-8."
        raise BadInput([Fault(where, f"{path.name} {problem}", remedy)])
    except (OSError, EOFError, zlib.error):
        raise BadInput([Fault(where, f"{path.name} cannot be read: damaged or cut off.", "Copy it again.")]) from None
    except csv.Error as error:
        raise BadInput([Fault(where, f"{path.name} cannot be read as a CSV table: {error}.")]) from None


def _open_table(path: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


def _read_blocks(path: Path, where: str, limit: int) -> Columns:
    """Read a table, some thousand lines at a time: cells as Python's objects take ten times what they take in arrays.

    Raises:
        BadInput: For its form or its size; and what gzip, csv and the decoder raise on other bytes.
    """
    letters = 0

    def check_size(claimed: int) -> None:
        if claimed > limit:
            remedy = "If that is right, raise this key; else get the file again, or remove columns of long texts."
            raise BadInput([Fault(where, f"{path.name}: {size_problem(claimed, limit)}.", remedy)])

    def lines() -> Iterator[str]:
        nonlocal letters
        while line := text.readline(_LONGEST_LINE):
            letters += len(line)
            if len(line) == _LONGEST_LINE:
                raise csv.Error(f"a line has more than {_LONGEST_LINE:,} letters")
            check_size(letters)
            yield line

    with _open_table(path) as content, io.TextIOWrapper(content, encoding="utf-8-sig", newline="") as text:
        rows = csv.reader(lines())
        header = next(filter(None, rows), None)
        if header is None:
            raise BadInput([Fault(where, f"{path.name} is empty.", "Its first line names the columns.")])
        table, next_block = _ColumnBlocks(len(header), check_size), 0
        for row in rows:
            if row:
                table.rows.append(row)
            if letters > next_block:
                table.store()
                next_block = letters + _BLOCK
        table.store()
    stop_on(_form_faults(path.name, where, header, table))
    return dict(zip(header, table.arrays(), strict=True))


class _ColumnBlocks:
    """The cells of a table below its header: of each column an array for every few thousand lines.

    Attributes:
        rows: Lines that are in no array yet.
        lines: Number of lines that are in arrays.
        ragged: Number of lines with another number of cells than the header, and the number of the first in the file.
    """

    def __init__(self, columns: int, check_size: Callable[[int], None]) -> None:
        self.rows, self.lines, self.ragged = list[list[str]](), 0, (0, 0)
        self._check_size, self._arrays, self._widest = check_size, 0, [1] * columns
        self._blocks: list[list[Names]] = [[] for _ in range(columns)]

    def store(self) -> None:
        """Move the lines collected in ``rows`` into arrays, which take less memory.

        Raises:
            BadInput: If they take more memory than the table may.
        """
        rows, self.rows, first = self.rows, [], self.lines + 2
        self.lines += len(rows)
        if set(map(len, rows)) - {len(self._blocks)}:
            wrong = [number for number, row in enumerate(rows, first) if len(row) != len(self._blocks)]
            self.ragged = (self.ragged[0] + len(wrong), self.ragged[1] or wrong[0])
        if self.ragged[0] or not rows:  # a ragged table is refused in the end, and its cells are not needed
            return
        columns = list(zip(*rows, strict=True))
        widths = [max(map(len, cells)) for cells in columns]
        self._widest = [max(pair) for pair in zip(self._widest, widths, strict=True)]
        self._arrays += len(widths)
        # numpy gives each cell the room of the longest one of its column, four bytes a letter.
        self._check_size(4 * self.lines * sum(self._widest) + _OF_AN_ARRAY * self._arrays)
        for blocks, cells, width in zip(self._blocks, columns, widths, strict=True):
            blocks.append(np.array(cells, dtype=f"<U{max(width, 1)}"))

    def arrays(self) -> Iterator[Names]:
        """Yield the columns ``(lines,)``; each leaves this object as it is yielded, so that none is there twice."""
        for place, blocks in enumerate(self._blocks):
            self._blocks[place] = []
            yield np.concatenate(blocks)


def _not_utf8_problem(path: Path) -> str:
    """Return the sentence that says where a file stops being UTF-8."""
    with _open_table(path) as content:
        head = content.read(_HEAD)
        content.seek(0)
        for number, line in enumerate(iter(lambda: content.readline(4 * _LONGEST_LINE), b""), start=1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return not_utf8_in(head, number)
    return not_utf8_in(head, 1)


def _form_faults(name: str, where: str, header: Sequence[str], table: _ColumnBlocks) -> list[Fault]:
    for character, plural in ((";", "semicolons"), ("\t", "tabs")):
        if len(header) == 1 and character in header[0]:
            problem, remedy = f"the cells of {name} are separated by {plural}.", "Save it with commas between cells."
            return [Fault(where, problem, remedy)]
    if repeated := sorted(column for column, count in Counter(header).items() if column and count > 1):
        remedy = "Rename or remove one; the first line must name the columns."
        return [Fault(where, f"{name} has more than one column {quoted(repeated)}.", remedy)]
    if not table.lines:
        return [Fault(where, f"{name} has no rows below its header.")]
    count, first = table.ragged
    if not count:
        return []
    ragged = f"{counted(count, 'line')} of {name} without the header's {counted(len(header), 'cell')}"
    return [Fault(where, f"{ragged}, line {first} first.", "Quote cells that contain a comma.")]


def column_faults(table: str, columns: Columns, required: Mapping[str, str | None]) -> list[Fault]:
    """Find columns that a table lacks; ``required`` maps the key that names a column to the column."""
    return [
        Fault(
            where,
            f'"{column}" is not a column of {table}, whose columns are {quoted(columns)}.',
            did_you_mean(column, columns),
            cause="column",
        )
        for where, column in required.items()
        if column is not None and column not in columns
    ]
