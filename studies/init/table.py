"""``flwr-sim init``: inspect a user's own label table and its pictures, as a run reads them."""

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from polyclinic.common.errors import BadInput, Fault, raise_faults
from polyclinic.common.system.files import is_file, make_missing_input_fault
from polyclinic.data.base.image_set import find_placeholder_patients
from polyclinic.data.base.names import is_blank_cell, normalize_name
from polyclinic.data.base.spec import NO_FINDING, FolderDatasetSpec
from polyclinic.data.images.reading import (
    PICTURE_SUFFIXES,
    decode_picture,
    decode_png_samples,
    is_16_bit_png,
    is_grey_picture,
    open_png_or_jpeg,
)
from polyclinic.data.tables.csv import CsvColumn, CsvTable, find_missing_column_faults, read_csv_table
from polyclinic.data.tables.files import (
    PictureFileFinder,
    describe_other_file_extensions,
    drop_picture_extension,
)
from polyclinic.data.tables.judgement import split_diagnosis_code
from polyclinic.data.tables.labels import LabelTable, find_blank_cell_faults, open_folder_label_table
from polyclinic.data.tables.roles import (
    ColumnRoles,
    find_absent_picture_columns,
    find_ambiguous_picture_faults,
    find_label_columns_of_other_images,
    find_picture_columns,
    find_picture_folder,
    guess_column_roles,
    make_other_picture_labels_fault,
)
from polyclinic.studies.init.hospitals import (
    HospitalsInTable,
    detect_hospitals_in_table,
    has_spelling_variants,
    propose_class_synonyms,
)

USUAL_SIZE, SMALLEST_SIZE = 64, 16
LOOKED_AT = 50
"""Number of pictures, spread over the table, that are read to guess the settings."""
DEPTHS = (8, 10, 12, 14, 16)


