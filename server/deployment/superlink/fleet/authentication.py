"""Who calls: every call of the hospital link is signed, and the signer is known before anything of the call is read.

Flower's protocol: three headers of a call hold a public key, the time, and a signature over the time by that key.
Flower checks them after gRPC has read the whole request, and takes the public key of an activation from the body.
Here they are checked first, and the key that signed is the only one that counts.
"""

import datetime as dt
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from common.security.call_signatures import (
    LONGEST_PROCESS,
    PROCESS,
    PUBLIC_KEY,
    SIGNATURE,
    TIME,
    WAIT,
    is_signed_by,
    requested_wait_s,
)
from server.deployment.superlink.fleet.refused_calls import RefusedCall, RefusedCalls
from server.deployment.superlink.port_guard.call_limits import NoRequest
from server.deployment.superlink.port_guard.guard import Guard

FRESH_S, LOOK_AGAIN_S = 1.0, 0.2
"""For how long the list of admitted keys is taken as it was; for how long at least, where a key is not on it."""
BRINGS_AN_OBJECT = "PushObject"
"""The one method whose request is large."""
OLD_S, AHEAD_S = 300, 5
"""How old a signed time may be, and how far the two clocks may differ beyond that."""
LONGEST_KEY, LONGEST_SIGNATURE, LONGEST_TIME = 1024, 256, 64
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Caller:
    """The site whose key signed a call.

    Attributes:
        node_id: Flower's number of it.
        name: Under which it was admitted.
        key: Its public key in Flower's form.
        process: Its process that calls, as it says; empty for Flower's own programs, which do not say it.
        wait_s: For how long it would wait for a message, as it says; None for one that has not said that it has none.
    """

    node_id: int
    name: str
    key: bytes
    process: str = ""
    wait_s: float | None = None


class CallRefused(Exception):
    """A call that is refused.

    Attributes:
        code: gRPC's status.
        reason: Sent to the caller.
        other: The site that the call was about, where it was another one; such a call is noted.
        noted: Whether an honest program never sends such a call, so that it is written to the list of refused calls.
    """

    def __init__(self, code: grpc.StatusCode, reason: str, *, other: str = "", noted: bool = False, run: int = 0):
        super().__init__(reason)
        self.code, self.reason, self.other, self.noted, self.run = code, reason, other, noted or bool(other), run


class Admitted:
    """The keys that may call, as Flower's database has them.

    Args:
        look: Reads them: public key in Flower's form -> caller.
    """

    def __init__(self, look: Callable[[], Mapping[bytes, Caller]]) -> None:
        self._look, self._lock = look, threading.Lock()
        self._known: Mapping[bytes, Caller] = {}
        self._looked = -FRESH_S

    def caller(self, key: bytes) -> Caller | None:
        """Who is registered with this key; None for a stranger."""
        with self._lock:
            age = time.monotonic() - self._looked
            if age >= FRESH_S or (key not in self._known and age >= LOOK_AGAIN_S):
                self._known, self._looked = self._look(), time.monotonic()
            return self._known.get(key)

    def node_of(self, key: bytes) -> int | None:
        """The node that is registered with this key; None for a stranger."""
        caller = self.caller(key)
        return caller.node_id if caller else None

    def name_of(self, node_id: int) -> str:
        """The name that a node is registered under."""
        with self._lock:
            return next((one.name for one in self._known.values() if one.node_id == node_id), f"node {node_id}")


