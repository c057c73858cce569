"""Displays of the progress of a run: a bar, text lines, or JSON objects."""

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar as Bar
from rich.table import Table
from rich.text import Text

from polyclinic.common.system.plain_text import format_count_with_noun, format_duration
from polyclinic.common.system.terminal import (
    EscapingConsole,
    ProgressFormat,
    choose_progress_format,
    make_event_printer,
    make_json_printer,
)
from polyclinic.common.wire.versions import StatedRelease
from polyclinic.server.runs.notebook_bar import NotebookBar
from polyclinic.strategies.engine.events import MissingReplyStatus, RollbackEvent, RoundRecord, describe_site_exclusion
from polyclinic.strategies.engine.state import FederationState

REFRESHES_PER_SECOND = 2
BAR_WIDTH = 24


class SilentRunProgress:
    """The base class of the progress displays, which shows nothing. The run's recorder calls its methods.

    Attributes:
        title: Title of the run.
        sites: Number of sites.
        rounds: Number of rounds of the run.
        round: The last completed round.
        figure: Name of the validation metric of a round: AUROC or Dice.
        seconds_left: Estimated remaining time after the last round; None before the first round.
    """

    def __init__(self, title: str = "") -> None:
        self.title = title
        self.sites = 0
        self.rounds = 0
        self.round = 0
        self.figure = "AUROC"
        self.seconds_left: float | None = None
        self._start_time = 0.0
        self._completed_here = 0  # rounds since this process began; a resumed run has more

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Do nothing at the end of the run."""

    def show_waiting_sites(self, waiting: MissingReplyStatus) -> None:
        """Do nothing, because a simulation never waits for sites."""

    def show_enrolled_sites(self, releases: Mapping[str, StatedRelease]) -> None:
        """Do nothing, because all simulated sites have this release."""

    def show_joined_site(self, server_round: int, site: str) -> None:
        """Do nothing, because no site joins a simulation late."""

    def show_left_out_site(self, site: str, reason: str) -> None:
        """Do nothing, because ``events.jsonl`` has the reason."""

    def show_site_awaiting_approval(self, site: str) -> None:
        """Show a site at which a person has to approve the plan first; this class shows nothing."""

    def show_absent_sites(self, sites: Sequence[str]) -> None:
        """Do nothing, because every site of a simulation answers the roll call."""

    def show_rollback(self, rollback: RollbackEvent) -> None:
        """Show that the run has returned to the model of an earlier round."""
        self.show_note(rollback.rollback_sentence)

    def show_excluded_site(self, server_round: int, site: str, reason: str) -> None:
        """Show that a site is excluded for the rest of the run."""
        self.show_note(describe_site_exclusion(server_round, site, reason))

    def show_warm_start(self, sentence: str) -> None:
        """Show a sentence about the parts of the first model that come from a finished run."""
        self.show_note(sentence)

    def show_note(self, sentence: str) -> None:
        """Show a sentence about an event of the run; this class shows nothing."""

    def show_run_start(self, sites: Sequence[str], rounds: int, figure: str = "AUROC") -> None:
        """Show that the rounds begin.

        Args:
            figure: Name of the validation metric of a round: AUROC or Dice.
        """
        self.sites = len(sites)
        self.rounds = rounds
        self.figure = figure
        self._start_time = time.monotonic()

    def show_finished_round(self, record: RoundRecord, state: FederationState) -> None:
        """Show a completed round, and estimate the remaining time."""
        self.round = record.round
        self._completed_here += 1
        seconds_per_round = (time.monotonic() - self._start_time) / self._completed_here
        self.seconds_left = seconds_per_round * (self.rounds - record.round)


class RunProgressBar(SilentRunProgress):
    """Shows a bar, the round and the remaining time on one line of the terminal, and sites and losses below."""

    def __init__(self, console: Console, title: str) -> None:
        super().__init__(title)
        self._facts = "waiting for sites"
        self._display_start = time.monotonic()
        self._round_end = 0.0
        self._live = Live(self, console=console, refresh_per_second=REFRESHES_PER_SECOND, transient=True)

    def __enter__(self) -> Self:
        if self._live.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()

    def show_note(self, sentence: str) -> None:
        self._live.console.print(sentence, markup=False)

    def show_run_start(self, sites: Sequence[str], rounds: int, figure: str = "AUROC") -> None:
        super().show_run_start(sites, rounds, figure)
        self._facts = f"{format_count_with_noun(len(sites), 'site')}, first round"

    def show_finished_round(self, record: RoundRecord, state: FederationState) -> None:
        super().show_finished_round(record, state)
        self._round_end = time.monotonic()
        self._facts = "  ".join(format_round_facts(record, self.figure))

    def __rich__(self) -> Group:
        """Return the present display, which Rich draws several times a second."""
        now = time.monotonic()
        times = format_hours_minutes_seconds(now - self._display_start)
        if self.seconds_left is not None and self.round == self.rounds:
            times += ", testing"
        elif self.seconds_left is not None:
            times += f", {format_hours_minutes_seconds(max(self.seconds_left - (now - self._round_end), 0.0))} left"
        line = Table.grid(padding=(0, 1))
        line.add_column()  # the only column that becomes narrower
        for _ in range(3):
            line.add_column(no_wrap=True)
        line.add_row(
            Text(self.title, style="bold", no_wrap=True, overflow="ellipsis"),
            Bar(total=self.rounds or None, completed=self.round, width=BAR_WIDTH),
            Text(f"round {self.round} of {self.rounds}" if self.rounds else ""),
            Text(times),
        )
        return Group(line, Text(f"  {self._facts}", no_wrap=True, overflow="ellipsis"))


Tell = Callable[[str, Mapping[str, Any]], None]
"""A function that writes an event. Its arguments: a line for people, which may be empty; and fields for programs."""


class RunProgressEvents(SilentRunProgress):
    """Prints the events of a run as text lines or as JSON objects (fields: docs/simulation.md)."""

    def __init__(self, tell: Tell, title: str) -> None:
        super().__init__(title)
        self._tell = tell

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        reason = "" if kind is None else str(error) or kind.__name__
        self._tell("", {"event": "ended", "run": self.title, "ok": kind is None, "reason": reason})

    def show_note(self, sentence: str) -> None:
        self._tell(sentence, {"event": "note", "run": self.title, "text": sentence})

    def show_run_start(self, sites: Sequence[str], rounds: int, figure: str = "AUROC") -> None:
        super().show_run_start(sites, rounds, figure)
        line = f"{self.title}: {format_count_with_noun(len(sites), 'site')}, {format_count_with_noun(rounds, 'round')}"
        self._tell(line, {"event": "began", "run": self.title, "sites": list(sites), "rounds": rounds})

    def show_finished_round(self, record: RoundRecord, state: FederationState) -> None:
        super().show_finished_round(record, state)
        assert self.seconds_left is not None
        left = f"about {format_duration(self.seconds_left)} left" if record.round < self.rounds else "the test is left"
        facts = ", ".join([*format_round_facts(record, self.figure), format_duration(record.seconds), left])
        self._tell(
            f"round {record.round} of {self.rounds}: {facts}",
            {
                "event": "round",
                "run": self.title,
                "round": record.round,
                "rounds": self.rounds,
                "sites": list(record.sites),
                "absent": dict(record.absent),
                "train_loss": _finite_or_none(record.mean_train_loss),
                "validation_loss": _finite_or_none(record.validation.mean_loss),
                "validation_auroc": _finite_or_none(record.validation.mean_auroc),
                "seconds": round(record.seconds, 3),
                "seconds_left": round(self.seconds_left, 1),
            },
        )


class NotebookRunProgress(SilentRunProgress):
    """Shows the rounds of one run in a notebook."""

    def __init__(self, title: str) -> None:
        super().__init__(title)
        self._bar = NotebookBar()
        self._opened = time.monotonic()

    def show_note(self, sentence: str) -> None:
        print(sentence)

    def show_run_start(self, sites: Sequence[str], rounds: int, figure: str = "AUROC") -> None:
        super().show_run_start(sites, rounds, figure)
        self._show([f"{format_count_with_noun(len(sites), 'site')}, first round"])

    def show_finished_round(self, record: RoundRecord, state: FederationState) -> None:
        super().show_finished_round(record, state)
        self._show(["  ".join(format_round_facts(record, self.figure))])

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Show the last state: how long it took, or that it stopped."""
        self._show(["done" if kind is None else "stopped"], ended=True)

    def _show(self, details: Sequence[str], *, ended: bool = False) -> None:
        passed = format_hours_minutes_seconds(time.monotonic() - self._opened)
        remaining = ""
        if not ended and self.seconds_left is not None:
            remaining = (
                ", testing"
                if self.round == self.rounds
                else f", {format_hours_minutes_seconds(self.seconds_left)} left"
            )
        title = f"{self.title}: round {self.round} of {self.rounds}, {passed}{remaining}"
        self._bar.show_bar(self.round, self.rounds, title, details, now=ended or self.round in (0, self.rounds))


