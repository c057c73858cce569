"""Files with the state of the current run and the history of runs, for ``flwr-server status`` and the live view."""

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
HISTORY_FILE = "runs.jsonl"
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
        members: The sites that the experiment names as members; empty if all admitted sites are members.
        state: ``running``, ``done``, ``stopped`` or ``interrupted``.
        phase: ``roll call``, ``train``, ``evaluate``, ``test`` or ``benefit``.
        releases: Site -> Polyclinic release of the site.
        waiting_for: Sites whose reply is awaited. Sites in ``lost`` are included only if the run cannot continue
            without them.
        lost: Sites without a connection to the coordinator.
        stopped: Site in ``lost`` that signed off -> time of the sign-off.
        deadline: Unix time at which the run continues without the sites in ``waiting_for``.
        seconds_left: Estimated remaining time of the run.
        left_out: Site -> last round (or roll call) without the site, and the reason.
        shortened: Site -> last round in which its update was too long, and how the update was treated.
        awaiting_approval: Sites at which a person has to approve the plan before they take part.
        resumed: True if another process began the run in this folder.
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
        """Return the path of the file with this run's state. A run with named members has a separate file."""
        if not self.members:
            return state / PRESENT_FILE
        mark = hashlib.sha256(self.run_folder.encode()).hexdigest()[:12]
        return state / f"present-{mark}.json"


def describe_site_sign_off(when: str) -> str:
    """Return the text that a site signed off at this time, for all files and pages."""
    return f"{SIGNED_OFF} at {when}"


def read_last_run_state(state: Path) -> CurrentRun | None:
    """Return the state of the last run; None if there was none. If its process is dead, it is ``interrupted``."""
    runs = read_current_runs(state)
    return runs[-1] if runs else None


def read_current_runs(state: Path) -> list[CurrentRun]:
    """Return the states of all runs in progress, oldest first; if there is none, of the last run."""
    runs = []
    for path in state.glob("present*.json"):
        try:
            run = CurrentRun(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            continue
        if run.state == "running" and not psutil.pid_exists(run.pid):
            run.state = "interrupted"
        runs.append(run)
    runs.sort(key=lambda run: run.began)
    return [run for run in runs if run.state == "running"] or runs[-1:]


def describe_runs_at_work(state: Path, site: str = "") -> str:
    """Return the names of the runs in progress with their sites, as one text; empty if there is none.

    Args:
        site: Return only runs with this named member; empty for all runs.
    """
    runs = [run for run in read_current_runs(state) if run.state == "running"]
    members = [(run.name, ", ".join(run.members) or "all sites") for run in runs if site in ("", *run.members)]
    return "; ".join(f"{name} ({sites})" for name, sites in sorted(members))


def remove_states_of_ended_runs(state: Path) -> None:
    """Remove the state files of ended runs with named members, because each of these runs has a separate file."""
    for path in state.glob("present-*.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            run = json.loads(path.read_text(encoding="utf-8"))
            if run["state"] != "running" or not psutil.pid_exists(run["pid"]):
                path.unlink()


def describe_site_activity(run: CurrentRun, site: str, *, revoked: bool = False) -> str:
    """Describe the present activity of a site in a run; empty if the site takes no part or the run has ended.

    Args:
        revoked: True if the coordinator has revoked the site's key.
    """
    if run.state != "running" or revoked:
        return ""
    if site in run.awaiting_approval:
        return APPROVAL_PENDING
    if site in run.lost and site in run.stopped:
        return describe_site_sign_off(run.stopped[site])
    if site in run.lost:
        return "lost, may come back"
    if site in run.waiting_for:
        phase = PHASES.get(run.phase, run.phase)
        return "waiting for its answer" if run.phase == "roll call" else f"at work ({phase})"
    return "has answered" if site in run.sites else ""


class JsonLinesReader:
    """Reads new lines of a growing jsonl file; starts over if the file was replaced, as by ``--resume``.

    Attributes:
        all: JSON objects of all complete lines so far.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.all: list[dict[str, Any]] = []
        self._offset = 0
        self._inode = -1

    def poll_new_lines(self) -> bool:
        """Read the new lines; return True if the lines have changed. A missing file counts as empty."""
        before = len(self.all), self._inode
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self._forget_lines(status.st_ino)
                file.seek(self._offset)
                text = file.read()
        except OSError:
            self._forget_lines(-1)
            return bool(before[0])
        complete_lines = text[: text.rfind(b"\n") + 1]
        self._offset += len(complete_lines)
        for line in complete_lines.splitlines():
            with suppress(ValueError):
                if isinstance(value := json.loads(line), dict):
                    self.all.append(value)
        return (len(self.all), self._inode) != before

    def read_new_lines(self) -> list[dict[str, Any]]:
        """Return the lines since the last call; all lines if the file was replaced."""
        count_before = len(self.all)
        inode_before = self._inode
        self.poll_new_lines()
        is_same_file = self._inode == inode_before and len(self.all) >= count_before
        return self.all[count_before if is_same_file else 0 :]

    def _forget_lines(self, inode: int) -> None:
        """Start at the beginning of the file with this inode; -1 for a missing file."""
        self.all = []
        self._offset = 0
        self._inode = inode


def add_to_run_history(state: Path, run: CurrentRun) -> None:
    """Append the present state of a run to the coordinator's history file."""
    with open_own_file(state / HISTORY_FILE, "a") as file:
        file.write(json.dumps({**asdict(run), "noted": time.time()}) + "\n")


def read_run_history(state: Path) -> list[dict[str, Any]]:
    """Return the last state of each run in the history file, oldest first. A resumed run counts once.

    Field ``began`` is the time of the run's first start. Field ``ended`` is a Unix time, or None for a run that is
    active or was killed. Field ``there`` is false if the run's folder was moved or removed.
    """
    try:
        lines = (state / HISTORY_FILE).read_text(encoding="utf-8").splitlines()
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
            first_start = first_starts.get(run["run_folder"], run["began"])
            if not record.get("resumed"):
                # A new run, perhaps in the folder of a run that was moved or removed.
                first_start = run["began"]
            first_starts[run["run_folder"]] = first_start
            run["began"] = first_start
            runs[run["run_folder"], first_start] = run
        except (ValueError, KeyError, TypeError):
            continue  # a full disk or a kill has cut the line off
    return list(runs.values())
