"""Read CSV tables into columns of normalised text; :mod:`polyclinic.data.tables.cells` interprets the cells.

Tables from many programs are accepted. Cells may be separated by commas, semicolons, tabs or bars. The encoding may be
UTF-8, UTF-16 or Windows-1252 (for bytes that are not valid UTF-8). Cells in quotes may have several lines, and the
first line may be Excel's ``sep=;``.
"""

import codecs
import csv
import gzip
import io
import re
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import IO, cast
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from polyclinic.common.errors import (
    PICTURE_PROBLEM,
    UTF8_REMEDY,
    BadInput,
    Fault,
    describe_non_utf8_file,
    quote_names,
    raise_faults,
    suggest_nearest_name,
)
from polyclinic.common.system.files import find_missing_file_faults
from polyclinic.common.system.plain_text import format_count_with_noun
from polyclinic.data.base.decoded_size import (
    DEFAULT_LARGEST_MB,
    compute_decoded_file_size_limit,
    make_oversized_file_message,
)
from polyclinic.data.base.names import is_blank_cell, normalize_name, normalize_names_in_text
from polyclinic.data.base.splits import StringArray

CSV_SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
_EXCEL_SEPARATOR_LINE = re.compile(r'"?sep=(.)"?[,;\t]*\r?\n?', re.IGNORECASE)
_MAX_LINE_CHARACTERS = 1 << 20
"""Maximum number of characters in a line, and in a cell of several lines."""
_CHARACTERS_PER_BLOCK = 1 << 20
"""Number of characters after which rows, which are Python objects, are converted to columns."""
_MIN_ROWS_TO_DETECT_TITLE = 5
"""A first row with fewer cells is only recognised as a title if the table has at least this many rows."""
_BYTES_PER_COLUMN = 1024
"""Estimated memory for a column."""
_BYTES_PER_CELL = 150
"""Estimated memory for a distinct cell, besides its characters."""
_HEAD_BYTES = 132
"""Number of bytes at the beginning of a file from which other file formats are recognised."""
_CHARACTERS_PER_READ = 1 << 16
"""Number of characters in each read; the separator is guessed from the first read."""
_JSON_START = re.compile(r'\s*(?:\{\s*["}]|\[\s*[\[{])')
_LINE_END = re.compile("\r\n|\r|\n")
_DECODING_ERROR_HANDLER = "windows-1252-where-not-utf-8"
_MAC_ROMAN_LETTERS = re.compile("[a-z][ŠŒŽŸ]|[A-Za-z]Ÿ[a-z]|[a-z]§")
"""Sequences that do not occur in Windows-1252 text; they are ä, å, é, ü and ß in the encoding of old Macs."""


def _decode_as_windows_1252(error: UnicodeError) -> tuple[str, int]:
    """Decode bytes that are not valid UTF-8 as Windows-1252; raise the given error if that fails too."""
    assert isinstance(error, UnicodeDecodeError)
    data, start, end = error.object, error.start, error.end
    try:
        text = data[start:end].decode("cp1252")
    except UnicodeDecodeError:
        raise error from None
    before, after = data[max(start - 1, 0) : start], data[end : end + 1]
    if _MAC_ROMAN_LETTERS.search(before.decode("latin-1") + text + after.decode("latin-1")):
        raise error
    return text, end


codecs.register_error(_DECODING_ERROR_HANDLER, _decode_as_windows_1252)
# The csv module limits a cell to 131,072 letters, for the whole process. A report in a cell may be longer.
csv.field_size_limit(max(csv.field_size_limit(), _MAX_LINE_CHARACTERS))


