"""The hospitals' port from the other end of a socket: its limits, requests that are none, and its answer to anyone."""

import base64
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import grpc
import psutil
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from grpc import StatusCode

from polyclinic.client.connection.fleet_client import FleetClient
from polyclinic.common import __version__
from polyclinic.common.security.call_signatures import encode_public_key_pem
from polyclinic.common.security.call_signatures import make_signed_headers as signed
from polyclinic.common.wire.fleet_protocol import (
    FLEET_SERVICE,
    HELLO_METHOD,
    HELLO_SERVICE,
    MAX_CALL_BYTES,
    HelloAnswer,
    PullMessagesRequest,
)
from polyclinic.common.wire.versions import WIRE_VERSION
from polyclinic.server.coordinator.folder import CoordinatorFolder
from polyclinic.server.deployment.superlink import authentication, fleet_server
from polyclinic.server.deployment.superlink.authentication import (
    MAX_CALLS_PER_SITE,
    MAX_CONCURRENT_TRANSFERS,
    ConcurrentCallLimiter,
    TransferTurns,
)
from polyclinic.server.deployment.superlink.fleet_server import MAX_CALLS_PER_CONNECTION, MAX_METADATA_BYTES
from tests.client.handshakes import grpc_server
from tests.fleet_stub import FleetStub
from tests.network.flood import DATA, END_HEADERS, FRAME, HEADERS, PREFACE, RST_STREAM, SETTINGS, announced, frame
from tests.network.flood import headers as header_block
from tests.network.real import eventually
from tests.server.superlinks import Hospital, Link, Port, opened, refused
from tests.signing import SignsCalls, authority_of, pem

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
    """Connect, shake hands by TLS and send HTTP/2's preface."""
    context = ssl.create_default_context(cadata=port.authority.decode())
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(address_of(port), timeout=WITHIN_S) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
    ):
        connection.sendall(PREFACE + frame(SETTINGS, 0, 0) + frame(SETTINGS, 1, 0))
        yield connection


def headers_of(port: Port, key: ec.EllipticCurvePrivateKey) -> Sequence[tuple[str, str | bytes]]:
    """The headers of one call of the process ``one``."""
    return signed(key, encode_public_key_pem(key.public_key()), authority_of(port.authority), "one")


def begin_call(connection: ssl.SSLSocket, metadata: Sequence[tuple[str, str | bytes]] = ()) -> None:
    """Announce a request of 4 MB, send 16 KB of it, and no more."""
    encoded = [
        (name.encode(), base64.b64encode(value) if isinstance(value, bytes) else value.encode())
        for name, value in metadata
    ]
    call = frame(HEADERS, END_HEADERS, 1, header_block(PUSH.encode(), *encoded))
    connection.sendall(call + frame(DATA, 0, 1, (announced(4_000_000) + bytes(FRAME))[:FRAME]))


def closed(connection: socket.socket, within_s: float = WITHIN_S) -> bool:
    """Return whether the other side closes this connection in time."""
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
    """Yield the kinds and contents of the frames that arrive."""
    data = connection.makefile("rb")
    while head := data.read(9):
        yield head[3], data.read(int.from_bytes(head[:3]))


def call_ended(connection: ssl.SSLSocket) -> bool:
    """Return whether the server ends the call on this connection in time."""
    return any(kind in (HEADERS, RST_STREAM) for kind, _ in frames(connection))


def test_a_tls_handshake_that_is_not_finished_is_ended(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_server, "HANDSHAKE_TIMEOUT_S", 1.0)
    with start() as port, socket.create_connection(address_of(port)) as plain:
        assert closed(plain)


def test_an_idle_connection_is_closed_and_the_next_call_opens_another(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_server, "MAX_IDLE_S", 1.0)
    with start() as port, handshaken(port) as stranger:
        north = port.hospital("north")
        assert north.pull() == []
        assert closed(stranger)
        assert north.pull() == []


