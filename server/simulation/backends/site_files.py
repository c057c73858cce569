"""Copy a simulated site's folder between the coordinator's disk and the worker that serves the site.

The copy in the run folder is the valid one. A worker changes its own copy and returns the changes with its reply, so
that after a lost worker the same work can be repeated from the same state.
"""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from polyclinic.common.system.files import (
    open_own_file,
    write_atomically,
)

LOG_SUFFIX = ".jsonl"
"""Suffix of files that only grow: only their new end is sent."""
REMOVED = -1

Change = tuple[str, int, Any]
"""Path below the folder; offset of the bytes in the file, or :data:`REMOVED`; bytes."""


class FolderChangeTracker:
    """A folder that can list its changes since the last call."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = _read_file_states(folder)

    def list_folder_changes(self) -> list[Change]:
        """Return the changes since the last call, to be applied to another copy of the folder."""
        before, self._files = self._files, _read_file_states(self.folder)
        removed: list[Change] = [(path, REMOVED, b"") for path in sorted(before.keys() - self._files.keys())]
        changed = [path for path, state in self._files.items() if before.get(path) != state]
        # The audit comes last: a coordinator that dies in the middle has the memory before the line that names it.
        changed.sort(key=lambda path: (not path.startswith("memory"), path))
        changes = list[Change]()
        for path in changed:
            start, (inode, size, _), earlier = 0, self._files[path], before.get(path)
            if earlier is not None and path.endswith(LOG_SUFFIX) and earlier[0] == inode and earlier[1] <= size:
                start = earlier[1]  # the log has only grown
            with (self.folder / path).open("rb") as file:
                file.seek(start)
                changes.append((path, start, file.read()))
        return changes + removed


def read_folder_files(folder: Path) -> list[Change]:
    """Return the content of all files in a folder; empty if the folder does not exist."""
    return [(path, 0, (folder / path).read_bytes()) for path in sorted(_read_file_states(folder))]


def recreate_folder_with_files(folder: Path, files: Iterable[Change]) -> FolderChangeTracker:
    """Create a folder with exactly these files, in place of an existing one."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    apply_folder_changes(folder, files)
    return FolderChangeTracker(folder)


def apply_folder_changes(folder: Path, changes: Iterable[Change]) -> None:
    """Apply changes to a folder; applying them twice has the same effect as once."""
    for name, start, data in changes:
        path = folder / name
        if start == REMOVED:
            path.unlink(missing_ok=True)
        elif start:
            with open_own_file(path, "rb+") as file:
                file.seek(start)
                file.write(data)
                file.truncate()
        else:
            write_atomically(path, data, durable=False)


def _read_file_states(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Return relative path -> inode, size and modification time of every file in a folder."""
    states = {}
    for place, _, names in os.walk(folder):
        for name in names:
            if not name.endswith(".part"):
                path = os.path.join(place, name)
                status = os.stat(path)
                states[os.path.relpath(path, folder)] = status.st_ino, status.st_size, status.st_mtime_ns
    return states
