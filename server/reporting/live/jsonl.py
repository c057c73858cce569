"""A jsonl file that another process appends to: each look reads what is new."""

import json
import os
from pathlib import Path
from typing import Any


class Lines:
    """Whole lines of a growing file; begun anew where the file was replaced, as ``--resume`` does.

    Attributes:
        all: Every line so far that is a JSON object.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.all: list[dict[str, Any]] = []
        self._offset, self._inode = 0, -1

    def look(self) -> bool:
        """Read on; whether anything changed. A file that is not there has no lines."""
        before = len(self.all), self._inode
        try:
            with self.path.open("rb") as file:
                self._begin_anew_if_replaced(file.fileno())
                file.seek(self._offset)
                text = file.read()
        except OSError:
            self.all, self._offset, self._inode = [], 0, -1
            return bool(before[0])
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        self.all += filter(None, map(_parsed, whole.splitlines()))
        return (len(self.all), self._inode) != before

    def _begin_anew_if_replaced(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        if status.st_ino != self._inode or status.st_size < self._offset:
            self.all, self._offset, self._inode = [], 0, status.st_ino


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
