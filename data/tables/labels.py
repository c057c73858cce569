"""Label tables of picture files, with the file, labels, patient and part of the split of each image.

The second half of this module reads a hospital's table with the columns that the configuration file names.
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from polyclinic.common.errors import BadInput, Fault, quote_names, raise_faults
from polyclinic.common.system.files import find_missing_folder_faults, is_file
from polyclinic.common.system.plain_text import format_count_with_noun, list_first_and_count_rest
from polyclinic.data.base.attributes import (
    UNKNOWN_NUMBER,
    ImageAttributes,
    parse_age_cell,
    parse_sex_cell,
    parse_year_cell,
)
from polyclinic.data.base.image_set import (
    PARTS,
    DatasetSplits,
    ImageSet,
    are_all_patients_known,
    describe_blank_pictures,
    find_placeholder_patients,
    make_placeholder_patient_names,
)
from polyclinic.data.base.names import (
    find_similar_names,
    is_anonymous_patient,
    is_blank_cell,
    is_missing_value,
    looks_like_dummy_patient,
    make_class_spelling_key,
    map_names_to_group_names,
    normalize_name_array,
)
from polyclinic.data.base.shared_pictures import settle_shared_pictures
from polyclinic.data.base.spec import FolderDatasetSpec, LabelColumnsSpec, PictureFolderSpec, PictureTableSpec
from polyclinic.data.base.splits import (
    StringArray,
    assign_images_to_parts,
    assign_patients_by_name,
    find_positive_images,
    find_shared_patient_faults,
    hold_out_patients,
    hold_out_patients_by_name,
    name_unknown_patients,
    split_patients,
)
from polyclinic.data.images.reading import DecodedImageFormat, refuse_too_many_skipped_images
from polyclinic.data.images.store import DecodedImageStore, FileIdentity, decode_pictures
from polyclinic.data.tables.cells import (
    NAME_LABEL_WORDS_REMEDY,
    FindingColumnRules,
    LabelColumnRules,
    parse_finding_column,
    parse_label_columns,
    parse_split_column,
)
from polyclinic.data.tables.copies import describe_contradicting_copies, group_rows_with_equal_contents
from polyclinic.data.tables.csv import CsvColumn, CsvTable, find_missing_column_faults, read_csv_table
from polyclinic.data.tables.files import (
    LazyPicturePaths,
    PictureFileFinder,
    describe_other_file_extensions,
    describe_outside_pictures,
)
from polyclinic.data.tables.masks import (
    MaskFiles,
    describe_empty_masks,
    find_mask_files,
    list_mask_columns,
    read_table_masks,
)


class PictureReader(Protocol):
    """Interface for reading pictures from the disk or a PACS.

    Several threads may read at once, while the context of :meth:`keep_connection_open` is open.
    """

    def keep_connection_open(self) -> AbstractContextManager[object]:
        """Return a context manager inside which pictures can be read."""

    def read_picture_file(self, file: Path) -> bytes | Path:
        """Return the bytes of an image file, or the path of a file on the disk."""

    def identify_image_content(self, file: Path) -> FileIdentity | None:
        """Return an identity that differs if the content may have changed; None if the content must be read."""

    def find_reading_faults(self) -> list[Fault]:
        """Return, after reading, the faults that ended it before all pictures were read; empty if there are none."""


class DiskPictureReader:
    """Reads pictures from files on this machine."""

    def keep_connection_open(self) -> AbstractContextManager[object]:
        return nullcontext()

    def read_picture_file(self, file: Path) -> bytes | Path:
        return file

    def identify_image_content(self, file: Path) -> FileIdentity | None:
        return FileIdentity.identify_file(file)

    def find_reading_faults(self) -> list[Fault]:
        return []


DISK_READER = DiskPictureReader()
_MAX_NAMES_EXAMINED = 20
_MAX_ROWS_OF_SMALL_TABLE = 20
"""In a table with at most this many rows, a patient may have most of the images."""
_MAX_PATIENT_SHARE = 0.2
"""A patient with more than this fraction of all images may be a placeholder, if the next limit is exceeded too."""
_MAX_MULTIPLE_OF_MEDIAN = 5
"""A patient with at least this many times the median number of images may be a placeholder."""
_MAX_DUMMY_SHARE = 0.05
"""A name such as 99 or 0000 is reported only if it has more than this fraction of all images."""


@dataclass(frozen=True)
class LabelTable:
    """Image files with their labels, patients and parts; entry i of each field belongs to row i.

    Attributes:
        files: The image files; for images in a PACS, their paths in the cache.
        labels: float32 ``(n, classes)``, NaN unknown.
        parts: ``(n,)`` "train", "validation" or "test".
        missing: Number of images left out because the file does not exist.
        repeated: Number of rows left out because they repeat an earlier row.
        other_findings: Finding that is not a class -> number of rows with it.
        joined_patients: Number of patient names that were replaced by a similar name.
        reader: Reads the images.
        attributes: Sex, age, year and device of each row; None if the settings name no column for them.
        attribute_notes: Notes for the user about cells of these columns that have no valid value.
        lines: int32 ``(n,)``, the line of the table in which each row begins; None if unknown.
        masks: The mask files of a table for segmentation; None for a table of labels. Until the masks are read,
            ``labels`` are 1 where a class is annotated, and NaN where it is not.
    """

    files: LazyPicturePaths
    labels: NDArray[np.float32]
    class_names: tuple[str, ...]
    patients: StringArray
    sources: StringArray
    parts: StringArray
    missing: int = 0
    repeated: int = 0
    other_findings: Mapping[str, int] = field(default_factory=dict)
    joined_patients: int = 0
    reader: PictureReader = DISK_READER
    attributes: ImageAttributes | None = None
    attribute_notes: tuple[str, ...] = ()
    lines: NDArray[np.int32] | None = None
    masks: MaskFiles | None = None

    @property
    def omissions(self) -> tuple[str, ...]:
        """Sentences that count the missing images and the joined patients."""
        sentences = [self.missing_sentence] if self.missing else []
        if self.joined_patients:
            names = format_count_with_noun(self.joined_patients, "name counts", "names count")
            sentences.append(f"Similar names of patients were joined: {names} as the patient of another name.")
        return tuple(sentences)

    @property
    def missing_sentence(self) -> str:
        """A sentence on the images that do not exist."""
        named = f"{len(self.files) + self.missing:,} images that the table names"
        verb = "is not there, and is" if self.missing == 1 else "are not there, and are"
        return f"Of {named}, {self.missing:,} {verb} left out."

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user about unusual contents of the table, such as many images of one patient."""
        notes = [self.other_findings_note] if self.other_findings else []
        notes += filter(None, [describe_outside_pictures(self.files), *self.attribute_notes])
        nameless = int(find_placeholder_patients(self.patients).sum())
        if 0 < nameless < len(self.patients) or (nameless and self.reader is not DISK_READER):
            count = format_count_with_noun(nameless, "image")
            note = (
                f"{count} without a PatientID: each study of these counts as a patient of its own, and may be of one "
            )
            notes.append(f"{note}who stands on the other side of the split.")
        if shared := self.patient_with_too_many_images:
            share = f"{shared[1]:,} of {len(self.patients):,} images, which stay on one side of the split"
            notes.append(
                f'"{shared[0]}" is the patient of {share}. Is it the name of a patient? If nobody knows the patients, '
                "write the picture's name in these cells."
            )
        return tuple(notes)

    @property
    def patient_with_too_many_images(self) -> tuple[str, int] | None:
        """A patient name with far more images than others, and the number of images; None if there is none.

        The name may be a placeholder for unknown patients.
        """
        counts = Counter(self.patients.tolist())
        median = float(np.median([*counts.values()])) if len(counts) > 1 else 0
        for name, count in counts.most_common(_MAX_NAMES_EXAMINED):
            is_large = 2 * count > max(len(self.patients), _MAX_ROWS_OF_SMALL_TABLE) or (
                count > max(len(self.patients) * _MAX_PATIENT_SHARE, _MAX_ROWS_OF_SMALL_TABLE / 2)
                and count >= _MAX_MULTIPLE_OF_MEDIAN * median
            )
            # In a table with numbers as names, 99 may be a real patient with a few more images than others.
            is_dummy = looks_like_dummy_patient(name) and count > len(self.patients) * _MAX_DUMMY_SHARE
            if is_large or (is_dummy and count >= _MAX_MULTIPLE_OF_MEDIAN * max(median, 1)):
                return name, count
        return None

    @property
    def other_findings_note(self) -> str:
        """A sentence about the findings in the table that are not classes."""
        others = sorted(self.other_findings.items(), key=lambda item: -item[1])
        texts = [f"{name} {count:,}" for name, count in others]
        rows = list_first_and_count_rest(texts, _MAX_NAMES_EXAMINED)
        return f"Other findings of the table count as no class, with the lines of each: {rows}."

    def select_rows(self, index: NDArray[np.intp]) -> "LabelTable":
        """Return the rows with these indices, in the given order."""
        return replace(
            self,
            files=LazyPicturePaths(self.files.folder, self.files.names[index]),
            labels=self.labels[index],
            patients=self.patients[index],
            sources=self.sources[index],
            parts=self.parts[index],
            attributes=None if self.attributes is None else self.attributes.select_rows(index),
            lines=None if self.lines is None else self.lines[index],
            masks=None if self.masks is None else self.masks.select_rows(index),
        )


