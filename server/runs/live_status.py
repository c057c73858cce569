"""The current run's state and the history of runs, as files for ``flwr-server status``, ``runs`` and the live view."""

import hashlib
import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from polyclinic.common.system.files import open_own_file

PRESENT_FILE = "present.json"
SIGNED_OFF = "signed off"
HISTORY = "runs.jsonl"
"""File with a line for each start and each end of a run."""
APPROVAL_PENDING = "waits for approval at the hospital"
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
    """The state of the current or last run: the content of ``state/present.json``.

    Attributes:
        members: The sites that the experiment names as members; empty if all admitted sites are.
        state: ``running``, ``done``, ``stopped`` or ``interrupted``.
        phase: ``roll call``, ``train``, ``evaluate``, ``test``, ``benefit``.
        releases: Site -> Polyclinic release of the site.
        waiting_for: Sites whose reply is awaited. Sites in ``lost`` are included only if the run cannot continue
            without them.
        lost: Sites without a connection to the coordinator.
        stopped: Site in ``lost`` that signed off -> time of the sign-off.
        deadline: Unix time at which the run continues without the sites in ``waiting_for``.
        seconds_left: Estimated remaining time of the run.
        left_out: Site -> last round (or roll call) that went without the site, and the reason.
        shortened: Site -> last round in which its update was too long, and how the update was treated.
        awaiting_approval: Sites at which a person has to approve the plan before they take part.
        resumed: True if the process goes on with the run that another process began in this folder.
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
    members: tuple[str, ...] = ()
    awaiting_approval: tuple[str, ...] = ()
    resumed: bool = False

    def find_status_path(self, state: Path) -> Path:
        """Return the path of this run's status; a run of named members has a file of its own."""
        if not self.members:
            return state / PRESENT_FILE
        mark = hashlib.sha256(self.run_folder.encode()).hexdigest()[:12]
        return state / f"present-{mark}.json"


def describe_site_sign_off(when: str) -> str:
    """Describe that a site signed off at this time; the same words are used in all files and pages."""
    return f"{SIGNED_OFF} at {when}"


def read_last_run_state(state: Path) -> CurrentRun | None:
    """Read the state of the last run; None if there was none. If its process is dead, the state is ``interrupted``."""
    runs = read_current_runs(state)
    return runs[-1] if runs else None


def read_current_runs(state: Path) -> list[CurrentRun]:
    """Read the states of all runs that are at work, oldest first; of the last run alone if none is."""
    runs = []
    for path in state.glob("present*.json"):
        try:
            present = CurrentRun(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            continue
        if present.state == "running" and not psutil.pid_exists(present.pid):
            present.state = "interrupted"
        runs.append(present)
    runs.sort(key=lambda run: run.began)
    return [run for run in runs if run.state == "running"] or runs[-1:]


def describe_runs_at_work(state: Path, site: str = "") -> str:
    """Return the names of the runs that are at work in order, each with its sites; empty if none is.

    Args:
        site: Only runs that this site takes part in; empty for all.
    """
    runs = [run for run in read_current_runs(state) if run.state == "running"]
    members = [(run.name, ", ".join(run.members) or "all sites") for run in runs if site in ("", *run.members)]
    return "; ".join(f"{name} ({sites})" for name, sites in sorted(members))


def remove_states_of_ended_runs(state: Path) -> None:
    """Remove the states of runs of named members that are over, because each such run has a file of its own."""
    for path in state.glob("present-*.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            present = json.loads(path.read_text(encoding="utf-8"))
            if present["state"] != "running" or not psutil.pid_exists(present["pid"]):
                path.unlink()


def describe_site_activity(present: CurrentRun, site: str, *, revoked: bool = False) -> str:
    """Describe what a site currently does in the run; empty if the site takes no part or the run has ended.

    Args:
        revoked: Whether the coordinator has revoked the site's key.
    """
    if present.state != "running" or revoked:
        return ""
    if site in present.awaiting_approval:
        return APPROVAL_PENDING
    if site in present.lost and site in present.stopped:
        return describe_site_sign_off(present.stopped[site])
    if site in present.lost:
        return "lost, may come back"
    if site in present.waiting_for:
        phase = PHASES.get(present.phase, present.phase)
        return "waiting for its answer" if present.phase == "roll call" else f"at work ({phase})"
    return "has answered" if site in present.sites else ""


class JsonLinesReader:
    """Reads new lines of a growing jsonl file; starts over if the file was replaced, as by ``--resume``.

    Attributes:
        all: JSON objects of all complete lines so far.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.all: list[dict[str, Any]] = []
        self._offset, self._inode = 0, -1

    def poll_new_lines(self) -> bool:
        """Read the new lines; return whether anything changed. A missing file counts as empty."""
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

    def read_new_lines(self) -> list[dict[str, Any]]:
        """Return the lines since the last call; all lines if the file was replaced."""
        known, inode = len(self.all), self._inode
        self.poll_new_lines()
        return self.all[known if self._inode == inode and len(self.all) >= known else 0 :]


def add_to_run_history(state: Path, present: CurrentRun) -> None:
    """Append a run's current state to the coordinator's history file."""
    with open_own_file(state / HISTORY, "a") as file:
        file.write(json.dumps({**asdict(present), "noted": time.time()}) + "\n")


def read_run_history(state: Path) -> list[dict[str, Any]]:
    """Read the history; return the last state of every run, oldest first. A resumed run is in it once.

    Field ``began`` is the time of the run's first start. Field ``ended`` is a Unix time, or None for a run that is
    active or was killed. Field ``there`` is false if the run's folder was moved or removed.
    """
    try:
        lines = (state / HISTORY).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    runs: dict[tuple[str, float], dict[str, Any]] = {}
    first_starts: dict[str, float] = {}
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
            first = first_starts.get(run["run_folder"], run["began"])
            if not record.get("resumed"):
                # Another run in the folder of one that was moved or removed.
                first = run["began"]
            run["began"] = first_starts[run["run_folder"]] = first
            runs[run["run_folder"], first] = run
        except (ValueError, KeyError, TypeError):
            continue  # cut off by a full disk or a kill
    return list(runs.values())
