"""A Flower message and the objects that it travels as: what both ends of the wire do with Flower's internals (1.39).

Flower cuts a message into a tree of objects named by their SHA-256, and arrays into chunks. Its own way back copies
every array four times; this one once.
"""

import importlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from flwr.app import Array, Message
from flwr.supercore.inflatable.inflatable_object import (
    InflatableObject,
    get_object_children_ids_from_object_content,
    get_object_type_from_object_content,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

CHUNK_BYTES = 16 * 2**20
"""Of an array; Flower's own 5 MiB make three times as many calls, each with its price at the SuperLink."""
vars(importlib.import_module("flwr.app.message.array"))["FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE"] = CHUNK_BYTES

_DIVIDER = b"\x00"  # between an object's head and its body


def names_in(tree: Any) -> list[str]:
    """Names of all objects of a tree, leaves first."""
    return [node.object_id for node in iterate_object_tree(tree)]


def message_of(message_id: str, contents: dict[str, bytes]) -> Message:
    """Put a message together from its objects.

    Raises:
        ValueError: If they are not what Flower makes.
    """
    try:
        objects: dict[str, InflatableObject] = dict(_arrays(contents))
        message = inflate_object_from_contents(message_id, contents, keep_object_contents=True, objects=objects)
    except (LookupError, TypeError, AttributeError, RecursionError) as error:  # as the other side has written it
        raise ValueError(f"message {message_id[:8]} cannot be put together: {error!r}") from None
    if not isinstance(message, Message):
        raise ValueError(f"object {message_id} is no message")
    message.metadata.__dict__["_message_id"] = message_id
    return message


def _arrays(contents: Mapping[str, bytes]) -> Iterator[tuple[str, InflatableObject]]:
    for name, content in contents.items():
        if get_object_type_from_object_content(content) == "Array":
            children = get_object_children_ids_from_object_content(content)
            body = json.loads(_body(content).tobytes())
            chunks = [_body(contents[children[place]]) for place in body["arraychunk_ids"]]
            data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
            yield name, Array(dtype=body["dtype"], shape=tuple(body["shape"]), stype=body["stype"], data=bytes(data))


def _body(content: bytes) -> memoryview:
    return memoryview(content)[content.index(_DIVIDER) + 1 :]
