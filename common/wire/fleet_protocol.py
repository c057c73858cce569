"""Our own protobuf classes for the messages of Flower's Fleet API (1.39 to 1.42), between sites and coordinator.

The link is a gRPC service of our own. It has Flower's names of calls and fields, and carries Flower's messages; Flower
itself has had no gRPC service since 1.43.

Flower moves and changes its own generated classes between releases. The field numbers below, which determine the bytes,
are the same, and a test compares them with the installed Flower. Fields that neither side reads are left out, because
protobuf skips unknown fields.

One field is our addition: :data:`SMALL_CONTENTS`. It sends small objects in the call that announces their message,
instead of one call each. A program without this field skips it and transfers every object separately.
"""

import hashlib
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from polyclinic.common.system.plain_text import make_printable_line
from polyclinic.common.wire.release_name import ReleaseName
from polyclinic.common.wire.versions import WIRE_VERSION

SERVICE = "flwr.proto.Fleet"
COORDINATOR = 1
"""Flower's number of the SuperLink itself, as source and destination of messages."""
ROLL_CALL, REFUSAL, QUESTION = "query.roll_call", "query.refusal", "query.question"
"""Types of the messages with the records ``RollCall``, ``Refusal`` and ``Question``, of Flower's kind ``query``."""
COUNT = "query.count"
"""Type of the messages with the record ``CountRequest``."""
SCORING = "query.scoring"
"""Type of the messages with the record ``ScoringRequest``."""
DELIVERY = "query.delivery"
"""Type of the messages with the record ``DeliveryRequest``."""
CHUNK_BYTES = 4 * 2**20
"""Largest part of an array that travels as one object. The SuperLink has one or two of them in memory for each hospital
that sends or receives: with 16 MiB it took 740 MB instead of 320 for twelve hospitals with a ResNet-18, and a twentieth
less CPU time."""
LARGEST_CALL = CHUNK_BYTES + 2**20
"""Bytes of one call at most: a chunk of an array is the largest part of a message. Flower 1.39 allows 2 GiB."""

SMALL_CONTENTS = "small_contents"
"""Field with the contents of a message's small objects; each is named by its SHA-256."""
SMALL_BYTES, SMALL_BYTES_IN_ALL = 32 * 2**10, 128 * 2**10
"""Largest small object, and largest sum of those of one message: a few seconds on a slow line."""

MESSAGES = """
Node: 1 uint64 node_id
Error: 1 sint64 code, 2 string reason
RecordDict:
Metadata: 1 uint64 run_id, 2 string message_id, 3 uint64 src_node_id, 4 uint64 dst_node_id, \
5 string reply_to_message_id, 6 string group_id, 7 double ttl, 8 string message_type, 9 double created_at
Message: 1 Metadata metadata, 2 RecordDict content, 3 Error error
ObjectTree: 1 string object_id, 2 ObjectTree* children
Run: 1 uint64 run_id, 5 string fab_hash
Fab: 1 string hash_str, 2 bytes content
ActivateNodeRequest: 1 bytes public_key, 2 double heartbeat_interval
ActivateNodeResponse: 1 uint64 node_id
DeactivateNodeRequest: 1 uint64 node_id
DeactivateNodeResponse:
SendNodeHeartbeatRequest: 1 Node node, 2 double heartbeat_interval
SendNodeHeartbeatResponse: 1 bool success
PullMessagesRequest: 1 Node node
PullMessagesResponse: 2 Message* messages_list, 3 ObjectTree* message_object_trees, 1000 bytes* small_contents
PushMessagesRequest: 1 Node node, 2 Message* messages_list, 3 ObjectTree* message_object_trees, \
1000 bytes* small_contents
Result: 1 string key, 2 uint32 value
PushMessagesResponse: 2 Result* results, 3 string* objects_to_push, 4 string session_id
GetRunRequest: 1 Node node, 2 uint64 run_id
GetRunResponse: 1 Run run
GetFabRequest: 1 Node node, 2 string hash_str, 3 uint64 run_id
GetFabResponse: 1 Fab fab
PushObjectRequest: 1 Node node, 2 uint64 run_id, 3 string object_id, 4 bytes object_content, 5 string session_id
PushObjectResponse: 1 bool stored
PullObjectRequest: 1 Node node, 2 uint64 run_id, 3 string object_id
PullObjectResponse: 1 bool object_found, 2 bool object_available, 3 bytes object_content
ConfirmMessageReceivedRequest: 1 Node node, 2 uint64 run_id, 3 string message_object_id
ConfirmMessageReceivedResponse:
"""
"""One line a message: numbers, types and names of its fields. A star marks a repeated field, a question mark a field of
the message's only ``oneof``."""

