"""The SuperLink's SQLite database: its content is read into memory at start, and every change is written through.

A change is written before it is made in memory and before its call is answered, so a killed process loses no answered
change. A power failure may lose the last changes; runs then continue from their last checkpoint.
"""

import datetime as dt
import sqlite3
import threading
import weakref
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from polyclinic.server.coordinator.folder import CoordinatorFolder

DATABASE_FILE = "superlink.db"
COMPANION_FILE_ENDINGS = ("-wal", "-shm", "-journal")
"""Endings of the other files that SQLite keeps beside a database."""
MIN_PAGE_BYTES = 512
"""Bytes of SQLite's smallest page; every database has at least one page."""
APPLICATION_ID = 0x504F4C59
"""SQLite's ``application_id`` of a database of Polyclinic's SuperLink."""
SCHEMA_VERSION = 1
"""SQLite's ``user_version`` of a database that this release can read."""
_DAMAGE_ERROR_CODES = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_PRIMARY_CODE_MASK = 0xFF
"""Mask of the lowest byte of a SQLite error code, which holds the kind of the error."""
_TABLES = (
    "CREATE TABLE sites (node TEXT PRIMARY KEY, name TEXT, key BLOB, state TEXT, until REAL)",
    "CREATE TABLE runs (run TEXT PRIMARY KEY, is_over INTEGER)",
    """CREATE TABLE messages (root TEXT PRIMARY KEY, node TEXT, run TEXT, is_reply INTEGER, partner TEXT, expires REAL,
    envelope BLOB, tree BLOB, handed INTEGER, released INTEGER, withdrawn INTEGER)""",
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {SCHEMA_VERSION}",
)
_ADDED_TABLES = ("CREATE TABLE IF NOT EXISTS releases (node TEXT PRIMARY KEY, wire INTEGER, release TEXT)",)
"""Tables that a later release added without a new schema version, because the earlier release ignores them."""


class SuperLinkDatabase:
    """A connection to the SuperLink's SQLite file, shared by all threads.

    Attributes:
        lock: Held during a change, for less than a millisecond. Code that only reads the copy in memory does not take
            the lock.
    """

    def __init__(self, path: Path) -> None:
        self.lock = threading.RLock()
        self._sql = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        weakref.finalize(self, self._sql.close)
        self._sql.execute("PRAGMA journal_mode=WAL")
        self._sql.execute("PRAGMA synchronous=NORMAL")
        if not self.query_rows("SELECT 1 FROM sqlite_master"):
            self.execute_in_transaction(*((statement, ()) for statement in _TABLES))
        self.execute_in_transaction(*((statement, ()) for statement in _ADDED_TABLES))
        self._sql.execute(
            "SELECT count(*) FROM messages"
        ).fetchall()  # takes a shared lock: no other process gets an exclusive one

    def close(self) -> None:
        """Close the connection."""
        with self.lock:
            self._sql.close()

    def query_rows(self, query: str) -> list[Any]:
        """Return all rows of a SQL query, while no other thread changes the database."""
        with self.lock:
            return self._sql.execute(query).fetchall()

    def execute_in_transaction(self, *statements: tuple[str, tuple[Any, ...]]) -> None:
        """Execute all these statements with their values in one transaction.

        Raises:
            sqlite3.Error: If the transaction fails, for instance on a full disk; then nothing has changed.
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


def set_aside_unusable_database(coordinator: CoordinatorFolder) -> str:
    """Rename a database that is damaged or was written by another release, so that the SuperLink creates a new one.

    No data is lost, because registrations are restored from ``sites/`` and runs from their own folders. A database that
    is only locked, or on a full disk, is not renamed. No SuperLink may run on the folder during the call.

    Returns:
        A sentence on the renaming for a person; empty if nothing was renamed.
    """
    path = coordinator.state_path / DATABASE_FILE
    kind = "damaged"
    problem = describe_database_damage(path)
    if not problem and path.exists():
        kind = "of-another-release"
        with suppress(sqlite3.Error), closing(sqlite3.connect(path, timeout=5)) as connection:
            pragmas = [connection.execute(f"PRAGMA {name}") for name in ("application_id", "user_version")]
            application, release = (int(pragma.fetchone()[0]) for pragma in pragmas)
            if application != APPLICATION_ID:
                problem = "it is Flower's own, which an earlier release of Polyclinic used"
            elif release != SCHEMA_VERSION:
                problem = f"its number is {release}, not {SCHEMA_VERSION}"
    if not problem:
        return ""
    stamp = dt.datetime.now(dt.UTC).strftime("%Y%m%dT%H%M%SZ")
    new_name = f"{DATABASE_FILE}.{kind}-{stamp}"
    for ending in ("", *COMPANION_FILE_ENDINGS):
        file = path.with_name(DATABASE_FILE + ending)
        if file.exists():
            file.rename(path.with_name(new_name + ending))
    return (
        f"state/{DATABASE_FILE} is {kind.replace('-', ' ')} ({problem}) and was renamed to {new_name}; "
        "a new one is made from sites/. "
        "Hospitals connect again by themselves; a run that was under way goes on from its last checkpoint"
    )


def describe_database_damage(path: Path) -> str:
    """Describe the damage of a database; return empty text if it has none or cannot be examined now."""
    if not path.exists():
        has_companion = any(path.with_name(path.name + ending).exists() for ending in COMPANION_FILE_ENDINGS)
        return "only parts of it are left" if has_companion else ""
    length = path.stat().st_size
    if length < MIN_PAGE_BYTES:  # SQLite would take such a file for a new database
        return f"it has {length} bytes"
    try:
        with closing(sqlite3.connect(path, timeout=5)) as connection:
            problems = [str(row[0]) for row in connection.execute("PRAGMA integrity_check(1)")]
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0)
        return str(error) if code & _PRIMARY_CODE_MASK in _DAMAGE_ERROR_CODES else ""
    return "" if problems == ["ok"] else " ".join(problems[0].split())
