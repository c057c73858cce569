"""Encode Flower's messages as objects, and decode them, in the format of Flower 1.39 to 1.42.

A message is a tree of objects. Each object is a head, a zero byte and a body; its id is the SHA-256 of all three. The
head is ``KIND CHILDREN LENGTH``: the ids of the children, separated by commas, and the length of the body. The kinds:

==============  =================================================  =====================================
kind            body                                               children
==============  =================================================  =====================================
Message         protobuf: metadata without message id, or error    a RecordDict, none with an error
RecordDict      JSON: record's name -> object id                   its records
ArrayRecord     JSON: array's name -> object id                    its arrays
ConfigRecord    protobuf: names and values                         none
MetricRecord    protobuf: names and values                         none
Array           JSON: dtype, shape, stype, indices of its chunks   its chunks, once each
ArrayChunk      a part of the array's bytes                        none
==============  =================================================  =====================================

Flower's functions copy every array six times to send a message and four times to receive it; these functions copy it
once each. ``tests/common/test_message_objects.py`` compares the bytes with those of the installed Flower.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

from polyclinic.common.system.plain_text import format_bytes, make_printable_line
from polyclinic.common.wire.fleet_protocol import (
    CHUNK_BYTES,
    Envelope,
    MetadataFields,
    ObjectTree,
    RecordDictFields,
    make_protobuf_message_classes,
)
from polyclinic.common.wire.flower_messages import (
    METADATA_FIELDS,
    make_array_of_view,
    make_message,
    read_metadata,
    select_array_records,
)

HASHING_THREADS = 2
"""Number of chunks of an array that are hashed at the same time."""
MAX_RECORDS = 100
"""Maximum number of Flower records in one message; ours have a handful."""
BYTES_PER_ARRAY = 64
"""Bytes that are counted for each array in addition to its content, because an empty array takes time, too."""
MAX_SMALL_BYTES = 8 * 2**20
"""Maximum size of all objects of a message except chunks of arrays: fields, and lists of parts.

