"""Guess which column of a label table names patients, from headings and cells."""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import permutations
from shlex import quote
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from polyclinic.common.errors import BadInput, Fault, quote_names
from polyclinic.data.base.names import is_blank_cell
from polyclinic.data.base.vocabulary import (
    BEFORE_PATIENT,
    BESIDE_PATIENT,
    CASE,
    JOINING,
    NO_ID_WORDS,
    NUMBERED,
    PATIENT,
    PATIENT_IN_TWO_WORDS,
    PATIENT_NUMBER,
    PATIENT_OR_EXAM,
)
from polyclinic.data.tables.csv import CsvColumn, CsvTable
from polyclinic.data.tables.judgement import (
    get_distinct_column_name_words,
    judge_column_content,
    list_column_name_words,
)

_DATE = re.compile(
    r"(?:(?:19|20)\d\d(?:[-./]\d\d?[-./]\d\d?|(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])(?:\d{4}|\d{6})?)"
    r"|\d\d?[-./]\d\d?[-./](?:19|20)?\d\d|\d\d?:\d\d|\d\d?[-. ]+[^\W\d]{3,9}[-. ]+\d{2,4})(?!\d)"
)
"""The beginning of a date or time, in numbers or with the name of the month."""
_ID = re.compile(r"0\d+|(?=[^\W\d])[\w./-]*\d|(?!\d+\.\d+$)\d+[./-][\d./-]*\d")
"""A number that no quantity is: with leading zeros, behind letters, or in parts."""
_MEASURE = re.compile(r"\d+[.,]\d*[1-9]\d*")
_FEWEST_IMAGES, _FEW_IMAGES, _MOST_IMAGES = 1.2, 5, 20
"""Fewest images of a patient on average that make groups, most where names have no digits, and most in a guess."""


def guess_patient_column(columns: CsvTable, others: Collection[str] = (), image: str | None = None) -> str | None:
    """Return the column that surely identifies patients; None if there is none.

    Headings from the surest to the least sure:

    1. A patient identifier and nothing else: ``patient_id``.
    2. A patient identifier within a study, hospital or country: ``study_patient_id``.
    3. A patient without a word for an identifier: ``Patient``.
    4. A patient or an examination: ``eid``.

    The columns with the surest heading are considered; if they have a different value for each image, less sure columns
    that group the images may replace them. Of columns that group the images in the same way (apart from rows with
    a blank cell), the one with the fewest blank cells is returned.

    Args:
        others: Columns that are not considered.
        image: The column that names images; None if each row is an image of its own.

    Raises:
        BadInput: If several columns may identify patients, but group the images differently.
    """
    candidates = _find_patient_columns(columns, (name for name in columns if name not in (image, *others)))
    if not candidates:
        return None
    sizes = {name: compute_mean_images_per_value(columns, name, image) for name in candidates}
    grouped = [name for name in candidates if _FEWEST_IMAGES <= sizes[name] <= _MOST_IMAGES]
    surest = _list_surest_patient_columns(candidates)
    if among := [name for name in surest if name in grouped]:
        surest = among
    elif all(sizes[name] == 1 for name in surest):
        if not grouped:
            surest = [name for name in surest if _rank_patient_heading(name) < 3]
        # A plain number of patients may be right, because numbers of a hospital repeat at the next one.
        elif not _rank_patient_heading(surest[0]) or any(map(is_blank_cell, columns.get_column(grouped[0]).cells)):
            raise BadInput([_make_ambiguous_patient_fault(columns, [*surest, *grouped])])
        else:
            surest = _list_surest_patient_columns(grouped)
    if not surest:
        return None
    blanks = {name: int(columns.get_column(name).find_blank_rows().sum()) for name in surest}
    best = min(surest, key=lambda name: blanks[name])
    first = columns.get_column(best)
    for second in map(columns.get_column, surest):  # one-to-one with the best in the rows where both are filled
        filled = ~first.find_blank_rows() & ~second.find_blank_rows()
        one, other = first.places[filled], second.places[filled]
        if not filled.any() or not count_distinct_pairs(one, other) == len(np.unique(one)) == len(np.unique(other)):
            raise BadInput([_make_ambiguous_patient_fault(columns, surest)])
    return best


def _list_surest_patient_columns(names: Sequence[str]) -> list[str]:
    rank = min(map(_rank_patient_heading, names))
    return [name for name in names if _rank_patient_heading(name) == rank]


def compute_mean_images_per_value(columns: CsvTable, name: str, image: str | None) -> float:
    """Return how many different images a value of column ``name`` has on average; blank cells are left out.

    Args:
        image: The column that names images; None if each row is an image of its own.
    """
    column = columns.get_column(name)
    rows = np.flatnonzero(~column.find_blank_rows())
    images = rows.astype(np.int32) if image is None else columns.get_column(image).places[rows]
    values = column.places[rows]
    return count_distinct_pairs(values, images) / max(len(np.unique(values)), 1)


def _rank_patient_heading(name: str) -> Literal[0, 1, 2, 3]:
    """Return how surely a heading means patients: 0 is surest, and 3 may mean an examination as well."""
    words = " ".join(word for word in list_column_name_words(name) if not JOINING.fullmatch(word))
    if PATIENT_NUMBER.fullmatch(words):
        return 0
    if PATIENT_OR_EXAM.fullmatch(words):
        return 3
    return 1 if _contains_number_word(name) else 2


