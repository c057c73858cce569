"""The steps of ``flwr-sim init``: show the table, name the rules, ask what is open, write the experiment."""

import contextlib
import shutil
import sys
from functools import partial
from pathlib import Path

from rich.console import Console

from polyclinic.common.errors import BadInput
from polyclinic.studies.init.experiment import check_and_write_experiment, describe_next_command
from polyclinic.studies.init.public import PublicDataset, recognise_public_dataset, write_public_experiment
from polyclinic.studies.init.questions import (
    ColumnHints,
    ask_questions,
    format_command,
    is_dialogue_possible,
    refuse_open_questions,
    wrap_line,
)
from polyclinic.studies.init.table import TableExamination, complete_dataset, examine_label_table


def write_experiment_for_table(table: Path, out: Path, hints: ColumnHints, console: Console) -> None:
    """Show a table and the rules by which it is read, ask the open questions, and write the experiment.

    Raises:
        BadInput: If a question is open and nobody can be asked, or a run would refuse the data.
    """

    def show(line: str) -> None:
        # A command stays on one line, so that it can be pasted.
        for shown in [line] if "flwr-sim " in line else wrap_line(line, console.width):
            console.print(shown, markup=False, soft_wrap=True, highlight=False)

    examination = _examine(table, hints)
    for line in examination.describe_rules(console.width):
        show(line)
    tell = partial(console.print, markup=False)
    asked, has_answers = 0, False
    try:
        while examination.questions:
            if not is_dialogue_possible():
                width = shutil.get_terminal_size().columns if sys.stderr is not None and sys.stderr.isatty() else None
                refuse_open_questions(examination.questions, table, out, hints, width)
            read = partial(console.input, "    > ")
            for answered in ask_questions(examination.questions, hints, show, read, first=asked + 1):
                hints, has_answers = answered, True
            asked += len(examination.questions)
            # An answer may open a question: whether the pictures of the column that the user named are all there.
            examination = _examine(table, hints)
        undecided = list[str]()
        if isinstance(examination, PublicDataset):
            lines = write_public_experiment(examination, out, hints, tell)
        else:
            lines, undecided = _write_own_experiment(examination, out, tell)
    except BadInput:
        if has_answers:
            show("The command with your answers so far:")
            show(f"    {format_command(table, out, hints)}")
        raise
    for line in (*lines, *describe_next_command(undecided, out).splitlines()):
        show(line)


def _examine(table: Path, hints: ColumnHints) -> TableExamination | PublicDataset:
    return recognise_public_dataset(table, hints) or examine_label_table(table, hints)


def _write_own_experiment(examination: TableExamination, out: Path, tell: partial[None]) -> tuple[list[str], list[str]]:
    """Write the experiment, and a new table if one is necessary; write neither if the data are refused.

    Returns:
        Lines for the user, and the settings on which the user must decide.
    """
    new_table = out.with_suffix(".csv")
    if new_table.resolve() == examination.table.resolve():
        new_table = out.with_suffix(".pictures.csv")
    was_there = new_table.exists()
    try:
        data = complete_dataset(examination, new_table)
        return check_and_write_experiment(data, out, tell), data.undecided_settings
    except BaseException:
        if not was_there:
            with contextlib.suppress(FileNotFoundError):
                new_table.unlink()
        raise
