"""The columns of a hospital's own table, by what its config file says of them: labels, patients, centres, parts."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from common.data.base.spec_tables import LabelColumnsSpec
from common.data.splits.patient_disjoint import Names
from common.data.tables.csv import Columns, finding_matrix, label_matrix, part_column
from common.data.tables.labels import LabelTable, split_by_patient, with_validation
from common.errors import Fault, did_you_mean, quoted
from common.system.formatting import counted

_ONE, _MANY = {"image": "an image", "study": "a study"}, {"image": "images", "study": "studies"}


def wanted_columns(spec: LabelColumnsSpec) -> dict[str, str | None]:
    """Return the columns that a table must have, by the key that names each."""
    return {
        **{f"data.label_columns[{place}]": name for place, name in enumerate(spec.label_columns)},
        "data.finding_column": spec.finding_column,
        "data.patient_column": spec.patient_column,
        "data.source_column": spec.source_column,
        "data.split_column": spec.split_column,
    }


def finding_faults(spec: LabelColumnsSpec, columns: Columns) -> list[Fault]:
    """A class that never occurs may be rare; if its like occurs under another spelling, it is a slip."""
    if spec.finding_column is None or spec.finding_column not in columns:
        return []
    cells = np.unique(columns[spec.finding_column])
    found = {name.strip() for cell in cells for name in cell.split(spec.separator)}
    return [
        Fault(f"data.classes[{place}]", f'"{name}" never occurs in column "{spec.finding_column}".', near)
        for place, name in enumerate(spec.classes)
        if name not in found and (near := did_you_mean(name, found - set(spec.classes)))
    ]


def identity_faults(spec: LabelColumnsSpec, columns: Columns, key: str, column: str, what: str) -> list[Fault]:
    """An image in two lines, or images without a patient, could stand on two sides of a split.

    Args:
        key: The key of the config file that names ``column``, in which each line names what it is about.
        what: It is about an "image", or a "study".
    """
    faults = []
    names, counts = np.unique(columns[column], return_counts=True)
    if (nameless := np.flatnonzero(np.char.strip(columns[column]) == "")).size:
        problem = f"{counted(nameless.size, 'line')} without {_ONE[what]}, line {nameless[0] + 2} first."
        faults.append(Fault(key, problem, "Fill them, or remove them."))
    elif (counts > 1).any():
        twice = int((counts > 1).sum())
        problem = f"{twice} {_MANY[what] if twice > 1 else what} in more than one line: {quoted(names[counts > 1], 5)}."
        faults.append(Fault(key, problem, f"Give each {what} one line."))
    if (
        spec.patient_column is not None
        and (blank := np.flatnonzero(np.char.strip(columns[spec.patient_column]) == "")).size
    ):
        problem = f"{counted(blank.size, 'line')} without a patient, line {blank[0] + 2} first."
        faults.append(Fault("data.patient_column", problem, "Fill them, or leave patient_column out."))
    return faults


def labels_of(spec: LabelColumnsSpec, columns: Columns) -> NDArray[np.float32]:
    """Return float32 ``(n, classes)``, NaN unknown.

    Raises:
        BadInput: If a cell is no label.
    """
    if spec.finding_column is not None:
        return finding_matrix(columns[spec.finding_column], spec.separator, spec.classes)
    return label_matrix(
        columns, spec.label_columns, uncertain=spec.uncertain, blank=spec.blank, where="data.label_columns"
    )


def sources_of(spec: LabelColumnsSpec, columns: Columns, count: int) -> Names:
    """Return the centre of each line, empty where no column says it."""
    return np.full(count, "") if spec.source_column is None else columns[spec.source_column]


def with_parts(table: LabelTable, spec: LabelColumnsSpec, values: Sequence[str] | Names | None) -> LabelTable:
    """Split the table as its column of parts says, or by patient.

    Raises:
        BadInput: If that column names another part.
    """
    if values is None:
        return split_by_patient(table, spec.split_seed)
    parted = replace(table, parts=part_column(np.asarray(values), "data.split_column"))
    return with_validation(parted, spec.validation_fraction, spec.split_seed)
