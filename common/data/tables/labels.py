"""The table next to a folder of pictures: one row an image, with its file, labels, patient and part of the split.

The second half reads the columns of a hospital's own table by what its config file says of them.
"""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from common.data.base.image_set import ImageSet, Splits
from common.data.base.spec import LabelColumnsSpec, PictureSpec, ShownSpec
from common.data.base.splits import (
    Names,
    any_positive,
    hold_out,
    parts_of,
    patient_split,
    shared_patient_faults,
)
from common.data.images.reading import ImageForm, ImageStore, decode_all, stop_over_budget
from common.data.tables.csv import Columns, finding_matrix, label_matrix, part_column
from common.errors import BadInput, Fault, did_you_mean, quoted, stop_on
from common.system.plain_text import counted


class Reader(Protocol):
    """Where pictures come from; ``read`` is called inside :meth:`opened`, by several threads."""

    def opened(self) -> AbstractContextManager[object]:
        """Return what is open while pictures are read."""

    def read(self, file: Path) -> bytes | Path:
        """Return a picture, or the file in which it is."""

    def faults(self) -> list[Fault]:
        """Return why no picture could be read any more, after reading; empty where all is well."""


class FromDisk:
    """Pictures that are files here."""

    def opened(self) -> AbstractContextManager[object]:
        return nullcontext()

    def read(self, file: Path) -> bytes | Path:
        return file

    def faults(self) -> list[Fault]:
        return []


FROM_DISK = FromDisk()
PARTS = ("train", "validation", "test")


@dataclass(frozen=True)
class LabelTable:
    """Rows of all fields belong together.

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
    reader: Reader = FROM_DISK

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


def split_by_patient(table: LabelTable, seed: int) -> LabelTable:
    """Give every patient a part by the 70/10/20 procedure, over all rows of the table, with a file or without."""
    return replace(
        table, parts=parts_of(table.patients, patient_split(table.patients, any_positive(table.labels), seed))
    )


def with_validation(table: LabelTable, fraction: float, seed: int) -> LabelTable:
    """Hold out some training patients if there is no validation part yet."""
    if "validation" in table.parts:
        return table
    train = np.flatnonzero(table.parts == "train")
    held = hold_out(table.patients[train], any_positive(table.labels[train]), fraction, seed)
    parts = table.parts.astype("<U10")
    parts[train[held]] = "validation"
    return replace(table, parts=parts)


def part_faults(where: str, table: LabelTable) -> list[Fault]:
    """Find patients that stand in two parts."""
    return shared_patient_faults(where, {part: table.patients[table.parts == part] for part in PARTS})


def with_files_only(table: LabelTable, spec: PictureSpec) -> LabelTable:
    """Leave out rows without a file, and count them.

    Raises:
        BadInput: If a file is missing and ``spec.missing_files`` is "fault", or if no file is there at all.
    """
    present = _are_files(table.files)
    there, absent = np.flatnonzero(present), np.flatnonzero(~present)
    missing = len(absent)
    if missing and (spec.missing_files == "fault" or not len(there)):
        problem = f"{missing} of {len(table.files)} images named in {spec.labels} are not in {spec.images}: "
        problem += f"{quoted((table.files[row].name for row in absent), 5)}."
        raise BadInput([Fault("data.images", problem, 'Add them, or set missing_files = "ignore" to leave them out.')])
    return replace(table.rows(there), missing=missing)


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


def load_pictures(table: LabelTable, spec: ShownSpec, store: ImageStore) -> Splits:
    """Decode the files of a table.

    Raises:
        BadInput: If more than ``spec.skip_budget`` of them cannot be read, or their archive gives no more.
    """
    form = ImageForm(spec.image_size, spec.color, spec.resize, spec.rendering)
    sets = [_decoded(table.rows(np.flatnonzero(table.parts == part)), form, store) for part in PARTS]
    stop_on(table.reader.faults())
    skipped = [skip for images in sets for skip in images.skipped]
    stop_over_budget("data.images", skipped, len(table.files), spec.skip_budget)
    return Splits(*sets)


def _decoded(table: LabelTable, form: ImageForm, store: ImageStore) -> ImageSet:
    names, reader = [file.name for file in table.files], table.reader
    decoded = decode_all(names, lambda row: reader.read(table.files[row]), form, store, reader.opened())
    kept = table.rows(decoded.kept)
    return ImageSet(
        stored=decoded.images,
        labels=kept.labels,
        class_names=kept.class_names,
        patients=kept.patients,
        sources=kept.sources,
        skipped=decoded.skipped,
        missing=table.missing,
    )


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
    """Find classes that never occur and whose like occurs under another spelling; others may be rare."""
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
    """Find images in two lines or without a patient, which could stand on two sides of a split.

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
