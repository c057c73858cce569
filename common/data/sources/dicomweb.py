"""A hospital's own table of labels, and its PACS."""

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.data.base.image_set import UNKNOWN_PATIENT
from common.data.base.spec import DicomwebSpec
from common.data.base.splits import Names
from common.data.dicomweb.archive import ArchiveKey, PacsArchive, open_archive
from common.data.dicomweb.search import UID, ImageLocation
from common.data.tables.cells import strip_cells
from common.data.tables.csv import Columns, column_faults, read_columns
from common.data.tables.labels import (
    LabelTable,
    assign_parts,
    finding_faults,
    identity_faults,
    parse_labels,
    part_faults,
    required_columns,
)
from common.errors import BadInput, Fault, quoted, stop_on
from common.system.plain_text import counted

_KEYS = {"instance": "data.instance_column", "study": "data.study_column", "accession": "data.accession_column"}
_LONGEST_ACCESSION = 64
"""Characters; the standard allows 16, archives allow more."""


@dataclass(frozen=True)
class OpenedArchive:
    """A table of labels whose images are located in a PACS.

    Attributes:
        table: The rows with an image.
        archive: Gives the images.
        lines: Number of lines of the table.
        patients_from_archive: True where patients are those that the PACS names, because no column does; images without
            a PatientID have a placeholder, the same for a study.
    """

    table: LabelTable
    archive: PacsArchive
    lines: int
    patients_from_archive: bool


def open_dicomweb(spec: DicomwebSpec, base: Path) -> OpenedArchive:
    """Read and check the table, and search the PACS for its images; no image is fetched.

    Raises:
        BadInput: With all faults of the columns and of the files named beside, then of the cells, then of the answers.
    """
    columns = read_columns(base / spec.labels, "data.labels", spec.largest_mb)
    named = {key: column for kind, key in _KEYS.items() if (column := getattr(spec, f"{kind}_column"))}
    faults = column_faults(Path(spec.labels).name, columns, {**named, **required_columns(spec)})
    stop_on(faults + finding_faults(spec, columns))
    row_kind = "instance" if spec.instance_column else "study" if spec.study_column else "accession"
    row_key = _KEYS[row_kind]
    what = "image" if row_kind == "instance" else "study"
    faults = identity_faults(spec, columns, row_key, named[row_key], what)
    stop_on(faults + [fault for key, column in named.items() for fault in _identifier_faults(key, columns[column])])
    labels = parse_labels(spec, columns)
    archive = open_archive(spec, base)
    rows, images = _find_images(spec, columns, archive)
    ids = {image.patient for image in images if image and image.patient}
    # All with the same PatientID are of patients whose names were removed.
    by_archive = not spec.patient_column and len(ids) >= max(1, min(2, sum(image is not None for image in images)))
    if spec.patient_column:
        patients = columns[spec.patient_column][rows]
    else:  # where the PACS names none, a patient for each study; a line without an image is one of its own
        names = [
            (by_archive and image and image.patient) or f"{UNKNOWN_PATIENT}{image.study if image else row}"
            for row, image in zip(rows, images, strict=True)
        ]
        patients = np.array(names, dtype=np.str_)
    table = LabelTable(
        files=tuple(archive.cache.folder / f"{image.instance if image else 'missing'}.dcm" for image in images),
        labels=labels[rows],
        class_names=spec.label_columns or spec.classes,
        patients=patients,
        sources=np.full(len(rows), "") if spec.source_column is None else columns[spec.source_column][rows],
        parts=np.full(len(rows), "train"),
        reader=archive,
    )
    # All lines are split by patient, those without an image too; then the latter are left out.
    table = assign_parts(table, spec, None if spec.split_column is None else columns[spec.split_column][rows])
    stop_on(part_faults("data.split_column", table))
    return OpenedArchive(_drop_lines_without_images(table, rows, images, spec), archive, len(labels), by_archive)


def _identifier_faults(key: str, cells: Names) -> list[Fault]:
    """Find cells that cannot name an image or a study; such names stand in addresses and in names of files."""
    if key == _KEYS["accession"]:
        fits = [
            0 < len(cell) <= _LONGEST_ACCESSION and cell.isprintable() and not set("*?\\") & set(cell)
            for cell in strip_cells(cells)
        ]
    else:
        fits = [UID.fullmatch(cell) is not None for cell in strip_cells(cells)]
    bad = np.flatnonzero(~np.array(fits))
    if not len(bad):
        return []
    expected = "an AccessionNumber" if key == _KEYS["accession"] else "a UID: digits and dots, 64 at most"
    problem = f'{counted(len(bad), "line")} without {expected}; line {bad[0] + 2} first, "{cells[bad[0]][:70]}".'
    return [Fault(key, problem, "Spreadsheets turn long numbers into others: export the column as text.")]


def _find_images(
    spec: DicomwebSpec, columns: Columns, archive: PacsArchive
) -> tuple[NDArray[np.intp], list[ImageLocation | None]]:
    """Return images with the line ``(n,)`` that each belongs to; None for a line without one.

    Raises:
        BadInput: If the PACS gives no usable answer, or an image belongs to two lines.
    """
    kind = "study" if spec.study_column else "accession" if spec.accession_column else "instance"
    keys = [ArchiveKey(kind, str(cell)) for cell in strip_cells(columns[str(getattr(spec, f"{kind}_column"))])]
    results = archive.find(keys)
    instances = None if spec.instance_column is None else strip_cells(columns[spec.instance_column])
    rows, images = list[int](), list[ImageLocation | None]()
    for row, key in enumerate(keys):
        of_line = [
            image
            for image in results[key]
            if (not spec.modalities or image.modality in spec.modalities)
            and (instances is None or image.instance == instances[row])
        ]
        of_line.sort(key=lambda image: (image.series, image.instance))
        rows += [row] * max(1, len(of_line))
        images += of_line or [None]
    counts = Counter(image.instance for image in images if image)
    if repeated := [name for name, count in counts.items() if count > 1]:
        problem = f"{counted(len(repeated), 'image')} of more than one line: {quoted(repeated, 5)}."
        raise BadInput([Fault(_KEYS[kind], problem, "Do two lines name the same study?")])
    return np.array(rows, dtype=np.intp), images


def _drop_lines_without_images(
    table: LabelTable, rows: NDArray[np.intp], images: list[ImageLocation | None], spec: DicomwebSpec
) -> LabelTable:
    """Leave out lines of the table whose image the PACS does not have, and count them.

    Raises:
        BadInput: If there are such and ``spec.missing_files`` is "fault", or if there is no image at all.
    """
    is_present = np.array([image is not None for image in images], dtype=np.bool_)
    absent = rows[~is_present]
    if len(absent) and (spec.missing_files == "fault" or not is_present.any()):
        problem = f"{len(absent)} of {rows[-1] + 1} lines of {spec.labels} have no image in the PACS, "
        problem += f"line {absent[0] + 2} first."
        remedy = 'Are the columns and data.modalities right? Or set missing_files = "ignore" to leave them out.'
        raise BadInput([Fault("data.labels", problem, remedy)])
    return replace(table.rows(np.flatnonzero(is_present)), missing=len(absent))
