"""Recognise the columns of an unknown table by simple rules: known headings, cells of 0 and 1, names of pictures.

A heading must be equal to a known heading, except for case, spaces, hyphens and underscores. If these rules do not
decide, the user is asked: see :mod:`polyclinic.studies.init`.
"""

import re
from collections.abc import Collection, Iterable

import numpy as np

from polyclinic.common.errors import BadInput, Fault, quote_names
from polyclinic.common.system.plain_text import list_first_and_count_rest
from polyclinic.data.base.names import is_blank_cell
from polyclinic.data.base.spec import NO_FINDING
from polyclinic.data.images.file_kinds import PICTURE_SUFFIXES, UNSUPPORTED_SUFFIXES
from polyclinic.data.tables.cells import NO_LABEL_WORDS, LabelWords, interpret_label_cell, is_placeholder_finding
from polyclinic.data.tables.csv import CsvColumn, CsvTable


def _split_into_words(text: str) -> frozenset[str]:
    return frozenset(text.split())


PATIENT_HEADINGS = _split_into_words(
    "patient patientid patientnumber patientno patientname subject subjectid participantid mrn pid"
)
HOSPITAL_HEADINGS = _split_into_words(
    "hospital hospitalid hospitalname site siteid sitename center centerid centre centreid institution institutionid "
    "clinic clinicid"
)
SPLIT_HEADINGS = _split_into_words("split subset partition")
FINDING_HEADINGS = _split_into_words(
    "findinglabels findinglabel finding findings label labels diagnosis diagnoses dx disease diseases class classes "
    "classname category pathology"
)
READER_HEADINGS = _split_into_words("radid reader readerid rater raterid annotator annotatorid radiologist")
NO_FINDING_HEADINGS = _split_into_words(
    "sex gender male female view lateral frontal ap pa side laterality split fold train training test val valid "
    "validation nofinding nofindings"
)
"""Headings of columns of 0 and 1 that are not findings: person, view, split, or no finding."""
MIN_LABEL_SHARE = 0.9
"""If at least this fraction of the filled cells of a column are labels, the other cells are typing errors."""
MIN_SENTENCE_WORDS = 8
"""A cell with at least this many words is a sentence of a report."""
NO_FINDING_WORDS = frozenset(map(str.casefold, NO_FINDING))
"""Case-folded words that mean that nothing was found."""
_MAX_COLUMNS_LISTED = 5
_MAX_DISTINCT_FINDINGS = 30
"""A column of findings has at most this many distinct cells."""
_MAX_SHOWN_LETTERS = 20
_MIN_DISTINCT_WORDS = 2
"""A column whose words may mean present, absent and unknown has at least this many distinct cells."""
_MAX_UNKNOWN_WORDS = 5
"""Such a column has at most this many distinct cells without a known meaning."""
_MAX_WORDS_PER_CELL = 2
"""Such a column has at most this many words in a cell."""


def make_heading_key(heading: str) -> str:
    """Return a heading without case, spaces, hyphens and underscores, for comparison."""
    return re.sub(r"[\s_-]+", "", heading).casefold()


def list_columns_by_heading(columns: Iterable[str], headings: Collection[str]) -> list[str]:
    """Return the columns whose whole heading is one of ``headings``."""
    return [name for name in columns if make_heading_key(name) in headings]


def list_filled_cells(column: CsvColumn) -> list[str]:
    """Return the distinct cells that are not blank."""
    return [cell for cell in column.cells if not is_blank_cell(cell)]


def map_folded_cells(column: CsvColumn) -> dict[str, str]:
    """Return case-folded text -> cell, for the distinct cells that are not blank; the first of several spellings."""
    spellings = dict[str, str]()
    for cell in list_filled_cells(column):
        spellings.setdefault(cell.casefold(), cell)
    return spellings


def is_label_column(column: CsvColumn, words: LabelWords = NO_LABEL_WORDS) -> bool:
    """Return True if each cell is 1, 0, -1, blank, or a word with such a meaning, and at least one means 1.

    Args:
        words: The user's words for labels.
    """
    meanings = [interpret_label_cell(cell, words) for cell in column.cells]
    return None not in meanings and "present" in meanings


def find_wrong_label_cells(column: CsvColumn, words: LabelWords = NO_LABEL_WORDS) -> list[int]:
    """Return the indices of the distinct cells that are not labels, if nearly all filled cells are labels; else empty.

    Such a column is meant as a label column. If it were ignored, a class would be lost without notice.

    Args:
        words: The user's words for labels.
    """
    meanings = [interpret_label_cell(cell, words) for cell in column.cells]
    wrong = [index for index, meaning in enumerate(meanings) if meaning is None]
    blank = [index for index, meaning in enumerate(meanings) if meaning == "blank"]
    counts = column.count_rows_per_cell()
    filled_rows = len(column.places) - int(counts[blank].sum())
    label_rows = filled_rows - int(counts[wrong].sum())
    return wrong if wrong and filled_rows and label_rows >= MIN_LABEL_SHARE * filled_rows else []