_FIELD = descriptor_pb2.FieldDescriptorProto


def make_protobuf_message_classes(package: str, messages: str) -> dict[str, Any]:
    """Create protobuf message classes from a text in the format of :data:`MESSAGES`.

    Args:
        package: A unique protobuf package name, which is not sent.

    Returns:
        Message name -> class.
    """
    file = descriptor_pb2.FileDescriptorProto(name=f"{package}.proto", package=package, syntax="proto3")
    for line in messages.strip().splitlines():
        name, _, fields = line.partition(":")
        message = file.message_type.add(name=name)
        for field in filter(None, map(str.strip, fields.split(","))):
            number, kind, title = field.split()
            label = _FIELD.LABEL_REPEATED if kind.endswith("*") else _FIELD.LABEL_OPTIONAL
            added = message.field.add(name=title, number=int(number), label=label)
            if kind.endswith("?"):
                if not message.oneof_decl:
                    message.oneof_decl.add(name="value")
                added.oneof_index = 0
            if (kind := kind.rstrip("*?")).islower():  # protobuf's own kinds, such as uint64
                added.type = getattr(_FIELD, f"TYPE_{kind.upper()}")
            else:
                added.type = _FIELD.TYPE_MESSAGE
                added.type_name = f".{package}.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    made: dict[str, Any] = message_factory.GetMessageClassesForFiles([file.name], pool)
    return made


_CLASSES = {
    name.rpartition(".")[2]: made for name, made in make_protobuf_message_classes("polyclinic.fleet", MESSAGES).items()
}

# Our names for messages whose own names say too little beside Flower's classes; the others go by Flower's names.
Envelope, MetadataFields, RecordDictFields = (_CLASSES[name] for name in ("Message", "Metadata", "RecordDict"))


def __getattr__(name: str) -> Any:
    """Return the protobuf class of a message in :data:`MESSAGES` as an attribute of this module."""
    if name not in _CLASSES:
        raise AttributeError(name)
    return _CLASSES[name]


def choose_small_objects(contents: Iterable[tuple[str, int]]) -> list[str]:
    """Choose the objects that are small enough to travel in the call that announces their message; return their names.

    Args:
        contents: Name and size in bytes of each object of the message.
    """
    chosen = list[str]()
    left = SMALL_BYTES_IN_ALL
    for name, size in contents:
        if 0 < size <= min(SMALL_BYTES, left):
            chosen.append(name)
            left -= size
    return chosen


def index_by_sha256(contents: Iterable[bytes]) -> dict[str, bytes]:
    """Return SHA-256 -> content for these objects; the hash is an object's name in Flower."""
    return {hashlib.sha256(content).hexdigest(): content for content in contents}


def list_tree_object_ids(tree: Any) -> list[str]:
    """Return the ids of all objects of a message, children first.

    Args:
        tree: Flower's protobuf message for a tree of objects.
    """
    return [name for child in tree.children for name in list_tree_object_ids(child)] + [tree.object_id]


