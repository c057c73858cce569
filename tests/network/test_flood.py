"""The hospitals' port under a flood of strangers, with real programs: a run goes on, and nothing of it stays behind."""

import json
import sqlite3
import time
from contextlib import closing

import pytest

from tests.network.federated import Federation
from tests.network.real import Program, eventually, flwr_client

pytestmark = pytest.mark.slow

MOST_MB = 100.0
SHORT, FULL = (60, 8.0), (400, 90.0)
"""Connections and seconds."""


def flood(federation: Federation, connections: int, seconds: float) -> Program:
    """Begin to attack."""
    port = federation.coordinator.port
    program = federation.machine.start("flood", "-m", "tests.network.flood", port, connections, seconds)
    program.says("begun")
    return program


def bytes_in(federation: Federation, name: str) -> int:
    """Bytes of all files in a folder of the coordinator.

    A database counts with its pages: its write-ahead log also holds honest heartbeats, again and again.
    """
    size = 0
    for path in (federation.coordinator.folder / name).rglob("*"):
        if path.suffix == ".db":
            with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
                facts = ("page_count", "page_size")
                pages, page = (connection.execute(f"PRAGMA {fact}").fetchone()[0] for fact in facts)
                size += int(pages) * int(page)
        elif path.is_file() and not path.name.endswith(("-wal", "-shm")):
            size += path.stat().st_size
    return size


@pytest.mark.parametrize(
    ("connections", "seconds"), [SHORT, pytest.param(*FULL, marks=pytest.mark.torture)], ids=["short", "full"]
)
def test_a_run_under_a_flood_goes_on(connections: int, seconds: float, federation: Federation) -> None:
    superlink = federation.coordinator.superlink
    federation.run("run.rounds=2", once=True, out="warm").succeeds()
    before, files, logged = superlink.memory_info().rss / 1e6, superlink.num_fds(), bytes_in(federation, "logs")
    attack, most = flood(federation, connections, seconds), 0.0
    run = federation.run("run.rounds=6", once=True)
    while attack.runs:
        most = max(most, superlink.memory_info().rss / 1e6)
        time.sleep(0.05)
    attacked = json.loads(attack.output.splitlines()[-1])
    assert attacked["most_open"] >= connections / 3  # the flood was one
    assert sum(attacked["opened"].values()) > connections  # and was thrown out
    federation.ends_unharmed(run, 6, "run.rounds=6")
    assert most - before < MOST_MB
    eventually(lambda: superlink.num_fds() <= files + 2, "the file descriptors are back")
    eventually(lambda: superlink.memory_info().rss / 1e6 < before + MOST_MB / 2, "the memory is given back")
    assert bytes_in(federation, "logs") - logged < 20_000
    assert superlink.is_running()


@pytest.mark.network
@pytest.mark.usefixtures("no_proxy")
def test_a_site_signs_on_and_is_checked_under_a_flood(federation: Federation) -> None:
    federation.east.program.stop()
    attack = flood(federation, *SHORT)
    checked = json.loads(flwr_client("check", federation.east.folder, "--json", "--images", 20).out)
    assert "this site's key is admitted" in checked["areas"]["connection"]["passed"]
    federation.east.connect()
    attack.succeeds()


def test_another_process_cannot_take_the_superlinks_database(federation: Federation) -> None:
    """An administrator's ``sqlite3``, or a backup: SQLite's locks hold it off while the SuperLink runs."""
    path = federation.coordinator.folder / "state" / "superlink.db"
    with closing(sqlite3.connect(path, timeout=0.2, isolation_level=None)) as connection:
        with pytest.raises(sqlite3.OperationalError, match="database is locked"):
            connection.execute("PRAGMA journal_mode=DELETE")
        connection.execute("PRAGMA quick_check")
