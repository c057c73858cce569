"""Records of refused calls: the SuperLink writes them, and the process that leads a run reads them.

Refused calls of registered sites are written to ``state/refused-calls.jsonl``; those of unknown callers only to the
log. Repeated refusals are counted, and a full file is replaced, so that no caller can fill the disk.
"""

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from polyclinic.common.system.files import open_own_file

REFUSED_CALLS_FILE = "refused-calls.jsonl"
PAUSE_S = 5.0
"""Pause before the same refusal is written again, with the number of its repetitions."""
FULL_BYTES = 2**20
MOST_KINDS = 1000
"""Different refusals that are distinguished; all others are counted as one."""
REPORT_EVERY_S, REPORT_LINES = 60.0, 20
"""Pause between two reports on strangers, and lines of a report; all other addresses share one more line."""
OTHERS = "other addresses"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RefusedCall:
    """A refused call of a registered site.

    Attributes:
        caller: Registered name of the site whose key signed the call.
        call: Method of Flower's Fleet API.
        reason: Explanation in words.
        other: Registered name of another site that the call was about; empty otherwise.
        run: Flower's number of the run; 0 if the call names none.
    """

    caller: str
    call: str
    reason: str
    other: str = ""
    run: int = 0


class RefusedCallLog:
    """Records refused calls of registered sites in a file. Safe to use from several threads."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self._written: dict[RefusedCall, tuple[float, int]] = {}  # time of the last line, repetitions since
        self._timer: threading.Timer | None = None

    def record_refused_call(self, refused: RefusedCall) -> None:
        """Write a refusal to the file; only count it if the same refusal was written within :data:`PAUSE_S` seconds."""
        with self._lock:
            if refused not in self._written and len(self._written) >= MOST_KINDS:
                refused = RefusedCall(refused.caller, "several", "many different calls were refused")
            when, times = self._written.get(refused, (-PAUSE_S, 0))
            now, times = time.monotonic(), times + 1
            if now - when >= PAUSE_S:
                self._written[refused] = now, 0
                self._write_refused_call(refused, times)
                return
            self._written[refused] = when, times
            if self._timer is None:
                self._timer = threading.Timer(PAUSE_S, self._write_counted_refused_calls)
                self._timer.daemon = True
                self._timer.start()

    def _write_counted_refused_calls(self) -> None:
        """Write the refusals that were only counted so far, with their counts."""
        with self._lock:
            self._timer, now = None, time.monotonic()
            for refused, (_, times) in list(self._written.items()):
                if times:
                    self._written[refused] = now, 0
                    self._write_refused_call(refused, times)

    def _write_refused_call(self, refused: RefusedCall, times: int) -> None:
        about = f" about {refused.other}" if refused.other else ""
        _log.warning("refused %s of %s%s: %s (%d times)", refused.call, refused.caller, about, refused.reason, times)
        line: dict[str, Any] = {"time": time.time(), **vars(refused), "times": times}
        if self._path.exists() and self._path.stat().st_size > FULL_BYTES:
            self._path.replace(self._path.with_suffix(".old.jsonl"))
        with open_own_file(self._path, "a") as file:
            file.write(json.dumps(line) + "\n")


@dataclass
class UnknownCallerCounts:
    """Counts refused calls of unknown callers; once a minute, logs a line for each address and reason."""

    clock: Callable[[], float] = time.monotonic
    _counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    _reported: float = float("-inf")
    _timer: threading.Timer | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count_refused_call(self, peer: str, reason: str) -> None:
        """Count a refused call by address and reason, and log all counts within :data:`REPORT_EVERY_S`.

        Args:
            peer: Address and port in the form of gRPC's ``context.peer()``, e.g. ``ipv6:%5B::1%5D:40000``.
        """
        address = unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]")
        with self._lock:
            is_new = (address, reason) not in self._counts
            full = is_new and len(self._counts) >= MOST_KINDS
            self._counts[(OTHERS, "various reasons") if full else (address, reason)] += 1
            wait_s = self._reported + REPORT_EVERY_S - self.clock()
            if wait_s > 0 and self._timer is None:
                self._timer = threading.Timer(wait_s, self.log_refused_call_counts)
                self._timer.daemon = True
                self._timer.start()
        if wait_s <= 0:
            self.log_refused_call_counts()

    def log_refused_call_counts(self) -> None:
        """Write the counts since the last report to the log."""
        with self._lock:
            self._reported, self._timer = self.clock(), None
            counts, self._counts = self._counts, Counter()
        for (address, reason), number in counts.most_common(REPORT_LINES):
            _log.warning("refused from %s: %s, %d times", address, reason, number)
        if rest := sum(counts.values()) - sum(number for _, number in counts.most_common(REPORT_LINES)):
            _log.warning("refused from %s: various reasons, %d times", OTHERS, rest)
