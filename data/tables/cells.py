"""Parse the cells of a label table into labels, findings and parts of a split.

A label column has cells with 1, 0, -1 (uncertain) or blank cells. A finding column has cells with names of findings and
a separator between them. The cells are already normalised (:mod:`polyclinic.data.base.names`). Errors name the cells
that cannot be parsed, with their lines.
"""

import difflib
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from polyclinic.common.errors import BadInput, Fault, raise_faults, suggest_nearest_name
from polyclinic.data.base.decoded_size import DEFAULT_LARGEST_MB
from polyclinic.data.base.names import is_blank_cell, is_missing_value, make_name_similarity_key
from polyclinic.data.base.spec import NO_FINDING, LabelPolicy
from polyclinic.data.base.splits import StringArray
from polyclinic.data.base.vocabulary import MISSING_LABEL_PATTERN, PART_WORDS
from polyclinic.data.tables.csv import CsvColumn, CsvTable, read_csv_table

_LABEL_PATTERN = re.compile(r"([+\-\u2212]?)([01])(?:[.,]0*)?")
LabelMeaning = Literal["present", "absent", "uncertain", "blank", "not assessed"]
LabelWords = Mapping[str, LabelMeaning]
"""Case-folded word in label columns -> the meaning that the user defines."""
_LABEL_WORDS: LabelWords = {"true": "present", "yes": "present", "false": "absent", "no": "absent"}
NO_LABEL_WORDS: LabelWords = {}
"""Words with a meaning in every table, unless the user defines another meaning."""
_LABEL_OF_POLICY = {"unknown": np.nan, "negative": 0.0, "positive": 1.0}
_PYTHON_LIST = re.compile(r"""\[\s*(?:(?:'[^']*'|"[^"]*")[\s,]*)*\]""")
_PYTHON_LIST_ITEM = re.compile(r"""'([^']*)'|"([^"]*)\"""")
COMMON_SEPARATORS = ("|", ";", ",", "/", "+", "&", "\\", "\n", "\t")
"""Signs that count as separators if at least one of the parts is a class name."""
_AMBIGUOUS_SEPARATORS = (" and ", " und ", " et ", " y ", " e ", " - ", " ", *"-_.:·•~>^=¦、；，｜／∙‧")
"""Words and signs that count as separators only if all parts are class names, because names may contain them."""
_WORD = re.compile(r"[^\W_]+")
_WORD_BOUNDARIES = re.compile(
    r"(?<=[^\W\d_])(?=\d)|(?<=\d)(?=[^\W\d_])|(?<=[a-zß-ÿ])(?=[A-ZÀ-Þ])|(?<=[A-Z])(?=[A-Z][a-z])"
)
"""Positions between words and numbers that are written together, as in ``leftMass12mm``."""
_MIN_LENGTH_WITHIN_WORDS = 4
"""Shorter class names are only found as whole words: ``ILD`` is not found in ``mild``."""
_MIN_SIMILARITY = 0.85
"""Minimum similarity of two spellings of one word."""
_MAX_FAULTS = 20
WRITE_LABELS_REMEDY = "Write 1 for present and 0 for absent in the table."
"""Remedy for invalid cells in a label column of a public data set."""
NAME_LABEL_WORDS_REMEDY = (
    'Name the words in [data], such as present = ["ja"] and absent = ["nein"], or write 1 for present and 0 for absent '
    "in the table. If these are names of findings, write all of a picture into one column, with | between them, and "
    "name it as finding_column."
)
"""Remedy for invalid cells in a label column of a user's table."""


def interpret_label_cell(cell: str, words: LabelWords = NO_LABEL_WORDS) -> LabelMeaning | None:
    """Return the meaning of a label cell such as ``1``, ``0.0``, ``-1``, ``1,0`` or ``yes``; None if it is invalid.

    Args:
        words: The user's words, which take precedence.
    """
    if (own := words.get(cell.casefold())) is not None:
        return own
    if is_blank_cell(cell):
        return "blank"
    match = _LABEL_PATTERN.fullmatch(cell)
    if match is None:
        return _LABEL_WORDS.get(cell.casefold())
    if match[2] == "0":
        return "absent"
    return "present" if match[1] in ("", "+") else "uncertain"


