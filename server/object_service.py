"""PullObject and PushObject of Flower's Fleet API for objects that lie in files.

Same protocol, same authentication, same checks; only the bytes are not copied five times on their way through
protobuf: the content of a request is written to its file from where it arrived, that of an answer goes out as it was
read. Everything else is answered by Flower's own servicer.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
from flwr.common.constant import Status
from flwr.proto.message_pb2 import PullObjectRequest, PullObjectResponse, PushObjectRequest, PushObjectResponse
from flwr.server.superlink.utils import check_abort

from server.object_files import ObjectFiles

VARINT, LENGTH_DELIMITED = 0, 2  # the two kinds of field that PushObjectRequest has
CONTENT_OF_PUSH = PushObjectRequest.DESCRIPTOR.fields_by_name["object_content"].number
CONTENT_OF_PULL = PullObjectResponse.DESCRIPTOR.fields_by_name["object_content"].number
KEPT_BYTES = 64 * 2**20
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


def cut_out(data: bytes, field: int) -> tuple[bytes, memoryview]:
    """Take one length-delimited field of the outermost message out of protobuf's wire format.

    Returns:
        The message without the field, and the field's content, empty where there is none.

    Raises:
        ValueError: If the bytes are no such message.
    """
    view, place, kept, content = memoryview(data), 0, list[memoryview](), memoryview(b"")
    while place < len(data):
        begin = place
        tag, place = _varint(data, place)
        size, place = _varint(data, place)
        kind = tag & 7
        if kind not in (VARINT, LENGTH_DELIMITED):
            raise ValueError(f"field {tag >> 3} is of an unexpected kind")
        end = place + size if kind == LENGTH_DELIMITED else place
        if end > len(data):
            raise ValueError("the message is cut off")
        if tag == field << 3 | LENGTH_DELIMITED:
            content = view[place:end]
        else:
            kept.append(view[begin:end])
        place = end
    return b"".join(kept), content


def found(content: bytes) -> bytes:
    """A PullObjectResponse with this content, as it travels."""
    return b"".join((FOUND, _as_varint(CONTENT_OF_PULL << 3 | LENGTH_DELIMITED), _as_varint(len(content)), content))


class Answers:
    """What was pulled last: all hospitals pull the same trunk, at about the same time."""

    def __init__(self, files: ObjectFiles) -> None:
        self._files = files
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, name: str) -> bytes | None:
        """The answer with this object's content, or None where it is not there."""
        with self._lock:
            answer = self._kept.get(name)
            if answer is None and (content := self._files.read(name)) is not None:
                self._kept[name] = answer = found(content)
            while sum(map(len, self._kept.values())) > KEPT_BYTES:
                self._kept.popitem(last=False)
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


def _varint(data: bytes, place: int) -> tuple[int, int]:
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


def _as_varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])
