"""Splits Flower messages into objects for sending, and joins them again; all our uses of Flower's private names.

Flower splits a message into a tree of objects, whose ids are their SHA-256, and splits arrays into chunks. Its own
functions copy every array six times to send a message and four times to receive it; the functions here copy it once
each. ``tests/test_flower_names.py`` lists the private names, and fails if a release of Flower moves one.
"""

import hashlib
import importlib
import json
import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from flwr.app import Array, Error, Message, MessageType, RecordDict
from flwr.app.message.arraychunk import ArrayChunk
from flwr.supercore.inflatable.inflatable_object import no_object_id_recompute
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

from polyclinic.common.system.plain_text import format_bytes, make_printable_line
from polyclinic.common.wire.fleet_protocol import CHUNK_BYTES, Envelope, MetadataFields, ObjectTree, RecordDictFields

vars(importlib.import_module("flwr.app.message.array"))["FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE"] = CHUNK_BYTES

HASHERS = 2
"""Number of parts of an array that are hashed at the same time."""
LONGEST_HEAD = 64  # bytes of the head of a part of an array: its type and its length
_DIVIDER = b"\x00"  # between an object's head and its body
MOST_RECORDS = 100
"""Most Flower records in one message; ours have a handful."""
PER_ARRAY = 64
"""Bytes that an array counts for beside its content: an empty array takes time, too."""
MOST_SMALL_BYTES = 8 * 2**20
"""Most bytes of all objects of a message that are no parts of arrays: fields, and the lists of parts. Each comes in one
call of at most 5 MiB. Decoded they take up to forty times as much, for example as a list of empty texts."""
NUMBERS_FROM_BYTES = {"float16": 2, "int8": 4}
"""Number format of an array -> memory of its numbers, which are float32 once unpacked, for each byte."""


class MessageTooLarge(ValueError):
    """Raised when a received message would take more memory than is allowed."""


class _CachedArrayChunk(ArrayChunk):
    """A chunk of an array, as Flower sends it; its bytes and object id are computed only once."""

    def __init__(self, data: memoryview) -> None:
        self._content = b"".join((f"{ArrayChunk.__qualname__}  {len(data)}".encode(), _DIVIDER, data))
        self._name = hashlib.sha256(self._content).hexdigest()
        super().__init__(_strip_object_header(self._content))

    @property
    def object_id(self) -> str:
        return self._name

    def deflate(self) -> bytes:
        return self._content


def split_arrays_into_chunks(message: Message) -> None:
    """Split the arrays of a message into chunks once before it is sent; Flower would do so several times."""
    for record in message.content.array_records.values() if message.has_content() else ():
        for array in record.values():
            if "_chunks" not in vars(array):
                view = memoryview(array.data)
                views = [view[start : start + CHUNK_BYTES] for start in range(0, len(view), CHUNK_BYTES)]
                with ThreadPoolExecutor(max(1, min(HASHERS, len(views)))) as pool:
                    parts = list(pool.map(_CachedArrayChunk, views))
                vars(array)["_chunks"] = [(part.object_id, part) for part in parts]


def set_flower_node_identity(node_id: int, run_id: int) -> None:
    """Set the node id and the run id that Flower writes into all later messages of this process."""
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, run_id, node_id


def set_message_id(message: Message, name: str) -> None:
    """Set Flower's id of a message in its metadata."""
    message.metadata.__dict__["_message_id"] = name


def set_message_source(message: Message, node_id: int) -> None:
    """Set the id of the node that sent a message in its metadata."""
    message.metadata.__dict__["_src_node_id"] = node_id


def extract_message_metadata(message: Message) -> dict[str, Any]:
    """Return all metadata of a message as a mapping that can be written as JSON."""
    return dict(vars(message.metadata))


def rebuild_message(content: RecordDict | Error, metadata: Mapping[str, Any]) -> Message:
    """Rebuild a message from its content and :func:`extract_message_metadata`, in another process of the same run."""
    message = Message(content, reply_to=Message(RecordDict(), 1, MessageType.TRAIN))
    vars(message.metadata).update(metadata)
    return message


def make_message_of_envelope(metadata: Any) -> Message:
    """Make a message without content from its announced metadata, to reply to a message that cannot be read.

    Flower makes no reply to a message whose type it does not know; such a message gets the type ``train``.

    Args:
        metadata: Protobuf message with the metadata.
    """
    names = MetadataFields.DESCRIPTOR.fields_by_name
    values = {f"_{name}": getattr(metadata, name) for name in names}
    try:
        Message(RecordDict(), metadata.dst_node_id, metadata.message_type)
    except ValueError:
        values["_message_type"] = MessageType.TRAIN
    return rebuild_message(RecordDict(), values)