def split_label_table(table: LabelTable, seed: int) -> LabelTable:
    """Split a table 70/10/20 by patient, as in the surgical aggregation paper.

    Rows with missing images are included, so that a missing image does not change the split.
    """
    split = split_patients(table.patients, find_positive_images(table.labels), seed)
    return replace(table, parts=assign_images_to_parts(table.patients, split))


def hold_out_validation_patients(table: LabelTable, fraction: float, seed: int) -> LabelTable:
    """Move a fraction of the training patients to the validation part, if that part is empty."""
    if "validation" in table.parts:
        return table
    train = np.flatnonzero(table.parts == "train")
    held_out = hold_out_patients(table.patients[train], find_positive_images(table.labels[train]), fraction, seed)
    parts = table.parts.astype("<U10")
    parts[train[held_out]] = "validation"
    return replace(table, parts=parts)


def find_patient_overlap_faults(where: str, table: LabelTable) -> list[Fault]:
    """Return faults for patients who are in two parts of the split.

    Args:
        where: The configuration key that the faults name.
    """
    return find_shared_patient_faults(where, {part: table.patients[table.parts == part] for part in PARTS})


def find_picture_files(
    files: LazyPicturePaths, spec: PictureFolderSpec
) -> tuple[LazyPicturePaths, NDArray[np.bool_], list[Fault]]:
    """Find the image files of a table on the disk, where names may be spelled slightly differently.

    Returns:
        The files in the spelling on the disk; a mask ``(n,)`` of the files that exist; the faults. Missing files are a
        fault if ``spec.missing_files`` is "fault" or if all are missing; a folder that cannot be listed is a fault too.
    """
    listings = PictureFileFinder(takes_folders=not isinstance(spec.image_size, int))
    folder = str(files.folder)
    names = listings.find_files_in_order(folder, files.names.tolist())
    is_present = np.array([name is not None for name in names], dtype=np.bool_)
    absent = np.flatnonzero(~is_present & (files.names != ""))
    faults = listings.find_unlistable_folder_faults()
    if len(absent) and not faults and (spec.missing_files == "fault" or not is_present.any()):
        problem = f"{len(absent)} of {len(names)} images named in {spec.labels} are not in {spec.images}: "
        problem += f"{quote_names((files.names[row] for row in absent), 5)}."
        remedy = 'Add them, or set missing_files = "ignore" to leave them out.'
        if hint := describe_other_file_extensions(folder, (files.names[row] for row in absent), listings):
            remedy = f"{hint} {remedy}"
        faults.append(Fault("data.images", problem, remedy))
    on_disk = [original if name is None else name for original, name in zip(files.names, names, strict=True)]
    return LazyPicturePaths.from_folder_and_names(files.folder, on_disk), is_present, faults