@dataclass(frozen=True)
class CsvColumn:
    """A column of a table, stored as its distinct cells and an index per row.

    Attributes:
        cells: The distinct cells, normalised, in order of first appearance.
        places: int32 ``(rows,)``, the index in ``cells`` of each row's cell.
        lines: int32 ``(rows,)``, the line of the file in which each row begins; the header is usually in line 1.
    """

    cells: Sequence[str]
    places: NDArray[np.int32]
    lines: NDArray[np.int32]

    def expand_to_row_cells(self) -> StringArray:
        """Return an array ``(rows,)`` with the cell of each row."""
        return np.array(self.cells, dtype=np.str_)[self.places]

    def count_rows_per_cell(self) -> NDArray[np.intp]:
        """Return the number of rows with each distinct cell, in the order of ``cells``."""
        return np.bincount(self.places, minlength=len(self.cells))

    def find_blank_rows(self) -> NDArray[np.bool_]:
        """Return an array ``(rows,)``, True where the cell is blank."""
        return np.array([is_blank_cell(cell) for cell in self.cells], dtype=np.bool_)[self.places]

    def find_lines_of_cells(self, places: Collection[int]) -> NDArray[np.int32]:
        """Return the line numbers of all rows whose cell has one of the indices ``places`` in ``cells``."""
        return self.lines[np.isin(self.places, list(places))]

    def describe_cell_lines(self, places: Sequence[int], limit: int = 5) -> str:
        """Return a text with up to ``limit`` distinct cells and their lines, such as ``"yes" in line 7 (3 lines)``.

        Args:
            places: Indices of the cells in ``cells``.
        """
        return self.describe_cell_part_lines({self.cells[place]: (place,) for place in places}, limit)

    def describe_cell_part_lines(self, parts: Mapping[str, Collection[int]], limit: int = 5) -> str:
        """Return a text with up to ``limit`` parts of cells, each with its first line, for an error message.

        Args:
            parts: Part of a cell, such as the name of a finding -> indices in ``cells`` of the cells that contain it.
        """
        texts = []
        for part, places in list(parts.items())[:limit]:
            lines = self.find_lines_of_cells(places)
            more = f" ({format_count_with_noun(len(lines), 'line')})" if len(lines) > 1 else ""
            name = part[:70].replace("\n", "\\n").replace("\t", "\\t")
            texts.append(f'"{name}" in line {lines[0]}{more}')
        return ", ".join(texts) + (f" and {len(parts) - limit:,} more" if len(parts) > limit else "")


class CsvTable(Mapping[str, StringArray]):
    """The columns of a table by name.

    Attributes:
        lines: int32 ``(rows,)``, the line of the file in which each row begins.
        unnamed: Number of non-empty columns without a name, which are left out.
    """

    def __init__(self, columns: Mapping[str, CsvColumn], lines: NDArray[np.int32], unnamed: int = 0) -> None:
        self._columns = columns
        self.lines = lines
        self.unnamed = unnamed

    def __getitem__(self, name: str) -> StringArray:
        return self.get_column(name).expand_to_row_cells()

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def get_column(self, name: str, *, with_line_ends: bool = False) -> CsvColumn:
        """Return a column as its distinct cells; indexing the table instead gives the cell of each row.

        Args:
            with_line_ends: True keeps line ends and tabs within a cell; False converts them to spaces.
        """
        column = self._columns[name]
        if with_line_ends or not any("\n" in cell or "\t" in cell for cell in column.cells):
            return column
        flat = dict[str, int]()
        places = [flat.setdefault(" ".join(cell.split()), len(flat)) for cell in column.cells]
        return CsvColumn(list(flat), np.array(places, dtype=np.int32)[column.places], column.lines)

    def select_rows(self, index: NDArray[np.intp] | NDArray[np.bool_]) -> "CsvTable":
        """Return the table with only these rows; cells that are in no remaining row are dropped."""
        lines = self.lines[index]
        columns = {}
        for name, column in self._columns.items():
            distinct, places = np.unique(column.places[index], return_inverse=True)
            cells = [column.cells[cell_index] for cell_index in distinct]
            columns[name] = CsvColumn(cells, places.reshape(-1).astype(np.int32), lines)
        return CsvTable(columns, lines, self.unnamed)


_open_tables = WeakValueDictionary[tuple[object, ...], CsvTable]()
"""Identity of a file -> its table, while the table is in memory. ``flwr-sim init`` reads a table twice: to inspect it,
and to check it as in a run."""


