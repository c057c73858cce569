"""How far several runs are and how long the rest will take: a table on a terminal, lines in a log, or JSON objects."""

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from common.system.plain_text import counted, duration, shortened
from common.system.terminal import PlainConsole, ProgressForm, event_printer, json_printer, progress_form

EVERY_S = 30.0
"""Seconds between two lines, or objects, on the progress of the runs at work."""
MOST_NAMED = 6


@dataclass(frozen=True)
class ActiveRun:
    """A run at work, for so many seconds and rounds.

    Attributes:
        label: Name of its experiment.
        name: Name of its folder.
    """

    label: str
    seconds: float
    rounds_done: int
    rounds: int
    name: str = ""

    @property
    def whole(self) -> float | None:
        """Estimate the seconds that it will have taken, by its rounds so far."""
        return self.seconds / self.rounds_done * self.rounds if self.rounds_done else None


@dataclass
class Pace:
    """How many runs are done, and how long runs take.

    Attributes:
        totals: Label -> runs.
        done: Label -> finished runs, with those that were there before.
        jobs: Runs at a time.
        active: Returns the runs at work.
        lengths: Label -> seconds of the runs that finished here.
    """

    totals: Mapping[str, int]
    done: dict[str, int]
    jobs: int
    active: Callable[[], list[ActiveRun]]
    lengths: dict[str, list[float]] = field(default_factory=dict)

    def finished(self, label: str, seconds: float) -> None:
        """Note a run that ended well."""
        self.done[label] = self.done.get(label, 0) + 1
        self.lengths.setdefault(label, []).append(seconds)

    def typical(self, label: str) -> float | None:
        """Return the median length of the experiment's runs, else of all runs; None where none has finished."""
        lengths = self.lengths.get(label) or [seconds for each in self.lengths.values() for seconds in each]
        return statistics.median(lengths) if lengths else None

    def left(self) -> float | None:
        """Estimate the seconds until all is done; None before the first run or the first rounds say anything."""
        active = self.active()
        waiting = [label for label, total in self.totals.items() for _ in range(total - self.done.get(label, 0))]
        for run in active:
            waiting.remove(run.label)
        whole = [run.whole for run in active if run.whole is not None]
        guess = statistics.median(whole) if whole else None
        rest = [self.typical(label) or guess for label in waiting]
        for run in active:
            length = run.whole or self.typical(run.label)
            rest.append(None if length is None else max(length - run.seconds, 0.0))
        known = [seconds for seconds in rest if seconds is not None]
        if not rest or not known:
            return None if rest else 0.0
        return statistics.fmean(known) * len(rest) / min(self.jobs, len(rest))

    def counts(self) -> tuple[int, int]:
        """Return the number of finished runs and of all."""
        return sum(self.done.values()), sum(self.totals.values())

    def sentence(self) -> str:
        """Say how many runs are done, and the time left."""
        (done, total), left = self.counts(), self.left()
        return f"{done} of {total} runs" + ("" if left is None or done == total else f", about {duration(left)} left")