Each is sent in one call of at most 5 MiB. Decoded they take up to forty times as much memory, for example as a list of
empty texts.
"""
UNPACKED_BYTES_PER_BYTE = {"float16": 2, "int8": 4}
"""Number format of an array -> bytes of memory per packed byte, because numbers are unpacked to float32."""
INT64_MAX = 2**63 - 1

_HEAD_SEPARATOR = b"\x00"
_MAX_CHUNK_HEAD_BYTES = 64  # a chunk has no children, so its head is its kind and its length
_CHUNKS_ATTRIBUTE = "polyclinic_chunks"  # attribute that we add to an Array after it was split

_RECORD_DEFINITIONS = """
DoubleList: 1 double* vals
SintList: 1 sint64* vals
UintList: 1 uint64* vals
BoolList: 1 bool* vals
StringList: 1 string* vals
BytesList: 1 bytes* vals
Value: 1 double? double, 2 sint64? sint64, 3 uint64? uint64, 4 bool? bool, 5 string? string, 6 bytes? bytes, \
21 DoubleList? double_list, 22 SintList? sint_list, 23 UintList? uint_list, 24 BoolList? bool_list, \
25 StringList? string_list, 26 BytesList? bytes_list
Item: 1 string key, 2 Value value
Record: 1 Item* items
"""
_RECORD_CLASSES = {
    name.rpartition(".")[2]: made
    for name, made in make_protobuf_message_classes("polyclinic.record", _RECORD_DEFINITIONS).items()
}
_Record = _RECORD_CLASSES["Record"]
_Value = _RECORD_CLASSES["Value"]

# The types of a record's values, in the order in which Flower tries them; an empty list has the first type.
_CONFIG_TYPES: tuple[type, ...] = (bool, int, float, str, bytes)
_METRIC_TYPES: tuple[type, ...] = (float, int)
_VALUE_FIELDS: Mapping[type, tuple[str, str]] = {
    bool: ("bool", "bool_list"),
    int: ("sint64", "sint_list"),
    float: ("double", "double_list"),
    str: ("string", "string_list"),
    bytes: ("bytes", "bytes_list"),
}


class MessageTooLarge(ValueError):
    """Raised when a received message would take more memory than is allowed."""


# ---------------------------------------------------------------------- encoding


@dataclass(frozen=True)
class _Chunk:
    """A chunk of an array as an object.

    Attributes:
        object_id: Id of the object.
        content: Bytes of the object, including its head.
    """

    object_id: str
    content: bytes


def encode_message_objects(message: Message) -> tuple[Any, dict[str, bytes]]:
    """Encode a message as objects.

    Returns:
        The tree of object ids (:data:`ObjectTree`), whose root is the message's id; and object id -> content, children
        first.
    """
    contents: dict[str, bytes] = {}
    children = [_encode_record_dict(message.content, contents)] if message.has_content() else []
    body = _make_envelope(message, "").SerializeToString(deterministic=True)
    return _add_object("Message", children, body, contents), contents


def make_announcement(message: Message, message_id: str) -> Any:
    """Return the protobuf message that announces a message: its metadata with this id, and its error, if there
    is one.
    """
    envelope = _make_envelope(message, message_id)
    if message.has_content():
        envelope.content.CopyFrom(RecordDictFields())
    return envelope


def _make_envelope(message: Message, message_id: str) -> Any:
    envelope = Envelope(metadata=MetadataFields(**read_metadata(message) | {"message_id": message_id}))
    if message.has_error():
        envelope.error.code = message.error.code
        envelope.error.reason = message.error.reason or ""
    return envelope


def encode_record_values(record: ConfigRecord | MetricRecord) -> bytes:
    """Encode the names and values of a record as protobuf.

    Raises:
        TypeError: If a value is of a type that Flower does not allow.
    """
    types = _CONFIG_TYPES if isinstance(record, ConfigRecord) else _METRIC_TYPES
    encoded = _Record()
    for key, value in record.items():
        encoded.items.add(key=key, value=_encode_value(value, types))
    return bytes(encoded.SerializeToString())


def _encode_value(value: Any, types: Iterable[type]) -> Any:
    items: list[Any] = value if isinstance(value, list) else [value]
    kind = next((kind for kind in types if all(isinstance(item, kind) for item in items)), None)
    if kind is None:
        raise TypeError(f"a record cannot have the value {value!r}")

    single, several = _VALUE_FIELDS[kind]
    if kind is int and any(item > INT64_MAX for item in items):
        single, several = "uint64", "uint_list"
    if not isinstance(value, list):
        return _Value(**{single: value})
    encoded = _Value()
    values = getattr(encoded, several)
    values.SetInParent()  # without this, an empty list would be a missing value
    values.vals.extend(items)
    return encoded


def _add_object(kind: str, children: Sequence[Any], body: bytes, contents: dict[str, bytes]) -> Any:
    """Add an object to ``contents``; return its tree, in which each child occurs once."""
    below = {child.object_id: child for child in children}
    content = b"".join((_make_head(kind, below, len(body)), _HEAD_SEPARATOR, body))
    object_id = hashlib.sha256(content).hexdigest()
    contents.setdefault(object_id, content)
    return ObjectTree(object_id=object_id, children=below.values())


def _make_head(kind: str, children: Iterable[str], length: int) -> bytes:
    return f"{kind} {','.join(children)} {length}".encode()


def _encode_record_dict(content: RecordDict, contents: dict[str, bytes]) -> Any:
    trees = {name: _encode_record(record, contents) for name, record in content.items()}
    return _add_object("RecordDict", list(trees.values()), _encode_ids(trees), contents)


def _encode_record(record: ArrayRecord | ConfigRecord | MetricRecord, contents: dict[str, bytes]) -> Any:
    if isinstance(record, ArrayRecord):
        trees = {name: _encode_array(array, contents) for name, array in record.items()}
        return _add_object("ArrayRecord", list(trees.values()), _encode_ids(trees), contents)
    kind = "ConfigRecord" if isinstance(record, ConfigRecord) else "MetricRecord"
    return _add_object(kind, (), encode_record_values(record), contents)


def _encode_ids(trees: Mapping[str, Any]) -> bytes:
    return json.dumps({name: tree.object_id for name, tree in trees.items()}).encode()


def _encode_array(array: Array, contents: dict[str, bytes]) -> Any:
    chunks = split_array_into_chunks(array)
    ids = list(dict.fromkeys(chunk.object_id for chunk in chunks))
    for chunk in chunks:
        contents.setdefault(chunk.object_id, chunk.content)
    index_by_id = {object_id: index for index, object_id in enumerate(ids)}
    body = {
        "dtype": array.dtype,
        "shape": array.shape,
        "stype": array.stype,
        "arraychunk_ids": [index_by_id[chunk.object_id] for chunk in chunks],
    }
    children = [ObjectTree(object_id=object_id) for object_id in ids]
    return _add_object("Array", children, json.dumps(body).encode(), contents)


def split_array_into_chunks(array: Array) -> Sequence[_Chunk]:
    """Split an array's bytes into chunk objects; an array that goes to many sites is split and hashed only once."""
    data = array.data
    earlier: tuple[bytes, Sequence[_Chunk]] | None = vars(array).get(_CHUNKS_ATTRIBUTE)
    if earlier is not None and earlier[0] is data:
        return earlier[1]
    view = memoryview(data)
    parts = [view[start : start + CHUNK_BYTES] for start in range(0, len(view), CHUNK_BYTES)]
    with ThreadPoolExecutor(max(1, min(HASHING_THREADS, len(parts)))) as pool:
        chunks = list(pool.map(_encode_chunk, parts))
    vars(array)[_CHUNKS_ATTRIBUTE] = data, chunks
    return chunks


