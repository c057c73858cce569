"""Make a table with one line for each picture: of several folders, folders in cells, or several readers."""

import csv
import io
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from shlex import quote

from polyclinic.common.errors import BadInput, Fault
from polyclinic.common.system.plain_text import list_first_and_count_rest
from polyclinic.data.tables.cells import interpret_label_cell
from polyclinic.data.tables.columns import READER_HEADINGS, list_columns_by_heading
from polyclinic.data.tables.csv import CsvColumn, CsvTable
from polyclinic.studies.init.label_words import NO_LABEL_WORDS
from polyclinic.studies.init.roles import ColumnRoles, FindingNames, list_no_finding_names, split_names_of_cell

PICTURE_HEADING, PATIENT_HEADING, SPLIT_HEADING = "file", "patient", "split"
_PATIENT_FOLDER = re.compile(r"(?:patient|sub)[-_]?\d+", re.IGNORECASE)
_MAX_LISTED = 3
Label = str
"""A cell of the new table: ``1``, ``0``, ``-1`` where as many readers say yes as no, or blank."""


@dataclass(frozen=True)
class PictureLines:
    """The pictures of each line of a table.

    Attributes:
        paths: For each row of the table, the paths of its pictures; empty if there are none.
        parts: Path -> part of the split, from a table of its own; empty if there is no such table.
    """

    paths: Sequence[Sequence[str]]
    parts: Mapping[str, str]


@dataclass(frozen=True)
class PictureTable:
    """A new table with one line for each picture.

    Attributes:
        text: The csv file.
        roles: The roles of its columns.
        rule: The rule by which several lines of a picture became one; empty if no picture had several.
    """

    text: str
    roles: ColumnRoles
    rule: str


def find_patient_in_path(path: str) -> str:
    """Return the folder of a path that is called patient or sub and a number: ``patient00042``; empty without one."""
    return next((part for part in path.split("/")[:-1] if _PATIENT_FOLDER.fullmatch(part)), "")


def find_reader_column(roles: ColumnRoles) -> str | None:
    """Return the column that says who read the picture of a line; None if there is none."""
    return roles.reader or next(iter(list_columns_by_heading(roles.unused, READER_HEADINGS)), None)


def must_join_lines(columns: CsvTable, roles: ColumnRoles) -> bool:
    """Return True if pictures have several lines that only together say what a picture shows.

    That is so with several readers of a picture, and with a line for each finding. In any other table, lines of one
    picture that differ contradict each other.
    """
    images = columns.get_column(roles.image)
    if len(images.cells) == len(images.places):  # as many lines as pictures
        return False
    if find_reader_column(roles) is not None:
        return True
    if roles.finding is None:
        return False
    findings = columns.get_column(roles.finding)
    pairs = set(zip(images.places.tolist(), findings.places.tolist(), strict=True))
    return len(pairs) > len(images.cells)


