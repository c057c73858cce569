"""Remove the working files of old runs, ``updates/`` and ``checkpoints/``, after the days in ``coordinator.toml``.

They contain exact updates of hospitals and models of single rounds, which are not needed after a run is done and
verified. The model, the metrics, the audit log and the receipt are kept.
"""

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from polyclinic.common.errors import BadInput
from polyclinic.server.runs.folder import UPDATES_FOLDER, RunFolder
from polyclinic.server.runs.live_status import read_run_history

WORKING_FOLDERS = (UPDATES_FOLDER, "checkpoints")
DAY_S = 86_400.0


@dataclass(frozen=True)
class RemovedWorkingFiles:
    """A run whose working files were removed.

    Attributes:
        run_folder: Folder of the run.
        folders: Names of the removed folders in it.
    """

    run_folder: Path
    folders: tuple[str, ...]


def remove_old_working_files(state: Path, days: int, now: float) -> list[RemovedWorkingFiles]:
    """Remove the working files of the finished runs in a coordinator's history that are old enough.

    Args:
        state: The coordinator's folder ``state``, which has the history.
        days: Days after the end of a run for which its working files are kept.
        now: Unix time.
    """
    removed = list[RemovedWorkingFiles]()
    for run in _select_old_runs(read_run_history(state), now - days * DAY_S):
        try:
            folders = _remove_working_files(run, days)
        except (BadInput, OSError):  # a run uses the folder, or a file cannot be removed; the next call tries again
            continue
        if folders:
            removed.append(RemovedWorkingFiles(run, folders))
    return removed


def find_retention_day(run_folder: Path, name: str) -> str:
    """Return the UTC day on which a folder of a run was removed by retention; empty if it was not.

    Args:
        name: Name of the folder, such as ``updates``.
    """
    if (run_folder / name).exists():
        return ""
    try:
        events = RunFolder(run_folder).read_run_events()
    except (OSError, ValueError):
        return ""
    days = [
        str(event["time"])[:10]
        for event in events
        if event.get("event") == "working_files_removed" and name in event["folders"]
    ]
    return days[-1] if days else ""


def _select_old_runs(history: Iterable[Mapping[str, Any]], latest_end: float) -> list[Path]:
    """Return the folders whose last run is done and ended before the Unix time ``latest_end``."""
    last_runs = {str(run["run_folder"]): run for run in history}  # a folder may have several runs in the history
    return [
        Path(folder)
        for folder, run in last_runs.items()
        if run["there"] and run["state"] == "done" and run["ended"] is not None and run["ended"] < latest_end
    ]


def _remove_working_files(run_folder: Path, days: int) -> tuple[str, ...]:
    """Remove a run's working files while holding its lock; return the names of the removed folders.

    Raises:
        BadInput: If another process holds the lock.
    """
    folder = RunFolder(run_folder)
    with folder.lock_run_folder():
        names = tuple(name for name in WORKING_FOLDERS if (run_folder / name).is_dir())
        if not folder.is_run_finished or not names:
            return ()
        # The event comes first, so that verify does not report a partly removed folder as changed.
        folder.append_event("working_files_removed", folders=list(names), days=days)
        for name in names:
            shutil.rmtree(run_folder / name)
    return names


def describe_removal(removed: RemovedWorkingFiles, days: int) -> str:
    """Return a line for the log about the removed folders of a run."""
    folders = " and ".join(f"{name}/" for name in removed.folders)
    day = datetime.now(UTC).date().isoformat()
    return f"{removed.run_folder}: {folders} removed on {day}, {days} days after the end (retention)"