def forget_array_chunks(content: RecordDict) -> None:
    """Delete the chunks that encoding has stored at a message's arrays; they are as large as the arrays."""
    for record in select_array_records(content).values():
        for array in record.values():
            vars(array).pop(_CHUNKS_ATTRIBUTE, None)


def _encode_chunk(part: memoryview) -> _Chunk:
    content = b"".join((_make_head("ArrayChunk", (), len(part)), _HEAD_SEPARATOR, part))
    return _Chunk(hashlib.sha256(content).hexdigest(), content)


# ---------------------------------------------------------------------- decoding

Contents = Mapping[str, bytes | memoryview]
JoinChunks = Callable[[Sequence[memoryview]], bytes | memoryview]
"""A function that joins the chunks of an array."""


def join_chunks_in_memory(chunks: Sequence[memoryview]) -> bytes:
    """Return the bytes of all chunks, one after another."""
    return bytes(chunks[0]) if len(chunks) == 1 else b"".join(chunks)


def decode_message_objects(
    message_id: str, contents: Contents, limit: float, join: JoinChunks = join_chunks_in_memory
) -> Message:
    """Decode a received message from its objects.

    An array can contain the same chunk many times, and a record the same array, although the sender transferred it only
    once. So the memory of the message is limited separately from the size of its objects.

    Args:
        message_id: Id of the message, which is the id of its root object.
        contents: Object id -> content.
        limit: Maximum bytes of all arrays, see :func:`count_array_bytes`.
        join: Joins the chunks of an array, in memory or in a file.

    Raises:
        MessageTooLarge: If the arrays have more bytes, other objects more than :data:`MAX_SMALL_BYTES`, or there are
            too
            many records.
        ValueError: If the objects are not a valid Flower message.
    """
    small = sum(len(content) for content in contents.values() if not _is_array_chunk(content))
    if small > MAX_SMALL_BYTES:  # before anything is decoded
        raise MessageTooLarge(f"message {message_id[:8]} has more than {format_bytes(MAX_SMALL_BYTES)} of fields")
    try:
        return _Decoder(contents, limit, join).decode_message(message_id)
    except MessageTooLarge:
        raise
    except Exception as error:  # JSON, protobuf and Flower raise a dozen exception classes on invalid content
        reason = make_printable_line(repr(error))
        raise ValueError(f"message {message_id[:8]} cannot be put together: {reason}") from None


def decode_record_values(encoded: bytes | memoryview) -> dict[str, Any]:
    """Decode the names and values of a record from protobuf, in their order.

    Raises:
        ValueError: If the bytes are not a record, or a value has no type.
    """
    record = _Record.FromString(bytes(encoded))
    return {item.key: _decode_value(item.value) for item in record.items}


def _decode_value(value: Any) -> Any:
    field = value.WhichOneof("value")
    if field is None:
        raise ValueError("a value is of no type")
    decoded = getattr(value, field)
    return list(decoded.vals) if field.endswith("_list") else decoded