def read_csv_table(
    path: Path, where: str, largest_mb: int = DEFAULT_LARGEST_MB, *, has_headings: bool = True
) -> CsvTable:
    """Read a ``.csv`` or ``.csv.gz`` table; empty lines are left out.

    A table that is still in memory is not read again, unless the file has changed.

    Args:
        where: The configuration key that names the table, for error messages.
        largest_mb: Size limit in MiB, which is higher for a large file (:mod:`polyclinic.data.base.decoded_size`).
        has_headings: False for a table without headings; its columns are then named column1, column2 and so on.

    Raises:
        BadInput: If the file is missing, empty, not text or too large, or has rows of different lengths.
    """
    raise_faults(find_missing_file_faults(where, path))
    try:
        with _open_csv_file(path) as content:
            head = content.read(_HEAD_BYTES).removeprefix(codecs.BOM_UTF8).decode(errors="replace")
        if _JSON_START.match(head):
            remedy = "Write a table of it. Of annotations as COCO has them, with lines of Python: docs/recipes.md, "
            remedy += '"Annotations in COCO\'s JSON".'
            raise BadInput([Fault(where, f"{path.name} is JSON, and no table.", remedy)])
        try:
            file = path.stat()
            key = path.absolute(), file.st_size, file.st_mtime_ns, file.st_ctime_ns, largest_mb, has_headings
            columns = _open_tables.get(key)
            if columns is None:
                limit = compute_decoded_file_size_limit(file.st_size, largest_mb)
                columns = _read_table_in_blocks(path, where, limit, has_headings=has_headings)
                _open_tables[key] = columns
            return columns
        except UnicodeDecodeError:
            problem = _describe_non_text_file(path)
        remedy = "Name a csv file." if problem == PICTURE_PROBLEM else f"{UTF8_REMEDY} In Excel: CSV UTF-8."
        raise BadInput([Fault(where, f"{path.name} {problem}", remedy)])
    except PermissionError:
        remedy = "Give the account that runs this program the right to read it."
        raise BadInput([Fault(where, f"{path.name} cannot be read: permission denied.", remedy)]) from None
    except (OSError, EOFError, zlib.error):
        raise BadInput([Fault(where, f"{path.name} cannot be read: damaged or cut off.", "Copy it again.")]) from None


def read_first_rows(path: Path, count: int) -> list[list[str]]:
    """Return the first rows of a table, including the headings, with normalised cells; blank rows are left out.

    The result is empty if the file cannot be read; :func:`read_csv_table` then raises an error with the reason.
    """
    try:
        with _open_csv_file(path) as content, _open_as_text(content) as file:
            text = file.read(_CHARACTERS_PER_READ)
        head = io.StringIO(text, newline="").readlines()
        mark = _EXCEL_SEPARATOR_LINE.fullmatch(head[0]) if head else None
        separator = mark[1] if mark else _guess_csv_delimiter(head)
        rows = csv.reader(head[1:] if mark else head, delimiter=separator, skipinitialspace=True)
        return [[normalize_name(cell) for cell in row] for row in islice(filter(any, rows), count)]
    except (OSError, EOFError, UnicodeError, zlib.error, csv.Error):
        return []


def _open_as_text(content: IO[bytes]) -> io.TextIOWrapper:
    """Return a text stream of a table that is open at its beginning; the encoding is detected."""
    is_utf_16 = content.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    content.seek(0)
    encoding, errors = ("utf-16", "strict") if is_utf_16 else ("utf-8-sig", _DECODING_ERROR_HANDLER)
    return io.TextIOWrapper(content, encoding, errors, newline="")


def is_utf_8_table(path: Path) -> bool:
    """Return True if a table is UTF-8 or UTF-16; a table with other bytes is read as Windows-1252."""
    with _open_csv_file(path) as content:
        try:
            for number, line in enumerate(content):
                if not number and line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                    return True
                line.decode()
        except UnicodeDecodeError:
            return False
    return True


