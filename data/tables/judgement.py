"""Judge whether a column of an unknown table holds labels, or words and numbers that were meant as labels.

A column that was meant as labels is either used completely, or reported with the cells that prevent this.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from polyclinic.data.base.names import is_blank_cell
from polyclinic.data.base.vocabulary import (
    ABNORMAL,
    ABOUT_PERSON,
    CERTAINTIES,
    CODE_CERTAINTIES,
    DIAGNOSIS_CODE,
    EXAMINED,
    MISSING_CODES,
    NO_FINDING_HEADING,
    NO_FINDINGS,
    NO_SPLIT_ALONE,
    NORMAL,
    NORMAL_IN_SHORT,
    NOT,
    NOT_LOOKED,
    SPLIT_WORDS,
    YES_AND_NO,
    Certainty,
)
from polyclinic.data.tables.cells import interpret_label_cell, is_placeholder_finding
from polyclinic.data.tables.csv import CsvColumn

Kind = Literal["labels", "almost labels", "words", "numbers", "other"]

_NUMBER = re.compile(r"[+\-\u2212]?\d+(?:[.,]\d+)?")
_PART_OF_ONE = re.compile(r"0?[.,]\d+")
_LOOKED_AT = 200
"""Maximum number of distinct cells that are examined in a column."""
MOST_WORDS = 20
"""Distinct cells up to which a column may hold words of a small vocabulary, such as parts of a split."""
_FEWEST_IDS = 20
"""Numbers that differ in at least so many rows, and in all rows, are ids and no labels."""
_LONG_PIECE, _MANY_TEXTS, _FEW_WORDS = 8, 20, 5
"""Words of a cell between two separators, distinct cells, and words of a cell, from which cells are free text."""
_SENTENCE = re.compile(r"(?:[^\W_]+[^\w.!?:]+){2,}[^\W_]+[.!?](?=\s|$)")
_BETWEEN_NAMES = re.compile(r"[|;,/+&\\\n\t]")
_MOSTLY = 0.9
"""Fraction of labels among a column's filled cells above which the other cells are taken for typing errors."""
_WORD = re.compile(r"[A-Z]?[^\W\d_A-Z]+|[A-Z]+(?![^\W\d_A-Z])")


@dataclass(frozen=True)
class ColumnJudgement:
    """What the cells of a column seem to be: labels, values that were meant as labels, or something else.

    Attributes:
        kind: ``"labels"``: each cell is 1, 0, -1 or blank, and some are 1. ``"almost labels"``: labels and some other
            cells. ``"words"``: words or signs for yes and no, without labels. ``"numbers"``: numbers such as grades,
            some of which look like labels, or numbers between 0 and 1. ``"other"``: anything else, also a column
            without any 1.
        foreign: Indices into ``CsvColumn.cells``, the distinct cells, of those that are no label.
        positive: ``(rows,)``, True where the cell is 1.
    """

    kind: Kind
    foreign: Sequence[int]
    positive: NDArray[np.bool_]

    @property
    def may_be_labels(self) -> bool:
        """True if the column cannot be read as labels, but its cells may be meant as such."""
        return self.kind in ("almost labels", "words", "numbers")


def judge_column_content(column: CsvColumn) -> ColumnJudgement:
    """Judge whether the cells of a column are labels, or are meant as labels."""
    meanings, counts = [interpret_label_cell(cell) for cell in column.cells], column.count_rows_per_cell()
    foreign = [place for place, meaning in enumerate(meanings) if meaning is None]
    positive = np.array([meaning == "present" for meaning in meanings])[column.places]
    others = int(counts[foreign].sum())
    blank = int(sum(counts[place] for place, meaning in enumerate(meanings) if meaning == "blank"))
    labels = len(column.places) - others - blank
    kind: Kind = "other"
    cells = [column.cells[place].casefold() for place in foreign[:_LOOKED_AT]]
    spoken = [cell in YES_AND_NO or is_placeholder_finding(cell) for cell in cells]
    codes = NOT_LOOKED | MISSING_CODES
    meant = [x or cell in codes or bool(_PART_OF_ONE.fullmatch(cell)) for x, cell in zip(spoken, cells, strict=True)]
    if _FEWEST_IDS <= len(column.places) == len(column.cells) and all(map(_NUMBER.fullmatch, column.cells)):
        kind = "other"
    elif not foreign:
        kind = "labels" if positive.any() and len(meanings) > 1 else "other"
    elif (labels and all(spoken)) or (labels >= others and all(meant)) or labels >= _MOSTLY * (labels + others):
        kind = "almost labels"
    elif all(meant) and not YES_AND_NO.isdisjoint(cells):
        kind = "words"
    elif all(_NUMBER.fullmatch(cell) or is_placeholder_finding(cell) for cell in cells) and (labels or all(meant)):
        kind = "numbers"
    return ColumnJudgement(kind, foreign, positive)


def list_column_name_words(name: str) -> list[str]:
    """Return the words of a column's name in lower case, without digits and signs; ``PatientID`` has two words."""
    return [word.casefold() for word in _WORD.findall(name)]


def get_distinct_column_name_words(name: str) -> set[str]:
    """Return the different words of a column's name in lower case."""
    return set(list_column_name_words(name))


def is_metadata_column_name(name: str) -> bool:
    """Return True if a column name is about the person or picture, such as sex, age or view, not about a finding."""
    words = get_distinct_column_name_words(name)
    return bool(words) and (any(map(NO_FINDING_HEADING.fullmatch, words)) or NO_FINDINGS.issuperset(words))