def drop_missing_files(table: LabelTable, spec: PictureFolderSpec) -> LabelTable:
    """Leave out rows whose image file is missing, and count them.

    Raises:
        BadInput: With the faults of :func:`find_picture_files`.
    """
    files, is_present, faults = find_picture_files(table.files, spec)
    raise_faults(faults)
    present = np.flatnonzero(is_present)
    return replace(replace(table, files=files).select_rows(present), missing=len(files) - len(present))


def decode_table_pictures(table: LabelTable, spec: PictureTableSpec, store: DecodedImageStore) -> DatasetSplits:
    """Decode the images of a table into one store, and return the three parts of the data set.

    Raises:
        BadInput: If the fraction of unreadable images exceeds ``spec.skip_budget``, or the PACS stops responding.
    """
    form = DecodedImageFormat(spec.image_size, spec.color, spec.resize, spec.rendering_options)
    files, reader = table.files, table.reader
    decoded = decode_pictures(
        files.names.tolist(),
        lambda row: reader.read_picture_file(files[row]),
        form,
        store,
        reader.keep_connection_open(),
        lambda row: reader.identify_image_content(files[row]),
    )
    raise_faults(table.reader.find_reading_faults())
    refuse_too_many_skipped_images("data.images", decoded.skipped, len(files), spec.skip_budget)
    readable = table.select_rows(decoded.rows)
    masks = None
    empty_masks_note = ""
    if readable.masks is not None:
        masks, labels = read_table_masks(readable.masks, readable.files, form, store)
        readable = replace(readable, labels=labels)
        empty_masks_note = describe_empty_masks(labels)
    groups = group_rows_with_equal_contents(enumerate(decoded.places.tolist()))
    copies = describe_contradicting_copies(groups, readable.files.names.tolist(), readable.labels, readable.patients)
    parts_of_skipped = table.parts[np.setdiff1d(np.arange(len(files)), decoded.rows)]
    images = ImageSet(
        stored=decoded.stored,
        labels=readable.labels,
        class_names=table.class_names,
        patients=readable.patients,
        sources=readable.sources,
        missing=table.missing,
        places=decoded.places,
        notes=tuple(filter(None, (*table.notes, copies, describe_blank_pictures(decoded.blank), empty_masks_note))),
        omissions=table.omissions,
        drops_color=decoded.drops_color,
        attributes=readable.attributes,
        lines=readable.lines,
        masks=masks,
    )
    parts, names = [], []
    for part in PARTS:
        names.append(readable.files.names[readable.parts == part].tolist())
        skipped = tuple(
            image for image, its_part in zip(decoded.skipped, parts_of_skipped, strict=True) if its_part == part
        )
        parts.append(replace(images.select_rows(np.flatnonzero(readable.parts == part)), skipped=skipped))
    return settle_shared_pictures("data.images", DatasetSplits(*parts), names, spec.duplicates, refuse=False)


