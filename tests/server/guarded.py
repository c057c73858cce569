"""Our gRPC server with its guard, and a door that believes every caller's name; and callers who are up to no good."""

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from server.coordinator.authority import issue_server_certificate, make_authority
from server.coordinator.folder import Coordinator, CoordinatorFile
from server.deployment.superlink.port_guard.call_limits import NoRequest
from server.deployment.superlink.port_guard.grpc_options import AnythingElse, options
from server.deployment.superlink.port_guard.guard import Guard
from server.deployment.superlink.port_guard.sockets import Accepted, Peer
from tests.network.flood import END_HEADERS, FRAME, HEADERS, PREFACE, SETTINGS, announced, frame, headers

METHOD = "/flwr.proto.Fleet/PushObject"
WITHIN_S = 20.0


class Door(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Takes the name in the metadata for the caller's; refuses who has none."""

    def __init__(self, guard: Guard, answer: Callable[[bytes], bytes]) -> None:
        self._guard, self._answer = guard, answer

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        site = dict(details.invocation_metadata).get("site", "")

        def serve(requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
            self._guard.authenticated(context.peer(), site)
            try:
                with self._guard.calls.request(site, context, requests, large=details.method == METHOD) as request:
                    return self._answer(request)
            except NoRequest as fault:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(fault))
                raise

        return grpc.stream_unary_rpc_method_handler(serve) if site else None


@dataclass
class Fleet:
    """A server that runs."""

    port: int
    guard: Guard
    certificate: bytes
    sockets: list[socket.socket] = field(default_factory=list)

    @contextmanager
    def channel(self) -> Iterator[grpc.Channel]:
        """A hospital's connection."""
        address, credentials = f"127.0.0.1:{self.port}", grpc.ssl_channel_credentials(self.certificate)
        options = [
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_retries", 0),
            ("grpc.max_receive_message_length", -1),
        ]
        with grpc.secure_channel(address, credentials, options) as channel:
            yield channel

    def plain(self) -> socket.socket:
        """A TCP connection."""
        self.sockets.append(socket.create_connection(("127.0.0.1", self.port), timeout=WITHIN_S))
        return self.sockets[-1]

    def shaken(self) -> ssl.SSLSocket:
        """A connection whose TLS handshake is done."""
        context = ssl.create_default_context(cadata=self.certificate.decode())
        context.set_alpn_protocols(["h2"])
        plain = self.plain()
        self.sockets.append(context.wrap_socket(plain, server_hostname="127.0.0.1"))
        return self.sockets[-1]  # type: ignore[return-value]

    def half_sent(self, *metadata: tuple[bytes, bytes]) -> ssl.SSLSocket:
        """A connection on which a call has announced 4 MB and sent 16 KB of them."""
        connection = self.shaken()
        begun = PREFACE + frame(SETTINGS, 0, 0) + frame(SETTINGS, 1, 0)
        call = frame(HEADERS, END_HEADERS, 1, headers(METHOD.encode(), *metadata))
        connection.sendall(begun + call + frame(0, 0, 1, (announced(4_000_000) + bytes(FRAME))[:FRAME]))
        return connection


def call(channel: grpc.Channel, site: str, body: bytes = b"body", method: str = METHOD) -> bytes:
    """A call in a hospital's name, or without one."""
    metadata = (("site", site),) if site else ()
    return bytes(channel.unary_unary(method)(body, metadata=metadata, timeout=WITHIN_S))


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


def still_open(connection: socket.socket) -> bool:
    """Whether it has not been closed so far."""
    return not closed(connection, within_s=0.01)


def eventually(wanted: Callable[[], bool]) -> bool:
    """Whether this becomes true in time."""
    until = time.monotonic() + WITHIN_S
    while not wanted() and time.monotonic() < until:
        time.sleep(0.02)
    return wanted()


def in_background(work: Callable[[], object]) -> threading.Thread:
    """Begin something that ends with an error, at the latest when the server does."""

    def quietly() -> None:
        with suppress(grpc.RpcError, OSError, ValueError):
            work()

    thread = threading.Thread(target=quietly)
    thread.start()
    return thread


def certificates(folder: Path) -> tuple[bytes, bytes, bytes]:
    """For 127.0.0.1: the authority's, the server's, and its key."""
    file = CoordinatorFile(name="trial", hosts=("127.0.0.1",), port=9092)
    coordinator = Coordinator(folder, file)
    make_authority(coordinator)
    issue_server_certificate(coordinator)
    ca, certificate, key = (coordinator.authority / name for name in ("ca.crt", "server.crt", "server.key"))
    return ca.read_bytes(), certificate.read_bytes(), key.read_bytes()


@contextmanager
def running(folder: Path, guard: Guard, answer: Callable[[bytes], bytes] = lambda body: body) -> Iterator[Fleet]:
    """The server, until the test is done."""
    ca, certificate, key = certificates(folder)
    server = grpc.server(
        ThreadPoolExecutor(100, thread_name_prefix="fleet"),
        handlers=(Door(guard, answer), AnythingElse(guard.refused)),
        options=options(guard.limits),
    )
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, certificate)], ca))
    guard.start(port)
    server.start()
    fleet = Fleet(port, guard, ca)
    try:
        yield fleet
    finally:
        for one in fleet.sockets:
            one.close()
        server.stop(None).wait()
        guard.stop()


def accepted(port: int) -> dict[Peer, int]:
    """The connections to a port now, as the guard sees them."""
    return Accepted(port).peers()
