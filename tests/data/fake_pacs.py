"""A small PACS in this process that answers QIDO-RS and WADO-RS byte by byte as a test wants: rightly, or not."""

import json
import socketserver
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import numpy as np

from tests.data.dicom_files import dicom

BOUNDARY = "a-boundary"


@dataclass(frozen=True)
class Picture:
    """One image in the archive."""

    study: str
    instance: str
    patient: str
    accession: str
    content: bytes
    modality: str = "DX"

    def as_json(self) -> dict[str, object]:
        attributes = {
            "00080018": self.instance,
            "0020000D": self.study,
            "0020000E": f"{self.study}.9",
            "00080050": self.accession,
            "00080060": self.modality,
            "00100020": self.patient,
        }
        return {tag: {"vr": "UI", "Value": [value]} for tag, value in attributes.items() if value}


def picture(number: int, study: int, patient: str, modality: str = "DX") -> Picture:
    """Image ``number`` of a study: noise of its own."""
    uid = f"1.2.{study}.{number}"
    pixels = np.random.default_rng([study, number]).integers(0, 4096, (16, 16), np.uint16)
    content = dicom(pixels, SOPInstanceUID=uid, StudyInstanceUID=f"1.2.{study}", PatientID=patient, Modality=modality)
    return Picture(f"1.2.{study}", uid, patient, f"A{study}", content, modality)


@dataclass
class Request:
    """What a client sent."""

    path: str
    query: dict[str, str]
    headers: dict[str, str]


Answer = Callable[[Request], Iterable[bytes]]


@dataclass
class FakePacs:
    """What it holds, what it was asked, and what it answers in the place of the truth.

    Attributes:
        page: Results of a search at a time, no matter how many are asked for.
        instead: Answers to addresses that contain these words.
        secret: Value of the header without which it answers 401.
    """

    pictures: list[Picture]
    port: int = 0
    scheme: str = "http"
    page: int = 3
    secret: str = ""
    instead: dict[str, Answer] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}/dicom-web"

    def answer(self, request: Request) -> Iterable[bytes]:
        self.requests.append(request)
        if self.secret and request.headers.get("authorization") != self.secret:
            return reply(b"", status=401)
        for words, answer in self.instead.items():
            if words in request.path:
                return answer(request)
        return self.truth(request)

    def truth(self, request: Request) -> Iterable[bytes]:
        """Answer as the standard says."""
        parts = request.path.removeprefix("/dicom-web").strip("/").split("/")
        if len(parts) == 6:
            contents = [image.content for image in self.pictures if image.instance == parts[5]]
            return multipart(contents[0]) if contents else reply(b"", status=404)
        query, study = request.query, parts[1] if len(parts) == 3 else None
        results = [
            image.as_json()
            for image in self.pictures
            if study in (None, image.study)
            and query.get("AccessionNumber") in (None, image.accession)
            and query.get("SOPInstanceUID") in (None, image.instance)
        ]
        start = int(query.get("offset", 0))
        return as_json(results[start : start + min(self.page, int(query["limit"]))])


def reply(content: bytes, kind: str = "text/plain", status: int = 200, **headers: str) -> Iterator[bytes]:
    """A whole answer; headers with a dash are written with a low line."""
    fields = {"Content-Type": kind, "Content-Length": str(len(content))}
    fields |= {name.replace("_", "-"): value for name, value in headers.items()}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items() if value)
    yield f"HTTP/1.1 {status} said\r\n{head}\r\n".encode() + content


def as_json(objects: list[dict[str, object]]) -> Iterator[bytes]:
    return reply(json.dumps(objects).encode(), "application/dicom+json")


def multipart(content: bytes, kind: str = "application/dicom", copies: int = 1) -> Iterator[bytes]:
    """One part, or the same several times."""
    part = f"--{BOUNDARY}\r\nContent-Type: {kind}\r\n\r\n".encode() + content + b"\r\n"
    body = part * copies + f"--{BOUNDARY}--".encode()
    return reply(body, f'multipart/related; type="application/dicom"; boundary={BOUNDARY}')


def drops(beginning: bytes, each: bytes = b"x", pause_s: float = 0.05) -> Iterator[bytes]:
    """A beginning, and then a byte now and then, without end."""
    yield beginning
    while True:
        time.sleep(pause_s)
        yield each


@contextmanager
def running(pacs: FakePacs, certificate_and_key: Path | None = None) -> Iterator[FakePacs]:
    """Answer on a port of 127.0.0.1, with TLS where there is a certificate."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            with suppress(OSError):
                while line := self.rfile.readline().decode():
                    address = urlsplit(line.split(" ")[1])
                    pairs = (line.decode().split(":", 1) for line in iter(self.rfile.readline, b"\r\n"))
                    headers = {name.lower(): value.strip() for name, value in pairs}
                    query = {name: values[0] for name, values in parse_qs(address.query).items()}
                    for piece in pacs.answer(Request(address.path, query, headers)):
                        self.wfile.write(piece)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        if certificate_and_key is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate_and_key)
            # The handshake is part of the answer, in the thread of its own that each connection has.
            server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
            pacs.scheme = "https"
        server.block_on_close = False
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        pacs.port = server.server_address[1]
        yield pacs
        server.shutdown()
