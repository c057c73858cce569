"""Ask the user what the rules for tables do not settle: as a short dialogue, or as options to add to the command."""

import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any

from polyclinic.common.errors import BadInput, Fault

LONGEST_LINE, SHORTEST_LINE = 160, 40
PROGRAM = "flwr-sim init"
PLACEHOLDER = "???"
"""Stands in the command to paste for a value that only the user knows; the command refuses it."""
_RANGE = re.compile(r"(\d{1,3})-(\d{1,3})")
_FIELDS = {
    "--image-column": "image",
    "--patient-column": "patient",
    "--source-column": "source",
    "--reader-column": "reader",
    "--findings": "findings",
    "--separator": "separator",
    "--no-finding": "no_finding",
    "--other-finding": "other_findings",
    "--not-assessed": "not_assessed",
    "--present": "present",
    "--absent": "absent",
    "--join-patients": "join_patients",
    "--ignore-missing-files": "ignore_missing",
    "--leave-out-last-line": "leave_out_last",
    "--mask-column": "masks",
    "--mask-class": "mask_classes",
}
"""Option -> attribute of :class:`ColumnHints`, for all options but ``--images``."""


@dataclass(frozen=True)
class ColumnHints:
    """The user's statements about a table; None for what the rules are to settle.

    Attributes:
        images: Folder of the pictures.
        image: Column of the names of pictures.
        patient: Column of patients; empty text if each picture is a patient of its own.
        source: Column of hospitals; empty text if there is none.
        reader: Column of the readers of the pictures.
        findings: The label columns, or the one column of findings.
        separator: Text between the names in the column of findings.
        no_finding: Names in the column of findings that say that nothing was found.
        other_findings: Names in the column of findings that are no class and do not say that nothing was found.
        not_assessed: Names in the column of findings, or words in label columns, whose images have unknown labels.
        present: Words in label columns that count as 1; one empty text if words are names of findings; None for what
            the user is to say.
        absent: Words in label columns that count as 0; the other word of each column where left out.
        join_patients: Whether patients with similar names count as one patient.
        ignore_missing: Whether rows without a picture are left out.
        leave_out_last: Whether the last line is left out, such as one of totals.
        masks: The columns of masks: one of label maps, or one for each class.
        mask_classes: Values of label maps with their classes, such as ``1=Liver``.
    """

    images: Path | None = None
    image: str | None = None
    patient: str | None = None
    source: str | None = None
    reader: str | None = None
    findings: tuple[str, ...] = ()
    separator: str | None = None
    no_finding: tuple[str, ...] = ()
    other_findings: tuple[str, ...] = ()
    not_assessed: tuple[str, ...] = ()
    present: tuple[str, ...] | None = None
    absent: tuple[str, ...] = ()
    join_patients: bool = False
    ignore_missing: bool = False
    leave_out_last: bool = False
    masks: tuple[str, ...] = ()
    mask_classes: tuple[str, ...] = ()

    @property
    def are_words_names(self) -> bool:
        """True if the user says that the words of a column are names of findings."""
        return self.present == ("",)

    @property
    def present_words(self) -> tuple[str, ...]:
        """The words that count as 1; empty if the user names none."""
        return tuple(filter(None, self.present or ()))

    @property
    def absent_words(self) -> tuple[str, ...]:
        """The words that count as 0; empty if the user names none, or says that there is none."""
        return tuple(filter(None, self.absent))


@dataclass(frozen=True)
class Choice:
    """One answer to a question.

    Attributes:
        value: The text behind the option.
        note: Explanation for the user, such as some cells of a column.
        more: Further values of the same answer.
    """

    value: str
    note: str = ""
    more: tuple[str, ...] = ()

    @property
    def values(self) -> tuple[str, ...]:
        """All values of the answer."""
        return (self.value, *self.more)