def _make_ambiguous_patient_fault(columns: CsvTable, names: Sequence[str]) -> Fault:
    """Return a fault for columns that may all name patients, but group the images differently.

    It gives an example: one value of a column, and two values of another column beside it.
    """
    problem = f"columns {quote_names(names)} may each name the patients, and group the images differently"

    def find_contradictions() -> Iterator[str]:
        for name, other in permutations(names, 2):
            one, second, first_row = columns.get_column(name), columns.get_column(other), dict[int, int]()
            for row in np.flatnonzero(~one.find_blank_rows() & ~second.find_blank_rows()).tolist():
                earlier = first_row.setdefault(int(one.places[row]), row)
                if second.places[earlier] != second.places[row]:
                    values = [second.cells[second.places[at]] for at in (earlier, row)]
                    text = f'"{one.cells[one.places[row]]}" of "{name}" is "{values[0]}" of "{other}" in line '
                    yield text + f'{one.lines[earlier]}, and "{values[1]}" in line {one.lines[row]}'

    if example := next(find_contradictions(), ""):
        problem += f": {example}"
    options = " or ".join(f"--patient-column {quote(name)}" for name in names)
    return Fault("--patient-column", f"{problem}.", f"Say which, by adding to the command: {options}")


def count_distinct_pairs(first: NDArray[np.int32], second: NDArray[np.int32]) -> int:
    """Return the number of different pairs of the numbers in two arrays ``(rows,)``."""
    return len(np.unique(first.astype(np.int64) * (int(second.max(initial=0)) + 1) + second))


def list_possible_patient_columns(columns: CsvTable, names: Iterable[str]) -> list[str]:
    """Return the columns that seem to name patients.

    If there are none, return the first column of repeated identifiers, which may be of patients, stays or examinations.
    """
    names = list(names)
    if candidates := _find_patient_columns(columns, names):
        return candidates
    for name in sorted(names, key=lambda name: not contains_patient_word(name)):
        cells, rows = columns.get_column(name).cells, len(columns.lines)
        repeats = len(cells) < rows <= _MOST_IMAGES * len(cells)
        if not repeats or not may_be_identifier_column(columns, name):
            continue
        if CASE.search(name.casefold()) or all(map(_ID.fullmatch, cells)):
            return [name]
    return []


def _find_patient_columns(columns: CsvTable, names: Iterable[str]) -> list[str]:
    """Return those columns whose heading means the patient and nothing else, and whose cells may be identifiers.

    Args:
        names: The columns to consider.
    """
    fitting = list[str]()
    for name in names:
        words = PATIENT_IN_TWO_WORDS.sub("patient ", " ".join(list_column_name_words(name))).split()
        first = next((place for place, word in enumerate(words) if PATIENT.fullmatch(word)), len(words))
        beside = [word for word in words[:first] if not BEFORE_PATIENT.fullmatch(word)] + words[first:]
        is_heading = all(PATIENT.fullmatch(word) or BESIDE_PATIENT.fullmatch(word) for word in beside)
        if name.casefold() not in ("patients", "subjects") and (first == len(words) or not is_heading):
            continue
        column = columns.get_column(name)
        filled = [cell for cell in column.cells if not is_blank_cell(cell)]
        kind = judge_column_content(column).kind
        # Not dates, 0 and 1, yes and no.
        if len(filled) > 1 and kind not in ("labels", "words") and may_be_identifier_column(columns, name):
            has_digits = all(re.search(r"\d", cell) for cell in filled)
            # Under a heading without a number also not measures and few words.
            if _contains_number_word(name) or (
                not any(map(_MEASURE.fullmatch, filled))
                and (has_digits or len(columns.lines) <= _FEW_IMAGES * len(filled))
            ):
                fitting.append(name)
    return fitting


def contains_patient_word(text: str) -> bool:
    """Return True if a word of a heading or name means the patient."""
    return any(map(PATIENT.fullmatch, get_distinct_column_name_words(text)))


def _contains_number_word(name: str) -> bool:
    return any(map(NUMBERED.fullmatch, get_distinct_column_name_words(name)))


def guess_patients_by_filename(names: Sequence[str]) -> tuple[int, str] | None:
    """Find a part of the files' names that may be the patient: a folder, or the beginning of the file's own name.

    Returns:
        The number of patients that this part would give, and one of them; None if no part repeats as patients do.
    """
    paths = [name.split("/") for name in names]
    parts = [[path[-depth] if len(path) >= depth else "" for path in paths] for depth in (2, 3, 4)]
    for pattern in (r"(.*?\d)[ _-]", r"(.*\d)[ _-]"):  # up to the first, or the last, separator behind a digit
        parts.append([match[1] if (match := re.match(pattern, path[-1])) else "" for path in paths])
    groups = list[tuple[bool, int, str]]()
    for of_part in parts:
        count = len(set(of_part))
        repeats = 1 < count < len(names) <= _MOST_IMAGES * count and not all(map(_DATE.match, of_part))
        if repeats and all(re.search(r"\d", part) and len(part) > 2 for part in of_part):
            groups.append((not contains_patient_word(of_part[0]), count, of_part[0]))
    return min(groups)[1:] if groups else None


def may_be_identifier_column(columns: CsvTable, name: str) -> bool:
    """Return False for a column of ages, dates, times or counts, by its name or its cells."""
    # Of "Patientenalter" the word is "alter".
    words = {re.sub(r"^patient(?:en|s)?", "", word) for word in get_distinct_column_name_words(name)}
    return not words & NO_ID_WORDS and not contains_only_dates(columns.get_column(name))


def contains_only_dates(column: CsvColumn) -> bool:
    """Return True if all cells that are not blank begin with a date or time."""
    return all(_DATE.match(cell) for cell in column.cells if not is_blank_cell(cell))
