"""The SuperLink's database: one file of SQLite, written through; everything is read from memory.

A change is written before it is made in memory and before it is answered. A process that is killed has lost nothing
that it answered. A machine that loses its power may lose the last changes; runs go on from their last checkpoint then.
"""

import sqlite3
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

OURS, RELEASE = 0x504F4C59, 1
"""SQLite's ``application_id`` and ``user_version`` of a database that this release can read."""
_TABLES = (
    "CREATE TABLE sites (node TEXT PRIMARY KEY, name TEXT, key BLOB, state TEXT, until REAL)",
    "CREATE TABLE runs (run TEXT PRIMARY KEY, is_over INTEGER)",
    """CREATE TABLE messages (root TEXT PRIMARY KEY, node TEXT, run TEXT, is_reply INTEGER, partner TEXT, expires REAL,
    envelope BLOB, tree BLOB, handed INTEGER, released INTEGER, withdrawn INTEGER)""",
    f"PRAGMA application_id = {OURS}",
    f"PRAGMA user_version = {RELEASE}",
)


class Database:
    """One connection, for all threads.

    Attributes:
        lock: Held while something changes, for well under a millisecond; reading memory does not need it.
    """

    def __init__(self, path: Path) -> None:
        self.lock = threading.RLock()
        self._sql = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        weakref.finalize(self, self._sql.close)
        self._sql.execute("PRAGMA journal_mode=WAL")
        self._sql.execute("PRAGMA synchronous=NORMAL")
        if not self.read("SELECT 1 FROM sqlite_master"):
            self.write(*((statement, ()) for statement in _TABLES))
        self._sql.execute("SELECT count(*) FROM messages").fetchall()  # holds others' exclusive locks off from now on

    def close(self) -> None:
        """Close the connection."""
        with self.lock:
            self._sql.close()

    def read(self, query: str) -> list[Any]:
        """Return all rows."""
        with self.lock:
            return self._sql.execute(query).fetchall()

    def write(self, *statements: tuple[str, tuple[Any, ...]]) -> None:
        """Execute all of these or none.

        Raises:
            sqlite3.Error: If the disk is full, for instance; then nothing has changed.
        """
        with self.lock:
            self._sql.execute("BEGIN IMMEDIATE")
            try:
                for statement, values in statements:
                    self._sql.execute(statement, values)
                self._sql.execute("COMMIT")
            except BaseException:
                if self._sql.in_transaction:
                    self._sql.execute("ROLLBACK")
                raise


def identity_of(path: Path) -> Iterator[int]:
    """The application and the release that a database names, both 0 where it names none.

    Raises:
        sqlite3.Error: If it cannot be read.
    """
    connection = sqlite3.connect(path, timeout=5)
    try:
        for pragma in ("application_id", "user_version"):
            yield int(connection.execute(f"PRAGMA {pragma}").fetchone()[0])
    finally:
        connection.close()
