"""Guesses of the purpose of each column of a table of labels, from the columns' names and cells.

The result is a proposal that a person reads: the caller writes it down with what it rests on.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.data.base.splits import Names
from common.data.images.reading import PICTURE_SUFFIXES
from common.data.tables.cells import LABEL_CELLS, PART_NAMES, is_positive, split_findings, strip_cells
from common.data.tables.csv import Columns
from common.errors import BadInput, Fault, quoted

_PATIENT = re.compile(r"(^|[^a-z])(patient|subject|person|lesion|mrn|pid)", re.IGNORECASE)
_SPLIT = re.compile(r"^(split|part|partition|set|subset)$", re.IGNORECASE)
_FINDINGS = re.compile(r"finding|label|diagnos|class|dx|disease", re.IGNORECASE)
_SEPARATORS = ("|", ";")
_MOST_CLASSES = 60
_FEW_CLASSES = 2
_LOOKED_AT = 200


@dataclass(frozen=True)
class ColumnRoles:
    """The purpose of each column.

    Attributes:
        image: The column of the names of picture files.
        patient: The column of patients; None where no column looks like it.
        split: The column of the parts train, validation and test; None where there is none.
        label_columns: One column a class; empty where ``finding`` names the classes.
        finding: One column with names of classes, with ``separator`` between them.
        classes: Each class with the number of rows that show it, in the order of the table or by frequency.
        exclusive: True where each row shows exactly one class.
    """

    image: str
    patient: str | None
    split: str | None
    label_columns: tuple[str, ...]
    finding: str | None
    separator: str
    classes: Mapping[str, int]
    exclusive: bool


def image_column(columns: Columns) -> str:
    """Return the column that names picture files.

    Raises:
        BadInput: If there is none.
    """
    for name, cells in columns.items():
        looked_at = [cell.lower() for cell in cells[:_LOOKED_AT]]
        if sum(cell.endswith(PICTURE_SUFFIXES) for cell in looked_at) > len(looked_at) / 2:
            return name
    problem = f"no column of the table names pictures, files that end in {quoted(PICTURE_SUFFIXES)}"
    problem += f"; it has {quoted(columns)}."
    raise BadInput([Fault("--image-column", problem, "Name the column of picture files.")])


def patient_column(columns: Iterable[str], others: Collection[str] = ()) -> str | None:
    """Return the first column whose name says that it names patients; ``others`` are for something else."""
    return next((name for name in columns if name not in others and _PATIENT.search(name)), None)


def guess_roles(columns: Columns, image: str, patient: str | None = None) -> ColumnRoles:
    """Guess the purpose of each column.

    Args:
        image: The column of picture files.
        patient: The column of patients, where the caller knows it.

    Raises:
        BadInput: If no column holds labels.
    """
    patient = patient or patient_column(columns, (image,))
    values = {name: set(strip_cells(np.unique(cells)).tolist()) for name, cells in columns.items()}
    part_values = {name: {value.lower() for value in values[name]} for name in columns if _SPLIT.match(name)}
    split = next((name for name, parts in part_values.items() if parts <= PART_NAMES.keys()), None)
    rest = [name for name in columns if name not in (image, patient, split)]
    positives = {name: is_positive(columns[name]) for name in rest if values[name] <= LABEL_CELLS}
    labels = tuple(name for name, positive in positives.items() if positive.any() and len(values[name]) > 1)
    if labels:
        counts = {name: int(positives[name].sum()) for name in labels}
        exclusive = len(labels) > 1 and bool((np.sum([positives[name] for name in labels], axis=0) == 1).all())
        return ColumnRoles(image, patient, split, labels, None, "|", counts, exclusive)
    finding, separator, counts = _finding_column(columns, rest)
    one_each = not any(separator in cell for cell in np.unique(columns[finding]))
    return ColumnRoles(image, patient, split, (), finding, separator, counts, one_each)


def _finding_column(columns: Columns, rest: Iterable[str]) -> tuple[str, str, dict[str, int]]:
    """Return the column whose cells name classes, its separator, and the rows of each class.

    A column with a name such as "Findings" comes first.

    Raises:
        BadInput: If there is none.
    """
    for name in sorted(rest, key=lambda column: not _FINDINGS.search(column)):
        separator = next((mark for mark in _SEPARATORS if any(mark in cell for cell in columns[name])), "|")
        counts = Counter(finding for cell in columns[name] for finding in split_findings(cell, separator))
        if _FEW_CLASSES <= len(counts) <= _MOST_CLASSES and len(counts) < len(columns[name]):
            return name, separator, dict(counts.most_common())
    problem = f"no column holds labels, as 1, 0, -1 or nothing for each class, or as names; it has {quoted(columns)}."
    raise BadInput([Fault("labels", problem, "Give each class a column of 1 (present) and 0 (absent).")])


def picture_folder(table: Path, names: Names) -> Path | None:
    """Return the folder beside a table in which most of its pictures lie; None where there is none."""
    beside = [table.parent, *sorted(folder for folder in table.parent.rglob("*") if folder.is_dir())]
    looked_at = names[:_LOOKED_AT]
    present = {folder: sum((folder / name).is_file() for name in looked_at) for folder in beside}
    best = max(present, key=lambda folder: present[folder])
    return best if present[best] else None