class Door:
    """Lets calls in.

    Args:
        admitted: The keys that may call.
        refused_calls: Where refused calls are written.
        guard: Told who called and who was refused on which connection; keeps a site's calls within their limits.
        pass_or_refuse: Raises :class:`CallRefused` where a known caller is not answered.
    """

    def __init__(
        self,
        admitted: Admitted,
        refused_calls: RefusedCalls,
        guard: Guard,
        pass_or_refuse: Callable[[Caller], None],
    ) -> None:
        self.admitted, self._refused_calls, self._guard = admitted, refused_calls, guard
        self._pass_or_refuse = pass_or_refuse

    def handler(
        self,
        name: str,
        answer: Callable[[Caller, Any], Any],
        read: Callable[[bytes], Any],
        write: Callable[[Any], bytes],
    ) -> grpc.RpcMethodHandler:
        """One method of the service.

        gRPC takes it for one with a stream of requests, of which there is one: so the request is read when we ask for
        it, after the caller is known, and not before. It is decoded here too: of a request that gRPC itself cannot
        decode, the call, its thread and its place on the caller's connection would stay for ever.

        Args:
            name: Of the method.
            answer: What it does.
            read, write: Of the request and of the answer.
        """

        def answered(requests: Iterator[Any], context: grpc.ServicerContext) -> Any:
            caller = None
            try:
                caller = self.signer(context.invocation_metadata())
                self._guard.authenticated(context.peer(), caller.name)
                large = name == BRINGS_AN_OBJECT
                with self._guard.calls.request(caller.name, context, requests, large=large) as body:
                    self._pass_or_refuse(caller)
                    return answer(caller, _decoded(read, body))
            except NoRequest as fault:
                self._abort(context, caller, name, CallRefused(grpc.StatusCode.INVALID_ARGUMENT, str(fault)))
            except CallRefused as refused:
                self._abort(context, caller, name, refused)
            except Exception as error:  # the edge of the process: the caller learns nothing of what is inside
                if context.is_active():
                    log.error("%s failed: %r", name, error)
                    self._abort(context, caller, name, CallRefused(grpc.StatusCode.INTERNAL, "the coordinator failed"))
                raise

        return grpc.stream_unary_rpc_method_handler(answered, response_serializer=write)

    def signer(self, metadata: Any) -> Caller:
        """Who signed a call.

        Raises:
            CallRefused: If nobody did, not now, or nobody who is admitted.
        """
        key, when, signature = signed_headers(metadata)
        caller = self.admitted.caller(key)
        if caller is None or not is_signed_by(key, when, signature):
            raise CallRefused(grpc.StatusCode.UNAUTHENTICATED, "Invalid signature")
        if not _is_now(when):
            raise CallRefused(grpc.StatusCode.UNAUTHENTICATED, "Invalid timestamp")
        return replace(caller, process=_process(metadata), wait_s=requested_wait_s(_said(metadata, WAIT)))

    def _abort(self, context: Any, caller: Caller | None, name: str, refused: CallRefused) -> NoReturn:
        if caller is not None and refused.noted:
            self._refused_calls.note(RefusedCall(caller.name, name, refused.reason, refused.other, refused.run))
        if caller is None:
            self._guard.refused(context.peer(), refused.reason)
        context.abort(refused.code, refused.reason)
        raise AssertionError("abort raises")


def _decoded(read: Callable[[bytes], Any], body: bytes) -> Any:
    try:
        return read(body)
    except (DecodeError, ValueError):  # protobuf's, and ours of a request that is cut out of its bytes
        reason = "the request cannot be decoded"
        raise CallRefused(grpc.StatusCode.INVALID_ARGUMENT, reason, noted=True) from None


def signed_headers(metadata: Any) -> tuple[bytes, str, bytes]:
    """The three headers of a signed call: key, time, signature.

    Raises:
        CallRefused: If one is missing, there twice, or too long to be one.
    """
    found: dict[str, Any] = {}
    for name, value in metadata or ():
        if name in (PUBLIC_KEY, TIME, SIGNATURE):
            if name in found:
                raise CallRefused(grpc.StatusCode.UNAUTHENTICATED, f"{name} is there twice")
            found[name] = value
    key, when, signature = (found.get(name) for name in (PUBLIC_KEY, TIME, SIGNATURE))
    if not isinstance(key, bytes) or not isinstance(when, str) or not isinstance(signature, bytes):
        raise CallRefused(grpc.StatusCode.UNAUTHENTICATED, "Missing authentication metadata")
    if len(key) > LONGEST_KEY or len(signature) > LONGEST_SIGNATURE or len(when) > LONGEST_TIME:
        raise CallRefused(grpc.StatusCode.UNAUTHENTICATED, "Invalid authentication metadata")
    return key, when, signature


def _process(metadata: Any) -> str:
    """Which of a site's processes calls, as it says.

    Raises:
        CallRefused: If that is too long to be true.
    """
    said = _said(metadata, PROCESS)
    if len(said) > LONGEST_PROCESS:
        raise CallRefused(grpc.StatusCode.UNAUTHENTICATED, "Invalid process")
    return said


def _said(metadata: Any, header: str) -> str:
    """The value of a header, empty where it is not there."""
    return str(next((value for name, value in metadata or () if name == header), ""))


def _is_now(when: str) -> bool:
    """Whether a time is the present one, as far as two clocks can tell."""
    try:
        age = (dt.datetime.now(dt.UTC) - dt.datetime.fromisoformat(when)).total_seconds()
    except (ValueError, TypeError, OverflowError):  # no time, or one without a zone
        return False
    return -AHEAD_S < age < OLD_S + AHEAD_S
