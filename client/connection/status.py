"""The status of a site for ``flwr-client status`` and a container's health check: a file that the program updates.

``state/status.json`` holds names, counts and times, nothing of a patient or a model. No port is opened for it.
"""

import contextlib
import datetime as dt
import json
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from client.connection.preflight import is_client_running
from common.errors import BadInput, Fault
from common.system.files import write_atomically
from common.system.plain_text import printable_lines, terminal_safe

STALE_S = 300.0
"""Time without an answer of the coordinator after which a site that does not train is unhealthy."""
FILE = "status.json"
LOOK_S, SIGN_S = 0.5, 10.0
"""Pause between two looks at the status, which is written when it has changed; longest time between two writes."""
SILENT_S = 60.0
"""Age of a status file from which the program counts as hanging, or the disk as full."""


@dataclass
class ClientStatus:
    """The status of a site, with the field names of ``status --json``.

    Attributes:
        state: ``starting``, ``connecting``, ``waiting`` (for work), ``working``, or ``stopped``.
        phase: Kind of work: ``roll call``, ``train``, ``evaluate``, or the ``test`` that ends a run.
        finished: Time at which the test was answered, so that the run is over for this site; empty before.
        rounds_done: Rounds trained since this process started.
        seconds_left: Estimate for the rest of the run, from the pace so far.
        last_contact: Unix time of the coordinator's last answer.
        privacy: ``epsilon`` of all runs so far (None: some reply had no noise), at ``delta``, and the ``budget``, if
            any; empty before the first run with privacy of a site without one.
        coordinator_release: Release that the coordinator named when this site connected; empty if it named none.
    """

    site: str
    state: str = "starting"
    coordinator: str = ""
    run: str = ""
    round: int = 0
    rounds: int = 0
    phase: str = ""
    finished: str = ""
    rounds_done: int = 0
    seconds_left: float | None = None
    certificate_days: float | None = None
    last_contact: float = field(default_factory=time.time)
    last_error: str = ""
    last_error_time: str = ""
    privacy: Mapping[str, float | None] = field(default_factory=dict)
    coordinator_release: str = ""

    def record_error(self, reason: str) -> None:
        """Record an error, which stays until the next one; control characters of the coordinator's text are removed."""
        self.last_error = printable_lines(reason)
        self.last_error_time = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")


def is_healthy(status: Mapping[str, Any], now: float) -> bool:
    """Return True if at Unix time ``now`` the site is training, or the coordinator has answered recently."""
    return status["state"] in ("starting", "working") or now - status["last_contact"] < STALE_S


@contextlib.contextmanager
def keep_status_file(status: ClientStatus, state: Path) -> Iterator[None]:
    """Keep ``state/status.json`` up to date while the program runs, by a thread; remove it at the end."""
    path, stop = state / FILE, threading.Event()
    _write_status(asdict(status), path)

    def update() -> None:
        last, written = asdict(status), time.monotonic()
        while not stop.wait(LOOK_S):
            present = asdict(status)
            if (present != last or time.monotonic() - written > SIGN_S) and _write_status(present, path):
                last, written = present, time.monotonic()

    thread = threading.Thread(target=update, name="status", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        path.unlink(missing_ok=True)


def _write_status(present: Mapping[str, Any], path: Path) -> bool:
    """Write a status to its file; return False if that failed. A reader then sees that the file is old."""
    content = json.dumps({**present, "written": time.time()}).encode()
    with contextlib.suppress(OSError):  # no room on the disk, or no descriptor: no reason to end
        write_atomically(path, content, durable=False, private=True)
        return True
    return False


def read_status(state: Path) -> Mapping[str, Any]:
    """Read the status of the running process of a site's folder.

    Returns:
        The fields of :class:`ClientStatus`, and ``healthy``.

    Raises:
        BadInput: If no process runs on the folder, or the process has not written its status for :data:`SILENT_S`.
    """
    if not is_client_running(state):
        remedy = "Its log says whether it waits after a refusal; else start it with flwr-client start."
        raise BadInput([Fault(str(state.parent), "no flwr-client runs on this folder.", remedy)])
    try:
        present = dict(json.loads((state / FILE).read_bytes()))
        age_s = time.time() - present.pop("written")
        present = asdict(ClientStatus(**present))
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        age_s = float("inf")
    if not abs(age_s) <= SILENT_S:  # a clock that was set back is followed by a new file within SIGN_S
        problem = f"flwr-client runs on this folder and has not written {FILE} for {SILENT_S:.0f} s."
        remedy = "Look whether the disk is full; if it is not, the program hangs: restart it."
        raise BadInput([Fault(str(state.parent), problem, remedy)])
    return {"healthy": is_healthy(present, time.time()), **present}


def format_status(status: Mapping[str, Any]) -> str:
    """Return the text of ``flwr-client status`` for a person."""
    lines = [f"site {status['site']}: {status['state']}"]
    if status["phase"]:
        lines[0] += f" ({status['phase']})"
    if status["finished"]:
        lines.append(f"last run {status['run']}: done {status['finished']}")
    elif status["run"]:
        seconds_left = status["seconds_left"]
        pace = "" if seconds_left is None else f"; about {seconds_left / 60:.0f} min left"
        where = f"round {status['round']} of {status['rounds']}" if status["rounds"] else "no round yet"
        lines.append(f"run {status['run']}: {where}{pace}")
    age = time.time() - status["last_contact"]
    release = f"; it runs release {status['coordinator_release']}" if status["coordinator_release"] else ""
    lines.append(f"coordinator {status['coordinator']}: last answer {age:.0f} s ago{release}")
    if spent := status["privacy"]:
        cost = "without bound" if spent["epsilon"] is None else f"{spent['epsilon']:.2f}"
        budget = "" if spent["budget"] is None else f" of {spent['budget']:g}"
        lines.append(f"privacy spent, over all runs: epsilon {cost}{budget} at delta {spent['delta']:g}")
    if (days := status["certificate_days"]) is not None:
        lines.append(f"its certificate is valid for {days:.0f} more days")
    lines.append(
        f"last error: {status['last_error']} ({status['last_error_time']})" if status["last_error"] else "no error"
    )
    return terminal_safe("\n".join(lines))
