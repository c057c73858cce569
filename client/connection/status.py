"""The status of a running ``flwr-client``, as a file for ``flwr-client status`` and for a container's health check.

``state/status.json`` has names, counts and times, and no data of patients or models. No port is opened.
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

from polyclinic.client.connection.preflight import is_client_running
from polyclinic.client.site.authority_record import read_authority_record
from polyclinic.client.site.budget import describe_privacy_status
from polyclinic.client.site.withdrawn import refuse_withdrawn_site
from polyclinic.common import __version__
from polyclinic.common.contract import CONTRACT_RUN
from polyclinic.common.errors import BadInput, Fault
from polyclinic.common.system.files import write_atomically
from polyclinic.common.system.plain_text import escape_for_terminal, make_printable_lines
from polyclinic.common.wire.versions import WIRE_VERSION

UNHEALTHY_AFTER_S = 300.0
"""Time without an answer of the coordinator after which a site that is not training is unhealthy."""
STATUS_FILE = "status.json"
POLL_INTERVAL_S = 0.5
"""Pause between two checks for a changed status."""
WRITE_INTERVAL_S = 10.0
"""Longest time between two writes of the file."""
HANGING_AFTER_S = 60.0
"""Age of the status file after which the program counts as hanging, or the disk as full."""


@dataclass
class ClientStatus:
    """The status of a site, with the field names of ``flwr-client status --json``.

    Attributes:
        state: ``starting``, ``connecting``, ``waiting`` (for a message), ``working``, or ``stopped``.
        phase: Kind of work: ``roll call``, ``train``, ``evaluate``, or the ``test`` at the end of a run.
        finished: UTC time (ISO 8601) at which this site answered the test, its last work for a run; empty before.
        rounds_done: Rounds trained since this process started.
        seconds_left: Estimate of the run's remaining time, from the pace so far.
        last_contact: Unix time of the coordinator's last answer.
        privacy: ``epsilon`` spent in all runs (None if some reply had no noise), its ``delta``, the ``budget`` (None
            without one), and more (:func:`polyclinic.client.training.privacy.make_privacy_status`). Empty if the site
            has no budget and took part in no run with privacy.
        authority_phrase: Phrase of the coordinator's authority, by the kit.
        coordinator_release: Release that the coordinator stated when this site connected; empty if it stated none.
        coordinator_wire: Newest wire version that the coordinator stated when this site connected; 0 if it stated none.
        wire: The newest wire version that this program speaks.
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
    privacy: Mapping[str, Any] = field(default_factory=dict)
    coordinator_release: str = ""
    authority_phrase: str = ""
    coordinator_wire: int = 0
    wire: int = WIRE_VERSION

    def record_last_error(self, reason: str) -> None:
        """Record the last error, without control characters, and its time."""
        self.last_error = make_printable_lines(reason)
        self.last_error_time = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")


def describe_other_wire_version(release: str, wire: int) -> str:
    """Return a sentence that names the side, site or coordinator, which has to update.

    Args:
        release: The coordinator's release.
        wire: The newest wire version of that release, which is one above or below this release's.
    """
    if wire > WIRE_VERSION:
        return (
            f"update this site: the coordinator runs release {release} (wire version {wire}), this site {__version__} "
            f"(wire version {WIRE_VERSION}), and the coordinator's release after that will refuse it"
        )
    return (
        f"the coordinator has to update: it runs release {release} (wire version {wire}), this site {__version__} "
        f"(wire version {WIRE_VERSION}), and the release after this one will refuse it"
    )


def is_client_healthy(status: Mapping[str, Any], now: float) -> bool:
    """Return True if the site starts or works, or the coordinator answered within ``UNHEALTHY_AFTER_S``."""
    return status["state"] in ("starting", "working") or now - status["last_contact"] < UNHEALTHY_AFTER_S


