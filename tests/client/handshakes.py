"""Servers that answer a site's first bytes."""

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from server.coordinator.authority import issue_server_certificate, make_authority
from server.coordinator.folder import Coordinator, CoordinatorFile

Handler = Callable[[socket.socket], object]


def coordinator_in(folder: Path) -> Coordinator:
    file = CoordinatorFile(name="trial", hosts=("fl.example",), port=9092)
    coordinator = Coordinator(folder, file)
    make_authority(coordinator)
    issue_server_certificate(coordinator)
    return coordinator


@contextlib.contextmanager
def listening(handle: Handler, host: str = "127.0.0.1") -> Iterator[int]:
    """A server that does this with its first caller; its port."""
    with socket.create_server((host, 0)) as server:

        def answer() -> None:
            with contextlib.suppress(OSError), server.accept()[0] as connection:
                handle(connection)

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)  # ends an accept that nobody came to
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
    """TLS with a coordinator's certificate, until the caller hangs up."""
    return shows_certificate(coordinator.authority / "server.crt", coordinator.authority / "server.key")


def answers(line: bytes) -> Handler:
    """Clear text, once the caller has spoken, until the caller hangs up."""

    def speak(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(line)
        connection.recv(1)

    return speak
