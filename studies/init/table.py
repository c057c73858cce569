"""For ``flwr-sim init``: examine a user's label table and its pictures by simple rules, as a run reads them."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from polyclinic.common.errors import BadInput, Fault, raise_faults
from polyclinic.common.system.files import (
    find_existing_output_faults,
    is_file,
    make_missing_input_fault,
    write_atomically,
)
from polyclinic.common.system.plain_text import format_count_with_noun, list_first_and_count_rest
from polyclinic.data.base.image_set import find_placeholder_patients
from polyclinic.data.base.names import find_similar_names, is_blank_cell, normalize_name
from polyclinic.data.base.spec import FolderDatasetSpec, Spacing, VolumeSize
from polyclinic.data.base.splits import choose_balanced_split_seed, name_unknown_patients
from polyclinic.data.images.file_kinds import PICTURE_SUFFIXES
from polyclinic.data.images.reading import (
    decode_picture,
    decode_png_samples,
    is_16_bit_png,
    is_grey_picture,
    open_png_or_jpeg,
)
from polyclinic.data.images.volume_header import VolumeHeader
from polyclinic.data.images.volume_notes import find_median_spacing, has_unlike_spacings, survey_volumes
from polyclinic.data.tables.csv import CsvColumn, CsvTable, find_missing_column_faults, read_csv_table, read_first_rows
from polyclinic.data.tables.files import (
    PictureFileFinder,
    describe_other_file_extensions,
    drop_picture_extension,
)
from polyclinic.data.tables.hospital_folders import list_folder_names
from polyclinic.data.tables.labels import LabelTable, find_blank_cell_faults, open_folder_label_table
from polyclinic.data.tables.search import PictureSearch
from polyclinic.studies.init.found_masks import FoundMasks, describe_masks, find_masks
from polyclinic.studies.init.hospitals import (
    MOST_HOSPITALS,
    HospitalsInTable,
    detect_hospitals_in_table,
    propose_spelling_synonyms,
)
from polyclinic.studies.init.known import KnownTable, recognise_table
from polyclinic.studies.init.lines import (
    PictureLines,
    find_patient_in_path,
    make_picture_table,
    must_join_lines,
)
from polyclinic.studies.init.mimic import MIMIC_COLUMNS, join_mimic_tables
from polyclinic.studies.init.pictures import name_series, spread_over_rows
from polyclinic.studies.init.questions import (
    PLACEHOLDER,
    Choice,
    ColumnHints,
    Question,
    describe_head,
    make_path_for_command,
)
from polyclinic.studies.init.roles import (
    ColumnRoles,
    FindingNames,
    ask_for_patients,
    assign_column_roles,
    list_names_in_names,
    list_no_finding_names,
    read_finding_names,
)

USUAL_SIZE, SMALLEST_SIZE = 64, 16
USUAL_SIDE, SMALLEST_SIDE = 48, 8
"""Proposed side length of volumes in voxels."""
VOXEL_TOLERANCE = 0.01
"""A fraction of a voxel up to this one adds no voxel to a grid."""
MOST_SPLIT_SEEDS = 200
MOST_HASHED_NAMES = 1_000_000
"""Number of patient names that are hashed in all tries of seeds together; a million take three seconds."""
DEPTHS = (8, 10, 12, 14, 16)
HEAD_ROWS = 4
_FOLDER_LEVEL = re.compile(r"/[1-9]")
"""Form of the answer ``/1``, ``/2``, ...: the first, second, ... folder in the path of a picture is its patient."""
_MAX_LISTED = 3
_MAX_OFFERED = 5


@dataclass(frozen=True)
class FoundPictures:
    """The picture files of a table.

    Attributes:
        folder: The folder from which ``lines.paths`` start.
        lines: The pictures of each row.
        names_lead_there: Whether the cells are paths from ``folder``, one picture per row.
        absent: Names of missing pictures with their line numbers, as text; empty if none is missing.
        unnamed: Pictures (by their extension) in the folder that no row names.
    """

    folder: Path
    lines: PictureLines
    names_lead_there: bool
    absent: str
    unnamed: tuple[str, ...]

    @property
    def is_present(self) -> NDArray[np.bool_]:
        """Return whether each row has a picture, ``(rows,)``."""
        return np.array([bool(paths) for paths in self.lines.paths], dtype=np.bool_)

    def list_folders(self) -> tuple[str, ...]:
        """Return the folders of the pictures, relative to ``folder``."""
        parents = {str(Path(path).parent) for paths in self.lines.paths for path in paths}
        return tuple(sorted(parents))

    def list_files(self) -> list[Path]:
        """Return the files in the order of the rows."""
        return [self.folder / path for paths in self.lines.paths for path in paths]


@dataclass(frozen=True)
class TableExamination:
    """The roles of a table's columns, as far as rules find them, and the open questions.

    Attributes:
        table: The user's table.
        head: The first rows of the file.
        has_headings: False if the first line is a row.
        columns: All columns.
        known: The public table with these headings; None for any other.
        roles: The roles of the columns, as far as they are known.
        pictures: The pictures; None while the picture column is a question.
        patients_in_paths: Path of each picture -> its patient, if a folder in the path is the patient.
        masks: The masks; None for a table of labels.
        questions: Questions that the user must answer before an experiment can be written.
    """

    table: Path
    hints: ColumnHints
    head: Sequence[Sequence[str]]
    has_headings: bool
    columns: CsvTable
    known: KnownTable | None
    roles: ColumnRoles
    pictures: FoundPictures | None
    patients_in_paths: Mapping[str, str]
    questions: tuple[Question, ...]
    masks: FoundMasks | None = None

    def describe_rules(self, width: int) -> list[str]:
        """Return lines for the user: the head of the table, and each role with its columns and rule."""
        lines = [f"{self.table.name}, the first lines of {len(self.columns.lines):,}:"]
        lines += describe_head(self.head, width)
        if not self.has_headings:
            lines.append("The first line names no columns: it is data. The columns are called column1, column2, ...")
        lines += [f"{role + ':':<11}{rule}" for role, rule in self.roles.rules.items()]
        return lines


def examine_label_table(table: Path, hints: ColumnHints) -> TableExamination:
    """Read a label table, assign roles to its columns, and find its pictures.

    Raises:
        BadInput: If the table is unreadable or lacks a column that the user named, or no picture exists.
    """
    if not is_file(table):
        raise BadInput([make_missing_input_fault(table)])
    if table.suffix == ".npz":
        problem = f"{table.name} holds arrays and is no table, for which init writes experiments."
        remedy = 'Write [data] with kind = "npz" yourself: docs/experiments.md, section [data].'
        raise BadInput([Fault("labels", problem, remedy)])
    search = PictureSearch(hints.images or table.parent, PictureFileFinder())
    has_headings, head = _read_head(table, search)
    columns = read_csv_table(table, "labels", has_headings=has_headings)
    hints = _normalize_hints(table, columns, hints)
    known = recognise_table(columns)
    columns, last_line = _take_last_line(columns, search, hints, known)
    masks, mask_questions = find_masks(table, columns, search, hints)
    mask_columns = () if masks is None else tuple(column.name for column in masks.columns)
    roles, questions = assign_column_roles(columns, search, hints, known, mask_columns)
    questions += mask_questions
    if masks is not None:
        rules = describe_masks(masks, mask_columns, hints, is_open=bool(mask_questions))
        roles = replace(roles, rules={**roles.rules, **rules})
    if last_line and hints.leave_out_last:
        roles = replace(roles, rules={**roles.rules, "last line": f"{last_line} is left out, as you said"})
    elif last_line:
        text = f"The last line names no picture, and is blank where all others are not: {last_line}. Leave it out?"
        questions.insert(0, Question("--leave-out-last-line", text, is_yes_or_no=True))
    pictures = None
    patients = list[str]()
    if roles.image:
        pictures, open_questions = _find_pictures(table, columns, roles, search, hints)
        questions += open_questions
    # Only folders below that of the pictures count: one above would be the same patient for all.
    paths = [] if pictures is None else [path for of_row in pictures.lines.paths for path in of_row]
    if roles.patient is not None and _FOLDER_LEVEL.fullmatch(roles.patient):
        patients = list_folder_names(paths, int(roles.patient[1:]))
        roles = replace(roles, patient=None)
        if not all(patients):
            problem = "not every picture lies in such a folder."
            raise BadInput([Fault(f"--patient-column {hints.patient}", problem, "Name a column, or another folder.")])
    elif roles.patient is None and not any(question.option == "--patient-column" for question in questions):
        patients, roles, open_questions = _find_patients(columns, roles, pictures, paths)
        questions += open_questions
    if roles.patient and not hints.join_patients:
        questions += _ask_about_similar_patients(columns.get_column(roles.patient))
    return TableExamination(
        table=table,
        hints=hints,
        head=head,
        has_headings=has_headings,
        columns=columns,
        known=known,
        roles=roles,
        pictures=pictures,
        patients_in_paths=dict(zip(paths, patients, strict=True)) if patients else {},
        questions=tuple(questions),
        masks=masks,
    )


def _find_patients(
    columns: CsvTable, roles: ColumnRoles, pictures: FoundPictures | None, paths: Sequence[str]
) -> tuple[list[str], ColumnRoles, list[Question]]:
    """Find patients that no column names: in DICOM files, then in the folders of the paths; else ask.

    Returns:
        The patient of each path, if the folders name them; the roles with the rule; the questions.
    """
    files = [] if pictures is None else pictures.list_files()
    in_paths = [find_patient_in_path(path) for path in paths]
    rules = dict(roles.rules)
    if _name_dicom_patients(files):
        rules["patients"] = "PatientID of the DICOM files, because no column has a well-known heading"
        return [], replace(roles, rules=rules), []
    if in_paths and all(in_paths):
        rules["patients"] = f"the folder in each path, such as {in_paths[0]}"
        return in_paths, replace(roles, rules=rules), []
    sources = list[str]()
    if roles.source is not None and pictures is not None:
        column = columns.get_column(roles.source)
        of_rows = zip(pictures.lines.paths, column.places.tolist(), strict=True)
        sources = [column.cells[place] for of_row, place in of_rows for _ in of_row]
    return [], roles, [ask_for_patients(columns, roles, _offer_folders(paths, sources))]


def _take_last_line(
    columns: CsvTable, search: PictureSearch, hints: ColumnHints, known: KnownTable | None
) -> tuple[CsvTable, str]:
    """Return the table without a last line that may hold totals, and this line as text; else the table and ``""``.

    Such a line names no file and is blank in a column that all other lines fill, or the user asks to leave it out.
    """
    count = len(columns.lines)
    blank = [columns.get_column(name).find_blank_rows() for name in columns]
    is_open = any(of_column[-1] and not of_column[:-1].any() for of_column in blank)
    if count < HEAD_ROWS or not (is_open or hints.leave_out_last):
        return columns, ""
    others = columns.select_rows(np.arange(count - 1))
    cells = {name: columns.get_column(name).cells[columns.get_column(name).places[-1]] for name in columns}
    if not hints.leave_out_last:
        image = assign_column_roles(others, search, hints, known)[0].image
        if not image or search.share_of_pictures([cells[image]])[0] > 0:
            return columns, ""
    filled = [cell for cell in cells.values() if not is_blank_cell(cell)]
    return others, f"line {columns.lines[-1]} ({list_first_and_count_rest(filled, _MAX_OFFERED)})"


def _offer_folders(paths: Sequence[str], sources: Sequence[str]) -> list[Choice]:
    """Return the folders of the paths as answers to who the patient is: each level with two names or more.

    Args:
        sources: The hospital of each path, which is no patient; empty if no column names hospitals.
    """
    choices = list[Choice]()
    for level, of_level in enumerate(("first", "second", "third"), start=1):
        folders = list_folder_names(paths, level)
        names = list(dict.fromkeys(folders))
        if all(folders) and len(names) > 1 and folders != list(sources):
            note = f"the {of_level} folder of each path: {list_first_and_count_rest(names, _MAX_LISTED)}"
            choices.append(Choice(f"/{level}", note))
    return choices


def _ask_about_similar_patients(column: CsvColumn) -> list[Question]:
    """Return a question if patients have similar names, such as P-007 and p7."""
    similar = find_similar_names(list(column.cells))
    if not similar:
        return []

    def describe(name: str) -> str:
        return f'"{name}" (line {column.find_lines_of_cells([column.cells.index(name)])[0]})'

    described = [f"{describe(other)} and {describe(name)}" for name, other in similar.items()]
    pairs = list_first_and_count_rest(described, _MAX_LISTED)
    text = f"{format_count_with_noun(len(similar), 'pair')} of patients may be one: {pairs}. Does each pair count as "
    text += "one? That is right for the split also if they are two. If not, write each patient in one way in the table."
    return [Question("--join-patients", text, is_yes_or_no=True)]


def _read_head(table: Path, search: PictureSearch) -> tuple[bool, list[list[str]]]:
    """Return whether the first line holds the headings, and the first rows.

    A first line is a row if it has a picture's name, or a path that ends in a slash. A name without an extension counts
    if it has a digit and is that of a file.
    """
    head = read_first_rows(table, HEAD_ROWS)
    first = head[0] if head else []
    is_row = any(cell.lower().endswith((*PICTURE_SUFFIXES, "/")) for cell in first)
    is_row |= any(any(map(str.isdigit, cell)) and search.share_of_pictures([cell])[0] > 0 for cell in first)
    return not is_row, head


def _normalize_hints(table: Path, columns: CsvTable, hints: ColumnHints) -> ColumnHints:
    """Return the hints with column names as the table has them.

    Raises:
        BadInput: If the table lacks a column.
    """
    required = {"--image-column": hints.image}
    required |= {"--patient-column": hints.patient or None, "--source-column": hints.source or None}
    required |= {"--reader-column": hints.reader}
    if hints.separator == "":
        faults = [Fault("--separator", "it is empty.", "Write the sign between the names, such as ','.")]
        raise_faults(faults)
    if _FOLDER_LEVEL.fullmatch(hints.patient or ""):
        required["--patient-column"] = None
    roles = {
        "--images": None if hints.images is None else str(hints.images),
        **required,
        **{f"--findings {name}": name for name in hints.findings},
        **{f"--mask-column {name}": name for name in hints.masks},
    }
    words = {"--present": hints.present or (), "--absent": hints.absent}
    _refuse_placeholders_and_shared_columns(roles, words)
    faults = find_missing_column_faults(table.name, columns, required)
    for name in hints.findings:
        faults += find_missing_column_faults(table.name, columns, {"--findings": name})
    for name in hints.masks:
        faults += find_missing_column_faults(table.name, columns, {"--mask-column": name})
    raise_faults(faults)

    def normalize(name: str | None) -> str | None:
        return None if name is None else normalize_name(name)

    return replace(
        hints,
        image=normalize(hints.image),
        patient=normalize(hints.patient),
        source=normalize(hints.source),
        reader=normalize(hints.reader),
        findings=tuple(map(normalize_name, hints.findings)),
        separator=None if hints.separator is None else hints.separator.replace("\\n", "\n").replace("\\t", "\t"),
        no_finding=tuple(map(normalize_name, hints.no_finding)),
        other_findings=tuple(map(normalize_name, hints.other_findings)),
        not_assessed=tuple(map(normalize_name, hints.not_assessed)),
        masks=tuple(map(normalize_name, hints.masks)),
        present=None if hints.present is None else tuple(map(normalize_name, hints.present)),
        absent=tuple(map(normalize_name, hints.absent)),
    )


def _refuse_placeholders_and_shared_columns(
    columns: Mapping[str, str | None], words: Mapping[str, Sequence[str]]
) -> None:
    """Refuse placeholders that were not replaced, and a column with two roles.

    Only the picture column may also be the patient column.

    Args:
        columns: Column by option.
        words: Words by option.
    """
    named = {option.split()[0]: name for option, name in columns.items() if name == PLACEHOLDER}
    open_options = [*named, *(option for option, of_option in words.items() if PLACEHOLDER in of_option)]
    faults = [Fault(option, f"{PLACEHOLDER} stands for an answer.", "Write the answer.") for option in open_options]
    places = {option: name for option, name in columns.items() if name and name != PLACEHOLDER}
    for option, name in places.items():
        for other, same in places.items():
            if other == option:
                break
            if same == name and (other, option) != ("--image-column", "--patient-column"):
                problem = f'column "{name}" is named for {other.split()[0]}, too.'
                faults.append(Fault(option.split()[0], problem, "Name another column for one of both."))
    raise_faults(faults)


def _find_pictures(
    table: Path, columns: CsvTable, roles: ColumnRoles, search: PictureSearch, hints: ColumnHints
) -> tuple[FoundPictures, list[Question]]:
    """Find the pictures of all rows, and return with them the questions about names that fit no file, or several.

    Raises:
        BadInput: If no picture exists, or a folder cannot be listed.
    """
    column = columns.get_column(roles.image)
    parts: Mapping[str, str] = {}
    questions = list[Question]()
    if roles.has_folders and roles.image == "study_id" and set(columns) >= MIMIC_COLUMNS:
        paths, parts = join_mimic_tables(table, columns, search)
        folder, names_lead_there = search.root, False
    elif roles.has_folders:
        of_cell = [_merge_series(search.root, search.list_pictures_of_folder(cell)) for cell in column.cells]
        paths = [of_cell[place] for place in column.places]
        folder, names_lead_there = search.root, False
    else:
        cells = [column.cells[place] for place in column.places]
        located = search.locate_pictures(cells)
        found = zip(located.paths, cells, strict=True)
        paths = [[path] if path else name_series(located.folder, cell) for path, cell in found]
        folder, names_lead_there = located.folder, located.names_lead_there
        if located.ambiguous:
            questions.append(_ask_which_folder(located.ambiguous, search.root))
    raise_faults(search.finder.find_unlistable_folder_faults("--images"))
    lost = np.array([not of_row for of_row in paths], dtype=np.bool_)
    missing = [place for place in dict.fromkeys(column.places[lost].tolist()) if column.cells[place]]
    if not any(paths) and not questions:
        where = f"in {hints.images}" if hints.images else f"in the folder of {table.name} or below"
        raise BadInput([_make_no_pictures_fault(column, roles.image, where, search)])
    absent = column.describe_cell_lines(missing, _MAX_LISTED)
    names = [column.cells[place] for place in missing]
    hint = describe_other_file_extensions(str(folder), names, search.finder).rstrip(".")
    absent += f". {hint}" if hint else ""
    if lost.any() and not hints.ignore_missing and not questions:
        count = format_count_with_noun(int(lost.sum()), "line names", "lines name")
        text = f"Of {len(lost):,} lines, {count} a picture that is not there: {absent}. Leave these lines out?"
        questions.append(Question("--ignore-missing-files", text, is_yes_or_no=True))
    lines = PictureLines(paths, parts)
    return FoundPictures(folder, lines, names_lead_there, absent, _list_unnamed(folder, paths, search)), questions


def _merge_series(root: Path, paths: Sequence[str]) -> list[str]:
    """Return the paths of pictures, with a folder in place of the slices of one DICOM series in it."""
    from polyclinic.data.images.dicom_series import merge_series_files  # takes a second

    return [path.relative_to(root).as_posix() for path in merge_series_files(root / path for path in paths)]


def _list_unnamed(folder: Path, paths: Sequence[Sequence[str]], search: PictureSearch) -> tuple[str, ...]:
    """Return the files in the folder that no row names, and that are pictures by their ending."""
    named = {os.path.normpath(path) for of_row in paths for path in of_row}
    endings = set(map(_get_ending, named)).union(PICTURE_SUFFIXES)
    below = (os.path.normpath(os.path.join(*place)) for place in search.finder.list_files_recursively(folder))
    others = (name for name in below if name not in named and os.path.dirname(name) not in named)  # slices of a series
    return tuple(sorted(name for name in others if _get_ending(name) in endings))


def _get_ending(name: str) -> str:
    """Return the extension of a file in lower case: ``.nii.gz`` of a packed volume, ``.gz`` of another packed file."""
    return name[len(drop_picture_extension(name)) :].lower() or Path(name).suffix.lower()


def _ask_which_folder(ambiguous: Mapping[str, tuple[str, str]], root: Path) -> Question:
    """Return the question which folder holds the pictures, for names that fit files in several folders."""
    first = next(iter(ambiguous.values()))
    text = f"{format_count_with_noun(len(ambiguous), 'name')} of the table fit two files, such as "
    text += f'"{first[0]}" and "{first[1]}". Which folder holds the pictures? If both are '
    text += "pictures of the table, write the folder before the name in its cells."
    folders = dict.fromkeys(_get_first_different_folder(pair, place) for pair in ambiguous.values() for place in (0, 1))
    choices = [Choice(make_path_for_command(root / folder)) for folder in folders]
    return Question("--images", text, tuple(choices[:_MAX_OFFERED]))


def _get_first_different_folder(pair: tuple[str, str], place: int) -> str:
    """Return the folder of one of two paths, down to the first part in which they differ."""
    own, other = (path.split("/")[:-1] for path in (pair[place], pair[1 - place]))
    same = 0
    while same < min(len(own), len(other)) and own[same] == other[same]:
        same += 1
    return "/".join(own[: same + 1])


def _name_dicom_patients(files: Sequence[Path]) -> bool:
    """Return True if some pictures, spread over the table, are DICOM files that name patients."""
    from polyclinic.data.images.headers import list_dicom_patient_ids, read_dicom_headers  # takes a second

    spread = [files[row] for row in spread_over_rows(len(files))]
    return bool(files) and list_dicom_patient_ids(read_dicom_headers(spread)) is not None


@dataclass(frozen=True)
class InspectedDataset:
    """A label table and its pictures, with everything that the experiment and the report say about them.

    Attributes:
        table: The table that the experiment names: the user's own, or one with a line for each picture that init wrote.
        own_table: The user's table.
        columns: The columns of ``table``, with only the rows whose picture exists.
        own_columns: The columns of ``own_table``, with all rows.
        names: The names in the column of findings; None for label columns.
        own_finding: The column of findings of the user's table; None for label columns.
        own_names: The names in ``own_finding``, also where ``table`` has label columns made from them.
        spec: The data specification that a run would use.
        checked: The table as a run reads it, after all checks.
        hospitals: The hospitals of the table; None if no column names them.
        synonyms: Class name -> the name that differs only in spelling and may replace it.
        rows: Number of rows in the user's table.
        left_out: Number of its rows whose picture does not exist.
        absent: Names of missing pictures with their line numbers, as text; empty if none is missing.
        unnamed: Files in the folder that no row names, and that are pictures by their ending.
        folders: The folders of the pictures, if there are several that the table does not name.
        joining_rule: The rule by which several lines of a picture became one; empty if none did.
        color: Whether some pictures have real colours, not grey stored as RGB.
        sizes: Height and width of some pictures; empty if only decoding would reveal them. Depth, height and width of
            some volumes.
        depth: Bits used by 16-bit PNG files, guessed from their brightest sample; None without such files.
        display_problems: Sentences on DICOM files with different display settings.
        volumes: The grids of some volumes; empty if the files are pictures.
        masks: The masks; None for a table of labels.
    """

    table: Path
    own_table: Path
    images: Path
    columns: CsvTable
    own_columns: CsvTable
    roles: ColumnRoles
    names: FindingNames | None
    own_finding: str | None
    own_names: FindingNames | None
    known: KnownTable | None
    spec: FolderDatasetSpec
    checked: LabelTable
    hospitals: HospitalsInTable | None
    synonyms: Mapping[str, str]
    rows: int
    left_out: int
    absent: str
    unnamed: tuple[str, ...]
    folders: tuple[str, ...]
    joining_rule: str
    color: bool
    sizes: tuple[tuple[int, ...], ...]
    depth: int | None
    display_problems: tuple[str, ...]
    volumes: tuple[VolumeHeader, ...] = ()
    masks: FoundMasks | None = None

    @property
    def image_size(self) -> int | VolumeSize:
        """The proposed size of images: that of the largest one, within fixed limits.

        The limits are :data:`SMALLEST_SIZE` and :data:`USUAL_SIZE` pixels; the latter is proposed if no size is known.
        Of volumes it is :func:`choose_volume_size`.
        """
        if self.volumes:
            return choose_volume_size(self.volumes)
        largest = max((max(size) for size in self.sizes), default=USUAL_SIZE)
        return min(USUAL_SIZE, max(SMALLEST_SIZE, largest))

    @cached_property
    def split_seed(self) -> int:
        """The seed that divides the patients best over training, validation and test, of each class and hospital."""
        patients = name_unknown_patients(self.checked.patients, lambda: self.checked.files.names.astype(np.str_))
        # Of many patients any seed makes balanced parts, and each try takes its time.
        seeds = min(MOST_SPLIT_SEEDS, max(1, MOST_HASHED_NAMES // len(patients)))
        labels = self.checked.labels
        if self.hospitals is not None and len(self.hospitals.names) <= MOST_HOSPITALS:
            is_there = self.checked.sources[:, None] == np.array(self.hospitals.names)  # (images, hospitals)
            labels = np.concatenate([labels, is_there.astype(np.float32)], axis=1)
        return choose_balanced_split_seed(patients, labels, seeds)

    @property
    def classes_without_negatives(self) -> list[str]:
        """The classes that have positive labels (1) but no negative ones (0)."""
        shows, lacks = ((self.checked.labels == value).any(axis=0) for value in (1, 0))
        names = zip(self.checked.class_names, shows, lacks, strict=True)
        return [name for name, is_shown, is_lacking in names if is_shown and not is_lacking]

    @property
    def undecided_settings(self) -> list[str]:
        """The settings in the experiment file that a person has to decide on before a run."""
        keys = ["patient_column"] if self.checked.patient_with_too_many_images else []
        keys += ["split_column"] if self.roles.unread_splits and self.roles.split is None else []
        keys += ["synonyms"] if self.synonyms else []
        keys += ["classes"] if self.names_in_names else []
        has_no_negative = len(self.classes_without_negatives) == len(self.checked.class_names)
        is_open = self.spec.blank == "unknown"
        if is_open and ((self.roles.label_columns and has_no_negative) or self.has_only_findings_or_blanks):
            keys.append("blank")
        return keys

    @cached_property
    def names_in_names(self) -> dict[str, str]:
        """Class name -> another class name that it contains as whole words; empty for label columns."""
        return {} if self.own_names is None or self.known is not None else list_names_in_names(self.checked.class_names)

    @property
    def class_count(self) -> int:
        """The number of classes once those that differ only in spelling are one."""
        return len(self.checked.class_names) - len(self.synonyms)

    @property
    def unlabelled_count(self) -> int:
        """The number of images without any label."""
        return int(np.isnan(self.checked.labels).all(axis=1).sum())

    @property
    def has_only_findings_or_blanks(self) -> bool:
        """True if some images have a blank cell in the column of findings, and all labelled images show a class.

        If it is True, a blank cell may mean that nothing was found. It is False if all class names are whole numbers,
        because these are grades of one disease.
        """
        if self.names is None or self.roles.finding is None or all(name.isdecimal() for name in self.names.classes):
            return False
        has_blanks = self.columns.get_column(self.roles.finding).find_blank_rows().any()
        labels = self.checked.labels[~np.isnan(self.checked.labels).all(axis=1)]
        return bool(has_blanks) and bool((labels == 1).any(axis=1).all())

    def describe_blank_findings(self) -> str:
        """Return the blank cells of the column of findings with their numbers of rows, such as ``empty 3, n/a 2``."""
        column = self.columns.get_column(str(self.roles.finding))
        counts = zip(column.cells, column.count_rows_per_cell().tolist(), strict=True)
        return ", ".join(f"{cell or 'empty'} {count}" for cell, count in counts if is_blank_cell(cell))

    @cached_property
    def patient_source_and_count(self) -> tuple[str, int] | None:
        """Where patient names come from, and the number of patients; None if patients are not named."""
        if self.roles.patient:
            return f"column {self.roles.patient}", len(set(self.checked.patients.tolist()))
        named = self.checked.patients[~find_placeholder_patients(self.checked.patients)]
        return ("PatientID of the DICOM files", len(set(named))) if len(named) else None


def choose_volume_spacing(volumes: Sequence[VolumeHeader]) -> Spacing | None:
    """Return the spacing to which volumes are resampled; None if their voxels are alike, and none is necessary.

    It is the median, made coarser where it takes that for at most :data:`USUAL_SIDE` voxels a side: the finest axes
    first, so that voxels become more alike in all directions.
    """
    if not has_unlike_spacings(volumes):
        return None
    coarsest = float(_measure_extents(volumes).max()) / USUAL_SIDE
    depth, height, width = (float(f"{max(step, coarsest):.3g}") for step in find_median_spacing(volumes))
    return depth, height, width


def choose_volume_size(volumes: Sequence[VolumeHeader]) -> VolumeSize:
    """Return a grid for some volumes, of at most :data:`USUAL_SIDE` voxels a side.

    Its voxels are those of :func:`choose_volume_spacing`; without one they are equally wide in all directions, as wide
    as the finest of the files, or as that limit takes.
    """
    extents = _measure_extents(volumes)
    spacing = choose_volume_spacing(volumes)
    finest = min(min(volume.spacing) for volume in volumes)
    voxel = max(finest, float(extents.max()) / USUAL_SIDE) if spacing is None else np.array(spacing)
    sides = np.ceil(extents / voxel - VOXEL_TOLERANCE).clip(SMALLEST_SIDE, USUAL_SIDE).astype(int).tolist()
    depth, height, width = sides
    return depth, height, width


def _measure_extents(volumes: Sequence[VolumeHeader]) -> NDArray[np.float64]:
    """Return the largest length of volumes along each axis, in mm."""
    longest: NDArray[np.float64] = np.max([np.multiply(volume.shape, volume.spacing) for volume in volumes], axis=0)
    return longest


def complete_dataset(examination: TableExamination, new_table: Path) -> InspectedDataset:
    """Read the labels of a table about which nothing is open, and examine some of its pictures.

    A table that has not one line for each picture, or whose names do not lead to the pictures, is written anew.

    Args:
        new_table: Path of the new table; written only if it is necessary.

    Raises:
        BadInput: If a run would refuse the data, for instance for similar patient names, or the file exists already.
    """
    assert not examination.questions
    assert examination.pictures is not None
    pictures, roles = examination.pictures, examination.roles
    is_present = pictures.is_present
    columns = examination.columns if is_present.all() else examination.columns.select_rows(is_present)
    # A run reads the cells of all rows, also of those without a picture.
    names = (
        read_finding_names(examination.columns, roles.finding, examination.hints, examination.known)
        if roles.finding
        else None
    )
    hints = examination.hints
    if names is None and (hints.separator is not None or hints.no_finding or hints.other_findings):
        problem = "these are options for a column of names, and the labels are columns of 0 and 1."
        where = "--separator, --no-finding, --other-finding"
        raise BadInput([Fault(where, problem, "Leave them out, or add --findings.")])
    own_names = names
    table, joining_rule = examination.table, ""
    one_line_each = pictures.names_lead_there and not must_join_lines(columns, roles)
    one_line_each = one_line_each and not hints.leave_out_last  # a run would read the last line, too
    if not (examination.has_headings and one_line_each) or examination.patients_in_paths or pictures.lines.parts:
        raise_faults(find_existing_output_faults(new_table))
        paths = [of_row for of_row in pictures.lines.paths if of_row]
        lines = PictureLines(paths, pictures.lines.parts)
        made = make_picture_table(columns, roles, names, lines, patients_in_paths=examination.patients_in_paths)
        write_atomically(new_table, made.text.encode())
        table, roles, joining_rule = new_table, made.roles, made.rule
        columns = read_csv_table(table, "labels")
        names = names if roles.finding else None
    listed = pictures.list_files()
    volumes = survey_volumes([listed[row] for row in spread_over_rows(len(listed))])
    spec = _make_spec(examination, table, pictures.folder, roles, names)
    if volumes:
        spacing = choose_volume_spacing(volumes)
        spec = spec.model_copy(update={"image_size": choose_volume_size(volumes), "spacing": spacing})
    checked = _read_and_check_label_table(spec, columns)
    hospitals = detect_hospitals_in_table(roles, checked, examination.masks)
    raise_faults(hospitals.find_unlabelled_hospital_faults(columns, roles) if hospitals else [])
    from polyclinic.data.images.headers import (  # once nothing is wrong with the call
        describe_incomparable_dicom_greys,
        read_dicom_headers,
    )

    files = [checked.files[row] for row in spread_over_rows(len(checked.files))]
    summaries = [summary for file in files if (summary := _summarize_picture(file)) is not None]
    brightest = max((summary.brightest for summary in summaries if summary.brightest is not None), default=None)
    return InspectedDataset(
        table=table,
        own_table=examination.table,
        images=pictures.folder,
        columns=columns,
        own_columns=examination.columns,
        roles=roles,
        names=names,
        own_finding=examination.roles.finding,
        own_names=own_names,
        known=examination.known,
        spec=spec,
        checked=checked,
        hospitals=hospitals,
        synonyms=propose_spelling_synonyms(checked.class_names),
        rows=len(is_present),
        left_out=int((~is_present).sum()),
        absent=pictures.absent,
        unnamed=_leave_out_masks(pictures, examination),
        folders=() if pictures.names_lead_there else pictures.list_folders(),
        joining_rule=joining_rule,
        color=any(summary.color for summary in summaries),
        sizes=tuple(volume.shape for volume in volumes) or tuple(summary.size for summary in summaries),
        depth=None if brightest is None else next(bits for bits in DEPTHS if brightest < 1 << bits),
        display_problems=() if volumes else tuple(describe_incomparable_dicom_greys(read_dicom_headers(files))),
        volumes=tuple(volumes),
        masks=examination.masks,
    )


def _leave_out_masks(pictures: FoundPictures, examination: TableExamination) -> tuple[str, ...]:
    """Return the pictures of the folder that no line names as an image or a mask."""
    masks = examination.masks
    if masks is None:
        return pictures.unnamed
    named = set[str]()
    for column in masks.columns:
        cells = examination.columns.get_column(column.name).cells
        named.update(os.path.realpath(masks.folder / cell) for cell in cells)
    return tuple(name for name in pictures.unnamed if os.path.realpath(pictures.folder / name) not in named)


def _make_spec(
    examination: TableExamination, table: Path, folder: Path, roles: ColumnRoles, names: FindingNames | None
) -> FolderDatasetSpec:
    hints = examination.hints
    settings: dict[str, object] = {
        "kind": "folder",
        "images": str(folder.resolve()),
        "labels": str(table.resolve()),
        "image_column": roles.image,
        "patient_column": roles.patient or None,
        "source_column": roles.source,
        "split_column": roles.split,
        "missing_files": "ignore" if hints.ignore_missing else "fault",
        "similar_patients": "join" if hints.join_patients else "fault",
        "label_columns": roles.label_columns,
        "present": roles.words.present,
        "absent": roles.words.absent,
        "not_assessed": roles.words.not_assessed,
    }
    if (masks := examination.masks) is not None:
        own: dict[str, object] = {"mask_columns": dict(masks.classes.columns)}
        if masks.classes.values:
            own = {"mask_values": dict(masks.classes.values), "mask_column": masks.columns[0].name}
        if masks.folder.resolve() != folder.resolve():
            own["masks"] = str(masks.folder.resolve())
        settings |= own
    elif examination.known is not None and roles.finding is None:
        settings |= examination.known.settings
    if names is not None:
        settings |= {"finding_column": roles.finding, "separator": names.separator, "classes": tuple(names.classes)}
        settings["no_finding"] = list_no_finding_names(names)
        settings["other_findings"] = names.other_findings
        settings["not_assessed"] = tuple(names.not_assessed)
    return FolderDatasetSpec.model_validate(settings)


def _make_no_pictures_fault(column: CsvColumn, name: str, where: str, search: PictureSearch) -> Fault:
    """Return the fault that none of the pictures in a column exists.

    The remedy names pictures that exist with similar names: in another folder, or with another extension.

    Args:
        name: Name of the column.
        where: Phrase for where the pictures were searched.
    """
    first = next(filter(None, column.cells), "")
    problem = f'none of the {len(column.places)} pictures of column "{name}" is {where}; the first is "{first}".'
    remedy = "Name the folder that the column's names start from."
    if (near := search.find_folder_of_other_endings(column.cells)) is not None:
        remedy = describe_other_file_extensions(str(near), column.cells, search.finder) or remedy
    for separator in re.finditer(r"[/\\]+", first):
        rest = first[separator.end() :]
        if search.share_of_pictures([rest])[0] > 0:
            beginning = first[: separator.end()]
            remedy = f'"{rest}" is there: remove the beginning "{beginning}" from the names in the table.'
            break
    return Fault("--images", problem, remedy)


def _read_and_check_label_table(spec: FolderDatasetSpec, columns: CsvTable) -> LabelTable:
    """Read and check the table as a run does, with remedies in terms of the command's options."""
    faults = []
    if spec.source_column is not None:
        for fault in find_blank_cell_faults(columns.get_column(spec.source_column), "--source-column", "hospital"):
            remedy = (
                'Fill them, name another column, or add --source-column "" to divide patients over simulated sites.'
            )
            faults.append(replace(fault, remedy=remedy))
    try:
        table = open_folder_label_table(spec, Path())
    except BadInput as bad:
        join = (
            "Write each patient in one way. Or add --join-patients: each pair counts as one patient and stays on one "
        )
        join += "side of the split, which is right for the split also if they are two."
        for fault in bad.faults:
            faults.append(replace(fault, remedy=join) if "similar_patients" in fault.remedy else fault)
    raise_faults(faults)
    return table


@dataclass(frozen=True)
class _PictureSummary:
    """Properties of a PNG or JPEG file.

    Attributes:
        size: Height and width.
        color: Whether the picture has colours; grey stored as RGB has none.
        brightest: Brightest sample of a 16-bit file; None for others.
    """

    size: tuple[int, int]
    color: bool
    brightest: int | None


def _summarize_picture(picture: Path) -> _PictureSummary | None:
    """Decode a PNG or JPEG file and return its properties; None for other formats and damaged files."""
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
