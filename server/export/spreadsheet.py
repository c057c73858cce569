"""Tables for a person: csv files in which no text is a formula in any spreadsheet.

After OWASP, "CSV Injection" (https://owasp.org/www-community/attacks/CSV_Injection). Names of files and classes come
from other hospitals, and a spreadsheet calculates a cell that begins with ``=``, ``+``, ``-`` or ``@``, quoted or not.
"""

import csv
import io
import re
from collections.abc import Iterable

from common.system.plain_text import escaped

Cell = str | float | None

_FORMULA = re.compile(r'(?<![^,;|"])(?=\s*[=+\-@＝＋－＠﹦﹢﹣﹫−])')
"""The place before a formula (wide signs count as the plain ones): at the start of a cell, or where another separator
starts one. A German spreadsheet cuts a line at ``;``, also within quotes that do not open the line."""


def table_text(rows: Iterable[Iterable[Cell]]) -> bytes:
    """Return rows as csv in UTF-8: texts quoted, with an apostrophe before each formula; numbers bare, six decimals."""
    lines = io.StringIO(newline="")
    writer = csv.writer(lines, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")
    writer.writerows(map(_cell, row) for row in rows)
    return lines.getvalue().encode()


def _cell(cell: Cell) -> Cell:
    if isinstance(cell, str):
        return _FORMULA.sub("'", escaped(cell))
    return cell if cell is None or isinstance(cell, int) else round(float(cell), 6)
