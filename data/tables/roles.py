"""Guess the role of each column in a label table (image, patient, hospital, labels) from its name and cells.

The result is a proposal: the caller shows it to the user with the reasons.
"""

import difflib
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from shlex import quote

import numpy as np
from numpy.typing import NDArray

from polyclinic.common.errors import BadInput, Fault, quote_names, raise_faults
from polyclinic.common.system.plain_text import format_count_with_noun
from polyclinic.data.base.names import is_blank_cell, make_class_spelling_key, make_name_similarity_key
from polyclinic.data.base.spec import NO_FINDING
from polyclinic.data.base.vocabulary import (
    BESIDE_FINDINGS,
    CASE,
    CODE_OR_PLACEHOLDER,
    CONFIRMED,
    FINDING_STEM,
    FINDINGS,
    HOSPITAL,
    NO_SOURCE_WORDS,
    PART_NAMES,
    READER,
    SIDES,
    SOURCE_WORDS,
    SPLIT_HEADING,
    UNCONFIRMED,
    UNREAD_CODE,
    WHOSE_FINDINGS,
    WORD_OR_PLACEHOLDER,
)
from polyclinic.data.images.reading import PICTURE_SUFFIXES, UNREAD_SUFFIXES
from polyclinic.data.tables.cells import (
    OTHER_SEPARATORS,
    interpret_label_cell,
    is_placeholder_finding,
    says_image_not_assessed,
    split_finding_names,
)
from polyclinic.data.tables.class_names import MIMIC_CLASSES
from polyclinic.data.tables.csv import CsvColumn, CsvTable
from polyclinic.data.tables.files import (
    PictureFileFinder,
    drop_picture_extension,
    fold_name_case,
    make_extensionless_name_key,
)
from polyclinic.data.tables.flag_columns import (
    BinaryColumnKinds,
    classify_binary_columns,
    is_letter_or_abbreviation,
)
from polyclinic.data.tables.judgement import (
    MOST_WORDS,
    ColumnJudgement,
    contains_only_one_and_two,
    find_missing_value_codes,
    get_distinct_column_name_words,
    get_finding_certainty,
    is_free_text_column,
    is_metadata_column_name,
    is_no_finding_name,
    judge_column_content,
    looks_like_split_column,
    may_contain_finding_names,
    split_diagnosis_code,
)
from polyclinic.data.tables.patient_columns import (
    contains_only_dates,
    contains_patient_word,
    count_distinct_pairs,
    guess_patient_column,
    may_be_identifier_column,
)

_MOST_SOURCES, _FEWEST_ROWS = 200, 3
"""Limits for a column of hospitals: the most distinct values, and the fewest rows per value on average."""
_MOST_OFFERED = 20
"""Most values of a column that is offered as one of hospitals."""
_MOST_CLASSES = 60
_LONGEST_CODE = 5
"""Maximum number of letters of a name of a finding that is a code, such as akiec."""
_FEW_CLASSES = 2
_USUALLY_SEVERAL, _FEWEST_ALONE = 0.2, 10
"""If this fraction of rows has several findings, a finding that is alone in all of so many rows is reported."""
_LOOKED_AT, _MOST_ROWS = 200, 5000
_MOST_LETTERS = 20
"""Letters of a text that may be a report which are printed."""
_MOST_COLUMNS = 5
"""Maximum number of columns in an error message."""
_ALIKE = 0.85
"""Minimum similarity of two spellings of one word."""
_NO_FINDING = frozenset(name.casefold() for name in NO_FINDING)
_CLASSES = frozenset(name.casefold() for name in MIMIC_CLASSES)


@dataclass(frozen=True)
class ColumnRoles:
    """The guessed role of each column in a label table.

    Attributes:
        image: The column with file names of images.
        patient: The column of patients; None if no column looks like it.
        source: The column of hospitals; None if no column looks like it.
        split: The column of training, validation and test part; None if there is none.
        label_columns: The columns with labels, one per class; empty if ``finding`` is used.
        finding: The column with names of findings, separated by ``separator``; None if ``label_columns`` are used.
        classes: The classes with the number of positive rows each, in the order of the columns or by frequency.
        exclusive: True if each row has exactly one class.
        no_finding: Names in column ``finding`` that say that nothing was found, except those in :data:`NO_FINDING`.
        doubtful: Names in column ``finding`` that are no classes, because they deny or doubt a finding or name nothing;
            with their numbers of rows.
        not_assessed: Names in column ``finding`` that say that nobody could assess the image, with their numbers of
            rows: words such as "ungradable", codes for missing values such as 99.
        possible_splits: Columns without a role whose cells are words for parts of a split.
        alone: Classes that may mean that nothing was found, with their numbers of rows. With ``finding``, these are
            names that never have another class beside them although many rows have several. With ``label_columns``,
            they are columns that are 1 exactly in the rows where no other is.
        unused: Columns without a role.
    """

    image: str
    patient: str | None
    source: str | None
    split: str | None
    label_columns: tuple[str, ...]
    finding: str | None
    separator: str
    classes: Mapping[str, int]
    exclusive: bool
    no_finding: tuple[str, ...] = ()
    doubtful: Mapping[str, int] = field(default_factory=dict)
    not_assessed: Mapping[str, int] = field(default_factory=dict)
    possible_splits: tuple[str, ...] = ()
    alone: Mapping[str, int] = field(default_factory=dict)
    unused: Mapping[str, ColumnJudgement] = field(default_factory=dict)