def _open_csv_file(path: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


class _SizeCountingLineReader:
    """Iterates over the lines of a text file, which is read in pieces, and counts the characters.

    Attributes:
        letters: Number of characters that have been read.

    Raises:
        csv.Error, UnicodeDecodeError: If a line is too long, or contains a zero byte.
    """

    def __init__(self, text: IO[str]) -> None:
        self.letters = 0
        self._text = text

    def __iter__(self) -> Iterator[str]:
        rest = ""
        while piece := self._text.read(_CHARACTERS_PER_READ):
            self.letters += len(piece)
            if "\0" in piece:
                raise UnicodeDecodeError("utf-8", b"\0", 0, 1, "no text has this byte")
            lines = io.StringIO(rest + piece, newline="").readlines()
            rest = lines.pop()  # this line may continue in the next piece
            if len(rest) > _MAX_LINE_CHARACTERS:
                raise csv.Error(f"a line has more than {_MAX_LINE_CHARACTERS:,} letters")
            yield from lines
        if rest:
            yield rest


def _read_table_in_blocks(path: Path, where: str, limit: int, *, has_headings: bool) -> CsvTable:
    """Read a table in blocks of rows, because rows as Python objects take ten times the memory of columns."""

    def check_memory_limit(claimed: int) -> None:
        if claimed > limit:
            remedy = "If that is right, raise this key; else get the file again, or remove columns of long texts."
            raise BadInput([Fault(where, f"{path.name}: {make_oversized_file_message(claimed, limit)}.", remedy)])

    with _open_csv_file(path) as content:
        lines = _SizeCountingLineReader(_open_as_text(content))
        line_iterator = iter(lines)
        head = list[str]()
        table = None
        line = 1
        try:
            for text in line_iterator:
                head.append(text)
                if lines.letters > len(head[0]) + _CHARACTERS_PER_READ:
                    break
            mark = _EXCEL_SEPARATOR_LINE.fullmatch(head[0]) if head else None
            separator = mark[1] if mark else _guess_csv_delimiter(head)
            first_lines = head[1:] if mark else head
            rows = csv.reader(
                chain(first_lines, line_iterator), delimiter=separator, skipinitialspace=True, strict=True
            )
            header = next(filter(any, rows), None)
            if header is None:
                raise BadInput([Fault(where, f"{path.name} is empty.", "Its first line names the columns.")])
            line = rows.line_num + len(head) - len(first_lines) + 1
            raise_faults(_find_title_faults(first_lines, separator, path.name, where) if has_headings else [])
            data: Iterable[list[str]] = rows
            if not has_headings:
                line -= _count_lines_of_row(header)
                data = chain([header], rows)
                header = [f"column{number}" for number in range(1, len(header) + 1)]
            table = _CsvTableBuilder(header, separator, line, check_memory_limit)
            next_block = 0
            for row in data:
                table.rows.append(row)
                if lines.letters > next_block:
                    check_memory_limit(lines.letters)
                    table.convert_rows_to_columns()
                    next_block = lines.letters + _CHARACTERS_PER_BLOCK
            table.convert_rows_to_columns()
        except csv.Error as error:
            line = line if table is None else table.next_line_number
            problem = f"the row of {path.name} that begins in line {line} cannot be read: {error}."
            remedy = "A cell that begins with a quote ends with one, and quotes within it are written twice."
            if "field limit" in str(error):
                remedy = f"A cell may have {_MAX_LINE_CHARACTERS:,} letters. Remove the column of long texts. "
                remedy += "If no text is so long, a quote is missing at the end of a cell."
            raise BadInput([Fault(where, problem, remedy)]) from None
    return table.build_csv_table(path.name, where)


def _count_lines_of_row(row: Sequence[str]) -> int:
    """Return the number of lines of the file that a row takes."""
    text = ",".join(row)  # the comma keeps \r and \n of two cells apart
    return 1 + (len(_LINE_END.findall(text)) if "\n" in text or "\r" in text else 0)


def _guess_csv_delimiter(head: Sequence[str]) -> str:
    """Guess the separator of cells from the first lines of a table.

    A separator that gives all lines equally many cells is preferred; among several, the one with the most cells. If no
    separator divides the first line, the result is a comma.
    """
    scores = {}
    for separator in CSV_SEPARATORS:
        try:
            widths = [len(row) for row in csv.reader(head, delimiter=separator, skipinitialspace=True) if any(row)]
        except csv.Error:
            widths = []
        if widths and widths[0] > 1:
            # The last row may be incomplete, because it continues after the first lines.
            scores[separator] = (len(set(widths[:-1])) <= 1, widths[0])
    return max(scores, key=lambda separator: scores[separator], default=",")


def _find_title_faults(head: Sequence[str], separator: str, name: str, where: str) -> list[Fault]:
    """Return a fault if the first line has fewer cells than the lines below it, which all have equally many cells.

    Args:
        head: The first lines of the table.
        separator: The separator that was guessed from these lines.
        name: The file's name.
        where: The configuration key that names the table.
    """
    for sign in (separator, *CSV_SEPARATORS):
        try:
            widths = [len(row) for row in csv.reader(head, delimiter=sign, skipinitialspace=True) if any(row)]
        except csv.Error:
            continue
        # The last row may be incomplete, because it continues after the first lines.
        first = widths[0] if widths else 0
        below = set(widths[1:-1])
        if sign == separator and first > 1 and below <= {first}:
            return []
        if len(widths) >= _MIN_ROWS_TO_DETECT_TITLE and len(below) == 1 and first < max(below):
            cells = format_count_with_noun(first, "cell")
            problem = f"the first line of {name} has {cells}, and the lines below it have {max(below)}."
            remedy = "If lines stand above the headings, delete them; else name each column in the first line."
            return [Fault(where, problem, remedy)]
    return []


class _DistinctCellIndex(dict[str, int]):
    """Maps each cell, as written in the file, to the index of its normalised text in ``distinct``.

    Line ends and tabs between the names in a cell stay, because they may separate findings.

    Attributes:
        distinct: The distinct normalised cells.
        longest: Length of the longest cell.
        size: Estimated memory in bytes.
    """

    def __init__(self) -> None:
        self.distinct = list[str]()
        self.longest = 1
        self.size = _BYTES_PER_COLUMN

    def __missing__(self, cell: str) -> int:
        name = normalize_names_in_text(cell) if "\n" in cell or "\r" in cell or "\t" in cell else normalize_name(cell)
        self.size += _BYTES_PER_CELL + len(cell)
        if name == cell:
            index = len(self.distinct)
            self.distinct.append(cell)
            self.longest = max(self.longest, len(cell))
        else:
            index = self[name]
        self[cell] = index
        return index


class _CsvTableBuilder:
    """Collects the rows of a table, and converts them to columns block by block.

    Attributes:
        rows: Rows that are not converted yet.
        count: Number of converted rows.
        ragged: Number of rows with more or fewer cells than the header, and the line of the first such row.
    """

    def __init__(
        self, header: Sequence[str], separator: str, first_line: int, check_memory_limit: Callable[[int], None]
    ) -> None:
        check_memory_limit(_BYTES_PER_COLUMN * len(header))
        self.header = [normalize_name(name) for name in header]
        self.rows = list[list[str]]()
        self.count = 0
        self.ragged = (0, 0)
        self._separator = separator
        self._line = first_line
        self._check_memory_limit = check_memory_limit
        self._cells = [_DistinctCellIndex() for _ in header]
        self._places: list[list[NDArray[np.int32]]] = [[] for _ in header]
        self._lines = list[NDArray[np.int32]]()

    @property
    def next_line_number(self) -> int:
        """Line number at which the next row, after all rows in ``rows``, begins."""
        return self._line + sum(map(_count_lines_of_row, self.rows))

    def convert_rows_to_columns(self) -> None:
        """Convert the collected rows to columns, which take less memory; empty rows are left out.

        Raises:
            BadInput: If the columns exceed the memory limit.
            csv.Error: If a stray pair of quotes encloses whole rows; ``next_line_number`` is then the first line of the
                row with these quotes.
        """
        rows, self.rows = self.rows, []
        counts = np.fromiter(map(_count_lines_of_row, rows), np.int32, len(rows))
        begins = self._line + np.cumsum(counts, dtype=np.int32) - counts
        self._line += int(counts.sum())
        suspicious = list[tuple[int, list[tuple[int, str]]]]()
        for row in np.flatnonzero(counts > 1).tolist():
            inner_cells = self._find_cells_inside_quotes(rows[row])
            if inner_cells:
                suspicious.append((int(begins[row]), inner_cells))
        if not all(map(any, rows)):
            filled = [row for row, cells in enumerate(rows) if any(cells)]
            rows, begins = [rows[row] for row in filled], begins[filled]
        self.count += len(rows)
        if set(map(len, rows)) - {len(self.header)}:
            wrong = [int(line) for line, row in zip(begins, rows, strict=True) if len(row) != len(self.header)]
            self.ragged = (self.ragged[0] + len(wrong), self.ragged[1] or wrong[0])
        if self.ragged[0] or not rows:  # a ragged table is refused later: its cells are not needed
            return
        self._lines.append(begins)
        for cells, places, column in zip(self._cells, self._places, zip(*rows, strict=True), strict=True):
            places.append(np.fromiter(map(cells.__getitem__, column), np.int32, len(rows)))
        self._check_memory_limit(sum(cells.size for cells in self._cells) + 4 * self.count * (len(self.header) + 1))
        # In a NumPy array, each cell takes as much memory as the longest cell, four bytes per character.
        self._check_memory_limit(4 * self.count * max(cells.longest for cells in self._cells))
        for line, inner_cells in suspicious:
            if any(cell and cell in self._cells[column] for column, cell in inner_cells):
                self._line = line
                raise csv.Error("a pair of quotes holds whole rows")

    def _find_cells_inside_quotes(self, row: Sequence[str]) -> list[tuple[int, str]]:
        """Return the original cells of rows that stray quotes have joined into one cell of ``row``.

        If two cells begin with a quote and neither ends with one, a CSV reader joins all text between the quotes into
        one cell of several lines. Each line, split at separators, is then as wide as the header. In rare cases this is
        also true of ordinary text. Therefore the caller checks if the original cells also occur in other rows.

        Returns:
            Column index and text of each original cell, for the first joined cell of the row; empty if there is none.
        """
        for column, cell in enumerate(row):
            first, *others = [text.split(self._separator) for text in _LINE_END.split(cell)]
            widths = [column + len(first), *map(len, others)]
            widths[-1] += len(row) - column - 1
            if others and set(widths) == {len(self.header)}:
                return [*enumerate(first, column), *(pair for cells in others for pair in enumerate(cells))]
        return []

    def build_csv_table(self, name: str, where: str) -> CsvTable:
        """Return all columns that have a heading, as a table.

        Args:
            name: The file's name, for error messages.
            where: The configuration key that names the table, for error messages.

        Raises:
            BadInput: If a heading occurs twice, if there are no rows, or if a row is longer or shorter than the header.
        """
        fault: Fault | None = None
        if repeated := sorted(column for column, count in Counter(self.header).items() if column and count > 1):
            problem = f"{name} has more than one column {quote_names(repeated)}."
            fault = Fault(where, problem, "Rename or remove one; the first line must name the columns.")
        elif not self.count:
            fault = Fault(where, f"{name} has no rows below its header.")
        elif self.ragged[0]:
            width = format_count_with_noun(len(self.header), "cell")
            kind = CSV_SEPARATORS.get(self._separator, f'"{self._separator}"')
            problem = f"{format_count_with_noun(self.ragged[0], 'line')} of {name} without the header's {width}, line "
            problem += f"{self.ragged[1]} first; its cells are separated by {kind}."
            fault = Fault(where, problem, f"Quote cells that contain {kind}.")
        raise_faults([fault] if fault else [])
        lines = np.concatenate(self._lines)
        columns = {}
        unnamed = 0
        for heading, cells, places in zip(self.header, self._cells, self._places, strict=True):
            if heading:
                columns[heading] = CsvColumn(cells.distinct, np.concatenate(places), lines)
            else:
                # pandas and R write row numbers, 0, 1, ... or 1, 2, ..., without a heading.
                first = cells.distinct[0]
                are_row_numbers = first in ("0", "1") and all(
                    cell == str(int(first) + row) for row, cell in enumerate(cells.distinct)
                )
                unnamed += any(cells.distinct) and not are_row_numbers
            cells.clear()
            places.clear()
        return CsvTable(columns, lines, unnamed)


def _describe_non_text_file(path: Path) -> str:
    """Return an error message for a file that is not text, with the number of the first invalid line."""
    with _open_csv_file(path) as content:
        head = content.read(_HEAD_BYTES)
        content.seek(0)
        for number, line in enumerate(iter(lambda: content.readline(4 * _MAX_LINE_CHARACTERS), b""), start=1):
            try:
                if b"\0" not in line:
                    line.decode("utf-8", _DECODING_ERROR_HANDLER)
                    continue
            except UnicodeDecodeError:
                pass
            return describe_non_utf8_file(head, number)
    return describe_non_utf8_file(head, 1)


def find_missing_column_faults(table: str, columns: Iterable[str], required: Mapping[str, str | None]) -> list[Fault]:
    """Return a fault for each required column that the table lacks.

    Args:
        table: Name of the table, for the messages.
        columns: The columns of the table.
        required: Configuration key -> name of the column; None if the key is not set.
    """
    names, faults = list(columns), list[Fault]()
    for where, column in required.items():
        if column is not None and normalize_name(column) not in names:
            problem = f'"{column}" is not a column of {table}, whose columns are {quote_names(names)}.'
            faults.append(Fault(where, problem, suggest_nearest_name(column, names), cause="column"))
    return faults
