"""Each option that our gRPC server sets does what it is set for, seen from the other end of a socket."""

import asyncio
import ssl
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import grpc
import pytest

from server.deployment.superlink.port_guard import grpc_options, guard
from server.deployment.superlink.port_guard.grpc_options import BACKSTOP, CALLS_ON_A_CONNECTION, LARGEST_METADATA
from server.deployment.superlink.port_guard.guard import Guard
from server.deployment.superlink.port_guard.strangers import REFUSED_CALLS, Limits
from tests.network.flood import FRAME, PREFACE, SETTINGS, Wire, announced, frame
from tests.server.guarded import METHOD, Fleet, accepted, call, closed, eventually, running, still_open

Start = Callable[..., AbstractContextManager[Fleet]]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """A server whose guard does not look, so that gRPC is on its own."""
    monkeypatch.setattr(guard, "LOOK_S", 600.0)

    @contextmanager
    def started(limits: Limits | None = None) -> Iterator[Fleet]:
        with running(tmp_path, Guard(limits or Limits())) as fleet:
            yield fleet

    return started


def test_a_tls_handshake_that_is_not_finished_is_ended(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_options, "FIRST_CALL_S", 1.0)
    with start() as fleet:
        assert closed(fleet.plain())


def test_connections_beyond_the_backstop_are_closed_at_once(start: Start) -> None:
    with start(Limits(connections=16)) as fleet:
        first = [fleet.shaken() for _ in range(BACKSTOP * 16)]
        assert closed(fleet.plain())
        assert all(still_open(one) for one in first)
        first[0].close()
        assert eventually(lambda: len(accepted(fleet.port)) < BACKSTOP * 16)
        fleet.shaken()


def test_a_connection_may_carry_a_few_calls_at_once(start: Start) -> None:
    with start() as fleet:
        connection = fleet.shaken()
        connection.sendall(PREFACE + frame(SETTINGS, 0, 0))
        head = connection.recv(9)
        content = connection.recv(int.from_bytes(head[:3]))
        settings = dict(struct.unpack(">HI", content[place : place + 6]) for place in range(0, len(content), 6))
        assert settings[3] == CALLS_ON_A_CONNECTION  # SETTINGS_MAX_CONCURRENT_STREAMS


def test_metadata_is_bounded(start: Start) -> None:
    def metadata(size: int) -> Sequence[tuple[str, str]]:
        return (("site", "north"), ("more", "x" * size))

    with start() as fleet, fleet.channel() as channel:
        ask = channel.unary_unary(METHOD)
        assert ask(b"body", metadata=metadata(LARGEST_METADATA - 1000), timeout=20) == b"body"
        with pytest.raises(grpc.RpcError) as refused:
            ask(b"body", metadata=metadata(LARGEST_METADATA), timeout=20)
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_no_second_server_can_listen_on_the_port(start: Start) -> None:
    with start() as fleet:
        other = grpc.server(None, options=[("grpc.so_reuseport", 1)])
        with pytest.raises(RuntimeError):
            other.add_insecure_port(f"127.0.0.1:{fleet.port}")


async def granted(port: int, seconds: float) -> int:
    """How many bytes of a message that nobody reads a stranger gets rid of."""
    tls = ssl.create_default_context()
    tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    tls.set_alpn_protocols(["h2"])
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
    wire, sent = Wire(reader, writer), 0
    await wire.begin()
    listening = asyncio.ensure_future(wire.listen())
    deadline = asyncio.get_running_loop().time() + seconds
    stream = wire.call(METHOD.encode(), (b"site", b"north"))
    going = await wire.send(stream, announced(16_000_000))
    while going and asyncio.get_running_loop().time() < deadline:
        try:
            going = await asyncio.wait_for(wire.send(stream, bytes(FRAME)), 1.0)
        except TimeoutError:
            break
        sent += FRAME
    listening.cancel()
    writer.transport.abort()
    return sent


def test_little_of_a_message_that_nobody_reads_is_taken_in(start: Start) -> None:
    with start() as fleet:
        fleet.guard.calls.large_at_once = 0  # its turn never comes
        assert asyncio.run(granted(fleet.port, 10.0)) <= 4 * 65_536


def hospital_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("fleet")}


def test_a_refusal_takes_no_thread_that_hospitals_need(start: Start) -> None:
    before = hospital_threads()  # of servers of other tests
    with start() as fleet, fleet.channel() as channel:
        for _ in range(REFUSED_CALLS - 1):  # after one more nobody would listen
            with pytest.raises(grpc.RpcError):
                call(channel, "")
        assert not hospital_threads() - before
        assert call(channel, "north") == b"body"
        assert hospital_threads() - before
