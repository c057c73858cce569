"""Sort the columns of 0 and 1 of an unknown table into classes, flags of something else, and those to be asked about.

A column is sorted by its heading, unless the rest of the table contradicts. A heading with a word for the sex, the view
or the part of a split is no finding. It may be one if it is an abbreviation as other headings are (``M`` beside ``DR``
and ``MYA``), if it has other words (``Female Pelvis Mass``), or if only with this column each row has exactly one 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polyclinic.data.base.vocabulary import (
    BESIDE_FLAG,
    BESIDE_SIDE,
    BOTH_SIDES,
    FLAG_WORDS,
    NO_FINDING_HEADING,
    NO_FINDINGS,
    SIDES,
)
from polyclinic.data.tables.judgement import list_column_name_words

_LONGEST_CODE = 5
"""Maximum number of letters of a heading such as ``ARMD``, which is an abbreviation."""
_SHORTEST_SIDE = 4
"""Minimum number of letters of a word for a side that is no abbreviation."""


@dataclass(frozen=True)
class BinaryColumnKinds:
    """Columns of 0 and 1, in the order of the table.

    Attributes:
        classes: Columns that are surely classes.
        doubtful: Columns that may be classes, or say something of the person, the picture or the split.
    """

    classes: tuple[str, ...]
    doubtful: tuple[str, ...]


def classify_binary_columns(positive: Mapping[str, NDArray[np.bool_]]) -> BinaryColumnKinds:
    """Sort columns of 0 and 1 into classes, doubtful columns and others, by their headings and cells.

    The others, such as the sex or the view, are not in the result.

    Args:
        positive: For each column, in the order of the table, ``(rows,)`` True where the cell is 1.
    """
    names, flags, doubtful, sides = list(positive), set[str](), set[str](), set[str]()
    for name in names:
        words = [word for word in list_column_name_words(name) if not BESIDE_FLAG.fullmatch(word)]
        # A flag has a word about person, view or split, and otherwise only words that add nothing. A heading is
        # doubtful if all words may be about the person or picture, or one is about sex, view or split.
        side_words = [word for word in words if any(word in side for side in SIDES)]
        others = [word for word in words if word not in side_words]
        # A short word for a side alone may be the code of a finding, such as RT for a retinal traction.
        is_certain = len(side_words) > 1 or bool(others) or max(map(len, side_words), default=0) >= _SHORTEST_SIDE
        if side_words and is_certain and (BESIDE_SIDE | BOTH_SIDES).issuperset(others):  # "eye left", "od os", "side r"
            sides.add(name)
        if words and all(word in NO_FINDINGS or NO_FINDING_HEADING.fullmatch(word) for word in words):
            flags.add(name)
        elif (words and (FLAG_WORDS | NO_FINDINGS).issuperset(words)) or any(map(NO_FINDING_HEADING.fullmatch, words)):
            doubtful.add(name)
    # A side with a part of the body, and sides of which there are several columns, may be what is to be found.
    doubtful |= sides if len(sides) > 1 else sides - flags
    flags -= doubtful
    classes = [name for name in names if name not in flags | doubtful]
    # A letter in a row of letters of which others are classes is one too, such as D in N, D, G.
    between = {
        name
        for before, name, after in zip(names, names[1:], names[2:], strict=False)
        if name in flags and len(name) == 1 and all(len(side) == 1 and side not in flags for side in (before, after))
    }
    # An abbreviation may be a class if at least half of the classes are abbreviations, or if one of them is a single
    # letter and it is one too.
    codes = [name for name in classes if is_letter_or_abbreviation(name)]
    shortest, are_usual = min(map(len, codes), default=0), bool(codes) and 2 * len(codes) >= len(classes)
    alike = {name for name in flags - between if is_letter_or_abbreviation(name)}
    alike = {name for name in alike if are_usual or shortest == len(name) == 1}
    classes, doubtful, flags = [*classes, *between], doubtful | alike, flags - between - alike
    if classes and _have_one_positive_per_row(positive, (*classes, *doubtful)):
        classes, doubtful = [*classes, *doubtful], set()
    elif classes and _have_one_positive_per_row(positive, names):
        doubtful |= flags
    return BinaryColumnKinds(tuple(n for n in names if n in classes), tuple(n for n in names if n in doubtful))


def is_letter_or_abbreviation(name: str) -> bool:
    """Return True if a heading is a letter, or an abbreviation in capital letters."""
    return len(name) == 1 or (len(name) <= _LONGEST_CODE and name.isupper())


def _have_one_positive_per_row(positive: Mapping[str, NDArray[np.bool_]], names: Sequence[str]) -> bool:
    return len(names) > 1 and bool((np.sum([positive[name] for name in names], axis=0) == 1).all())
