"""The web server of the live view: two URL paths, only GET requests, access by a secret token in the URL.

``flwr-server status --web`` runs the server for a coordinator. ``flwr-sim run --web`` starts it as a separate process,
``python -m polyclinic.server.reporting.live.server DESCRIPTOR FOLDER``, with the token on standard input.
"""

import asyncio
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
from http import HTTPStatus
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes

from polyclinic.common.errors import BadInput, Fault, raise_faults
from polyclinic.common.system.stopping import graceful_shutdown
from polyclinic.server.coordinator.authority import find_server_certificate_faults
from polyclinic.server.coordinator.folder import CoordinatorFolder
from polyclinic.server.reporting.live.files import RunFileWatcher, RunSnapshot, RunStateSource, make_current_run_source
from polyclinic.server.reporting.live.page import (
    make_content_security_policy,
    render_changing_page_part,
    render_live_page,
)

POLL_INTERVAL_S = 1.0
"""Seconds between two requests of an open page (live.js)."""
MAX_CONNECTIONS = 256
"""High enough that a browser's request is read before its connection is the oldest, even during a flood."""
MIN_CONNECTION_S = 0.3
"""Seconds for which a connection stays open for its request, even if there are too many connections."""
BACKLOG = 1024
REQUEST_TIMEOUT_S = 10.0
"""Seconds after which a connection without the token is closed. With the token, the answer has the same time again."""
VIEWER_EXIT_TIMEOUT_S = 5.0
"""Seconds for which a finished run waits until an open page has loaded the run's final state."""
LOOPBACK = "127.0.0.1"
WILDCARD_ADDRESSES = ("0.0.0.0", "::")

_HEADERS = {
    "Content-Security-Policy": make_content_security_policy(),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Connection": "close",
}


class LiveViewServer:
    """Serves the live view on a listening socket to browsers that know a secret token.

    No log is written, because a log line could contain the token. A connection serves one request. If there are too
    many connections, the oldest one without the token is closed, so that a browser with the token still gets an answer
    during a flood.
    """

    def __init__(
        self, listener: socket.socket, source: RunStateSource, token: str, tls: ssl.SSLContext | None = None
    ) -> None:
        self._listener = listener
        self._token = token.encode()
        self._tls = tls
        self._stopping = False
        self._watcher = RunFileWatcher(source)
        self._snapshot: RunSnapshot | None = None
        self._snapshot_time = 0.0
        self._last_poll = 0.0  # time of an open page's last request
        self._connections: dict[asyncio.Task[None], float] = {}  # task -> time of its acceptance; oldest first
        self._connections_with_token: set[asyncio.Task[None]] = set()

    async def serve_requests(self) -> None:
        """Serve requests until :meth:`stop` is called."""
        self._listener.setblocking(False)
        accepting = asyncio.create_task(self._accept_connections())
        while not self._stopping:
            await asyncio.sleep(0.1)
        tasks = [accepting, *self._connections]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def stop(self) -> None:
        """Make :meth:`serve_requests` return; called from another thread."""
        self._stopping = True

    def stop_after_last_request(self) -> None:
        """Make :meth:`serve_requests` return; if a page is open, first wait until it has loaded the run's final state.

        The wait ends after three times :data:`POLL_INTERVAL_S`.
        """
        run_end = time.monotonic()
        self._snapshot = None  # so that the next request reads the files
        while self._last_poll > run_end - 3 * POLL_INTERVAL_S and time.monotonic() < run_end + 3 * POLL_INTERVAL_S:
            if self._last_poll > run_end:
                break
            time.sleep(POLL_INTERVAL_S / 20)
        self.stop()

    async def _accept_connections(self) -> None:
        while True:
            try:
                accepted, _ = await asyncio.get_running_loop().sock_accept(self._listener)
            except OSError:  # no file descriptor is free, or the caller has closed the connection
                await asyncio.sleep(0.1)
                continue
            if len(self._connections) >= MAX_CONNECTIONS:
                first = next(iter(self._connections))
                without_token = (task for task in self._connections if task not in self._connections_with_token)
                oldest = next(without_token, first)
                time_left_s = self._connections[oldest] + MIN_CONNECTION_S - time.monotonic()
                await asyncio.wait([oldest], timeout=max(0.0, time_left_s))
                oldest.cancel()
                await asyncio.wait([oldest])
            task = asyncio.create_task(self._serve_connection(accepted))
            self._connections[task] = time.monotonic()
            task.add_done_callback(self._connections.pop)
            task.add_done_callback(self._connections_with_token.discard)

    async def _serve_connection(self, accepted: socket.socket) -> None:
        """Complete the TLS handshake, read a request and answer it; close connections that are too slow or not HTTP."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        task = asyncio.current_task()
        assert task is not None
        protocol = asyncio.StreamReaderProtocol(reader)
        with contextlib.suppress(OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            async with asyncio.timeout(REQUEST_TIMEOUT_S) as deadline:
                transport, _ = await loop.connect_accepted_socket(lambda: protocol, accepted, ssl=self._tls)
                try:
                    head = await reader.readuntil(b"\r\n\r\n")
                    method, url = head.partition(b"\r\n")[0].decode("latin-1").split(" ")[:2]
                    token = parse_qs(urlsplit(url).query, encoding="latin-1").get("token", [""])[0]
                    has_token = secrets.compare_digest(token.encode("latin-1"), self._token)
                    if has_token:
                        self._connections_with_token.add(task)
                        deadline.reschedule(loop.time() + REQUEST_TIMEOUT_S)
                    if not has_token:
                        text = "The address lacks its token: take it whole from the terminal.\n"
                        answer = _make_http_response(403, "" if method == "HEAD" else text)
                    elif method != "GET":
                        answer = _make_http_response(405)
                    elif (path := urlsplit(url).path) == "/":
                        answer = _make_http_response(200, render_live_page(self._read_cached_snapshot()), "text/html")
                    elif path == "/view":
                        part = render_changing_page_part(self._read_cached_snapshot())
                        answer = _make_http_response(200, part, "text/html")
                        self._last_poll = time.monotonic()
                    else:
                        answer = _make_http_response(404)
                    writer = asyncio.StreamWriter(transport, protocol, reader, loop)
                    writer.write(answer)
                    writer.close()
                    await writer.wait_closed()
                finally:
                    transport.abort()

    def _read_cached_snapshot(self) -> RunSnapshot:
        """Return the state of the run, read from files at most every half second."""
        if self._snapshot is None or time.monotonic() - self._snapshot_time > POLL_INTERVAL_S / 2:
            self._snapshot = self._watcher.poll_run_snapshot()
            self._snapshot_time = time.monotonic()
        return self._snapshot


def _make_http_response(code: int, text: str = "", kind: str = "text/plain") -> bytes:
    content = text.encode()
    headers = _HEADERS | {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(content))}
    lines = [f"HTTP/1.1 {code} {HTTPStatus(code).phrase}", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + content


def open_listening_socket(address: str, port: int) -> socket.socket:
    """Return a listening socket. Call it early, so that a port in use is an error before anything else starts.

    Raises:
        BadInput: If the port is in use.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        problem = f"cannot be listened on at {address}: {error}."
        raise BadInput([Fault(f"--port {port}", problem, "Name another with --port.")]) from None