class _Decoder:
    """Decodes the objects of one message; each level allows fixed kinds only, so no tree can be deeper than ours.

    Args:
        contents: Object id -> content.
        limit: Maximum bytes of all arrays.
        join: Joins the chunks of an array.
    """

    def __init__(self, contents: Contents, limit: float, join: JoinChunks) -> None:
        self._contents = contents
        self._join = join
        self._limit = limit
        self._remaining_bytes = limit
        self._arrays: dict[str, tuple[Array, int]] = {}  # an array with several names is decoded once

    def decode_message(self, message_id: str) -> Message:
        _, children, body = self._split_object(message_id, "Message")
        envelope = Envelope.FromString(bytes(body))
        metadata = {name: getattr(envelope.metadata, name) for name in METADATA_FIELDS} | {"message_id": message_id}
        if envelope.HasField("error"):
            if children:
                raise ValueError("an error has no content")
            return make_message(Error(envelope.error.code, envelope.error.reason or None), metadata)
        (content_id,) = children
        return make_message(self._decode_record_dict(content_id), metadata)

    def _decode_record_dict(self, object_id: str) -> RecordDict:
        kind, children, body = self._split_object(object_id, "RecordDict")
        names = _read_names_of_children(kind, children, body)
        if len(names) > MAX_RECORDS:
            raise MessageTooLarge(f"a message has {len(names)} records; {MAX_RECORDS} is the most")
        return RecordDict({name: self._decode_record(child) for name, child in names.items()})

    def _decode_record(self, object_id: str) -> ArrayRecord | ConfigRecord | MetricRecord:
        kind, children, body = self._split_object(object_id, "ArrayRecord", "ConfigRecord", "MetricRecord")
        if kind == "ArrayRecord":
            arrays = ArrayRecord()  # filled below, because its constructor copies arrays and refuses views
            for name, child in _read_names_of_children(kind, children, body).items():
                arrays[name] = self._decode_array(child)
            return arrays
        if children:
            raise ValueError(f"a {kind} has no children")
        values = decode_record_values(body)
        return ConfigRecord(values) if kind == "ConfigRecord" else MetricRecord(values)

    def _decode_array(self, object_id: str) -> Array:
        if object_id in self._arrays:
            array, size = self._arrays[object_id]
            self._reserve_bytes(size)
            return array
        _, children, body = self._split_object(object_id, "Array")
        description = json.loads(bytes(body))
        pieces = [self._split_object(child, "ArrayChunk")[2] for child in children]
        indices = description["arraychunk_ids"]
        if any(type(index) is not int or not 0 <= index < len(pieces) for index in indices):
            raise ValueError("an array names a chunk that it does not have")
        chunks = [pieces[index] for index in indices]
        joined = sum(map(len, chunks)) * UNPACKED_BYTES_PER_BYTE.get(description["dtype"], 1) + BYTES_PER_ARRAY
        size = max(joined, sum(max(len(chunk), BYTES_PER_ARRAY) for chunk in chunks))
        self._reserve_bytes(size)  # before the chunks are joined
        array = make_array_of_view(
            description["dtype"], tuple(description["shape"]), description["stype"], self._join(chunks)
        )
        self._arrays[object_id] = array, size
        return array

    def _reserve_bytes(self, size: int) -> None:
        self._remaining_bytes -= size
        if self._remaining_bytes < 0:
            raise MessageTooLarge(f"its arrays would take more than {format_bytes(int(self._limit))}")

    def _split_object(self, object_id: str, *kinds: str) -> tuple[str, list[str], memoryview]:
        """Return an object's kind, its children's ids and its body.

        Raises:
            ValueError: If it is not of one of ``kinds``, or its length is wrong.
        """
        content = self._contents[object_id]
        end = _find_head_length(content)
        kind, below, length = bytes(content[:end]).decode().split(" ")
        body = memoryview(content)[end + 1 :]
        if kind not in kinds or int(length) != len(body):
            raise ValueError(f"object {object_id[:8]} is no {' or '.join(kinds)}")
        return kind, below.split(",") if below else [], body


def _read_names_of_children(kind: str, children: list[str], body: memoryview) -> dict[str, str]:
    """Return name -> object id of a record's parts; the parts must be exactly the children of the object."""
    names = json.loads(bytes(body))
    if not isinstance(names, dict) or set(names.values()) != set(children):
        raise ValueError(f"a {kind} does not name its children")
    return names


def _is_array_chunk(content: bytes | memoryview) -> bool:
    return bytes(content[:_MAX_CHUNK_HEAD_BYTES]).startswith(b"ArrayChunk ")


def _find_head_length(content: bytes | memoryview) -> int:
    """Return the length of an object's head; only the first bytes of a large chunk are searched."""
    start = bytes(content[:_MAX_CHUNK_HEAD_BYTES])
    end = start.find(_HEAD_SEPARATOR)
    return end if end >= 0 else bytes(content).index(_HEAD_SEPARATOR)


def count_array_bytes(content: RecordDict) -> int:
    """Return the bytes of all arrays in a message's content, plus :data:`BYTES_PER_ARRAY` for each.

    An array of packed numbers counts as float32, the format to which it is unpacked.
    """
    weight = 0
    for record in select_array_records(content).values():
        for array in record.values():
            weight += len(array.data) * UNPACKED_BYTES_PER_BYTE.get(array.dtype, 1) + BYTES_PER_ARRAY
    return weight
