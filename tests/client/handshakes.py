"""Servers that answer a site's first bytes, and proxies on its way."""

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from select import select

import grpc

from polyclinic.common.wire.fleet_protocol import HELLO_METHOD, HELLO_SERVICE, HelloAnswer
from polyclinic.server.coordinator.authority import issue_server_certificate, make_certificate_authority
from polyclinic.server.coordinator.folder import CoordinatorFolder, CoordinatorTomlContent, write_coordinator_toml

Handler = Callable[[socket.socket], object]


def coordinator_in(folder: Path, host: str = "fl.example", name: str = "trial") -> CoordinatorFolder:
    coordinator = write_coordinator_toml(folder, CoordinatorTomlContent(name=name, hosts=(host,), port=9092))
    make_certificate_authority(coordinator)
    issue_server_certificate(coordinator)
    return coordinator


@contextlib.contextmanager
def listening(handle: Handler, host: str = "127.0.0.1") -> Iterator[int]:
    """Serve every caller with this handler, several at once; yield the port."""
    threads = list[threading.Thread]()

    def serve(connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            handle(connection)

    def answer() -> None:
        with contextlib.suppress(OSError):
            while True:
                threads.append(threading.Thread(target=serve, args=(server.accept()[0],)))
                threads[-1].start()

    with socket.create_server((host, 0)) as server:
        acceptor = threading.Thread(target=answer)
        acceptor.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)  # ends accept
            for thread in (acceptor, *threads):
                thread.join()


def shows_certificate(chain: Path, key: Path) -> Handler:
    """TLS with this certificate, until the caller hangs up."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain, key)

    def shake_hands(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as tls:
            tls.recv(1)

    return shake_hands


def shows(coordinator: CoordinatorFolder) -> Handler:
    return shows_certificate(coordinator.authority_path / "server.crt", coordinator.authority_path / "server.key")


def answers(line: bytes) -> Handler:
    """Clear text, once the caller has spoken, until the caller hangs up."""

    def speak(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(line)
        connection.recv(1)

    return speak


speaks_http = answers(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
"""A web server's answer to a request that it does not know."""


def leads_to(port: int, heads: list[bytes]) -> Handler:
    """A proxy that connects every caller to this port of this machine, and appends what it is sent to ``heads``."""

    def relay(near: socket.socket) -> None:
        heads.append(near.recv(4096))
        with socket.create_connection(("127.0.0.1", port)) as far:
            near.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            ways = {near: far, far: near}
            while pending := select(ways, [], [])[0]:
                for end in pending:
                    if not (data := end.recv(65536)):
                        return
                    ways[end].sendall(data)

    return relay


@contextlib.contextmanager
def grpc_server(answer: Callable[[bytes], bytes] | grpc.GenericRpcHandler, credentials: object = None) -> Iterator[int]:
    """Serve the hello call, with TLS or without; yield the port."""
    server = grpc.server(ThreadPoolExecutor(2))
    if not isinstance(answer, grpc.GenericRpcHandler):
        method = grpc.unary_unary_rpc_method_handler(lambda request, context, say=answer: say(request))
        answer = grpc.method_handlers_generic_handler(HELLO_SERVICE, {HELLO_METHOD: method})
    server.add_generic_rpc_handlers((answer,))
    address = "127.0.0.1:0"
    port = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    server.start()
    try:
        yield port
    finally:
        server.stop(None).wait()


def tls_of(coordinator: CoordinatorFolder) -> grpc.ServerCredentials:
    chain, key = coordinator.authority_path / "server.crt", coordinator.authority_path / "server.key"
    return grpc.ssl_server_credentials([(key.read_bytes(), chain.read_bytes())])


def says(**fields: object) -> Callable[[bytes], bytes]:
    """A coordinator that says this of itself."""
    return lambda request: HelloAnswer(**fields).model_dump_json().encode()
