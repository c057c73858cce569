"""Flower messages with chosen metadata, in processes that Flower's runtime did not start.

Flower's constructor of a request reads run and sender from its runtime, which our programs do not have. So a request
gets run 0 and sender 0, and the grid that sends it sets both. ``tests/test_flower_names.py`` lists our uses of Flower.
"""

import time
from typing import Any, cast

from flwr.app import DEFAULT_TTL, Array, ArrayRecord, ConfigRecord, Error, Message, MessageType, Metadata, RecordDict

APPROVAL_ERROR_CODE = 205
"""Error code of a site where a person must first approve the request."""
APPROVAL_ERROR_MESSAGE = "waiting for approval at the hospital"
"""Error message of such a site."""
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

    Inside Flower's runtime this calls Flower's constructor. Elsewhere run and sender are 0.

    Args:
        content: The content.
        node_id: The receiver.
        message_type: Flower's type of the message.
        group_id: Name that related messages share, such as those of a round.
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
    """Return a message with a content or an error, and with these values of :data:`METADATA_FIELDS`."""
    build: Any = Message  # Flower's overloads lack the keyword "metadata", which Flower uses
    kind = "error" if isinstance(content, Error) else "content"
    made: Message = build(**{kind: content, "metadata": Metadata(**metadata)})
    return made


def make_array_of_view(dtype: str, shape: tuple[int, ...], stype: str, data: bytes | memoryview) -> Array:
    """Return a Flower array whose data may be a view of bytes, which Flower's constructor refuses."""
    array = Array(dtype=dtype, shape=shape, stype=stype, data=b"")
    array.data = cast(bytes, data)  # all code that reads it accepts any buffer
    return array


def select_array_records(content: RecordDict) -> dict[str, ArrayRecord]:
    """Return name -> record of arrays.

    Flower's ``content.array_records`` creates a reference cycle, so that arrays as large as a model would stay in
    memory until the next garbage collection.
    """
    return {name: record for name, record in content.items() if isinstance(record, ArrayRecord)}


def select_config_records(content: RecordDict) -> dict[str, ConfigRecord]:
    """Return name -> record of fields, without the reference cycle of ``content.config_records``."""
    return {name: record for name, record in content.items() if isinstance(record, ConfigRecord)}


def make_message_of_envelope(announced: Any) -> Message:
    """Return a message without content from its announced metadata, to answer a message that cannot be read.

    Flower cannot create a message of an unknown type; such a message gets the type ``train``.

    Args:
        announced: The protobuf message with the metadata.
    """
    metadata = {name: getattr(announced, name) for name in METADATA_FIELDS}
    try:
        return make_message(RecordDict(), metadata)
    except ValueError:
        return make_message(RecordDict(), metadata | {"message_type": MessageType.TRAIN})


def read_metadata(message: Message) -> dict[str, Any]:
    """Return the values of a message's metadata; they can be written as JSON."""
    return {name: getattr(message.metadata, name) for name in METADATA_FIELDS}


def replace_metadata(message: Message, **changes: Any) -> Message:
    """Return a message with the same content or error, and with some values of its metadata changed."""
    content = message.content if message.has_content() else message.error
    return make_message(content, read_metadata(message) | changes)
