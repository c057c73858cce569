"""Show the progress of several runs and the time left: as a table on a terminal, log lines or JSON objects."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from polyclinic.common.system.plain_text import (
    format_count_with_noun,
    format_duration,
    join_first_and_count,
    list_first_and_count_rest,
)
from polyclinic.common.system.terminal import ProgressFormat, choose_progress_format, fold_long_words
from polyclinic.server.runs.notebook_bar import NotebookBar
from polyclinic.server.runs.progress import Tell, choose_event_printer

EVENT_INTERVAL_S = 30.0
"""Seconds between two log lines (or JSON objects) about the active runs."""
MAX_RUNS_LISTED = 6


@dataclass(frozen=True)
class ActiveRun:
    """An active run.

    Attributes:
        label: Label of its experiment.
        seconds: Duration so far.
        rounds_done: Number of finished rounds.
        rounds: Number of all rounds.
        name: Name of its folder.
    """

    label: str
    seconds: float
    rounds_done: int
    rounds: int
    name: str = ""

    @property
    def estimated_total_s(self) -> float | None:
        """Estimate the duration of the whole run in seconds; None if no round is finished."""
        return self.seconds / self.rounds_done * self.rounds if self.rounds_done else None


@dataclass
class TrialsTimeEstimate:
    """Estimates the remaining time from the durations of finished runs.

    Attributes:
        totals: Label of an experiment -> number of its runs.
        done: Label -> number of finished runs, including those of an earlier command.
        jobs: Number of runs at a time.
        active: Function that returns the active runs.
        lengths: Label -> seconds of each run that this process finished.
    """

    totals: Mapping[str, int]
    done: dict[str, int]
    jobs: int
    active: Callable[[], list[ActiveRun]]
    lengths: dict[str, list[float]] = field(default_factory=dict)

    def record_finished_run(self, label: str, seconds: float) -> None:
        """Count a successful run."""
        self.done[label] = self.done.get(label, 0) + 1
        self.lengths.setdefault(label, []).append(seconds)

    def compute_median_run_s(self, label: str) -> float | None:
        """Return the median duration of the experiment's runs, else of all runs; None if no run is finished."""
        lengths = self.lengths.get(label) or [seconds for each in self.lengths.values() for seconds in each]
        return statistics.median(lengths) if lengths else None

    def estimate_remaining_s(self) -> float | None:
        """Estimate the seconds until all runs are finished; None if no run and no round is finished."""
        active = self.active()
        waiting = [label for label, total in self.totals.items() for _ in range(total - self.done.get(label, 0))]
        for run in active:
            waiting.remove(run.label)
        whole = [run.estimated_total_s for run in active if run.estimated_total_s is not None]
        fallback = statistics.median(whole) if whole else None
        rest = [self.compute_median_run_s(label) or fallback for label in waiting]
        for run in active:
            length = run.estimated_total_s or self.compute_median_run_s(run.label)
            rest.append(None if length is None else max(length - run.seconds, 0.0))
        estimates = [seconds for seconds in rest if seconds is not None]
        if not rest or not estimates:
            return None if rest else 0.0
        return statistics.fmean(estimates) * len(rest) / min(self.jobs, len(rest))

    def count_finished_and_total(self) -> tuple[int, int]:
        """Return two numbers of runs: the finished ones, and all of them."""
        return sum(self.done.values()), sum(self.totals.values())

    def describe_trials_progress(self) -> str:
        """Return the number of finished runs and the time left as text."""
        (done, total), left = self.count_finished_and_total(), self.estimate_remaining_s()
        return f"{done} of {total} runs" + (
            "" if left is None or done == total else f", about {format_duration(left)} left"
        )


