"""What the present run is doing, as it is written down for ``flwr-server status`` and the live view."""

import json
from dataclasses import dataclass, field
from pathlib import Path

FILE = "present.json"
PHASES = {"train": "training", "evaluate": "evaluation", "test": "test", "roll call": "roll call"}
"""Phase of a round -> its name on pages and in messages."""


@dataclass
class Present:
    """``state/present.json``.

    Attributes:
        state: ``running``, ``done``, ``stopped`` or ``interrupted``.
        phase: ``roll call``, ``train``, ``evaluate``, ``test``.
        waiting_for: Sites that have not replied; ``lost`` are those of them that give no sign of life.
        stopped: Those of the lost that said that they leave -> when their operators stopped them.
        deadline: Unix time at which the run goes on without them.
        seconds_left: Of the run, by the pace so far.
        left_out: Site -> why its reply last did not count, and in which round.
        far: Site -> why its update was last found far longer than the others', and in which round.
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
    waiting_for: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    stopped: dict[str, str] = field(default_factory=dict)
    deadline: float = 0.0
    seconds_left: float | None = None
    left_out: dict[str, str] = field(default_factory=dict)
    far: dict[str, str] = field(default_factory=dict)
    last_error: str = ""
    last_error_time: str = ""


def read_present(state: Path) -> Present | None:
    """What the last run did, or does; None where there was none. A run whose process is gone was interrupted."""
    try:
        present = Present(**json.loads((state / FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    if present.state == "running" and not Path(f"/proc/{present.pid}").exists():
        present.state = "interrupted"
    return present


def part_of(present: Present, site: str) -> str:
    """What a site does in the run, in a few words; empty where it has no part or the run is over."""
    if present.state != "running":
        return ""
    if site in present.lost and site in present.stopped:
        return f"stopped by its operator at {present.stopped[site]}"
    if site in present.lost:
        return "lost, may come back"
    if site in present.waiting_for:
        phase = PHASES.get(present.phase, present.phase)
        return "waiting for its answer" if present.phase == "roll call" else f"at work ({phase})"
    return "has answered" if site in present.sites else ""
