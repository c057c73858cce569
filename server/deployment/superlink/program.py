"""The SuperLink's process: a port for hospitals and a socket for the coordinator's programs, on one storage.

Hospitals reach :mod:`server.deployment.superlink.fleet.server`, which speaks Flower's Fleet API. The coordinator's own
programs reach :mod:`server.deployment.superlink.control.service`, over a Unix socket in the folder ``state``.

    python -m server.deployment.superlink.program --state FOLDER --fleet ADDRESS ...
"""

import argparse
import logging
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from common.system.resources import raise_descriptor_limit
from common.system.stopping import end_with_starter
from server.coordinator.control_socket import ControlSocket
from server.deployment.superlink.control.service import serve_programs
from server.deployment.superlink.fleet.server import serve_hospitals
from server.deployment.superlink.local.database import FILE
from server.deployment.superlink.local.process import CLOCK, OBJECTS
from server.deployment.superlink.local.steady_clock import clock
from server.deployment.superlink.objects.files import ObjectFiles
from server.deployment.superlink.port_guard.grpc_options import BACKSTOP
from server.deployment.superlink.port_guard.guard import Guard
from server.deployment.superlink.port_guard.strangers import Limits
from server.deployment.superlink.storage.storage import Storage

_log = logging.getLogger(__name__)

OTHER_FILES = 256
"""Open files of the SuperLink beside hospitals' connections: objects, database, log, gRPC's own."""
GRACE_S = 1.0
"""For calls that are going on when the process is told to stop."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until SIGTERM, or until the program that started it is gone."""
    end_with_starter()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    given = _parser().parse_args(arguments)
    state: Path = given.state
    certificates = given.authority.read_bytes(), given.certificate.read_bytes(), given.key.read_bytes()
    storage = Storage.open(state / FILE, ObjectFiles(state / OBJECTS), clock(state / CLOCK))
    guard = Guard(Limits(_fitting(given.connections), given.connections_per_address))
    hospitals, _ = serve_hospitals(given.fleet, storage, certificates, state, guard)
    programs = serve_programs(ControlSocket(state).grpc_address, storage)
    stop.wait()
    storage.messages.arrivals.close()
    for ended in [server.stop(GRACE_S) for server in (hospitals, programs)]:
        ended.wait()
    guard.stop()
    storage.close()


def _fitting(connections: int) -> int:
    """Return how many connections of hospitals fit beside the process's other open files."""
    room = (raise_descriptor_limit() - OTHER_FILES) // BACKSTOP
    if room < connections:
        problem = (
            "only %d connections of hospitals fit under this account's limit of open files, not %d; raise ulimit -n"
        )
        _log.warning(problem, max(room, 1), connections)
    return max(min(connections, room), 1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--state", "--authority", "--certificate", "--key"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--fleet", required=True)
    for name in ("--connections", "--connections-per-address"):
        parser.add_argument(name, type=int, required=True)
    return parser


if __name__ == "__main__":
    main()
