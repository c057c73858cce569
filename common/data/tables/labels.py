"""Tables of labels for picture files: one row an image, with its file, labels, patient and part of the split.

The second half reads a hospital's own table, by what its config file says of the columns.
"""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from common.data.base.image_set import PARTS, ImageSet, Splits, unknown_patients
from common.data.base.spec import FolderSpec, LabelColumnsSpec, PictureSpec, PictureTableSpec
from common.data.base.splits import (
    Names,
    has_positive_label,
    hold_out,
    parts_of_images,
    patient_split,
    shared_patient_faults,
)
from common.data.images.reading import ImageForm, check_skip_budget
from common.data.images.store import FileIdentity, ImageStore, decode_pictures
from common.data.tables.cells import finding_matrix, label_matrix, parse_parts, split_findings, strip_cells
from common.data.tables.csv import Columns, column_faults, read_columns
from common.errors import BadInput, Fault, did_you_mean, quoted, stop_on
from common.system.files import missing_folder
from common.system.plain_text import counted


class PictureReader(Protocol):
    """The place that pictures come from; ``read`` is called inside :meth:`opened`, by several threads."""

    def opened(self) -> AbstractContextManager[object]:
        """Return the connection that is open while pictures are read."""

    def read(self, file: Path) -> bytes | Path:
        """Return a picture, or the file in which it is."""

    def identify(self, file: Path) -> FileIdentity | None:
        """Return by what a picture's content is recognised without reading it; None where only reading tells."""

    def faults(self) -> list[Fault]:
        """Return why no picture could be read any more, after reading; empty where all is well."""


class DiskReader:
    """Gives pictures that are files of this machine."""

    def opened(self) -> AbstractContextManager[object]:
        return nullcontext()

    def read(self, file: Path) -> bytes | Path:
        return file

    def identify(self, file: Path) -> FileIdentity | None:
        return FileIdentity.of(file)

    def faults(self) -> list[Fault]:
        return []


FROM_DISK = DiskReader()


@dataclass(frozen=True)
class LabelTable:
    """Files of pictures with their labels; rows of all fields belong together.

    Attributes:
        files: ``(n,)`` paths; of pictures in an archive, where they would lie in its cache.
        labels: float32 ``(n, classes)``, NaN unknown.
        parts: ``(n,)`` "train", "validation" or "test".
        missing: Number of rows left out because there is no file.
        reader: Gives the pictures of ``files``.
    """

    files: tuple[Path, ...]
    labels: NDArray[np.float32]
    class_names: tuple[str, ...]
    patients: Names
    sources: Names
    parts: Names
    missing: int = 0
    reader: PictureReader = FROM_DISK

    def rows(self, index: NDArray[np.intp]) -> "LabelTable":
        """Return the rows at ``index``, in that order."""
        return replace(
            self,
            files=tuple(self.files[row] for row in index),
            labels=self.labels[index],
            patients=self.patients[index],
            sources=self.sources[index],
            parts=self.parts[index],
        )


def split_table(table: LabelTable, seed: int) -> LabelTable:
    """Give every patient a part by the 70/10/20 procedure, over all rows of the table, with a file or without."""
    split = patient_split(table.patients, has_positive_label(table.labels), seed)
    return replace(table, parts=parts_of_images(table.patients, split))


def hold_out_validation(table: LabelTable, fraction: float, seed: int) -> LabelTable:
    """Hold out some training patients if there is no validation part yet."""
    if "validation" in table.parts:
        return table
    train = np.flatnonzero(table.parts == "train")
    held_out = hold_out(table.patients[train], has_positive_label(table.labels[train]), fraction, seed)
    parts = table.parts.astype("<U10")
    parts[train[held_out]] = "validation"
    return replace(table, parts=parts)


def part_faults(where: str, table: LabelTable) -> list[Fault]:
    """Find patients that stand in two parts."""
    return shared_patient_faults(where, {part: table.patients[table.parts == part] for part in PARTS})