def contains_id_word(name: str) -> bool:
    """Return True if a column name has a word that means an identifier (id, uid, nr, no): "local_id", "Fall-Nr."."""
    return not get_distinct_column_name_words(name).isdisjoint(("id", "uid", "nr", "no"))


def may_contain_finding_names(column: CsvColumn) -> bool:
    """Return True if the cells may name findings.

    They may not if all are blank, all are numbers, or all are words for yes, no, sexes or views.
    """
    cells = [cell.casefold() for cell in column.cells if not is_blank_cell(cell)]
    return bool(cells) and not all(cell in ABOUT_PERSON for cell in cells) and not all(map(_NUMBER.fullmatch, cells))


def is_no_finding_name(name: str) -> bool:
    """Return True if a name says that nothing was found: "o.B.", "unauffällig", "no acute findings"."""
    if not re.fullmatch(r"[^\W\d_]+(?:[ ._,-]+[^\W\d_]+)*\.?", name):
        return False
    words = re.findall(r"[^\W\d_]+", name.casefold())
    core = ABNORMAL if NOT.fullmatch(words[0]) else NORMAL
    words = words[core is ABNORMAL :]
    others = [word for word in words if not core.fullmatch(word)]
    is_core = len(others) < len(words) and all(map(EXAMINED.fullmatch, others))
    return is_core or "".join(words) in NORMAL_IN_SHORT


def split_diagnosis_code(name: str) -> tuple[str, str] | None:
    """Split an ICD-10 code into the code and its letter of certainty, both in lower case.

    Returns:
        ``("j18.9", "a")``, or ``("j18.9", "")`` without a letter; None if the name is no such code.
    """
    match = DIAGNOSIS_CODE.fullmatch(name.casefold())
    return match and (match[1], match[2] or "")


def get_finding_certainty(name: str) -> Certainty | None:
    """Return a finding's certainty, as its name or the letter after its ICD-10-GM code expresses it.

    Returns:
        "denied", as in "no mass" or "J91A"; "doubted", as in "V.a. Mass" ("V.a." is German for suspected) or "J91V";
        "past", as in "J91Z", where Z is the German letter for a condition after the disease. None if the name expresses
        none of these, or means that nothing was found.
    """
    if is_no_finding_name(name):
        return None
    if code := split_diagnosis_code(name):
        return CODE_CERTAINTIES.get(code[1])
    return next((kind for kind, pattern in CERTAINTIES.items() if pattern.fullmatch(name.casefold())), None)


def find_missing_value_codes(names: Collection[str]) -> list[str]:
    """Return those names of grades or findings that are codes for a missing value, such as 9, 99, -1 or "U".

    A number that continues the others, such as 9 after 8, is a grade and no code. Names without a digit, such as U
    beside the grades 0, 1, 2, are codes only if there are at least three grades, and at least twice as many grades as
    such names. If all names would be codes, none is returned.
    """
    values = {
        name: int(float(name.replace(",", ".").replace("\u2212", "-"))) for name in names if _is_whole_number(name)
    }
    codes, grades = list[str](), {value for value in values.values() if str(value) not in MISSING_CODES}
    for name, value in sorted(values.items(), key=lambda item: item[1]):
        if str(value) in MISSING_CODES:
            if value - 1 in grades:
                grades.add(value)
            else:
                codes.append(name)
    words = [name for name in names if not re.search(r"\d", name)]
    codes += words if len(grades) > max(2, 2 * len(words) - 1) else []
    return codes if len(codes) < len(names) else []


def _is_whole_number(name: str) -> bool:
    return re.fullmatch(r"[+\-\u2212]?\d{1,6}(?:[.,]0*)?", name) is not None


def contains_only_one_and_two(column: CsvColumn) -> bool:
    """Return True if all cells are 1, 2 or codes of missing values, and 1 and 2 both occur.

    Some programs write 1 and 2 for yes and no.
    """
    if len(column.cells) > MOST_WORDS:
        return False
    filled = [cell for cell in column.cells if not is_blank_cell(cell) and not is_placeholder_finding(cell)]
    numbers = {re.sub(r"[.,]0*$", "", cell) for cell in filled}
    return all(map(_is_whole_number, filled)) and numbers - MISSING_CODES == {"1", "2"}


def is_free_text_column(column: CsvColumn) -> bool:
    """Return True if most cells are long or have two sentences, or if many different cells have several words each."""
    texts = [cell for cell in column.cells if not is_blank_cell(cell)]
    counts = [[len(re.findall(r"[^\W_]+", part)) for part in _BETWEEN_NAMES.split(text)] for text in texts[:_LOOKED_AT]]
    pairs = zip(texts, counts, strict=False)
    prose = [len(_SENTENCE.findall(text)) > 1 or max(of_parts) >= _LONG_PIECE for text, of_parts in pairs]
    has_many = len(texts) > max(_MANY_TEXTS, len(column.places) / 4)
    wordy = sum(max(of_parts) >= _FEW_WORDS for of_parts in counts)
    return bool(texts) and (2 * sum(prose) > len(prose) or (has_many and 2 * wordy > len(counts)))


def looks_like_split_column(column: CsvColumn) -> bool:
    """Return True if the cells are words for parts of a split: "train" and "hold-out", "intern" and "extern"."""
    if len(column.cells) > MOST_WORDS:
        return False
    cells = [re.findall(r"[^\W\d_]+", cell.casefold()) for cell in column.cells if not is_blank_cell(cell)]
    return (
        len(cells) > 1
        and all(words and SPLIT_WORDS.issuperset(words) for words in cells)
        and any(not NO_SPLIT_ALONE.issuperset(words) for words in cells)
    )
