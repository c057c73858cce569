"""PullObject and PushObject of Flower's Fleet API for objects that lie in files.

Same protocol, same authentication, same checks; only the bytes are not copied five times on their way through
protobuf: the content of a request is written to its file from where it arrived, that of an answer goes out as it was
read. Everything else is answered by Flower's own servicer.
"""

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
from flwr.common.constant import Status
from flwr.proto.message_pb2 import PullObjectRequest, PullObjectResponse, PushObjectRequest, PushObjectResponse
from flwr.server.superlink.utils import check_abort

from common.large_field import CONTENT_OF_PULL, CONTENT_OF_PUSH, cut_out, with_field
from server.superlink.object_files import ObjectFiles

KEPT_BYTES, KEPT_S = 64 * 2**20, 30.0
FOUND = PullObjectResponse(object_found=True, object_available=True).SerializeToString()


@dataclass(frozen=True)
class Push:
    """A PushObjectRequest, its content apart; ``node`` is what Flower's authentication looks at."""

    request: PushObjectRequest
    content: memoryview

    @property
    def node(self) -> Any:
        return self.request.node


def parsed_push(data: bytes) -> Push:
    """Read a request without copying its content."""
    rest, content = cut_out(data, CONTENT_OF_PUSH)
    return Push(PushObjectRequest.FromString(rest), content)


def found(content: bytes | memoryview) -> bytes:
    """A PullObjectResponse with this content, as it travels."""
    return with_field(FOUND, CONTENT_OF_PULL, content)


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


def handlers(servicer: Any, files: ObjectFiles, known: Callable[[str], bool]) -> dict[str, Any]:
    """The two methods, to stand in the place of Flower's.

    Args:
        servicer: Flower's ``FleetServicer``.
        known: Whether somebody has announced an object: of others no file is written.
    """

    answers = Answers(files)

    def push(push: Push, context: grpc.ServicerContext) -> PushObjectResponse:
        name = push.request.object_id
        if known(name) and hashlib.sha256(push.content).hexdigest() == name:
            files.write(name, push.content)
        answer: PushObjectResponse = servicer.PushObject(push.request, context)
        return answer

    def pull(request: PullObjectRequest, context: grpc.ServicerContext) -> bytes:
        over = check_abort(
            request.run_id, [Status.PENDING, Status.STARTING, Status.FINISHED], servicer.state_factory.state()
        )
        answer = None if over else answers.of(request.object_id)
        return answer or bytes(servicer.PullObject(request, context).SerializeToString())

    return {
        "PushObject": grpc.unary_unary_rpc_method_handler(
            push, request_deserializer=parsed_push, response_serializer=PushObjectResponse.SerializeToString
        ),
        "PullObject": grpc.unary_unary_rpc_method_handler(
            pull, request_deserializer=PullObjectRequest.FromString, response_serializer=bytes
        ),
    }