def drop_missing_files(table: LabelTable, spec: PictureSpec) -> LabelTable:
    """Leave out rows without a file, and count them.

    Raises:
        BadInput: If a file is missing and ``spec.missing_files`` is "fault", or if no file is there at all.
    """
    is_present = _are_files(table.files)
    present, absent = np.flatnonzero(is_present), np.flatnonzero(~is_present)
    if len(absent) and (spec.missing_files == "fault" or not len(present)):
        problem = f"{len(absent)} of {len(table.files)} images named in {spec.labels} are not in {spec.images}: "
        problem += f"{quoted((table.files[row].name for row in absent), 5)}."
        raise BadInput([Fault("data.images", problem, 'Add them, or set missing_files = "ignore" to leave them out.')])
    return replace(table.rows(present), missing=len(absent))


def _are_files(paths: Sequence[Path]) -> NDArray[np.bool_]:
    """Mark the paths ``(n,)`` that are files. Each folder is listed once, which is faster than a call for each name."""
    names, present = dict[str, set[str]](), np.zeros(len(paths), np.bool_)
    for row, path in enumerate(paths):
        folder, name = os.path.split(path)
        if folder not in names:
            names[folder] = set()
            with suppress(OSError, ValueError), os.scandir(folder or os.curdir) as entries:
                for entry in entries:
                    with suppress(OSError):  # a link that leads in a circle
                        if entry.is_file():
                            names[folder].add(entry.name)
        present[row] = name in names[folder]
    return present


def decode_table(table: LabelTable, spec: PictureTableSpec, store: ImageStore) -> Splits:
    """Decode the pictures of a table into one store, which its three parts share.

    Raises:
        BadInput: If more than ``spec.skip_budget`` of them cannot be read, or their archive gives no more.
    """
    form = ImageForm(spec.image_size, spec.color, spec.resize, spec.rendering)
    names, files, reader = [file.name for file in table.files], table.files, table.reader
    decoded = decode_pictures(
        names,
        lambda row: reader.read(files[row]),
        form,
        store,
        reader.opened(),
        lambda row: reader.identify(files[row]),
    )
    stop_on(table.reader.faults())
    check_skip_budget("data.images", decoded.skipped, len(files), spec.skip_budget)
    readable = table.rows(decoded.rows)
    unreadable = table.parts[np.setdiff1d(np.arange(len(files)), decoded.rows)]
    images = ImageSet(
        stored=decoded.stored,
        labels=readable.labels,
        class_names=table.class_names,
        patients=readable.patients,
        sources=readable.sources,
        missing=table.missing,
        places=decoded.places,
    )
    parts = []
    for part in PARTS:
        skipped = tuple(skip for skip, of in zip(decoded.skipped, unreadable, strict=True) if of == part)
        parts.append(replace(images.rows(np.flatnonzero(readable.parts == part)), skipped=skipped))
    return Splits(*parts)


def read_table_and_folder(spec: PictureSpec, base: Path) -> tuple[Columns, list[Fault]]:
    """Read the table, and return with it the faults of the folder of pictures, for the caller to report with its own.

    Raises:
        BadInput: If the table cannot be read, with the faults of the folder as well.
    """
    faults = missing_folder("data.images", base / spec.images)
    try:
        return read_columns(base / spec.labels, "data.labels", spec.largest_mb), faults
    except BadInput as bad:
        raise BadInput([*faults, *bad.faults]) from bad


# ---------------------------------------------------------------------- a hospital's own table


def open_folder(spec: FolderSpec, base: Path) -> LabelTable:
    """Read and check the table of a folder of pictures; no picture is read.

    Raises:
        BadInput: With all faults of the folder and the columns, then of the cells.
    """
    columns, faults = read_table_and_folder(spec, base)
    required = {"data.image_column": spec.image_column, **required_columns(spec)}
    stop_on(faults + column_faults(Path(spec.labels).name, columns, required) + finding_faults(spec, columns))
    stop_on(identity_faults(spec, columns, "data.image_column", spec.image_column, "image"))
    folder = base / spec.images
    files = tuple(folder / name for name in columns[spec.image_column])
    table = LabelTable(
        files=files,
        labels=parse_labels(spec, columns),
        class_names=spec.label_columns or spec.classes,
        patients=_read_dicom_patients(files) if spec.patient_column is None else columns[spec.patient_column],
        sources=np.full(len(files), "") if spec.source_column is None else columns[spec.source_column],
        parts=np.full(len(files), "train"),
    )
    table = assign_parts(table, spec, None if spec.split_column is None else columns[spec.split_column])
    stop_on(part_faults("data.split_column", table))
    return drop_missing_files(table, spec)