@contextlib.contextmanager
def keep_status_file_current(status: ClientStatus, state: Path) -> Iterator[None]:
    """Keep ``state/status.json`` up to date from a thread while the program runs; remove it at the end."""
    path = state / STATUS_FILE
    stop = threading.Event()
    _write_status_file(asdict(status), path)

    def write_changed_status() -> None:
        last = asdict(status)
        last_write = time.monotonic()
        while not stop.wait(POLL_INTERVAL_S):
            present = asdict(status)
            is_due = present != last or time.monotonic() - last_write > WRITE_INTERVAL_S
            # A status whose writing failed stays due.
            if is_due and _write_status_file(present, path):
                last = present
                last_write = time.monotonic()

    thread = threading.Thread(target=write_changed_status, name="status", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        path.unlink(missing_ok=True)


def _write_status_file(present: Mapping[str, Any], path: Path) -> bool:
    """Write the current status to its file; return False if the disk does not accept it.

    Readers notice a failure by the age of the file.
    """
    content = json.dumps({**present, "written": time.time()}).encode()
    with contextlib.suppress(OSError):  # a full disk must not end the program
        write_atomically(path, content, durable=False, private=True)
        return True
    return False


def read_client_status(state: Path) -> Mapping[str, Any]:
    """Read the status of the ``flwr-client`` that runs on a state folder.

    Returns:
        The fields of :class:`ClientStatus`, ``healthy``, and ``authority_confirmed``: the UTC time at which a person
        confirmed the phrase, or an empty text.

    Raises:
        BadInput: If no process runs on the folder, or its status file is older than :data:`HANGING_AFTER_S`.
    """
    if not is_client_running(state):
        refuse_withdrawn_site(state.parent, state)
        remedy = "Its log says whether it waits after a refusal; else start it with flwr-client start."
        raise BadInput([Fault(str(state.parent), "no flwr-client runs on this folder.", remedy)])
    try:
        present = dict(json.loads((state / STATUS_FILE).read_bytes()))
        age_s = time.time() - present.pop("written")
        present = asdict(ClientStatus(**present))
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        age_s = float("inf")
    # A file from the future is as wrong as an old one. A clock that was set back gets a new file in WRITE_INTERVAL_S.
    if not abs(age_s) <= HANGING_AFTER_S:
        problem = f"flwr-client runs on this folder and has not written {STATUS_FILE} for {HANGING_AFTER_S:.0f} s."
        remedy = "Look whether the disk is full; if it is not, the program hangs: restart it."
        raise BadInput([Fault(str(state.parent), problem, remedy)])
    record = read_authority_record(state)
    confirmed = record.confirmed if record and record.phrase == present["authority_phrase"] else ""
    return {"healthy": is_client_healthy(present, time.time()), **present, "authority_confirmed": confirmed}


def format_client_status(status: Mapping[str, Any]) -> str:
    """Format a status as the text that ``flwr-client status`` prints."""
    lines = [f"site {status['site']}: {status['state']}"]
    if status["phase"]:
        lines[0] += f" ({status['phase']})"
    if status["finished"]:
        lines.append(f"last run {status['run']}: done {status['finished']}")
    elif status["run"] == CONTRACT_RUN:
        lines.append("the coordinator asked what differs before a run; no round was begun")
    elif status["run"]:
        seconds_left = status["seconds_left"]
        pace = "" if seconds_left is None else f"; about {seconds_left / 60:.0f} min left"
        progress = f"round {status['round']} of {status['rounds']}" if status["rounds"] else "no round yet"
        lines.append(f"run {status['run']}: {progress}{pace}")

    age = time.time() - status["last_contact"]
    release = f"; it runs release {status['coordinator_release']}" if status["coordinator_release"] else ""
    lines.append(f"coordinator {status['coordinator']}: last answer {age:.0f} s ago{release}")
    if status["coordinator_wire"] not in (0, status["wire"]):
        lines.append(describe_other_wire_version(status["coordinator_release"], status["coordinator_wire"]))
    if status["authority_phrase"]:
        day = status["authority_confirmed"][:10]
        confirmed = f"confirmed on {day}" if day else "not confirmed yet"
        lines.append(f"its phrase: {status['authority_phrase']} ({confirmed})")
    if status["privacy"]:
        lines += describe_privacy_status(status["privacy"])

    days = status["certificate_days"]
    if days is not None:
        lines.append(f"its certificate is valid for {days:.0f} more days")
    if status["last_error"]:
        lines.append(f"last error: {status['last_error']} ({status['last_error_time']})")
    else:
        lines.append("no error")
    return escape_for_terminal("\n".join(lines))
