"""Coordinators with a true certificate whose answers are too large: raw HTTP/2, and Flower's calls over gRPC."""

import hashlib
import io
import ssl
import struct
import threading
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from socket import socket
from typing import Any

import grpc

from polyclinic.common import __version__
from polyclinic.common.wire import fleet_protocol as fleet
from polyclinic.common.wire.fleet_protocol import CHUNK_BYTES, HelloAnswer
from polyclinic.common.wire.versions import WIRE_VERSION
from polyclinic.server.coordinator.folder import CoordinatorFolder
from tests.client.handshakes import grpc_server, listening, tls_of
from tests.network.flood import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME,
    HEADERS,
    PING,
    PREFACE,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
    text,
)

Answer = Callable[["Connection", int], None]
"""Answers a call on a stream of a connection."""


def fields(*pairs: tuple[bytes, bytes]) -> bytes:
    """A block of header fields."""
    return b"".join(b"\0" + text(name) + text(value) for name, value in pairs)


BEGIN = fields((b":status", b"200"), (b"content-type", b"application/grpc"))
OK = fields((b"grpc-status", b"0"))


class Connection:
    """The server's end of HTTP/2 over TLS, which answers each call alike and obeys flow control."""

    def __init__(self, tls: ssl.SSLSocket, answer: Answer) -> None:
        self._tls, self._answer = tls, answer
        self._room, self._first_room = {0: 65_535}, 65_535
        self._granted, self._writing = threading.Condition(), threading.Lock()
        self.closed = False

    def serve(self) -> None:
        """Serve until the client closes."""
        threads = list[threading.Thread]()
        with suppress(OSError, EOFError):
            self._read(len(PREFACE))
            self.write(frame(SETTINGS, 0, 0))
            while True:
                head = self._read(9)
                content = self._read(int.from_bytes(head[:3]))
                kind, flags, stream = head[3], head[4], int.from_bytes(head[5:9])
                if kind == HEADERS:
                    with self._granted:
                        self._room.setdefault(stream, self._first_room)
                    threads.append(threading.Thread(target=self._answer_call, args=(stream,)))
                    threads[-1].start()
                self._note(kind, flags, stream, content)
        self.closed = True
        with self._granted:
            self._granted.notify_all()
        for thread in threads:
            thread.join()

    def write(self, content: bytes) -> None:
        with self._writing:
            self._tls.sendall(content)

    def send(self, stream: int, content: bytes) -> None:
        """Send data as fast as the client takes it."""
        place = 0
        while place < len(content):
            with self._granted:
                self._granted.wait_for(lambda: self.closed or min(self._room[0], self._room[stream]) > 0)
                if self.closed:
                    raise EOFError
                size = min(FRAME, len(content) - place, self._room[0], self._room[stream])
                self._room[0] -= size
                self._room[stream] -= size
            self.write(frame(DATA, 0, stream, content[place : place + size]))
            place += size

    def _answer_call(self, stream: int) -> None:
        with suppress(OSError, EOFError):
            self._answer(self, stream)

    def _note(self, kind: int, flags: int, stream: int, content: bytes) -> None:
        if kind == PING and not flags & ACK:
            self.write(frame(PING, ACK, 0, content))
        elif kind == SETTINGS and not flags & ACK:
            self.write(frame(SETTINGS, ACK, 0))
        with self._granted:
            if kind == WINDOW_UPDATE:
                self._room[stream] = self._room.get(stream, self._first_room) + int.from_bytes(content)
            for place in range(0, len(content) if kind == SETTINGS else 0, 6):
                name, value = struct.unpack(">HI", content[place : place + 6])
                if name == 4:  # the window with which a stream begins
                    for other in self._room.keys() - {0}:
                        self._room[other] += value - self._first_room
                    self._first_room = value
            self._granted.notify_all()

    def _read(self, size: int) -> bytes:
        content = b""
        while len(content) < size:
            if not (more := self._tls.recv(size - len(content))):
                raise EOFError
            content += more
        return content


