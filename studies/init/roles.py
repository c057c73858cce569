"""Give each column of a user's table a role by plain rules, and list as questions what the rules do not settle."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from shlex import quote

import numpy as np
from numpy.typing import NDArray

from polyclinic.common.errors import BadInput, Fault, quote_names, raise_faults
from polyclinic.common.system.plain_text import format_as_json_text
from polyclinic.data.base.spec import NO_FINDING
from polyclinic.data.base.vocabulary import PART_WORDS
from polyclinic.data.tables.cells import interpret_label_cell, is_placeholder_finding, split_finding_names
from polyclinic.data.tables.columns import (
    FINDING_HEADINGS,
    HOSPITAL_HEADINGS,
    MIN_SENTENCE_WORDS,
    NO_FINDING_HEADINGS,
    NO_FINDING_WORDS,
    PATIENT_HEADINGS,
    READER_HEADINGS,
    SPLIT_HEADINGS,
    contains_picture_endings,
    contains_repeated_words,
    describe_some_cells,
    find_wrong_label_cells,
    group_rows_alike,
    holds_labels_and_words,
    is_label_column,
    list_columns_by_heading,
    list_filled_cells,
    names_findings,
    shorten_cell,
)
from polyclinic.data.tables.csv import CsvColumn, CsvTable
from polyclinic.data.tables.files import drop_picture_extension, fold_name_case
from polyclinic.data.tables.search import PictureSearch
from polyclinic.studies.init.known import KnownTable
from polyclinic.studies.init.label_words import (
    NO_LABEL_WORDS,
    LabelWordLists,
    ask_for_meaning_of_words,
    list_columns_of_few_words,
    list_columns_of_two_words,
    read_label_words,
    refuse_useless_words,
    refuse_words_in_label_columns,
)
from polyclinic.studies.init.questions import Choice, ColumnHints, Question

SEPARATORS = ("\n", "\t", "|", ";", "\uff0c", ",", "/")
_SIGNS_IN_NAMES = (",", "/")
"""Separators that names of findings contain, too."""
_JOINING_SIGNS = re.compile(r"[|;,/+&\n\t\uff0c]")
_WORD = re.compile(r"[^\W_]+")
_MAX_LISTED = 5
_FINDINGS_QUESTION = (
    "Which columns say what a picture shows? Either columns of labels (1 and 0, or words for yes and no), or one "
    "column of names, each of which becomes a class."
)
MOST_SHARED_PATIENTS = 0.1
"""Fraction of patients with pictures of several hospitals above which a column of hospitals is a question."""
_FEWEST_HOSPITALS, _MOST_HOSPITALS = 2, 50
EACH_PICTURE = "each picture is a patient of its own; wrong if one patient has several"


@dataclass(frozen=True)
class ColumnRoles:
    """The columns of a table by their roles.

    Attributes:
        image: The column of names of pictures, or of folders of pictures; empty while it is a question.
        patient: The column of patients; empty text if each picture is a patient of its own; None if the table has no
            such column and nobody was asked yet.
        source: The column of hospitals; None if there is none.
        split: The column of training, validation and test part; None if there is none.
        label_columns: The columns with labels, one per class; empty if ``finding`` is used.
        finding: The column with names of findings; None if ``label_columns`` are used.
        words: The user's own words in ``label_columns``.
        reader: The column of readers that the user named; None if the rules are to find it.
        mask_columns: The columns of mask files: one of label maps, or one for each class. Masks go before labels.
        rules: For each role, what was taken, and the rule by which.
        has_folders: Whether the cells of ``image`` name folders.
        unread_splits: Columns with the heading of a split whose cells are other words than train, val and test.
        unused: Columns without a role.
    """

    image: str
    patient: str | None
    source: str | None
    split: str | None
    label_columns: tuple[str, ...]
    finding: str | None
    rules: Mapping[str, str]
    words: LabelWordLists = NO_LABEL_WORDS
    reader: str | None = None
    has_folders: bool = False
    unread_splits: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    mask_columns: tuple[str, ...] = ()


@dataclass(frozen=True)
class FindingNames:
    """The names in a column of findings.

    Attributes:
        separator: Text between the names of a cell.
        classes: The names with their numbers of rows, the most frequent first.
        no_finding: Names, beyond :data:`NO_FINDING`, that say that nothing was found.
        other_findings: Names that the user calls no class.
        not_assessed: Names that name nothing: such an image has no label.
        normal: Names that say that nothing was found, with their numbers of rows.
    """

    separator: str = "|"
    classes: Mapping[str, int] = field(default_factory=dict)
    no_finding: tuple[str, ...] = ()
    other_findings: tuple[str, ...] = ()
    normal: Mapping[str, int] = field(default_factory=dict)
    not_assessed: Mapping[str, int] = field(default_factory=dict)


def assign_column_roles(
    columns: CsvTable,
    search: PictureSearch,
    hints: ColumnHints,
    known: KnownTable | None = None,
    mask_columns: tuple[str, ...] = (),
) -> tuple[ColumnRoles, list[Question]]:
    """Give each column its role, by the user's statements, else by the rules; return also what is open.

    Args:
        search: Finds the files that cells name.
        known: The public table that has these headings.
        mask_columns: The columns of mask files.
    """
    questions, rules = list[Question](), dict[str, str]()
    labels = [name for name in columns if name in mask_columns or is_label_column(columns.get_column(name))]
    image, has_folders = _assign_image(columns, search, hints, known, labels, questions, rules)
    patient = _assign_patient(columns, hints, known, rules, questions)
    source = _assign_source(columns, patient, hints, rules, questions)
    taken = [name for name in (image, patient, source, hints.reader, *mask_columns) if name]
    split, unread_splits = _assign_split(columns, [*taken, *hints.findings], rules)
    taken += [split] if split else []
    others = [name for name in columns if name not in (*taken, *unread_splits)]
    words = read_label_words(columns, hints.findings or others, hints)
    label_columns, finding = tuple[str, ...](), None
    if not mask_columns:
        label_columns, finding = _assign_findings(columns, others, hints, known, image, words, rules, questions)
        refuse_useless_words(columns, label_columns, hints, questions)
    if label_columns and words.present:
        rules["words"] = f"as you said, {words.describe()}"
    unused = [name for name in columns if name not in (*taken, *label_columns, finding, *unread_splits)]
    are_findings_open = not label_columns and finding is None and not mask_columns
    if source is None and hints.source is None and not are_findings_open:
        possible = list_possible_hospital_columns(columns, unused)
        if possible and not any(question.option == "--source-column" for question in questions):
            options = " or ".join(f"--source-column {quote(name)}" for name in possible[:_MAX_LISTED])
            rules["hospitals"] = f"no column was named: simulated ones. If one is it: {options}"
    roles = ColumnRoles(
        image=image,
        patient=patient,
        source=source,
        split=split,
        label_columns=label_columns,
        finding=finding,
        rules=rules,
        words=words if label_columns else NO_LABEL_WORDS,
        reader=hints.reader,
        has_folders=has_folders,
        unread_splits=unread_splits,
        unused=tuple(unused),
        mask_columns=mask_columns,
    )
    return roles, questions


# ---------------------------------------------------------------------- pictures


def _assign_image(
    columns: CsvTable,
    search: PictureSearch,
    hints: ColumnHints,
    known: KnownTable | None,
    labels: Sequence[str],
    questions: list[Question],
    rules: dict[str, str],
) -> tuple[str, bool]:
    """Return the column of pictures, and whether its cells name folders."""
    if hints.image is not None:
        has_folders = not _name_files(columns, search, hints.image) and _name_folders(columns, search, hints.image)
        rules["images"] = f"{hints.image}: you named it"
        return hints.image, has_folders
    if known is not None and known.image:
        rules["images"] = f"{known.image}: this is a table of {known.name}"
        return known.image, known.has_folders
    names = [name for name in columns if name not in labels]
    if known is not None and known.images:
        files = list(known.images)
    else:
        shares = {name: search.share_of_pictures(_list_filled(columns, name)) for name in names}
        files = [name for name in names if shares[name][0] > 0.5]
        whole = [name for name in files if shares[name][1]]
        files = whole or files
    rule = "its cells are names of files in the picture folder"
    if not files:
        files = [name for name in names if contains_picture_endings(columns.get_column(name))]
        rule = "its cells end as names of pictures do"
    files = _drop_same_pictures(columns, files)
    if len(files) > 1:
        files = [name for name in files if not list_columns_by_heading([name], PATIENT_HEADINGS)] or files
    if len(files) == 1:
        rules["images"] = f"{files[0]}: {rule}"
        return files[0], False
    folders = [] if files else [name for name in names if _name_folders(columns, search, name)]
    if len(folders) == 1:
        rules["images"] = f"{folders[0]}: its cells are names of folders, each with pictures"
        return folders[0], True
    text = f"No column names files in {search.root}, or ends as pictures do. Which column names the pictures? If the "
    text += "folder is the wrong one, add --images."
    if len(files) > 1:
        text = "Which column names the pictures? Several do, and the labels of a line are learned for one picture."
    candidates = files or folders or names
    questions.append(Question("--image-column", text, _offer_columns(columns, candidates)))
    return "", False


def _list_filled(columns: CsvTable, name: str) -> list[str]:
    return list_filled_cells(columns.get_column(name))


def _name_files(columns: CsvTable, search: PictureSearch, name: str) -> bool:
    return search.share_of_pictures(_list_filled(columns, name))[0] > 0


def _name_folders(columns: CsvTable, search: PictureSearch, name: str) -> bool:
    """Return True if most of the first cells are folders with pictures."""
    cells = _list_filled(columns, name)[:20]
    return 2 * sum(bool(search.list_pictures_of_folder(cell)) for cell in cells) > len(cells)


def _drop_same_pictures(columns: CsvTable, names: Sequence[str]) -> list[str]:
    """Leave out each column that names the same pictures as an earlier one in all rows."""
    distinct = list[str]()
    for name in names:
        if not any(_name_same_pictures(columns.get_column(name), columns.get_column(other)) for other in distinct):
            distinct.append(name)
    return distinct


def _name_same_pictures(first: CsvColumn, second: CsvColumn) -> bool:
    """Return True if in each row one path is the end of the other, endings apart."""
    for left, right in set(zip(first.places.tolist(), second.places.tolist(), strict=True)):
        paths = [fold_name_case(cell).replace("\\", "/") for cell in (first.cells[left], second.cells[right])]
        stems = sorted(map(drop_picture_extension, paths), key=len)
        if all(stems) and stems[0] != stems[1] and not stems[1].endswith(f"/{stems[0]}"):
            return False
    return True


# ---------------------------------------------------------------------- patients, hospitals, split


def _assign_patient(
    columns: CsvTable,
    hints: ColumnHints,
    known: KnownTable | None,
    rules: dict[str, str],
    questions: list[Question],
) -> str | None:
    """Return the column of patients; None without one: the caller looks into the files before it asks."""
    if hints.patient is not None:
        rules["patients"] = f"{hints.patient}: you named it" if hints.patient else "none, as you said"
        return hints.patient
    if known is not None and known.patient:
        rules["patients"] = f"{known.patient}: {known.patient_rule}"
        return known.patient
    names = list_columns_by_heading(columns, PATIENT_HEADINGS)
    if len(names) == 1 or (names and group_rows_alike(columns, names)):
        rules["patients"] = f"{names[0]}: a well-known heading of patients"
        return names[0]
    if names:
        text = "Which column names the patients? Several may, and they group the pictures differently."
        questions.append(Question("--patient-column", text, _offer_columns(columns, names)))
    return None


def ask_for_patients(columns: CsvTable, roles: ColumnRoles, folders: Sequence[Choice]) -> Question:
    """Return the question for the column of patients, for a table that has no well-known heading of them.

    Args:
        folders: Folders in the paths of the pictures that may be the patients, as answers.
    """
    candidates = list[str]()
    for name in roles.unused:
        column = columns.get_column(name)
        if 1 < len(list_filled_cells(column)) < len(column.places) and not _may_hold_labels(column):
            candidates.append(name)
    # The more groups a column makes, the more it looks like one of patients.
    candidates.sort(key=lambda name: -len(columns.get_column(name).cells))
    offered = [name for name in roles.unused if name in candidates[:_MAX_LISTED]]
    choices = [*_offer_columns(columns, offered), *folders, Choice("", EACH_PICTURE)]
    text = "Which column names the patients? A patient must not stand in training and in test."
    return Question("--patient-column", text, tuple(choices))


def list_possible_hospital_columns(columns: CsvTable, names: Sequence[str]) -> list[str]:
    """Return the columns with 2 to 50 different cells of letters, each in two rows on average, that are no labels."""
    possible = list[str]()
    for name in names:
        filled = _list_filled(columns, name)
        is_repeated = 2 * len(filled) <= len(columns.lines)
        is_named = all(re.search(r"[^\W\d_]", cell) for cell in filled)
        is_count_possible = _FEWEST_HOSPITALS <= len(filled) <= _MOST_HOSPITALS
        if is_count_possible and is_repeated and is_named and not _may_hold_labels(columns.get_column(name)):
            possible.append(name)
    return possible


def _may_hold_labels(column: CsvColumn) -> bool:
    return is_label_column(column) or holds_labels_and_words(column)


def _count_patients_of_several_hospitals(columns: CsvTable, patient: str, source: str) -> tuple[int, int]:
    """Return the number of patients with pictures of several hospitals, and the number of all patients."""
    people, hospitals = columns.get_column(patient), columns.get_column(source)
    pairs = set(zip(people.places.tolist(), hospitals.places.tolist(), strict=True))
    counts = Counter(person for person, _ in pairs)
    return sum(count > 1 for count in counts.values()), len(counts)


def _assign_source(
    columns: CsvTable, patient: str | None, hints: ColumnHints, rules: dict[str, str], questions: list[Question]
) -> str | None:
    if hints.source is not None:
        rules["hospitals"] = f"{hints.source}: you named it" if hints.source else "none, as you said"
        return hints.source or None
    names = list_columns_by_heading(columns, HOSPITAL_HEADINGS)
    several = [name for name in names if len(_list_filled(columns, name)) > 1]
    if len(several) == 1 or (several and group_rows_alike(columns, several)):
        shared, count = _count_patients_of_several_hospitals(columns, patient, several[0]) if patient else (0, 0)
        if shared > MOST_SHARED_PATIENTS * count:
            text = f"Does {several[0]} name hospitals? {shared} of {count} patients have pictures of several."
            questions.append(Question("--source-column", text, _offer_hospitals(columns, several[:1])))
            return None
        rules["hospitals"] = f"{several[0]}: a well-known heading of hospitals"
        return several[0]
    rules["hospitals"] = "no column: patients are divided over simulated hospitals"
    if names and not several:
        rules["hospitals"] = f"{names[0]} names one hospital only: patients are divided over simulated hospitals"
    if several:
        text = "Which column names the hospitals? Each hospital becomes a site."
        choices = _offer_hospitals(columns, several)
        # Simulated hospitals are no wrong model: the answer is safe.
        questions.append(Question("--source-column", text, choices, default=len(choices) - 1))
    return None


def _offer_hospitals(columns: CsvTable, names: Sequence[str]) -> tuple[Choice, ...]:
    return (*_offer_columns(columns, names), Choice("", "patients are divided over simulated hospitals"))


def _assign_split(columns: CsvTable, taken: Sequence[str], rules: dict[str, str]) -> tuple[str | None, tuple[str, ...]]:
    """Return the column of the split, and the columns with such a heading whose cells are other words."""
    names = [name for name in list_columns_by_heading(columns, SPLIT_HEADINGS) if name not in taken]
    read = [name for name in names if _contains_part_names(columns.get_column(name))]
    unread = tuple(name for name in names if name not in read)
    if read:
        rules["split"] = f"{read[0]}: a well-known heading, and cells that are train, val or test"
        return read[0], unread
    divided = "patients are divided into training, validation and test, 70/10/20"
    rules["split"] = f"no column: {divided}"
    if unread:
        rules["split"] = f"{unread[0]} is not used, because its cells are not train, val and test: {divided}"
    return None, unread


def _contains_part_names(column: CsvColumn) -> bool:
    return all(cell.casefold() in PART_WORDS for cell in column.cells)


# ---------------------------------------------------------------------- findings


def _assign_findings(
    columns: CsvTable,
    rest: Sequence[str],
    hints: ColumnHints,
    known: KnownTable | None,
    image: str,
    words: LabelWordLists,
    rules: dict[str, str],
    questions: list[Question],
) -> tuple[tuple[str, ...], str | None]:
    """Return the label columns, and the column of names of findings; one of both is empty.

    Args:
        rest: The columns without another role.
        words: The user's own words in label columns.
    """
    if hints.findings:
        return _assign_named_findings(columns, hints, words, rules, questions)
    findings = known.list_findings(image) if known is not None else ()
    if findings:
        rules["findings"] = f"{', '.join(findings)}: this is a table of {known.name if known else ''}"
        if len(findings) == 1:
            return (), findings[0]
        return findings, None
    flags = list_columns_by_heading(rest, NO_FINDING_HEADINGS)
    labels = [name for name in rest if name not in flags and is_label_column(columns.get_column(name), words.meanings)]
    named = [name for name in list_columns_by_heading(rest, FINDING_HEADINGS) if name not in labels]
    named = [name for name in named if names_findings(columns.get_column(name))]
    wrong = [name for name in rest if name not in (*flags, *labels, *named)]
    if broken := _ask_about_broken_labels(columns, wrong, [*labels, *named], words):
        questions.append(broken)
        return (), None
    headings = PATIENT_HEADINGS | HOSPITAL_HEADINGS | SPLIT_HEADINGS | READER_HEADINGS | NO_FINDING_HEADINGS
    others = [name for name in rest if name not in (*labels, *named, *list_columns_by_heading(rest, headings))]
    mixed = [name for name in others if holds_labels_and_words(columns.get_column(name))]
    short = list_columns_of_two_words(columns, others)  # such as j and n, which are no names of findings
    others = [name for name in others if contains_repeated_words(columns.get_column(name))]
    if mixed or (labels and (named or others)):
        offered = [name for name in rest if name in (*labels, *mixed, *named, *others, *short)]
        choices = list(_offer_columns(columns, offered))
        of_labels = [name for name in rest if name in (*labels, *mixed)]
        if len(of_labels) > 1:
            choices.append(Choice(of_labels[0], "all columns of 0 and 1", more=tuple(of_labels[1:])))
        questions.append(Question("--findings", _FINDINGS_QUESTION, tuple(choices), several=True))
        return (), None
    if labels:
        own = " or your words" if words.present else ""
        rules["findings"] = f"{', '.join(labels)}: cells are 1, 0, -1 or blank{own}"
        return tuple(labels), None
    # One pair of words, and no other column that may say what is to be seen: its meaning is the only question.
    candidates = named if len(named) == 1 else list(dict.fromkeys((*named, *others, *short)))
    two_words = list_columns_of_two_words(columns, candidates)
    pairs = {frozenset(map(str.casefold, pair)) for pair in two_words.values()}
    if hints.present is None and len(two_words) == len(candidates) and len(pairs) == 1:
        questions += ask_for_meaning_of_words(two_words, hints)
        return (), None
    if len(named) == 1:
        rules["findings"] = f"{named[0]}: a well-known heading of findings"
        return (), named[0]
    if hints.are_words_names and len(candidates) == 1:
        rules["findings"] = f"{candidates[0]}: its words are names of findings, as you said"
        return (), candidates[0]
    repeated = [name for name in rest if 1 < len(columns.get_column(name).cells) < len(columns.lines)]
    offers = _offer_columns(columns, named or repeated or rest)
    if not offers:
        problem = f"no column is left that can say what a picture shows. The headings are: {quote_names(columns)}."
        raise BadInput([Fault("labels", problem, "If lines stand above the headings, delete them.")])
    questions.append(Question("--findings", _FINDINGS_QUESTION, offers, several=True))
    return (), None


def _ask_about_broken_labels(
    columns: CsvTable, names: Sequence[str], offered: Sequence[str], words: LabelWordLists
) -> Question | None:
    """Return a question if some of these columns hold labels, and cells that are none."""
    of_column = {name: find_wrong_label_cells(columns.get_column(name), words.meanings) for name in names}
    broken = {name: wrong for name, wrong in of_column.items() if wrong}
    if not broken:
        return None
    cells = "; ".join(
        f'"{name}" ({columns.get_column(name).describe_cell_lines(wrong, 3)})' for name, wrong in broken.items()
    )
    text = f"These columns hold labels, and cells that are none: {cells}. Correct the cells: 1, 0, -1 or nothing."
    text += " Which columns are the findings, if these are none?"
    return Question("--findings", text, _offer_columns(columns, offered), several=True)


def _assign_named_findings(
    columns: CsvTable, hints: ColumnHints, words: LabelWordLists, rules: dict[str, str], questions: list[Question]
) -> tuple[tuple[str, ...], str | None]:
    """Return the label columns, or the column of names of findings, that the user named."""
    rules["findings"] = f"{', '.join(hints.findings)}: you named {'it' if len(hints.findings) == 1 else 'them'}"
    if hints.are_words_names and len(hints.findings) == 1:
        return (), hints.findings[0]
    labels, others = list[str](), list[str]()
    for name in hints.findings:
        is_label = is_label_column(columns.get_column(name), words.meanings)
        (labels if is_label else others).append(name)
    few = list_columns_of_few_words(columns, others)
    if others and len(few) == len(others):
        holds_labels = any(holds_labels_and_words(columns.get_column(name)) for name in others)
        may_be_names = len(hints.findings) == 1 and not holds_labels
        open_questions = ask_for_meaning_of_words(few, hints, may_be_names=may_be_names)
        if open_questions:
            questions += open_questions
            return (), None
    wrong = [name for name in others if find_wrong_label_cells(columns.get_column(name), words.meanings)]
    if len(hints.findings) > 1 or (others and words.present) or wrong:
        refuse_words_in_label_columns(columns, hints.findings, words.meanings)
    if len(hints.findings) > 1 or labels:
        return tuple(name for name in columns if name in hints.findings), None
    return (), hints.findings[0]


def _offer_columns(columns: CsvTable, names: Sequence[str]) -> tuple[Choice, ...]:
    return tuple(Choice(name, describe_some_cells(columns.get_column(name))) for name in names)


def read_finding_names(
    columns: CsvTable, name: str, hints: ColumnHints, known: KnownTable | None = None
) -> FindingNames:
    """Return the names in a column of findings; spellings that differ only in case count as one name.

    Raises:
        BadInput: If the column names no finding, holds sentences, or has names that are composed of its other names.
    """
    column = columns.get_column(name, with_line_ends=True)
    separator = _choose_separator(column) if hints.separator is None else hints.separator
    counts, spellings = Counter[str](), dict[str, str]()
    for cell, rows in zip(column.cells, column.count_rows_per_cell().tolist(), strict=True):
        parts = {part.casefold(): part for part in split_names_of_cell(cell, separator)}
        counts.update(dict.fromkeys(parts, rows))
        spellings = parts | spellings
    no_finding = (*(known.no_finding if known is not None else ()), *hints.no_finding)
    lists = {
        "--no-finding": hints.no_finding,
        "--other-finding": hints.other_findings,
        "--not-assessed": hints.not_assessed,
    }
    faults = list[Fault]()
    for option, words in lists.items():
        if strange := [word for word in words if word.casefold() not in counts]:
            problem = f'column "{name}" holds no name {quote_names(strange)}. '
            problem += f"Its names: {quote_names(spellings.values(), 20)}."
            faults.append(Fault(option, problem, "Write the name as the column has it."))
    raise_faults(faults)
    normal = set(map(str.casefold, no_finding))
    others = set(map(str.casefold, hints.other_findings))
    not_assessed = (*hints.not_assessed, *(known.not_assessed if known is not None else ()))
    unassessed = set(map(str.casefold, not_assessed)) | set(filter(is_placeholder_finding, counts))
    unassessed -= normal | others
    normal = (normal | NO_FINDING_WORDS) - others - unassessed
    no_classes = unassessed | normal | others
    classes = {spellings[key]: rows for key, rows in counts.most_common() if key not in no_classes}
    if not classes:
        raise BadInput([Fault("--findings", f'column "{name}" names no finding.')])
    _refuse_sentences(name, list(classes))
    _refuse_composed_names(column, name, separator, counts)
    return FindingNames(
        separator=separator,
        classes=classes,
        no_finding=tuple(word for word in no_finding if word.casefold() in counts),
        other_findings=hints.other_findings,
        normal={spellings[key]: rows for key, rows in counts.items() if key in normal},
        not_assessed={spellings[key]: counts[key] for key in counts if key in unassessed},
    )


def list_no_finding_names(names: FindingNames) -> tuple[str, ...]:
    """Return the names that say that nothing was found: the usual ones, and the user's."""
    elsewhere = {name.casefold() for name in (*names.other_findings, *names.not_assessed)}
    return tuple(name for name in (*NO_FINDING, *names.no_finding) if name.casefold() not in elsewhere)


