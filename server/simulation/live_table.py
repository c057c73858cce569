"""How far a grid of runs is: a table on a terminal, lines in a log, objects for a program."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from common.system.formatting import counted, duration, shortened
from common.system.terminal import PlainConsole, ProgressForm, json_teller, progress_form, teller
from server.simulation.progress import AtWork, Pace, PaceRow, rows

EVERY_S = 30.0
"""Between two lines, or objects, on where the runs are that are at work."""
MOST_NAMED = 6


class UnseenGrid:
    """Shows nothing, and knows how far the grid is."""

    def __init__(self, pace: Pace, jobs: int, at_work: Callable[[], list[AtWork]]) -> None:
        self.pace, self.jobs, self.at_work = pace, jobs, at_work
        self._told = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Say nothing of the end."""

    def started(self, run: str, label: str, rounds: int) -> None:
        """Say that a run begins."""

    def update(self) -> None:
        """Show where the runs are, if it is time; called often."""

    def ended(self, run: str, label: str, failure: str, seconds: float) -> None:
        """Say that a run has ended."""

    @property
    def done(self) -> int:
        return sum(self.pace.done.values())

    @property
    def total(self) -> int:
        return sum(self.pace.totals.values())

    def left(self) -> float | None:
        """Seconds until all is done, as far as this is known."""
        return self.pace.left(self.at_work(), self.jobs)

    def in_all(self) -> str:
        """How many runs are done, and the time left."""
        left = self.left()
        rest = "" if left is None or self.done == self.total else f", about {duration(left)} left"
        return f"{self.done} of {self.total} runs{rest}"

    def is_due(self) -> bool:
        """Whether :data:`EVERY_S` have passed since it was last due."""
        now = time.monotonic()
        if now - self._told < EVERY_S:
            return False
        self._told = now
        return True


class LiveTable(UnseenGrid):
    """What is left in all, and a line an experiment."""

    def __init__(self, console: Console, pace: Pace, jobs: int, at_work: Callable[[], list[AtWork]]) -> None:
        super().__init__(pace, jobs, at_work)
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()

    def update(self) -> None:
        table = progress_table(rows(self.pace, self.at_work()))
        self._live.update(Group(Text(self.in_all()), table), refresh=True)  # of a long table the end is cut

    def ended(self, run: str, label: str, failure: str, seconds: float) -> None:
        line = f"{_end(run, failure, seconds)}, {self.in_all()}"
        self._console.print(line, soft_wrap=True, highlight=False, markup=False)


class GridLines(UnseenGrid):
    """A line where a run begins or ends, and now and then one on those at work: for logs.

    Args:
        tell: Prints one line.
    """

    def __init__(self, tell: Callable[[str], None], pace: Pace, jobs: int, at_work: Callable[[], list[AtWork]]) -> None:
        super().__init__(pace, jobs, at_work)
        self._tell = tell

    def __enter__(self) -> Self:
        if self.done < self.total:
            self._tell(f"{counted(self.total - self.done, 'run')} to do, {self.jobs} at a time")
        return self

    def started(self, run: str, label: str, rounds: int) -> None:
        self._tell(f"began  {run}, {counted(rounds, 'round')}")

    def update(self) -> None:
        if self.is_due():
            where = [f"{run.name} round {run.rounds_done} of {run.rounds}" for run in self.at_work()]
            self._tell(f"at work: {shortened(where, MOST_NAMED)}; {self.in_all()}")

    def ended(self, run: str, label: str, failure: str, seconds: float) -> None:
        self._tell(f"{_end(run, failure, seconds)}, {self.in_all()}")


class GridObjects(UnseenGrid):
    """An object an event: for programs. docs/simulation.md says what the fields are.

    Args:
        tell: Writes one object.
    """

    def __init__(
        self,
        tell: Callable[[Mapping[str, Any]], None],
        pace: Pace,
        jobs: int,
        at_work: Callable[[], list[AtWork]],
    ) -> None:
        super().__init__(pace, jobs, at_work)
        self._tell = tell

    def __enter__(self) -> Self:
        self._tell({"event": "runs", **self._in_all(), "at_a_time": self.jobs})
        return self

    def started(self, run: str, label: str, rounds: int) -> None:
        self._tell({"event": "run_began", "run": run, "experiment": label, "rounds": rounds})

    def update(self) -> None:
        if self.is_due():
            where = [
                {"run": run.name, "round": run.rounds_done, "rounds": run.rounds, "seconds": round(run.seconds, 1)}
                for run in self.at_work()
            ]
            self._tell({"event": "at_work", "at_work": where, **self._in_all()})

    def ended(self, run: str, label: str, failure: str, seconds: float) -> None:
        how = {"ok": not failure, "reason": failure, "seconds": round(seconds, 1)}
        self._tell({"event": "run_ended", "run": run, "experiment": label, **how, **self._in_all()})

    def _in_all(self) -> dict[str, Any]:
        left = self.left()
        return {"done": self.done, "runs": self.total, "seconds_left": None if left is None else round(left, 1)}


def progress_of_grid(
    asked: ProgressForm, console: Console, pace: Pace, jobs: int, at_work: Callable[[], list[AtWork]]
) -> UnseenGrid:
    """Return what shows a grid of runs: the table on the console, lines and objects on standard error.

    Raises:
        BadInput: If a bar is asked for where there is no terminal.
    """
    form = progress_form(asked, console)
    if form is ProgressForm.bar:
        return LiveTable(console, pace, jobs, at_work)
    if form is ProgressForm.lines:
        return GridLines(teller(PlainConsole(stderr=True)), pace, jobs, at_work)
    if form is ProgressForm.json:
        return GridObjects(json_teller(sys.stderr), pace, jobs, at_work)
    return UnseenGrid(pace, jobs, at_work)


def _end(run: str, failure: str, seconds: float) -> str:
    return f"{'failed' if failure else 'done'}  {run}  {duration(seconds)}"


def progress_table(experiments: Sequence[PaceRow]) -> Table:
    """Experiments that are at work or wait; those that are finished are only counted."""
    table = Table("experiment", "runs", "at work", "a run takes")
    for row in experiments:
        if row.done < row.total:
            at_work = ", ".join(f"round {done} of {of}" for done, of in row.rounds)
            took = "" if row.seconds is None else duration(row.seconds)
            table.add_row(Text(row.label), f"{row.done} of {row.total}", at_work, took)
    return table
