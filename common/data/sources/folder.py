"""A hospital's own folder of pictures with a label table."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from common.data.base.image_set import own_patients
from common.data.base.spec import FolderSpec
from common.data.splits.patient_disjoint import Names
from common.data.tables.csv import Columns, column_faults, finding_matrix, label_matrix, part_column, read_columns
from common.data.tables.labels import (
    LabelTable,
    folder_faults,
    part_faults,
    split_by_patient,
    with_files_only,
    with_validation,
)
from common.errors import BadInput, Fault, did_you_mean, quoted, stop_on
from common.system.formatting import counted


def open_folder(spec: FolderSpec, base: Path) -> LabelTable:
    """Read and check everything but the pictures.

    Raises:
        BadInput: With all faults of the folder, the columns, then of the cells.
    """
    faults = folder_faults(spec, base)
    try:
        columns = read_columns(base / spec.labels, "data.labels")
    except BadInput as bad:
        raise BadInput([*faults, *bad.faults]) from bad
    stop_on(faults + column_faults(Path(spec.labels).name, columns, _wanted(spec)) + _finding_faults(spec, columns))
    stop_on(_identity_faults(spec, columns))
    table = _table(spec, base, columns)
    stop_on(part_faults("data.split_column", table))
    return with_files_only(table, spec)


def _wanted(spec: FolderSpec) -> dict[str, str | None]:
    return {
        "data.image_column": spec.image_column,
        **{f"data.label_columns[{place}]": name for place, name in enumerate(spec.label_columns)},
        "data.finding_column": spec.finding_column,
        "data.patient_column": spec.patient_column,
        "data.source_column": spec.source_column,
        "data.split_column": spec.split_column,
    }


def _finding_faults(spec: FolderSpec, columns: Columns) -> list[Fault]:
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


def _identity_faults(spec: FolderSpec, columns: Columns) -> list[Fault]:
    """An image in two lines, or images without a patient, could stand on two sides of a split."""
    faults = []
    names, counts = np.unique(columns[spec.image_column], return_counts=True)
    if (nameless := np.flatnonzero(np.char.strip(columns[spec.image_column]) == "")).size:
        problem = f"{counted(nameless.size, 'line')} without an image, line {nameless[0] + 2} first."
        faults.append(Fault("data.image_column", problem, "Fill them, or remove them."))
    elif (counts > 1).any():
        problem = f"{counted(int((counts > 1).sum()), 'image')} in more than one line: {quoted(names[counts > 1], 5)}."
        faults.append(Fault("data.image_column", problem, "Give each image one line."))
    if (
        spec.patient_column is not None
        and (blank := np.flatnonzero(np.char.strip(columns[spec.patient_column]) == "")).size
    ):
        problem = f"{counted(blank.size, 'line')} without a patient, line {blank[0] + 2} first."
        faults.append(Fault("data.patient_column", problem, "Fill them, or leave patient_column out."))
    return faults


def _table(spec: FolderSpec, base: Path, columns: Columns) -> LabelTable:
    names = columns[spec.image_column]
    count, files = len(names), tuple(base / spec.images / name for name in names)
    if spec.finding_column is None:
        labels = label_matrix(
            columns, spec.label_columns, uncertain=spec.uncertain, blank=spec.blank, where="data.label_columns"
        )
    else:
        labels = finding_matrix(columns[spec.finding_column], spec.separator, spec.classes)
    table = LabelTable(
        files=files,
        labels=labels,
        class_names=spec.label_columns or spec.classes,
        patients=_patients_of(files) if spec.patient_column is None else columns[spec.patient_column],
        sources=np.full(count, "") if spec.source_column is None else columns[spec.source_column],
        parts=np.full(count, "train"),
    )
    return _with_parts(table, spec, None if spec.split_column is None else columns[spec.split_column])


def _patients_of(files: Sequence[Path]) -> Names:
    """Who the files themselves say they show; without a word of it, each image is a patient of its own."""
    from common.data.images.headers import dicom_heads, dicom_patients  # takes a second

    found = dicom_patients(dicom_heads(files))
    return own_patients(len(files)) if found is None else np.array(found, dtype=np.str_)


def _with_parts(table: LabelTable, spec: FolderSpec, values: Names | None) -> LabelTable:
    if values is None:
        return split_by_patient(table, spec.split_seed)
    parted = replace(table, parts=part_column(values, "data.split_column"))
    return with_validation(parted, spec.validation_fraction, spec.split_seed)
