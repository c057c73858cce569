"""For ``flwr-sim init``: words such as ja and nein in label columns, whose meaning only the user can say."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from polyclinic.common.errors import Fault, quote_names, raise_faults
from polyclinic.common.system.plain_text import list_first_and_count_rest
from polyclinic.data.base.names import is_blank_cell
from polyclinic.data.base.spec import make_label_words
from polyclinic.data.tables.cells import LabelWords, interpret_label_cell
from polyclinic.data.tables.columns import find_wrong_label_cells, list_two_words
from polyclinic.data.tables.csv import CsvTable
from polyclinic.studies.init.questions import Choice, ColumnHints, Question

_LISTED = 5
_MOST_FURTHER_WORDS = 5
"""Number of words beside those for present and absent up to which a column may be one of labels."""
_NAME_WORDS = (
    "Say which words mean present and absent, such as --present ja --absent nein; other words are then unknown labels. "
    "If the columns name findings, write all of a picture into one column, with | between them."
)


@dataclass(frozen=True)
class LabelWordLists:
    """The user's own words in label columns.

    Attributes:
        present: Words that count as 1.
        absent: Words that count as 0.
        not_assessed: Words of an unknown label.
    """

    present: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    not_assessed: tuple[str, ...] = ()

    @property
    def meanings(self) -> LabelWords:
        """The meaning of each word, by the word with case folded."""
        return make_label_words(self.present, self.absent, self.not_assessed)

    def describe(self) -> str:
        """Return what the words mean, such as ``present: ja; absent: nein``."""
        lists = {"present": self.present, "absent": self.absent, "unknown": self.not_assessed}
        return "; ".join(f"{meaning}: {', '.join(words)}" for meaning, words in lists.items() if words)


NO_LABEL_WORDS = LabelWordLists()


def read_label_words(columns: CsvTable, names: Sequence[str], hints: ColumnHints) -> LabelWordLists:
    """Return the meaning of the words in the columns that hold a word for present.

    Where the user names no word for absent, it is the other word of such a column; where he names one, further words
    are unknown labels.

    Raises:
        BadInput: If no column holds a word that the user named, or all words of a column are to mean present.
    """
    _refuse_strange_words(columns, names, hints)
    present = {word.casefold() for word in hints.present or () if word}
    absent = {word.casefold(): word for word in hints.absent}
    not_assessed = dict[str, str]()
    for name in names:
        cells = columns.get_column(name).cells
        filled = {cell.casefold(): cell for cell in reversed(cells) if not is_blank_cell(cell)}
        others = {key: cell for key, cell in filled.items() if key not in present and not interpret_label_cell(cell)}
        if present.isdisjoint(filled):
            continue
        if not hints.absent:
            absent |= others if len(others) == 1 else {}
        elif not absent.keys().isdisjoint(filled):
            further = {key: cell for key, cell in others.items() if key not in absent}
            not_assessed |= further if len(further) <= _MOST_FURTHER_WORDS else {}
    return LabelWordLists(
        tuple(word for word in hints.present or () if word), tuple(absent.values()), tuple(not_assessed.values())
    )


def _refuse_strange_words(columns: CsvTable, names: Sequence[str], hints: ColumnHints) -> None:
    """Refuse words that no column holds, and all words of a column as words for present."""
    faults, present = list[Fault](), {word.casefold() for word in hints.present or () if word}
    every = {cell.casefold() for name in names for cell in columns.get_column(name).cells}
    for option, words in (("--present", hints.present or ()), ("--absent", hints.absent)):
        strange = [word for word in words if word and word.casefold() not in every]
        if strange:
            problem = f"no column holds {quote_names(strange)}."
            faults.append(Fault(option, problem, "Write the word as the column has it."))
    for name in names:
        filled = {cell.casefold() for cell in columns.get_column(name).cells if not is_blank_cell(cell)}
        if len(filled) > 1 and filled <= present:
            problem = f'all words of column "{name}" would say that the finding is present.'
            faults.append(Fault("--present", problem, "Name the one word that means present."))
    raise_faults(faults)


def refuse_useless_words(
    columns: CsvTable, label_columns: Sequence[str], hints: ColumnHints, questions: Sequence[Question]
) -> None:
    """Refuse words for present and absent that no label column holds.

    Nothing is refused while the columns are a question.
    """
    if any(question.option in ("--findings", "--present") for question in questions):
        return
    cells = {cell.casefold() for name in label_columns for cell in columns.get_column(name).cells}
    faults = list[Fault]()
    for option, words in (("--present", hints.present or ()), ("--absent", hints.absent)):
        useless = [word for word in words if word and word.casefold() not in cells]
        if useless:
            of_columns = f"label columns, which are {quote_names(label_columns, _LISTED)}"
            of_columns = of_columns if label_columns else "label columns, and the findings are names"
            problem = f"{quote_names(useless)} is no word of the {of_columns}."
            faults.append(Fault(option, problem, "Write a word as the column has it, or name the column: --findings."))
    raise_faults(faults)


def list_columns_of_two_words(columns: CsvTable, names: Sequence[str]) -> dict[str, list[str]]:
    """Return column -> its two words, or its one word beside blank cells, for the columns that have no others."""
    words = {name: list_two_words(columns.get_column(name)) for name in names}
    return {name: of_column for name, of_column in words.items() if of_column}


def ask_for_present_word(two_words: Mapping[str, Sequence[str]], *, may_be_names: bool = True) -> list[Question]:
    """Return the question which word says that a finding is present; empty without columns of two words.

    Args:
        two_words: Column -> its words.
        may_be_names: Whether the words may be names of findings themselves.
    """
    if not two_words:
        return []
    holders, spellings = dict[str, list[str]](), dict[str, str]()
    for name, words in two_words.items():
        for word in words:
            spellings.setdefault(word.casefold(), word)
            holders.setdefault(word.casefold(), []).append(name)
    choices = [
        Choice(spellings[key], f"in {list_first_and_count_rest(names, _LISTED)}") for key, names in holders.items()
    ]
    if may_be_names:
        choices.append(Choice("", "none: these words are names of findings, each of which becomes a class"))
    text = "Which word says that a finding is present? The other word of its column then says that it is absent."
    return [Question("--present", text, tuple(choices), several=True)]


def refuse_words_in_label_columns(columns: CsvTable, names: Sequence[str], words: LabelWords) -> None:
    """Refuse several columns of findings of which one holds words that nobody explained."""
    faults = list[Fault]()
    for name in names:
        column = columns.get_column(name)
        wrong = [place for place, cell in enumerate(column.cells) if interpret_label_cell(cell, words) is None]
        if wrong and not find_wrong_label_cells(column, words):
            problem = f'column "{name}" holds {column.describe_cell_lines(wrong, 3)}; expected 1, 0, -1 or nothing.'
            faults.append(Fault("--findings", problem, _NAME_WORDS))
    raise_faults(faults)
