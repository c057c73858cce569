"""Files with the objects (parts of the content) of messages, their gRPC serialization, and size limits of replies.

The SuperLink and the run share these files, because both run on one machine under one account.
"""

import hashlib
import mmap
import os
import tempfile
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from polyclinic.common.system.files import (
    make_temporary_path,
    open_own_file,
)
from polyclinic.common.system.plain_names import HashName, join_plain_name
from polyclinic.common.wire.fleet_protocol import (
    CHUNK_BYTES,
    PULL_CONTENT_FIELD,
    PUSH_CONTENT_FIELD,
    PullObjectResponse,
    PushObjectRequest,
    append_protobuf_field,
    extract_protobuf_field,
)


def is_object_id(text: str) -> bool:
    """Return whether a text is a SHA-256 in hexadecimal digits; only such texts become file names."""
    return HashName.pattern.fullmatch(text) is not None


class ObjectFileStore:
    """A folder with one file per object. Ids that are not a SHA-256 never reach the file system.

    Attributes:
        folder: The folder; the unnamed files of :class:`ReplyArrayFiles` are on the same disk.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)

    def write_object(self, object_id: str, content: bytes | memoryview) -> None:
        """Write an object atomically: other processes see only the complete file.

        Raises:
            ValueError: If the id is not a SHA-256.
        """
        if not is_object_id(object_id):
            raise ValueError(f"{object_id[:80]!r} does not name an object")
        path = join_plain_name(self.folder, HashName(object_id))
        if path.exists():
            return
        part = make_temporary_path(path)
        try:
            with open_own_file(part, "wb") as file:
                file.writelines([content])
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    def map_object_into_memory(self, object_id: str) -> memoryview | None:
        """Map an object's file into memory; return None if the file does not exist.

        The mapping stays valid after the file is removed.
        """
        if not is_object_id(object_id):
            return None
        try:
            with (join_plain_name(self.folder, HashName(object_id))).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                return memoryview(mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) if size else b"")
        except FileNotFoundError:
            return None

    def read_object(self, object_id: str) -> bytes | None:
        """Return a copy of an object's content; None if the object does not exist."""
        content = self.map_object_into_memory(object_id)
        return None if content is None else bytes(content)

    def has_object(self, object_id: str) -> bool:
        """Return whether an object's file exists."""
        return is_object_id(object_id) and (join_plain_name(self.folder, HashName(object_id))).exists()

    def get_object_size(self, object_id: str) -> int:
        """Return an object's size in bytes; 0 if the object does not exist."""
        try:
            return (join_plain_name(self.folder, HashName(object_id))).stat().st_size if is_object_id(object_id) else 0
        except FileNotFoundError:
            return 0

    def remove_object(self, object_id: str) -> None:
        """Remove an object's file if it exists."""
        if is_object_id(object_id):
            (join_plain_name(self.folder, HashName(object_id))).unlink(missing_ok=True)

    def list_object_ids(self) -> set[str]:
        """Return the ids of all complete objects."""
        return {path.name for path in self.folder.iterdir() if not path.name.startswith(".")}

    def remove_unneeded_objects(self, needed: Collection[str]) -> None:
        """Remove files that no message needs, incomplete files, and files whose content does not match their hash."""
        for path in list(self.folder.iterdir()):
            if path.name not in needed or hashlib.sha256(path.read_bytes()).hexdigest() != path.name:
                path.unlink()


LARGE_ARRAY_BYTES = 2**20
"""Smallest array of a reply that is joined in a file; smaller arrays are joined in memory."""


