"""Data sets with a hospital's own label table, and images in its PACS."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from polyclinic.common.errors import BadInput, Fault, quote_names, raise_faults
from polyclinic.common.system.plain_text import format_count_with_noun
from polyclinic.data.base.image_set import fill_missing_patients_by_study
from polyclinic.data.base.names import normalize_name_array
from polyclinic.data.base.spec import DicomwebDatasetSpec
from polyclinic.data.dicomweb.archive import PacsArchive, PacsImageKey, open_pacs_archive
from polyclinic.data.dicomweb.search import UID_PATTERN, PacsImageLocation
from polyclinic.data.tables.csv import CsvColumn, CsvTable, find_missing_column_faults, read_csv_table
from polyclinic.data.tables.files import LazyPicturePaths
from polyclinic.data.tables.labels import (
    LabelTable,
    assign_split_parts,
    find_blank_cell_faults,
    find_patient_overlap_faults,
    join_similar_patients,
    list_configured_columns,
    parse_table_cells,
)

_IDENTIFIER_KEYS = {
    "instance": "data.instance_column",
    "study": "data.study_column",
    "accession": "data.accession_column",
}
_MAX_ACCESSION_CHARACTERS = 64
"""Maximum length of an AccessionNumber; the standard allows 16 characters, but real archives use more."""


@dataclass(frozen=True)
class PacsLabelTable:
    """A label table whose images were located in a PACS.

    Attributes:
        table: The rows with an image in the PACS.
        archive: Downloads the images.
        lines: Number of rows in the table, including rows without an image.
        patients_from_archive: True if the patients' names come from the PACS, because the table does not have them.
            Images without a PatientID then have placeholder names, one per study.
    """

    table: LabelTable
    archive: PacsArchive
    lines: int
    patients_from_archive: bool


def open_dicomweb_table(spec: DicomwebDatasetSpec, base: Path) -> PacsLabelTable:
    """Read and check the label table, and search the PACS for its images, without downloading one.

    Args:
        base: The folder to which paths in ``spec`` are relative.

    Raises:
        BadInput: With the faults of the first stage that fails: columns, cells, settings of the connection, PACS
            responses.
    """
    columns = read_csv_table(base / spec.labels, "data.labels", spec.largest_mb)
    named = {key: column for kind, key in _IDENTIFIER_KEYS.items() if (column := getattr(spec, f"{kind}_column"))}
    configured = {**named, **list_configured_columns(spec)}
    raise_faults(find_missing_column_faults(Path(spec.labels).name, columns, configured))
    faults = _find_identifier_faults({key: columns.get_column(name) for key, name in named.items()})
    cells = parse_table_cells(spec, columns, faults)
    raise_faults(faults)
    archive = open_pacs_archive(spec, base)
    rows, images = _locate_pacs_images(spec, columns, archive)
    ids = {image.patient for image in images if image and image.patient}
    # If all images have the same PatientID, it is a placeholder for removed names.
    by_archive = cells.patients is None and len(ids) >= max(1, min(2, sum(image is not None for image in images)))
    if cells.patients is not None:
        patients = cells.patients[rows]
    else:  # a row without an image counts as a patient
        archive_patients = [image.patient if image and by_archive else "" for image in images]
        names = fill_missing_patients_by_study(archive_patients, [image.study if image else "" for image in images])
        patients = join_similar_patients(normalize_name_array(np.array(names, dtype=np.str_)), spec, "data.url", faults)
        raise_faults(faults)
    files = [f"{image.instance if image else 'missing'}.dcm" for image in images]
    table = LabelTable(
        files=LazyPicturePaths.from_folder_and_names(archive.cache.folder, files),
        labels=cells.labels[rows],
        class_names=spec.class_names,
        patients=patients,
        sources=cells.sources[rows],
        parts=np.full(len(rows), "train") if cells.parts is None else cells.parts[rows],
        other_findings=cells.other_findings,
        joined_patients=cells.joined_patients,
        reader=archive,
        attributes=None if cells.attributes is None else cells.attributes.select_rows(rows),
        attribute_notes=cells.attribute_notes,
        lines=columns.lines[rows],
    )
    # Rows without an image take part in the split, and are left out afterwards.
    table = assign_split_parts(table, spec)
    raise_faults(find_patient_overlap_faults("data.split_column", table))
    is_present = np.array([image is not None for image in images], dtype=np.bool_)
    lines = columns.lines[rows]
    absent = lines[~is_present]
    if len(absent) and (spec.missing_files == "fault" or not is_present.any()):
        problem = f"{len(absent)} of {len(np.unique(lines))} lines of {spec.labels} have no image in the PACS, "
        problem += f"line {absent[0]} first."
        remedy = 'Are the columns and data.modalities right? Or set missing_files = "ignore" to leave them out.'
        raise BadInput([Fault("data.labels", problem, remedy)])
    table = replace(table.select_rows(np.flatnonzero(is_present)), missing=len(absent))
    return PacsLabelTable(table, archive, len(cells.labels), by_archive)


def _find_identifier_faults(columns: Mapping[str, CsvColumn]) -> list[Fault]:
    """Return faults for cells that are not a valid UID or AccessionNumber; valid cells are safe in URLs and file names.

    Args:
        columns: Configuration key -> column that names images or studies. The cells of the first column identify the
            rows, and may be neither blank nor repeated.
    """
    key, column = next(iter(columns.items()))
    what, several = ("image", "images") if key == _IDENTIFIER_KEYS["instance"] else ("study", "studies")
    faults = find_blank_cell_faults(column, key, what)
    if not faults and (repeated := np.flatnonzero(column.count_rows_per_cell() > 1).tolist()):
        problem = f"{format_count_with_noun(len(repeated), what, several)} in more than one line: "
        problem += f"{column.describe_cell_lines(repeated)}."
        faults.append(Fault(key, problem, f"Give each {what} one line."))
    for key, column in columns.items():
        if key == _IDENTIFIER_KEYS["accession"]:
            expected, forbidden = "an AccessionNumber", set("*?\\")
            fits = [
                0 < len(c) <= _MAX_ACCESSION_CHARACTERS and c.isprintable() and not forbidden & {*c}
                for c in column.cells
            ]
        else:
            expected = "a UID: digits and dots, 64 at most"
            fits = [UID_PATTERN.fullmatch(cell) is not None for cell in column.cells]
        if bad := np.flatnonzero(~np.array(fits)).tolist():
            lines = column.find_lines_of_cells(bad)
            first = column.cells[column.places[np.flatnonzero(column.lines == lines[0])[0]]][:70]
            problem = (
                f'{format_count_with_noun(len(lines), "line")} without {expected}; line {lines[0]} first, "{first}".'
            )
            faults.append(Fault(key, problem, "Spreadsheets turn long numbers into others: export the column as text."))
    return faults


def _locate_pacs_images(
    spec: DicomwebDatasetSpec, columns: CsvTable, archive: PacsArchive
) -> tuple[NDArray[np.intp], list[PacsImageLocation | None]]:
    """Search the PACS for the images of all table rows.

    Returns:
        Two lists of equal length: row numbers ``(n,)``, and an image of each row. A row with several images has several
        entries. A row without an image has one entry with the image None.

    Raises:
        BadInput: If the PACS gives no usable response, or an image belongs to two rows.
    """
    kind = "study" if spec.study_column else "accession" if spec.accession_column else "instance"
    keys = [PacsImageKey(kind, str(cell)) for cell in columns[str(getattr(spec, f"{kind}_column"))]]
    results = archive.find_images_by_keys(keys)
    instances = None if spec.instance_column is None else columns[spec.instance_column]
    rows, images = list[int](), list[PacsImageLocation | None]()
    for row, key in enumerate(keys):
        row_images = [
            image
            for image in results[key]
            if (not spec.modalities or image.modality in spec.modalities)
            and (instances is None or image.instance == instances[row])
        ]
        row_images.sort(key=lambda image: (image.series, image.instance))
        rows += [row] * max(1, len(row_images))
        images += row_images or [None]
    counts = Counter(image.instance for image in images if image)
    if repeated := [name for name, count in counts.items() if count > 1]:
        problem = f"{format_count_with_noun(len(repeated), 'image')} of more than one line: {quote_names(repeated, 5)}."
        raise BadInput([Fault(_IDENTIFIER_KEYS[kind], problem, "Do two lines name the same study?")])
    return np.array(rows, dtype=np.intp), images