def find_picture_columns(columns: CsvTable, files: Iterable[str] = (), image: str | None = None) -> list[str]:
    """Return the columns that name pictures: files of the folder, or else names that mostly have picture extensions.

    Column ``image``, or else the surest, is first. A column that names the same picture as an earlier one in each row
    is left out.

    Args:
        files: Names of the files in the folder; empty if they are not known.
        image: The column that the user has named; None if none.

    Raises:
        BadInput: If there is no such column.
    """
    files = list(files)
    cells, scores = {name: columns.get_column(name).cells for name in columns}, dict[str, tuple[int, ...]]()
    whole, without_ending = ({fold(file) for file in files} for fold in (fold_name_case, make_extensionless_name_key))
    for name in columns:
        last_parts = [fold_name_case(re.split(r"[/\\]", cell)[-1]) for cell in cells[name][:_LOOKED_AT]]
        exact = sum(part in whole for part in last_parts)
        near = sum(part in whole or drop_picture_extension(part) in without_ending for part in last_parts)
        scores[name] = near, exact, not contains_patient_word(name), len(cells[name])
    best = image or max(columns, key=lambda name: scores[name])
    if image or scores[best][0] > min(1, len(cells[best]) - 1):
        others = [name for name in columns if name != best and 2 * scores[name][0] > len(cells[name][:_LOOKED_AT])]
    else:
        named = [name for name in columns if _have_picture_extensions(cells[name])]
        if not named:
            problem = "no column of the table names pictures, files of the folder or names that end in "
            problem += f"{quote_names(PICTURE_SUFFIXES)}; it has {quote_names(columns)}."
            raise BadInput([Fault("--image-column", problem, "Name the column of picture files.")])
        best, *others = named
    endings, distinct = PICTURE_SUFFIXES + UNREAD_SUFFIXES, [best]
    need_endings = _have_picture_extensions(cells[best], endings)
    for name in others:
        is_like_best = (
            _have_picture_extensions(cells[name], endings) if need_endings else not any(map(str.isdecimal, cells[name]))
        )
        if is_like_best and not any(_name_same_pictures(columns, name, earlier) for earlier in distinct):
            distinct.append(name)
    return distinct


def _have_picture_extensions(cells: Sequence[str], endings: tuple[str, ...] = PICTURE_SUFFIXES) -> bool:
    filled = [cell.lower() for cell in cells[:_LOOKED_AT] if not is_blank_cell(cell)]
    return sum(cell.endswith(endings) for cell in filled) > len(filled) / 2


