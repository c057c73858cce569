"""CSV tables as columns of strings, and label columns as numbers."""

import csv
import gzip
import io
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Self, TextIO, cast

import numpy as np
from numpy.typing import NDArray

from common.data.base.decoded_size import LARGEST_MB, largest_content, too_large
from common.data.base.spec import LabelPolicy
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
"""Bytes beside its cells."""
_HEAD = 132

_CELLS = {"1": 1.0, "1.0": 1.0, "0": 0.0, "0.0": 0.0}
_UNCERTAIN = ("-1", "-1.0")
_BLANK = ("", "nan", "NaN")
LABEL_CELLS = frozenset((*_CELLS, *_UNCERTAIN, *_BLANK))
SAID_CELLS = tuple(_CELLS)
"""Cells that say whether a class is present."""
POSITIVE_CELLS = tuple(cell for cell, value in _CELLS.items() if value)
_POLICY = {"unknown": np.nan, "negative": 0.0, "positive": 1.0}
PARTS = {"train": "train", "val": "validation", "valid": "validation", "validation": "validation", "test": "test"}


def read_columns(path: Path, where: str, largest_mb: int = LARGEST_MB) -> Columns:
    """Read a ``.csv`` or ``.csv.gz`` into one array of strings per column.

    Args:
        largest_mb: MiB that it may take in any case, see :mod:`common.data.base.decoded_size`.

    Raises:
        BadInput: If the file is missing, empty, not UTF-8, ragged, or takes more memory than it may.
    """
    stop_on(missing_file(where, path))
    try:
        try:
            return _columns(path, where, largest_content(path.stat().st_size, largest_mb))
        except UnicodeDecodeError:
            problem = _foreign_bytes(path)
        remedy = "Name a csv file." if problem == PICTURE else f"{SAVE_AS_UTF8} In Excel: CSV UTF-8."
        raise BadInput([Fault(where, f"{path.name} {problem}", remedy)])
    except (OSError, EOFError, zlib.error):
        raise BadInput([Fault(where, f"{path.name} cannot be read: damaged or cut off.", "Copy it again.")]) from None
    except csv.Error as error:
        raise BadInput([Fault(where, f"{path.name} cannot be read as a CSV table: {error}.")]) from None
    except TooLargeTable as error:
        remedy = "If that is right, raise this key; else get the file again, or remove columns of long texts."
        raise BadInput([Fault(where, f"{path.name}: {error}.", remedy)]) from None


