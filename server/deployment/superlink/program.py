"""The program of the SuperLink's process: a port for hospitals and a socket for the coordinator's own programs.

Hospitals connect to :mod:`polyclinic.server.deployment.superlink.fleet_server` (Flower's Fleet API). The coordinator's
programs connect to :mod:`polyclinic.server.deployment.superlink.control_service` by a Unix socket in the folder
``state``.

    python -m polyclinic.server.deployment.superlink.program --state FOLDER --fleet ADDRESS ...
"""

import argparse
import logging
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from polyclinic.common.system.resources import raise_descriptor_limit, release_free_memory
from polyclinic.common.system.stopping import end_with_parent_if_requested
from polyclinic.server.coordinator.state import ControlSocketPath
from polyclinic.server.deployment.superlink.control_service import start_control_server
from polyclinic.server.deployment.superlink.database import DATABASE_FILE
from polyclinic.server.deployment.superlink.fleet_server import start_server_for_hospitals
from polyclinic.server.deployment.superlink.messages import SuperLinkStorage
from polyclinic.server.deployment.superlink.object_store import ObjectFileStore
from polyclinic.server.deployment.superlink.process import CLOCK_FILE, OBJECTS_FOLDER, open_shared_steady_clock

_log = logging.getLogger(__name__)

OTHER_OPEN_FILES = 256
"""Open files of the SuperLink in addition to hospitals' connections: objects, database, log and files of gRPC."""
MEMORY_RELEASE_INTERVAL_S = 30.0
CALL_GRACE_S = 1.0
"""Time for which calls in progress may go on after a request to stop."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the SuperLink: serve calls until SIGTERM, or until the parent process has ended."""
    end_with_parent_if_requested()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--state", "--authority", "--certificate", "--key"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--fleet", required=True)
    parser.add_argument("--connections", type=int, required=True)
    options = parser.parse_args(arguments)
    state: Path = options.state
    certificates = options.authority.read_bytes(), options.certificate.read_bytes(), options.key.read_bytes()
    files = ObjectFileStore(state / OBJECTS_FOLDER)
    clock = open_shared_steady_clock(state / CLOCK_FILE)
    storage = SuperLinkStorage.open_storage(state / DATABASE_FILE, files, clock)
    connections = count_possible_connections(options.connections)
    hospital_server, _ = start_server_for_hospitals(options.fleet, storage, certificates, state, connections)
    control_server = start_control_server(ControlSocketPath(state).grpc_address, storage)
    while not stop.wait(MEMORY_RELEASE_INTERVAL_S):
        release_free_memory()  # after a flood of connections the allocator keeps tens of megabytes
    storage.messages.arrivals.close()
    stopped_events = [server.stop(CALL_GRACE_S) for server in (hospital_server, control_server)]
    for stopped in stopped_events:
        stopped.wait()
    storage.close()


def count_possible_connections(connections: int) -> int:
    """Return ``connections``, or fewer if the limit of open files is lower; log a warning in that case.

    The result is at least 1.
    """
    available = raise_descriptor_limit() - OTHER_OPEN_FILES
    if available < connections:
        problem = (
            "only %d connections of hospitals fit under this account's limit of open files, not %d; raise ulimit -n"
        )
        _log.warning(problem, max(available, 1), connections)
    return max(min(connections, available), 1)


if __name__ == "__main__":
    main()