@dataclass(frozen=True)
class LabelColumnRules:
    """Rules for parsing columns of labels.

    Attributes:
        uncertain: The label for -1.
        blank: The label for empty cells.
        words: The user's words for labels.
        where: The configuration key that the faults name.
        remedy: Remedy for invalid cells.
    """

    uncertain: LabelPolicy
    blank: LabelPolicy
    where: str
    words: LabelWords = field(default_factory=dict)
    remedy: str = WRITE_LABELS_REMEDY


def parse_label_columns(columns: CsvTable, names: Sequence[str], rules: LabelColumnRules) -> NDArray[np.float32]:
    """Parse label columns into float32 ``(n, classes)``.

    Args:
        columns: The table.
        names: The columns to parse.

    Raises:
        BadInput: With all invalid cells and their lines, for each column.
    """
    value_of: dict[LabelMeaning | None, float] = {
        "present": 1.0,
        "absent": 0.0,
        "uncertain": _LABEL_OF_POLICY[rules.uncertain],
        "blank": _LABEL_OF_POLICY[rules.blank],
        "not assessed": np.nan,
        None: np.nan,
    }
    matrix = np.empty((len(columns.lines), len(names)), dtype=np.float32)
    faults = []
    for index, name in enumerate(names):
        column = columns.get_column(name)
        meanings = [interpret_label_cell(cell, rules.words) for cell in column.cells]
        if foreign := [number for number, meaning in enumerate(meanings) if meaning is None]:
            problem = f'column "{name}" holds {column.describe_cell_lines(foreign)}; expected 1, 0, -1 or nothing.'
            faults.append(Fault(rules.where, problem, rules.remedy))
        matrix[:, index] = np.array([value_of[meaning] for meaning in meanings], dtype=np.float32)[column.places]
    raise_faults(faults)
    return matrix


@dataclass(frozen=True)
class FindingColumnRules:
    """Rules for parsing a column whose cells name findings.

    Attributes:
        classes: The class names as written in the cells.
        separator: Text between the names in a cell. A cell may also be a Python list, ``['Mass', 'Nodule']``.
        no_finding: Names that mean that all classes are absent; a cell must not also name a class.
        not_assessed: Words that mean that the image could not be assessed. Classes that the cell does not name are then
            unknown.
        others: Names of findings that are not classes. ``"*"`` allows all names except placeholders, and names that
            resemble, contain or are part of a class name. A class name with less than four letters counts as contained
            only as a whole word.
        blank: The label of all classes for a blank cell.
        keys: The configuration key for each setting, for error messages; empty for tables of public data sets.
    """

    classes: Sequence[str]
    separator: str = "|"
    no_finding: Sequence[str] = NO_FINDING
    others: Sequence[str] = ()
    not_assessed: Sequence[str] = ()
    blank: LabelPolicy = "unknown"
    keys: Mapping[str, str] = field(default_factory=dict)


def split_finding_names(cell: str, separator: str) -> list[str]:
    """Split a cell such as ``"Mass|Nodule"`` into names of findings; a blank cell has none.

    Empty names are left out. A cell with only empty names, such as ``[]`` or ``|``, is returned unchanged, because it
    is not blank. Line ends and tabs within a name stay, unless the separator contains a space.
    """
    if is_blank_cell(cell):
        return []
    cell = " ".join(cell.split()) if " " in separator else cell
    if _PYTHON_LIST.fullmatch(cell):
        parts = [first or second for first, second in _PYTHON_LIST_ITEM.findall(cell)]
    else:
        parts = cell.split(separator)
    return [name for part in parts if (name := part.strip())] or [cell]


