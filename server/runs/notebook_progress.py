"""Show progress in a notebook, in one output of the cell that is updated."""

import importlib
import time
from collections.abc import Sequence
from html import escape
from typing import Any

from polyclinic.common.system.plain_text import format_count_with_noun
from polyclinic.server.runs.progress import (
    SilentRunProgress,
    format_hours_minutes_seconds,
    format_round_facts,
)
from polyclinic.strategies.engine.events import RoundRecord
from polyclinic.strategies.engine.state import FederationState

MIN_UPDATE_INTERVAL_S = 0.3
"""Shortest time between two updates of the output."""


class NotebookBar:
    """A progress bar with text in the output of a notebook's cell.

    It uses the display of IPython, which every kernel has, and no widgets. So a saved notebook shows the last state.
    """

    def __init__(self) -> None:
        self._handle: Any = None
        self._last_update = 0.0

    def show_bar(self, done: int, total: int, title: str, details: Sequence[str], *, now: bool = False) -> None:
        """Show a bar, a title, and lines of details below it.

        Args:
            done: Number of completed steps.
            total: Number of all steps.
            now: True to update the output even if the last update was less than :data:`MIN_UPDATE_INTERVAL_S` ago.
        """
        if not now and time.monotonic() - self._last_update < MIN_UPDATE_INTERVAL_S:
            return
        self._last_update = time.monotonic()
        bar = f'<progress value="{done}" max="{max(total, 1)}" style="width: 16em"></progress>'
        lines = "".join(f"<br><small>{escape(line)}</small>" for line in details)
        bundle = {"text/html": f"{bar} {escape(title)}{lines}", "text/plain": "\n".join([title, *details])}
        if self._handle is None:
            # Imported here, because only notebook kernels have IPython.
            self._handle = importlib.import_module("IPython.display").display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)


class NotebookRunProgress(SilentRunProgress):
    """Shows the rounds of one run in a notebook."""

    def __init__(self, title: str) -> None:
        super().__init__(title)
        self._bar = NotebookBar()
        self._start_time = time.monotonic()

    def show_note(self, sentence: str) -> None:
        print(sentence)

    def show_run_start(self, sites: Sequence[str], rounds: int, figure: str = "AUROC") -> None:
        super().show_run_start(sites, rounds, figure)
        self._show([f"{format_count_with_noun(len(sites), 'site')}, first round"])

    def show_finished_round(self, record: RoundRecord, state: FederationState) -> None:
        super().show_finished_round(record, state)
        self._show(["  ".join(format_round_facts(record, self.figure))])

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Show the duration of the run, and that it is done or has stopped."""
        self._show(["done" if kind is None else "stopped"], ended=True)

    def _show(self, details: Sequence[str], *, ended: bool = False) -> None:
        elapsed = format_hours_minutes_seconds(time.monotonic() - self._start_time)
        remaining = ""
        if not ended and self.seconds_left is not None:
            remaining = f", {format_hours_minutes_seconds(self.seconds_left)} left"
            if self.round == self.rounds:
                remaining = ", testing"
        title = f"{self.title}: round {self.round} of {self.rounds}, {elapsed}{remaining}"
        self._bar.show_bar(self.round, self.rounds, title, details, now=ended or self.round in (0, self.rounds))