def list_two_words(column: CsvColumn) -> list[str]:
    """Return the two distinct words of a column, or the only word if other cells are blank; else an empty list.

    Such words may mean that a finding is present and absent, as in ja and nein, or x and blank. The result is also
    empty for columns of labels, of numbers, and of words for no finding.
    """
    spellings = map_folded_cells(column)
    has_blanks = any(map(is_blank_cell, column.cells))
    if len(spellings) not in ((1, 2) if has_blanks else (2,)):
        return []
    if any(len(word.split()) >= MIN_SENTENCE_WORDS or re.search(r"[|;,]", word) for word in spellings):
        return []  # sentences, or several names in a cell
    are_numbers = all(re.fullmatch(r"[-+]?[\d.,]+", word) for word in spellings)
    are_labels = all(interpret_label_cell(word) for word in spellings)
    # A sign such as - may be the other half of +.
    name_nothing = any(
        word in NO_FINDING_WORDS or (any(map(str.isalpha, word)) and is_placeholder_finding(word)) for word in spellings
    )
    return [] if are_numbers or are_labels or name_nothing else list(spellings.values())


def list_few_words(column: CsvColumn) -> list[str]:
    """Return the distinct cells of a column with few short words, if one of them is not a label; else an empty list.

    An example is a column with 1, 0 and n.b. Such words may mean present, absent and unknown.
    """
    spellings = map_folded_cells(column)
    unknown = [word for word in spellings if interpret_label_cell(word) is None]
    is_short = all(len(word.split()) <= _MAX_WORDS_PER_CELL and not re.search(r"[|;,\n\t]", word) for word in spellings)
    are_numbers = any(re.fullmatch(r"[-+]?[\d.,]+", word) for word in unknown)
    if not is_short or are_numbers or NO_FINDING_WORDS.intersection(spellings) or len(spellings) < _MIN_DISTINCT_WORDS:
        return []
    return list(spellings.values()) if 0 < len(unknown) <= _MAX_UNKNOWN_WORDS else []


def holds_labels_and_words(column: CsvColumn) -> bool:
    """Return True if a column contains 1, and a few words that are not labels."""
    return bool(list_few_words(column)) and any(interpret_label_cell(cell) == "present" for cell in column.cells)


def names_findings(column: CsvColumn) -> bool:
    """Return True if the filled cells of a column may be names: some have a letter, and not all are labels."""
    filled = list_filled_cells(column)
    has_letters = any(any(map(str.isalpha, cell)) for cell in filled)
    return has_letters and not all(interpret_label_cell(cell) for cell in filled)


def contains_repeated_words(column: CsvColumn) -> bool:
    """Return True if the cells are words that may be findings.

    There are two cases. Either there are at most 30 distinct cells, each in two rows on average, one of which has three
    letters in a row, and most are not sentences; or the column has only one word and blank cells.
    """
    counts = column.count_rows_per_cell()
    filled = {cell: count for cell, count in zip(column.cells, counts.tolist(), strict=True) if not is_blank_cell(cell)}
    if not any(map(str.isalpha, "".join(filled))):
        return False
    if len(filled) == 1:
        return bool(sum(filled.values()) < len(column.places))
    if 2 * sum(len(cell.split()) >= MIN_SENTENCE_WORDS for cell in filled) > len(filled):
        return False
    is_repeated = len(filled) <= _MAX_DISTINCT_FINDINGS and sum(filled.values()) >= 2 * len(filled)
    return is_repeated and any(re.search(r"[^\W\d_]{3}", cell) for cell in filled)


def contains_picture_endings(column: CsvColumn) -> bool:
    """Return True if most filled cells end with an extension of picture files, such as ``.png``."""
    filled = [cell.lower() for cell in list_filled_cells(column)]
    return 2 * sum(cell.endswith(PICTURE_SUFFIXES + UNSUPPORTED_SUFFIXES) for cell in filled) > len(filled)


def choose_image_column(columns: CsvTable) -> str:
    """Return the only column whose cells end with extensions of picture files.

    Raises:
        BadInput: If there is no such column, or if there are several.
    """
    names = [name for name in columns if contains_picture_endings(columns.get_column(name))]
    if len(names) == 1:
        return names[0]
    problem = (
        f"no column holds names that end in {quote_names(PICTURE_SUFFIXES)}; the columns are {quote_names(columns)}."
    )
    if names:
        problem = f"columns {quote_names(names, _MAX_COLUMNS_LISTED)} name pictures."
    raise BadInput([Fault("--image-column", problem, "Name the column of picture files.")])


def choose_patient_column(columns: CsvTable) -> str | None:
    """Return the column with a known heading for patients; None if there is none.

    Raises:
        BadInput: If several columns have such a heading, and they group the rows differently.
    """
    names = list_columns_by_heading(columns, PATIENT_HEADINGS)
    if len(names) > 1 and not group_rows_alike(columns, names):
        problem = f"columns {quote_names(names, _MAX_COLUMNS_LISTED)} may each name the patients."
        raise BadInput([Fault("--patient-column", problem, "Name one of them.")])
    return names[0] if names else None


def group_rows_alike(columns: CsvTable, names: Iterable[str]) -> bool:
    """Return True if each of these columns divides the rows into the same groups; names of the groups may differ."""
    groups = [columns.get_column(name).places.astype(np.int64) for name in names]
    counts = {len(np.unique(column_groups)) for column_groups in groups}
    combinations = np.unique(np.stack(groups), axis=1).shape[1]
    return counts == {combinations}


def shorten_cell(text: str) -> str:
    """Return the first letters of a cell on one line, so that a report is never shown completely."""
    line = " ".join(text.split())
    return line if len(line) <= _MAX_SHOWN_LETTERS else f"{line[: _MAX_SHOWN_LETTERS - 1]}…"


def describe_some_cells(column: CsvColumn, limit: int = 3) -> str:
    """Return the first distinct cells of a column that are not blank, such as ``p1, p2, p3 and 17 more``."""
    filled = [shorten_cell(cell) for cell in list_filled_cells(column)]
    return list_first_and_count_rest(filled, limit) if filled else "all blank"