def count_rows_by_finding(column: CsvColumn, separator: str) -> dict[str, int]:
    """Return finding -> number of rows that name it, for a column with cells such as ``"Mass|Nodule"``.

    The most frequent finding is the first. Names that differ only in upper and lower case are one finding, in the
    spelling of the first one. Placeholders are left out.
    """
    rows = Counter[str]()
    spellings = dict[str, str]()
    for cell, count in zip(column.cells, column.count_rows_per_cell().tolist(), strict=True):
        names = {" ".join(part.split()) for part in split_finding_names(cell, separator)}
        for name in names:
            if not is_placeholder_finding(name):
                rows[spellings.setdefault(name.casefold(), name)] += count
    return dict(sorted(rows.items(), key=lambda entry: (-entry[1], entry[0])))


class _ClassNameIndex:
    """Finds names in a list; case is ignored, unless two names of the list differ only in case."""

    def __init__(self, names: Sequence[str]) -> None:
        self._indices = {name: index for index, name in enumerate(names)}
        counts = Counter(name.casefold() for name in self._indices)
        self._folded_indices = {
            name.casefold(): index for name, index in self._indices.items() if counts[name.casefold()] == 1
        }

    def find_name_index(self, name: str) -> int | None:
        """Return the index of a name in the list; None if it is not in the list."""
        index = self._indices.get(name)
        return self._folded_indices.get(name.casefold()) if index is None else index

    def contains_name(self, name: str) -> bool:
        """Return True if a name is in the list."""
        return self.find_name_index(name) is not None


def parse_finding_column(
    column: CsvColumn, name: str, rules: FindingColumnRules
) -> tuple[NDArray[np.float32], dict[str, int]]:
    """Parse a column with cells such as ``"Mass|Nodule"`` into labels.

    Args:
        name: The name of the column, for error messages.

    Returns:
        float32 labels ``(n, classes)``, and the number of rows with each finding that is not a class.

    Raises:
        BadInput: With all names that ``rules`` do not list, and all cells that name both a class and "no finding".
    """
    listed = (rules.classes, rules.no_finding, rules.others, rules.not_assessed)
    classes, absent, others, unassessed = map(_ClassNameIndex, listed)
    labels = np.zeros((len(column.cells), len(rules.classes)), dtype=np.float32)  # (distinct cells, classes)
    foreign = dict[str, set[int]]()  # name that is not a class -> indices of the cells
    contradictions = list[int]()
    for row, cell in enumerate(column.cells):
        parts = split_finding_names(cell, rules.separator)
        # A listed name may be a text that usually means a blank cell, such as "NA".
        if not parts and any(names.contains_name(cell) for names in (classes, absent, others, unassessed)):
            parts = [cell]
        if not parts:
            labels[row] = _LABEL_OF_POLICY[rules.blank]
        says_no_finding = False
        not_assessed = False
        for text in parts:
            part = " ".join(text.split())
            if (number := classes.find_name_index(part)) is not None:
                labels[row, number] = 1
            elif absent.contains_name(part):
                says_no_finding = True
            elif unassessed.contains_name(part):
                not_assessed = True
            else:
                foreign.setdefault(text, set()).add(row)
        if says_no_finding and labels[row].any():
            contradictions.append(row)
        if not_assessed:
            labels[row, labels[row] != 1] = np.nan
    unlisted = {text: cells for text, cells in foreign.items() if not others.contains_name(" ".join(text.split()))}
    faults = _find_unlisted_finding_faults(column, name, rules, unlisted)
    if contradictions:
        problem = f'column "{name}" names a class and says that there is no finding: '
        problem += f"{column.describe_cell_lines(contradictions)}."
        faults.append(Fault(rules.keys.get("column", "data.labels"), problem, "Correct these cells."))
    raise_faults(faults)
    row_counts = column.count_rows_per_cell()
    rows_by_finding = Counter[str]()
    for text, cells in foreign.items():
        rows_by_finding[" ".join(text.split())] += int(row_counts[list(cells)].sum())
    return labels[column.places], rows_by_finding


