"""Parse the cells of a label table into labels, findings and parts of a split.

A label column holds 1, 0, -1 (uncertain) or nothing. A column of findings holds names with a separator between them.
The cells are already normalised (:mod:`polyclinic.data.base.names`). Cells that cannot be parsed are reported
with their lines.
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

_LABEL = re.compile(r"([+\-\u2212]?)([01])(?:[.,]0*)?")
LabelMeaning = Literal["present", "absent", "uncertain", "blank", "not assessed"]
LabelWords = Mapping[str, LabelMeaning]
"""Word of a user's label columns, case folded -> what the user says that it means."""
_LABEL_WORDS: LabelWords = {"true": "present", "yes": "present", "false": "absent", "no": "absent"}
NO_WORDS: LabelWords = {}
_POLICY = {"unknown": np.nan, "negative": 0.0, "positive": 1.0}
_LIST = re.compile(r"""\[\s*(?:(?:'[^']*'|"[^"]*")[\s,]*)*\]""")
_LIST_ITEM = re.compile(r"""'([^']*)'|"([^"]*)\"""")
OTHER_SEPARATORS = ("|", ";", ",", "/", "+", "&", "\\", "\n", "\t")
"""Signs that are taken for separators if at least one of the parts is a class name."""
_WORDS_AND_SIGNS = (" and ", " und ", " et ", " y ", " e ", " - ", " ", *"-_.:·•~>^=¦、；，｜／∙‧")
"""Words and signs that are taken for separators only if all parts are class names, because names contain them too."""
_WORD = re.compile(r"[^\W_]+")
_JOINED_WORDS = re.compile(
    r"(?<=[^\W\d_])(?=\d)|(?<=\d)(?=[^\W\d_])|(?<=[a-zß-ÿ])(?=[A-ZÀ-Þ])|(?<=[A-Z])(?=[A-Z][a-z])"
)
"""The places between the words and numbers of texts such as ``leftMass12mm``."""
_SHORTEST_PART = 4
"""Minimum length of a class name that is searched for within words; ``ILD`` is no part of ``mild``."""
_MIN_SIMILARITY = 0.85
"""Minimum similarity of two spellings of one word."""
_MOST_FAULTS = 20
WRITE_LABELS = "Write 1 for present and 0 for absent in the table."
"""The remedy for cells of a label column of a public table that are no labels."""
NAME_WORDS = (
    'Name the words in [data], such as present = ["ja"] and absent = ["nein"], or write 1 for present and 0 for absent '
    "in the table. If these are names of findings, write all of a picture into one column, with | between them, and "
    "name it as finding_column."
)
"""The remedy for cells of a label column of a user's own table that are no labels."""