@dataclass(frozen=True)
class InspectedDataset:
    """A label table and its pictures, with everything that was detected about them.

    Attributes:
        columns: All columns, with only the rows whose picture exists.
        spec: The data specification that a run would use.
        checked: The table as a run reads it, after all checks.
        hospitals: The hospitals of the table; None if no column names them.
        synonyms: Class name -> the name of the same class that may replace it (:func:`propose_class_synonyms`).
        rows: Number of rows in the whole table.
        present: Number of rows whose picture exists.
        absent: Names of missing pictures with their line numbers, as text; empty if none is missing.
        unnamed: Files in the folder that no row names, and that are pictures by their ending.
        other_pictures: Other columns that name pictures, which are not used.
        color: Whether some pictures have real colours, not grey stored as RGB.
        sizes: Height and width of some pictures; empty if only decoding would reveal them.
        depth: Bits used by 16-bit PNG files, guessed from their brightest sample; None without such files.
        display_problems: Sentences on DICOM files with different display settings.
    """

    table: Path
    images: Path
    columns: CsvTable
    roles: ColumnRoles
    spec: FolderDatasetSpec
    checked: LabelTable
    hospitals: HospitalsInTable | None
    synonyms: Mapping[str, str]
    rows: int
    present: int
    absent: str
    unnamed: tuple[str, ...]
    other_pictures: tuple[str, ...]
    color: bool
    sizes: tuple[tuple[int, int], ...]
    depth: int | None
    display_problems: tuple[str, ...]

    @property
    def image_size(self) -> int:
        """The proposed side length of images in pixels: that of the largest picture, within fixed limits.

        The limits are :data:`SMALLEST_SIZE` and :data:`USUAL_SIZE`; the latter is proposed if no size is known.
        """
        largest = max((max(size) for size in self.sizes), default=USUAL_SIZE)
        return min(USUAL_SIZE, max(SMALLEST_SIZE, largest))

    @property
    def classes_without_negatives(self) -> list[str]:
        """The classes that have positive labels (1) but no negative ones (0)."""
        shows, lacks = ((self.checked.labels == value).any(axis=0) for value in (1, 0))
        names = zip(self.checked.class_names, shows, lacks, strict=True)
        return [name for name, is_shown, is_lacking in names if is_shown and not is_lacking]

    @property
    def undecided_settings(self) -> list[str]:
        """The settings in the experiment file that a person has to decide on before a run."""
        keys = ["the names after other_findings"] if self.roles.doubtful else []
        keys += ["those after not_assessed"] if self.roles.not_assessed else []
        keys += ["patient_column"] if self.checked.patient_with_too_many_images else []
        keys += ["split_column"] if self.roles.possible_splits and self.roles.split is None else []
        are_codes = any(map(split_diagnosis_code, self.synonyms))  # G behind a code means nothing else than the code
        keys += ["synonyms"] if are_codes or has_spelling_variants(self.synonyms) else []
        has_no_negative = len(self.classes_without_negatives) == len(self.checked.class_names)
        if (self.roles.label_columns and has_no_negative) or self.has_only_findings_or_blanks:
            keys.append("blank")
        return keys

    @property
    def blank_finding_count(self) -> int:
        """The number of images whose cell in the column of findings is blank; 0 for label columns."""
        if self.roles.finding is None:
            return 0
        column, images = self.columns.get_column(self.roles.finding), self.columns.get_column(self.roles.image)
        is_blank = column.find_blank_rows()
        named = {*self.roles.classes, *self.roles.no_finding, *self.roles.doubtful, *self.roles.not_assessed}
        is_blank &= ~np.isin(column.places, [place for place, cell in enumerate(column.cells) if cell in named])
        return len(np.unique(images.places[is_blank]))

    @property
    def has_only_findings_or_blanks(self) -> bool:
        """True if some images have a blank cell in the column of findings, and all labelled images show a class.

        If it is True, a blank cell may mean that nothing was found. It is False if all class names are whole numbers,
        because these are grades of one disease.
        """
        if all(name.isdecimal() for name in self.roles.classes):
            return False
        labels = self.checked.labels[~np.isnan(self.checked.labels).all(axis=1)]
        return bool(self.blank_finding_count) and bool((labels == 1).any(axis=1).all())

    @cached_property
    def patient_source_and_count(self) -> tuple[str, int] | None:
        """Where patient names come from, and the number of patients; None if patients are not named."""
        if self.roles.patient is not None:
            return f"column {self.roles.patient}", len(set(self.checked.patients.tolist()))
        named = self.checked.patients[~find_placeholder_patients(self.checked.patients)]
        return ("PatientID of the DICOM files", len(set(named))) if len(named) else None


@dataclass(frozen=True)
class ColumnHints:
    """The user's statements about the columns of the table; None for a column that is to be detected.

    Attributes:
        source: Name of the column of hospitals; empty text if hospitals are to be made up.
        join_patients: Whether patients with similar names count as one patient.
        findings: Names of the label columns, or of the one column of findings.
    """

    image: str | None = None
    patient: str | None = None
    source: str | None = None
    join_patients: bool = False
    findings: tuple[str, ...] = ()


