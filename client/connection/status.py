"""What a site is doing, for a person at the terminal, for ``flwr-client status`` and for a container's health check.

The status is served on loopback over plain HTTP: it holds names, counts and times, nothing of a patient or a model.
"""

import contextlib
import datetime as dt
import http.client
import http.server
import json
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from common.errors import BadInput, Fault
from common.security.identity import split_address
from common.system.files import write_atomically
from common.system.plain_text import at_terminal, shown_lines

STALE_S = 300.0
"""Without a sign from the coordinator for so long, a site that does not train is not healthy."""
ADDRESS_FILE = "health-address"


@dataclass
class Status:
    """The present, in words that stand in ``status --json``.

    Attributes:
        state: ``starting``, ``connecting``, ``waiting`` (for work), ``working``, or ``stopped``.
        phase: What the work is: ``roll call``, ``train``, ``evaluate``, or the ``test`` that ends a run.
        finished: When the test was answered, and so the run is over for this site; empty before.
        rounds_done: Rounds trained since this process started.
        seconds_left: Of the run, from the pace so far.
        last_contact: Unix time of the coordinator's last answer.
        privacy: ``epsilon`` of all runs so far (None: some reply had no noise), at ``delta``, and the ``budget``, if
            any; empty before the first run with privacy of a site without one.
        coordinator_release: As the coordinator named it when this site connected; empty where it did not.
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

    def failed(self, reason: str) -> None:
        """Note an error; it stays visible until the next one. Words of the coordinator in it become harmless."""
        self.last_error = shown_lines(reason)
        self.last_error_time = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")

    @property
    def healthy(self) -> bool:
        """Whether the site trains, or was in touch with the coordinator lately."""
        return self.state in ("starting", "working") or time.time() - self.last_contact < STALE_S

    def as_json(self) -> dict[str, Any]:
        return {"healthy": self.healthy, **asdict(self)}


class HealthServer:
    """``GET /health``: 200 and the status where healthy, else 503 and the status."""

    def __init__(self, status: Status, address: str, state: Path) -> None:
        host, port = address.rsplit(":", 1)
        handler = _handler(status, _folder(state))
        self._server = http.server.ThreadingHTTPServer((host.strip("[]"), int(port)), handler)
        self._address_file = state / ADDRESS_FILE

    def __enter__(self) -> "HealthServer":
        host, port = self._server.server_address[:2]
        write_atomically(self._address_file, f"{host!s}:{port}".encode(), durable=False)
        threading.Thread(target=self._server.serve_forever, name="health", daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._address_file.unlink(missing_ok=True)


def _handler(status: Status, folder: str) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path in ("/health", "/")
            answer = status.as_json() | {"folder": folder} if found else {"error": "ask for /health"}
            body = json.dumps(answer).encode()
            self.send_response(404 if not found else 200 if status.healthy else 503)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            """Write no line for a request."""

    return Handler


@contextlib.contextmanager
def health_server(status: Status, address: str, state: Path) -> Iterator[None]:
    """Serve the status while the program runs; nothing where ``address`` is empty.

    Raises:
        BadInput: If the port is taken.
    """
    if not address:
        yield
        return
    try:
        server = HealthServer(status, address, state)
    except OSError as error:
        remedy = 'Name another port, or health = "" for none.'
        raise BadInput([Fault("site.toml: health", f"{address}: {error.strerror}.", remedy)]) from None
    with server:
        yield


def in_words(found: Mapping[str, Any]) -> str:
    """The answer of ``status`` for a person."""
    lines = [f"site {found['site']}: {found['state']}"]
    if found["phase"]:
        lines[0] += f" ({found['phase']})"
    if found["finished"]:
        lines.append(f"last run {found['run']}: done {found['finished']}")
    elif found["run"]:
        left = found["seconds_left"]
        pace = "" if left is None else f"; about {left / 60:.0f} min left"
        where = f"round {found['round']} of {found['rounds']}" if found["rounds"] else "no round yet"
        lines.append(f"run {found['run']}: {where}{pace}")
    age = time.time() - found["last_contact"]
    release = f"; it runs release {found['coordinator_release']}" if found["coordinator_release"] else ""
    lines.append(f"coordinator {found['coordinator']}: last answer {age:.0f} s ago{release}")
    if spent := found["privacy"]:
        cost = "without bound" if spent["epsilon"] is None else f"{spent['epsilon']:.2f}"
        budget = "" if spent["budget"] is None else f" of {spent['budget']:g}"
        lines.append(f"privacy spent, over all runs: epsilon {cost}{budget} at delta {spent['delta']:g}")
    if (days := found["certificate_days"]) is not None:
        lines.append(f"its certificate is valid for {days:.0f} more days")
    lines.append(
        f"last error: {found['last_error']} ({found['last_error_time']})" if found["last_error"] else "no error"
    )
    return at_terminal("\n".join(lines))


def _folder(state: Path) -> str:
    """Return the folder by which a site's process and the status command find one another."""
    return str(state.parent.resolve())


def asked(state: Path) -> Mapping[str, Any]:
    """Ask the running process of a site's folder.

    Raises:
        BadInput: If none runs there, or it does not answer.
    """
    try:
        host, port = split_address((state / ADDRESS_FILE).read_text(encoding="ascii"))
        with contextlib.closing(http.client.HTTPConnection(host, port, timeout=5)) as connection:
            connection.request("GET", "/health")
            answer = json.loads(connection.getresponse().read())
        if not isinstance(answer, dict) or answer.get("folder") != _folder(state):
            raise ValueError("somebody else has the port of a process that was killed")
    except (OSError, ValueError, http.client.HTTPException):
        remedy = (
            "Its log says whether it waits after a refusal; else start it with flwr-client start. "
            'With health = "" in site.toml it answers nobody.'
        )
        raise BadInput([Fault(str(state.parent), "no flwr-client answers for this folder.", remedy)]) from None
    return answer
