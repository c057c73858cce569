"""What is refused, counted: one line for each address and reason in a minute, however often it happens."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

_log = logging.getLogger(__name__)

EVERY_S = 60.0
LINES = 20
"""At most, each time; all other addresses and reasons together make one more line."""
KEPT = 1000
"""Pairs of address and reason that are distinguished; addresses can be made up faster than they are reported."""
OTHERS = "other addresses"


@dataclass
class Refusals:
    """Counts since the last report.

    Args:
        clock: Seconds.
    """

    clock: Callable[[], float] = time.monotonic
    _counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    _last: float | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, address: str, reason: str) -> None:
        """Count one more."""
        with self._lock:
            full = len(self._counts) >= KEPT and (address, reason) not in self._counts
            self._counts[(OTHERS, "various reasons") if full else (address, reason)] += 1

    def report(self) -> None:
        """Write what was counted to the log, if the last report is a minute old."""
        with self._lock:
            now = self.clock()
            if not self._counts or (self._last is not None and now - self._last < EVERY_S):
                return
            self._last, counts = now, self._counts
            self._counts = Counter()
        for (address, reason), number in counts.most_common(LINES):
            _log.warning("refused from %s: %s, %d times", address, reason, number)
        if rest := sum(counts.values()) - sum(number for _, number in counts.most_common(LINES)):
            _log.warning("refused from %s: various reasons, %d times", OTHERS, rest)