def inspect_label_table(table: Path, images: Path | None, hints: ColumnHints) -> InspectedDataset:
    """Read a label table, find its pictures, and examine some of them.

    Args:
        images: Folder that contains the pictures, directly or in subfolders; None to search beside the table.

    Raises:
        BadInput: If the table is unreadable or lacks pictures or labels, no picture exists, or a run would refuse the
            data, for instance for similar patient names.
    """
    if not is_file(table):
        raise BadInput([make_missing_input_fault(table)])
    if table.suffix == ".npz":
        problem = f"{table.name} holds arrays and is no table, for which init writes experiments."
        remedy = 'Write [data] with kind = "npz" yourself: docs/experiments.md, section [data].'
        raise BadInput([Fault("labels", problem, remedy)])
    columns = read_csv_table(table, "labels")
    required = {"--image-column": hints.image, "--patient-column": hints.patient}
    faults = find_missing_column_faults(table.name, columns, {**required, "--source-column": hints.source or None})
    for name in hints.findings:
        faults += find_missing_column_faults(table.name, columns, {"--findings": name})
    raise_faults(faults)
    given = [None if name is None else normalize_name(name) for name in (hints.image, hints.patient, hints.source)]
    listings, root = PictureFileFinder(), images or table.parent
    below = listings.list_files_recursively(root)
    try:
        column, *others = find_picture_columns(columns, (name for _, name in below), given[0])
    except BadInput as bad:
        hint = _suggest_remedy_for_folder_table(columns, {part for folder, _ in below for part in Path(folder).parts})
        raise BadInput([replace(fault, remedy=hint or fault.remedy) for fault in bad.faults]) from None
    raise_faults([] if given[0] else find_ambiguous_picture_faults((column, *others)))
    names = columns[column]
    folder = find_picture_folder(root, columns.get_column(column).cells, listings)
    on_disk = [None if folder is None else listings.find_file(str(folder), name) for name in names]
    present = np.array([name is not None for name in on_disk])
    if folder is None or not present.any():
        raise_faults(listings.find_unlistable_folder_faults("--images"))
        where = f"in {images}" if images else f"in the folder of {table.name} or below"
        raise BadInput([_make_no_pictures_fault(columns.get_column(column), column, where, root, listings)])
    from polyclinic.data.images.headers import (  # once nothing is wrong with the call
        describe_incomparable_dicom_greys,
        read_dicom_headers,
    )

    pictures, missing = columns.get_column(column), names[~present].tolist()
    places = [place for place in dict.fromkeys(pictures.places[~present].tolist()) if pictures.cells[place]]
    absent = pictures.describe_cell_lines(places, 3)
    hint = describe_other_file_extensions(str(folder), missing, listings).rstrip(".")
    absent += f". {hint}" if hint else ""
    columns = columns if present.all() else columns.select_rows(present)
    roles = guess_column_roles(columns, column, given[1], given[2], [normalize_name(name) for name in hints.findings])
    others += find_absent_picture_columns(columns, column, others)
    if not hints.findings and (
        foreign := find_label_columns_of_other_images(column, others, roles.label_columns, folder.name)
    ):
        raise BadInput([make_other_picture_labels_fault(column, others, roles.label_columns, foreign)])
    settings: dict[str, object] = {
        "kind": "folder",
        "images": str(folder.resolve()),
        "labels": str(table.resolve()),
        "image_column": column,
        "patient_column": roles.patient,
        "source_column": roles.source,
        "split_column": roles.split,
        "missing_files": "ignore",
        "similar_patients": "join" if hints.join_patients else "fault",
        "label_columns": roles.label_columns,
    }
    if roles.finding is not None:
        settings |= {"finding_column": roles.finding, "separator": roles.separator, "classes": tuple(roles.classes)}
        settings |= {"no_finding": (*NO_FINDING, *roles.no_finding), "other_findings": tuple(roles.doubtful)}
        settings["not_assessed"] = tuple(roles.not_assessed)
    spec = FolderDatasetSpec.model_validate(settings)
    checked = _read_and_check_label_table(spec, columns)
    hospitals = detect_hospitals_in_table(roles, checked)
    raise_faults(hospitals.find_unlabelled_hospital_faults(columns, roles, hints.findings) if hospitals else [])
    paths = {os.path.normpath(name) for name in on_disk if name}
    endings = {Path(name).suffix.lower() for name in paths}.union(PICTURE_SUFFIXES)
    files_below = (os.path.normpath(os.path.join(*place)) for place in listings.list_files_recursively(folder))
    unnamed = sorted(name for name in files_below if name not in paths and Path(name).suffix.lower() in endings)
    spread = np.unique(np.linspace(0, len(checked.files) - 1, LOOKED_AT).round().astype(int))
    files = [checked.files[row] for row in spread]
    looks, heads = [look for file in files if (look := _summarize_picture(file)) is not None], read_dicom_headers(files)
    brightest = max((look.brightest for look in looks if look.brightest is not None), default=None)
    return InspectedDataset(
        table,
        folder,
        columns,
        roles,
        spec,
        checked,
        hospitals,
        propose_class_synonyms(roles, checked, hospitals),
        rows=len(names),
        present=int(present.sum()),
        absent=absent,
        unnamed=tuple(unnamed),
        other_pictures=tuple(others),
        color=any(look.color for look in looks),
        sizes=tuple(look.size for look in looks),
        depth=None if brightest is None else next(bits for bits in DEPTHS if brightest < 1 << bits),
        display_problems=tuple(describe_incomparable_dicom_greys(heads)),
    )