def read_table_and_find_folder(spec: PictureFolderSpec, base: Path) -> tuple[CsvTable, Path, list[Fault]]:
    """Read the label table and locate the image folder; return both, and the faults of the folder.

    Args:
        base: The folder to which paths in ``spec`` are relative.

    Raises:
        BadInput: If the table cannot be read; the faults of the folder are included.
    """
    listings = PictureFileFinder()
    table = base / spec.labels
    folder = listings.find_folder_ignoring_spelling(base, spec.images)
    faults = find_missing_folder_faults("data.images", folder)
    if not is_file(table) and (name := listings.find_file(str(base), spec.labels)) is not None:
        table = base / name
    try:
        return read_csv_table(table, "data.labels", spec.largest_mb), folder, faults
    except BadInput as bad:
        raise BadInput([*faults, *bad.faults]) from bad


# ---------------------------------------------------------------------- a hospital's table


def open_folder_label_table(spec: FolderDatasetSpec, base: Path) -> LabelTable:
    """Read and check a hospital's label table for a folder of images, without reading an image.

    Args:
        base: The folder to which paths in ``spec`` are relative.

    Raises:
        BadInput: With the faults of the first stage that fails: folder and columns, then cells and files.
    """
    columns, folder, faults = read_table_and_find_folder(spec, base)
    required = {"data.image_column": spec.image_column, **list_configured_columns(spec), **list_mask_columns(spec)}
    raise_faults(faults + find_missing_column_faults(Path(spec.labels).name, columns, required))
    names = columns.get_column(spec.image_column)
    faults = find_blank_cell_faults(names, "data.image_column", "image")
    files = LazyPicturePaths.from_folder_and_names(folder, [names.cells[index] for index in names.places])
    files, is_present, missing = find_picture_files(files, spec)
    cells = parse_table_cells(spec, columns, faults)
    masks: MaskFiles | None = None
    if spec.mask_classes:
        try:
            masks = find_mask_files(spec, columns, base, folder)
        except BadInput as bad:
            raise BadInput([*faults, *missing, *bad.faults]) from None
    patients = cells.patients
    if patients is None:
        from polyclinic.data.images.headers import list_dicom_patient_ids, read_dicom_headers  # takes a second

        ids = list_dicom_patient_ids(read_dicom_headers(files))
        if ids is None:  # each image counts as a patient
            patients = make_placeholder_patient_names(len(files))
        else:
            id_names = normalize_name_array(np.array(ids, dtype=np.str_))
            patients = join_similar_patients(id_names, spec, "data.images", faults)
    table = LabelTable(
        files=files,
        labels=cells.labels if masks is None else masks.labels,
        class_names=spec.class_names,
        patients=patients,
        sources=cells.sources,
        parts=np.full(len(files), "train") if cells.parts is None else cells.parts,
        other_findings=cells.other_findings,
        joined_patients=cells.joined_patients,
        attributes=cells.attributes,
        attribute_notes=cells.attribute_notes,
        lines=columns.lines,
        masks=masks,
    )
    distinct, repeated = _find_distinct_image_rows(table, columns.lines, is_present)
    raise_faults(faults + repeated + missing)
    table = assign_split_parts(replace(table.select_rows(distinct), repeated=len(files) - len(distinct)), spec)
    raise_faults(find_patient_overlap_faults("data.split_column", table))
    present = np.flatnonzero(is_present[distinct])
    return replace(table.select_rows(present), missing=len(distinct) - len(present))