def make_picture_table(
    columns: CsvTable,
    roles: ColumnRoles,
    names: FindingNames | None,
    lines: PictureLines,
    *,
    patients_in_paths: Mapping[str, str],
) -> PictureTable:
    """Return a table with one line for each picture, and only the columns that have a role.

    Args:
        names: The names in the column of findings; None for label columns.
        lines: The pictures of each line.
        patients_in_paths: Path -> patient, to write a column of the patients in the folders' names; else empty.

    Raises:
        BadInput: If lines of one picture disagree on its patient, hospital or part,
            or on a finding without a reader who decides.
    """
    pairs = [(path, row) for row, paths in enumerate(lines.paths) for path in paths]
    rows_of = defaultdict[str, list[int]](list)
    for path, row in pairs:
        rows_of[path].append(row)
    if must_join_lines(columns, roles):
        _refuse_disagreement(columns, roles, rows_of)
        labels, rule = _join_lines(columns, roles, names, rows_of)
        label_names = list(names.classes) if names is not None else list(roles.label_columns)
        new = replace(roles, label_columns=tuple(label_names), finding=None, words=NO_LABEL_WORDS)
        pairs = [(path, rows[0]) for path, rows in rows_of.items()]
        cells = [labels[path] for path, _ in pairs]
    else:
        # Lines of one picture that differ are all written. The program that reads the table refuses them.
        label_names = [roles.finding] if roles.finding else [*roles.label_columns, *roles.mask_columns]
        of_label = [columns.get_column(name, with_line_ends=True) for name in label_names]
        cells = [[_get_cell(column, row) for column in of_label] for _, row in pairs]
        new, rule = roles, ""
    image = PICTURE_HEADING if roles.has_folders else roles.image
    written: dict[str, list[str]] = {image: [path for path, _ in pairs]}
    if patients_in_paths:
        written[PATIENT_HEADING] = [patients_in_paths[path] for path, _ in pairs]
        new = replace(new, patient=PATIENT_HEADING)
    elif roles.patient:
        # If one column names both picture and patient, the new table has paths there, so patients get a new column.
        heading = PATIENT_HEADING if roles.patient == roles.image else roles.patient
        written[heading] = _list_cells(columns, roles.patient, pairs)
        new = replace(new, patient=heading)
    if roles.source:
        written[roles.source] = _list_cells(columns, roles.source, pairs)
    if lines.parts:
        written[SPLIT_HEADING] = [lines.parts[path] for path, _ in pairs]
        new = replace(new, split=SPLIT_HEADING)
    elif roles.split:
        written[roles.split] = _list_cells(columns, roles.split, pairs)
    output = io.StringIO()
    writer = csv.writer(output, lineterminator="\n")
    writer.writerow([*written, *label_names])
    first_cells = zip(*written.values(), strict=True)
    for of_picture, label_cells in zip(first_cells, cells, strict=True):
        writer.writerow([*of_picture, *label_cells])
    return PictureTable(output.getvalue(), replace(new, image=image, has_folders=False), rule)


def _list_cells(columns: CsvTable, name: str, pairs: Sequence[tuple[str, int]]) -> list[str]:
    column = columns.get_column(name)
    return [_get_cell(column, row) for _, row in pairs]


def _get_cell(column: CsvColumn, row: int) -> str:
    cell: str = column.cells[int(column.places[row])]
    return cell


def _refuse_disagreement(columns: CsvTable, roles: ColumnRoles, rows_of: Mapping[str, Sequence[int]]) -> None:
    """Refuse pictures whose lines name several patients, hospitals or parts."""
    wrong = list[str]()
    names = [name for name in (roles.patient, roles.source, roles.split) if name]
    for path, rows in rows_of.items():
        for name in names:
            column = columns.get_column(name)
            if len({int(column.places[row]) for row in rows}) > 1:
                lines = f"lines {columns.lines[rows[0]]} and {columns.lines[rows[-1]]}"
                wrong.append(f'"{path}" ({lines}: {name})')
    if wrong:
        problem = f"lines of one picture differ: {list_first_and_count_rest(wrong, _MAX_LISTED)}."
        raise BadInput([Fault("labels", problem, "Correct these lines.")])


def _join_lines(
    columns: CsvTable, roles: ColumnRoles, names: FindingNames | None, rows_of: Mapping[str, Sequence[int]]
) -> tuple[dict[str, list[Label]], str]:
    """Return the labels of each picture, and the rule by which its lines were joined."""
    reader = find_reader_column(roles)
    readers = columns.get_column(reader) if reader else None
    votes = _read_names(columns, roles, names) if names is not None else _read_labels(columns, roles)
    normal = _list_rows_without_finding(columns, roles, names) if names is not None else frozenset()
    labels, contradictions = dict[str, list[Label]](), list[str]()
    for path, rows in rows_of.items():
        by_reader = defaultdict[str, list[Sequence[bool | None]]](list)
        for row in rows:
            by_reader[_get_cell(readers, row) if readers else ""].append(votes[row])
        opinions = [_join_opinion(own) for own in by_reader.values()]
        if readers is None and any(row in normal for row in rows) and any(any(votes[row]) for row in rows):
            contradictions.append(
                f'"{path}" (lines {", ".join(str(columns.lines[row]) for row in rows[:_MAX_LISTED])})'
            )
        labels[path] = [_count_votes([own[place] for own in opinions]) for place in range(len(votes[0]))]
    if names is not None and roles.source:
        _forget_classes_that_a_hospital_never_names(labels, columns.get_column(roles.source), rows_of)
    if contradictions:
        problem = "lines of one picture name a finding, and say that there is none: "
        problem += f"{list_first_and_count_rest(contradictions, _MAX_LISTED)}."
        options = [f"--other-finding {quote(name)}" for name in (names.normal if names is not None else ())]
        remedy = "Correct these lines. If they are of several readers, name their column: --reader-column. If such a "
        remedy += "name only excludes one finding, it is no class, and does not exclude the others: "
        remedy += f"{list_first_and_count_rest(options, _MAX_LISTED)} in place of --no-finding."
        raise BadInput([Fault("labels", problem, remedy)])
    if reader:
        return labels, f"a picture shows what more than half of its readers ({reader}) mark; a tie is unknown"
    return labels, "a picture shows every finding that one of its lines names"


