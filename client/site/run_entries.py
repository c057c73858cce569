"""What a site keeps about each of its runs for ever: one small JSON file a run.

A coordinator can begin any number of runs. If a site forgot older runs to make room, the coordinator could choose what
the site forgets: another plan would then pass for an announced run, and a run's time or its replies would be counted
from zero again. So no entry is ever removed. An entry takes one block of the disk, about as much as the lines that the
run's roll call leaves in the audit log, which nobody removes either.
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
        folder: The folder; it is made with its first entry.
        earlier: File with the entries of all runs that an earlier release wrote. An entry there counts until the run
            has a file of its own.
        durable: Flush files to disk.
    """

    def __init__(self, folder: Path, earlier: Path, *, durable: bool = True) -> None:
        self._folder = folder
        self._earlier = earlier
        self._durable = durable

    def read_entry(self, run: str) -> dict[str, Any] | None:
        """Return the entry of a run; None if it has none, or one that cannot be read."""
        if RunName.pattern.fullmatch(run) is None:
            return None
        entry = _read_json_object(join_plain_name(self._folder, RunName(run), ".json"))
        if entry is None and self._earlier.exists():
            entry = (_read_json_object(self._earlier) or {}).get(run)
        return entry if isinstance(entry, dict) else None

    def write_entry(self, run: str, entry: Mapping[str, Any]) -> None:
        """Write the entry of a run in place of an earlier one.

        Raises:
            ValueError: If a run cannot have this name; it would be the path of another file.
        """
        path = join_plain_name(self._folder, RunName(run), ".json")
        write_atomically(path, json.dumps(dict(entry)).encode(), durable=self._durable, private=True)


def _read_json_object(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
