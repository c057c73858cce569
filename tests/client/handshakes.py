"""Servers that answer a site's first bytes, and proxies on its way."""

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from select import select

from server.coordinator.authority import issue_server_certificate, make_authority
from server.coordinator.folder import Coordinator, CoordinatorFile, write_coordinator

Handler = Callable[[socket.socket], object]


def coordinator_in(folder: Path, host: str = "fl.example", name: str = "trial") -> Coordinator:
    coordinator = write_coordinator(folder, CoordinatorFile(name=name, hosts=(host,), port=9092))
    make_authority(coordinator)
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


def shows(coordinator: Coordinator) -> Handler:
    return shows_certificate(coordinator.authority / "server.crt", coordinator.authority / "server.key")


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