def split_names_of_cell(cell: str, separator: str) -> list[str]:
    """Return the names of findings in a cell, each with single spaces between its words."""
    return [" ".join(part.split()) for part in split_finding_names(cell, separator)]


def _choose_separator(column: CsvColumn) -> str:
    """Return the first of line end, tab, ``|``, ``;``, comma and slash that a cell holds; ``|`` if none holds one.

    A comma or a slash counts only if all names beside it also stand alone in a cell.
    """
    for sign in SEPARATORS:
        divided = [split_names_of_cell(cell, sign) for cell in column.cells if sign in cell]
        divided = [parts for parts in divided if len(parts) > 1]
        if not divided:
            continue
        if sign not in _SIGNS_IN_NAMES:
            return sign
        alone = {cell.casefold() for cell in column.cells}
        if all(part.casefold() in alone for parts in divided for part in parts):
            return sign
    return "|"


def _refuse_sentences(name: str, names: Sequence[str]) -> None:
    long = [text for text in names if len(text.split()) >= MIN_SENTENCE_WORDS]
    if 2 * len(long) > len(names):
        problem = f'column "{name}" holds texts ("{shorten_cell(long[0])}"), and no names of findings.'
        remedy = "Write the findings of each image in a column of their own: names with | between them, or 1 and 0."
        raise BadInput([Fault("--findings", problem, remedy)])


