"""The live table of progress on a terminal; a line a run where nobody looks at one."""

from collections.abc import Callable, Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from server.reporting.wording import duration
from server.simulation.progress import AtWork, Pace, PaceRow, rows


class LiveTable:
    """A line an experiment, and what is left in all."""

    def __init__(self, console: Console, pace: Pace, jobs: int, at_work: Callable[[], list[AtWork]]) -> None:
        self._console, self._pace, self._jobs, self._at_work = console, pace, jobs, at_work
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> "LiveTable":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()

    def update(self) -> None:
        """Draw it anew."""
        if self._console.is_terminal:
            at_work = self._at_work()
            table, left = progress_table(rows(self._pace, at_work)), self._pace.left(at_work, self._jobs)
            self._live.update(Group(table, Text(self._in_all(left))), refresh=True)

    def say(self, what: str, seconds: float) -> None:
        """A run has ended."""
        left = self._pace.left(self._at_work(), self._jobs)
        self._console.print(f"{what}  {duration(seconds)}, {self._in_all(left)}", soft_wrap=True, highlight=False)

    def _in_all(self, left: float | None) -> str:
        done, total = sum(self._pace.done.values()), sum(self._pace.totals.values())
        rest = "" if left is None or done == total else f", about {duration(left)} left"
        return f"{done} of {total} runs{rest}"


def progress_table(experiments: Sequence[PaceRow]) -> Table:
    """Experiments that are at work or wait; those that are finished are only counted."""
    table = Table("experiment", "runs", "at work", "a run takes")
    for row in experiments:
        if row.done < row.total:
            at_work = ", ".join(f"round {done} of {of}" for done, of in row.rounds)
            took = "" if row.seconds is None else duration(row.seconds)
            table.add_row(Text(row.label), f"{row.done} of {row.total}", at_work, took)
    return table
