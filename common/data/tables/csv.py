"""CSV tables as columns of strings, and label columns as numbers."""

import csv
import gzip
import io
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.data.base.spec_base import LabelPolicy
from common.data.splits.patient_disjoint import Names
from common.errors import PICTURE, SAVE_AS_UTF8, BadInput, Fault, did_you_mean, not_utf8, quoted, stop_on
from common.system.files import missing_file
from common.system.formatting import counted

Columns = Mapping[str, Names]

_CELLS = {"1": 1.0, "1.0": 1.0, "0": 0.0, "0.0": 0.0}
_UNCERTAIN = ("-1", "-1.0")
_BLANK = ("", "nan", "NaN")
LABEL_CELLS = frozenset((*_CELLS, *_UNCERTAIN, *_BLANK))
SAID_CELLS = tuple(_CELLS)
"""Cells that say whether a class is present."""
POSITIVE_CELLS = tuple(cell for cell, value in _CELLS.items() if value)
_POLICY = {"unknown": np.nan, "negative": 0.0, "positive": 1.0}
PARTS = {"train": "train", "val": "validation", "valid": "validation", "validation": "validation", "test": "test"}


def read_columns(path: Path, where: str) -> Columns:
    """Read a ``.csv`` or ``.csv.gz`` into one array of strings per column.

    Raises:
        BadInput: If the file is missing, empty, not UTF-8 or ragged.
    """
    stop_on(missing_file(where, path))
    header, *rows = _rows_of(path, where)
    stop_on(_header_faults(path.name, where, header) or _form_faults(path.name, where, header, rows))
    return {name: np.array(cells, dtype=np.str_) for name, cells in zip(header, zip(*rows, strict=True), strict=True)}


def _rows_of(path: Path, where: str) -> list[list[str]]:
    """The lines of a table that are not blank, at least one."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error):
        raise BadInput([Fault(where, f"{path.name} cannot be read: damaged or cut off.", "Copy it again.")]) from None
    try:
        rows = [row for row in csv.reader(io.StringIO(content.decode("utf-8-sig"), newline="")) if row]
    except UnicodeDecodeError as error:
        problem = not_utf8(content, error)
        remedy = "Name a csv file." if problem == PICTURE else f"{SAVE_AS_UTF8} In Excel: CSV UTF-8."
        raise BadInput([Fault(where, f"{path.name} {problem}", remedy)]) from None
    except csv.Error as error:
        raise BadInput([Fault(where, f"{path.name} cannot be read as a CSV table: {error}.")]) from None
    if not rows:
        raise BadInput([Fault(where, f"{path.name} is empty.", "Its first line names the columns.")])
    return rows


def _header_faults(name: str, where: str, header: Sequence[str]) -> list[Fault]:
    for character, called in ((";", "semicolons"), ("\t", "tabs")):
        if len(header) == 1 and character in header[0]:
            return [
                Fault(where, f"the cells of {name} are separated by {called}.", "Save it with commas between cells.")
            ]
    twice = sorted({column for column in header if column and header.count(column) > 1})
    remedy = "Rename or remove one; the first line must name the columns."
    return [Fault(where, f"{name} has more than one column {quoted(twice)}.", remedy)] if twice else []


def _form_faults(name: str, where: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[Fault]:
    if not rows:
        return [Fault(where, f"{name} has no rows below its header.")]
    ragged = [number for number, row in enumerate(rows, start=2) if len(row) != len(header)]
    if not ragged:
        return []
    found = f"{counted(len(ragged), 'line')} of {name} without the header's {counted(len(header), 'cell')}"
    problem = f"{found}, line {ragged[0]} first."
    return [Fault(where, problem, "Quote cells that contain a comma.")]


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


def count_uncertain_and_blank(path: Path, names: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Cells of -1 and empty ones in each label column, by its name.

    Raises:
        BadInput: If the table cannot be read.
    """
    columns = read_columns(path, "data.labels")
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
