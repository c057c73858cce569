"""Judge whether a column of an unknown table holds labels, or words and numbers that were meant as labels.

A column that was meant as labels is either used completely, or reported with the cells that prevent this.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from common.data.base.names import is_blank_cell
from common.data.tables.cells import interpret_label_cell, is_placeholder_text
from common.data.tables.csv import CsvColumn

Kind = Literal["labels", "almost labels", "words", "numbers", "other"]

_YES_AND_NO = frozenset(
    "yes no y n true false t f ja nein j wahr falsch vrai faux oui non vero falso si sí sim não pos neg pos. neg. "  # noqa: SIM905 - words to read
    "positive negative positiv negativ positif négatif present absent vorhanden x xx + ++ ✓ ✔ ✗ ✘".split()
)
_NOT_LOOKED = frozenset("nr nb n.b. ka 8 9 88 99 999 -8 -9 -99 -999".split())  # noqa: SIM905 - words to read
"""Cells that mean "unknown" in label columns: abbreviations, and codes used in questionnaires."""
_NUMBER = re.compile(r"[+\-\u2212]?\d+(?:[.,]\d+)?")
_PART_OF_ONE = re.compile(r"0?[.,]\d+")
_LOOKED_AT = 200
"""Maximum number of distinct cells that are examined in a column."""
_MOSTLY = 0.9
"""Fraction of labels among a column's filled cells above which the other cells are taken for typing errors."""
_NO_FINDINGS = frozenset(
    "age alter âge edad years jahre over über under unter modality modalität laterality side seite left right links "  # noqa: SIM905
    "rechts weight gewicht height year jahr date datum ap pa m f w d u patient is".split()
)
"""Words of which the name of a column without findings consists."""
_NO_FINDING = re.compile(
    r".*(?:sex|gender|geschlecht|male|view)|sex[eo]|sesso|geschl|kön|männlich|weiblich|proje[ck]tion\w*"
    r"|train(?:ing|set)?|test(?:set)?|split|exclu\w*|ausschluss|ausgeschlossen"
)
"""A word, in lower case, about sex, view, split or exclusion: a column named with it is none of findings."""
_WORD = re.compile(r"[A-Z]?[^\W\d_A-Z]+|[A-Z]+(?![^\W\d_A-Z])")
_ABOUT_PERSON = _YES_AND_NO.union("m f w d u male female männlich weiblich divers pa ap ll lat lateral".split())  # noqa: SIM905
_NORMAL = re.compile(
    r"normal(?:e[rsnm]?|befund\w*)?|unauff|unauffällig\w*|unverdächtig\w*|regelrecht\w*|gesund\w*|healthy|negativ[eo]?"
    r"|alters(?:entsprechend|gemäß|gemäss|gerecht)\w*|clear|unremarkable|sano|sain"
)
"""A word, in lower case, that says that nothing was found."""
_NORMAL_IN_SHORT = frozenset(("ob", "io", "nad", "wnl", "ras"))
_NOT = re.compile(r"kein\w*|ohne|no|without|sans|sin|senza|sem")
_ABNORMAL = re.compile(
    r"findings?|abnormal\w*|disease|path\w*|\w*befund\w*|auff\w*|veränderung\w*|krankh\w*|wesent\w*|acute|akut\w*"
    r"|significant|relev\w*|anomal\w*|particularités?|hallazgos?|patológicos?|reperti|achados?"
)
"""Words of which nothing is left when the word before denies them."""
_EXAMINED = re.compile(
    r"study|chest|thorax|cxr|x|ray|xray|radiograph|exam|scan|image|lungs?|lunge|heart|controls?|kontrollen?|findings?"
    r"|befund|within|limits"
)
"""Words beside these, which say what is normal."""
_DOUBTFUL = re.compile(
    r".*\?|\?.*|(?:kein\w*|no|not|ohne|without|sans|neg(?:ative|\.)?|v\.? ?a\.?|verd(?:acht\w*|\.)|suspect\w*|suspicion"
    r"|susp\.?|z\. ?n\.?|zn|zustand nach|st\. ?n\.?|status post|s/p|history of|h/o|possibl[ey]|probabl[ey]|likely"
    r"|fraglich\w*|rule out|r/o|dd)(?![^\W_]).*"
)
"""Names, in lower case, that deny a finding, doubt it, or place it in the past."""


