"""The meaning of a table's cells: labels, findings, parts of a split. All text of a cell is normalised and parsed here.

A label column holds 1, 0, -1 (uncertain) or nothing. A column of findings holds names with a separator between them.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.data.base.decoded_size import LARGEST_MB
from common.data.base.spec import LabelPolicy
from common.data.base.splits import Names
from common.data.tables.csv import Columns, read_columns
from common.errors import BadInput, Fault, quoted, stop_on

_PRESENCE = {"1": 1.0, "1.0": 1.0, "0": 0.0, "0.0": 0.0}
_UNCERTAIN = ("-1", "-1.0")
_BLANK = ("", "nan", "NaN")
_POLICY = {"unknown": np.nan, "negative": 0.0, "positive": 1.0}
LABEL_CELLS = frozenset((*_PRESENCE, *_UNCERTAIN, *_BLANK))
PART_NAMES = {"train": "train", "val": "validation", "valid": "validation", "validation": "validation", "test": "test"}


def strip_cells(cells: Names) -> Names:
    """Return cells without white space at their ends."""
    return np.char.strip(cells)


def is_positive(cells: Names) -> NDArray[np.bool_]:
    """Mark the cells of a label column that say that the class is present."""
    return np.isin(strip_cells(cells), [cell for cell, value in _PRESENCE.items() if value])


def is_unlabelled(cells: Names) -> NDArray[np.bool_]:
    """Mark the cells of a label column that say neither present nor absent: uncertain and blank ones."""
    return ~np.isin(strip_cells(cells), list(_PRESENCE))


def split_findings(cell: str, separator: str) -> list[str]:
    """Return the names of findings in a cell such as ``"Mass|Nodule"``, without empty ones."""
    return [name for part in cell.split(separator) if (name := part.strip())]


def label_matrix(
    columns: Columns, names: Sequence[str], *, uncertain: LabelPolicy, blank: LabelPolicy, where: str
) -> NDArray[np.float32]:
    """Turn label columns of 1, 0, -1 and blank into float32 ``(n, classes)``.

    Raises:
        BadInput: Naming, of each column, the first cell that is none of these, and its line.
    """
    value_of = {**_PRESENCE, **dict.fromkeys(_UNCERTAIN, _POLICY[uncertain]), **dict.fromkeys(_BLANK, _POLICY[blank])}
    matrix = np.empty((len(columns[names[0]]), len(names)), dtype=np.float32)
    faults = []
    for place, name in enumerate(names):
        cells, inverse = np.unique(columns[name], return_inverse=True)
        cells = strip_cells(cells)
        foreign = np.flatnonzero(~np.isin(cells, list(value_of)))
        if len(foreign):
            row = int(np.flatnonzero(np.isin(inverse, foreign))[0])
            problem = f'column "{name}" holds "{columns[name][row]}" in line {row + 2}; expected 1, 0, -1 or nothing.'
            faults.append(Fault(where, problem))
        matrix[:, place] = np.array([value_of.get(cell, np.nan) for cell in cells])[inverse]
    stop_on(faults)
    return matrix


def finding_matrix(findings: Names, separator: str, class_names: Sequence[str]) -> NDArray[np.float32]:
    """Turn cells such as ``"Mass|Nodule"`` into 0/1 ``(n, classes)``; other findings are dropped."""
    cells, inverse = np.unique(findings, return_inverse=True)
    named = [set(split_findings(cell, separator)) for cell in cells]
    of_cell = np.array([[name in names for name in class_names] for names in named], dtype=np.float32)
    return np.asarray(of_cell[inverse], dtype=np.float32)


def parse_parts(values: Names, where: str) -> Names:
    """Read a column that says "train", "val" or "validation", and "test".

    Raises:
        BadInput: Naming every other value.
    """
    values, inverse = np.unique(values, return_inverse=True)
    names = [name.lower() for name in strip_cells(values)]
    if unknown := [value for value, name in zip(values, names, strict=True) if name not in PART_NAMES]:
        problem = f'values are "train", "val" or "validation", and "test"; got {quoted(unknown)}.'
        raise BadInput([Fault(where, problem)])
    return np.array([PART_NAMES[name] for name in names])[inverse]


def count_uncertain_and_blank(
    path: Path, names: Sequence[str], largest_mb: int = LARGEST_MB
) -> dict[str, tuple[int, int]]:
    """Count the cells of -1 and the empty ones of each label column, by its name.

    Raises:
        BadInput: If the table cannot be read.
    """
    columns = read_columns(path, "data.labels", largest_mb)
    cells = {name: strip_cells(columns[name]) for name in names if name in columns}
    return {
        name: (int(np.isin(column, _UNCERTAIN).sum()), int(np.isin(column, _BLANK).sum()))
        for name, column in cells.items()
    }
