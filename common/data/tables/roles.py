"""Guesses of the purpose of each column of a table of labels, from the columns' names and cells.

The result is a proposal that a person reads: the caller writes it down with what it rests on.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.data.base.names import is_blank
from common.data.base.spec import NO_FINDING
from common.data.images.reading import PICTURE_SUFFIXES
from common.data.tables.cells import PART_NAMES, read_label, split_findings
from common.data.tables.csv import Columns
from common.data.tables.files import FolderListings
from common.errors import BadInput, Fault, quoted

_PATIENT = re.compile(r"(^|[^a-z])(patient|subject|person|lesion|mrn|pid)", re.IGNORECASE)
_SPLIT = re.compile(r"^(split|part|partition|set|subset)$", re.IGNORECASE)
_FINDINGS = re.compile(r"finding|label|diagnos|class|dx|disease", re.IGNORECASE)
_SEPARATORS = ("|", ";")
_MOST_CLASSES = 60
_FEW_CLASSES = 2
_LOOKED_AT = 200
_NO_FINDING = frozenset(name.casefold() for name in NO_FINDING)


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
    for name in columns:
        looked_at = [cell.lower() for cell in columns.column(name).cells[:_LOOKED_AT]]
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
    cells = {name: columns.column(name).cells for name in columns}
    part_values = {name: {cell.casefold() for cell in cells[name]} for name in columns if _SPLIT.match(name)}
    split = next((name for name, parts in part_values.items() if parts <= PART_NAMES.keys()), None)
    rest = [name for name in columns if name not in (image, patient, split)]
    counts = dict[str, int]()
    labelled = np.zeros(len(columns.lines), dtype=np.intp)  # classes that each row shows
    for name in rest:
        meanings = [read_label(cell) for cell in cells[name]]
        positive = np.array([meaning == "present" for meaning in meanings])[columns.column(name).places]
        if None not in meanings and positive.any() and len(meanings) > 1:
            counts[name] = int(positive.sum())
            labelled += positive
    if counts:
        exclusive = len(counts) > 1 and bool((labelled == 1).all())
        return ColumnRoles(image, patient, split, tuple(counts), None, "|", counts, exclusive)
    return ColumnRoles(image, patient, split, (), *_finding_column(columns, rest))


def _finding_column(columns: Columns, rest: Iterable[str]) -> tuple[str, str, dict[str, int], bool]:
    """Return the column whose cells name classes, its separator, the rows of each class, and True for one a row.

    A column with a name such as "Findings" comes first. Spellings that differ only in case are one class.

    Raises:
        BadInput: If there is none.
    """
    for name in sorted(rest, key=lambda column: not _FINDINGS.search(column)):
        column = columns.column(name)
        separator = next((mark for mark in _SEPARATORS if any(mark in cell for cell in column.cells)), "|")
        counts, spellings, exclusive = Counter[str](), dict[str, str](), True
        for cell, rows in zip(column.cells, column.counts().tolist(), strict=True):
            findings = {} if is_blank(cell) else {part.casefold(): part for part in split_findings(cell, separator)}
            counts.update(dict.fromkeys(findings, rows))
            spellings = findings | spellings
            exclusive = exclusive and len(findings.keys() - _NO_FINDING) == 1
        classes = {spellings[key]: rows for key, rows in counts.most_common() if key not in _NO_FINDING}
        if _FEW_CLASSES <= len(counts) <= _MOST_CLASSES and 0 < len(classes) < len(column.places):
            return name, separator, classes, exclusive
    problem = f"no column holds labels, as 1, 0, -1 or nothing for each class, or as names; it has {quoted(columns)}."
    raise BadInput([Fault("labels", problem, "Give each class a column of 1 (present) and 0 (absent).")])


def picture_folder(table: Path, names: Sequence[str], listings: FolderListings) -> Path | None:
    """Return the folder beside a table in which most of its pictures lie; None where there is none."""
    beside = {table.parent: 0} | {table.parent / below: 0 for below, _ in sorted(listings.walk(table.parent))}
    for folder in beside:
        beside[folder] = sum(listings.find(str(folder), name) is not None for name in names[:_LOOKED_AT])
    best = max(beside, key=lambda folder: beside[folder])
    return best if beside[best] else None
