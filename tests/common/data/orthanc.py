"""A real PACS: Orthanc with its DICOMweb plug-in, from Debian's packages, on this machine for one test.

Debian's build (1.10.1 with its OpenSSL) ends with a segmentation fault at the first request over TLS. So TLS ends in
front of it, in a relay of bytes, as it does in a hospital that has a reverse proxy.
"""

import json
import select
import shutil
import socket
import socketserver
import ssl
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.certificates import self_signed

PROGRAM = shutil.which("Orthanc")
PLUGIN = Path("/usr/share/orthanc/plugins/libOrthancDicomWeb.so")
MISSING = "needs a PACS: apt-get install orthanc orthanc-dicomweb"
USER, PASSWORD = "polyclinic", "not-a-secret"


def is_installed() -> bool:
    """Whether there is such a server on this machine."""
    return PROGRAM is not None and PLUGIN.is_file()


@dataclass(frozen=True)
class Pacs:
    """A server that answers; ``ca_file`` judges its certificate.

    Attributes:
        port: Of the server itself, without TLS.
        tls_port: Of the relay in front of it.
    """

    port: int
    tls_port: int
    ca_file: Path

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.tls_port}/dicom-web"

    def administrator(self) -> httpx.Client:
        """Speak to it as its administrator."""
        return httpx.Client(base_url=f"http://127.0.0.1:{self.port}", auth=(USER, PASSWORD), trust_env=False)

    def store(self, files: Iterable[bytes]) -> None:
        """Put these DICOM files into it."""
        with self.administrator() as client:
            for content in files:
                client.post("/instances", content=content).raise_for_status()


@contextmanager
def running(folder: Path) -> Iterator[Pacs]:
    """Start the server in a folder, with TLS and a password; end it in the end."""
    assert PROGRAM
    ca_file, both = self_signed(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {
        "StorageDirectory": str(folder / "db"),
        "IndexDirectory": str(folder / "db"),
        "HttpPort": port,
        "DicomServerEnabled": False,
        "RemoteAccessAllowed": False,
        "AuthenticationEnabled": True,
        "RegisteredUsers": {USER: PASSWORD},
        "Plugins": [str(PLUGIN)],
        "DicomWeb": {"Enable": True, "Root": "/dicom-web/"},
    }
    (folder / "orthanc.json").write_text(json.dumps(settings), encoding="utf-8")
    with (folder / "orthanc.log").open("wb") as log, relay(port, both) as tls_port:
        program = subprocess.Popen([PROGRAM, str(folder / "orthanc.json")], stdout=log, stderr=log, cwd=folder)
        pacs = Pacs(port, tls_port, ca_file)
        try:
            _wait(pacs, program, folder / "orthanc.log")
            yield pacs
        finally:
            program.terminate()
            program.wait(timeout=30)


def _wait(pacs: Pacs, program: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + 60
    with pacs.administrator() as client:
        while time.monotonic() < until and program.poll() is None:
            try:
                client.get("/system").raise_for_status()
                return
            except httpx.TransportError:
                time.sleep(0.1)
    raise AssertionError(log.read_text(encoding="utf-8", errors="replace")[-3000:])


@contextmanager
def relay(port: int, certificate_and_key: Path) -> Iterator[int]:
    """Take TLS off what comes to a port of 127.0.0.1, which is returned, and hand it on to another."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate_and_key)

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with (
                suppress(OSError),
                context.wrap_socket(self.request, server_side=True) as outside,
                socket.create_connection(("127.0.0.1", port)) as inside,
            ):
                _pumped(outside, inside)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def _pumped(outside: ssl.SSLSocket, inside: socket.socket) -> None:
    while True:
        ready = [outside] if outside.pending() else select.select([outside, inside], [], [], 60)[0]
        if not ready:
            return
        for one in ready:
            data = one.recv(65536)
            if not data:
                return
            (inside if one is outside else outside).sendall(data)
