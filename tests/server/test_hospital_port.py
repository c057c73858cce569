"""The limits of the hospitals' port, seen from the other end of a socket: gRPC's options, and the calls of one site."""

import base64
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.proto.fleet_pb2 import PullMessagesRequest

from common.security.call_signatures import key_bytes
from common.security.call_signatures import signed_headers as signed
from server.deployment.superlink import fleet_server
from server.deployment.superlink.authentication import CALLS_PER_SITE, CallLimit
from server.deployment.superlink.fleet_server import CALLS_PER_CONNECTION, LARGEST_METADATA
from server.deployment.superlink.object_store import LARGEST_CALL
from tests.network.flood import DATA, END_HEADERS, FRAME, HEADERS, PREFACE, RST_STREAM, SETTINGS, announced, frame
from tests.network.flood import headers as header_block
from tests.network.real import eventually
from tests.server.superlinks import Link, Port, opened

Start = Callable[..., AbstractContextManager[Port]]
WITHIN_S = 20.0
PULL, PUSH = "/flwr.proto.Fleet/PullMessages", "/flwr.proto.Fleet/PushObject"


@pytest.fixture
def start(link: Link, certificates: tuple[bytes, bytes, bytes]) -> Start:
    return lambda connections=1000: opened(link, certificates, connections)


def address_of(port: Port) -> tuple[str, int]:
    host, _, number = port.address.rpartition(":")
    return host, int(number)


@contextmanager
def handshaken(port: Port) -> Iterator[ssl.SSLSocket]:
    """A connection whose TLS handshake is done, which has sent HTTP/2's preface."""
    context = ssl.create_default_context(cadata=port.authority.decode())
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(address_of(port), timeout=WITHIN_S) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
    ):
        connection.sendall(PREFACE + frame(SETTINGS, 0, 0) + frame(SETTINGS, 1, 0))
        yield connection


def begin_call(connection: ssl.SSLSocket, key: ec.EllipticCurvePrivateKey | None = None) -> None:
    """Announce a request of 4 MB, send 16 KB of it, and no more."""
    metadata = signed(key, key_bytes(key.public_key()), "one") if key else ()
    encoded = [
        (name.encode(), base64.b64encode(value) if isinstance(value, bytes) else value.encode())
        for name, value in metadata
    ]
    call = frame(HEADERS, END_HEADERS, 1, header_block(PUSH.encode(), *encoded))
    connection.sendall(call + frame(DATA, 0, 1, (announced(4_000_000) + bytes(FRAME))[:FRAME]))


def closed(connection: socket.socket, within_s: float = WITHIN_S) -> bool:
    """Whether the other side closes this connection in time."""
    connection.settimeout(within_s)
    try:
        while connection.recv(65_536):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def frames(connection: ssl.SSLSocket) -> Iterator[tuple[int, bytes]]:
    """The kinds and contents of the frames that come."""
    data = connection.makefile("rb")
    while head := data.read(9):
        yield head[3], data.read(int.from_bytes(head[:3]))


def call_ended(connection: ssl.SSLSocket) -> bool:
    """Whether the server ends the call on this connection in time."""
    return any(kind in (HEADERS, RST_STREAM) for kind, _ in frames(connection))


def test_a_tls_handshake_that_is_not_finished_is_ended(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_server, "HANDSHAKE_S", 1.0)
    with start() as port, socket.create_connection(address_of(port)) as plain:
        assert closed(plain)


def test_a_connection_without_calls_is_closed_and_the_next_call_opens_another(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_server, "IDLE_S", 1.0)
    with start() as port, handshaken(port) as stranger:
        north = port.hospital("north")
        assert not north.stub.PullMessages(PullMessagesRequest(node=north.node)).messages_list
        assert closed(stranger)
        assert not north.stub.PullMessages(PullMessagesRequest(node=north.node)).messages_list


def test_connections_beyond_the_limit_are_closed_at_once(start: Start) -> None:
    with start(16) as port, ExitStack() as stack:
        first = [stack.enter_context(handshaken(port)) for _ in range(16)]
        with socket.create_connection(address_of(port)) as surplus:
            assert closed(surplus)
        assert not any(closed(connection, within_s=0.05) for connection in first)
        first[0].close()
        eventually(lambda: is_accepted(port), "a place is free again")


def is_accepted(port: Port) -> bool:
    with socket.create_connection(address_of(port)) as plain:
        return not closed(plain, within_s=0.2)