@dataclass(frozen=True)
class ColumnJudgement:
    """What the cells of a column seem to be: labels, values that were meant as labels, or something else.

    Attributes:
        kind: ``"labels"``: each cell is 1, 0, -1 or blank, and some are 1. ``"almost labels"``: labels and some other
            cells. ``"words"``: words or signs for yes and no, without labels. ``"numbers"``: numbers such as grades,
            some of which look like labels, or numbers between 0 and 1. ``"other"``: anything else, also a column
            without any 1.
        foreign: Indices of the distinct cells that are no label.
        positive: ``(rows,)``, True where the cell is 1.
    """

    kind: Kind
    foreign: Sequence[int]
    positive: NDArray[np.bool_]

    @property
    def may_be_labels(self) -> bool:
        """True if the column cannot be read as labels, but its cells may be meant as such."""
        return self.kind in ("almost labels", "words", "numbers")


def judge_column(column: CsvColumn) -> ColumnJudgement:
    """Judge whether the cells of a column are labels, or are meant as labels."""
    meanings, counts = [interpret_label_cell(cell) for cell in column.cells], column.rows_per_cell()
    foreign = [place for place, meaning in enumerate(meanings) if meaning is None]
    positive = np.array([meaning == "present" for meaning in meanings])[column.places]
    others = int(counts[foreign].sum())
    blank = int(sum(counts[place] for place, meaning in enumerate(meanings) if meaning == "blank"))
    labels = len(column.places) - others - blank
    kind: Kind = "other"
    cells = [column.cells[place].casefold() for place in foreign[:_LOOKED_AT]]
    spoken = [cell in _YES_AND_NO or is_placeholder_text(cell) for cell in cells]
    meant = [
        word or cell in _NOT_LOOKED or bool(_PART_OF_ONE.fullmatch(cell))
        for word, cell in zip(spoken, cells, strict=True)
    ]
    if not foreign:
        kind = "labels" if positive.any() and len(meanings) > 1 else "other"
    elif (labels and all(spoken)) or (labels >= others and all(meant)) or labels >= _MOSTLY * (labels + others):
        kind = "almost labels"
    elif all(meant) and not _YES_AND_NO.isdisjoint(cells):
        kind = "words"
    elif all(_NUMBER.fullmatch(cell) or is_placeholder_text(cell) for cell in cells) and (labels or all(meant)):
        kind = "numbers"
    return ColumnJudgement(kind, foreign, positive)


def split_words(name: str) -> set[str]:
    """Return the words of a column's name in lower case, also those of ``PatientID``, without digits and signs."""
    return {word.casefold() for word in _WORD.findall(name)}


def names_person_or_picture(name: str) -> bool:
    """Return True if a column name is about the person or picture, such as sex, age or view, not about a finding."""
    words = split_words(name)
    return bool(words) and (any(map(_NO_FINDING.fullmatch, words)) or _NO_FINDINGS.issuperset(words))


def is_plausible_finding(column: CsvColumn) -> bool:
    """Return True if the cells may be names of findings, because not all are numbers, yes or no, sexes or views."""
    cells = [cell.casefold() for cell in column.cells if not is_blank_cell(cell)]
    return bool(cells) and not all(cell in _ABOUT_PERSON for cell in cells) and not all(map(_NUMBER.fullmatch, cells))


def means_nothing_found(name: str) -> bool:
    """Return True if a name says that nothing was found: "o.B.", "unauffällig", "no acute findings"."""
    if not re.fullmatch(r"[^\W\d_]+(?:[ ._,-]+[^\W\d_]+)*\.?", name):
        return False
    words = re.findall(r"[^\W\d_]+", name.casefold())
    core = _ABNORMAL if _NOT.fullmatch(words[0]) else _NORMAL
    words = words[core is _ABNORMAL :]
    others = [word for word in words if not core.fullmatch(word)]
    is_core = len(others) < len(words) and all(map(_EXAMINED.fullmatch, others))
    return is_core or "".join(words) in _NORMAL_IN_SHORT


def is_doubtful_finding(name: str) -> bool:
    """Return True if a name denies a finding, doubts it, or places it in the past: "V.a. Mass", "no mass"."""
    return _DOUBTFUL.fullmatch(name.casefold()) is not None and not means_nothing_found(name)
