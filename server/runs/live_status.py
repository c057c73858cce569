"""State and history of a coordinator's runs, as files for ``flwr-server status``, ``runs`` and the live view."""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FILE = "present.json"
SIGNED_OFF = "signed off"
HISTORY = "runs.jsonl"
"""A line when a run begins and a line when it ends."""
PHASES = {
    "train": "training",
    "evaluate": "evaluation",
    "test": "test",
    "benefit": "comparison",
    "roll call": "roll call",
}
"""Phase of a round -> its name on pages and in messages."""


@dataclass
class Present:
    """``state/present.json``.

    Attributes:
        state: ``running``, ``done``, ``stopped`` or ``interrupted``.
        phase: ``roll call``, ``train``, ``evaluate``, ``test``, ``benefit``.
        releases: Site -> the release that answered the roll call there.
        waiting_for: Sites that are waited for; of those in ``lost``, which give no sign of life, only where needed.
        stopped: Those of the lost that said that they leave -> when.
        deadline: Unix time at which the run goes on without them.
        seconds_left: Of the run, by the pace so far.
        left_out: Site -> why its reply last did not count, and in which round.
        shortened: Site -> the last round in which its update was too long, and what was done.
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


def stopped_at(when: str) -> str:
    """Return why a site is away that said that it leaves; the same words in every file and on every page."""
    return f"{SIGNED_OFF} at {when}"


def read_present(state: Path) -> Present | None:
    """Return the state of the last run; None where there was none. A run whose process is gone was interrupted."""
    try:
        present = Present(**json.loads((state / FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    if present.state == "running" and not runs_still(present.pid):
        present.state = "interrupted"
    return present


def runs_still(pid: int) -> bool:
    """Return whether there is a process of this number."""
    return Path(f"/proc/{pid}").exists()


def part_of(present: Present, site: str, *, revoked: bool = False) -> str:
    """Say in a few words what a site does in the run; empty where it has no part or the run is over.

    Args:
        revoked: Whether the coordinator has revoked its key.
    """
    if present.state != "running" or revoked:
        return ""
    if site in present.lost and site in present.stopped:
        return stopped_at(present.stopped[site])
    if site in present.lost:
        return "lost, may come back"
    if site in present.waiting_for:
        phase = PHASES.get(present.phase, present.phase)
        return "waiting for its answer" if present.phase == "roll call" else f"at work ({phase})"
    return "has answered" if site in present.sites else ""


def note_run(state: Path, present: Present) -> None:
    """Add the state of a run to the history in ``state``, a folder of the coordinator."""
    with (state / HISTORY).open("a", encoding="utf-8") as file:
        file.write(json.dumps({**asdict(present), "noted": time.time()}) + "\n")


def runs_led(state: Path) -> list[dict[str, Any]]:
    """Return every run that was begun or resumed, oldest first: the last line of each, with ``ended`` and ``there``.

    ``ended`` is Unix time, None of a run that still runs or whose process was killed. ``there`` says whether its folder
    still lies where it was written.
    """
    try:
        lines = (state / HISTORY).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    last: dict[tuple[str, float], dict[str, Any]] = {}
    for line in lines:
        try:
            record = json.loads(line)
            last[record["run_folder"], record["began"]] = record
        except (ValueError, KeyError, TypeError):
            continue  # cut off by a full disk or a kill
    return [_led(record) for record in last.values()]


def _led(record: Mapping[str, Any]) -> dict[str, Any]:
    ended = record["state"] != "running"
    state = record["state"] if ended or runs_still(record["pid"]) else "interrupted"
    shown = {name: record[name] for name in ("name", "run_folder", "began", "round", "rounds", "sites", "last_error")}
    there = (Path(record["run_folder"]) / "events.jsonl").is_file()
    return {**shown, "state": state, "ended": record["noted"] if ended else None, "there": there}