def is_accepted(port: Port) -> bool:
    with socket.create_connection(address_of(port)) as plain:
        return not closed(plain, within_s=0.2)


def test_connections_beyond_the_limit_are_closed_at_once(start: Start) -> None:
    with start(16) as port, ExitStack() as stack:
        first = [stack.enter_context(handshaken(port)) for _ in range(16)]
        with socket.create_connection(address_of(port)) as surplus:
            assert closed(surplus)
        assert not any(closed(connection, within_s=0.05) for connection in first)
        first[0].close()
        eventually(lambda: is_accepted(port), "a place is free again")


def test_a_connection_may_carry_a_few_calls_at_once(port: Port) -> None:
    with handshaken(port) as connection:
        content = next(content for kind, content in frames(connection) if kind == SETTINGS)
        settings = dict(struct.unpack(">HI", content[place : place + 6]) for place in range(0, len(content), 6))
        assert settings[3] == MAX_CALLS_PER_CONNECTION  # SETTINGS_MAX_CONCURRENT_STREAMS


def test_metadata_is_bounded(port: Port) -> None:
    pull, fits = FleetStub(port.channel()).PullMessages, MAX_METADATA_BYTES - 1000
    for size, code in {fits: StatusCode.UNAUTHENTICATED, MAX_METADATA_BYTES: StatusCode.RESOURCE_EXHAUSTED}.items():
        more = (("more", "x" * size),)
        assert refused(pull, PullMessagesRequest(), metadata=more, timeout=WITHIN_S)[0] == code


def test_no_second_server_can_listen_on_the_port(port: Port) -> None:
    other = grpc.server(None, options=[("grpc.so_reuseport", 1)])
    with pytest.raises(RuntimeError):
        other.add_insecure_port(port.address)


def test_a_call_without_a_signature_is_ended_before_its_body_has_arrived(port: Port) -> None:
    with handshaken(port) as stranger:
        begin_call(stranger)
        assert call_ended(stranger)


def test_a_call_that_cannot_be_served_is_refused_with_its_reason(port: Port) -> None:
    """A method that does not exist, a message larger than a chunk of an array, a call without a request."""
    key = ec.generate_private_key(ec.SECP256R1())
    port.link.storage.sites.register_site("south", encode_public_key_pem(key.public_key()))
    north = port.hospital("north")
    another = port.channel().unary_unary("/flwr.proto.Fleet/Another")
    assert refused(another, b"", timeout=WITHIN_S)[0] == StatusCode.UNIMPLEMENTED
    assert refused(north.push, "a" * 64, bytes(MAX_CALL_BYTES + 1))[0] == StatusCode.RESOURCE_EXHAUSTED
    pull = port.channel().stream_unary(PULL)
    assert refused(pull, iter(()), metadata=headers_of(port, key), timeout=WITHIN_S)[0] == StatusCode.INVALID_ARGUMENT


def test_a_site_with_too_many_calls_loses_its_oldest_and_no_other_site_any(port: Port) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    port.link.storage.sites.register_site("north", encode_public_key_pem(key.public_key()))
    with ExitStack() as stack:
        calls = [stack.enter_context(handshaken(port)) for _ in range(MAX_CALLS_PER_SITE + 1)]
        for connection in calls:
            begin_call(connection, headers_of(port, key))
            time.sleep(0.02)  # so that they arrive in this order
        assert call_ended(calls[0])
        assert port.hospital("south").pull() == []
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
    limit, contexts = ConcurrentCallLimiter(), [Context() for _ in range(MAX_CALLS_PER_SITE + 2)]
    with ExitStack() as unanswered:
        for number, context in enumerate(contexts):
            block: Any = limit.track_site_call("north", context)  # type: ignore[arg-type]
            if number == 5:
                with block:
                    pass  # answered, and not yet over for gRPC
            else:
                unanswered.enter_context(block)
        assert [number for number, context in enumerate(contexts) if context.cancelled] == [0, 5]
        assert limit.count_calls_in_progress("north") == MAX_CALLS_PER_SITE


