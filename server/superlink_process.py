"""The SuperLink's process: Flower's own, with three of its costs taken out.

Flower 1.39 keeps the content of messages inside SQLite, asks SQLite for a run's status and a node's key once for every
5 MiB, and counts traffic there; SQLite's writers then sleep waiting for one another. For three sites and a 44 MB model
a round takes 5.5 s that way and 1 s this way (``benchmarks/network.py``). What survives a crash stays the same:
registrations, runs and messages in the database, content in files named by their SHA-256 beside it, verified at the
next start.

    python -m server.superlink_process --objects FOLDER (the arguments of flower-superlink)
"""

import hashlib
import importlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import grpc
from flwr.proto.fleet_pb2_grpc import add_FleetServicer_to_server
from flwr.server.superlink.fleet.grpc_rere.fleet_servicer import FleetServicer
from flwr.server.superlink.linkstate import linkstate_factory
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.supercore.object_store import object_store_factory
from flwr.supercore.object_store.sql_object_store import SqlObjectStore
from flwr.supercore.run import RunStatus
from flwr.supercore.state.schema.objectstore_models import StoredObject
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from server.object_files import ObjectFiles
from server.object_service import handlers

FRESH_S = 1.0
"""For how long a run's status or a node's key is taken as it was: a revoked site is refused after at most so long."""

superlink_command = importlib.import_module("flwr.superlink.cli.flower_superlink")  # a function has its name too
V = TypeVar("V")
_database = threading.RLock()


class _OneAtATime:
    """Sessions of SQLite one after the other: its own way of waiting is to sleep for up to 100 ms."""

    @contextmanager
    def session(self) -> Iterator[Session]:
        with _database, super().session() as session:  # type: ignore[misc]
            yield session


class ObjectStore(_OneAtATime, SqlObjectStore):
    """Flower's store with the bytes in files; SQLite keeps the tree of objects and which are there."""

    files: ObjectFiles  # set by main()

    def initialize(self, *arguments: Any, **options: Any) -> Any:
        found = super().initialize(*arguments, **options)
        self._verify_files()
        return found

    def put(self, object_id: str, object_content: bytes) -> None:
        """Store bytes under the hash that names them.

        Raises:
            ValueError: If they have another.
        """
        if object_content:
            if hashlib.sha256(object_content).hexdigest() != object_id:
                raise ValueError(f"object {object_id} has another content")
            self.files.write(object_id, object_content)
        elif not self.files.has(object_id):  # empty: the coordinator's own process has put the file there
            raise ValueError(f"object {object_id} was announced and is not there")
        with self.session() as session:
            session.execute(
                update(StoredObject).where(StoredObject.object_id == object_id).values(content=b"", is_available=1)
            )

    def get(self, object_id: str) -> bytes | None:
        content = self.files.read(object_id)
        return content if content is not None else super().get(object_id)

    def delete(self, object_id: str) -> None:
        with self.session():
            super().delete(object_id)
            if object_id not in self:
                self.files.remove(object_id)

    def clear(self) -> None:
        super().clear()
        self.files.clear()

    def _verify_files(self) -> None:
        """Remove what a crash of the machine left half-written or unreferenced; it counts as not yet arrived."""
        with self.session() as session:
            known = {str(object_id) for object_id in session.scalars(select(StoredObject.object_id))}
            for object_id in self.files.damaged_or_not_in(known):
                self.files.remove(object_id)
            there = self.files.names()
            missing = [object_id for object_id in known if object_id not in there]
            for object_id in missing:
                session.execute(update(StoredObject).where(StoredObject.object_id == object_id).values(is_available=0))


class LinkState(_OneAtATime, SqlLinkState):
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
    """Flower's ``add_FleetServicer_to_server`` with our way for the bytes."""
    ours = handlers(servicer, ObjectStore.files, lambda name: name in servicer.objectstore_factory.store())
    add_FleetServicer_to_server(servicer, _WithOurHandlers(server, ours))


def main() -> None:
    """Put ours in the place of Flower's, and run its program."""
    place = sys.argv.index("--objects")
    ObjectStore.files = ObjectFiles(Path(sys.argv[place + 1]))
    del sys.argv[place : place + 2]
    vars(linkstate_factory)["SqlLinkState"] = LinkState
    vars(object_store_factory)["SqlObjectStore"] = ObjectStore
    vars(superlink_command)["add_FleetServicer_to_server"] = add_servicer
    superlink_command.flower_superlink()


if __name__ == "__main__":
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    main()
