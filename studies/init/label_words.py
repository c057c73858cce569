"""For ``flwr-sim init``: words such as ja and nein in label columns, whose meaning only the user can say."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from polyclinic.common.errors import Fault, quote_names, raise_faults
from polyclinic.common.system.plain_text import list_first_and_count_rest
from polyclinic.data.base.spec import make_label_words
from polyclinic.data.tables.cells import LabelWords, interpret_label_cell
from polyclinic.data.tables.columns import list_few_words, list_filled_cells, list_two_words, map_folded_cells
from polyclinic.data.tables.csv import CsvTable
from polyclinic.studies.init.questions import Choice, ColumnHints, Question

_MAX_LISTED = 5
MOST_WORDS_WITHOUT_QUESTION = 2
"""Words of a column up to which the one that does not mean present means absent."""
_MOST_FURTHER_WORDS = 5
"""Number of words beside those for present and absent up to which a column may be one of labels."""
_NAME_WORDS = "If the columns name findings, write all of a picture into one column, with | between them."


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
    """Return the meaning of each word in the label columns in which the user named a word for present.

    Where the user names no word for absent, it is the other word of such a column; where he names one, or says that no
    word means absent, further words are unknown labels.

    Raises:
        BadInput: If no column holds a word that the user named, or all words of a column are to mean present.
    """
    _refuse_strange_words(columns, names, hints)
    present = frozenset(map(str.casefold, hints.present_words))
    absent = {word.casefold(): word for word in hints.absent_words}
    not_assessed = {word.casefold(): word for word in hints.not_assessed}
    for name in names:
        words = map_folded_cells(columns.get_column(name))
        if present.isdisjoint(words):
            continue
        others = {key: word for key, word in words.items() if key not in present and not interpret_label_cell(word)}
        others = {key: word for key, word in others.items() if key not in not_assessed}
        if not hints.absent:
            absent |= others if len(others) == 1 else {}
        elif not absent or not absent.keys().isdisjoint(words):
            further = {key: word for key, word in others.items() if key not in absent}
            not_assessed |= further if len(further) <= _MOST_FURTHER_WORDS else {}
    return LabelWordLists(hints.present_words, tuple(absent.values()), tuple(not_assessed.values()))


def _refuse_strange_words(columns: CsvTable, names: Sequence[str], hints: ColumnHints) -> None:
    """Refuse words that no column holds, and all words of a column as words for present."""
    lists = {"--present": hints.present_words, "--absent": hints.absent_words}
    if hints.present is not None:  # else names of findings may be unassessed, too
        lists["--not-assessed"] = hints.not_assessed
    faults = list[Fault]()
    for option, words in _find_missing_words(columns, names, lists).items():
        problem = f"no column holds {quote_names(words)}."
        faults.append(Fault(option, problem, "Write the word as the column has it."))
    present = frozenset(map(str.casefold, hints.present_words))
    for name in names:
        filled = set(map(str.casefold, list_filled_cells(columns.get_column(name))))
        if len(filled) > 1 and filled <= present:
            problem = f'all words of column "{name}" would say that the finding is present.'
            faults.append(Fault("--present", problem, "Name the one word that means present."))
    raise_faults(faults)


def _find_missing_words(
    columns: CsvTable, names: Sequence[str], lists: Mapping[str, Sequence[str]]
) -> dict[str, list[str]]:
    """Return option -> its words that none of the named columns holds, for the options that have such words."""
    cells = {cell.casefold() for name in names for cell in columns.get_column(name).cells}
    missing = {option: [word for word in words if word.casefold() not in cells] for option, words in lists.items()}
    return {option: words for option, words in missing.items() if words}


def refuse_useless_words(
    columns: CsvTable, label_columns: Sequence[str], hints: ColumnHints, questions: Sequence[Question]
) -> None:
    """Refuse words for present and absent that no label column holds.

    Nothing is refused while the columns are a question.
    """
    if any(question.option in ("--findings", "--present", "--absent") for question in questions):
        return
    reason = "and the findings are names"
    if label_columns:
        reason = f"which are {quote_names(label_columns, _MAX_LISTED)}"
    faults = list[Fault]()
    lists = {"--present": hints.present_words, "--absent": hints.absent_words}
    for option, words in _find_missing_words(columns, label_columns, lists).items():
        problem = f"{quote_names(words)} is no word of the label columns, {reason}."
        faults.append(Fault(option, problem, "Write a word as the column has it, or name the column: --findings."))
    raise_faults(faults)


def list_columns_of_two_words(columns: CsvTable, names: Sequence[str]) -> dict[str, list[str]]:
    """Return column -> its two words, or its one word beside blank cells, for the columns that have no others."""
    words = {name: list_two_words(columns.get_column(name)) for name in names}
    return {name: of_column for name, of_column in words.items() if of_column}


def list_columns_of_few_words(columns: CsvTable, names: Sequence[str]) -> dict[str, list[str]]:
    """Return column -> its words, for the columns whose few words may say present, absent and unknown."""
    words = {name: list_few_words(columns.get_column(name)) for name in names}
    words |= list_columns_of_two_words(columns, [name for name in names if not words[name]])
    return {name: of_column for name, of_column in words.items() if of_column}


def ask_for_meaning_of_words(
    words: Mapping[str, Sequence[str]], hints: ColumnHints, *, may_be_names: bool = True
) -> list[Question]:
    """Return the questions which words say that a finding is present, and which that it is absent.

    Where each column has two words at most, the other one says absent, and the second question is left out.

    Args:
        words: Column -> its words; empty if nothing is open.
        may_be_names: Whether the words may be names of findings themselves.
    """
    holders, spellings = dict[str, list[str]](), dict[str, str]()
    for name, of_column in words.items():
        for word in of_column:
            spellings.setdefault(word.casefold(), word)
            holders.setdefault(word.casefold(), []).append(name)
    questions = list[Question]()
    are_several = any(len(of_column) > MOST_WORDS_WITHOUT_QUESTION for of_column in words.values())
    if words and hints.present is None:
        choices = _offer_words(holders, spellings)
        if may_be_names:
            choices.append(Choice("", "none: these words are names of findings, each of which becomes a class"))
        text = "Which word says that a finding is present?"
        if not are_several and all(len(of_column) > 1 for of_column in words.values()):
            text += " The other word of its column then says that it is absent."
        if not may_be_names:
            text += " If the words are names of findings, name their column alone: --findings."
        questions.append(Question("--present", text, tuple(choices), several=True))
    if are_several and not hints.absent:
        present = frozenset(map(str.casefold, hints.present_words))
        choices = _offer_words({key: names for key, names in holders.items() if key not in present}, spellings)
        choices.append(Choice("", "none: only words for present and unknown labels"))
        text = "Which word says that a finding is absent? All others are then unknown labels."
        questions.append(Question("--absent", text, tuple(choices), several=True))
    return questions


def _offer_words(holders: Mapping[str, Sequence[str]], spellings: Mapping[str, str]) -> list[Choice]:
    return [
        Choice(spellings[key], f"in {list_first_and_count_rest(names, _MAX_LISTED)}") for key, names in holders.items()
    ]


def refuse_words_in_label_columns(columns: CsvTable, names: Sequence[str], words: LabelWords) -> None:
    """Refuse several columns of findings of which one holds words that nobody explained."""
    faults = list[Fault]()
    for name in names:
        column = columns.get_column(name)
        wrong = [place for place, cell in enumerate(column.cells) if interpret_label_cell(cell, words) is None]
        if wrong:
            problem = f'column "{name}" holds {column.describe_cell_lines(wrong, 3)}; expected 1, 0, -1 or nothing.'
            faults.append(Fault("--findings", problem, _NAME_WORDS))
    raise_faults(faults)
