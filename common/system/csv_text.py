"""Write tables as csv text that is safe to open in a spreadsheet."""

import csv
import io
import re
from collections.abc import Iterable

from polyclinic.common.system.plain_text import escape_unplain_characters

Cell = str | float | None

_FORMULA_START = re.compile(r'(?<![^,;|"])(?=\s*[=+\-@＝＋－＠﹦﹢﹣﹫−])')
"""Position before a formula, whose first sign may be a wide one: at the start of a cell, or after another separator.

German spreadsheets split a line at ``;``, even inside quotes that do not start the line.
"""


def format_rows_as_csv(rows: Iterable[Iterable[Cell]]) -> bytes:
    """Return rows as csv in UTF-8; put an apostrophe before texts that a spreadsheet would execute as a formula."""

    def escape_csv_cell(cell: Cell) -> Cell:
        if isinstance(cell, str):
            return _FORMULA_START.sub("'", escape_unplain_characters(cell))
        return cell if cell is None or isinstance(cell, int) else round(float(cell), 6)

    lines = io.StringIO(newline="")
    writer = csv.writer(lines, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")
    writer.writerows(map(escape_csv_cell, row) for row in rows)
    return lines.getvalue().encode()
