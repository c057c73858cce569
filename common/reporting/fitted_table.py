"""Tables that fit a terminal: names are wrapped, figures are never cut, and columns without space go into a table
below.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.table import Table
from rich.text import Text

from polyclinic.common.system.plain_text import NOT_APPLICABLE

EMPTY_CELLS = frozenset({"", "–", NOT_APPLICABLE})
"""Cells without information; a column with only such cells is left out."""
MIN_NAME_WIDTH = 12
"""Minimum width of the first column, in characters."""


@dataclass(frozen=True)
class FittedTable:
    """A table whose first column contains the names of its rows.

    If the columns do not fit side by side, it is printed as several tables with the same names.

    Attributes:
        title: Text above the table.
        headings: Heading of each column.
        rows: Cells of each row.
        caption: Text below the table.
    """

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""

    def drop_empty_columns(self) -> "FittedTable":
        """Return the table without empty columns; the first column always stays."""
        filled = [
            column
            for column in range(len(self.headings))
            if column == 0 or not self.rows or any(row[column] not in EMPTY_CELLS for row in self.rows)
        ]
        rows = tuple(tuple(row[column] for column in filled) for row in self.rows)
        return FittedTable(self.title, tuple(self.headings[column] for column in filled), rows, self.caption)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text | Table]:
        if self.title:
            yield Text(self.title, style="italic")
        for columns in self._split_columns(console, options):
            name_width = self._choose_name_width(columns, console, options)
            whole = self._make_table(columns, self._measure_column(0), whole_cells=True)
            fits = console.measure(whole, options=options.update(width=10_000)).maximum <= options.max_width
            yield whole if fits else self._make_table(columns, name_width)
        if self.caption:
            yield Text(self.caption, style="dim")

    def _split_columns(self, console: Console, options: ConsoleOptions) -> Iterator[list[int]]:
        """Yield the columns of each printed table, without the names: as many as fit, in order."""
        name_width = min(self._measure_column(0), max(MIN_NAME_WIDTH, options.max_width // 5))
        columns = list[int]()
        for column in range(1, len(self.headings)):
            if columns and self._measure_table([*columns, column], name_width, console, options) > options.max_width:
                yield columns
                columns = []
            columns.append(column)
        yield columns

    def _choose_name_width(self, columns: Sequence[int], console: Console, options: ConsoleOptions) -> int:
        """Return the width of the names: the longest name, or the width that the other columns leave."""
        natural = self._measure_column(0)
        without_names = self._measure_table(columns, 0, console, options)
        return max(1, min(natural, options.max_width - without_names))

    def _measure_column(self, column: int, *, whole_cells: bool = False) -> int:
        """Return the width that a column needs: its longest unbreakable text.

        Args:
            column: Index of the column.
            whole_cells: True to keep texts on one line, like figures.
        """
        cells = [row[column] for row in self.rows]
        if column == 0:
            return max(map(cell_len, (self.headings[0], *cells)), default=0)
        pieces = cells if whole_cells else [piece for cell in cells for piece in _list_unbreakable_pieces(cell)]
        return max(map(cell_len, (*self.headings[column].split(), *pieces)), default=0)

    def _measure_table(self, columns: Sequence[int], name_width: int, console: Console, options: ConsoleOptions) -> int:
        wide = options.update(width=10_000)
        return console.measure(self._make_table(columns, max(1, name_width)), options=wide).maximum - (not name_width)

    def _make_table(self, columns: Sequence[int], name_width: int, *, whole_cells: bool = False) -> Table:
        table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column(Text(self.headings[0]), width=name_width, overflow="fold")
        for column in columns:
            width = self._measure_column(column, whole_cells=whole_cells)
            table.add_column(Text(self.headings[column]), width=width, justify="right")
        for row in self.rows:
            table.add_row(*(Text(row[column]) for column in (0, *columns)))
        return table


def _list_unbreakable_pieces(cell: str) -> Iterable[str]:
    """Return the parts of a cell that stay on one line: the whole cell if it has a digit, else its words."""
    return [cell] if any(letter.isdigit() for letter in cell) else cell.split()
