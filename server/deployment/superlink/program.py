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
from polyclinic.server.deployment.superlink.process import CLOCK, OBJECTS, open_shared_steady_clock

_log = logging.getLogger(__name__)

OTHER_FILES = 256
"""Open files of the SuperLink beside hospitals' connections: objects, database, log, gRPC's own."""
RELEASE_MEMORY_EVERY_S = 30.0
GRACE_S = 1.0
"""Time for calls in progress when the process is told to stop."""


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
    files, clock = ObjectFileStore(state / OBJECTS), open_shared_steady_clock(state / CLOCK)
    storage = SuperLinkStorage.open_storage(state / DATABASE_FILE, files, clock)
    connections = count_possible_connections(options.connections)
    hospitals, _ = start_server_for_hospitals(options.fleet, storage, certificates, state, connections)
    programs = start_control_server(ControlSocketPath(state).grpc_address, storage)
    while not stop.wait(RELEASE_MEMORY_EVERY_S):
        release_free_memory()  # after a flood of connections the allocator keeps tens of megabytes
    storage.messages.arrivals.close()
    for ended in [server.stop(GRACE_S) for server in (hospitals, programs)]:
        ended.wait()
    storage.close()


def count_possible_connections(connections: int) -> int:
    """Return how many of ``connections`` fit into the limit of open files, at least 1; log a warning if not all do."""
    room = raise_descriptor_limit() - OTHER_FILES
    if room < connections:
        problem = (
            "only %d connections of hospitals fit under this account's limit of open files, not %d; raise ulimit -n"
        )
        _log.warning(problem, max(room, 1), connections)
    return max(min(connections, room), 1)


if __name__ == "__main__":
    main()
