"""A log of bounded size: rotated by size, long lines cut, lines a minute limited."""

import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from common.system.plain_text import json_text

FILE_BYTES, FILES = 2 * 2**20, 3
LINES_A_MINUTE, LONGEST_LINE = 300, 2000
"""Lines beyond are counted only, so that a flood does not wash out what was there before it."""
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass
class BoundedLog:
    """``FILES`` files of ``FILE_BYTES`` at most, readable by their owner only: PATH, PATH.1, PATH.2.

    Args:
        clock: Seconds.
        as_json: A line is an object with ``time`` and ``message``.
    """

    path: Path
    clock: Callable[[], float] = time.monotonic
    as_json: bool = False
    _minute: float = float("-inf")
    _lines: int = 0

    def write(self, line: str) -> None:
        """Add a line, with the time."""
        now = self.clock()
        if now - self._minute >= 60:
            left_out, self._minute, self._lines = self._lines - LINES_A_MINUTE, now, 0
            if left_out > 0:
                self._append(f"{left_out} more lines in that minute")
        self._lines += 1
        if self._lines <= LINES_A_MINUTE:
            self._append(printable(line)[:LONGEST_LINE])

    def _append(self, line: str) -> None:
        self._rotate()
        number = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with open(number, "a", encoding="utf-8") as file:
            os.fchmod(number, 0o600)  # a file of an earlier release
            now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            file.write((json_text({"time": now, "message": line}) if self.as_json else f"{now} {line}") + "\n")

    def _rotate(self) -> None:
        if not self.path.exists() or self.path.stat().st_size < FILE_BYTES:
            return
        names = [self.path, *(self.path.with_name(f"{self.path.name}.{number}") for number in range(1, FILES))]
        for older, newer in zip(names[:0:-1], names[-2::-1], strict=True):
            if newer.exists():
                newer.replace(older)


def printable(line: str) -> str:
    """The line without colours, all other characters that steer a terminal written out."""
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in _COLOURS.sub("", line).rstrip("\r\n"))


def pump(source: IO[bytes], log: BoundedLog) -> threading.Thread:
    """Write what a process prints to a log, in a thread that ends with the process."""

    def work() -> None:
        while line := source.readline(4 * LONGEST_LINE):
            try:
                log.write(line.decode(errors="replace"))
            except OSError:  # the disk is full: the process must not wait for us
                continue
        source.close()

    thread = threading.Thread(target=work, name="log", daemon=True)
    thread.start()
    return thread
