"""The SuperLink's process: Flower's own, with three of its costs taken out.

Flower 1.39 keeps the content of messages inside SQLite, asks SQLite for a run's status and a node's key once for every
5 MiB, and counts traffic there; SQLite's writers then sleep waiting for one another. What a round takes instead is in
``docs/benchmarks.md``. What survives a crash stays the same: registrations, runs and messages in the database, content
in files named by their SHA-256 beside it, verified at the next start.

    python -m server.superlink.program --objects FOLDER --clock FILE (the arguments of flower-superlink)
"""

import importlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import grpc
from flwr.proto.fleet_pb2_grpc import add_FleetServicer_to_server
from flwr.server.superlink.fleet.grpc_rere.fleet_servicer import FleetServicer
from flwr.server.superlink.linkstate import linkstate_factory
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.supercore.object_store import object_store_factory
from flwr.supercore.run import RunStatus

from server import hello
from server.superlink.object_files import ObjectFiles
from server.superlink.object_service import handlers
from server.superlink.object_store import ObjectStore, OneAtATime
from server.superlink.reply_bounds import LARGEST_CALL
from server.superlink.steady_clock import OF_THE_SUPERLINK, set_steady

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


class _WithOurHandlers:
    """A gRPC server to which Flower adds its methods, two of them replaced."""

    def __init__(self, server: grpc.Server, ours: Mapping[str, Any]) -> None:
        self._server, self._ours = server, ours

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """The registered ones below are the same methods, found first."""

    def add_registered_method_handlers(self, service: str, methods: Mapping[str, Any]) -> None:
        merged = {**methods, **self._ours}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, merged),))
        self._server.add_registered_method_handlers(service, merged)


def add_servicer(servicer: FleetServicer, server: grpc.Server) -> None:
    """Flower's ``add_FleetServicer_to_server`` with our way for the bytes, and with what sites may ask beforehand."""
    server.add_generic_rpc_handlers(
        (hello.handler(lambda key: servicer.state_factory.state().get_node_id_by_public_key(key)),)
    )
    ours = handlers(servicer, ObjectStore.files, lambda name: name in servicer.objectstore_factory.store())
    add_FleetServicer_to_server(servicer, _WithOurHandlers(server, ours))


def _own_argument(name: str) -> Path:
    """Take one of ours from the command line; Flower knows it not."""
    place = sys.argv.index(name)
    value = sys.argv[place + 1]
    del sys.argv[place : place + 2]
    return Path(value)


def main() -> None:
    """Put ours in the place of Flower's, and run its program."""
    ObjectStore.files = ObjectFiles(_own_argument("--objects"))
    set_steady(OF_THE_SUPERLINK, _own_argument("--clock"))
    vars(linkstate_factory)["SqlLinkState"] = LinkState
    vars(object_store_factory)["SqlObjectStore"] = ObjectStore
    vars(superlink_command)["GRPC_MAX_MESSAGE_LENGTH"] = LARGEST_CALL
    vars(superlink_command)["add_FleetServicer_to_server"] = add_servicer
    superlink_command.flower_superlink()


if __name__ == "__main__":
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    main()