def test_a_call_that_is_over_counts_no_more() -> None:
    limit, contexts = ConcurrentCallLimiter(), [Context() for _ in range(3 * MAX_CALLS_PER_SITE)]
    for context in contexts:
        with limit.track_site_call("north", context):  # type: ignore[arg-type]
            pass
        context.end()
    assert not any(context.cancelled for context in contexts)
    assert limit.count_calls_in_progress("north") == 0


def test_a_transfer_waits_for_one_that_ends_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authentication, "MAX_TURN_WAIT_S", 0.05)
    turns, contexts = TransferTurns(), [Context() for _ in range(MAX_CONCURRENT_TRANSFERS + 1)]
    got = [turns.wait_for_turn(context) for context in contexts]  # type: ignore[arg-type]
    assert got == [*[True] * MAX_CONCURRENT_TRANSFERS, False]
    monkeypatch.setattr(authentication, "MAX_TURN_WAIT_S", 20.0)
    later = threading.Timer(0.1, contexts[0].end)
    later.start()
    assert turns.wait_for_turn(Context())  # type: ignore[arg-type]
    later.join()


def test_a_transfer_whose_call_is_over_keeps_no_turn() -> None:
    class Over(Context):
        def add_callback(self, callback: Callable[[], None]) -> bool:
            return False

    turns = TransferTurns()
    assert all(turns.wait_for_turn(Over()) for _ in range(3 * MAX_CONCURRENT_TRANSFERS))  # type: ignore[arg-type]


METHODS = (
    *("ActivateNode", "DeactivateNode", "SendNodeHeartbeat", "RegisterNode", "UnregisterNode", "PullMessages"),
    *("PushMessages", "ConfirmMessageReceived", "GetRun", "GetFab", "PushObject", "PullObject"),
)
BODIES = {
    "no protobuf": b"\xff" * 40,
    "a field that ends too late": b"\x0a\xff\xff\xff\xff\x0f",
    "a varint without an end": b"\x08" + b"\x80" * 30,
    "groups in groups": b"\x0b" * 5000,
    "a message cut off": b"\x0a\x10\x0a",
}


@pytest.fixture
def attacker(port: Port) -> Hospital:
    """An admitted hospital that sends what it likes; honest calls go over the same connection."""
    return port.hospital("north")


def status(site: Hospital, method: str, body: bytes, **options: Any) -> StatusCode:
    """Make one signed call; return how it ends."""
    return refused(site.channel.unary_unary(f"/{FLEET_SERVICE}/{method}"), body, timeout=20, **options)[0]


@pytest.mark.slow
def test_a_request_that_cannot_be_read_is_refused_as_such_by_every_method(attacker: Hospital) -> None:
    for method in METHODS:
        ends = {name: status(attacker, method, body) for name, body in BODIES.items()}
        assert ends == dict.fromkeys(BODIES, StatusCode.INVALID_ARGUMENT), method
        assert attacker.beat(timeout=20), method


@pytest.mark.slow
def test_a_hundred_of_them_leave_the_connection_usable_and_no_thread_or_memory_behind(attacker: Hospital) -> None:
    process = psutil.Process()
    for _ in range(50):  # threads and buffers that stay in any case
        status(attacker, "SendNodeHeartbeat", BODIES["no protobuf"])
    threads, memory = threading.active_count(), process.memory_info().rss
    for _ in range(100):
        assert status(attacker, "SendNodeHeartbeat", BODIES["no protobuf"]) == StatusCode.INVALID_ARGUMENT
    assert attacker.beat(timeout=20)
    assert threading.active_count() <= threads + 2
    assert process.memory_info().rss - memory < 20e6  # 100 times 0.65 MB were 65 MB


