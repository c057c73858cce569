"""Flower's object store with the bytes in files; SQLite keeps the trees of objects and which of them are there."""

import hashlib
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.object_store.object_store import NoObjectInStoreError
from flwr.supercore.object_store.sql_object_store import SqlObjectStore
from flwr.supercore.state.schema.objectstore_models import StoredObject
from flwr.supercore.utils import uint64_to_int64
from sqlalchemy import Connection, select
from sqlalchemy.orm import Session

from server.deployment.superlink.objects.files import ObjectFiles, is_name

AT_ONCE = 500
"""Values in one SQL statement."""
_database = threading.RLock()


class OneAtATime:
    """Sessions of SQLite one after the other: its own way of waiting is to sleep for up to 100 ms."""

    @contextmanager
    def session(self) -> Iterator[Session]:
        with _database, super().session() as session:  # type: ignore[misc]
            yield session


class ObjectStore(OneAtATime, SqlObjectStore):
    """What Flower asks object by object, through SQLAlchemy's ORM, is asked once for a whole tree."""

    files: ObjectFiles  # set by the SuperLink's process

    def initialize(self, *arguments: Any, **options: Any) -> Any:
        found = super().initialize(*arguments, **options)
        self._verify_files()
        return found

    def preregister(self, run_id: int, object_tree: ObjectTree) -> list[str]:
        """Note a tree of objects; return the names of those that are not there yet, neither noted nor as a file.

        Raises:
            ValueError: If a name is no SHA-256, or an object has other children than it was said to have before.
        """
        nodes = iterate_object_tree(object_tree)
        children = {node.object_id: [child.object_id for child in node.children] for node in nodes}
        for name, below in children.items():
            if not is_name(name):
                raise ValueError(f"Invalid object ID format: {name}")
            if len(below) != len(set(below)):
                raise ValueError(f"Object {name} has duplicate children.")
        with self.session() as session:
            sql = session.connection()
            rows = _rows(sql, "SELECT object_id, is_available FROM objects", "object_id", children)
            there: dict[str, int] = dict(rows)
            before: dict[str, set[str]] = {name: set() for name in there}
            for parent, child in _rows(sql, "SELECT parent_id, child_id FROM object_children", "parent_id", there):
                before[parent].add(child)
            for name, linked in before.items():
                if linked != set(children[name]):
                    raise ValueError(f"Object {name} was preregistered with different children.")
            new = [name for name in children if name not in there]
            links = [(name, child) for name in new for child in children[name]]
            there |= {name: int(self.files.has(name)) for name in new}
            row = "INSERT INTO objects (object_id, content, is_available, ref_count) VALUES (?, x'', ?, 0)"
            _many(sql, row, [(name, there[name]) for name in new])
            _many(sql, "INSERT INTO object_children (parent_id, child_id) VALUES (?, ?)", links)
            referred = "UPDATE objects SET ref_count = ref_count + 1 WHERE object_id = ?"
            _many(sql, referred, [(child,) for _, child in links])
            of_run = [(uint64_to_int64(run_id), name) for name in children]
            _many(sql, "INSERT OR IGNORE INTO run_objects (run_id, object_id) VALUES (?, ?)", of_run)
        return [name for name in children if not there.get(name)]

    def put(self, object_id: str, object_content: bytes) -> None:
        """Store bytes under the hash that names them.

        Raises:
            ValueError: If they have another.
            NoObjectInStoreError: If nobody has announced them.
        """
        with self.session() as session:
            there = "UPDATE objects SET content = x'', is_available = 1 WHERE object_id = ?"
            if not session.connection().exec_driver_sql(there, (object_id,)).rowcount:
                raise NoObjectInStoreError(f"object {object_id} was not announced")
            if object_content:
                if hashlib.sha256(object_content).hexdigest() != object_id:
                    raise ValueError(f"object {object_id} has another content")
                self.files.write(object_id, object_content)
            elif not self.files.has(object_id):  # empty: anyone who announced it has put the file there
                raise ValueError(f"object {object_id} was announced and is not there")

    def get(self, object_id: str) -> bytes | None:
        content = self.files.read(object_id)
        return content if content is not None else super().get(object_id)

    def delete(self, object_id: str) -> None:
        """Remove an object that nothing refers to, and what only it referred to."""
        with self.session() as session:
            sql, names = session.connection(), [object_id]
            while names:
                name = names.pop()
                below = sql.exec_driver_sql("SELECT child_id FROM object_children WHERE parent_id = ?", (name,))
                children = [str(child) for (child,) in below]
                gone = sql.exec_driver_sql("DELETE FROM objects WHERE object_id = ? AND ref_count = 0", (name,))
                if not gone.rowcount:
                    continue
                released = "UPDATE objects SET ref_count = ref_count - 1 WHERE object_id = ? AND ref_count > 0"
                _many(sql, released, [(child,) for child in children])
                names += children
                self.files.remove(name)

    def clear(self) -> None:
        super().clear()
        self.files.clear()

    def _verify_files(self) -> None:
        """Remove what a crash of the machine left half-written or unreferenced; it counts as not yet arrived."""
        with self.session() as session:
            known = {str(object_id) for object_id in session.scalars(select(StoredObject.object_id))}
            self.files.keep_only(known)
            there = self.files.names()
            missing = [(object_id,) for object_id in known - there]
            _many(session.connection(), "UPDATE objects SET is_available = 0 WHERE object_id = ?", missing)


def _rows(sql: Connection, query: str, column: str, values: Iterable[str]) -> Iterator[Any]:
    """The rows whose ``column`` has one of ``values``."""
    wanted = list(values)
    for start in range(0, len(wanted), AT_ONCE):
        part = tuple(wanted[start : start + AT_ONCE])
        yield from sql.exec_driver_sql(f"{query} WHERE {column} IN ({', '.join('?' * len(part))})", part)


def _many(sql: Connection, statement: str, rows: list[tuple[Any, ...]]) -> None:
    if rows:
        sql.exec_driver_sql(statement, rows)