def find_files_by_line(spec: FolderDatasetSpec, base: Path) -> dict[int, Path]:
    """Return line number of a hospital's table -> the picture file that the line names, for files that exist.

    Raises:
        BadInput: If the table or the folder cannot be read.
    """
    columns, folder, faults = read_table_and_find_folder(spec, base)
    raise_faults(faults)
    names = columns.get_column(spec.image_column)
    files = LazyPicturePaths.from_folder_and_names(folder, [names.cells[index] for index in names.places])
    files, is_present, _ = find_picture_files(files, spec)
    return {int(columns.lines[row]): files[row] for row in np.flatnonzero(is_present).tolist()}


def _find_distinct_image_rows(
    table: LabelTable, lines: NDArray[np.int32], is_present: NDArray[np.bool_]
) -> tuple[NDArray[np.intp], list[Fault]]:
    """Return the first row of each image, and a fault if a later row contradicts the first row of the same image.

    Two names of the same file, such as a link, count as one image.

    Args:
        lines: ``(n,)``, the line of the file in which each row begins, for the message.
        is_present: ``(n,)``, True where the image file exists.
    """
    names, paths = table.files.names.tolist(), list[object]()
    for name, present in zip(names, is_present.tolist(), strict=True):
        try:
            status = os.stat(os.path.join(table.files.folder, name)) if present else None
        except OSError:
            status = None
        if status is None:
            paths.append(os.path.normpath(name) if name else "")
        else:  # device, inode and size reveal two names for the same file
            paths.append((status.st_dev, status.st_ino, status.st_size))
    if len(set(paths)) == len(paths):
        return np.arange(len(paths)), []
    first, others = dict[object, int](), dict[int, int]()
    for row, path in enumerate(paths):
        if path and (earlier := first.setdefault(path, row)) != row:
            others[row] = earlier
    contradictions = list[str]()
    for row, earlier in others.items():
        pairs = zip(table.class_names, table.labels[row], table.labels[earlier], strict=True)
        differ = [name for name, *labels in pairs if labels[0] != labels[1] and not np.isnan(labels).all()]
        columns = {"patient": table.patients, "source": table.sources, "part": table.parts}
        if table.masks is not None:
            columns["mask"] = table.masks.cells
        differ += [name for name, values in columns.items() if values[row] != values[earlier]]
        if "patient" in differ and not are_all_patients_known(table.patients[[row]]):
            differ.remove("patient")
        if differ:
            lines_of_both = f"lines {lines[earlier]} and {lines[row]}"
            contradictions.append(f'"{names[row]}" ({lines_of_both}: {list_first_and_count_rest(differ, 5)})')
    faults = []
    if contradictions:
        problem = f"{format_count_with_noun(len(contradictions), 'line')} about a picture of an earlier line: "
        problem += f"{list_first_and_count_rest(contradictions, 5)}."
        remedy = "Give each image one line, or lines that say the same: "
        remedy += 'docs/recipes.md, "A line for each reader or finding". If a column names the reader of each line, '
        remedy += "name it in flwr-sim init: --reader-column."
        faults.append(Fault("data.image_column", problem, remedy))
    return np.setdiff1d(np.arange(len(paths)), list(others)), faults


ATTRIBUTE_KEYS = ("sex_column", "age_column", "date_column", "device_column")
"""Keys of the columns that only counts use."""


def list_configured_columns(spec: LabelColumnsSpec) -> dict[str, str | None]:
    """Return configuration key -> name of a column; None for keys that are not set."""
    return {
        **{f"data.label_columns[{index}]": name for index, name in enumerate(spec.label_columns)},
        "data.finding_column": spec.finding_column,
        "data.patient_column": spec.patient_column,
        "data.source_column": spec.source_column,
        "data.split_column": spec.split_column,
        **{f"data.{key}": getattr(spec, key) for key in ATTRIBUTE_KEYS},
    }


