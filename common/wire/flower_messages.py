"""Flower messages with metadata of our choice, in processes that Flower's own runtime did not start.

Flower's constructor of a request reads run and sender from its runtime. Our programs have none: a request gets run and
sender 0, and the grid that sends it sets both. ``tests/test_flower_names.py`` lists what we use of Flower.
"""

import time
from typing import Any, cast

from flwr.app import DEFAULT_TTL, Array, ArrayRecord, ConfigRecord, Error, Message, MessageType, Metadata, RecordDict

AWAITS_APPROVAL, WAITING_FOR_APPROVAL = 205, "waiting for approval at the hospital"
"""Our error code and message of a site at which a person has to approve the request first."""
METADATA_FIELDS = (
    "run_id",
    "message_id",
    "src_node_id",
    "dst_node_id",
    "reply_to_message_id",
    "group_id",
    "created_at",
    "ttl",
    "message_type",
)


def make_request(
    content: RecordDict, node_id: int, message_type: str, *, group_id: str = "", ttl: float = DEFAULT_TTL
) -> Message:
    """Return a request to a node.

    Inside Flower's runtime this is Flower's own constructor. Elsewhere run and sender are 0.

    Args:
        group_id: Flower's name for messages that belong together, such as those of a round.
        ttl: Seconds for which the request is valid.
    """
    try:
        return Message(content, node_id, message_type, group_id=group_id, ttl=ttl)
    except RuntimeError:  # Flower has set no run and no sender in this process
        metadata = {
            "run_id": 0,
            "message_id": "",
            "src_node_id": 0,
            "dst_node_id": node_id,
            "reply_to_message_id": "",
            "group_id": group_id,
            "created_at": time.time(),
            "ttl": ttl,
            "message_type": message_type,
        }
        return make_message(content, metadata)


def make_message(content: RecordDict | Error, metadata: dict[str, Any]) -> Message:
    """Return a message with this content or error, and metadata with these values (:data:`METADATA_FIELDS`)."""
    build: Any = Message  # the keyword "metadata", which Flower itself uses, is in none of its overloads
    kind = "error" if isinstance(content, Error) else "content"
    made: Message = build(**{kind: content, "metadata": Metadata(**metadata)})
    return made


def make_array_of_view(dtype: str, shape: tuple[int, ...], stype: str, data: bytes | memoryview) -> Array:
    """Return a Flower array whose data may also be a view of bytes, which Flower's constructor refuses."""
    array = Array(dtype=dtype, shape=shape, stype=stype, data=b"")
    array.data = cast(bytes, data)  # all that reads it takes any buffer
    return array


def select_array_records(content: RecordDict) -> dict[str, ArrayRecord]:
    """Return the records with arrays by name.

    Flower's own ``content.array_records`` makes a cycle of references: the arrays, as large as a model, would then stay
    in memory until the next garbage collection.
    """
    return {name: record for name, record in content.items() if isinstance(record, ArrayRecord)}


def select_config_records(content: RecordDict) -> dict[str, ConfigRecord]:
    """Return the records with fields by name, without the cycle of ``content.config_records``."""
    return {name: record for name, record in content.items() if isinstance(record, ConfigRecord)}


def make_message_of_envelope(announced: Any) -> Message:
    """Return a message without content from its announced metadata, to answer a message that cannot be read.

    Flower makes no message of a type that it does not know; such a message gets the type ``train``.

    Args:
        announced: The protobuf message with the metadata.
    """
    metadata = {name: getattr(announced, name) for name in METADATA_FIELDS}
    try:
        return make_message(RecordDict(), metadata)
    except ValueError:
        return make_message(RecordDict(), metadata | {"message_type": MessageType.TRAIN})


def read_metadata(message: Message) -> dict[str, Any]:
    """Return the values of a message's metadata, which can be written as JSON."""
    return {name: getattr(message.metadata, name) for name in METADATA_FIELDS}


def replace_metadata(message: Message, **changes: Any) -> Message:
    """Return a message with the same content or error, and some other values in its metadata."""
    content = message.content if message.has_content() else message.error
    return make_message(content, read_metadata(message) | changes)