def interpret_label_cell(cell: str, words: LabelWords = NO_WORDS) -> LabelMeaning | None:
    """Return the meaning of a label cell such as ``1``, ``0.0``, ``-1``, ``1,0`` or ``yes``; None if it is no label.

    Args:
        words: The user's own words, which go before all others.
    """
    if (own := words.get(cell.casefold())) is not None:
        return own
    if is_blank_cell(cell):
        return "blank"
    match = _LABEL.fullmatch(cell)
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
        words: The user's own words for labels.
        where: The configuration key that the faults name.
        remedy: What the user can do about cells that are no labels.
    """

    uncertain: LabelPolicy
    blank: LabelPolicy
    where: str
    words: LabelWords = field(default_factory=dict)
    remedy: str = WRITE_LABELS


def parse_label_columns(columns: CsvTable, names: Sequence[str], rules: LabelColumnRules) -> NDArray[np.float32]:
    """Parse label columns into float32 ``(n, classes)``.

    Args:
        columns: The table.
        names: The columns to parse.

    Raises:
        BadInput: With all cells that are no labels and their lines, for each column.
    """
    value_of: dict[LabelMeaning | None, float] = {
        "present": 1.0,
        "absent": 0.0,
        "uncertain": _POLICY[rules.uncertain],
        "blank": _POLICY[rules.blank],
        "not assessed": np.nan,
        None: np.nan,
    }
    matrix = np.empty((len(columns.lines), len(names)), dtype=np.float32)
    faults = []
    for place, name in enumerate(names):
        column = columns.get_column(name)
        meanings = [interpret_label_cell(cell, rules.words) for cell in column.cells]
        if foreign := [number for number, meaning in enumerate(meanings) if meaning is None]:
            problem = f'column "{name}" holds {column.describe_cell_lines(foreign)}; expected 1, 0, -1 or nothing.'
            faults.append(Fault(rules.where, problem, rules.remedy))
        matrix[:, place] = np.array([value_of[meaning] for meaning in meanings], dtype=np.float32)[column.places]
    raise_faults(faults)
    return matrix


@dataclass(frozen=True)
class FindingColumnRules:
    """Rules for parsing a column whose cells name findings.

    Attributes:
        classes: The class names as written in the cells.
        separator: Text between the names in a cell. A cell may also be a Python list, ``['Mass', 'Nodule']``.
        no_finding: Names that say that all classes are absent; they may not stand beside a class.
        not_assessed: Words that say that nobody could assess the image; classes that are not named beside them are
            unknown.
        others: Names of findings that are no class. ``"*"`` allows all names except placeholders and those that
            resemble a class name, contain one, or are a part of one. A class name with less than four letters counts as
            contained only as a whole word.
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

    Empty names are left out. A cell with only empty names, such as ``[]`` or ``|``, is returned whole, because it is
    not blank. Line ends and tabs within a name are kept, unless the separator contains a space.
    """
    if is_blank_cell(cell):
        return []
    cell = " ".join(cell.split()) if " " in separator else cell
    if _LIST.fullmatch(cell):
        parts = [first or second for first, second in _LIST_ITEM.findall(cell)]
    else:
        parts = cell.split(separator)
    return [name for part in parts if (name := part.strip())] or [cell]


def count_rows_by_finding(column: CsvColumn, separator: str) -> dict[str, int]:
    """Return finding -> the number of rows that name it, of a column with cells such as ``"Mass|Nodule"``.

    The most frequent finding comes first. Names that differ in upper and lower case only are one, as the first of them
    writes it; cells and signs that name nothing are left out.
    """
    rows, spellings = Counter[str](), dict[str, str]()
    for cell, count in zip(column.cells, column.count_rows_per_cell().tolist(), strict=True):
        names = {" ".join(part.split()) for part in split_finding_names(cell, separator)}
        for name in names:
            if not is_placeholder_finding(name):
                rows[spellings.setdefault(name.casefold(), name)] += count
    return dict(sorted(rows.items(), key=lambda entry: (-entry[1], entry[0])))


class _ClassNameIndex:
    """Finds names in a list, ignoring case except where two names of the list differ only in case."""

    def __init__(self, names: Sequence[str]) -> None:
        self._places = {name: place for place, name in enumerate(names)}
        folded = Counter(name.casefold() for name in self._places)
        self._folded = {name.casefold(): at for name, at in self._places.items() if folded[name.casefold()] == 1}

    def find_name_index(self, name: str) -> int | None:
        """Return the index of a name in the list; None if it is not in the list."""
        place = self._places.get(name)
        return self._folded.get(name.casefold()) if place is None else place

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
        float32 labels ``(n, classes)``, and the number of rows with each finding that is no class.

    Raises:
        BadInput: With all names that ``rules`` do not list, and all cells that name both a class and "no finding".
    """
    listed = (rules.classes, rules.no_finding, rules.others, rules.not_assessed)
    classes, absent, others, unassessed = map(_ClassNameIndex, listed)
    of_cell = np.zeros((len(column.cells), len(rules.classes)), dtype=np.float32)
    foreign, contradictions = dict[str, set[int]](), list[int]()
    for place, cell in enumerate(column.cells):
        parts = split_finding_names(cell, rules.separator)
        # A name may be a word that is no finding elsewhere, such as "NA".
        if not parts and any(names.contains_name(cell) for names in (classes, absent, others, unassessed)):
            parts = [cell]
        if not parts:
            of_cell[place] = _POLICY[rules.blank]
        denied = not_assessed = False
        for text in parts:
            part = " ".join(text.split())
            if (number := classes.find_name_index(part)) is not None:
                of_cell[place, number] = 1
            elif absent.contains_name(part):
                denied = True
            elif unassessed.contains_name(part):
                not_assessed = True
            else:
                foreign.setdefault(text, set()).add(place)
        if denied and of_cell[place].any():
            contradictions.append(place)
        if not_assessed:
            of_cell[place, of_cell[place] != 1] = np.nan
    unlisted = {text: places for text, places in foreign.items() if not others.contains_name(" ".join(text.split()))}
    faults = _find_unlisted_finding_faults(column, name, rules, unlisted)
    if contradictions:
        problem = f'column "{name}" names a class and says that there is no finding: '
        problem += f"{column.describe_cell_lines(contradictions)}."
        faults.append(Fault(rules.keys.get("column", "data.labels"), problem, "Correct these cells."))
    raise_faults(faults)
    counts, rows = column.count_rows_per_cell(), Counter[str]()
    for text, places in foreign.items():
        rows[" ".join(text.split())] += int(counts[list(places)].sum())
    return of_cell[column.places], rows


