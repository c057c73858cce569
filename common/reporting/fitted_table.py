"""Tables that fit a terminal: names are wrapped and stay whole, figures are never cut, the rest goes below."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.table import Table
from rich.text import Text

from polyclinic.common.system.plain_text import NOT_APPLICABLE

EMPTY = frozenset({"", "–", NOT_APPLICABLE})
"""Cells that say nothing; a column of these alone is left out."""
LEAST_NAME = 12
"""Least width of the column of names."""


@dataclass(frozen=True)
class FittedTable:
    """A table whose first column has the names of its rows.

    Where the columns do not fit beside one another, it is printed as several tables with the same names.

    Attributes:
        caption: Text below the table.
    """

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""

    def drop_empty_columns(self) -> "FittedTable":
        """Return the table without columns, except the first, in which no row has a figure."""
        filled = [
            column
            for column in range(len(self.headings))
            if column == 0 or not self.rows or any(row[column] not in EMPTY for row in self.rows)
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
        """Yield the columns of each table beside the names: as many as fit, in their order."""
        name_width = min(self._measure_column(0), max(LEAST_NAME, options.max_width // 5))
        columns = list[int]()
        for column in range(1, len(self.headings)):
            if columns and self._measure_table([*columns, column], name_width, console, options) > options.max_width:
                yield columns
                columns = []
            columns.append(column)
        yield columns

    def _choose_name_width(self, columns: Sequence[int], console: Console, options: ConsoleOptions) -> int:
        """Return the width of the names: all that the figures leave, if the longest name needs it."""
        natural = self._measure_column(0)
        without_names = self._measure_table(columns, 0, console, options)
        return max(1, min(natural, options.max_width - without_names))

    def _measure_column(self, column: int, *, whole_cells: bool = False) -> int:
        """Return the width that a column needs: its longest cell, or word of text or heading.

        Args:
            whole_cells: Whether texts stay on one line too, as figures do.
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
    """Return the parts of a cell that stay on one line: a figure as a whole, words one by one."""
    return [cell] if any(letter.isdigit() for letter in cell) else cell.split()
