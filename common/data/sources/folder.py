"""A hospital's own folder of pictures with a label table."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from common.data.base.image_set import own_patients
from common.data.base.spec import FolderSpec
from common.data.base.splits import Names
from common.data.tables.csv import column_faults, read_columns
from common.data.tables.labels import (
    LabelTable,
    finding_faults,
    identity_faults,
    labels_of,
    part_faults,
    sources_of,
    wanted_columns,
    with_files_only,
    with_parts,
)
from common.errors import BadInput, stop_on
from common.system.files import missing_folder


def open_folder(spec: FolderSpec, base: Path) -> LabelTable:
    """Read and check everything but the pictures.

    Raises:
        BadInput: With all faults of the folder, the columns, then of the cells.
    """
    faults = missing_folder("data.images", base / spec.images)
    try:
        columns = read_columns(base / spec.labels, "data.labels", spec.largest_mb)
    except BadInput as bad:
        raise BadInput([*faults, *bad.faults]) from bad
    wanted = {"data.image_column": spec.image_column, **wanted_columns(spec)}
    stop_on(faults + column_faults(Path(spec.labels).name, columns, wanted) + finding_faults(spec, columns))
    stop_on(identity_faults(spec, columns, "data.image_column", spec.image_column, "image"))
    names = columns[spec.image_column]
    count, files = len(names), tuple(base / spec.images / name for name in names)
    table = LabelTable(
        files=files,
        labels=labels_of(spec, columns),
        class_names=spec.label_columns or spec.classes,
        patients=_patients_of(files) if spec.patient_column is None else columns[spec.patient_column],
        sources=sources_of(spec, columns, count),
        parts=np.full(count, "train"),
    )
    table = with_parts(table, spec, None if spec.split_column is None else columns[spec.split_column])
    stop_on(part_faults("data.split_column", table))
    return with_files_only(table, spec)


def _patients_of(files: Sequence[Path]) -> Names:
    """Return the patients that DICOM files name; where they name none, each image is a patient of its own."""
    from common.data.images.headers import dicom_heads, dicom_patients  # takes a second

    patients = dicom_patients(dicom_heads(files))
    return own_patients(len(files)) if patients is None else np.array(patients, dtype=np.str_)
