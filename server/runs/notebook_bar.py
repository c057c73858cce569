"""A progress bar in a notebook: one output of the cell, which is replaced as the work goes on."""

import importlib
import time
from collections.abc import Sequence
from html import escape
from typing import Any

MIN_UPDATE_INTERVAL_S = 0.3
"""Shortest time between two updates of the output."""


class NotebookBar:
    """A bar with text in the output of a notebook's cell.

    It uses the display of IPython, which every kernel has, and no widgets: a saved notebook shows the last state.
    """

    def __init__(self) -> None:
        self._handle: Any = None
        self._last_update = 0.0

    def show_bar(self, done: int, total: int, title: str, details: Sequence[str], *, now: bool = False) -> None:
        """Show how much is done, a title, and lines of details below it.

        Args:
            now: Show it even if the last update was a moment ago.
        """
        if not now and time.monotonic() - self._last_update < MIN_UPDATE_INTERVAL_S:
            return
        self._last_update = time.monotonic()
        bar = f'<progress value="{done}" max="{max(total, 1)}" style="width: 16em"></progress>'
        lines = "".join(f"<br><small>{escape(line)}</small>" for line in details)
        bundle = {"text/html": f"{bar} {escape(title)}{lines}", "text/plain": "\n".join([title, *details])}
        if self._handle is None:
            # Only a kernel has IPython, and only in a kernel is this class used.
            self._handle = importlib.import_module("IPython.display").display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)
