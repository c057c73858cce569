"""Copy a simulated site's folder between the coordinator's disk and the worker that serves the site.

The copy in the run folder is valid. A worker changes its own copy and returns the changes with its reply, so that the
work of a lost worker can be repeated from the same state.
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
"""Suffix of files that only grow; of such a file only the new bytes are sent."""
REMOVED_OFFSET = -1
"""Offset that marks a removed file."""

Change = tuple[str, int, Any]
"""A change of a file: relative path; offset of the bytes, or :data:`REMOVED_OFFSET`; bytes."""


class FolderChangeTracker:
    """Lists the changes of the files in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = _read_file_states(folder)

    def list_folder_changes(self) -> list[Change]:
        """Return the changes since the last call, to be applied to another copy of the folder."""
        before = self._files
        self._files = _read_file_states(self.folder)
        removed: list[Change] = [(path, REMOVED_OFFSET, b"") for path in sorted(before.keys() - self._files.keys())]
        changed = [path for path, state in self._files.items() if before.get(path) != state]
        # The folder ``memory`` comes first, the audit log later. So a coordinator that dies between them has a site's
        # state without the audit entry about it, and never an entry without the state.
        changed.sort(key=lambda path: (not path.startswith("memory"), path))
        changes = list[Change]()
        for path in changed:
            start = 0
            inode, size, _ = self._files[path]
            earlier = before.get(path)
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
    """Create a folder with exactly these files; replace an existing folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    apply_folder_changes(folder, files)
    return FolderChangeTracker(folder)


def apply_folder_changes(folder: Path, changes: Iterable[Change]) -> None:
    """Apply changes to a folder; applying them twice has the same effect as once."""
    for name, start, data in changes:
        path = folder / name
        if start == REMOVED_OFFSET:
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
    for parent, _, names in os.walk(folder):
        for name in names:
            if not name.endswith(".part"):
                path = os.path.join(parent, name)
                status = os.stat(path)
                states[os.path.relpath(path, folder)] = status.st_ino, status.st_size, status.st_mtime_ns
    return states