def is_placeholder_finding(part: str) -> bool:
    """Return True if a part of a cell is a placeholder instead of a finding: "-", "?", "[nan]", "#REF!", "unknown"."""
    bare = _strip_brackets_and_quotes(part)
    return is_missing_value(part) or MISSING_LABEL_PATTERN.fullmatch(bare) is not None


def _strip_brackets_and_quotes(part: str) -> str:
    return part.casefold().strip("[](){}'\" .:!")


def guess_class_name_separator(part: str, has: Callable[[str], bool]) -> str | None:
    """Guess the separator in a text that may join several class names; None if no separator is plausible.

    A common separator is accepted if one part is a class name. A word or sign that may also occur in names, such as
    "and", is accepted only if all parts are class names.

    Args:
        has: Function that returns True for a class name.
    """
    for mark in (*COMMON_SEPARATORS, *_AMBIGUOUS_SEPARATORS):
        pieces = [" ".join(piece.split()) for piece in split_finding_names(part, mark)]
        enough = any(map(has, pieces)) if mark in COMMON_SEPARATORS else all(map(has, pieces))
        if len(pieces) > 1 and enough:
            return str(mark)
    return None


def _make_class_mention_finder(rules: FindingColumnRules) -> Callable[[str], str | None]:
    """Return a function that finds the longest class name in a text, or otherwise a name of ``rules.no_finding``.

    The function returns None if the text contains no such name.
    """

    def split_joined_words(text: str) -> tuple[str, str]:
        return text.casefold(), _WORD_BOUNDARIES.sub(" ", text).casefold()

    patterns = list[tuple[str, re.Pattern[str]]]()
    for name in (*sorted(rules.classes, key=len, reverse=True), *rules.no_finding):
        words = [_WORD.findall(spelling) or [spelling] for spelling in split_joined_words(name)]
        pattern = "|".join(r"[\W_]*".join(map(re.escape, spelling_words)) for spelling_words in words)
        if name in rules.no_finding or len("".join(words[0])) < _MIN_LENGTH_WITHIN_WORDS:
            pattern = rf"(?<![^\W_])(?:{pattern})(?![^\W_])"
        patterns.append((name, re.compile(pattern)))

    def find_name_in_text(text: str) -> str | None:
        texts = split_joined_words(text)
        return next((name for name, pattern in patterns if any(map(pattern.search, texts))), None)

    return find_name_in_text