@dataclass(frozen=True)
class Question:
    """A question about a table that only the user can answer.

    Attributes:
        option: The option of the command that answers it.
        text: The question, one sentence.
        choices: The answers; the user may choose several if ``several`` is True.
        is_yes_or_no: True for an option without a value; there are no choices then.
        default: Number of the choice that is safe to take without a word; None if none is.
        prefix: The beginning of the option's value, if the user types the rest as a text; empty for other questions.
    """

    option: str
    text: str
    choices: tuple[Choice, ...] = ()
    several: bool = False
    is_yes_or_no: bool = False
    default: int | None = None
    prefix: str = ""

    def format_option(self, values: Sequence[str]) -> str:
        """Return the option with these values, quoted for a shell."""
        if self.is_yes_or_no:
            return self.option
        return " ".join(f"{self.option} {quote(value)}" for value in values)

    def format_alternatives(self) -> str:
        """Return all answers as options, each with its note, one a line."""
        if self.is_yes_or_no:
            return f"    {self.option}"
        if self.prefix:
            return f"    {self.format_option([self.prefix + PLACEHOLDER])}"
        options = [self.format_option(choice.values) for choice in self.choices]
        width = min(max(map(len, options), default=0), 44)
        lines = [
            f"    {option.ljust(width)}  {choice.note}".rstrip()
            for option, choice in zip(options, self.choices, strict=True)
        ]
        return "\n".join(lines)


def format_command(table: Path, out: Path, hints: ColumnHints) -> str:
    """Return the command line of ``flwr-sim init`` with these statements, quoted for a shell."""
    words = [*PROGRAM.split(), str(table)]
    if hints.images is not None:
        words += ["--images", str(hints.images)]
    words += ["--out", str(out)]
    for option, field in _FIELDS.items():
        match getattr(hints, field):
            case True:
                words.append(option)
            case str(value):
                words += [option, value]
            case tuple(values):
                for value in values:
                    words += [option, value]
    return " ".join(quote(word) for word in words)


def is_dialogue_possible() -> bool:
    """Return True if a person can read questions and type answers: both standard streams are terminals."""
    return all(stream is not None and not stream.closed and stream.isatty() for stream in (sys.stdin, sys.stdout))


def refuse_open_questions(
    questions: Sequence[Question], table: Path, out: Path, hints: ColumnHints, width: int | None = None
) -> None:
    """Refuse a table about which something is open, with the options for all of it and one command to paste.

    The command answers the questions that have one answer only, and has a placeholder for each other value.

    Args:
        width: Characters of a line of the terminal; None if the messages go to a file.

    Raises:
        BadInput: With one fault a question; none if there are no questions.
    """
    if not questions:
        return
    texts = [_wrap_question(question, width) if width else question.text for question in questions]
    faults = [
        Fault(question.option, f"{text}\n{question.format_alternatives()}")
        for question, text in zip(questions, texts, strict=True)
    ]
    answered = hints
    for question in questions:
        only = question.choices[0].values if len(question.choices) == 1 else (question.prefix + PLACEHOLDER,)
        answered = add_answer(answered, question, only)
    command = format_command(table, out, answered)
    paste = f"The command with these options:\n    {command}"
    if PLACEHOLDER in command:
        several = [question.option for question in questions if question.several and len(question.choices) > 1]
        repeated = f" ({' and '.join(several)} may stand several times)" if several else ""
        paste = f"Replace each {PLACEHOLDER} by an answer from above{repeated}:\n    {command}"
    raise BadInput([*faults[:-1], replace(faults[-1], problem=f"{faults[-1].problem}\n{paste}")])


def _wrap_question(question: Question, width: int) -> str:
    """Return a question's text in lines of at most ``width`` characters. The first line begins with the option."""
    beginning = f"error {question.option}: "
    lines = textwrap.wrap(
        beginning + question.text,
        max(min(width, LONGEST_LINE), SHORTEST_LINE),
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines).removeprefix(beginning)


def ask_questions(
    questions: Sequence[Question],
    hints: ColumnHints,
    show: Callable[[str], object],
    read: Callable[[], str],
    *,
    first: int = 1,
) -> Iterator[ColumnHints]:
    """Ask each question at the terminal, and yield the statements after each answer.

    So no answer is lost if the input ends at a later question.

    Args:
        show: Prints a line.
        read: Reads a line that the user types.
        first: Number of the first question.

    Raises:
        BadInput: If the input ends, or the user says no to a question on which the command depends.
    """
    for number, question in enumerate(questions, start=first):
        if question.option == "--absent" and hints.are_words_names:
            continue
        if question.option == "--absent":
            choices = tuple(choice for choice in question.choices if choice.value not in hints.present_words)
            question = replace(question, choices=choices)
        show("")
        show(f"Question {number} of {first + len(questions) - 1}. {question.text}")
        if question.prefix:
            values = [question.prefix + _read_text(question, show, read)]
        else:
            values = _ask_one(question, show, read)
        hints = add_answer(hints, question, values)
        yield hints