def _opened(path: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


def _columns(path: Path, where: str, bound: int) -> Columns:
    """Read a table, some thousand lines at a time: cells as Python's objects take ten times what they take in arrays.

    Raises:
        BadInput: For its form; TooLargeTable, and what gzip, csv and the decoder raise on other bytes.
    """
    with _opened(path) as content, io.TextIOWrapper(content, encoding="utf-8-sig", newline="") as text:
        lines = _Lines(text, bound)
        rows = csv.reader(lines)
        header = next(filter(None, rows), None)
        if header is None:
            raise BadInput([Fault(where, f"{path.name} is empty.", "Its first line names the columns.")])
        cells, due = _Cells(len(header), bound), 0
        for row in rows:
            if row:
                cells.rows.append(row)
            if lines.letters > due:
                cells.store()
                due = lines.letters + _BLOCK
        cells.store()
    stop_on(_form_faults(path.name, where, header, cells))
    return dict(zip(header, cells.arrays(), strict=True))


class _Lines:
    """The lines of a table, each with its end.

    Attributes:
        letters: How many were read.

    Raises:
        TooLargeTable: If these are more than any table has; ``csv.Error`` if a line is longer than any table's.
    """

    def __init__(self, text: TextIO, bound: int) -> None:
        self.letters, self._read_line, self._bound = 0, text.readline, bound

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        line = self._read_line(_LONGEST_LINE)
        self.letters += len(line)
        if not line:
            raise StopIteration
        if len(line) == _LONGEST_LINE:
            raise csv.Error(f"a line has more than {_LONGEST_LINE:,} letters")
        if self.letters > self._bound:
            raise TooLargeTable(too_large(self.letters, self._bound))
        return line


class TooLargeTable(Exception):
    """A table takes more memory than it may."""


class _Cells:
    """The cells of a table below its header: of each column an array for every few thousand lines.

    Attributes:
        rows: Lines that are in no array yet.
        lines: How many are in arrays.
        ragged: How many lines have another number of cells than the header, and the number of the first in the file.
    """

    def __init__(self, columns: int, bound: int) -> None:
        self.rows, self.lines, self.ragged = list[list[str]](), 0, (0, 0)
        self._bound, self._arrays, self._widest = bound, 0, [1] * columns
        self._blocks: list[list[Names]] = [[] for _ in range(columns)]

    def store(self) -> None:
        """Put the lines of ``rows`` into arrays.

        Raises:
            TooLargeTable: If that takes more memory than the table may.
        """
        rows, self.rows, first = self.rows, [], self.lines + 2
        self.lines += len(rows)
        if set(map(len, rows)) - {len(self._blocks)}:
            wrong = [number for number, row in enumerate(rows, first) if len(row) != len(self._blocks)]
            self.ragged = (self.ragged[0] + len(wrong), self.ragged[1] or wrong[0])
        if self.ragged[0] or not rows:  # it is refused in the end, and its cells are not needed
            return
        columns = list(zip(*rows, strict=True))
        widths = [max(map(len, cells)) for cells in columns]
        self._widest = [max(pair) for pair in zip(self._widest, widths, strict=True)]
        self._arrays += len(widths)
        # numpy gives each cell the room of the longest one of its column, four bytes a letter.
        claimed = 4 * self.lines * sum(self._widest) + _OF_AN_ARRAY * self._arrays
        if claimed > self._bound:
            raise TooLargeTable(too_large(claimed, self._bound))
        for blocks, cells, width in zip(self._blocks, columns, widths, strict=True):
            blocks.append(np.array(cells, dtype=f"<U{max(width, 1)}"))

    def arrays(self) -> Iterator[Names]:
        """Yield the columns ``(lines,)``, each of which is here no more once it is given."""
        for place, blocks in enumerate(self._blocks):
            self._blocks[place] = []
            yield np.concatenate(blocks)


def _foreign_bytes(path: Path) -> str:
    """Say where a file stops being UTF-8."""
    with _opened(path) as content:
        head = content.read(_HEAD)
        content.seek(0)
        for number, line in enumerate(iter(lambda: content.readline(4 * _LONGEST_LINE), b""), start=1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return not_utf8_in(head, number)
    return not_utf8_in(head, 1)


def _form_faults(name: str, where: str, header: Sequence[str], cells: _Cells) -> list[Fault]:
    for character, plural in ((";", "semicolons"), ("\t", "tabs")):
        if len(header) == 1 and character in header[0]:
            problem, remedy = f"the cells of {name} are separated by {plural}.", "Save it with commas between cells."
            return [Fault(where, problem, remedy)]
    if twice := sorted(column for column, count in Counter(header).items() if column and count > 1):
        remedy = "Rename or remove one; the first line must name the columns."
        return [Fault(where, f"{name} has more than one column {quoted(twice)}.", remedy)]
    if not cells.lines:
        return [Fault(where, f"{name} has no rows below its header.")]
    count, first = cells.ragged
    if not count:
        return []
    ragged = f"{counted(count, 'line')} of {name} without the header's {counted(len(header), 'cell')}"
    return [Fault(where, f"{ragged}, line {first} first.", "Quote cells that contain a comma.")]


def column_faults(table: str, columns: Columns, wanted: Mapping[str, str | None]) -> list[Fault]:
    """Find columns that a table lacks; ``wanted`` maps the key that names a column to the column."""
    return [
        Fault(
            where,
            f'"{column}" is not a column of {table}, whose columns are {quoted(columns)}.',
            did_you_mean(column, columns),
            cause="column",
        )
        for where, column in wanted.items()
        if column is not None and column not in columns
    ]


def label_matrix(
    columns: Columns, names: Sequence[str], *, uncertain: LabelPolicy, blank: LabelPolicy, where: str
) -> NDArray[np.float32]:
    """Turn label columns of 1, 0, -1 and blank into float32 ``(n, classes)``.

    Raises:
        BadInput: Naming the column and line of every first cell that is none of these.
    """
    value_of = {**_CELLS, **dict.fromkeys(_UNCERTAIN, _POLICY[uncertain]), **dict.fromkeys(_BLANK, _POLICY[blank])}
    matrix = np.empty((len(columns[names[0]]), len(names)), dtype=np.float32)
    faults = []
    for place, name in enumerate(names):
        cells, inverse = np.unique(columns[name], return_inverse=True)
        foreign = [row for row, cell in enumerate(cells) if cell.strip() not in value_of]
        if foreign:
            line = int(np.flatnonzero(np.isin(inverse, foreign))[0]) + 2
            problem = f'column "{name}" holds "{columns[name][line - 2]}" in line {line}; expected 1, 0, -1 or nothing.'
            faults.append(Fault(where, problem))
        matrix[:, place] = np.array([value_of.get(cell.strip(), np.nan) for cell in cells])[inverse]
    stop_on(faults)
    return matrix


def count_uncertain_and_blank(
    path: Path, names: Sequence[str], largest_mb: int = LARGEST_MB
) -> dict[str, tuple[int, int]]:
    """Return cells of -1 and empty ones in each label column, by its name.

    Raises:
        BadInput: If the table cannot be read.
    """
    columns = read_columns(path, "data.labels", largest_mb)
    cells = {name: np.char.strip(columns[name]) for name in names if name in columns}
    return {
        name: (int(np.isin(of_class, _UNCERTAIN).sum()), int(np.isin(of_class, _BLANK).sum()))
        for name, of_class in cells.items()
    }


def finding_matrix(findings: Names, separator: str, class_names: Sequence[str]) -> NDArray[np.float32]:
    """Turn cells such as ``"Mass|Nodule"`` into 0/1 ``(n, classes)``; other findings are dropped."""
    cells, inverse = np.unique(findings, return_inverse=True)
    named = [{name.strip() for name in cell.split(separator)} for cell in cells]
    of_cell = np.array([[name in names for name in class_names] for names in named], dtype=np.float32)
    return np.asarray(of_cell[inverse], dtype=np.float32)


def part_column(values: Names, where: str) -> Names:
    """Read "train", "val" or "validation", and "test".

    Raises:
        BadInput: Naming every other value.
    """
    cells, inverse = np.unique(values, return_inverse=True)
    unknown = [cell for cell in cells if cell.strip().lower() not in PARTS]
    if unknown:
        problem = f'values are "train", "val" or "validation", and "test"; got {quoted(unknown)}.'
        raise BadInput([Fault(where, problem)])
    return np.array([PARTS[cell.strip().lower()] for cell in cells])[inverse]