class TrialsProgressDisplay:
    """Base class of the progress displays; it shows nothing."""

    def __init__(self, pace: TrialsTimeEstimate) -> None:
        self.pace = pace
        self._last = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Do nothing; subclasses close their output."""

    def show_run_start(self, run: str, label: str, rounds: int) -> None:
        """Show that a run has started."""

    def show_trials_progress(self) -> None:
        """Show the progress of active runs; called often, and subclasses may skip calls."""

    def show_run_end(self, run: str, label: str, failure: str, seconds: float) -> None:
        """Show that a run has ended."""


class TrialsTable(TrialsProgressDisplay):
    """Shows the time left and a table of the unfinished experiments on a terminal."""

    def __init__(self, console: Console, pace: TrialsTimeEstimate) -> None:
        super().__init__(pace)
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()

    def show_trials_progress(self) -> None:
        # The terminal cuts off the end of a long table.
        self._live.update(
            Group(Text(self.pace.describe_trials_progress()), self.make_unfinished_runs_table()), refresh=True
        )

    def make_unfinished_runs_table(self) -> Table:
        """Return a table with a row for each unfinished experiment."""
        table, active = fold_long_words(Table("experiment", "runs", "at work", "a run takes")), self.pace.active()
        for label, total in self.pace.totals.items():
            done = self.pace.done.get(label, 0)
            if done < total:
                rounds = ", ".join(f"round {run.rounds_done} of {run.rounds}" for run in active if run.label == label)
                typical = self.pace.compute_median_run_s(label) if label in self.pace.lengths else None
                table.add_row(
                    Text(label), f"{done} of {total}", rounds, "" if typical is None else format_duration(typical)
                )
        return table

    def show_run_end(self, run: str, label: str, failure: str, seconds: float) -> None:
        self._console.print(
            _format_run_end_line(run, failure, seconds, self.pace), soft_wrap=True, highlight=False, markup=False
        )


class TrialsProgressEvents(TrialsProgressDisplay):
    """Writes an event when a run begins or ends, and one about the active runs every :data:`EVENT_INTERVAL_S` seconds.

    Events are log lines or JSON objects; docs/simulation.md explains the fields of the objects.
    """

    def __init__(self, tell: Tell, pace: TrialsTimeEstimate) -> None:
        super().__init__(pace)
        self._tell = tell

    def __enter__(self) -> Self:
        done, total = self.pace.count_finished_and_total()
        line = (
            f"{format_count_with_noun(total - done, 'run')} to do, {self.pace.jobs} at a time" if done < total else ""
        )
        self._tell(line, {"event": "runs", **self._make_progress_fields(), "at_a_time": self.pace.jobs})
        return self

    def show_run_start(self, run: str, label: str, rounds: int) -> None:
        event = {"event": "run_began", "run": run, "experiment": label, "rounds": rounds}
        self._tell(f"began  {run}, {format_count_with_noun(rounds, 'round')}", event)

    def show_trials_progress(self) -> None:
        if time.monotonic() - self._last < EVENT_INTERVAL_S:
            return
        self._last, active = time.monotonic(), self.pace.active()
        names = join_first_and_count(
            [f"{run.name} round {run.rounds_done} of {run.rounds}" for run in active], MAX_RUNS_LISTED
        )
        at_work = [
            {"run": run.name, "round": run.rounds_done, "rounds": run.rounds, "seconds": round(run.seconds, 1)}
            for run in active
        ]
        event = {"event": "at_work", "at_work": at_work, **self._make_progress_fields()}
        self._tell(f"at work: {names}; {self.pace.describe_trials_progress()}", event)

    def show_run_end(self, run: str, label: str, failure: str, seconds: float) -> None:
        how = {"ok": not failure, "reason": failure, "seconds": round(seconds, 1)}
        event = {"event": "run_ended", "run": run, "experiment": label, **how, **self._make_progress_fields()}
        self._tell(_format_run_end_line(run, failure, seconds, self.pace), event)

    def _make_progress_fields(self) -> dict[str, Any]:
        (done, total), left = self.pace.count_finished_and_total(), self.pace.estimate_remaining_s()
        return {"done": done, "runs": total, "seconds_left": None if left is None else round(left, 1)}


class NotebookTrialsProgress(TrialsProgressDisplay):
    """Shows the number of finished runs, and the rounds of active ones, in a notebook."""

    def __init__(self, pace: TrialsTimeEstimate) -> None:
        super().__init__(pace)
        self._bar = NotebookBar()

    def __exit__(self, *exception: object) -> None:
        """Show the last state."""
        self._show(now=True)

    def show_trials_progress(self) -> None:
        self._show()

    def show_run_start(self, run: str, label: str, rounds: int) -> None:
        self._show()

    def show_run_end(self, run: str, label: str, failure: str, seconds: float) -> None:
        if failure:
            print(f"failed  {run}")
        self._show()

    def _show(self, *, now: bool = False) -> None:
        done, total = self.pace.count_finished_and_total()
        active = [f"{run.name}: round {run.rounds_done} of {run.rounds}" for run in self.pace.active()]
        details = list_first_and_count_rest(active, MAX_RUNS_LISTED)
        self._bar.show_bar(done, total, self.pace.describe_trials_progress(), [details] if active else [], now=now)


def make_trials_progress(form: ProgressFormat, console: Console, pace: TrialsTimeEstimate) -> TrialsProgressDisplay:
    """Return the progress display: a table on the console, or log lines or JSON objects on standard error.

    Raises:
        BadInput: If ``form`` is a bar and there is no terminal.
    """
    if console.is_jupyter and not console.quiet:
        return NotebookTrialsProgress(pace)
    form = choose_progress_format(form, console)
    if form is ProgressFormat.bar:
        return TrialsTable(console, pace)
    return TrialsProgressEvents(tell, pace) if (tell := choose_event_printer(form)) else TrialsProgressDisplay(pace)


def _format_run_end_line(run: str, failure: str, seconds: float, pace: TrialsTimeEstimate) -> str:
    return f"{'failed' if failure else 'done'}  {run}  {format_duration(seconds)}, {pace.describe_trials_progress()}"
