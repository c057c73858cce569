"""The images that the check reads: files named in a table, images of a PACS, or arrays of a whole data set."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from polyclinic.client.site.site_file import SiteSettings
from polyclinic.common.errors import Fault
from polyclinic.common.system.plain_text import format_count_with_noun
from polyclinic.data.base.image_set import (
    PARTS,
    ImageSet,
    SkippedImage,
    are_all_patients_known,
    find_placeholder_patients,
)
from polyclinic.data.base.spec import (
    CollectionsDatasetSpec,
    CompositesDatasetSpec,
    DicomwebDatasetSpec,
    DigitsDatasetSpec,
    DrawnOrgansDatasetSpec,
    MixtureDatasetSpec,
    NpzDatasetSpec,
    PhantomDatasetSpec,
    PluginDatasetSpec,
    VolumeSize,
)
from polyclinic.data.base.splits import StringArray
from polyclinic.data.connections import list_dataset_connections
from polyclinic.data.images.headers import DicomHeader, list_dicom_patient_ids, read_dicom_headers
from polyclinic.data.images.reading import DecodedImageFormat
from polyclinic.data.images.store import MEMORY_STORE
from polyclinic.data.load import load_dataset, open_label_table
from polyclinic.data.sources.dicomweb import open_dicomweb_table
from polyclinic.data.tables.files import describe_outside_pictures
from polyclinic.data.tables.masks import read_table_masks

T = TypeVar("T")


@dataclass(frozen=True)
class SiteImageSource:
    """A site's images; entry ``i`` of ``names``, ``labels``, ``patients`` and ``parts`` belongs to image ``i``.

    Attributes:
        names: Names to print, for instance of files.
        labels: float32 ``(n, classes)``, NaN for unknown.
        parts: ``train``, ``validation`` or ``test``.
        read: Returns an image, given its number, as bytes, as the path of its file, or as pixels if it is in memory.
        opened: Returns a context manager that holds the reader's connection open while images are read.
        reader_faults: Returns the faults that stopped the reader; call it after reading.
        files: Paths; empty if the images are not files on this machine.
        archive: One line about the answer of a PACS; empty without a PACS.
        outside: A sentence on files outside of the image folder; empty without any.
        sent: Phrases about the data sent to the PACS.
        form: Size, colour and rendering that pictures get for the network; None if the pixels are already in that form.
        patients_known: True if the data names the patient of each image.
        patients_from: Origin of the patients' names, if that is not a column named in site.toml.
        heads: DICOM header of each file, blank for other files; empty if the images are not files on this machine.
        skipped: Images that the reader of a whole data set left out.
        missing: Number of table rows without a file.
        repeated: Number of table rows that are equal to an earlier row.
        other_findings: Name of a finding that is not a class of this site -> number of table rows with it.
        skip_budget: Share of the images that may be unreadable.
        has_masks: True if labels say which classes have a pixel in the masks.
    """

    names: tuple[str, ...]
    labels: NDArray[np.float32]
    class_names: tuple[str, ...]
    patients: StringArray
    parts: StringArray
    read: Callable[[int], bytes | Path | NDArray[np.uint8]]
    opened: Callable[[], AbstractContextManager[object]] = nullcontext
    reader_faults: Callable[[], list[Fault]] = list
    files: Sequence[Path] = ()
    archive: str = ""
    outside: str = ""
    sent: tuple[str, ...] = ()
    form: DecodedImageFormat | None = None
    patients_known: bool = True
    patients_from: str = ""
    heads: tuple[DicomHeader, ...] = ()
    skipped: tuple[SkippedImage, ...] = ()
    missing: int = 0
    repeated: int = 0
    other_findings: Mapping[str, int] = field(default_factory=dict)
    skip_budget: float = 0.05
    has_masks: bool = False

    def __len__(self) -> int:
        return len(self.names)

    @property
    def longer_image_side(self) -> int:
        """Longer side, in pixels, of an image as the network receives it."""
        if self.form:
            return self.form.side
        first = self.read(0)
        return max(first.shape[:2]) if isinstance(first, np.ndarray) else 0

    @property
    def volume_size(self) -> VolumeSize | None:
        """Depth, height and width of a volume as the network receives it; None for pictures."""
        if self.form:
            return self.form.size if isinstance(self.form.size, tuple) else None
        first = self.read(0)
        if not isinstance(first, np.ndarray) or first.ndim != 4:
            return None
        depth, height, width = first.shape[:3]
        return depth, height, width

    def select_rows(self, rows: NDArray[np.intp]) -> "SiteImageSource":
        """Return the source with these images only."""

        def select(values: Sequence[T]) -> tuple[T, ...]:
            return tuple(values[row] for row in rows) if values else ()

        return replace(
            self,
            names=select(self.names),
            labels=self.labels[rows],
            patients=self.patients[rows],
            parts=self.parts[rows],
            read=lambda row: self.read(int(rows[row])),
            files=select(self.files),
            heads=select(self.heads),
        )


def open_site_image_source(settings: SiteSettings) -> SiteImageSource:
    """Find a site's images and read their labels, without reading the pixels of image files.

    Raises:
        BadInput: With every fault.
    """
    spec = settings.file.data
    if isinstance(
        spec,
        NpzDatasetSpec
        | MixtureDatasetSpec
        | CollectionsDatasetSpec
        | DigitsDatasetSpec
        | PhantomDatasetSpec
        | DrawnOrgansDatasetSpec
        | CompositesDatasetSpec
        | PluginDatasetSpec,
    ):
        return _open_whole_dataset_source(settings)

    archive = patients_from = ""
    has_masks = False
    sent: tuple[str, ...] = ()
    files: Sequence[Path] = ()
    heads = list[DicomHeader]()

    if isinstance(spec, DicomwebDatasetSpec):
        with settings.permit_data_hosts():
            answer = open_dicomweb_table(spec, settings.folder)
        table = answer.table
        server = answer.archive.client.server
        count = len({image.study for image in answer.archive.locations.values()})
        studies = format_count_with_noun(count, "study", "studies")
        lines = format_count_with_noun(answer.lines, "line")
        archive = f"{server.host_and_port} answers: {format_count_with_noun(len(table.files), 'image')} of {studies} "
        archive += f"for {lines} of the table"
        archive += "; its certificate is accepted" if server.context else ", without TLS"
        (connection,) = list_dataset_connections(spec, settings.folder, settings.secrets_path)
        sent = connection.sent
        if answer.patients_from_archive:
            named = int((~find_placeholder_patients(table.patients)).sum())
            total = len(table.files)
            patients_from = f"PatientID of {named:,} of {total:,} images, as {server.host_and_port} says"
    else:
        table = open_label_table(spec, settings.folder)
        heads = read_dicom_headers(table.files)
        files = table.files
        has_masks = table.masks is not None
        if table.masks is not None:
            form = DecodedImageFormat(spec.image_size, spec.color, spec.resize, spec.rendering_options)
            table = replace(table, labels=read_table_masks(table.masks, table.files, form, MEMORY_STORE)[1])
        if getattr(spec, "patient_column", "in the table") is None and list_dicom_patient_ids(heads):
            named = sum(bool(head.patient) for head in heads)
            patients_from = f"PatientID of {named:,} of {len(heads):,} files"

    names = tuple(file.name for file in table.files)
    if not isinstance(spec.image_size, int):
        names = tuple(table.files.names.tolist())  # folders of slices often have one name for all patients
    return SiteImageSource(
        names=names,
        labels=table.labels,
        class_names=table.class_names,
        patients=table.patients,
        parts=table.parts,
        read=lambda row: table.reader.read_picture_file(table.files[row]),
        opened=table.reader.keep_connection_open,
        reader_faults=table.reader.find_reading_faults,
        files=files,
        archive=archive,
        outside=describe_outside_pictures(table.files),
        sent=sent,
        form=DecodedImageFormat(spec.image_size, spec.color, spec.resize, spec.rendering_options),
        patients_known=are_all_patients_known(table.patients),
        patients_from=patients_from,
        heads=tuple(heads),
        missing=table.missing,
        repeated=table.repeated,
        other_findings=table.other_findings,
        skip_budget=spec.skip_budget,
        has_masks=has_masks,
    )


def _open_whole_dataset_source(settings: SiteSettings) -> SiteImageSource:
    splits = load_dataset(settings.file.data, settings.folder)
    sets: list[ImageSet] = [splits.train, splits.validation, splits.test]
    starts = np.cumsum([0, *map(len, sets)])

    def read_pixels_of_row(row: int) -> NDArray[np.uint8]:
        part = int(np.searchsorted(starts, row, side="right")) - 1
        pixels: NDArray[np.uint8] = sets[part].select_rows(np.array([row - starts[part]])).images[0]
        return pixels

    patients = np.concatenate([images.patients for images in sets])
    return SiteImageSource(
        names=tuple(f"{part}[{row}]" for part, images in zip(PARTS, sets, strict=True) for row in range(len(images))),
        labels=np.concatenate([images.labels for images in sets]),
        class_names=splits.class_names,
        patients=patients,
        parts=np.repeat(np.array(PARTS), [len(images) for images in sets]),
        read=read_pixels_of_row,
        patients_known=are_all_patients_known(patients),
        skipped=tuple(skip for images in sets for skip in images.skipped),
    )


def choose_evenly_spaced_rows(total: int, images: int | None) -> NDArray[np.intp]:
    """Choose ``images`` row numbers evenly between the first and the last row; all rows if ``images`` is None."""
    if images is None or images >= total:
        return np.arange(total)
    return np.unique(np.linspace(0, total - 1, images).round().astype(np.intp))
