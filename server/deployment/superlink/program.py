"""The SuperLink's process: two ports on one storage.

Hospitals reach one port, :mod:`server.deployment.superlink.fleet.server`, which speaks Flower's Fleet API. The other is
on 127.0.0.1 and for the coordinator's own programs, :mod:`server.deployment.superlink.loopback.service`.

    python -m server.deployment.superlink.program --state FOLDER --fleet ADDRESS --loopback ADDRESS ...
"""

import argparse
import logging
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from common.system.stopping import end_with_starter
from server.deployment.superlink.fleet.server import serve_hospitals
from server.deployment.superlink.local.database import FILE
from server.deployment.superlink.local.process import CLOCK, OBJECTS
from server.deployment.superlink.local.steady_clock import clock
from server.deployment.superlink.loopback.secret import SECRET, secret_of
from server.deployment.superlink.loopback.service import serve_loopback
from server.deployment.superlink.objects.files import ObjectFiles
from server.deployment.superlink.port_guard.guard import Guard
from server.deployment.superlink.port_guard.strangers import Limits
from server.deployment.superlink.storage.storage import Storage

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
    secret = secret_of(state / SECRET)
    certificates = given.authority.read_bytes(), given.certificate.read_bytes(), given.key.read_bytes()
    storage = Storage.open(state / FILE, ObjectFiles(state / OBJECTS), clock(state / CLOCK))
    guard = Guard(Limits(given.connections, given.connections_per_address))
    hospitals, _ = serve_hospitals(given.fleet, storage, certificates, state, guard)
    programs, _ = serve_loopback(given.loopback, storage, certificates, secret)
    stop.wait()
    storage.messages.arrivals.close()
    for ended in [server.stop(GRACE_S) for server in (hospitals, programs)]:
        ended.wait()
    guard.stop()
    storage.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--state", "--authority", "--certificate", "--key"):
        parser.add_argument(name, type=Path, required=True)
    for name in ("--fleet", "--loopback"):
        parser.add_argument(name, required=True)
    for name in ("--connections", "--connections-per-address"):
        parser.add_argument(name, type=int, required=True)
    return parser


if __name__ == "__main__":
    main()