def _refuse_composed_names(column: CsvColumn, name: str, separator: str, counts: Mapping[str, int]) -> None:
    """Refuse a name such as "A, B" in a column that has "A" and "B" as well.

    It would become a class of its own, and its images would count as showing neither A nor B.
    """
    composed, signs = dict[str, list[int]](), dict[str, None]()
    for place, cell in enumerate(column.cells):
        for part in split_names_of_cell(cell, separator):
            pieces = [" ".join(piece.split()).casefold() for piece in _JOINING_SIGNS.split(part)]
            if len(pieces) > 1 and all(piece in counts for piece in pieces):
                composed.setdefault(part, []).append(place)
                signs |= dict.fromkeys(_JOINING_SIGNS.findall(part))
    if composed:
        problem = f'column "{name}" holds {column.describe_cell_part_lines(composed)}, '
        problem += "which consists of names of the column."
        remedy = "Write the same separator between all names, such as |, or give the finding a name of its own."
        if len(signs) == 1:
            sign = format_as_json_text(next(iter(signs)))[1:-1]
            remedy = f"If it separates all names, add --separator {quote(sign)}. Else: {remedy[0].lower()}{remedy[1:]}"
        raise BadInput([Fault("labels", problem, remedy)])


def list_names_in_names(names: Sequence[str]) -> dict[str, str]:
    """Return class name -> another class name that it contains as whole words.

    "Effusion" in "no Effusion" is one: images of the longer name count as without the shorter.
    """
    words = {name: f" {' '.join(re.findall(_WORD, name.casefold()))} " for name in names}
    containing = dict[str, str]()
    for name in names:
        for other in names:
            if words[other].strip() and words[other] != words[name] and words[other] in words[name]:
                containing.setdefault(name, other)
    return containing


def list_columns_of_zeros(columns: CsvTable, roles: ColumnRoles) -> list[str]:
    """Return the unused columns whose filled cells are all 0: classes that no picture shows."""
    zeros, words = list[str](), roles.words.meanings
    for name in roles.unused:
        meanings = {interpret_label_cell(cell, words) for cell in columns.get_column(name).cells} - {"blank"}
        if meanings == {"absent"}:
            zeros.append(name)
    return zeros


def is_exclusive(labels: NDArray[np.float32]) -> bool:
    """Return True if each image shows exactly one class and all labels are known, ``(n, classes)``."""
    return labels.shape[1] > 1 and bool(((labels == 1).sum(axis=1) == 1).all() and not np.isnan(labels).any())