def make_tls_server_context(coordinator: CoordinatorFolder) -> ssl.SSLContext:
    """Return a TLS server context with the coordinator's certificate and key."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(coordinator.authority_path / "server.crt", coordinator.authority_path / "server.key")
    return tls


def serve_live_view(coordinator: CoordinatorFolder, address: str, port: int, tell: Callable[[str], None]) -> None:
    """Serve the live view of a coordinator until this process is stopped.

    Raises:
        BadInput: If the certificate cannot be used, or the port is in use.
    """
    raise_faults(find_server_certificate_faults(coordinator))
    certificate = x509.load_pem_x509_certificate((coordinator.authority_path / "server.crt").read_bytes())
    sha256 = certificate.fingerprint(hashes.SHA256()).hex(":").upper()
    token = secrets.token_urlsafe(24)
    with open_listening_socket(address, port) as listener:
        host = coordinator.file.hosts[0] if address in WILDCARD_ADDRESSES else address
        host = f"[{host}]" if ":" in host else host
        tell(f"live view: https://{host}:{listener.getsockname()[1]}/?token={token}")
        tell(f"anyone who has this address may look; nobody can change anything. Certificate SHA-256 {sha256}")
        tell(f"for a browser that does not warn: trust {coordinator.ca_certificate_path}")
        tls = make_tls_server_context(coordinator)
        server = LiveViewServer(listener, make_current_run_source(coordinator), token, tls)
        with graceful_shutdown(0, server.stop):
            asyncio.run(server.serve_requests())


@contextlib.contextmanager
def serve_live_view_during_run(folder: Path, port: int, tell: Callable[[str], None]) -> Iterator[None]:
    """Serve the live view of a run on 127.0.0.1 from a separate process, until the ``with`` block ends.

    The page is served over HTTP, because a simulation has no certificate and the page stays on this machine.

    Args:
        folder: Folder with ``present.json``, the state of the run.
        port: Port of the page; 0 for any free port.
        tell: Prints one line.

    Raises:
        BadInput: If the port is in use.
    """
    token = secrets.token_urlsafe(24)
    with open_listening_socket(LOOPBACK, port) as listener:
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
            viewer.wait(VIEWER_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            viewer.kill()
            viewer.wait()


def main() -> None:
    """Serve the live view until standard input is closed, which happens when the run ends or is killed."""
    os.nice(10)  # the run needs the processor more
    descriptor, folder = int(sys.argv[1]), Path(sys.argv[2])
    token = sys.stdin.readline().strip()
    server = LiveViewServer(socket.socket(fileno=descriptor), RunStateSource("flwr-sim", folder), token)

    def stop_when_run_ends() -> None:
        sys.stdin.read()
        server.stop_after_last_request()

    threading.Thread(target=stop_when_run_ends, daemon=True).start()
    asyncio.run(server.serve_requests())


if __name__ == "__main__":
    main()
