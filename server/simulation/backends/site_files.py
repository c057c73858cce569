"""A site's folder as it travels between the coordinator's disk and the worker that serves the site.

The coordinator's run folder has what counts. A worker works in a folder of its own, and what it changed comes with its
answer: work that is lost with its worker has changed nothing, and is done again from the same state elsewhere.
"""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common.system.files import write_atomically

GROWS = ".jsonl"
"""Files with this ending only grow: their end is sent."""
REMOVED = -1

Change = tuple[str, int, Any]
"""Path below the folder; place of the bytes in the file, or :data:`REMOVED`; bytes."""


class WatchedFolder:
    """A folder, and what it held when it was last looked at."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._seen = _listed(folder)

    def changes(self) -> list[Change]:
        """What has changed since, to be made in another copy of the folder."""
        before, self._seen = self._seen, _listed(self.folder)
        removed: list[Change] = [(path, REMOVED, b"") for path in sorted(before.keys() - self._seen.keys())]
        changed = [path for path, seen in self._seen.items() if before.get(path) != seen]
        return [self._change(path, before.get(path)) for path in sorted(changed, key=_audit_last)] + removed

    def _change(self, path: str, before: tuple[int, int, int] | None) -> Change:
        inode, size, _ = self._seen[path]
        grown = before is not None and path.endswith(GROWS) and before[0] == inode and before[1] <= size
        start = before[1] if grown and before else 0
        with (self.folder / path).open("rb") as file:
            file.seek(start)
            return path, start, file.read()


def whole(folder: Path) -> list[Change]:
    """Everything that lies in a folder; nothing where there is none."""
    return [(path, 0, (folder / path).read_bytes()) for path in sorted(_listed(folder))]


def replace_folder(folder: Path, files: Iterable[Change]) -> WatchedFolder:
    """Make a folder that holds these files and nothing else."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    make_changes(folder, files)
    return WatchedFolder(folder)


def make_changes(folder: Path, changes: Iterable[Change]) -> None:
    """Make them; made twice, they are the same as made once."""
    for name, start, data in changes:
        path = folder / name
        if start == REMOVED:
            path.unlink(missing_ok=True)
            continue
        if start:
            with path.open("r+b") as file:
                file.seek(start)
                file.write(data)
                file.truncate()
        else:
            write_atomically(path, data, durable=False)


def _listed(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Path below the folder -> inode, size, time of the last change."""
    found = {}
    for place, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(place, name)
            if not name.endswith(".part"):
                about = os.stat(path)
                found[os.path.relpath(path, folder)] = about.st_ino, about.st_size, about.st_mtime_ns
    return found


def _audit_last(path: str) -> tuple[bool, str]:
    """A coordinator that dies in the middle has the memory before the line that says so."""
    return not path.startswith("memory"), path