def find_blank_cell_faults(column: CsvColumn, key: str, what: str) -> list[Fault]:
    """Return a fault if cells of a column, which must name an image, a study or a patient, are blank or placeholders.

    Args:
        key: The configuration key that names ``column``.
        what: Noun for the content of the column: "image", "study" or "patient".
    """
    is_placeholder = is_anonymous_patient if what == "patient" else is_missing_value
    placeholders = set(filter(is_placeholder, set(column.cells)))
    if not placeholders:
        return []
    blank = [index for index, cell in enumerate(column.cells) if cell in placeholders]
    lines = column.find_lines_of_cells(blank)
    article = "an" if what == "image" else "a"
    remedy = "Fill them, or remove them."
    if what == "patient":
        remedy = (
            "Write the patient in each line. If the number stands in a patient's first line only, as in merged cells, "
        )
        remedy += "fill it down. Write a picture's name only for a patient without other pictures."
    problem = f"{format_count_with_noun(len(lines), 'line')} without {article} {what}, line {lines[0]} first."
    return [Fault(key, problem, remedy)]


@dataclass(frozen=True)
class ParsedTableCells:
    """The parsed cells of a hospital's table, one entry per row.

    Attributes:
        labels: float32 ``(n, classes)``, NaN unknown.
        other_findings: Finding that is not a class -> number of rows with it.
        patients: ``(n,)``; None if the table has no column of patients.
        sources: ``(n,)``; empty texts if the table has no column of hospitals.
        parts: ``(n,)``; None if the table has no column of parts.
        joined_patients: Number of patient names that were replaced by a similar name.
        attributes: Sex, age, year and device; None if the settings name no column for them.
        attribute_notes: Notes about cells of these columns that have no valid value.
    """

    labels: NDArray[np.float32]
    other_findings: Mapping[str, int]
    patients: StringArray | None
    sources: StringArray
    parts: StringArray | None
    joined_patients: int = 0
    attributes: ImageAttributes | None = None
    attribute_notes: tuple[str, ...] = ()


def parse_table_cells(spec: LabelColumnsSpec, columns: CsvTable, faults: list[Fault]) -> ParsedTableCells:
    """Parse the cells of a hospital's table.

    Args:
        faults: List to which faults of cells are appended; the result has arbitrary values for invalid cells.
    """
    count = len(columns.lines)
    labels = np.full((count, len(spec.class_names_in_table)), np.nan, dtype=np.float32)
    other_findings: Mapping[str, int] = {}
    try:
        if spec.mask_classes:
            pass  # labels come from mask files
        elif spec.finding_column is None:
            label_rules = LabelColumnRules(
                uncertain=spec.uncertain,
                blank=spec.blank,
                where="data.label_columns",
                words=spec.label_words,
                remedy=NAME_LABEL_WORDS_REMEDY,
            )
            labels = parse_label_columns(columns, spec.label_columns, label_rules)
        else:
            keys = {"column": "data.finding_column", "others": "data.other_findings"}
            keys |= {key: f"data.{key}" for key in ("classes", "separator", "no_finding", "not_assessed")}
            rules = FindingColumnRules(
                classes=spec.class_names_in_table,
                separator=spec.separator,
                no_finding=spec.no_finding,
                others=spec.other_findings,
                not_assessed=spec.not_assessed,
                blank=spec.blank,
                keys=keys,
            )
            column = columns.get_column(spec.finding_column, with_line_ends=True)
            labels, other_findings = parse_finding_column(column, spec.finding_column, rules)
    except BadInput as bad:
        faults += bad.faults
    patients = parts = None
    joined_patients = 0
    sources = np.full(count, "")
    if spec.patient_column is not None:
        column = columns.get_column(spec.patient_column)
        faults += find_blank_cell_faults(column, "data.patient_column", "patient")
        patients = join_similar_patients(column.expand_to_row_cells(), spec, "data.patient_column", faults, column)
        joined_patients = len(set(column.cells)) - len(np.unique(patients))
    if spec.source_column is not None:
        column = columns.get_column(spec.source_column)
        site_names = ["" if is_blank_cell(cell) else convert_hospital_to_site_name(cell) for cell in column.cells]
        sources = np.array(site_names, dtype=np.str_)[column.places]
        similar = dict[str, str]()
        first = dict[str, str]()
        for name, cell in zip(site_names, column.cells, strict=True):
            for key in (make_class_spelling_key(cell), f"site {name}") if name else ():
                if (earliest := first.setdefault(key, cell)) != cell:
                    similar[cell] = earliest
        if pairs := _describe_name_pairs(similar, column):
            remedy = "Write each of them in one way: every source is a site of its own."
            faults.append(Fault("data.source_column", f"names that may be one hospital's: {pairs}.", remedy))
    if spec.split_column is not None:
        try:
            parts = parse_split_column(columns.get_column(spec.split_column), spec.split_column, "data.split_column")
        except BadInput as bad:
            faults += bad.faults
    labels = _merge_synonym_labels(labels, spec, columns, faults)
    attributes, notes = parse_attribute_cells(spec, columns)
    return ParsedTableCells(labels, other_findings, patients, sources, parts, joined_patients, attributes, notes)


