"""How the contents of objects pass through gRPC: the requests and answers of PushObject and PullObject as bytes.

Flower's protocol; only the bytes are not copied five times on their way through protobuf. The content of a request is
written to its file from where it arrived, that of an answer goes out as it was read.
"""

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from common.wire.fleet_protocol import (
    CONTENT_OF_PULL,
    CONTENT_OF_PUSH,
    PullObjectResponse,
    PushObjectRequest,
    append_field,
    extract_field,
)
from server.deployment.superlink.objects.files import ObjectFiles

KEPT_BYTES, KEPT_S = 64 * 2**20, 30.0
FOUND = PullObjectResponse(object_found=True, object_available=True).SerializeToString()


@dataclass(frozen=True)
class Push:
    """A PushObjectRequest, its content apart."""

    request: Any
    content: memoryview


def parsed_push(data: bytes) -> Push:
    """Read a request without copying its content."""
    rest, content = extract_field(data, CONTENT_OF_PUSH)
    return Push(PushObjectRequest.FromString(rest), content)


def found(content: bytes | memoryview) -> bytes:
    """A PullObjectResponse with this content, as it travels."""
    return append_field(FOUND, CONTENT_OF_PULL, content)


class Answers:
    """What was pulled last: all hospitals pull the same trunk, at about the same time.

    Kept for :data:`KEPT_S` after each pull, and never more than :data:`KEPT_BYTES`.
    """

    def __init__(self, files: ObjectFiles) -> None:
        self._files = files
        self._kept: OrderedDict[str, tuple[float, bytes]] = OrderedDict()  # the one pulled last at the end
        self._size = 0
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """Bytes kept."""
        return self._size

    def of(self, name: str) -> bytes | None:
        """The answer with this object's content, or None where it is not there."""
        now = time.monotonic()
        with self._lock:
            answer = self._taken(name)
            if answer is None and (content := self._files.view(name)) is not None:
                answer = found(content)
            if answer is not None:
                self._kept[name] = (now, answer)
                self._size += len(answer)
            while self._kept and (self._size > KEPT_BYTES or now - next(iter(self._kept.values()))[0] > KEPT_S):
                self._taken(next(iter(self._kept)))
        return answer

    def _taken(self, name: str) -> bytes | None:
        if name not in self._kept:
            return None
        _, answer = self._kept.pop(name)
        self._size -= len(answer)
        return answer
