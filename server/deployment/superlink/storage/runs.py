"""The runs: which one goes on, and whether the process that leads it still lives."""

import secrets
from collections.abc import Callable

from server.deployment.superlink.storage.database import Database

SILENT_S = 60.0
"""How long a run's process may give no sign of life before its sites drop their work."""
KEPT = 100
"""LedRuns that are remembered, the newest."""


class LedRuns:
    """All runs. Safe to use from several threads.

    Args:
        steady: Seconds; signs of life are not kept beyond a restart, after which every run has its time again.
    """

    def __init__(self, database: Database, steady: Callable[[], float]) -> None:
        self._database, self._steady = database, steady
        rows = database.read("SELECT run, is_over FROM runs ORDER BY rowid")
        self._is_over = {int(run): bool(is_over) for run, is_over in rows}
        self._heard = {run: steady() for run, is_over in self._is_over.items() if not is_over}

    def begin(self) -> int:
        """Begin a run; return its number."""
        run = secrets.randbits(63) | 1
        with self._database.lock:
            oldest = list(self._is_over)[: max(0, len(self._is_over) - KEPT + 1)]
            forget = [("DELETE FROM runs WHERE run = ?", (str(one),)) for one in oldest]
            self._database.write(("INSERT INTO runs VALUES (?, 0)", (str(run),)), *forget)
            for one in oldest:
                del self._is_over[one]
            self._is_over[run], self._heard[run] = False, self._steady()
        return run

    def end(self, run: int) -> None:
        """Note that a run is over."""
        with self._database.lock:
            self._database.write(("UPDATE runs SET is_over = 1 WHERE run = ?", (str(run),)))
            self._heard.pop(run, None)
            if run in self._is_over:
                self._is_over[run] = True

    def heartbeat(self, run: int) -> bool:
        """Note a sign of life of the process that leads; return False where the run is over."""
        with self._database.lock:
            if not self.goes_on(run):
                return False
            self._heard[run] = self._steady()
            return True

    def goes_on(self, run: int) -> bool:
        """Whether somebody leads this run."""
        heard = self._heard.get(run)
        return heard is not None and self._steady() - heard <= SILENT_S

    def open(self) -> list[int]:
        """The runs that have not been ended, also those whose process is silent."""
        return list(self._heard)