def plain(size: int) -> Answer:
    """So many zeros in clear, or as many of them as the client reads."""

    def answer(connection: Connection, stream: int) -> None:
        connection.write(frame(HEADERS, END_HEADERS, stream, BEGIN))
        connection.send(stream, b"\0" + struct.pack(">I", size))
        for _ in range(size // 2**20):
            connection.send(stream, bytes(2**20))
        connection.write(frame(HEADERS, END_HEADERS | END_STREAM, stream, OK))

    return answer


def compressed(size: int, kind: str) -> Answer:
    """So many zeros, of which a thousandth is on the line."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31 if kind == "gzip" else 15)
    content = b"".join(packer.compress(bytes(2**20)) for _ in range(size // 2**20)) + packer.flush()

    def answer(connection: Connection, stream: int) -> None:
        encoding = fields((b"grpc-encoding", kind.encode()))
        connection.write(frame(HEADERS, END_HEADERS, stream, BEGIN + encoding))
        connection.send(stream, b"\1" + struct.pack(">I", len(content)) + content)
        connection.write(frame(HEADERS, END_HEADERS | END_STREAM, stream, OK))

    return answer


def long_trailers(size: int) -> Answer:
    """A refusal with a reason of so many characters."""

    def answer(connection: Connection, stream: int) -> None:
        connection.write(frame(HEADERS, END_HEADERS, stream, BEGIN))
        block = fields((b"grpc-status", b"9"), (b"grpc-message", b"m" * size))
        parts = [block[place : place + FRAME] for place in range(0, len(block), FRAME)]
        kinds = [HEADERS, *[CONTINUATION] * (len(parts) - 1)]
        for number, (kind, part) in enumerate(zip(kinds, parts, strict=True), 1):
            flags = END_STREAM * (kind == HEADERS) | END_HEADERS * (number == len(parts))
            connection.write(frame(kind, flags, stream, part))

    return answer


def endless_headers(connection: Connection, stream: int) -> None:
    """Header after header, until the client closes."""
    connection.write(frame(HEADERS, 0, stream, BEGIN))
    for number in count():
        connection.write(frame(CONTINUATION, 0, stream, fields((b"x-%d" % number, b"y" * 16_000))))


def trickle(connection: Connection, stream: int) -> None:
    """An answer of a few bytes, one of them now and then."""
    connection.write(frame(HEADERS, END_HEADERS, stream, BEGIN))
    connection.send(stream, b"\0" + struct.pack(">I", 1000))
    for _ in range(1000):
        connection.send(stream, b"\0")
        time.sleep(0.1)


@contextmanager
def raw_coordinator(coordinator: CoordinatorFolder, answer: Answer) -> Iterator[int]:
    """Serve every call with this answer, under the coordinator's certificate; yield the port."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority = coordinator.authority_path
    context.load_cert_chain(authority / "server.crt", authority / "server.key")
    context.set_alpn_protocols(["h2"])

    def handle(connection: socket) -> None:
        with suppress(OSError), context.wrap_socket(connection, server_side=True) as tls:
            Connection(tls, answer).serve()

    with listening(handle) as port:
        yield port


# ---------------------------------------------------------------------- Flower's calls

ARCHIVE = io.BytesIO()
with zipfile.ZipFile(ARCHIVE, "w") as packed:
    packed.writestr("pyproject.toml", "")
BUNDLE = ARCHIVE.getvalue()
"""An app that is a name and nothing more."""
RUN, NODE, ROOT = 7, 5, "r" * 64


def serialized(name: str, **values: Any) -> bytes:
    return bytes(getattr(fleet, name)(**values).SerializeToString())


def envelope(objects: int, **metadata: Any) -> bytes:
    """The announcement of a message of so many objects."""
    facts = {"run_id": RUN, "message_id": ROOT, "src_node_id": 1, "dst_node_id": NODE, "ttl": 600.0, **metadata}
    below = [fleet.ObjectTree(object_id=f"{number:064x}") for number in range(objects - 1)]
    return serialized(
        "PullMessagesResponse",
        messages_list=[fleet.Envelope(metadata=fleet.MetadataFields(created_at=2e9, message_type="train", **facts))],
        message_object_trees=[fleet.ObjectTree(object_id=ROOT, children=below)],
    )


def pulled(content: bytes) -> bytes:
    """The answer with the content of an object."""
    head = serialized("PullObjectResponse", object_found=True, object_available=True)
    return fleet.append_protobuf_field(head, fleet.PULL_CONTENT_FIELD, content)


def object_named(request: bytes) -> str:
    return str(fleet.PullObjectRequest.FromString(request).object_id)


CHUNK = b"ArrayChunk  %d\0" % CHUNK_BYTES + bytes(CHUNK_BYTES)


@dataclass
class HostileFleet(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    """As much of Flower's Fleet API as a site needs to work on one message, and answers of a test in its place.

    Attributes:
        answers: Call -> answer to a request, in place of the usual one.
        compression: How answers of more than a megabyte are compressed.
        errors: Reasons of the errors with which the site has answered the message.
        calls: Number of calls by name.
    """

    answers: Mapping[str, Callable[[bytes], bytes]]
    compression: grpc.Compression = grpc.Compression.NoCompression
    errors: list[str] = field(default_factory=list)
    calls: dict[str, int] = field(default_factory=dict)

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        call = details.method.rpartition("/")[2]

        def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
            self.calls[call] = self.calls.get(call, 0) + 1
            if call in self.answers:
                content = self.answers[call](request)
                if len(content) > 2**20:
                    context.set_compression(self.compression)
                return content
            return self._answer_as_usual(call, request)

        return grpc.unary_unary_rpc_method_handler(answer)

    def _answer_as_usual(self, call: str, request: bytes) -> bytes:
        if call == "Hello":
            hello = HelloAnswer(time=0.0, release=__version__, wire=WIRE_VERSION, key="admitted")
            return hello.model_dump_json().encode()
        if call == "PushMessages":
            self.errors += [
                message.error.reason for message in fleet.PushMessagesRequest.FromString(request).messages_list
            ]
        usual: dict[str, dict[str, Any]] = {
            "ActivateNode": {"node_id": NODE},
            "SendNodeHeartbeat": {"success": True},
            "GetRun": {"run": fleet.Run(run_id=RUN, fab_hash=hashlib.sha256(BUNDLE).hexdigest())},
            "GetFab": {"fab": fleet.Fab(content=BUNDLE)},
            "PullObject": {"object_found": False},
        }
        return serialized(f"{call}Response", **usual.get(call, {}))


@contextmanager
def serving(coordinator: CoordinatorFolder, handler: HostileFleet) -> Iterator[int]:
    """Serve these calls under the coordinator's certificate; yield the port."""
    with grpc_server(handler, tls_of(coordinator)) as port:
        yield port