def parse_attribute_cells(spec: LabelColumnsSpec, columns: CsvTable) -> tuple[ImageAttributes | None, tuple[str, ...]]:
    """Parse the columns of sex, age, date and device; return the attributes, and notes about invalid cells.

    An invalid cell counts as not stated and is not a fault, because no method trains on these columns.
    """
    if not any(getattr(spec, key) for key in ATTRIBUTE_KEYS):
        return None, ()
    attributes = ImageAttributes.make_unstated(len(columns.lines))
    notes = list[str]()
    parsed_columns = list[str]()
    words = {word.casefold(): sex for word, sex in spec.sex_words.items()}

    def parse_column(key: str, parse: Callable[[str], Any], unstated: Any, remedy: str) -> Any:
        name = getattr(spec, key)
        column = columns.get_column(name)
        values = ["" if is_blank_cell(cell) else parse(cell) for cell in column.cells]
        invalid = [
            index
            for index, (value, cell) in enumerate(zip(values, column.cells, strict=True))
            if value == unstated and not is_blank_cell(cell)
        ]
        if invalid:
            notes.append(f"{key}: not stated counts for {column.describe_cell_lines(invalid)}. {remedy}")
        return [unstated if value == "" else value for value in values], column.places

    if spec.sex_column:
        sexes, places = parse_column(
            "sex_column",
            lambda cell: parse_sex_cell(cell, words),
            "",
            'data.sex_words = {"WORD" = "female"} names one.',
        )
        attributes = replace(attributes, sex=np.array(sexes, np.str_)[places])
        parsed_columns.append("sex")
    if spec.age_column:
        ages, places = parse_column("age_column", parse_age_cell, UNKNOWN_NUMBER, "It needs years, or a year of birth.")
        attributes = replace(attributes, age=np.array(ages, np.int16)[places])
        parsed_columns.append("age")
    if spec.date_column:
        years, places = parse_column(
            "date_column", parse_year_cell, UNKNOWN_NUMBER, "It needs a date with four digits."
        )
        attributes = replace(attributes, year=np.array(years, np.int16)[places])
        parsed_columns.append("year")
    if spec.device_column:
        devices, places = parse_column("device_column", str, "", "")
        attributes = replace(attributes, device=np.array(devices, np.str_)[places])
        parsed_columns.append("device")
    return replace(attributes, columns=tuple(parsed_columns)), tuple(notes)


def _merge_synonym_labels(
    labels: NDArray[np.float32], spec: LabelColumnsSpec, columns: CsvTable, faults: list[Fault]
) -> NDArray[np.float32]:
    """Merge label columns that are synonyms of one class, and append a fault if they contradict each other in a row."""
    if not spec.synonyms:
        return labels
    merged = np.empty((len(labels), len(spec.class_names)), dtype=np.float32)
    for index, name in enumerate(spec.class_names):
        synonyms = [column for column in spec.class_names_in_table if spec.synonyms.get(column, column) == name]
        synonym_labels = labels[:, [spec.class_names_in_table.index(column) for column in synonyms]]
        merged[:, index] = np.fmax.reduce(synonym_labels, axis=1)
        differ = merged[:, index] != np.fmin.reduce(synonym_labels, axis=1)
        rows = np.flatnonzero(differ & ~np.isnan(merged[:, index]))
        if spec.label_columns and rows.size:
            lines = f"{format_count_with_noun(len(rows), 'line')}, line {columns.lines[rows[0]]} first"
            problem = f'{quote_names(synonyms)} mean "{name}" and say different things in {lines}.'
            remedy = "Correct these lines; if they are two classes, rename a column."
            faults.append(Fault("data.synonyms", problem, remedy))
    return merged