@pytest.mark.slow
def test_text_that_is_no_utf8_is_refused_and_fails_nothing(attacker: Hospital) -> None:
    body = b"".join(bytes((field << 3 | 2, 2)) + b"\xff\xfe" for field in range(1, 8))
    refusals = (StatusCode.INVALID_ARGUMENT, StatusCode.PERMISSION_DENIED, StatusCode.UNAUTHENTICATED)
    for method in METHODS:
        assert status(attacker, method, body) in refusals, method
        assert attacker.beat(timeout=20), method


@pytest.mark.slow
def test_a_small_body_that_unpacks_to_a_large_one_is_refused_by_its_size(attacker: Hospital) -> None:
    code = status(attacker, "PushMessages", bytes(20 * MAX_CALL_BYTES), compression=grpc.Compression.Gzip)
    assert code == StatusCode.RESOURCE_EXHAUSTED
    assert attacker.beat(timeout=20)


OURS, OTHERS = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())


def answer(port: Port, *signing: SignsCalls) -> HelloAnswer:
    """Ask, where only the key ``OURS`` is admitted."""
    port.link.storage.sites.register_site("north", pem(OURS.public_key()))
    channel = grpc.intercept_channel(port.channel(), *signing)
    return HelloAnswer.model_validate_json(channel.unary_unary(f"/{HELLO_SERVICE}/{HELLO_METHOD}")(b"", timeout=20))


def test_an_admitted_site_learns_that_it_is_and_time_and_release(port: Port) -> None:
    hello = answer(port, port.signs(OURS))
    assert (hello.key, hello.release, hello.wire) == ("admitted", __version__, WIRE_VERSION)
    assert hello.time == pytest.approx(time.time(), abs=20)


@pytest.mark.parametrize(
    ("header", "wire"),
    [
        (f"{WIRE_VERSION - 1} 0.9", WIRE_VERSION - 1),
        (f"{WIRE_VERSION + 1} 9.9", WIRE_VERSION),
        (f"{WIRE_VERSION + 2} 9.9", WIRE_VERSION),
        (f"{WIRE_VERSION - 2} 0.8", WIRE_VERSION),
    ],
)
def test_a_site_learns_the_newest_version_that_both_speak_else_the_coordinators(
    port: Port, header: str, wire: int
) -> None:
    """A site that does not speak the answered version does not connect."""
    node = port.link.storage.sites.register_site("north", pem(OURS.public_key()))
    channel = grpc.intercept_channel(port.channel(), port.signs(OURS))
    call = channel.unary_unary(f"/{HELLO_SERVICE}/{HELLO_METHOD}")
    hello = HelloAnswer.model_validate_json(call(b"", timeout=20, metadata=[("polyclinic-release", header)]))
    assert (hello.key, hello.wire, hello.newest) == ("admitted", wire, WIRE_VERSION)
    site = port.link.storage.sites.find_registered_site(node)
    assert site is not None
    assert site.stated is None


def test_everybody_else_is_unknown(port: Port, coordinator: CoordinatorFolder) -> None:
    elsewhere = coordinator.ca_certificate_path.read_bytes()
    signatures = {
        "an admitted key that did not sign": [port.signs(OTHERS, OURS.public_key())],
        "a key that was never admitted": [port.signs(OTHERS)],
        "a call that was signed for another coordinator": [port.signs(OURS, authority=elsewhere)],
        "no key": [],
    }
    answers = {kind: answer(port, *signing).key for kind, signing in signatures.items()}
    assert answers == dict.fromkeys(signatures, "unknown")


def test_a_coordinator_without_the_service_is_reachable(certificates: tuple[bytes, bytes, bytes]) -> None:
    authority, certificate, key = certificates
    nothing = grpc.method_handlers_generic_handler("another.Service", {})
    credentials = grpc.ssl_server_credentials([(key, certificate)])
    with grpc_server(nothing, credentials) as port, FleetClient(f"127.0.0.1:{port}", authority, OURS) as client:
        assert client.exchange_hello() is None