def _read_dicom_patients(files: Sequence[Path]) -> Names:
    """Return the patients that DICOM files name; where they name none, each image is a patient of its own."""
    from common.data.images.headers import dicom_patients, read_dicom_heads  # takes a second

    patients = dicom_patients(read_dicom_heads(files))
    return unknown_patients(len(files)) if patients is None else np.array(patients, dtype=np.str_)


def required_columns(spec: LabelColumnsSpec) -> dict[str, str | None]:
    """Return the columns that a table must have, by the key that names each."""
    return {
        **{f"data.label_columns[{place}]": name for place, name in enumerate(spec.label_columns)},
        "data.finding_column": spec.finding_column,
        "data.patient_column": spec.patient_column,
        "data.source_column": spec.source_column,
        "data.split_column": spec.split_column,
    }


def finding_faults(spec: LabelColumnsSpec, columns: Columns) -> list[Fault]:
    """Find classes that never occur and whose like occurs under another spelling; others may be rare."""
    if spec.finding_column is None or spec.finding_column not in columns:
        return []
    cells = np.unique(columns[spec.finding_column])
    findings = {name for cell in cells for name in split_findings(cell, spec.separator)}
    return [
        Fault(f"data.classes[{place}]", f'"{name}" never occurs in column "{spec.finding_column}".', near)
        for place, name in enumerate(spec.classes)
        if name not in findings and (near := did_you_mean(name, findings - set(spec.classes)))
    ]


def identity_faults(spec: LabelColumnsSpec, columns: Columns, key: str, column: str, what: str) -> list[Fault]:
    """Find images in two lines or without a patient, which could stand on two sides of a split.

    Args:
        key: The key of the config file that names ``column``.
        column: The column that names the image or the study of each line.
        what: "image" or "study", by what ``column`` names.
    """
    faults = []
    names, counts = np.unique(columns[column], return_counts=True)
    if (nameless := np.flatnonzero(strip_cells(columns[column]) == "")).size:
        problem = f"{counted(nameless.size, 'line')} without {'an' if what == 'image' else 'a'} {what}"
        problem += f", line {nameless[0] + 2} first."
        faults.append(Fault(key, problem, "Fill them, or remove them."))
    elif (counts > 1).any():
        repeated = counted(int((counts > 1).sum()), what, "images" if what == "image" else "studies")
        problem = f"{repeated} in more than one line: {quoted(names[counts > 1], 5)}."
        faults.append(Fault(key, problem, f"Give each {what} one line."))
    if spec.patient_column is not None:
        blank = np.flatnonzero(strip_cells(columns[spec.patient_column]) == "")
        if blank.size:
            problem = f"{counted(blank.size, 'line')} without a patient, line {blank[0] + 2} first."
            faults.append(Fault("data.patient_column", problem, "Fill them, or leave patient_column out."))
    return faults


def parse_labels(spec: LabelColumnsSpec, columns: Columns) -> NDArray[np.float32]:
    """Return the labels of each line, float32 ``(n, classes)``, NaN unknown.

    Raises:
        BadInput: If a cell is no label.
    """
    if spec.finding_column is not None:
        return finding_matrix(columns[spec.finding_column], spec.separator, spec.classes)
    return label_matrix(
        columns, spec.label_columns, uncertain=spec.uncertain, blank=spec.blank, where="data.label_columns"
    )


def assign_parts(table: LabelTable, spec: LabelColumnsSpec, values: Names | None) -> LabelTable:
    """Split the table as its column of parts says, or by patient where ``values`` is None.

    Raises:
        BadInput: If that column names another part.
    """
    if values is None:
        return split_table(table, spec.split_seed)
    parted = replace(table, parts=parse_parts(values, "data.split_column"))
    return hold_out_validation(parted, spec.validation_fraction, spec.split_seed)
