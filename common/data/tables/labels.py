"""The table next to a folder of pictures: one row an image, with its file, labels, patient and part of the split."""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from common.data.base.image_set import ImageSet, Splits
from common.data.base.spec_tables import PictureSpec, ShownSpec
from common.data.images.reading import ImageForm, ImageStore, decode_all, stop_over_budget
from common.data.splits.patient_disjoint import (
    Names,
    any_positive,
    hold_out,
    parts_of,
    patient_split,
    shared_patient_faults,
)
from common.errors import BadInput, Fault, quoted, stop_on
from common.system.files import missing_folder


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
        """The rows at ``index``, in that order."""
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
    return shared_patient_faults(where, {part: table.patients[table.parts == part] for part in _part_names()})


def _part_names() -> tuple[str, ...]:
    return ("train", "validation", "test")


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
    """Which paths ``(n,)`` are files. Each folder is listed once: of a hundred thousand names none takes a call."""
    listed, present = dict[str, frozenset[str]](), np.zeros(len(paths), np.bool_)
    for row, path in enumerate(paths):
        folder, name = os.path.split(path)
        if folder not in listed:
            listed[folder] = _files_in(folder)
        present[row] = name in listed[folder]
    return present


def _files_in(folder: str) -> frozenset[str]:
    """Names of the files in a folder, links to files included; none where it cannot be listed."""
    try:
        with os.scandir(folder or os.curdir) as entries:
            return frozenset(entry.name for entry in entries if _is_file(entry))
    except (OSError, ValueError):  # no such folder, or no name that one can have
        return frozenset()


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:  # a link that leads in a circle
        return False


def folder_faults(spec: PictureSpec, base: Path) -> list[Fault]:
    """Find out whether the folder of images is there."""
    return missing_folder("data.images", base / spec.images)


def load_pictures(table: LabelTable, spec: ShownSpec, store: ImageStore) -> Splits:
    """Decode the files of a table.

    Raises:
        BadInput: If more than ``spec.skip_budget`` of them cannot be read, or their archive gives no more.
    """
    form = ImageForm(spec.image_size, spec.color, spec.resize, spec.rendering)
    sets = [_decoded_part(table.rows(np.flatnonzero(table.parts == part)), form, store) for part in _part_names()]
    stop_on(table.reader.faults())
    skipped = [skip for images in sets for skip in images.skipped]
    stop_over_budget("data.images", skipped, len(table.files), spec.skip_budget)
    return Splits(*sets)


def _decoded_part(table: LabelTable, form: ImageForm, store: ImageStore) -> ImageSet:
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