class ReplyArrayFiles:
    """Files in which the chunks of large reply arrays are joined, and which are mapped into memory read-only.

    The kernel can drop the pages of a mapped file from memory, so many replies can wait for aggregation. A file is used
    again when the last view of its array is deleted, because writing a new file takes five times as long. The files
    have no names, so that a killed process leaves none behind.

    Args:
        folder: Folder of the files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: list[IO[bytes]] = []
        self._free: list[IO[bytes]] = []
        weakref.finalize(self, _close_files, self._files)  # mappings stay valid after this

    def join_array(self, chunks: Sequence[memoryview]) -> bytes | memoryview:
        """Join the chunks of an array, in a mapped file; in memory if the array is small or the disk is full.

        Returns:
            The bytes of the array; read-only.
        """
        size = sum(map(len, chunks))
        if size < LARGE_ARRAY_BYTES:
            return b"".join(chunks)
        try:
            file = self._free.pop() if self._free else self._open_file()
        except OSError:
            return b"".join(chunks)
        try:
            file.seek(0)
            for chunk in chunks:
                rest = chunk
                while rest:  # one call may write only a part
                    rest = rest[file.write(rest) :]
            mapped = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)
        except OSError:
            file.truncate(0)  # the disk is full: give the space back
            self._free.append(file)
            return b"".join(chunks)
        weakref.finalize(mapped, self._free.append, file).atexit = False
        return memoryview(mapped)

    def _open_file(self) -> IO[bytes]:
        file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115 - until the finalizer
        self._files.append(file)
        return file


def _close_files(files: Sequence[IO[bytes]]) -> None:
    for file in files:
        file.close()


# ---------------------------------------------------------------------- serialization without copies by protobuf


@dataclass(frozen=True)
class ParsedObjectPush:
    """A parsed PushObjectRequest whose content is a view of the received bytes, not a copy."""

    request: Any
    content: memoryview

    @classmethod
    def parse_push_request(cls, data: bytes) -> "ParsedObjectPush":
        """Parse a serialized PushObjectRequest without copying its content."""
        rest, content = extract_protobuf_field(data, PUSH_CONTENT_FIELD)
        return cls(PushObjectRequest.FromString(rest), content)


MAX_PULL_CACHE_BYTES = 16 * 2**20
PULL_CACHE_LIFETIME_S = 30.0
_OBJECT_AVAILABLE_RESPONSE = PullObjectResponse(object_found=True, object_available=True).SerializeToString()


class PullObjectResponseCache:
    """A cache of serialized PullObject responses, because all hospitals pull the same model at about the same time.

    A response is cached for :data:`PULL_CACHE_LIFETIME_S` after its last pull. The cache holds at most
    :data:`MAX_PULL_CACHE_BYTES`.
    """

    def __init__(self, files: ObjectFileStore) -> None:
        self._files = files
        self._responses: OrderedDict[str, tuple[float, bytes]] = OrderedDict()  # the most recently pulled at the end
        self._lock = threading.Lock()
        self.size = 0

    def get_pull_response(self, object_id: str) -> bytes | None:
        """Return the serialized PullObjectResponse for an object; None if the object does not exist."""
        now = time.monotonic()
        with self._lock:
            response = self._remove_cached_response(object_id)
            if response is None and (content := self._files.map_object_into_memory(object_id)) is not None:
                response = append_protobuf_field(_OBJECT_AVAILABLE_RESPONSE, PULL_CONTENT_FIELD, content)
            if response is not None:
                self._responses[object_id] = (now, response)
                self.size += len(response)
            while self._responses:
                oldest, (last_pull, _) = next(iter(self._responses.items()))
                if self.size <= MAX_PULL_CACHE_BYTES and now - last_pull <= PULL_CACHE_LIFETIME_S:
                    break
                self._remove_cached_response(oldest)
        return response

    def _remove_cached_response(self, object_id: str) -> bytes | None:
        if object_id not in self._responses:
            return None
        _, response = self._responses.pop(object_id)
        self.size -= len(response)
        return response


# ---------------------------------------------------------------------- size limits of replies

SPARE_BYTES = 16 * 2**20
"""Bytes that a reply may have in addition to the size of its request, for statistics and metrics."""
SPARE_OBJECTS = 8 + SPARE_BYTES // CHUNK_BYTES
"""Objects that a reply may have in addition to the number of its request's objects."""


def read_masked_update_size(content: Mapping[str, Any]) -> int:
    """Return the size of the masked update that a request asks for (secure aggregation); 0 for other requests."""
    fields = content.get("fields")
    numbers = fields.get("numbers", 0) if isinstance(fields, Mapping) else 0
    return 4 * numbers if isinstance(numbers, int) else 0


@dataclass(frozen=True)
class ReplySizeBound:
    """The largest size that the reply to a request may have.

    A reply holds at most the arrays of its request, a masked update of the length stated in the request, statistics and
    metrics.

    Attributes:
        objects: Greatest number of objects.
        size: Greatest total bytes of all objects.
        assembled: Greatest total bytes of the arrays after their chunks are joined; a chunk that occurs twice counts
            twice.
    """

    objects: int
    size: int
    assembled: int

    @classmethod
    def compute_bound_for_request(
        cls, sizes: Collection[int], assembled: int, masked_update: int = 0
    ) -> "ReplySizeBound":
        """Return the size limit of the reply to a request.

        Args:
            sizes: Bytes of each object of the request.
            assembled: Bytes of the request's arrays.
            masked_update: Bytes of the masked update that the request asks for.
        """
        chunks = -(-masked_update // CHUNK_BYTES)  # rounded up
        spare = masked_update + SPARE_BYTES
        return cls(objects=len(sizes) + chunks + SPARE_OBJECTS, size=sum(sizes) + spare, assembled=assembled + spare)

    def find_reply_size_fault(self, objects: int, size: int) -> str:
        """Return why a reply with this number of objects and bytes is too large; empty if it is within the limit."""
        if objects > self.objects:
            return f"its reply has {objects} parts; what was asked for has at most {self.objects}"
        return self.reply_too_large_reason if size > self.size else ""

    @property
    def reply_too_large_reason(self) -> str:
        """The fault of a reply with too many bytes, as a sentence."""
        return f"its reply weighs more than {self.assembled / 1e6:.0f} MB, the most that what was asked for can weigh"


NO_REPLY_BOUND = ReplySizeBound(0, 0, 0)
"""Size limit of a reply to a request that this run did not send."""