def choose_event_printer(progress_format: ProgressFormat) -> Tell | None:
    """Return the function that prints events to standard error in a format; None for formats without events."""
    if progress_format is ProgressFormat.lines:
        print_line = make_event_printer(EscapingConsole(stderr=True))
        return lambda line, event: print_line(line) if line else None
    if progress_format is ProgressFormat.json:
        print_object = make_json_printer(sys.stderr)
        return lambda line, event: print_object(event)
    return None


def make_run_progress(progress_format: ProgressFormat, console: Console, title: str) -> SilentRunProgress:
    """Return the progress display of a run: a bar on the console, or lines or JSON objects on standard error.

    In a notebook, the bar is in the output of the cell.

    Raises:
        BadInput: If a bar is requested without a terminal.
    """
    if console.is_jupyter and not console.quiet:
        return NotebookRunProgress(title)
    progress_format = choose_progress_format(progress_format, console)
    if progress_format is ProgressFormat.bar:
        return RunProgressBar(console, title)
    tell = choose_event_printer(progress_format)
    return RunProgressEvents(tell, title) if tell else SilentRunProgress(title)


def format_round_facts(record: RoundRecord, figure: str = "AUROC") -> list[str]:
    """Return short texts on a round: number of sites, losses, and the validation metric.

    Args:
        figure: Name of the validation metric: AUROC or Dice.
    """
    facts = [f"{len(record.sites)} of {len(record.sites) + len(record.absent)} sites"]
    if (train_loss := record.mean_train_loss) is not None:
        facts.append(f"loss {train_loss:.3f}")
    if (loss := record.validation.mean_loss) is not None:
        facts.append(f"round before: validation {loss:.3f}")
    if (auroc := record.validation.mean_auroc) is not None:
        facts.append(f"{figure} {auroc:.3f}")
    return facts


def format_hours_minutes_seconds(seconds: float) -> str:
    """Format a duration as ``h:mm:ss``."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def _finite_or_none(value: float | None) -> float | None:
    """Return a finite number unchanged, and None for NaN or infinity, which JSON cannot express."""
    return value if value is not None and math.isfinite(value) else None
