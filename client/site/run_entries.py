"""Permanent entries about the runs of a site: one small JSON file for each run, which is never removed.

A coordinator can begin any number of runs. If a site removed the entries of older runs, the coordinator could choose
which ones: it could then send another plan for an announced run, and the site would count the run's time and replies
from zero again. An entry takes one block of the disk, about as much as the run's lines in the audit log.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyclinic.common.system.files import write_atomically
from polyclinic.common.system.plain_names import RunName, join_plain_name


class RunEntryFolder:
    """A folder with one JSON file for each run of a site.

    Args:
        folder: The folder, which is made with its first entry.
        earlier: File in which an earlier release stored the entries of all runs. It is read if a run has no file.
        durable: Flush files to disk.
    """

    def __init__(self, folder: Path, earlier: Path, *, durable: bool = True) -> None:
        self._folder = folder
        self._earlier = earlier
        self._durable = durable

    def read_entry(self, run: str) -> dict[str, Any] | None:
        """Return the entry of a run; None if there is none, or it cannot be read."""
        if RunName.pattern.fullmatch(run) is None:
            return None
        entry = _read_json_object(join_plain_name(self._folder, RunName(run), ".json"))
        if entry is None and self._earlier.exists():
            entry = (_read_json_object(self._earlier) or {}).get(run)
        return entry if isinstance(entry, dict) else None

    def write_entry(self, run: str, entry: Mapping[str, Any]) -> None:
        """Write the entry of a run; an earlier entry is replaced.

        Raises:
            ValueError: If the run's name is not allowed, because it could be the path of another file.
        """
        path = join_plain_name(self._folder, RunName(run), ".json")
        write_atomically(path, json.dumps(dict(entry)).encode(), durable=self._durable, private=True)


def _read_json_object(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