class GridProgress:
    """Shows nothing; the other forms of progress derive from it."""

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self._last = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Do nothing at the end."""

    def started(self, run: str, label: str, rounds: int) -> None:
        """Say that a run begins."""

    def update(self) -> None:
        """Show the progress of the runs at work, if it is time; called often."""

    def ended(self, run: str, label: str, failure: str, seconds: float) -> None:
        """Say that a run has ended."""

    def is_due(self) -> bool:
        """Return whether :data:`EVERY_S` have passed since it was last due."""
        now = time.monotonic()
        if now - self._last < EVERY_S:
            return False
        self._last = now
        return True


class GridTable(GridProgress):
    """Shows the time left in all, and a line for each experiment that is at work or waits."""

    def __init__(self, console: Console, pace: Pace) -> None:
        super().__init__(pace)
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()

    def update(self) -> None:
        # Of a long table the end is cut.
        self._live.update(Group(Text(self.pace.sentence()), self.table()), refresh=True)

    def table(self) -> Table:
        """Return a line for each experiment that is not finished."""
        table, active = Table("experiment", "runs", "at work", "a run takes"), self.pace.active()
        for label, total in self.pace.totals.items():
            done = self.pace.done.get(label, 0)
            if done < total:
                rounds = ", ".join(f"round {run.rounds_done} of {run.rounds}" for run in active if run.label == label)
                typical = self.pace.typical(label) if label in self.pace.lengths else None
                table.add_row(Text(label), f"{done} of {total}", rounds, "" if typical is None else duration(typical))
        return table

    def ended(self, run: str, label: str, failure: str, seconds: float) -> None:
        self._console.print(_end(run, failure, seconds, self.pace), soft_wrap=True, highlight=False, markup=False)


class GridLines(GridProgress):
    """Prints a line where a run begins or ends, and now and then one on those at work: for logs.

    Args:
        tell: Prints one line.
    """

    def __init__(self, tell: Callable[[str], None], pace: Pace) -> None:
        super().__init__(pace)
        self._tell = tell

    def __enter__(self) -> Self:
        done, total = self.pace.counts()
        if done < total:
            self._tell(f"{counted(total - done, 'run')} to do, {self.pace.jobs} at a time")
        return self

    def started(self, run: str, label: str, rounds: int) -> None:
        self._tell(f"began  {run}, {counted(rounds, 'round')}")

    def update(self) -> None:
        if self.is_due():
            active = [f"{run.name} round {run.rounds_done} of {run.rounds}" for run in self.pace.active()]
            self._tell(f"at work: {shortened(active, MOST_NAMED)}; {self.pace.sentence()}")

    def ended(self, run: str, label: str, failure: str, seconds: float) -> None:
        self._tell(_end(run, failure, seconds, self.pace))


class GridObjects(GridProgress):
    """Writes an object an event: for programs. docs/simulation.md says what the fields are.

    Args:
        tell: Writes one object.
    """

    def __init__(self, tell: Callable[[Mapping[str, Any]], None], pace: Pace) -> None:
        super().__init__(pace)
        self._tell = tell

    def __enter__(self) -> Self:
        self._tell({"event": "runs", **self._totals(), "at_a_time": self.pace.jobs})
        return self

    def started(self, run: str, label: str, rounds: int) -> None:
        self._tell({"event": "run_began", "run": run, "experiment": label, "rounds": rounds})

    def update(self) -> None:
        if self.is_due():
            active = [
                {"run": run.name, "round": run.rounds_done, "rounds": run.rounds, "seconds": round(run.seconds, 1)}
                for run in self.pace.active()
            ]
            self._tell({"event": "at_work", "at_work": active, **self._totals()})

    def ended(self, run: str, label: str, failure: str, seconds: float) -> None:
        how = {"ok": not failure, "reason": failure, "seconds": round(seconds, 1)}
        self._tell({"event": "run_ended", "run": run, "experiment": label, **how, **self._totals()})

    def _totals(self) -> dict[str, Any]:
        (done, total), left = self.pace.counts(), self.pace.left()
        return {"done": done, "runs": total, "seconds_left": None if left is None else round(left, 1)}


def progress_of_grid(form: ProgressForm, console: Console, pace: Pace) -> GridProgress:
    """Return what shows the progress: the table on the console, lines and objects on standard error.

    Raises:
        BadInput: If a bar is asked for where there is no terminal.
    """
    form = progress_form(form, console)
    if form is ProgressForm.bar:
        return GridTable(console, pace)
    if form is ProgressForm.lines:
        return GridLines(event_printer(PlainConsole(stderr=True)), pace)
    return GridObjects(json_printer(sys.stderr), pace) if form is ProgressForm.json else GridProgress(pace)


def _end(run: str, failure: str, seconds: float, pace: Pace) -> str:
    return f"{'failed' if failure else 'done'}  {run}  {duration(seconds)}, {pace.sentence()}"
