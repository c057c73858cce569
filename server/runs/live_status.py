"""State and history of a coordinator's runs, as files for ``flwr-server status``, ``runs`` and the live view."""

import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

FILE = "present.json"
SIGNED_OFF = "signed off"
HISTORY = "runs.jsonl"
"""File with a line for each start and each end of a run."""
PHASES = {
    "train": "training",
    "evaluate": "evaluation",
    "test": "test",
    "benefit": "comparison",
    "roll call": "roll call",
}
"""Phase of a round -> its name on pages and in messages."""


@dataclass
class CurrentRun:
    """The active run, or the last one if none is active: the content of ``state/present.json``.

    Attributes:
        state: ``running``, ``done``, ``stopped`` or ``interrupted``.
        phase: ``roll call``, ``train``, ``evaluate``, ``test``, ``benefit``.
        releases: Site -> the release that answered the roll call there.
        waiting_for: Sites whose reply has not come; of sites in ``lost`` only those without which the run cannot go on.
        lost: Sites that the coordinator has no contact with.
        stopped: Lost site that signed off -> time at which it did.
        deadline: Unix time at which the run goes on without the sites in ``waiting_for``.
        seconds_left: Remaining time of the run, by the pace so far.
        left_out: Site -> the last round in which its reply did not count, and the reason.
        shortened: Site -> the last round in which its update was too long, and the treatment of that update.
    """

    run_folder: str
    name: str
    state: str = "running"
    pid: int = 0
    began: float = 0.0
    phase: str = "roll call"
    round: int = 0
    rounds: int = 0
    sites: tuple[str, ...] = ()
    releases: dict[str, str] = field(default_factory=dict)
    waiting_for: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    stopped: dict[str, str] = field(default_factory=dict)
    deadline: float = 0.0
    seconds_left: float | None = None
    left_out: dict[str, str] = field(default_factory=dict)
    shortened: dict[str, str] = field(default_factory=dict)
    last_error: str = ""
    last_error_time: str = ""


def describe_sign_off(when: str) -> str:
    """Return the words for a site that signed off at this time, the same in every file and on every page."""
    return f"{SIGNED_OFF} at {when}"


def read_current_run(state: Path) -> CurrentRun | None:
    """Read the state of the last run; None where there was none. A run whose process has ended was interrupted."""
    try:
        present = CurrentRun(**json.loads((state / FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    if present.state == "running" and not psutil.pid_exists(present.pid):
        present.state = "interrupted"
    return present


def describe_site_in_run(present: CurrentRun, site: str, *, revoked: bool = False) -> str:
    """Describe in a few words what a site does in the run; empty where it has no part or the run has ended.

    Args:
        revoked: Whether the coordinator has revoked the site's key.
    """
    if present.state != "running" or revoked:
        return ""
    if site in present.lost and site in present.stopped:
        return describe_sign_off(present.stopped[site])
    if site in present.lost:
        return "lost, may come back"
    if site in present.waiting_for:
        phase = PHASES.get(present.phase, present.phase)
        return "waiting for its answer" if present.phase == "roll call" else f"at work ({phase})"
    return "has answered" if site in present.sites else ""


class JsonLinesReader:
    """Reads the new lines of a jsonl file; begins again where the file was replaced, as ``--resume`` does.

    Attributes:
        all: The JSON object of every complete line so far.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.all: list[dict[str, Any]] = []
        self._offset, self._inode = 0, -1

    def poll(self) -> bool:
        """Read the new lines and return True where there were any. A missing file has no lines."""
        before = len(self.all), self._inode
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self.all, self._offset, self._inode = [], 0, status.st_ino
                file.seek(self._offset)
                text = file.read()
        except OSError:
            self.all, self._offset, self._inode = [], 0, -1
            return bool(before[0])
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            with suppress(ValueError):
                if isinstance(value := json.loads(line), dict):
                    self.all.append(value)
        return (len(self.all), self._inode) != before

    def read_new(self) -> list[dict[str, Any]]:
        """Return the lines since the last look; all lines where the file was replaced since then."""
        known, inode = len(self.all), self._inode
        self.poll()
        return self.all[known if self._inode == inode and len(self.all) >= known else 0 :]


def add_to_run_history(state: Path, present: CurrentRun) -> None:
    """Add the state of a run to the history in ``state``, a folder of the coordinator."""
    with (state / HISTORY).open("a", encoding="utf-8") as file:
        file.write(json.dumps({**asdict(present), "noted": time.time()}) + "\n")


def run_history(state: Path) -> list[dict[str, Any]]:
    """Return every run that was begun or resumed, oldest first: the last line of each, with ``ended`` and ``there``.

    ``ended`` is Unix time, or None for a run that still runs or whose process was killed. ``there`` is false if the
    run's folder was moved or removed.
    """
    try:
        lines = (state / HISTORY).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    runs: dict[tuple[str, float], dict[str, Any]] = {}
    for line in lines:
        try:
            record = json.loads(line)
            ended = record["state"] != "running"
            run = {name: record[name] for name in ("name", "run_folder", "began", "round", "rounds", "sites")}
            run |= {"last_error": record["last_error"], "state": record["state"]}
            if not ended and not psutil.pid_exists(record["pid"]):
                run["state"] = "interrupted"
            run["ended"] = record["noted"] if ended else None
            run["there"] = (Path(record["run_folder"]) / "events.jsonl").is_file()
            runs[record["run_folder"], record["began"]] = run
        except (ValueError, KeyError, TypeError):
            continue  # cut off by a full disk or a kill
    return list(runs.values())