def _make_no_pictures_fault(column: CsvColumn, name: str, where: str, root: Path, listings: PictureFileFinder) -> Fault:
    """Return the fault that none of the pictures in a column exists.

    The remedy names pictures that do exist under similar names: in another folder, or with another ending.

    Args:
        name: Name of the column.
        where: Phrase that says where the pictures were searched.
        root: Folder in which to search for similar names.
    """
    first = next(filter(None, column.cells), "")
    problem = f'none of the {len(column.places)} pictures of column "{name}" is {where}; the first is "{first}".'
    remedy = "Name the folder that the column's names start from."
    ends, paths = [match.end() for match in re.finditer(r"[/\\]+", first)], set[str]()
    for place, file in listings.list_files_recursively(root):
        paths |= {"/".join((*Path(place).parts[-depth:], file)) for depth in range(len(ends))}
        paths.add(file)
    stems = list(map(drop_picture_extension, column.cells))
    if (near := find_picture_folder(root, stems, listings)) is not None:
        remedy = describe_other_file_extensions(str(near), column.cells, listings) or remedy
    if end := next((end for end in ends if first[end:].replace("\\", "/") in paths), 0):
        remedy = f'"{first[end:]}" is there: remove the beginning "{first[:end]}" from the names in the table.'
    return Fault("--images", problem, remedy)


def _suggest_remedy_for_folder_table(columns: CsvTable, folders: Collection[str]) -> str:
    """Return a remedy for a table with a column that names folders instead of pictures; empty for other tables.

    Args:
        folders: Names of the folders that exist.
    """
    for name in columns:
        cells = [cell for cell in columns.get_column(name).cells if not is_blank_cell(cell)]
        if cells and sum(cell in folders for cell in cells) > len(cells) / 2:
            return (
                f'Column "{name}" names folders: a line for each picture is needed. Lines of Python that write such a '
                'table: docs/recipes.md, "A folder for each finding, or a table of studies".'
            )
    return ""


def _read_and_check_label_table(spec: FolderDatasetSpec, columns: CsvTable) -> LabelTable:
    """Read and check the table as a run does, with remedies in terms of the command's options."""
    faults = []
    if spec.source_column is not None:
        for fault in find_blank_cell_faults(columns.get_column(spec.source_column), "--source-column", "hospital"):
            remedy = 'Fill them, name another column, or add --source-column "" to deal patients over invented sites.'
            faults.append(replace(fault, remedy=remedy))
    try:
        table = open_folder_label_table(spec, Path())
    except BadInput as bad:
        join = (
            "Write each patient in one way. Or add --join-patients: each pair counts as one patient and stays on one "
        )
        join += "one side of the split, which is right for the split also if they are two."
        for fault in bad.faults:
            faults.append(replace(fault, remedy=join) if "similar_patients" in fault.remedy else fault)
    raise_faults(faults)
    return table


@dataclass(frozen=True)
class _PictureSummary:
    """Properties of one PNG or JPEG file.

    Attributes:
        size: Height and width.
        color: Whether the picture has real colours, not grey stored as RGB.
        brightest: Brightest sample of a 16-bit file; None for other files.
    """

    size: tuple[int, int]
    color: bool
    brightest: int | None


def _summarize_picture(picture: Path) -> _PictureSummary | None:
    """Decode a PNG or JPEG file and return its properties; None for another format or a damaged file."""
    try:
        with open_png_or_jpeg(picture) as image:
            size = image.height, image.width
        data, brightest = picture.read_bytes(), None
        if is_16_bit_png(data):
            samples = decode_png_samples(data)
            brightest = int(samples.max())
            shown = (samples / max(brightest, 1) * 255).astype(np.uint8)
        else:
            shown = np.asarray(decode_picture(data))
        return _PictureSummary(size, not is_grey_picture(shown), brightest)
    except (ValueError, OSError):
        return None