def convert_hospital_to_site_name(name: str) -> str:
    """Convert a hospital's name to a site name that is a valid folder name; other characters become ``_``."""
    return re.sub(r"[^\w .()-]|^\W", "_", name)[:100]


_SHORTENED_NUMBER = re.compile(r"\d[.,]\d+[Ee]\+?\d+|\d[Ee]\+\d+")
"""A long number that a spreadsheet has rewritten with an exponent, such as ``1.2E+15``."""
_LONG_NUMBER_PATTERN = re.compile(r"\d{16,}")
_CUT_NUMBER_PATTERN = re.compile(r"\d{15}0+")
"""A long number of which a spreadsheet kept 15 digits, and replaced the others by zeros."""


def join_similar_patients(
    patients: StringArray, spec: LabelColumnsSpec, where: str, faults: list[Fault], column: CsvColumn | None = None
) -> StringArray:
    """Replace similar patient names by one name; append a fault for them if ``spec.similar_patients`` is "fault".

    Patient numbers that a spreadsheet has shortened, such as ``1.2E+15``, are a fault too.

    Args:
        patients: ``(n,)`` normalised names.
        where: The configuration key of the names, for the fault.
        faults: List to which faults are appended.
        column: The table column with the names, for line numbers; None if they come from elsewhere.
    """
    distinct, inverse = np.unique(patients, return_inverse=True)
    names = [str(name) for name in distinct] if column is None else list(column.cells)
    shortened = [index for index, name in enumerate(names) if _SHORTENED_NUMBER.fullmatch(name)]
    if column and not shortened:
        cut = [index for index, name in enumerate(names) if _CUT_NUMBER_PATTERN.fullmatch(name)]
        long = [index for index, name in enumerate(names) if _LONG_NUMBER_PATTERN.fullmatch(name)]
        counts = column.count_rows_per_cell()
        shortened = cut if counts[cut].sum() > max(1, counts[long].sum() / 3) else []
    if column and shortened:
        problem = f"a spreadsheet has shortened the number of a patient: {column.describe_cell_lines(shortened)}."
        faults.append(Fault(where, problem, "Export the table again with this column as text."))
    similar = find_similar_names(names)
    if similar and spec.similar_patients == "fault":
        problem = f"{format_count_with_noun(len(similar), 'pair')} of patients may be one: "
        problem += f"{_describe_name_pairs(similar, column)}."
        remedy = 'Write each patient in one way. Or set similar_patients = "join": each pair counts as one patient and '
        remedy += "stays on one side of the split, which is right for the split also if they are two."
        faults.append(Fault(where, problem, remedy, cause="patients"))
    # Use the alphabetically first name of each group, so that the order of rows does not matter.
    group_names = map_names_to_group_names(similar)
    return np.array([group_names.get(name, name) for name in distinct.tolist()], dtype=np.str_)[inverse.reshape(-1)]


def _describe_name_pairs(similar: Mapping[str, str], column: CsvColumn | None = None) -> str:
    """Return a text with the first pairs of similar names, with line numbers if ``column`` is given."""

    def describe_line_of_name(name: str) -> str:
        return "" if column is None else f" (line {column.find_lines_of_cells([column.cells.index(name)])[0]})"

    first = list(similar.items())[:5]
    pairs = [
        f'"{other}"{describe_line_of_name(other)} and "{name}"{describe_line_of_name(name)}' for name, other in first
    ]
    return "; ".join(pairs) + (f" and {len(similar) - 5:,} more" if len(similar) > 5 else "")


def assign_split_parts(table: LabelTable, spec: LabelColumnsSpec) -> LabelTable:
    """Split the table by patient into training, validation and test.

    If a column of the table defines the parts, they stay. If this column has no validation part, training patients are
    held out for validation.
    """
    patients = name_unknown_patients(table.patients, lambda: table.files.names.astype(np.str_))
    if spec.split_column is None:
        return replace(table, parts=assign_patients_by_name(patients, spec.split_seed))
    if "validation" in table.parts:
        return table
    parts = table.parts.astype("<U10")
    held_out = hold_out_patients_by_name(patients, spec.validation_fraction, spec.split_seed)
    parts[held_out & (parts == "train")] = "validation"
    return replace(table, parts=parts)
