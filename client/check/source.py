"""A site's images for looking at: files beside a table, or arrays of a set that is read whole."""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from client.site.site_file import Settings
from common.data.base.image_set import ImageSet, Skipped, are_known
from common.data.base.spec import (
    CompositesSpec,
    DicomwebSpec,
    DigitsSpec,
    MixtureSpec,
    NpzSpec,
    PhantomSpec,
    PluginSpec,
)
from common.data.base.splits import Names
from common.data.images.headers import dicom_heads, dicom_patients
from common.data.images.reading import ImageForm
from common.data.load import load, open_table
from common.data.sources.dicomweb import open_dicomweb
from common.errors import Fault
from common.system.plain_text import counted

PARTS = ("train", "validation", "test")


@dataclass(frozen=True)
class Source:
    """Rows of all fields belong together.

    Attributes:
        names: What an image is called.
        labels: float32 ``(n, classes)``, NaN unknown.
        parts: "train", "validation" or "test".
        read: The bytes of an image, its file, or the image itself where it is there already.
        opened: What is open while images are read.
        failed: After reading, why no image could be had any more.
        files: Paths, where there are any.
        archive: What a PACS has answered, a line; empty where there is none.
        form: What pictures are brought into before the network sees them; None where they are.
        patients_known: Whether the data says whose images they are.
        patients_from: What says so, where it is no setting of the site's.
        syntaxes: Transfer syntax of each DICOM file, empty for others.
        skipped: What the reader of a whole set has left out.
        missing: Rows of the table without a file.
        skip_budget: Part of the images that may be unreadable.
    """

    names: tuple[str, ...]
    labels: NDArray[np.float32]
    class_names: tuple[str, ...]
    patients: Names
    parts: Names
    read: Callable[[int], bytes | Path | NDArray[np.uint8]]
    opened: Callable[[], AbstractContextManager[object]] = nullcontext
    failed: Callable[[], list[Fault]] = list
    files: tuple[Path, ...] = ()
    archive: str = ""
    form: ImageForm | None = None
    patients_known: bool = True
    patients_from: str = ""
    syntaxes: tuple[str, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    missing: int = 0
    skip_budget: float = 0.05

    def __len__(self) -> int:
        return len(self.names)

    @property
    def packed(self) -> Counter[str]:
        """Number of DICOM files of each transfer syntax."""
        return Counter(filter(None, self.syntaxes))

    @property
    def side(self) -> int:
        """Pixels of the longer side of an image as the network is given it."""
        if self.form:
            return self.form.size
        first = self.read(0)
        return max(first.shape[:2]) if isinstance(first, np.ndarray) else 0


def open_source(settings: Settings) -> Source:
    """Find a site's images and labels; of pictures in files none is read.

    Raises:
        BadInput: With every fault.
    """
    spec = settings.file.data
    if isinstance(spec, NpzSpec | MixtureSpec | DigitsSpec | PhantomSpec | CompositesSpec | PluginSpec):
        return _of_arrays(settings)
    if isinstance(spec, DicomwebSpec):
        return _of_archive(spec, settings.folder)
    table = open_table(spec, settings.folder)
    heads = dicom_heads(table.files)
    stated = getattr(spec, "patient_column", "in the table") is not None
    in_files = sum(bool(head.patient) for head in heads) if not stated and dicom_patients(heads) else 0
    return Source(
        names=tuple(file.name for file in table.files),
        labels=table.labels,
        class_names=table.class_names,
        patients=table.patients,
        parts=table.parts,
        read=lambda row: table.files[row],
        files=table.files,
        form=ImageForm(spec.image_size, spec.color, spec.resize, spec.rendering),
        patients_known=are_known(table.patients),
        patients_from=f"PatientID of {in_files:,} of {len(heads):,} files" if in_files else "",
        syntaxes=tuple(head.syntax for head in heads),
        missing=table.missing,
        skip_budget=spec.skip_budget,
    )


def _of_archive(spec: DicomwebSpec, folder: Path) -> Source:
    found = open_dicomweb(spec, folder)
    table, archive = found.table, found.archive
    names = {image.study for image in archive.places.values()}
    answer = f"{archive.client.server.name} answers: {counted(len(table.files), 'image')} "
    answer += (
        f"of {len(names)} {'study' if len(names) == 1 else 'studies'} for {counted(found.lines, 'line')} of the table"
    )
    return Source(
        names=tuple(file.name for file in table.files),
        labels=table.labels,
        class_names=table.class_names,
        patients=table.patients,
        parts=table.parts,
        read=lambda row: archive.read(table.files[row]),
        opened=archive.opened,
        failed=archive.faults,
        archive=f"{answer}; its certificate is accepted" if archive.client.server.context else f"{answer}, without TLS",
        form=ImageForm(spec.image_size, spec.color, spec.resize, spec.rendering),
        patients_known=are_known(table.patients),
        patients_from=f"PatientID, as {archive.client.server.name} says" if found.patients_from_archive else "",
        missing=table.missing,
        skip_budget=spec.skip_budget,
    )


def _of_arrays(settings: Settings) -> Source:
    splits = load(settings.file.data, settings.folder)
    sets: list[ImageSet] = [splits.train, splits.validation, splits.test]
    starts = np.cumsum([0, *map(len, sets)])

    def read(row: int) -> NDArray[np.uint8]:
        part = int(np.searchsorted(starts, row, side="right")) - 1
        pixels: NDArray[np.uint8] = sets[part].images[row - starts[part]]
        return pixels

    patients = np.concatenate([one.patients for one in sets])
    return Source(
        names=tuple(f"{part}[{row}]" for part, one in zip(PARTS, sets, strict=True) for row in range(len(one))),
        labels=np.concatenate([one.labels for one in sets]),
        class_names=splits.class_names,
        patients=patients,
        parts=np.repeat(np.array(PARTS), [len(one) for one in sets]),
        read=read,
        patients_known=are_known(patients),
        skipped=tuple(skip for one in sets for skip in one.skipped),
    )


def chosen_rows(total: int, images: int | None) -> NDArray[np.intp]:
    """``images`` rows spread evenly over all, first and last among them; all where None."""
    if images is None or images >= total:
        return np.arange(total)
    return np.unique(np.linspace(0, total - 1, images).round().astype(np.intp))