def _name_same_pictures(columns: CsvTable, first: str, second: str) -> bool:
    """Return True if two columns name the same picture in all rows where both have one.

    Paths are equal, too, if one is the end of the other.
    """
    one, other = columns.get_column(first), columns.get_column(second)
    rows = slice(None, None, max(1, len(columns.lines) // _MOST_ROWS))  # spread over a long table
    for left, right in set(zip(one.places[rows].tolist(), other.places[rows].tolist(), strict=True)):
        paths = [fold_name_case(cell).replace("\\", "/") for cell in (one.cells[left], other.cells[right])]
        stems = sorted(map(drop_picture_extension, paths), key=len)
        if all(stems) and stems[0] != stems[1] and not stems[1].endswith(f"/{stems[0]}"):
            return False
    return True


def find_ambiguous_picture_faults(names: Sequence[str]) -> list[Fault]:
    """Return a fault if several columns name pictures, because a row's labels may belong to any of them.

    Args:
        names: The columns that name pictures.
    """
    if len(names) == 1:
        return []
    problem = f"columns {quote_names(names, _MOST_COLUMNS)} name pictures, each other ones; a line's labels are "
    problem += "learned for one picture only."
    remedy = 'Write a line for each picture, with its own labels: docs/recipes.md, "Two pictures in a line". '
    remedy += f"Or add to the command: {_join_command_alternatives('--image-column', names[:_MOST_COLUMNS])}"
    return [Fault("--image-column", problem, remedy)]


def guess_image_column(columns: CsvTable) -> str:
    """Return the one column that names pictures.

    Raises:
        BadInput: If there is no such column, or if there are several.
    """
    names = find_picture_columns(columns)
    raise_faults(find_ambiguous_picture_faults(names))
    return names[0]


def _join_command_alternatives(option: str, names: Iterable[str]) -> str:
    """Return alternatives for a command line: ``--findings Mass or --findings 'Mass 2'``."""
    return " or ".join(f"{option} {quote(name)}" for name in names)


def find_absent_picture_columns(columns: CsvTable, image: str, others: Collection[str]) -> list[str]:
    """Return further columns that name pictures by their file extensions, although these are not in the folder.

    A column that names the same pictures as ``image`` is left out.

    Args:
        image: The column that names the pictures of the data set.
        others: Other columns that name pictures in the folder.
    """
    endings, names = PICTURE_SUFFIXES + UNREAD_SUFFIXES, [name for name in columns if name not in (image, *others)]
    named = [name for name in names if _have_picture_extensions(columns.get_column(name).cells, endings)]
    return [name for name in named if not _name_same_pictures(columns, name, image)]


def find_label_columns_of_other_images(
    image: str, others: Sequence[str], labels: Iterable[str], folder: str = ""
) -> list[str]:
    """Return the label columns that, by their names, describe other pictures than those of column ``image``.

    Such a column has a word that distinguishes another image column from ``image``: the side, if the image columns are
    ``left`` and ``right``, or ``img_OD`` and ``img_OS``. A word for the opposite side counts even if no column names
    the pictures of that side.

    Args:
        image: The column that names the pictures of the data set.
        others: The other columns that name pictures.
        labels: All label columns.
        folder: Name of the folder of the pictures, which may be one for a side.
    """
    words = {name: _split_into_words_and_numbers(name) for name in (image, *others)}
    common = set.intersection(*words.values()) if others else words[image]

    def list_distinguishing_words(name: str) -> set[str]:
        particular = words[name] - common
        return particular.union(*(side for side in SIDES if particular & side))

    image_sides = [side for side in SIDES if (words[image] | _split_into_words_and_numbers(folder)) & side]
    # In a label, "dx" is a diagnosis rather than the right side.
    opposite = {word for side in SIDES if len(image_sides) == 1 and side not in image_sides for word in side} - {"dx"}
    foreign = opposite.union(*map(list_distinguishing_words, others)) - list_distinguishing_words(image)
    image_marks = list_distinguishing_words(image).union(*image_sides)
    sides = {name: _split_into_words_and_numbers(name) for name in labels}
    return [name for name, of in sides.items() if of & foreign and not of & image_marks]


def make_other_picture_labels_fault(
    image: str, others: Sequence[str], labels: Sequence[str], foreign: Sequence[str]
) -> Fault:
    """Return a fault for label columns that describe pictures other than those of column ``image``.

    It gives the options for the command, either without these label columns or with all.

    Args:
        image: The column that names the pictures of the data set, such as those of the left eye.
        others: The other columns that name pictures, such as those of the right eye.
        labels: All label columns.
        foreign: The label columns that describe other pictures.
    """
    of_others = f" (of {quote_names(others, _MOST_COLUMNS)})" if others else ""
    problem = f"by their names, these columns say what other pictures{of_others} show: "
    problem += f'{quote_names(foreign, _MOST_COLUMNS)}; labels are learned for those of column "{image}".'
    remedy = 'Write a line for each picture, with its own labels: docs/recipes.md, "Two pictures in a line". Or add to '
    remaining = [name for name in labels if name not in foreign]
    options = [f"{format_findings_options(remaining)} (without these)"] if remaining else []
    options += [f"{format_findings_options(labels)} (these show the same pictures)"]
    return Fault("--findings", problem, f"{remedy}the command: {' or '.join(options)}")


def _split_into_words_and_numbers(name: str) -> set[str]:
    return get_distinct_column_name_words(name) | set(re.findall(r"\d+", name))


def group_label_columns_by_reader(names: Iterable[str]) -> list[list[str]]:
    """Return groups of label columns that differ only in who read the image: ``Mass_R1``, ``Mass_consensus``."""
    groups = dict[tuple[str, ...], list[str]]()
    for name in names:
        words = re.findall(r"[^\W_]+", name.casefold())
        rest = tuple(word for word in words if not READER.fullmatch(word))
        if rest and rest != tuple(words):
            groups.setdefault(rest, []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def guess_column_roles(
    columns: CsvTable,
    image: str,
    patient: str | None = None,
    source: str | None = None,
    findings: Sequence[str] = (),
) -> ColumnRoles:
    """Guess the role of each column in a label table.

    Args:
        image: The column with file names of images.
        patient: The column of patients; None to guess it.
        source: The column of hospitals; None to guess it, empty if there is none.
        findings: The label columns, or the column of findings; empty to guess them.

    Raises:
        BadInput: If no column clearly holds labels, or a column mixes labels with other cells.
    """
    settled = (image, *([source] if source else []), *findings)
    patient = patient or guess_patient_column(columns, settled, image)
    split = next((name for name in columns if name not in settled and _is_split_column(columns, name)), None)
    rest = [name for name in columns if name not in (image, patient, split)]
    splits = tuple(name for name in rest if name not in settled and looks_like_split_column(columns.get_column(name)))
    if source is None:
        source = _guess_hospital_column_by_name(columns, [name for name in rest if name not in (*findings, *splits)])
    rest = [name for name in rest if name != source]
    judgements = {name: judge_column_content(columns.get_column(name)) for name in rest}
    positive = {name: judgements[name].positive for name in rest if judgements[name].kind == "labels"}
    flags = classify_binary_columns({} if findings else positive)
    label_columns = list(flags.classes)
    if findings:
        is_named = len(findings) == 1 and judgements[findings[0]].kind in ("other", "numbers")
        label_columns = [] if is_named else [name for name in columns if name in findings]
    if source is None:
        others = [name for name in rest if name not in (*label_columns, *findings, *splits)]
        source = _guess_hospital_column_by_content(columns, others, label_columns, patient)
    unused = {name: judgements[name] for name in rest if name not in (source, *label_columns, *findings)}
    if not findings:
        _refuse_incomplete_label_columns(columns, unused, label_columns)
        if label_columns:
            _refuse_unclear_label_columns(columns, flags, unused)
    if label_columns:
        counts = {name: int(judgements[name].positive.sum()) for name in label_columns}
        labelled = np.sum([judgements[name].positive for name in label_columns], axis=0)  # positive classes per row
        exclusive = len(counts) > 1 and bool((labelled == 1).all())
        roles = ColumnRoles(image, patient, source or None, split, tuple(counts), None, "|", counts, exclusive)
        roles = replace(roles, possible_splits=splits)
        alone = dict[str, int]()
        if not exclusive and len(counts) > _FEW_CLASSES:
            positives = {name: judgements[name].positive for name in counts}
            alone = {n: counts[n] for n, positive in positives.items() if (positive == (positive == labelled)).all()}
        return replace(roles, alone=alone, unused=unused)
    name = findings[0] if findings else _guess_finding_column(columns, unused)
    _refuse_unusable_finding_column(columns, name, unused)
    roles = ColumnRoles(image, patient, source or None, split, (), name, "|", {}, False)
    roles = _complete_roles_with_findings(columns, name, roles)
    _refuse_diagnosis_certainty_column(columns, roles, unused)
    without_finding = {other: judgement for other, judgement in unused.items() if other != name}
    return replace(roles, unused=without_finding, possible_splits=splits)


def _is_split_column(columns: CsvTable, name: str) -> bool:
    """Return True if all cells are names of parts of a split, and several parts occur or the heading means a split."""
    parts = columns.get_column(name).cells
    if len(parts) > MOST_WORDS:
        return False
    meanings = {PART_NAMES.get(part.casefold()) for part in parts}
    return None not in meanings and (SPLIT_HEADING.fullmatch(name.casefold()) is not None or len(meanings) > 1)


def _refuse_diagnosis_certainty_column(
    columns: CsvTable, roles: ColumnRoles, unused: Mapping[str, ColumnJudgement]
) -> None:
    """Refuse a table in which a column says how certain each finding is: "excluded", or A, V or Z of ICD-10 codes.

    Args:
        unused: The columns to examine.

    Raises:
        BadInput: If there is such a column.
    """
    has_codes = any(map(split_diagnosis_code, roles.classes))
    for name in unused:
        column = columns.get_column(name)
        if len(column.cells) > MOST_WORDS:
            continue
        cells = {place: cell.casefold() for place, cell in enumerate(column.cells) if not is_blank_cell(cell)}
        uncertain = [place for place, cell in cells.items() if cell in UNCONFIRMED and (has_codes or len(cell) > 1)]
        if uncertain and UNCONFIRMED.union(CONFIRMED).issuperset(cells.values()):
            problem = f'column "{name}" may say how certain those of "{roles.finding}" are: '
            problem += f"{column.describe_cell_lines(uncertain)}. A means excluded, V suspected, Z status after."
            remedy = "Write the letter behind the code (J18.9A), or the word before the finding, or take out what is "
            remedy += "excluded; if it is something else, take the column out of the table."
            raise BadInput([Fault("--findings", problem, remedy)])


def shorten_report_text(text: str) -> str:
    """Return the first letters of a text that may be a report, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= _MOST_LETTERS else f"{line[: _MOST_LETTERS - 1]}…"


def describe_non_label_cells(
    columns: CsvTable, judged: Mapping[str, ColumnJudgement], names: Collection[str] | None = None
) -> str:
    """List the cells that are no labels, with line numbers, for each column: ``"Mass" ("ja" in line 3)``.

    Args:
        names: The columns to describe; None for all that are judged.
    """
    chosen = judged if names is None else [name for name in judged if name in names]
    texts = [f'"{name}" ({columns.get_column(name).describe_cell_lines(judged[name].foreign, 3)})' for name in chosen]
    more = f"; {len(texts) - _MOST_COLUMNS} more" if len(texts) > _MOST_COLUMNS else ""
    return "; ".join(texts[:_MOST_COLUMNS]) + more


def format_findings_options(names: Iterable[str]) -> str:
    """Return the command-line options ``--findings NAME`` that select these columns."""
    return " ".join(f"--findings {quote(name)}" for name in names)


def _refuse_incomplete_label_columns(
    columns: CsvTable, judged: Mapping[str, ColumnJudgement], label_columns: Sequence[str]
) -> None:
    """Refuse a table with columns that mix labels with other cells, because skipping one would lose a class unnoticed.

    Args:
        judged: The columns that are not used as labels, with their judgements.
        label_columns: The columns that are used.

    Raises:
        BadInput: If there is such a column.
    """
    if broken := {
        name: of for name, of in judged.items() if of.kind == "almost labels" and not is_metadata_column_name(name)
    }:
        problem = f"these columns hold labels, and cells that are none: {describe_non_label_cells(columns, broken)}."
        others = [name for name in judged if name not in broken and not is_metadata_column_name(name)]
        if coded := [name for name in others if contains_only_one_and_two(columns.get_column(name))]:
            problem += (
                f" These hold 1 and 2, perhaps for yes and no: {describe_non_label_cells(columns, judged, coded)}."
            )
        remedy = "Write 1 (shows it), 0 (does not), -1 (doubtful) or nothing (nobody looked) in these cells."
        if any(map(_is_known_finding, label_columns)) or (label_columns and not any(map(_is_known_finding, broken))):
            remedy += f" Or use the other columns only: {format_findings_options(label_columns)}"
        raise BadInput([Fault("labels", problem, remedy)])


def _refuse_unclear_label_columns(
    columns: CsvTable, flags: BinaryColumnKinds, unused: Mapping[str, ColumnJudgement]
) -> None:
    """Refuse a table of label columns (cells 0 and 1) if it is unclear which columns hold the labels.

    There are two reasons. First, the cells of an unused column name findings that have no label column, and one of
    these holds:

    - Its heading speaks of findings.
    - Its cells include known findings or names of the label columns.
    - There is only one label column, whose name is neither a known finding nor an abbreviation. It is then enough that
      a cell of the unused column has a known finding, several names, or a word for "nothing found".

    Second, a column of 0 and 1 may be a finding, or something else, such as the sex.

    Args:
        flags: The label columns, and the columns of 0 and 1 that may be something else.
        unused: The columns without a role.

    Raises:
        BadInput: For either reason; the error names the options that say which columns are labels.
    """
    label_keys = set(map(make_class_spelling_key, (*flags.classes, *flags.doubtful)))
    is_lone = len(flags.classes + flags.doubtful) == 1
    is_lone &= not any(_is_known_finding(name) or is_letter_or_abbreviation(name) for name in flags.classes)
    for name, findings in _list_finding_columns(columns, unused).items():
        real = [finding for finding in findings if not _means_no_finding(finding)]
        others = [finding for finding in real if make_class_spelling_key(finding) not in label_keys]
        classes = [finding for finding in real if len(finding) > 1 and finding not in others]
        is_meant = _is_findings_heading(name) or _names_include_known_findings(findings, others)
        is_meant |= len(classes) > 1 or 2 * len(classes) >= len(findings)
        # "Confirmed diagnosis" or "disease type", with codes.
        is_type = _heading_mentions_findings(name)
        is_type &= get_distinct_column_name_words(name) & BESIDE_FINDINGS <= WHOSE_FINDINGS
        is_meant |= is_type and all(map(is_letter_or_abbreviation, filter(None, columns.get_column(name).cells)))
        if others and (is_meant or (is_lone and _may_name_findings(columns, name, findings))):
            problem = f'column "{name}" names findings ({quote_names(others, 3)}), and cells are 0 and 1 in '
            problem += f"{quote_names(flags.classes, _MOST_COLUMNS)}. Only one kind can be the labels."
            options = f"{format_findings_options([name])} or {format_findings_options(flags.classes)}"
            if flags.doubtful:
                options += f" (without {quote_names(flags.doubtful, _MOST_COLUMNS)}, which may be no finding: name it "
                options += "too if it is)"
            raise BadInput([Fault("--findings", problem, f"Say which, by adding to the command: {options}")])
    if flags.doubtful:
        names = quote_names(flags.doubtful, _MOST_COLUMNS)
        problem = f"cells are 0 and 1 in {names} too. By the name that may be a finding, or the sex, a side, the "
        problem += "view, the picture's quality, the part of a split."
        options = format_findings_options(flags.classes)
        remedy = f"Say which, by adding to the command: {options} {format_findings_options(flags.doubtful)} "
        raise BadInput([Fault("--findings", problem, f"{remedy}(all are findings) or {options} (without these)")])


def list_possible_finding_columns(columns: CsvTable, roles: ColumnRoles) -> list[str]:
    """Return the columns that may name findings, in case the label columns are none; empty if one is a known finding.

    A column may name findings if its cells have lists, a known finding or a word for "nothing found".
    """
    if not roles.label_columns or any(map(_is_known_finding, roles.label_columns)):
        return []
    candidates = _list_finding_columns(columns, roles.unused)
    return [name for name, findings in candidates.items() if _may_name_findings(columns, name, findings)]


def _may_name_findings(columns: CsvTable, name: str, findings: Collection[str]) -> bool:
    column = columns.get_column(name, with_line_ends=True)
    separator = _guess_finding_separator(column)
    has_lists = any(len(split_finding_names(cell, separator)) > 1 for cell in column.cells)
    return has_lists or any(_is_known_finding(finding) or _means_no_finding(finding) for finding in findings)


def _heading_mentions_findings(heading: str) -> bool:
    return FINDINGS.search(heading.casefold()) is not None


def _is_findings_heading(name: str) -> bool:
    return _heading_mentions_findings(name) and not get_distinct_column_name_words(name) & BESIDE_FINDINGS


def _is_known_finding(name: str) -> bool:
    return name.casefold() in _CLASSES or FINDING_STEM.search(name.casefold()) is not None


def _names_include_known_findings(names: Collection[str], others: Collection[str]) -> bool:
    """Return True if ``others`` has two known findings, or has one and ``names`` has a word for "nothing found"."""
    count = sum(map(_is_known_finding, others))
    return count > 1 or (count == 1 and any(map(_means_no_finding, names)))


def _refuse_unusable_finding_column(columns: CsvTable, finding: str, unused: Mapping[str, ColumnJudgement]) -> None:
    """Refuse a column of findings that holds sentences, only 1 and 2, or words that other columns hold, too.

    Args:
        finding: The column of findings.
        unused: The other columns without a role.

    Raises:
        BadInput: If the column is refused.
    """
    column = columns.get_column(finding, with_line_ends=True)
    if is_free_text_column(column):
        text = next(cell for cell in column.cells if not is_blank_cell(cell))
        problem = f'column "{finding}" holds texts ("{shorten_report_text(text)}"), and no names of findings.'
        remedy = "Write the findings of each image in a column of their own: names with | between them, or 1 and 0."
        raise BadInput([Fault("--findings", problem, remedy)])
    if contains_only_one_and_two(column):
        codes = column.describe_cell_lines([i for i, cell in enumerate(column.cells) if not is_blank_cell(cell)])
        problem = f'column "{finding}" holds {codes}: codes for yes and no, or for two kinds?'
        remedy = "Write 1 (shows it), 0 (does not) or nothing (nobody looked), by the table's code book: factors of R "
        remedy += "are often 1 = no and 2 = yes, other programs' codes the reverse. If they are two kinds, write their "
        raise BadInput([Fault("--findings", problem, f"{remedy}names.")])

    def list_cell_words(name: str) -> set[str]:
        cells = columns.get_column(name).cells
        return {cell for cell in cells if not is_placeholder_finding(cell) and not cell[0].isdecimal()}

    finding_words = list_cell_words(finding)
    words_of = {name: list_cell_words(name) for name, of in unused.items() if name != finding and of.kind == "other"}
    shared = {name: finding_words & others for name, others in words_of.items()}
    shared = {name: words for name, words in shared.items() if len(words) > 1 and 2 * len(words) >= len(words_of[name])}
    if shared:
        words = sorted(set.union(*shared.values()))
        problem = f'"{finding}" and {quote_names(shared, _MOST_COLUMNS)} hold the same words: {quote_names(words, 5)}.'
        remedy = "If they say yes and no, write 1 (shows it), 0 (does not), -1 (doubtful) or nothing (nobody looked). "
        remedy += "If they name findings, write all findings of an image in one column, with | between them."
        raise BadInput([Fault("--findings", problem, remedy)])


def _has_few_distinct_cells(column: CsvColumn) -> bool:
    count = sum(not is_blank_cell(cell) for cell in column.cells)
    return 1 < count <= min(_MOST_SOURCES, len(column.places) / _FEWEST_ROWS)


def _guess_hospital_column_by_name(columns: CsvTable, names: Iterable[str]) -> str | None:
    """Return the first column whose name suggests hospitals, and which has few distinct cells; None if none does."""
    fit = list[str]()
    for name in names:
        column = columns.get_column(name)
        is_other = bool(get_distinct_column_name_words(name) & NO_SOURCE_WORDS) or contains_patient_word(name)
        if _has_few_distinct_cells(column) and not is_other and not is_free_text_column(column):
            fit.append(name)
    by_name = [name for name in fit if HOSPITAL.search(name.casefold())]
    return next(iter([*by_name, *(name for name in fit if get_distinct_column_name_words(name) & SOURCE_WORDS)]), None)


def _guess_hospital_column_by_content(
    columns: CsvTable, names: Iterable[str], label_columns: Sequence[str], patient: str | None
) -> str | None:
    """Return the column that seems to name hospitals because of its cells; None if there is none.

    Either most of its cells look like names of hospitals. Or its value determines which classes are labelled in a row,
    and no patient has two values, which excludes columns such as the view.

    Args:
        names: The columns to consider.
        patient: The column of patients; None if there is none.
    """
    blank = []
    for column in map(columns.get_column, label_columns):
        blank.append(np.array([interpret_label_cell(cell) == "blank" for cell in column.cells])[column.places])
    for name in names:
        column = columns.get_column(name)
        if not _has_few_distinct_cells(column) or get_distinct_column_name_words(name) & NO_SOURCE_WORDS:
            continue
        if any(map(is_blank_cell, column.cells)):
            continue
        if sum(bool(HOSPITAL.search(cell.casefold())) for cell in column.cells) > len(column.cells) / 2:
            return name
        if patient is not None:
            patients = columns.get_column(patient)
            if count_distinct_pairs(patients.places, column.places) > len(patients.cells):
                continue
        # The fraction of blank cells per hospital, for each class.
        shares = [np.bincount(column.places, rows) / column.count_rows_per_cell() for rows in blank]
        are_clear = all(((share == 1) | (share < 0.5)).all() for share in shares)
        if are_clear and any(share.max() == 1 and share.min() < 1 for share in shares):
            return name
    return None


def list_possible_hospital_columns(columns: CsvTable, judged: Mapping[str, ColumnJudgement]) -> list[str]:
    """Return the columns without a role that may name hospitals: by the name, or by few values that repeat."""
    return [
        name
        for name, of in judged.items()
        if not of.may_be_labels
        and _has_few_distinct_cells(column := columns.get_column(name))
        and len(column.cells) <= _MOST_OFFERED
        and not CASE.search(name.casefold())
        and may_be_identifier_column(columns, name)
        and not (is_free_text_column(column) or looks_like_split_column(column) or _heading_mentions_findings(name))
        and (
            may_contain_finding_names(column)
            or HOSPITAL.search(name.casefold())
            or get_distinct_column_name_words(name) & SOURCE_WORDS
        )
    ]


def _guess_finding_separator(column: CsvColumn) -> str:
    """Return the separator that divides most cells into names which occur repeatedly, or into codes of diagnoses.

    One is preferred that leaves no name composed of other names: in "Mass, benign|Cyst" it is ``|``, and the comma
    belongs to a name. If no sign separates names, ``|`` is returned.
    """
    rows, counts, names = dict[str, int](), column.count_rows_per_cell(), dict[str, set[str]]()
    for mark in OTHER_SEPARATORS:
        pieces = [set(split_finding_names(cell.casefold(), mark)) for cell in column.cells]
        total = Counter(piece for of_cell in pieces for piece in of_cell)
        divided = [place for place, of_cell in enumerate(pieces) if len(of_cell) > 1]
        if divided and all(
            any(total[piece] > 1 for piece in pieces[place]) or all(map(split_diagnosis_code, pieces[place]))
            for place in divided
        ):
            rows[mark], names[mark] = int(counts[divided].sum()), set(total)
    # Of "Mass, benign|Cyst", | leaves no name that another sign divides into names; the comma leaves "benign|Cyst".
    clean = [
        mark
        for mark in rows
        if all(
            names[mark].isdisjoint(split_finding_names(name, other))
            for other in rows
            if other != mark
            for name in names[mark]
            if other in name
        )
    ]
    return max(clean or rows, key=lambda mark: rows[mark], default="|")


def _guess_finding_column(columns: CsvTable, judged: Mapping[str, ColumnJudgement]) -> str:
    """Return the column that names findings, by its heading, else by its cells; refuse a table without a clear one."""
    candidates = _list_finding_columns(columns, judged)
    for name, findings in candidates.items():
        if (
            _is_findings_heading(name)
            or any(finding in _CLASSES or _means_no_finding(finding) for finding in findings)
            or _names_include_known_findings(findings, findings)
        ):
            return name
    if len(mentioning := list(filter(_heading_mentions_findings, candidates))) == 1:
        return mentioning[0]
    problem = "no column is sure to hold labels, as 1, 0, -1 or nothing for each class, or as names of findings"
    remedy = "Give each class a column of 1 (shows it), 0 (does not), -1 (doubtful) or nothing (nobody looked)."
    options = ""
    unlikely = [name for name, of in judged.items() if of.kind == "labels"]
    words, numbers = ({name: of for name, of in judged.items() if of.kind == kind} for kind in ("words", "numbers"))
    if words:
        problem += f". These hold words for them, which are not read: {describe_non_label_cells(columns, words)}"
        remedy = "Replace them by 1 (shows it), 0 (does not), -1 (doubtful) or nothing (nobody looked)."
    elif unlikely:
        problem += f". By their names, {quote_names(unlikely, _MOST_COLUMNS)} are no findings"
        options = f" If they are, add to the command: {format_findings_options(unlikely)}"
    elif candidates:
        options = _join_command_alternatives("--findings", list(candidates)[:_MOST_COLUMNS])
        options = f" If one of these columns names findings, add it to the command: {options}"
    if numbers and not words:
        problem += f". These hold other numbers: {describe_non_label_cells(columns, numbers)}"
        remedy += " A grade or a probability becomes one by the limit that you choose."
    elif not (words or unlikely or candidates):
        problem += f"; the table has {quote_names(columns)}"
    if columns.unnamed:
        remedy += f" {describe_unnamed_columns(columns)}"
    raise BadInput([Fault("labels", f"{problem}.", remedy + options)])


def _list_finding_columns(columns: CsvTable, judged: Mapping[str, ColumnJudgement]) -> dict[str, list[str]]:
    """Map each column that may name findings to its names in lower case; columns whose heading says so come first."""
    candidates = dict[str, list[str]]()
    for name in sorted(judged, key=lambda column: not _is_findings_heading(column)):
        if judged[name].kind != "other" or is_metadata_column_name(name):
            continue
        column = columns.get_column(name, with_line_ends=True)
        if is_free_text_column(column) or looks_like_split_column(column) or contains_only_dates(column):
            continue
        counts, *_ = _count_finding_names(column, _guess_finding_separator(column))
        names = [finding for finding in counts if not is_placeholder_finding(finding)]
        if _FEW_CLASSES <= len(names) <= _MOST_CLASSES and may_contain_finding_names(column):
            candidates[name] = names
    return candidates


def _means_no_finding(finding: str) -> bool:
    return finding in _NO_FINDING or is_no_finding_name(finding)


def describe_unnamed_columns(columns: CsvTable) -> str:
    """Return a warning about columns that have cells but no name."""
    count = format_count_with_noun(columns.unnamed, "column has", "columns have")
    return f"{count} no name in the first line, and cannot be used. If the next line holds the names, remove the first."


def _count_finding_names(
    column: CsvColumn, separator: str
) -> tuple[Counter[str], dict[str, str], dict[frozenset[str], int]]:
    """Count the names of findings in a column.

    Returns:
        The number of rows with each name in lower case; the spelling of each name in the table; and the number of rows
        with each set of names.
    """
    counts, spellings, together = Counter[str](), dict[str, str](), Counter[frozenset[str]]()
    for cell, rows in zip(column.cells, column.count_rows_per_cell().tolist(), strict=True):
        parts = [" ".join(part.split()) for part in split_finding_names(cell, separator)]
        names = {part.casefold(): part for part in parts}
        counts.update(dict.fromkeys(names, rows))
        spellings = names | spellings
        together[frozenset(names)] += rows
    return counts, spellings, together


def _complete_roles_with_findings(columns: CsvTable, name: str, roles: ColumnRoles) -> ColumnRoles:
    """Complete the roles with the classes and other names in the cells of ``name``, the column of findings.

    Spellings that differ only in case count as one name.

    Raises:
        BadInput: If the column names no finding, or has names that are composed of other names.
    """
    column = columns.get_column(name, with_line_ends=True)
    separator = _guess_finding_separator(column)
    counts, spellings, together = _count_finding_names(column, separator)
    normal = [key for key in counts if _means_no_finding(key)]
    named = [key for key in counts if key not in normal and not is_placeholder_finding(key)]
    unassessed = {*filter(says_image_not_assessed, counts), *find_missing_value_codes(named)}.difference(normal)
    unassessed |= {key for key in counts if UNREAD_CODE.fullmatch(key)}
    # A code such as nv is a finding if half of the findings are short codes too; a word such as "missing" (of a tooth)
    # is one if it stands in one cell with a finding.
    codes = [key for key in named if len(key) <= _LONGEST_CODE and key.isalnum()]
    are_codes = len(codes) >= _FEW_CLASSES and 2 * len(codes) >= len(named)
    with_findings = set[str]().union(*(names for names in together if not names.isdisjoint(named)))
    real = {key for key in counts if are_codes and CODE_OR_PLACEHOLDER.fullmatch(key)}
    real |= {key for key in with_findings if WORD_OR_PLACEHOLDER.fullmatch(key)}
    nothing = [key for key in counts if is_placeholder_finding(key) and key not in unassessed | real]
    doubtful = [key for key in counts if key in nothing or get_finding_certainty(key)]
    doubtful = [key for key in doubtful if key not in unassessed.union(normal)]
    no_classes = unassessed.union(normal, doubtful)
    classes = {spellings[key]: rows for key, rows in counts.most_common() if key not in no_classes}
    if not classes:
        raise BadInput([Fault("--findings", f'column "{name}" names no finding.')])
    _refuse_composed_finding_names(column, name, separator, counts.keys() - unassessed.union(nothing))
    sets = Counter[frozenset[str]]()
    for names, rows in together.items():
        sets[names.difference(normal, unassessed)] += rows
    several = sum(rows for names, rows in sets.items() if len(names) > 1)
    beside = {key for names in sets if len(names) > 1 for key in names}
    is_usual = several >= _USUALLY_SEVERAL * sum(rows for names, rows in together.items() if names)
    alone = {key: rows for key, rows in classes.items() if key.casefold() not in beside and is_usual}
    return replace(
        roles,
        separator=separator,
        classes=classes,
        exclusive=not (doubtful or unassessed) and all(len(names) == 1 for names in sets),
        no_finding=tuple(spellings[key] for key in normal if key not in _NO_FINDING),
        doubtful={spellings[key]: counts[key] for key in doubtful},
        not_assessed={spellings[key]: counts[key] for key in counts if key in unassessed},
        alone={key: rows for key, rows in alone.items() if rows >= _FEWEST_ALONE},
    )


def _refuse_composed_finding_names(column: CsvColumn, name: str, separator: str, names: Collection[str]) -> None:
    """Refuse a column with names that are composed of its other names, joined by signs or words such as "and".

    Args:
        name: The name of the column, for the message.
        separator: The text between the names in a cell.
        names: All names in the column, in lower case.

    Raises:
        BadInput: If there is such a name.
    """
    words = [re.escape(other) for other in sorted(names, key=len, reverse=True)]
    composed = dict[str, list[int]]()
    for place, cell in enumerate(column.cells):
        for part in split_finding_names(cell, separator):
            folded = " ".join(part.casefold().split())
            others = "|".join(word for word in words if word != re.escape(folded))
            rest, count = re.subn(rf"(?<![^\W_])(?:{others})(?![^\W_])", "", folded)
            if count > 1 and not re.sub(r"\b(?:and|und|et|y|e|og|och|with)\b|[\W_]", "", rest):
                composed.setdefault(part, []).append(place)
    if composed:
        problem = f'column "{name}" holds {column.describe_cell_part_lines(composed)}, '
        problem += "which consists of names of the column."
        remedy = "Write the same separator between all names, such as |, or give the finding a name of its own."
        raise BadInput([Fault("labels", problem, remedy)])


def find_class_synonyms(
    counts: Mapping[str, int], together: NDArray[np.bool_], one_place: NDArray[np.bool_]
) -> dict[str, str]:
    """Find class names that may be synonyms used by different hospitals.

    Names are similar if they have the same words, nearly the same letters, or if one contains all words of the other.

    Args:
        counts: Number of positive rows of each class, in the order of the arrays.
        together: ``(classes, classes)``, True if some row has labels of both names. They are then different classes,
            unless only the spelling differs.
        one_place: ``(classes, classes)``, True if one hospital uses both names. A name that contains all words of the
            other is then a different class.

    Returns:
        For each name that has a more frequent synonym, that synonym.
    """
    places = {name: place for place, name in enumerate(counts)}
    ordered, synonyms = sorted(counts, key=lambda name: (-counts[name], name)), dict[str, str]()
    for number, name in enumerate(ordered):
        ranks = {}
        for other in ordered[:number]:
            pair, rank = (places[name], places[other]), rank_name_similarity(name, other)
            is_spelling = make_class_spelling_key(name) == make_class_spelling_key(other)  # a run refuses to have both
            apart = together[pair] or (rank and one_place[pair])
            if other not in synonyms and rank is not None and (is_spelling or not apart):
                ranks[other] = rank
        if ranks:
            synonyms[name] = min(ranks, key=lambda other: ranks[other])
    return synonyms


def rank_name_similarity(name: str, other: str) -> int | None:
    """Return 0 for names with equal words or nearly equal letters, 1 if one has all words of the other, else None."""
    first, second = (make_name_similarity_key(text).split() for text in (name, other))
    if make_class_spelling_key(name) == make_class_spelling_key(other):
        return 0
    numbers = [re.findall(r"\d+[^\W\d_]?(?![^\W\d_])|\d+", text.casefold()) for text in (name, other)]
    if numbers[0] != numbers[1]:  # also BI-RADS 4a and 4b, J91 and J91A
        return None
    if sorted(first) == sorted(second):
        return 0
    pairs = list(zip(sorted(first), sorted(second), strict=False))
    if len(first) == len(second) and all(difflib.SequenceMatcher(None, *pair).ratio() >= _ALIKE for pair in pairs):
        return 0
    return 1 if set(first) <= set(second) or set(second) <= set(first) else None


def find_picture_folder(root: Path, names: Sequence[str], listings: PictureFileFinder) -> Path | None:
    """Return the folder, ``root`` or below it, that contains most of the named pictures; None if none contains any."""
    below = {Path(folder) for folder, _ in listings.list_files_recursively(root)}
    below |= {parent for folder in below for parent in folder.parents}  # also folders that contain only folders
    folders = {root: 0} | {root / folder: 0 for folder in sorted(below)}
    for folder in folders:
        folders[folder] = sum(listings.find_file(str(folder), name) is not None for name in names[:_LOOKED_AT])
    best = max(folders, key=lambda folder: folders[folder])
    return best if folders[best] else None
