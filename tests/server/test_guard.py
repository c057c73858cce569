"""The guard over real sockets: which connections are closed, and whose stay."""

import contextlib
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from server.deployment.superlink.port_guard import sockets, strangers
from server.deployment.superlink.port_guard.guard import Guard
from server.deployment.superlink.port_guard.sockets import Accepted, Peer, parsed_peer
from server.deployment.superlink.port_guard.strangers import REFUSED_CALLS, Limits
from tests.server.guarded import METHOD, Fleet, accepted, call, closed, eventually, running, still_open

SOON_S = 1.0


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    """Sixteen connections from an address, twenty in all, and a second for the first call."""
    monkeypatch.setattr(strangers, "FIRST_CALL_S", SOON_S)
    with running(tmp_path, Guard(Limits(connections=20, per_address=16))) as fleet:
        yield fleet


@pytest.mark.parametrize("stranger", [Fleet.plain, Fleet.shaken, Fleet.half_sent], ids=lambda kind: kind.__name__)
def test_a_connection_without_an_authenticated_call_is_closed_in_time(
    stranger: Callable[[Fleet], object], fleet: Fleet
) -> None:
    stranger(fleet)
    assert closed(fleet.sockets[-1])


def test_a_hospitals_connection_stays_after_that_time(fleet: Fleet) -> None:
    with fleet.channel() as channel:
        call(channel, "north")
        (before,) = accepted(fleet.port)
        time.sleep(3 * SOON_S)
        call(channel, "north")
        assert accepted(fleet.port).keys() == {before}


def test_a_stranger_is_told_why_it_is_refused_then_not_listened_to_and_then_closed(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strangers, "DEAF_S", 4.0)
    with fleet.channel() as channel:
        for _ in range(REFUSED_CALLS):
            with pytest.raises(grpc.RpcError) as refused:
                call(channel, "")
            assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED
            assert refused.value.details() == "Method not found!"
        known = fleet.guard._known
        assert eventually(lambda: bool(known) and all(one.deaf for one in known.values()))
        with pytest.raises(grpc.RpcError) as ignored:
            channel.unary_unary(METHOD)(b"body", timeout=1)
        assert ignored.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert eventually(lambda: not accepted(fleet.port))
        with fleet.channel() as other:
            assert call(other, "north") == b"body"


def test_a_hospital_that_is_refused_again_and_again_becomes_a_stranger(fleet: Fleet) -> None:
    with fleet.channel() as channel:
        call(channel, "revoked")
        for _ in range(REFUSED_CALLS):
            with pytest.raises(grpc.RpcError):
                call(channel, "")
        assert [one.site for one in fleet.guard._known.values()] == [""]


def test_a_hospitals_silent_connection_is_closed_and_its_next_call_opens_another(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strangers, "SILENT_S", SOON_S)
    with fleet.channel() as channel:
        call(channel, "north")
        assert accepted(fleet.port)
        assert eventually(lambda: not accepted(fleet.port))
        ready = grpc.channel_ready_future(channel)
        ready.result(timeout=20)
        assert call(channel, "north") == b"body"


def test_of_too_many_strangers_at_one_address_the_oldest_go_and_no_hospital(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strangers, "FIRST_CALL_S", 600.0)
    with fleet.channel() as channel:
        call(channel, "north")
        (hospital,) = accepted(fleet.port)
        crowd = [fleet.shaken() for _ in range(30)]
        assert closed(crowd[0])
        assert eventually(lambda: len(accepted(fleet.port)) <= 20)
        assert hospital in accepted(fleet.port)
        assert still_open(crowd[-1])
        with fleet.channel() as other:
            assert call(other, "south") == b"body"
        assert call(channel, "north") == b"body"


def test_a_stranger_to_whom_nobody_listened_and_who_proves_to_be_a_hospital_is_heard_again(fleet: Fleet) -> None:
    with fleet.channel() as channel:
        with pytest.raises(grpc.RpcError):
            call(channel, "")
        (peer,) = accepted(fleet.port)
        assert eventually(lambda: peer in fleet.guard._known)
        fleet.guard._known[peer].refused = REFUSED_CALLS
        assert eventually(lambda: fleet.guard._known[peer].deaf)
        fleet.guard.authenticated(f"ipv4:{peer.address}:{peer.port}", "north")  # its call was on its way
        assert call(channel, "north") == b"body"
        assert accepted(fleet.port).keys() == {peer}


def test_a_hospitals_port_that_a_stranger_uses_after_it_is_a_strangers(fleet: Fleet) -> None:
    with fleet.shaken() as first:
        address, port = first.getsockname()
        assert eventually(lambda: Peer(address, port) in fleet.guard._known)
        fleet.guard.authenticated(f"ipv4:{address}:{port}", "north")
        number = fleet.guard._known[Peer(address, port)].number
    fleet.guard._update({Peer(address, port): number + 1}, time.monotonic())
    assert fleet.guard._known[Peer(address, port)].site == ""


def test_descriptors_are_back_after_a_crowd_has_been_closed(fleet: Fleet) -> None:
    crowd = [fleet.plain() for _ in range(30)]
    assert all(closed(one) for one in crowd)
    assert eventually(lambda: not accepted(fleet.port))


@pytest.mark.parametrize(
    ("said", "peer", "network"),
    [
        ("ipv4:192.0.2.1:4000", Peer("192.0.2.1", 4000), "192.0.2.1"),
        ("ipv6:%5B::ffff:192.0.2.1%5D:4000", Peer("192.0.2.1", 4000), "192.0.2.1"),
        ("ipv6:%5B2001:db8:0:7:1::2%5D:4000", Peer("2001:db8:0:7:1::2", 4000), "2001:db8:0:7::/64"),
        ("ipv6:%5Bfe80::1%25eth0%5D:4000", Peer("fe80::1", 4000), "fe80::/64"),
        ("unix:", Peer("", 0), ""),
    ],
)
def test_a_peer_is_read_from_what_grpc_says(said: str, peer: Peer, network: str) -> None:
    assert parsed_peer(said) == peer
    assert peer.network == network


OTHER_PROCESS = """
import sqlite3, sys
with sqlite3.connect(sys.argv[1], timeout=0.2, isolation_level=None) as other:
    print(other.execute("PRAGMA journal_mode=DELETE").fetchone()[0])
"""
"""Leaves the write-ahead log, which SQLite allows only where no other process has the database open."""


def what_another_process_gets(database: Path) -> str:
    done = subprocess.run([sys.executable, "-c", OTHER_PROCESS, database], capture_output=True, text=True, check=False)
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Path]:
    """A database that this process has open, as the SuperLink has its own."""
    path = tmp_path / "state.db"
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("CREATE TABLE one (two)")
        yield path


def test_the_locks_of_a_database_that_this_process_has_open_stay(database: Path) -> None:
    assert what_another_process_gets(database) == "sqlite3.OperationalError: database is locked"
    Accepted(1).peers()
    assert what_another_process_gets(database) == "sqlite3.OperationalError: database is locked"


def test_they_stay_where_the_file_took_the_number_of_a_socket_meanwhile(
    database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at a descriptor and its use, it was closed and the database was opened under its number."""
    monkeypatch.setattr(sockets.stat, "S_ISSOCK", lambda mode: True)
    before = set(os.listdir("/proc/self/fd"))
    Accepted(1).peers()
    assert what_another_process_gets(database) == "sqlite3.OperationalError: database is locked"
    for name in set(os.listdir("/proc/self/fd")) - before:  # what was left open on purpose
        with contextlib.suppress(OSError):
            os.close(int(name))
