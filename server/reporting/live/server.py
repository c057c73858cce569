"""The live view's server: two addresses, GET only, behind a token that stands in the URL and nowhere else.

``flwr-server status --web`` runs it for a coordinator, ``flwr-sim run --web`` in a process of its own beside the run:
python -m server.reporting.live.server DESCRIPTOR FOLDER, with the token on standard input.
"""

import contextlib
import os
import secrets
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes

from common.errors import BadInput, Fault, stop_on
from common.system.stopping import graceful_shutdown
from server.coordinator.authority import certificate_faults
from server.coordinator.folder import Coordinator
from server.reporting.live.files import FileWatcher, Snapshot, Source, source_of
from server.reporting.live.page import changing_part, content_security_policy, page

LOOK_S = 1.0
"""Seconds between two looks of a page that is open (live.js)."""
MOST_CONNECTIONS = 256
"""Enough for a browser's request to be read before its connection is the oldest, also beside a flood."""
BACKLOG = 1024
MOST_CLOSING = 32
"""Connections that gave way and are not closed yet, beyond which none is accepted."""
REQUEST_S = 10.0
"""Seconds until a connection without the token is closed; one with the token has as long again for its answer."""
LAST_LOOK_S = 5.0
"""Seconds that a run that is over waits for the view to show so."""
LOOPBACK = "127.0.0.1"
EVERYWHERE = ("0.0.0.0", "::")

_HEADERS = {
    "Content-Security-Policy": content_security_policy(),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Connection": "close",
}


@dataclass(eq=False)
class Connection:
    """An accepted connection, served by a thread of its own.

    Attributes:
        opened: When it was accepted, by the monotonic clock.
        has_token: Whether its request had the token; then it does not give way to others.
        gave_way: Whether it was shut down for another connection.
    """

    socket: socket.socket
    opened: float
    has_token: bool = False
    gave_way: bool = False

    def shut_down(self) -> None:
        """End its thread's waiting for the other end."""
        self.gave_way = True
        with contextlib.suppress(OSError):
            # Not SSLSocket.shutdown, which takes the TLS object from under the thread.
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)


