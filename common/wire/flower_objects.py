"""A Flower message and the objects that it travels as: what both ends of the wire do with Flower's internals (1.39).

Flower cuts a message into a tree of objects named by their SHA-256, and arrays into chunks. Its own way there copies
every array six times and its way back four times; these once.
"""

import importlib
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from flwr.app import Array, Message
from flwr.app.message.arraychunk import ArrayChunk
from flwr.supercore.inflatable.inflatable_object import (
    InflatableObject,
    get_object_children_ids_from_object_content,
    get_object_id,
    get_object_type_from_object_content,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

CHUNK_BYTES = 16 * 2**20
"""Of an array; Flower's own 5 MiB make three times as many calls, each with its price at the SuperLink."""
vars(importlib.import_module("flwr.app.message.array"))["FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE"] = CHUNK_BYTES

HASHERS = 2
"""Parts of an array that are hashed at the same time."""
LONGEST_HEAD = 64  # of a part of an array: its type and its length
_DIVIDER = b"\x00"  # between an object's head and its body


class _Chunk(ArrayChunk):
    """A part of an array in the form in which it travels, made and named once."""

    def __init__(self, data: memoryview) -> None:
        self._content = b"".join((f"{ArrayChunk.__qualname__}  {len(data)}".encode(), _DIVIDER, data))
        self._name = get_object_id(self._content)
        super().__init__(_body(self._content))

    @property
    def object_id(self) -> str:
        return self._name

    def deflate(self) -> bytes:
        return self._content


def cut(message: Message) -> None:
    """Cut the arrays of a message that is about to be sent; Flower would do so several times."""
    for record in message.content.array_records.values() if message.has_content() else ():
        for array in record.values():
            if "_chunks" not in vars(array):
                view = memoryview(array.data)
                views = [view[start : start + CHUNK_BYTES] for start in range(0, len(view), CHUNK_BYTES)]
                with ThreadPoolExecutor(max(1, min(HASHERS, len(views)))) as pool:
                    parts = list(pool.map(_Chunk, views))
                vars(array)["_chunks"] = [(part.object_id, part) for part in parts]


def names_in(tree: Any) -> list[str]:
    """Names of all objects of a tree, leaves first."""
    return [node.object_id for node in iterate_object_tree(tree)]


def message_of(message_id: str, contents: Mapping[str, bytes | memoryview]) -> Message:
    """Put a message together from its objects.

    Raises:
        ValueError: If they are not what Flower makes.
    """
    try:
        rest = {name: bytes(content) for name, content in contents.items() if not _is_part(content)}
        objects: dict[str, InflatableObject] = dict(_arrays(contents, rest))
        message = inflate_object_from_contents(message_id, rest, keep_object_contents=True, objects=objects)
    except Exception as error:  # as the other side has written it: Flower and protobuf raise a dozen kinds
        raise ValueError(f"message {message_id[:8]} cannot be put together: {error!r}") from None
    if not isinstance(message, Message):
        raise ValueError(f"object {message_id} is no message")
    message.metadata.__dict__["_message_id"] = message_id
    return message


def _is_part(content: bytes | memoryview) -> bool:
    """Whether this is a part of an array, which is not to be copied."""
    return bytes(content[:LONGEST_HEAD]).startswith(f"{ArrayChunk.__qualname__} ".encode())


def _arrays(
    contents: Mapping[str, bytes | memoryview], rest: Mapping[str, bytes]
) -> Iterator[tuple[str, InflatableObject]]:
    for name, content in rest.items():
        if get_object_type_from_object_content(content) == "Array":
            children = get_object_children_ids_from_object_content(content)
            body = json.loads(_body(content).tobytes())
            chunks = [_body(contents[children[place]]) for place in body["arraychunk_ids"]]
            data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
            yield name, Array(dtype=body["dtype"], shape=tuple(body["shape"]), stype=body["stype"], data=bytes(data))


def _body(content: bytes | memoryview) -> memoryview:
    head = bytes(content[:LONGEST_HEAD]) if _is_part(content) else bytes(content)
    return memoryview(content)[head.index(_DIVIDER) + 1 :]
