"""Protobuf classes for the messages of Flower's Fleet API (1.39 to 1.42), between sites and coordinator.

Our link is a gRPC service with Flower's names of calls and fields, which carries Flower's messages. Flower has had no
gRPC service since 1.43.

Flower moves and changes its generated classes between releases. The field numbers below, which determine the bytes, are
the same; a test compares them with the installed Flower. Fields that neither side reads are left out, because protobuf
skips unknown fields.

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

FLEET_SERVICE = "flwr.proto.Fleet"
COORDINATOR_NODE_ID = 1
"""Node id that Flower gives to the SuperLink, as source and destination of messages."""
ROLL_CALL_TYPE = "query.roll_call"
"""Message type of the record ``RollCall``; Flower's kind of all these messages is ``query``."""
REFUSAL_TYPE = "query.refusal"
"""Message type of the record ``Refusal``."""
QUESTION_TYPE = "query.question"
"""Message type of the record ``Question``."""
COUNT_TYPE = "query.count"
"""Message type of the record ``CountRequest``."""
SCORING_TYPE = "query.scoring"
"""Message type of the record ``ScoringRequest``."""
DELIVERY_TYPE = "query.delivery"
"""Message type of the record ``DeliveryRequest``."""
CHUNK_BYTES = 4 * 2**20
"""Maximum size of an array's chunk, which is sent as one object.

The SuperLink has one or two chunks in memory for each hospital that sends or receives. With 16 MiB it took 740 MB
instead of 320 MB for twelve hospitals with a ResNet-18, and 5 % less CPU time.
"""
MAX_CALL_BYTES = CHUNK_BYTES + 2**20
"""Maximum size of one call; a chunk of an array is the largest part of a message. Flower 1.39 allows 2 GiB."""

SMALL_CONTENTS = "small_contents"
"""Field with the contents of a message's small objects; the name of an object is its SHA-256."""
MAX_SMALL_OBJECT_BYTES = 32 * 2**10
"""Maximum size of a small object."""
MAX_SMALL_OBJECTS_TOTAL_BYTES = 128 * 2**10
"""Maximum size of all small objects of one message: a few seconds on a slow line."""

MESSAGE_DEFINITIONS = """
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
"""One message per line: number, type and name of each field. A star marks a repeated field, a question mark a field of
the message's only ``oneof``.
"""

_FIELD = descriptor_pb2.FieldDescriptorProto


def make_protobuf_message_classes(package: str, messages: str) -> dict[str, Any]:
    """Create protobuf message classes from a text in the format of :data:`MESSAGE_DEFINITIONS`.

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
            if (kind := kind.rstrip("*?")).islower():  # a scalar type of protobuf, such as uint64
                added.type = getattr(_FIELD, f"TYPE_{kind.upper()}")
            else:
                added.type = _FIELD.TYPE_MESSAGE
                added.type_name = f".{package}.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    made: dict[str, Any] = message_factory.GetMessageClassesForFiles([file.name], pool)
    return made


_MESSAGE_CLASSES = {
    name.rpartition(".")[2]: made
    for name, made in make_protobuf_message_classes("polyclinic.fleet", MESSAGE_DEFINITIONS).items()
}

# These messages have other names here, because Flower also has Python classes with their names.
Envelope, MetadataFields, RecordDictFields = (_MESSAGE_CLASSES[name] for name in ("Message", "Metadata", "RecordDict"))


def __getattr__(name: str) -> Any:
    """Return the protobuf class of a message in :data:`MESSAGE_DEFINITIONS` as an attribute of this module."""
    if name not in _MESSAGE_CLASSES:
        raise AttributeError(name)
    return _MESSAGE_CLASSES[name]


def choose_small_objects(contents: Iterable[tuple[str, int]]) -> list[str]:
    """Return the names of the objects that are small enough to be sent in the call that announces their message.

    Args:
        contents: Name and size in bytes of each object of the message.
    """
    chosen = list[str]()
    remaining_bytes = MAX_SMALL_OBJECTS_TOTAL_BYTES
    for name, size in contents:
        if 0 < size <= min(MAX_SMALL_OBJECT_BYTES, remaining_bytes):
            chosen.append(name)
            remaining_bytes -= size
    return chosen


