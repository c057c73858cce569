"""Calls of the hospital link that were refused, on the disk: the SuperLink writes them, the leader of a run reads them.

One line of JSON a refusal in ``state/refused-calls.jsonl``. The same refusal of the same caller is written
once in five seconds with the number of times, and the file is replaced when it is full, so that no caller can fill
the disk.
"""

import json
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = "refused-calls.jsonl"
PAUSE_S = 5.0
"""The same refusal is not written again for so long; then it is, with how often it came."""
FULL_BYTES = 2**20
MOST_KINDS = 1000
"""Different refusals that are remembered; beyond that all are counted as one."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RefusedCall:
    """A refused call.

    Attributes:
        caller: Registered name of the site whose key signed the call.
        call: Name of the method of the Fleet API.
        reason: What was wrong with the call, in words.
        other: Registered name of the site that the call was about, where it was another one.
        run: Flower's number of the run; 0 where the call names none.
    """

    caller: str
    call: str
    reason: str
    other: str = ""
    run: int = 0


class RefusedCalls:
    """Writes refused calls. Safe to use from several threads."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self._seen: dict[RefusedCall, tuple[float, int]] = {}  # when it was written last, times since
        self._timer: threading.Timer | None = None

    def note(self, refused: RefusedCall) -> None:
        """Write a refusal, or count it where the same one was written less than :data:`PAUSE_S` ago."""
        with self._lock:
            if refused not in self._seen and len(self._seen) >= MOST_KINDS:
                refused = RefusedCall(refused.caller, "several", "many different calls were refused")
            when, times = self._seen.get(refused, (-PAUSE_S, 0))
            now, times = time.monotonic(), times + 1
            if now - when < PAUSE_S:
                self._seen[refused] = when, times
                self._write_later()
                return
            self._seen[refused] = now, 0
            self._write(refused, times)

    def _write_later(self) -> None:
        if self._timer is None:
            self._timer = threading.Timer(PAUSE_S, self._write_counted)
            self._timer.daemon = True
            self._timer.start()

    def _write_counted(self) -> None:
        """Write the refusals that were only counted, so that the last ones of an attack are told, too."""
        with self._lock:
            self._timer, now = None, time.monotonic()
            for refused, (_, times) in list(self._seen.items()):
                if times:
                    self._seen[refused] = now, 0
                    self._write(refused, times)

    def _write(self, refused: RefusedCall, times: int) -> None:
        about = f" about {refused.other}" if refused.other else ""
        log.warning("refused %s of %s%s: %s (%d times)", refused.call, refused.caller, about, refused.reason, times)
        line: dict[str, Any] = {"time": time.time(), **vars(refused), "times": times}
        if self._path.exists() and self._path.stat().st_size > FULL_BYTES:
            self._path.replace(self._path.with_suffix(".old.jsonl"))
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


class RefusedCallsReader:
    """Reads what is written from now on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._place = self._size()

    def new(self) -> Iterator[dict[str, Any]]:
        """The refusals written since the last call, oldest first."""
        if (size := self._size()) < self._place:
            self._place = 0  # the file was full and was replaced
        if size == self._place:
            return
        with self._path.open("rb") as file:
            file.seek(self._place)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._place += len(whole)
        for line in whole.splitlines():
            yield json.loads(line)

    def _size(self) -> int:
        try:
            return self._path.stat().st_size
        except FileNotFoundError:
            return 0