def _ask_one(question: Question, show: Callable[[str], object], read: Callable[[], str]) -> list[str]:
    if question.is_yes_or_no:
        show("    Type yes or no.")
    for place, choice in enumerate(question.choices, start=1):
        shown = ", ".join(choice.values) if choice.more else choice.value or "none"
        show(f"    {place}  {shown}  {choice.note}".rstrip())
    hint = "numbers, with spaces between them" if question.several else "a number"
    if question.choices:
        enter = "" if question.default is None else f"; Enter for {question.default + 1}"
        show(f"    Type {hint}{enter}.")
    while True:
        try:
            line = read().strip()
        except EOFError:
            raise BadInput([Fault(question.option, "The question was not answered.")]) from None
        if question.is_yes_or_no:
            if line.casefold() in ("yes", "y"):
                return []
            if line.casefold() in ("no", "n"):
                raise BadInput([Fault(question.option, "The answer was no; nothing was written.")])
            show("    Type yes or no.")
            continue
        if not line and question.default is not None:
            return list(question.choices[question.default].values)
        named = [choice for choice in question.choices if line and choice.value == line and not choice.more]
        if named:
            return [named[0].value]
        places = _RANGE.sub(_expand_range, line).replace(",", " ").split()
        is_valid = bool(places) and all(
            place.isdecimal() and 1 <= int(place) <= len(question.choices) for place in places
        )
        if is_valid and (question.several or len(places) == 1):
            values = [value for place in places for value in question.choices[int(place) - 1].values]
            return list(dict.fromkeys(values))
        show(f"    That is no answer. Type {hint}, from 1 to {len(question.choices)}.")


def _read_text(question: Question, show: Callable[[str], object], read: Callable[[], str]) -> str:
    """Return a name that the user types."""
    while True:
        show("    Type a name.")
        try:
            text = read().strip()
        except EOFError:
            raise BadInput([Fault(question.option, "The question was not answered.")]) from None
        if text:
            return text


def _expand_range(match: re.Match[str]) -> str:
    """Return the numbers of a range such as 6-8, with spaces between them."""
    low, high = int(match[1]), int(match[2])
    return " ".join(map(str, range(low, high + 1)))


def add_answer(hints: ColumnHints, question: Question, values: Sequence[str]) -> ColumnHints:
    """Return the statements with the answer to a question."""
    if question.option == "--images":
        return replace(hints, images=Path(values[0]))
    answer: Any
    if question.is_yes_or_no:
        answer = True
    elif question.prefix:
        answer = (*getattr(hints, _FIELDS[question.option]), *values)
    elif question.several:
        answer = tuple(values)
    else:
        answer = values[0]
    return replace(hints, **{_FIELDS[question.option]: answer})


def wrap_line(line: str, width: int) -> list[str]:
    """Return a line as lines of at most ``width`` characters, the further ones indented by four more.

    Lines are at most 160 characters, and break between words; a word that is longer is a line of its own.
    """
    indent = line[: len(line) - len(line.lstrip())]
    wrapped = textwrap.wrap(
        line.strip(),
        max(min(width, LONGEST_LINE), SHORTEST_LINE),
        initial_indent=indent,
        subsequent_indent=indent + "    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return wrapped if len(line) > min(width, LONGEST_LINE) else [line]


def cut_to_terminal(line: str, width: int) -> str:
    """Return a line that fits into ``width`` characters."""
    return line if len(line) <= width else f"{line[: width - 1]}…"


def describe_head(rows: Sequence[Sequence[str]], width: int, longest: int = 18) -> list[str]:
    """Return the first rows of a table as aligned lines of at most ``width`` characters.

    Args:
        longest: Letters of a cell that are shown.
    """
    short = [[cut_to_terminal(" ".join(cell.split()), longest) for cell in row] for row in rows]
    count = max(map(len, short), default=0)
    filled = [[*row, *[""] * (count - len(row))] for row in short]
    widths = [max(map(len, column)) for column in zip(*filled, strict=True)]
    lines = [
        "  ".join(cell.ljust(of_column) for cell, of_column in zip(row, widths, strict=True)).rstrip() for row in filled
    ]
    return [cut_to_terminal(f"    {line}", width) for line in lines]


def make_path_for_command(folder: Path) -> str:
    """Return a folder as the user may type it: relative to the working folder where it lies below."""
    relative = os.path.relpath(folder)
    return str(folder) if relative.startswith("..") else relative
