"""The SuperLink's process: Flower's own, with three of its costs taken out.

Flower keeps the content of messages inside SQLite, asks SQLite for a run's status and a node's key once for every
5 MiB, and counts traffic there; SQLite's writers then sleep waiting for one another. What a round takes instead is in
``docs/benchmarks.md``. What survives a crash stays the same: registrations, runs and messages in the database, content
in files named by their SHA-256 beside it, verified at the next start.

The port for hospitals is served by us, :mod:`server.deployment.superlink.fleet.server`: Flower 1.39 has one of its own,
1.40 to 1.42 only where an environment variable asks for it, and a later release may have none.

    python -m server.deployment.superlink.program --state FOLDER --connections N --connections-per-address N ...

The rest are the arguments of flower-superlink.
"""

import importlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from flwr.server.superlink.linkstate import linkstate_factory
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.supercore.object_store import object_store_factory
from flwr.supercore.run import RunStatus

from server.deployment.superlink.fleet.server import FleetServer
from server.deployment.superlink.local.loopback import ask_for_secret
from server.deployment.superlink.local.process import CLOCK, OBJECTS
from server.deployment.superlink.local.steady_clock import OF_THE_SUPERLINK, set_steady
from server.deployment.superlink.objects.files import ObjectFiles
from server.deployment.superlink.objects.store import ObjectStore, OneAtATime
from server.deployment.superlink.port_guard.guard import Guard
from server.deployment.superlink.port_guard.strangers import Limits

FRESH_S = 1.0
"""For how long a run's status or a node's key is taken as it was: a revoked site is refused after at most so long."""

superlink_command = importlib.import_module("flwr.superlink.cli.flower_superlink")  # a function has its name too
V = TypeVar("V")


class LinkState(OneAtATime, SqlLinkState):
    """Flower's state that does not ask the database the same thing for every object."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._kept: dict[Any, tuple[float, Any]] = {}
        self._cleaned = 0.0

    def get_run_status(self, run_ids: set[int]) -> dict[int, RunStatus]:
        return self._fresh(("run", frozenset(run_ids)), lambda: SqlLinkState.get_run_status(self, run_ids))

    def get_node_id_by_public_key(self, public_key: bytes) -> int | None:
        return self._fresh(("node", public_key), lambda: SqlLinkState.get_node_id_by_public_key(self, public_key))

    def store_traffic(self, run_id: int, *, bytes_sent: int, bytes_recv: int) -> None:
        """Not counted here: ``summary.json`` has the bytes of every site."""

    def _cleanup_expired_task_tokens(self) -> None:
        if time.monotonic() - self._cleaned > FRESH_S:
            self._cleaned = time.monotonic()
            super()._cleanup_expired_task_tokens()

    def _fresh(self, key: Any, ask: Callable[[], V]) -> V:
        when, value = self._kept.get(key, (0.0, None))
        if value is None or time.monotonic() - when > FRESH_S:
            value = ask()
            self._kept[key] = (time.monotonic(), value)
            if len(self._kept) > 10_000:
                self._kept.clear()
        return value  # type: ignore[no-any-return]


def _own_argument(name: str) -> str:
    """Take one of ours from the command line; Flower knows it not."""
    place = sys.argv.index(name)
    value = sys.argv[place + 1]
    del sys.argv[place : place + 2]
    return value


def with_hospital_link(hospitals: FleetServer) -> type[Any]:
    """Flower's services with our port for hospitals in the place of its own, on the same database and objects."""

    class Lifespan(superlink_command.SuperLinkLifespan):  # type: ignore[misc, name-defined]
        """Begins and ends with Flower's HTTP server."""

        link, _open = hospitals, None

        def startup(self) -> None:
            super().startup()
            config = self.config
            stores = self.state_factory, self.objectstore_factory
            self._open = hospitals.run(config.fleet_api_address, *stores, config.certificates)

        def shutdown(self) -> None:
            if self._open:  # not where the port is in use
                self._open.stop(grace=1)
            super().shutdown()

        def _start_fleet_api(self) -> None:
            """Flower's own port stays closed."""

    return Lifespan


def main() -> None:
    """Put ours in the place of Flower's, and run its program."""
    state = Path(_own_argument("--state"))
    guard = Guard(Limits(int(_own_argument("--connections")), int(_own_argument("--connections-per-address"))))
    ObjectStore.files = ObjectFiles(state / OBJECTS)
    set_steady(OF_THE_SUPERLINK, state / CLOCK)
    vars(linkstate_factory)["SqlLinkState"] = LinkState
    vars(object_store_factory)["SqlObjectStore"] = ObjectStore
    vars(superlink_command)["SuperLinkLifespan"] = with_hospital_link(FleetServer(state, ObjectStore.files, guard))
    ask_for_secret(state)
    superlink_command.flower_superlink()


if __name__ == "__main__":
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    main()