def test_a_connection_may_carry_a_few_calls_at_once(start: Start) -> None:
    with start() as port, handshaken(port) as connection:
        content = next(content for kind, content in frames(connection) if kind == SETTINGS)
        settings = dict(struct.unpack(">HI", content[place : place + 6]) for place in range(0, len(content), 6))
        assert settings[3] == CALLS_PER_CONNECTION  # SETTINGS_MAX_CONCURRENT_STREAMS


@pytest.mark.parametrize(
    ("size", "code"),
    [
        (LARGEST_METADATA - 1000, grpc.StatusCode.UNAUTHENTICATED),
        (LARGEST_METADATA, grpc.StatusCode.RESOURCE_EXHAUSTED),
    ],
)
def test_metadata_is_bounded(size: int, code: grpc.StatusCode, start: Start) -> None:
    with start() as port, pytest.raises(grpc.RpcError) as refused:
        port.stub().PullMessages(PullMessagesRequest(), metadata=(("more", "x" * size),), timeout=WITHIN_S)
    assert refused.value.code() == code


def test_no_second_server_can_listen_on_the_port(start: Start) -> None:
    other = grpc.server(None, options=[("grpc.so_reuseport", 1)])
    with start() as port, pytest.raises(RuntimeError):
        other.add_insecure_port(port.address)


def test_a_call_without_a_signature_is_ended_before_its_body_has_arrived(start: Start) -> None:
    with start() as port, handshaken(port) as stranger:
        begin_call(stranger)
        assert call_ended(stranger)


def test_a_method_that_does_not_exist_is_refused(start: Start) -> None:
    with start() as port, pytest.raises(grpc.RpcError) as refused:
        port.channel().unary_unary("/flwr.proto.Fleet/Another")(b"", timeout=WITHIN_S)
    assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_a_message_larger_than_a_chunk_of_an_array_is_refused_unread(start: Start) -> None:
    with start() as port:
        north = port.hospital("north")
        with pytest.raises(grpc.RpcError) as refused:
            north.push("a" * 64, bytes(LARGEST_CALL + 1), "")
    assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_call_without_a_request_is_refused(start: Start) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    with start() as port:
        port.link.storage.sites.register("north", key_bytes(key.public_key()))
        call, headers = port.channel().stream_unary(PULL), signed(key, key_bytes(key.public_key()), "one")
        with pytest.raises(grpc.RpcError) as refused:
            call(iter(()), metadata=headers, timeout=WITHIN_S)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_a_site_with_too_many_calls_loses_its_oldest_and_no_other_site_any(start: Start) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    with start() as port, ExitStack() as stack:
        port.link.storage.sites.register("north", key_bytes(key.public_key()))
        calls = [stack.enter_context(handshaken(port)) for _ in range(CALLS_PER_SITE + 1)]
        for connection in calls:
            begin_call(connection, key)
            time.sleep(0.02)  # so that they arrive in this order
        assert call_ended(calls[0])
        south = port.hospital("south")
        assert not south.stub.PullMessages(PullMessagesRequest(node=south.node)).messages_list
        assert not any(closed(connection, within_s=0.01) for connection in calls[1:])


class Context:
    """A call of gRPC whose end a test decides."""

    def __init__(self) -> None:
        self.cancelled, self.end = False, lambda: None

    def add_callback(self, callback: Callable[[], None]) -> bool:
        self.end = callback
        return True

    def cancel(self) -> None:
        self.cancelled = True
        self.end()


def test_of_too_many_calls_the_answered_are_cancelled_first() -> None:
    limit, contexts = CallLimit(), [Context() for _ in range(CALLS_PER_SITE + 2)]
    with ExitStack() as unanswered:
        for number, context in enumerate(contexts):
            block: Any = limit.count_call("north", context)  # type: ignore[arg-type]
            if number == 5:
                with block:
                    pass  # answered, and not yet over for gRPC
            else:
                unanswered.enter_context(block)
        assert [number for number, context in enumerate(contexts) if context.cancelled] == [0, 5]
        assert limit.calls_in_progress("north") == CALLS_PER_SITE


def test_a_call_that_is_over_counts_no_more() -> None:
    limit, contexts = CallLimit(), [Context() for _ in range(3 * CALLS_PER_SITE)]
    for context in contexts:
        with limit.count_call("north", context):  # type: ignore[arg-type]
            pass
        context.end()
    assert not any(context.cancelled for context in contexts)
    assert limit.calls_in_progress("north") == 0
