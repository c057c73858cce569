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
REPEAT_INTERVAL_S = 5.0
"""Seconds until the same refusal is written again, with the number of its repetitions."""
MAX_FILE_BYTES = 2**20
MAX_DISTINCT_REFUSALS = 1000
"""Greatest number of refusals that are counted separately; all others are counted as one."""
REPORT_INTERVAL_S = 60.0
"""Seconds between two reports on calls of unknown callers."""
MAX_REPORT_LINES = 20
"""Greatest number of addresses in a report; all other addresses share one more line."""
OTHER_ADDRESSES = "other addresses"

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
        self._path = path
        self._lock = threading.Lock()
        self._written: dict[RefusedCall, tuple[float, int]] = {}  # time of the last line, and repetitions since then
        self._timer: threading.Timer | None = None

    def record_refused_call(self, refused: RefusedCall) -> None:
        """Write a refusal to the file; only count it if it was written less than :data:`REPEAT_INTERVAL_S` ago."""
        with self._lock:
            if refused not in self._written and len(self._written) >= MAX_DISTINCT_REFUSALS:
                refused = RefusedCall(refused.caller, "several", "many different calls were refused")
            last_written, repetitions = self._written.get(refused, (-REPEAT_INTERVAL_S, 0))
            now = time.monotonic()
            times = repetitions + 1
            if now - last_written >= REPEAT_INTERVAL_S:
                self._written[refused] = now, 0
                self._write_refused_call(refused, times)
                return
            self._written[refused] = last_written, times
            if self._timer is None:
                self._timer = threading.Timer(REPEAT_INTERVAL_S, self._write_counted_refused_calls)
                self._timer.daemon = True
                self._timer.start()

    def _write_counted_refused_calls(self) -> None:
        """Write the refusals that were only counted so far, with their counts."""
        with self._lock:
            self._timer = None
            now = time.monotonic()
            for refused, (_, times) in list(self._written.items()):
                if times:
                    self._written[refused] = now, 0
                    self._write_refused_call(refused, times)

    def _write_refused_call(self, refused: RefusedCall, times: int) -> None:
        subject = f" about {refused.other}" if refused.other else ""
        _log.warning("refused %s of %s%s: %s (%d times)", refused.call, refused.caller, subject, refused.reason, times)
        line: dict[str, Any] = {"time": time.time(), **vars(refused), "times": times}
        if self._path.exists() and self._path.stat().st_size > MAX_FILE_BYTES:
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
        """Count a refused call by address and reason, and log all counts within :data:`REPORT_INTERVAL_S`.

        Args:
            peer: Address and port in the form of gRPC's ``context.peer()``, e.g. ``ipv6:%5B::1%5D:40000``.
        """
        address = unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]")
        with self._lock:
            is_new = (address, reason) not in self._counts
            if is_new and len(self._counts) >= MAX_DISTINCT_REFUSALS:
                self._counts[OTHER_ADDRESSES, "various reasons"] += 1
            else:
                self._counts[address, reason] += 1
            wait_s = self._reported + REPORT_INTERVAL_S - self.clock()
            if wait_s > 0 and self._timer is None:
                self._timer = threading.Timer(wait_s, self.log_refused_call_counts)
                self._timer.daemon = True
                self._timer.start()
        if wait_s <= 0:
            self.log_refused_call_counts()

    def log_refused_call_counts(self) -> None:
        """Write the counts since the last report to the log, and set them to zero."""
        with self._lock:
            self._reported = self.clock()
            self._timer = None
            counts = self._counts
            self._counts = Counter()
        most_common = counts.most_common(MAX_REPORT_LINES)
        for (address, reason), number in most_common:
            _log.warning("refused from %s: %s, %d times", address, reason, number)
        rest = sum(counts.values()) - sum(number for _, number in most_common)
        if rest:
            _log.warning("refused from %s: various reasons, %d times", OTHER_ADDRESSES, rest)