def _find_unlisted_finding_faults(
    column: CsvColumn, name: str, rules: FindingColumnRules, unlisted: Mapping[str, Collection[int]]
) -> list[Fault]:
    """Return faults, with suggestions, for names of findings that the configuration does not list.

    Args:
        name: The name of the column, for the messages.
        unlisted: Name that is not listed -> indices of the distinct cells that contain it.
    """
    keys = {key: rules.keys.get(key, "data.labels") for key in ("classes", "separator")}
    near_names = {make_name_similarity_key(label): f'Did you mean "{label}"?' for label in rules.classes}
    find_within = _make_class_mention_finder(rules)
    names, all_others = _ClassNameIndex([*rules.classes, *rules.no_finding]), "*" in rules.others
    are_numbers = not all(any(map(str.isalpha, label)) for label in rules.classes)
    words_of = {label: _WORD.findall(label.casefold()) for label in rules.classes}
    faults, unlike, nothing = list[Fault](), dict[str, Collection[int]](), dict[str, Collection[int]]()
    for text, places in unlisted.items():
        part = " ".join(text.split())
        if is_placeholder_finding(part) or not (are_numbers or any(map(str.isalpha, part))):
            nothing[text] = places
            continue
        mark, within = guess_class_name_separator(text, names.contains_name), find_within(part)
        near = near_names.get(make_name_similarity_key(part)) or suggest_nearest_name(
            part, rules.classes, 0.8 if all_others else 0.6
        )
        problem = f'column "{name}" holds {column.describe_cell_part_lines({text: places})}, which is no class.'
        other = f" If it is another finding, list it in {rules.keys['others']}." if rules.keys else ""
        shorter = None
        if all_others and not within:  # the first class with all words of the part, also spelled slightly differently
            words = _WORD.findall(part.casefold())
            has_words = (
                all(difflib.get_close_matches(w, of, 1, _MIN_SIMILARITY) for w in words) for of in words_of.values()
            )
            shorter = next((label for label, has in zip(words_of, has_words, strict=True) if has), None)
        if len(faults) == _MAX_FAULTS or not (near or mark or within or shorter):
            unlike[text] = places
        elif mark:
            sign = mark.replace("\n", "\\n").replace("\t", "\\t")
            faults.append(Fault(keys["separator"], problem, f'Are its names separated by "{sign}"?{other}'))
        else:
            contents = f'contains "{within}"' if within else f'is a part of "{shorter}"'
            hint = near or f"It {contents}: correct it if it means that."
            faults.append(Fault(keys["classes"], problem, hint + other))
    if nothing:
        problem = f'column "{name}" holds {column.describe_cell_part_lines(nothing, 10)}, which names no finding.'
        remedy = "Correct the table: write what was found, or leave the cell blank where nobody looked."
        if rules.keys:
            remedy += f" If it says that there is no finding, list it in {rules.keys['no_finding']}; that nobody could "
            remedy += f"assess the image, in {rules.keys['not_assessed']}; if it is a class, in {keys['classes']}."
        faults.append(Fault(keys["classes"], problem, remedy))
    if unlike and not (all_others and len(faults) < _MAX_FAULTS):
        verb = "which is no class" if len(unlike) == 1 else "which are no classes"
        problem = f'column "{name}" holds {column.describe_cell_part_lines(unlike, 10)}, {verb}.'
        remedy = "Correct the table."
        if rules.keys:
            remedy = f"Correct the table, or list in {rules.keys['others']} what is a finding but no class "
            remedy += f'("*" for all), in {rules.keys["no_finding"]} what says that there is no finding, and in '
            remedy += f"{rules.keys['not_assessed']} what says that nobody could assess the image."
        faults.append(Fault(keys["classes"], problem, remedy))
    return faults


def parse_split_column(column: CsvColumn, name: str, where: str) -> StringArray:
    """Parse a column with "train", "val" or "validation", and "test"; return the part of each row, ``(n,)``.

    Args:
        name: The name of the column, for the error message.
        where: The configuration key that the fault names.

    Raises:
        BadInput: With all other values in the column.
    """
    names = [cell.casefold() for cell in column.cells]
    if foreign := [place for place, part in enumerate(names) if part not in PART_WORDS]:
        expected = 'expected "train", "val" or "validation", and "test"'
        problem = f'column "{name}" holds {column.describe_cell_lines(foreign)}; {expected}.'
        raise BadInput([Fault(where, problem)])
    return np.array([PART_WORDS[part] for part in names], dtype="<U10")[column.places]


def count_uncertain_blank_cells(
    path: Path, names: Collection[str], words: LabelWords = NO_LABEL_WORDS, largest_mb: int = DEFAULT_LARGEST_MB
) -> dict[str, tuple[int, int]]:
    """Count the cells with -1 and the blank cells of each label column.

    Args:
        names: The label columns; columns that the table lacks are left out.
        words: The user's words for labels.

    Returns:
        Name of a column -> the number of cells with -1, and the number of blank cells.

    Raises:
        BadInput: If the table cannot be read.
    """
    columns = read_csv_table(path, "data.labels", largest_mb)
    totals = {}
    for name in names:
        if name in columns:
            column = columns.get_column(name)
            meanings = np.array([interpret_label_cell(cell, words) or "" for cell in column.cells])[column.places]
            totals[name] = int((meanings == "uncertain").sum()), int((meanings == "blank").sum())
    return totals