class ViewServer(ThreadingHTTPServer):
    """Serves the view over one socket; writes no log line, for it could hold the token.

    Each connection has one request. Of too many the oldest without the token gives way, so that a browser gets in
    beside a flood.
    """

    daemon_threads = True
    block_on_close = False
    timeout = 0.1  # of one turn of the loop

    def __init__(self, listener: socket.socket, source: Source, token: str, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(listener.getsockname()[:2], ViewHandler, bind_and_activate=False)
        self.socket.close()
        self.socket, self.token, self.stopping = listener, token.encode(), False
        self.last_poll = 0.0
        self._watcher, self._tls, self._lock = FileWatcher(source), tls, threading.Lock()
        self._snapshot: Snapshot | None = None
        self._taken = 0.0
        self.connections: dict[object, Connection] = {}

    def serve(self) -> None:
        """Serve until :meth:`stop` is called."""
        with self:
            while not self.stopping:
                self.handle_request()
                self._close_late()
            for connection in self._open():
                connection.shut_down()

    def stop(self) -> None:
        """Have :meth:`serve` end; for another thread."""
        self.stopping = True

    def stop_after_last_look(self) -> None:
        """Have :meth:`serve` end once a page that is open has asked for the last state."""
        end = time.monotonic()
        self._taken = 0.0  # the next look is a fresh one
        while self.last_poll > end - 3 * LOOK_S and time.monotonic() < end + 3 * LOOK_S:
            if self.last_poll > end:
                break
            time.sleep(LOOK_S / 20)
        self.stop()

    def snapshot(self) -> Snapshot:
        """Return the state of the run, half a look old at most, however many look on."""
        with self._lock:
            if self._snapshot is None or time.monotonic() - self._taken > LOOK_S / 2:
                self._snapshot, self._taken = self._watcher.look(), time.monotonic()
            return self._snapshot

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection; the TLS handshake is left to its thread."""
        while len(self.connections) >= MOST_CONNECTIONS + MOST_CLOSING:
            time.sleep(0.01)
            self._close_late()
        try:
            accepted, address = super().get_request()
        except OSError:  # no descriptor is left, or the other end has gone already
            time.sleep(0.1)
            raise
        accepted.settimeout(REQUEST_S)
        if self._tls is not None:
            accepted = self._tls.wrap_socket(accepted, server_side=True, do_handshake_on_connect=False)
        if len(connections := self._open()) >= MOST_CONNECTIONS:
            next((each for each in connections if not each.has_token), connections[0]).shut_down()
        self.connections[accepted] = Connection(accepted, time.monotonic())
        return accepted, address

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(request, socket.SHUT_RDWR)
        request.close()
        self.connections.pop(request, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Pass over connections that end early: no TLS, another one, or no request in time."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    def _open(self) -> list[Connection]:
        return [each for each in list(self.connections.values()) if not each.gave_way]

    def _close_late(self) -> None:
        now = time.monotonic()
        for each in self._open():
            if now - each.opened > (2 * REQUEST_S if each.has_token else REQUEST_S):
                each.shut_down()


class ViewHandler(BaseHTTPRequestHandler):
    """Answers one request: ``/`` is the page, ``/view`` its changing part; nothing can be changed."""

    server: ViewServer

    def handle(self) -> None:
        """Shake hands and answer; the handshake is here, so that a slow one delays nobody else."""
        if isinstance(self.request, ssl.SSLSocket):
            self.request.do_handshake()
        self.handle_one_request()

    def answer(self) -> None:
        """Answer any method; what comes without the token hears nothing."""
        url = urlsplit(self.path)
        given = parse_qs(url.query, encoding="latin-1").get("token", [""])[0]
        if not secrets.compare_digest(given.encode("latin-1"), self.server.token):
            self._send(403, "The address lacks its token: take it whole from the terminal.\n")
            return
        if connection := self.server.connections.get(self.request):
            connection.has_token = True
        if self.command != "GET":
            self._send(405, "")
        elif url.path == "/":
            self._send(200, page(self.server.snapshot()), "text/html")
        elif url.path == "/view":
            part = changing_part(self.server.snapshot())
            self._send(200, part, "text/html")
            self.server.last_poll = time.monotonic()
        else:
            self._send(404, "")

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = answer

    def _send(self, code: int, text: str, kind: str = "text/plain") -> None:
        content = text.encode()
        self.send_response_only(code)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer what is no request of HTTP, without repeating it."""
        self._send(code, "")

    def log_message(self, format: str, *arguments: object) -> None:
        """Write nothing."""


def listening(address: str, port: int) -> socket.socket:
    """Return a socket that listens, had before anything else begins.

    Raises:
        BadInput: If the port cannot be had.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        problem = f"cannot be listened on at {address}: {error}."
        raise BadInput([Fault(f"--port {port}", problem, "Name another with --port.")]) from None


def tls_of(coordinator: Coordinator) -> ssl.SSLContext:
    """Return TLS with the coordinator's certificate."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(coordinator.authority / "server.crt", coordinator.authority / "server.key")
    return tls


def show(coordinator: Coordinator, address: str, port: int, tell: Callable[[str], None]) -> None:
    """Serve the page until this process is told to stop. Only files are read: no run notices.

    Raises:
        BadInput: If the certificate is of no use, or the port cannot be had.
    """
    stop_on(certificate_faults(coordinator))
    certificate = x509.load_pem_x509_certificate((coordinator.authority / "server.crt").read_bytes())
    sha256 = certificate.fingerprint(hashes.SHA256()).hex(":").upper()
    token = secrets.token_urlsafe(24)
    with listening(address, port) as listener:
        host = coordinator.file.hosts[0] if address in EVERYWHERE else address
        host = f"[{host}]" if ":" in host else host
        tell(f"live view: https://{host}:{listener.getsockname()[1]}/?token={token}")
        tell(f"anyone who has this address may look; nobody can change anything. Certificate SHA-256 {sha256}")
        tell(f"for a browser that does not warn: trust {coordinator.ca_certificate}")
        server = ViewServer(listener, source_of(coordinator), token, tls_of(coordinator))
        with graceful_shutdown(0, server.stop):
            server.serve()


@contextlib.contextmanager
def beside(folder: Path, port: int, tell: Callable[[str], None]) -> Iterator[None]:
    """Show the run in ``folder`` on 127.0.0.1 as long as the context lasts, from a process of its own.

    Plain HTTP, for there is no certificate in a simulation: what it says does not leave this machine.

    Raises:
        BadInput: If the port cannot be had.
    """
    token = secrets.token_urlsafe(24)
    with listening(LOOPBACK, port) as listener:
        command = [sys.executable, "-P", "-m", __name__, str(listener.fileno()), str(folder.resolve())]
        viewer = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[listener.fileno()])
        tell(f"live view: http://{LOOPBACK}:{listener.getsockname()[1]}/?token={token}")
    assert viewer.stdin is not None
    try:
        viewer.stdin.write(f"{token}\n".encode())
        viewer.stdin.flush()
        yield
    finally:
        viewer.stdin.close()
        try:
            viewer.wait(LAST_LOOK_S)
        except subprocess.TimeoutExpired:
            viewer.kill()
            viewer.wait()


def main() -> None:
    """Serve until standard input ends, which it also does when the run is killed."""
    os.nice(10)  # the run comes first
    descriptor, folder = int(sys.argv[1]), Path(sys.argv[2])
    token = sys.stdin.readline().strip()
    server = ViewServer(socket.socket(fileno=descriptor), Source("flwr-sim", folder), token)

    def end_with_the_run() -> None:
        sys.stdin.read()
        server.stop_after_last_look()

    threading.Thread(target=end_with_the_run, daemon=True).start()
    server.serve()


if __name__ == "__main__":
    main()
