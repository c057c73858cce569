"""What the columns of a table of labels are for, found out from their names and cells.

The result is a proposal that a person reads: the caller writes it down with what it rests on.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.data.base.splits import Names
from common.data.images.reading import PICTURES
from common.data.tables.csv import LABEL_CELLS, PARTS, POSITIVE_CELLS, Columns
from common.errors import BadInput, Fault, quoted

_PATIENT = re.compile(r"(^|[^a-z])(patient|subject|person|lesion|mrn|pid)", re.IGNORECASE)
_SPLIT = re.compile(r"^(split|part|partition|set|subset)$", re.IGNORECASE)
_FINDINGS = re.compile(r"finding|label|diagnos|class|dx|disease", re.IGNORECASE)
_SEPARATORS = ("|", ";")
_MOST_CLASSES = 60
_FEW_CLASSES = 2
_LOOKED_AT = 200


@dataclass(frozen=True)
class Roles:
    """What each column is for.

    Attributes:
        image: Names the picture files.
        patient: None where no column looks like it.
        label_columns: One column a class; empty where ``finding`` names the classes.
        finding: One column with names of classes, parted by ``separator``.
        classes: Each class with the number of rows that show it, in the order of the table or by frequency.
        exclusive: Whether each row shows exactly one class.
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
        if sum(cell.endswith(PICTURES) for cell in looked_at) > len(looked_at) / 2:
            return name
    problem = f"no column of the table names pictures, files that end in {quoted(PICTURES)}; it has {quoted(columns)}."
    raise BadInput([Fault("--image-column", problem, "Name the column of picture files.")])


def patient_column(columns: Iterable[str], others: Collection[str] = ()) -> str | None:
    """Return the first column whose name says that it names patients; ``others`` are for something else."""
    return next((name for name in columns if name not in others and _PATIENT.search(name)), None)


def roles_of(columns: Columns, image: str, patient: str | None = None) -> Roles:
    """Find out what each column is for.

    Args:
        image: The column of picture files.
        patient: That of patients, where the caller knows.

    Raises:
        BadInput: If no column holds labels.
    """
    of_patients = patient or patient_column(columns, (image,))
    values = {name: {cell.strip() for cell in np.unique(cells)} for name, cells in columns.items()}
    splits = [
        name for name in columns if _SPLIT.match(name) and {value.lower() for value in values[name]} <= PARTS.keys()
    ]
    split = next(iter(splits), None)
    rest = [name for name in columns if name not in (image, of_patients, split)]
    labels = tuple(
        name
        for name in rest
        if values[name] <= LABEL_CELLS and not values[name].isdisjoint(POSITIVE_CELLS) and len(values[name]) > 1
    )
    if labels:
        counts = {name: int(np.isin(np.char.strip(columns[name]), POSITIVE_CELLS).sum()) for name in labels}
        positives = np.sum([np.isin(np.char.strip(columns[name]), POSITIVE_CELLS) for name in labels], axis=0)
        exclusive = len(labels) > 1 and bool((positives == 1).all())
        return Roles(image, of_patients, split, labels, None, "|", counts, exclusive)
    finding, separator, counts = _finding_column(columns, rest)
    one_each = not any(separator in cell for cell in np.unique(columns[finding]))
    return Roles(image, of_patients, split, (), finding, separator, counts, one_each)


def _finding_column(columns: Columns, rest: Iterable[str]) -> tuple[str, str, dict[str, int]]:
    """Return the column whose cells name classes; one that is called so comes first."""
    for name in sorted(rest, key=lambda column: not _FINDINGS.search(column)):
        separator = next((mark for mark in _SEPARATORS if any(mark in cell for cell in columns[name])), "|")
        counts = Counter(part.strip() for cell in columns[name] for part in cell.split(separator) if part.strip())
        if _FEW_CLASSES <= len(counts) <= _MOST_CLASSES and len(counts) < len(columns[name]):
            return name, separator, dict(counts.most_common())
    problem = (
        f"no column holds labels: 1, 0, -1 or nothing in a column for each class, or names; it has {quoted(columns)}."
    )
    raise BadInput([Fault("labels", problem, "Give each class a column of 1 (present) and 0 (absent).")])


def picture_folder(table: Path, names: Names) -> Path | None:
    """Return the folder beside a table in which most of its pictures lie; None where there is none."""
    beside = [table.parent, *sorted(folder for folder in table.parent.rglob("*") if folder.is_dir())]
    looked_at = names[:_LOOKED_AT]
    there = {folder: sum((folder / name).is_file() for name in looked_at) for folder in beside}
    best = max(there, key=lambda folder: there[folder])
    return best if there[best] else None