def split_message_into_objects(message: Message) -> tuple[Any, dict[str, bytes]]:
    """Split a message into Flower's objects, and set the message's id, which is the hash of its objects.

    Returns:
        The tree of object ids, and object id -> content, children first.
    """
    contents = dict[str, bytes]()

    def collect_objects(part: Any) -> Any:
        children = [collect_objects(child) for child in (part.children or {}).values()]
        if part.object_id not in contents:
            contents[part.object_id] = part.deflate()
        return ObjectTree(object_id=part.object_id, children=children)

    with no_object_id_recompute():
        split_arrays_into_chunks(message)
        tree = collect_objects(message)
    set_message_id(message, tree.object_id)
    return tree, contents


def strip_message_content(message: Message) -> Any:
    """Return a message's metadata, without content, as the protobuf message that announces it."""
    names = MetadataFields.DESCRIPTOR.fields_by_name
    announced = Envelope(metadata=MetadataFields(**{name: getattr(message.metadata, name) for name in names}))
    if message.has_error():
        announced.error.code, announced.error.reason = message.error.code, message.error.reason or ""
    else:
        announced.content.CopyFrom(RecordDictFields())
    return announced


def count_array_bytes(content: RecordDict, most: float = math.inf) -> int:
    """Count the bytes of all arrays in a message's content, plus :data:`PER_ARRAY` for each; stop above ``most``.

    An array of packed numbers counts as float32, as which it is decoded.
    """
    weight = 0
    for record in content.array_records.values():
        for array in record.values():
            weight += len(array.data) * NUMBERS_FROM_BYTES.get(array.dtype, 1) + PER_ARRAY
            if weight > most:
                return weight
    return weight


def rebuild_message_from_objects(message_id: str, contents: Mapping[str, bytes | memoryview], most: float) -> Message:
    """Rebuild a received message from its objects.

    An array can contain the same chunk many times, and a record the same array, although the sender transferred it
    once. So the memory of the message is limited separately from the size of its objects.

    Args:
        message_id: Id of the message, which is the id of its root object.
        contents: Object id -> content.
        most: Maximum bytes of all arrays, see :func:`count_array_bytes`.

    Raises:
        MessageTooLarge: If the arrays have more bytes, other objects more than :data:`MOST_SMALL_BYTES`, or there are
            too many records.
        ValueError: If the objects are not a valid Flower message.
    """
    small = {name: content for name, content in contents.items() if not _is_array_chunk(content)}
    if sum(map(len, small.values())) > MOST_SMALL_BYTES:  # before anything is decoded
        raise MessageTooLarge(f"message {message_id[:8]} has more than {format_bytes(MOST_SMALL_BYTES)} of fields")
    try:
        rest = {name: bytes(content) for name, content in small.items()}
        objects: dict[str, Any] = dict(_join_array_chunks(contents, rest, most))
        message = inflate_object_from_contents(message_id, rest, keep_object_contents=True, objects=objects)
    except MessageTooLarge:
        raise
    except Exception as error:  # as the other side has written it: Flower and protobuf raise a dozen kinds
        reason = make_printable_line(repr(error))
        raise ValueError(f"message {message_id[:8]} cannot be put together: {reason}") from None
    if not isinstance(message, Message):
        raise ValueError(f"object {make_printable_line(message_id, 80)} is no message")
    if message.has_content() and (
        len(message.content) > MOST_RECORDS or count_array_bytes(message.content, most) > most
    ):
        raise MessageTooLarge(f"message {message_id[:8]} has too many records or arrays")
    set_message_id(message, message_id)
    return message


def _join_array_chunks(
    contents: Mapping[str, bytes | memoryview], rest: Mapping[str, bytes], most: float
) -> Iterator[tuple[str, Array]]:
    room = most
    for name, content in rest.items():
        kind, below, _ = content[: content.index(_DIVIDER)].decode().split(" ")
        if kind == "Array":
            children = below.split(",")
            body = json.loads(_strip_object_header(content).tobytes())
            places = body["arraychunk_ids"]
            sizes = {
                place: max(len(_strip_object_header(contents[children[place]])), PER_ARRAY) for place in set(places)
            }
            for place in places:
                room -= sizes[place]
                if room < 0:  # before anything is made of them
                    raise MessageTooLarge(f"array {name[:8]} would take more than {format_bytes(int(most))}")
            chunks = [_strip_object_header(contents[children[place]]) for place in places]
            data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
            yield name, Array(dtype=body["dtype"], shape=tuple(body["shape"]), stype=body["stype"], data=bytes(data))


def _is_array_chunk(content: bytes | memoryview) -> bool:
    """Return True if an object is a chunk of an array."""
    return bytes(content[:LONGEST_HEAD]).startswith(f"{ArrayChunk.__qualname__} ".encode())


def _strip_object_header(content: bytes | memoryview) -> memoryview:
    head = bytes(content[:LONGEST_HEAD]) if _is_array_chunk(content) else bytes(content)
    return memoryview(content)[head.index(_DIVIDER) + 1 :]