def is_placeholder_finding(part: str) -> bool:
    """Return True if a part of a cell names no finding: "-", "?", "[nan]", "#REF!", "unknown", "ungradable"."""
    bare = _strip_brackets_and_quotes(part)
    return is_missing_value(part) or MISSING_LABEL_PATTERN.fullmatch(bare) is not None


def _strip_brackets_and_quotes(part: str) -> str:
    return part.casefold().strip("[](){}'\" .:!")


def guess_class_name_separator(part: str, has: Callable[[str], bool]) -> str | None:
    """Guess the separator in a text that may join several class names; None if there seems to be none.

    A common separator sign is accepted if one part is a class name. A word or sign that may also occur in names, such
    as "and", is accepted only if all parts are.

    Args:
        has: Returns True for a class name.
    """
    for mark in (*OTHER_SEPARATORS, *_WORDS_AND_SIGNS):
        pieces = [" ".join(piece.split()) for piece in split_finding_names(part, mark)]
        enough = any(map(has, pieces)) if mark in OTHER_SEPARATORS else all(map(has, pieces))
        if len(pieces) > 1 and enough:
            return str(mark)
    return None


def _make_class_mention_finder(rules: FindingColumnRules) -> Callable[[str], str | None]:
    """Return a function that finds the longest class name in a text, or else a name of ``rules.no_finding``.

    The function returns None if the text contains neither.
    """

    def split_joined_words(text: str) -> tuple[str, str]:
        return text.casefold(), _JOINED_WORDS.sub(" ", text).casefold()

    patterns = list[tuple[str, re.Pattern[str]]]()
    for name in (*sorted(rules.classes, key=len, reverse=True), *rules.no_finding):
        words = [_WORD.findall(form) or [form] for form in split_joined_words(name)]
        pattern = "|".join(r"[\W_]*".join(map(re.escape, of_form)) for of_form in words)
        if name in rules.no_finding or len("".join(words[0])) < _SHORTEST_PART:
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
        unlisted: For each name that is not listed, the indices of the distinct cells that contain it.
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
        if len(faults) == _MOST_FAULTS or not (near or mark or within or shorter):
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
    if unlike and not (all_others and len(faults) < _MOST_FAULTS):
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
    """Parse a column with "train", "val" or "validation", and "test"; return the name of each row's part, ``(n,)``.

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
    path: Path, names: Collection[str], words: LabelWords = NO_WORDS, largest_mb: int = DEFAULT_LARGEST_MB
) -> dict[str, tuple[int, int]]:
    """Count the cells with -1 and the blank cells of each label column.

    Args:
        names: The label columns; those that the table lacks are left out.
        words: The user's own words for labels.

    Returns:
        By column name, the number of cells with -1 and the number of blank cells.

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
