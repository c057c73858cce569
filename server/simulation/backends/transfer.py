"""Exchange data between the processes of a simulation on Ray: frames over a socket, Flower messages as bytes."""

import base64
import json
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

from polyclinic.common.wire.flower_messages import make_message, read_metadata
from polyclinic.common.wire.message_objects import decode_record_values, encode_record_values

BUFFER_BYTES = 4 * 2**20
"""Size of the socket's buffers; with large buffers, the two processes wait for each other less often."""
_HEAD_SIZE = struct.Struct("<Q")
_SIZES_KEY = "sizes"
_VALUE_RECORD_CLASSES: dict[str, type[ConfigRecord] | type[MetricRecord]] = {
    "config": ConfigRecord,
    "metrics": MetricRecord,
}
_ARRAYS_KIND = "arrays"


# ---------------------------------------------------------------------- frames


@dataclass(frozen=True)
class TransferFrame:
    """A message between the coordinator's process and the process that drives Ray: JSON values and raw bytes.

    Attributes:
        about: JSON values; ``kind`` is the type of the frame.
        data: Raw bytes, whose meaning depends on the type.
    """

    about: dict[str, Any]
    data: Sequence[memoryview]


def make_private_socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a socket connection that other processes cannot reach."""
    ends = socket.socketpair()
    for end in ends:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
    return ends


def send_frame(connection: socket.socket, about: dict[str, Any], data: Sequence[Any] = ()) -> None:
    """Send one frame over a socket.

    Args:
        data: Objects with contiguous memory, which is sent without a copy.

    Raises:
        OSError: If the other process has closed the connection.
    """
    views = [memoryview(buffer) for buffer in data]
    head = json.dumps({**about, _SIZES_KEY: [view.nbytes for view in views]}).encode()
    connection.sendall(_HEAD_SIZE.pack(len(head)) + head)
    for view in views:
        connection.sendall(view)


def receive_frame(connection: socket.socket) -> TransferFrame:
    """Wait for the next frame on a socket.

    Raises:
        EOFError: If the other process has closed the connection.
    """
    (size,) = _HEAD_SIZE.unpack(_receive_exact_bytes(connection, _HEAD_SIZE.size))
    about = json.loads(bytes(_receive_exact_bytes(connection, size)))
    return TransferFrame(about, [_receive_exact_bytes(connection, size) for size in about.pop(_SIZES_KEY)])


def _receive_exact_bytes(connection: socket.socket, size: int) -> memoryview:
    """Receive exactly ``size`` bytes; return them read-only."""
    buffer = memoryview(bytearray(size))
    received = 0
    while received < size:
        try:
            count = connection.recv_into(buffer[received:])
        except ConnectionError:
            count = 0
        if not count:
            raise EOFError("the other process has closed the connection")
        received += count
    return buffer.toreadonly()


# ---------------------------------------------------------------------- Flower messages


def pack_flower_message(message: Message) -> tuple[bytes, list[bytes]]:
    """Split a Flower message into a small JSON head and the bytes of its arrays; the arrays are not copied."""
    head: dict[str, Any] = {"metadata": read_metadata(message)}
    if not message.has_content():
        head["error"] = message.error.code, message.error.reason
        return json.dumps(head).encode(), []
    records = head["records"] = list[tuple[str, str, Any]]()  # values in Flower's encoding, arrays without their bytes
    for name, record in message.content.items():
        if isinstance(record, ArrayRecord):
            arrays = [(key, array.dtype, array.shape, array.stype) for key, array in record.items()]
            records.append((name, _ARRAYS_KIND, arrays))
        else:
            kind = "config" if isinstance(record, ConfigRecord) else "metrics"
            records.append((name, kind, base64.b64encode(encode_record_values(record)).decode()))
    return json.dumps(head).encode(), [array.data for array in _list_message_arrays(message.content)]


def unpack_flower_message(head: Any, arrays: Sequence[Any]) -> Message:
    """Return the message of a head and the bytes of arrays (:func:`pack_flower_message`); they are not copied."""
    description = json.loads(bytes(head))
    if "error" in description:
        return make_message(Error(*description["error"]), description["metadata"])
    content = RecordDict()
    for name, kind, value in description["records"]:
        if kind == _ARRAYS_KIND:
            empty_arrays = {key: Array(dtype, tuple(shape), stype, b"") for key, dtype, shape, stype in value}
            content[name] = ArrayRecord(empty_arrays)
        else:
            content[name] = _VALUE_RECORD_CLASSES[kind](decode_record_values(base64.b64decode(value)))
    for array, data in zip(_list_message_arrays(content), arrays, strict=True):
        array.data = data
    return make_message(content, description["metadata"])


def _list_message_arrays(content: RecordDict) -> Iterator[Array]:
    for record in content.values():
        if isinstance(record, ArrayRecord):
            yield from record.values()
