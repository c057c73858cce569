"""The contents of messages: files named by their SHA-256, how they pass through gRPC, and how large a reply may be.

SuperLink and run stand on one machine under one account: a file that one of them has written, the other reads.
"""

import hashlib
import mmap
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.system.files import partial_path
from common.wire.fleet_protocol import (
    CHUNK_BYTES,
    CONTENT_OF_PULL,
    CONTENT_OF_PUSH,
    PullObjectResponse,
    PushObjectRequest,
    append_field,
    extract_field,
)


def is_object_id(text: str) -> bool:
    """Return whether a text from a hospital is a SHA-256 in hexadecimal digits; nothing else may become a path."""
    return re.fullmatch("[0-9a-f]{64}", text) is not None


class ObjectFiles:
    """A folder with one file for each object; an id that is no SHA-256 is never looked up, written or removed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)

    def write(self, object_id: str, content: bytes | memoryview) -> None:
        """Write an object; other processes see the file only once it is complete.

        Raises:
            ValueError: If the id is no SHA-256.
        """
        if not is_object_id(object_id):
            raise ValueError(f"{object_id[:80]!r} does not name an object")
        path = self._folder / object_id
        if path.exists():
            return
        part = partial_path(path)
        try:
            part.write_bytes(content)
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    def map_into_memory(self, object_id: str) -> memoryview | None:
        """Map an object's file into memory; the view outlives the file. None where there is no such object."""
        if not is_object_id(object_id):
            return None
        try:
            with (self._folder / object_id).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                return memoryview(mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) if size else b"")
        except FileNotFoundError:
            return None

    def read(self, object_id: str) -> bytes | None:
        """Return a copy of an object's content, None where there is no such object."""
        content = self.map_into_memory(object_id)
        return None if content is None else bytes(content)

    def has(self, object_id: str) -> bool:
        """Return whether an object's file exists."""
        return is_object_id(object_id) and (self._folder / object_id).exists()

    def size(self, object_id: str) -> int:
        """Return an object's size in bytes, 0 for an object that does not exist."""
        try:
            return (self._folder / object_id).stat().st_size if is_object_id(object_id) else 0
        except FileNotFoundError:
            return 0

    def remove(self, object_id: str) -> None:
        """Remove an object's file if it exists."""
        if is_object_id(object_id):
            (self._folder / object_id).unlink(missing_ok=True)

    def names(self) -> set[str]:
        """Return the ids of all complete objects."""
        return {path.name for path in self._folder.iterdir() if not path.name.startswith(".")}

    def remove_unneeded(self, needed: Collection[str]) -> None:
        """Remove files that no message needs, incomplete files, and files whose content does not match their name."""
        for path in list(self._folder.iterdir()):
            if path.name not in needed or hashlib.sha256(path.read_bytes()).hexdigest() != path.name:
                path.unlink()


# ---------------------------------------------------------------------- through gRPC, without copies by protobuf


@dataclass(frozen=True)
class ObjectPush:
    """A PushObjectRequest whose content is a view of the bytes that arrived."""

    request: Any
    content: memoryview

    @classmethod
    def parse(cls, data: bytes) -> "ObjectPush":
        """Parse a serialized PushObjectRequest without copying its content."""
        rest, content = extract_field(data, CONTENT_OF_PUSH)
        return cls(PushObjectRequest.FromString(rest), content)


PULL_CACHE_BYTES, PULL_CACHE_S = 64 * 2**20, 30.0
_OBJECT_AVAILABLE = PullObjectResponse(object_found=True, object_available=True).SerializeToString()


class PullObjectResponseCache:
    """Serialized responses to PullObject: all hospitals pull the same trunk at about the same time.

    A response stays for :data:`PULL_CACHE_S` after each pull; all of them hold :data:`PULL_CACHE_BYTES` at most.
    """

    def __init__(self, files: ObjectFiles) -> None:
        self._files = files
        self._responses: OrderedDict[str, tuple[float, bytes]] = OrderedDict()  # the most recently pulled at the end
        self._lock = threading.Lock()
        self.size = 0

    def response(self, object_id: str) -> bytes | None:
        """Return the serialized PullObjectResponse with an object's content, None where there is no such object."""
        now = time.monotonic()
        with self._lock:
            response = self._pop(object_id)
            if response is None and (content := self._files.map_into_memory(object_id)) is not None:
                response = append_field(_OBJECT_AVAILABLE, CONTENT_OF_PULL, content)
            if response is not None:
                self._responses[object_id] = (now, response)
                self.size += len(response)
            while self._responses and (
                self.size > PULL_CACHE_BYTES or now - next(iter(self._responses.values()))[0] > PULL_CACHE_S
            ):
                self._pop(next(iter(self._responses)))
        return response

    def _pop(self, object_id: str) -> bytes | None:
        if object_id not in self._responses:
            return None
        _, response = self._responses.pop(object_id)
        self.size -= len(response)
        return response


# ---------------------------------------------------------------------- how large a reply may be

SPARE_BYTES = 16 * 2**20
"""Bytes that a reply may have beyond its request: statistics and metrics."""
SPARE_OBJECTS = 8 + SPARE_BYTES // CHUNK_BYTES
LARGEST_CALL = CHUNK_BYTES + 2**20
"""Bytes of one call at most: a chunk of an array is the largest part of a message. Flower 1.39 allows 2 GiB."""


def requested_masked_update_bytes(content: Mapping[str, Any]) -> int:
    """Return the size of the masked update that a request asks for under secure aggregation, 0 for other requests."""
    fields = content.get("fields")
    numbers = fields.get("numbers", 0) if isinstance(fields, Mapping) else 0
    return 4 * numbers if isinstance(numbers, int) else 0


@dataclass(frozen=True)
class ReplySizeBound:
    """The largest reply that a request can have.

    A reply holds at most the arrays of its request, a masked update of the length that the request states, and
    statistics and metrics.

    Attributes:
        objects: Number of objects.
        size: Bytes of all objects.
        assembled: Bytes of the arrays put together, where equal chunks count each time.
    """

    objects: int
    size: int
    assembled: int

    @classmethod
    def for_request(cls, sizes: Collection[int], assembled: int, masked_update: int = 0) -> "ReplySizeBound":
        """Bound the replies to a request.

        Args:
            sizes: Bytes of each of its objects.
            assembled: Bytes of its arrays put together.
            masked_update: Bytes of the masked update that it asks for.
        """
        chunks, spare = -(-masked_update // CHUNK_BYTES), masked_update + SPARE_BYTES
        return cls(len(sizes) + chunks + SPARE_OBJECTS, sum(sizes) + spare, assembled + spare)

    def size_fault(self, objects: int, size: int) -> str:
        """Explain why a reply with this number of objects and bytes is refused; empty if it is within the bound."""
        if objects > self.objects:
            return f"its reply has {objects} parts; what was asked for has at most {self.objects}"
        return self.too_large_reason if size > self.size else ""

    @property
    def too_large_reason(self) -> str:
        """The reason for refusing a reply with too many bytes."""
        return f"its reply weighs more than {self.assembled / 1e6:.0f} MB, the most that what was asked for can weigh"


NO_REPLY = ReplySizeBound(0, 0, 0)
"""The bound on a reply to no request of ours."""