# One large field of a message in protobuf's wire format, without protobuf's copies of it: both ends use it for the
# contents of objects, which are nearly all bytes that travel.
VARINT, LENGTH_DELIMITED = 0, 2  # the two kinds of field that these messages have
CONTENT_OF_PUSH = _CLASSES["PushObjectRequest"].DESCRIPTOR.fields_by_name["object_content"].number
CONTENT_OF_PULL = _CLASSES["PullObjectResponse"].DESCRIPTOR.fields_by_name["object_content"].number


MOST_FIELDS = 100
"""Most fields beside the one that is split off a message; ours have five."""


def extract_protobuf_field(data: bytes, field: int) -> tuple[bytes, memoryview]:
    """Split one bytes field off a serialised protobuf message, without a copy of the field's content.

    Returns:
        The message without the field, and the field's content (empty if the field is absent).

    Raises:
        ValueError: If the bytes are not a valid protobuf message, or have more than :data:`MOST_FIELDS` other fields.
    """
    view = memoryview(data)
    place = 0
    rest = list[memoryview]()
    content = memoryview(b"")
    while place < len(data):
        begin = place
        tag, place = _read_varint(data, place)
        size, place = _read_varint(data, place)
        kind = tag & 7
        if kind not in (VARINT, LENGTH_DELIMITED):
            raise ValueError(f"field {tag >> 3} is of an unexpected kind")
        end = place + size if kind == LENGTH_DELIMITED else place
        if end > len(data):
            raise ValueError("the message is cut off")
        if tag == field << 3 | LENGTH_DELIMITED:
            content = view[place:end]
        elif len(rest) < MOST_FIELDS:
            rest.append(view[begin:end])
        else:  # a view takes a hundred times the memory of the smallest field
            raise ValueError(f"the message has more than {MOST_FIELDS} other fields")
        place = end
    return b"".join(rest), content


def append_protobuf_field(message: bytes, field: int, content: bytes | memoryview) -> bytes:
    """Append a bytes field to a serialised protobuf message."""
    return b"".join((message, _encode_varint(field << 3 | LENGTH_DELIMITED), _encode_varint(len(content)), content))


def _read_varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if place >= len(data) or shift > 63:
            raise ValueError("the message is cut off")
        byte = data[place]
        value |= (byte & 0x7F) << shift
        place += 1
        if byte < 0x80:
            return value, place
        shift += 7


def _encode_varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


# ---------------------------------------------------------------------- before a run: a call of our own, "Hello"
# Flower's own calls do not tell the time (a site's wrong clock is only refused), nor the release before the roll call.

HELLO_SERVICE, HELLO_METHOD = "polyclinic.Coordinator", "Hello"


class HelloAnswer(BaseModel):
    """A coordinator's JSON answer to the call ``Hello``, by which a site checks clock and versions outside a run.

    Attributes:
        time: Unix time on the coordinator's clock.
        release: The coordinator's release of Polyclinic.
        wire: The wire version that the coordinator speaks with the calling site: the newest that both speak. If they
            speak none in common, the coordinator's newest (:mod:`polyclinic.common.wire.versions`).
        key: ``admitted`` if the key that signed the call belongs to an admitted site.
        site: Name under which that key is registered; empty for an unknown key, and from earlier releases.
        newest: The coordinator's newest wire version; 0 from earlier releases, which speak ``wire`` alone.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    time: float
    release: ReleaseName
    wire: Annotated[int, Field(ge=0, lt=2**31)]
    key: Literal["admitted", "unknown"]
    site: Annotated[str, AfterValidator(make_printable_line)] = ""
    newest: Annotated[int, Field(ge=0, lt=2**31)] = 0

    @property
    def newest_wire(self) -> int:
        """Return the newest wire version that the coordinator speaks, as far as the agreed one allows it.

        A coordinator that speaks another version than this site's newest with it has not got that one, nor a later one.
        Otherwise a coordinator could ask for an older version, and the site would not say that an update is due.
        A coordinator that speaks this site's newest version can be ahead by one.
        """
        if self.wire != WIRE_VERSION:
            return self.wire
        return min(max(self.newest, self.wire), self.wire + 1)