def _forget_classes_that_a_hospital_never_names(
    labels: dict[str, list[Label]], source: CsvColumn, rows_of: Mapping[str, Sequence[int]]
) -> None:
    """Make the labels of such classes blank, because the hospital may not look for them."""
    pictures = defaultdict[str, list[str]](list)
    for path, rows in rows_of.items():
        pictures[_get_cell(source, rows[0])].append(path)
    for paths in pictures.values():
        shown = [any(labels[path][place] not in ("", "0") for path in paths) for place in range(len(labels[paths[0]]))]
        if any(shown):  # a hospital that names none has looked for all, and found nothing
            for path in paths:
                labels[path] = [label if has else "" for label, has in zip(labels[path], shown, strict=True)]


def _read_names(columns: CsvTable, roles: ColumnRoles, names: FindingNames) -> list[list[bool | None]]:
    """Return for each row and class whether the row names it; None in rows that do not assess the picture."""
    column = columns.get_column(str(roles.finding), with_line_ends=True)
    classes = [name.casefold() for name in names.classes]
    absent = list(map(str.casefold, (*list_no_finding_names(names), *names.other_findings)))
    of_cell = list[list[bool | None]]()
    for cell in column.cells:
        parts = set(map(str.casefold, split_names_of_cell(cell, names.separator)))
        is_assessed = bool(parts.intersection((*classes, *absent)))
        of_cell.append([name in parts if is_assessed else None for name in classes])
    return [of_cell[place] for place in column.places.tolist()]


def _list_rows_without_finding(columns: CsvTable, roles: ColumnRoles, names: FindingNames) -> frozenset[int]:
    """Return the rows that say that nothing was found, and name no class."""
    column = columns.get_column(str(roles.finding), with_line_ends=True)
    classes = set(map(str.casefold, names.classes))
    normal = set(map(str.casefold, names.normal))
    of_cell = list[bool]()
    for cell in column.cells:
        parts = set(map(str.casefold, split_names_of_cell(cell, names.separator)))
        of_cell.append(not parts.isdisjoint(normal) and parts.isdisjoint(classes))
    return frozenset(row for row, place in enumerate(column.places.tolist()) if of_cell[place])


def _read_labels(columns: CsvTable, roles: ColumnRoles) -> list[list[bool | None]]:
    """Return for each row and label column whether it says yes or no; None for blank and -1."""
    meanings = {"present": True, "absent": False}
    by_column = list[list[bool | None]]()
    for name in roles.label_columns:
        column = columns.get_column(name)
        of_cell = [meanings.get(interpret_label_cell(cell, roles.words.meanings) or "") for cell in column.cells]
        by_column.append([of_cell[place] for place in column.places.tolist()])
    return [list(row) for row in zip(*by_column, strict=True)]


def _join_opinion(lines: Sequence[Sequence[bool | None]]) -> list[bool | None]:
    """Return the opinion of one reader, who may mark each finding in a line of its own."""
    return [max((value for value in values if value is not None), default=None) for values in zip(*lines, strict=True)]


def _count_votes(opinions: Sequence[bool | None]) -> Label:
    given = [value for value in opinions if value is not None]
    if not given:
        return ""
    yes = sum(given)
    if 2 * yes == len(given):
        return "-1"
    return "1" if 2 * yes > len(given) else "0"