def index_by_sha256(contents: Iterable[bytes]) -> dict[str, bytes]:
    """Return SHA-256 -> content of each object; the hash is an object's name in Flower."""
    return {hashlib.sha256(content).hexdigest(): content for content in contents}


def list_tree_object_ids(tree: Any) -> list[str]:
    """Return the ids of all objects of a message, children first.

    Args:
        tree: Flower's protobuf message for a tree of objects.
    """
    return [name for child in tree.children for name in list_tree_object_ids(child)] + [tree.object_id]


# The functions below read and write one large field of a message in protobuf's wire format, without protobuf's copies.
# Both ends use them for the contents of objects, which are nearly all bytes that are sent.
# These messages have only two wire types of fields.
VARINT = 0
LENGTH_DELIMITED = 2
PUSH_CONTENT_FIELD = _MESSAGE_CLASSES["PushObjectRequest"].DESCRIPTOR.fields_by_name["object_content"].number
PULL_CONTENT_FIELD = _MESSAGE_CLASSES["PullObjectResponse"].DESCRIPTOR.fields_by_name["object_content"].number


MAX_OTHER_FIELDS = 100
"""Maximum number of fields besides the extracted one; our messages have five."""


def extract_protobuf_field(data: bytes, field: int) -> tuple[bytes, memoryview]:
    """Extract one bytes field from a serialised protobuf message, without copying the field's content.

    Returns:
        The message without the field, and the field's content (empty if the field is absent).

    Raises:
        ValueError: If the bytes are not a valid protobuf message, or have more than :data:`MAX_OTHER_FIELDS` other
            fields.
    """
    view = memoryview(data)
    position = 0
    other_fields = list[memoryview]()
    content = memoryview(b"")
    while position < len(data):
        start = position
        tag, position = _read_varint(data, position)
        size, position = _read_varint(data, position)
        kind = tag & 7
        if kind not in (VARINT, LENGTH_DELIMITED):
            raise ValueError(f"field {tag >> 3} is of an unexpected kind")
        end = position + size if kind == LENGTH_DELIMITED else position
        if end > len(data):
            raise ValueError("the message is cut off")
        if tag == field << 3 | LENGTH_DELIMITED:
            content = view[position:end]
        elif len(other_fields) < MAX_OTHER_FIELDS:
            other_fields.append(view[start:end])
        else:  # without a limit, the views could take a hundred times the memory of the message
            raise ValueError(f"the message has more than {MAX_OTHER_FIELDS} other fields")
        position = end
    return b"".join(other_fields), content


def append_protobuf_field(message: bytes, field: int, content: bytes | memoryview) -> bytes:
    """Append a bytes field to a serialised protobuf message."""
    return b"".join((message, _encode_varint(field << 3 | LENGTH_DELIMITED), _encode_varint(len(content)), content))


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if position >= len(data) or shift > 63:
            raise ValueError("the message is cut off")
        byte = data[position]
        value |= (byte & 0x7F) << shift
        position += 1
        if byte < 0x80:
            return value, position
        shift += 7


def _encode_varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


# ---------------------------------------------------------------------- before a run: our additional call "Hello"
# Flower's calls contain neither the time (a site with a wrong clock is only refused) nor, before the roll call, the
# release.

HELLO_SERVICE = "polyclinic.Coordinator"
HELLO_METHOD = "Hello"


class HelloAnswer(BaseModel):
    """A coordinator's JSON answer to the call ``Hello``, with which a site checks clock and versions outside a run.

    Attributes:
        time: Unix time on the coordinator's clock.
        release: The coordinator's release of Polyclinic.
        wire: The newest wire version that coordinator and calling site both speak. If there is none, the coordinator's
            newest (:mod:`polyclinic.common.wire.versions`).
        key: ``admitted`` if the key that signed the call belongs to an admitted site.
        site: Name under which this key is registered; empty for an unknown key, and from earlier releases.
        newest: The coordinator's newest wire version; 0 from earlier releases, which speak only ``wire``.
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
        """The newest wire version of the coordinator that is consistent with the agreed version.

        If the agreed version is not this site's newest, the coordinator speaks neither that nor a later one. Otherwise
        a coordinator could claim a newer version while it asks for an older one, and the site would not see that an
        update is needed. A coordinator that speaks this site's newest version can be ahead by one.
        """
        if self.wire != WIRE_VERSION:
            return self.wire
        return min(max(self.newest, self.wire), self.wire + 1)
