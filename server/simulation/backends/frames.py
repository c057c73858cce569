"""What the coordinator and the process that drives Ray send one another over a socket: a line of JSON, raw bytes."""

import json
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_HEAD = struct.Struct("<Q")
_SIZES = "sizes"
BUFFER_BYTES = 4 * 2**20
"""Of the socket: fewer changes between the two processes."""


@dataclass(frozen=True)
class Frame:
    """One thing that is sent.

    Attributes:
        about: JSON values; ``kind`` says what it is.
        data: Bytes that go with it, in an order that the kind knows.
    """

    about: dict[str, Any]
    data: Sequence[memoryview]


def pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection that no other process can reach."""
    ends = socket.socketpair()
    for end in ends:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
    return ends


def send(connection: socket.socket, about: dict[str, Any], data: Sequence[Any] = ()) -> None:
    """Send one frame.

    Args:
        data: Objects with contiguous bytes; nothing is copied here.

    Raises:
        OSError: If the other side is gone.
    """
    views = [memoryview(one) for one in data]
    head = json.dumps({**about, _SIZES: [view.nbytes for view in views]}).encode()
    connection.sendall(_HEAD.pack(len(head)) + head)
    for view in views:
        connection.sendall(view)


def receive(connection: socket.socket) -> Frame:
    """Wait for one frame.

    Raises:
        EOFError: If the other side is gone.
    """
    (size,) = _HEAD.unpack(_bytes(connection, _HEAD.size))
    about = json.loads(bytes(_bytes(connection, size)))
    return Frame(about, [_bytes(connection, size) for size in about.pop(_SIZES)])


def _bytes(connection: socket.socket, size: int) -> memoryview:
    """So many bytes, read-only."""
    held = memoryview(bytearray(size))
    at = 0
    while at < size:
        try:
            got = connection.recv_into(held[at:])
        except ConnectionError:
            got = 0
        if not got:
            raise EOFError("the other side is gone")
        at += got
    return held.toreadonly()
