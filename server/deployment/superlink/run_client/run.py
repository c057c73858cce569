"""One run on the SuperLink: begun, its Grid lent, signs of life given, its end told.

Our ServerApp runs in the process that leads. A SuperLink that dies and comes back costs nothing but time:
registrations, messages and the run are in its database.
"""

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import NoReturn

from common.wire.fleet_protocol import COORDINATOR
from common.wire.flower_objects import set_identity
from server.coordinator.admission import members
from server.coordinator.authority import signing_identity
from server.coordinator.connections import read_sign_offs
from server.coordinator.folder import Coordinator
from server.deployment.superlink.control.client import (
    GIVEN_UP,
    LINK_PATIENCE_S,
    Control,
    RunLost,
    SuperLinkGone,
    flower_key,
)
from server.deployment.superlink.local.process import clock_file, object_folder
from server.deployment.superlink.local.steady_clock import clock
from server.deployment.superlink.objects.files import ObjectFiles
from server.deployment.superlink.run_client.network_grid import NetworkGrid
from server.deployment.superlink.run_client.signing import Addressee, Signing

HEARTBEAT_EVERY_S = 10.0
LOST_SIGNAL = signal.SIGUSR1
"""By which the thread that gives signs of life interrupts the one that leads."""


@contextmanager
def run_on(coordinator: Coordinator) -> Iterator["NetworkGrid"]:
    """Begin a run on the SuperLink, and lend its Grid; tell the SuperLink when it is over.

    Raises:
        SuperLinkGone: If the SuperLink stays away.
        RunLost: If it has given the run up.
    """
    logging.getLogger("flwr").setLevel(logging.CRITICAL)  # errors still come as exceptions
    with closing(Control(coordinator, patience_s=LINK_PATIENCE_S)) as control:
        run, left = control.begin_run()
        set_identity(COORDINATOR, run)
        signing = Signing(*signing_identity(coordinator), lambda: _addressees(coordinator, control))
        files = ObjectFiles(object_folder(coordinator))
        stop = threading.Event()
        signal.signal(LOST_SIGNAL, _lost)
        heart = threading.Thread(target=_beat, args=(coordinator, run, stop), name="heartbeat", daemon=True)
        heart.start()
        try:
            grid = NetworkGrid(
                control,
                run,
                files=files,
                signing=signing,
                left=left,
                clock=clock(clock_file(coordinator)),
                signed_off=partial(read_sign_offs, coordinator.state),
            )
            yield grid
            grid.close()
        finally:
            stop.set()
            control.be_impatient()
            try:
                control.end_run(run)
            except (SuperLinkGone, RunLost):
                logging.getLogger(__name__).info("the SuperLink did not receive that run %s is over", run)


def _addressees(coordinator: Coordinator, control: Control) -> dict[int, Addressee]:
    """The sites that may take part, by node: by the key in the coordinator's files, not by the name in the database."""
    admitted = {flower_key(site.public_key): site for site in members(coordinator).values()}
    found = ((node.node_id, admitted.get(node.public_key)) for node in control.nodes())
    return {node: Addressee(site.site, site.public_key) for node, site in found if site is not None}


def _beat(coordinator: Coordinator, run: int, stop: threading.Event) -> None:
    """Give signs of life, on a connection of this thread's own; interrupt the main thread where the run is lost."""
    with closing(Control(coordinator)) as control:
        while not stop.wait(HEARTBEAT_EVERY_S):
            try:
                known = control.heartbeat(run)
            except (SuperLinkGone, OSError):
                continue
            if not known and not stop.is_set():
                os.kill(os.getpid(), LOST_SIGNAL)
                return


def _lost(number: int, frame: object) -> NoReturn:
    signal.signal(LOST_SIGNAL, signal.SIG_IGN)
    raise RunLost(GIVEN_UP)
