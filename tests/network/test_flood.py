"""The hospitals' port under a flood of strangers, with real programs: a run goes on, and nothing of it stays behind."""

import json
import os
import socket
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.proto.fleet_pb2 import ActivateNodeRequest
from flwr.proto.fleet_pb2_grpc import FleetStub

from server.deployment.superlink.fleet_server import HANDSHAKE_S
from tests.network.federated import Federation, hash_in, sites_by_round, undisturbed
from tests.network.real import Program, eventually, flwr_client
from tests.signing import SignsCalls

pytestmark = pytest.mark.slow

MOST_MB = 100.0
SHORT, FULL = (60, 15.0), (400, 90.0)
"""Connections and seconds."""


def flood(federation: Federation, connections: int, seconds: float) -> Program:
    """Begin to attack."""
    port = federation.coordinator.port
    program = federation.machine.start("flood", "-m", "tests.network.flood", port, connections, seconds)
    program.says("begun")
    return program


def kept_on_disk(federation: Federation, *names: str) -> int:
    """Bytes of all files in these folders of the coordinator.

    A database counts with its pages: its write-ahead log also holds honest heartbeats, again and again.
    """
    folders = (federation.coordinator.folder / name for name in names)
    paths = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return sum(size_of(path) for path in paths if not path.name.endswith(("-wal", "-shm")))


def size_of(path: Path) -> int:
    if path.suffix != ".db":
        return path.stat().st_size
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        pages, size = (connection.execute(f"PRAGMA {one}").fetchone()[0] for one in ("page_count", "page_size"))
        return int(pages) * int(size)


def peak_mb(superlink: psutil.Process, until: Program) -> float:
    """The most memory that the SuperLink holds until a program ends."""
    most = 0.0
    while until.runs:
        most = max(most, superlink.memory_info().rss / 1e6)
        time.sleep(0.05)
    return most


@pytest.mark.parametrize(
    ("connections", "seconds"), [SHORT, pytest.param(*FULL, marks=pytest.mark.torture)], ids=["short", "full"]
)
def test_a_run_under_a_flood_goes_on_and_nothing_of_the_flood_stays(
    connections: int, seconds: float, federation: Federation, tmp_path: Path
) -> None:
    superlink = federation.coordinator.superlink
    assert federation.run(tmp_path / "warm", "run.rounds=2", once=True).ends() == 0
    before, files, logged = superlink.memory_info().rss / 1e6, superlink.num_fds(), kept_on_disk(federation, "logs")
    attack = flood(federation, connections, seconds)
    run = federation.run(tmp_path / "run", "run.rounds=6", once=True)
    most = peak_mb(superlink, attack)
    said: dict[str, Any] = json.loads(attack.said.splitlines()[-1])
    assert said["most_open"] >= connections / 3  # the flood was one
    assert sum(said["opened"].values()) > connections  # and was thrown out
    assert run.ends() == 0
    assert sites_by_round(tmp_path / "run") == [["east", "north", "south"]] * 6
    assert hash_in(tmp_path / "run") == undisturbed(federation.experiment, tmp_path / "alone", "run.rounds=6")
    assert most - before < MOST_MB
    eventually(lambda: superlink.num_fds() <= files + 2, "the file descriptors are back")
    eventually(lambda: superlink.memory_info().rss / 1e6 < before + MOST_MB / 2, "the memory is given back")
    assert kept_on_disk(federation, "logs") - logged < 20_000
    assert superlink.is_running()


@pytest.mark.network
def test_a_site_signs_on_and_is_checked_under_a_flood(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    federation.east.program.stop()
    attack = flood(federation, *SHORT)
    checked = json.loads(flwr_client("check", federation.east.folder, "--json", "--images", 20).out)
    assert "this site's key is admitted" in checked["areas"]["connection"]["passed"]
    federation.east.start().says("connected to trial")
    assert attack.ends() == 0


def test_a_silent_connection_is_closed_in_time(federation: Federation) -> None:
    with socket.create_connection(("127.0.0.1", federation.coordinator.port), timeout=60) as silent:
        begun = time.monotonic()
        assert silent.recv(1) == b""
        assert time.monotonic() - begun >= HANDSHAKE_S - 1


def test_refused_calls_make_neither_log_nor_database_grow(federation: Federation) -> None:
    address = f"127.0.0.1:{federation.coordinator.port}"
    authority = (federation.coordinator.folder / "authority" / "ca.crt").read_bytes()
    key = ec.generate_private_key(ec.SECP256R1())
    request = ActivateNodeRequest(public_key=b"any", heartbeat_interval=30)
    before = kept_on_disk(federation, "logs"), kept_on_disk(federation, "state")
    with grpc.secure_channel(address, grpc.ssl_channel_credentials(authority)) as raw:
        stub = FleetStub(grpc.intercept_channel(raw, SignsCalls(key, key.public_key())))
        for _ in range(2000):
            with pytest.raises(grpc.RpcError):
                stub.ActivateNode(request, timeout=20)
    assert kept_on_disk(federation, "logs") - before[0] < 5_000
    assert kept_on_disk(federation, "state") - before[1] < 5_000


def test_another_process_cannot_take_the_superlinks_database(federation: Federation) -> None:
    """An administrator's ``sqlite3``, or a backup: SQLite's locks hold it off while the SuperLink runs."""
    path = federation.coordinator.folder / "state" / "superlink.db"
    with closing(sqlite3.connect(path, timeout=0.2, isolation_level=None)) as connection:
        with pytest.raises(sqlite3.OperationalError, match="database is locked"):
            connection.execute("PRAGMA journal_mode=DELETE")
        connection.execute("PRAGMA quick_check")
