"""The SuperLink's database, looked at before the SuperLink opens it: one that is damaged is set aside and made anew.

What it holds can be had again: registrations from ``sites/``, runs from their own folders. What is merely locked, or on
a full disk, is left alone.
"""

import datetime as dt
import sqlite3
from contextlib import closing
from pathlib import Path

from server.coordinator.folder import Coordinator
from server.deployment.superlink.storage.database import OURS, RELEASE, identity_of

FILE = "superlink.db"
BESIDE = ("", "-wal", "-shm", "-journal")
"""Endings of the files that make one database of SQLite."""
SMALLEST_PAGE = 512
"""Bytes of a page of SQLite; every database has one at least."""
_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_PRIMARY = 0xFF
"""SQLite puts the kind of an error into the lowest byte, and details above."""


def database(coordinator: Coordinator) -> Path:
    """Where the SuperLink keeps registrations, runs and messages."""
    return coordinator.state / FILE


def set_aside_if_damaged(coordinator: Coordinator) -> str:
    """Rename a database that is damaged or of another release, so that the SuperLink makes a new one.

    Call it while no SuperLink runs on this folder.

    Returns:
        What happened, for a person; empty where the database is sound, locked, out of reach, or not there.
    """
    path = database(coordinator)
    kind, problem = "damaged", damage(path)
    if not problem and (problem := of_another_release(path)):
        kind = "of-another-release"
    if not problem:
        return ""
    stamp = dt.datetime.now(dt.UTC).strftime("%Y%m%dT%H%M%SZ")
    aside = f"{FILE}.{kind}-{stamp}"
    for ending in BESIDE:
        if (part := path.with_name(FILE + ending)).exists():
            part.rename(path.with_name(aside + ending))
    return (
        f"state/{FILE} is {kind.replace('-', ' ')} ({problem}) and was renamed to {aside}; "
        "a new one is made from sites/. "
        "Hospitals connect again by themselves; a run that was under way goes on from its last checkpoint"
    )


def damage(path: Path) -> str:
    """What is wrong with a database; empty where nothing is, or where that cannot be told now."""
    if not path.exists():
        left = any(path.with_name(path.name + ending).exists() for ending in BESIDE[1:])
        return "only parts of it are left" if left else ""
    if (length := path.stat().st_size) < SMALLEST_PAGE:  # SQLite takes that for a new one
        return f"it has {length} bytes"
    try:
        with closing(sqlite3.connect(path, timeout=5)) as connection:
            found = [str(row[0]) for row in connection.execute("PRAGMA integrity_check(1)")]
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0)
        return str(error) if code & _PRIMARY in _DAMAGE else ""
    return "" if found == ["ok"] else " ".join(found[0].split())


def of_another_release(path: Path) -> str:
    """Why a sound database is not one that this release reads; empty where it is, or where that cannot be told now."""
    if not path.exists():
        return ""
    try:
        application, release = identity_of(path)
    except sqlite3.Error:
        return ""
    if application != OURS:
        return "it is Flower's own, which an earlier release of Polyclinic used"
    return "" if release == RELEASE else f"its number is {release}, not {RELEASE}"
