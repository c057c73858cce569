"""Authentication of hospitals' calls to the SuperLink: every call is signed, and checked before its body is read.

Flower's protocol: three headers of a call hold a public key, the time, and a signature over the time by that key.
Flower checks them after gRPC has read the whole request, and takes the public key of an activation from the body.
Here they are checked first, and only the key that signed counts.
"""

import datetime as dt
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
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
from server.deployment.superlink.refused_calls import RefusedCall, RefusedCallLog, UnknownCallerCounts

FRESH_S, REFRESH_S = 1.0, 0.2
"""Longest time for which the list of admitted keys is used, and shortest, where a key is not on the list."""
OLD_S, AHEAD_S = 300, 5
"""Greatest age of a signed time, and greatest difference between the two clocks beyond that."""
LONGEST_KEY, LONGEST_SIGNATURE, LONGEST_TIME = 1024, 256, 64
CALLS_PER_SITE = 16
"""Calls that one site may have in progress; a site needs two transfers, a heartbeat and a request for a message."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Caller:
    """The site whose key signed a call.

    Attributes:
        node_id: Flower's number of the site.
        name: Name under which the site was admitted.
        key: Public key, PEM as Flower sends it.
        process: Id of the calling process, as the caller states it; empty for Flower's own programs.
        wait_s: Seconds that the caller would wait for a new message; None if it does not say that it has no message.
    """

    node_id: int
    name: str
    key: bytes
    process: str = ""
    wait_s: float | None = None


class CallRefused(Exception):
    """A refused call.

    Attributes:
        code: gRPC's status.
        reason: Explanation that is sent to the caller.
        other: Name of the site that the call was about, if that is not the caller; such a call is always noted.
        noted: Whether to record the call as refused, because no honest program makes it.
        run: Flower's number of the run that the call was about, 0 for none.
    """

    def __init__(self, code: grpc.StatusCode, reason: str, *, other: str = "", noted: bool = False, run: int = 0):
        super().__init__(reason)
        self.code, self.reason, self.other, self.noted, self.run = code, reason, other, noted or bool(other), run


class AdmittedKeys:
    """The keys that may call.

    Args:
        read: Reads all of them: public key -> caller.
    """

    def __init__(self, read: Callable[[], Mapping[bytes, Caller]]) -> None:
        self._read, self._lock = read, threading.Lock()
        self._callers: Mapping[bytes, Caller] = {}
        self._read_at = -FRESH_S

    def caller(self, key: bytes) -> Caller | None:
        """Return the site that is registered with this key; None for a stranger's key."""
        with self._lock:
            age = time.monotonic() - self._read_at
            if age >= FRESH_S or (key not in self._callers and age >= REFRESH_S):
                self._callers, self._read_at = self._read(), time.monotonic()
            return self._callers.get(key)

    def name_of(self, node_id: int) -> str:
        """Return the name under which a node is registered."""
        with self._lock:
            names = (caller.name for caller in self._callers.values() if caller.node_id == node_id)
            return next(names, f"node {node_id}")


@dataclass(eq=False)
class _CallInProgress:
    context: grpc.ServicerContext
    answered: bool = False


class CallLimit:
    """Limits the calls that a site has in progress: beyond :data:`CALLS_PER_SITE` its own oldest call is cancelled.

    Calls that a broken connection left behind go first in this way, and no site can take threads from another. A call
    counts until it has ended at both ends: a response that is never read holds memory, too.
    """

    def __init__(self) -> None:
        self._calls = defaultdict[str, list[_CallInProgress]](list)
        self._lock = threading.Lock()

    @contextmanager
    def count_call(self, site: str, context: grpc.ServicerContext) -> Iterator[None]:
        """Count a call of a site from now on; leaving the block marks the call as answered."""
        call = _CallInProgress(context)
        with self._lock:
            calls = self._calls[site]
            calls.append(call)
            # gRPC reports late that a call has ended: cancelling an answered call changes nothing for an honest site.
            surplus = sorted(calls, key=lambda other: not other.answered)[:-CALLS_PER_SITE]
        if not context.add_callback(lambda: self._forget_call(site, call)):
            self._forget_call(site, call)
        for oldest in surplus:  # outside the lock, which the callback takes
            oldest.context.cancel()
        try:
            yield
        finally:
            call.answered = True

    def calls_in_progress(self, site: str) -> int:
        """Return the number of calls that a site has in progress."""
        return len(self._calls[site])

    def _forget_call(self, site: str, call: _CallInProgress) -> None:
        with self._lock, suppress(ValueError):
            self._calls[site].remove(call)


class Authenticator:
    """Makes handlers of calls that authenticate the caller before they read the request.

    Args:
        admitted: The keys that may call.
        refused_calls: Records refused calls of admitted sites.
        strangers: Counts refused calls of everybody else.
        refuse_caller: Raises :class:`CallRefused` for an admitted caller that gets no answer.
    """

    def __init__(
        self,
        admitted: AdmittedKeys,
        refused_calls: RefusedCallLog,
        strangers: UnknownCallerCounts,
        refuse_caller: Callable[[Caller], None],
    ) -> None:
        self.admitted, self._refused_calls, self._strangers = admitted, refused_calls, strangers
        self._refuse_caller, self.limit = refuse_caller, CallLimit()

    def make_handler(
        self,
        name: str,
        answer: Callable[[Caller, Any], Any],
        parse: Callable[[bytes], Any],
        serialize: Callable[[Any], bytes],
    ) -> grpc.RpcMethodHandler:
        """Make the handler of one method.

        gRPC is told that the method takes a stream of requests, of which there is one: it then reads the request when
        we ask for it, after the caller is known. We parse the request, too, because a request that gRPC itself cannot
        parse would keep its thread and its place on the caller's connection for ever.

        Args:
            answer: Returns the response to a caller's request.
            parse, serialize: Convert the request from bytes and the response to bytes.
        """

        def respond(requests: Iterator[bytes], context: grpc.ServicerContext) -> Any:
            caller = None
            try:
                caller = self.identify_signer(context.invocation_metadata())
                with self.limit.count_call(caller.name, context):
                    body = next(requests, None)  # raises RpcError for a call that has ended
                    if body is None:
                        raise CallRefused(grpc.StatusCode.INVALID_ARGUMENT, "the call has no request")
                    self._refuse_caller(caller)
                    try:
                        request = parse(body)
                    except (DecodeError, ValueError):  # of protobuf, and of our own parser of pushed objects
                        reason = "the request cannot be decoded"
                        raise CallRefused(grpc.StatusCode.INVALID_ARGUMENT, reason, noted=True) from None
                    return answer(caller, request)
            except CallRefused as refused:
                self._abort_call(context, caller, name, refused)
            except Exception as error:  # the edge of the process: the caller learns nothing of what is inside
                if context.is_active():
                    _log.error("%s failed: %r", name, error)
                    failure = CallRefused(grpc.StatusCode.INTERNAL, "the coordinator failed")
                    self._abort_call(context, caller, name, failure)
                raise

        return grpc.stream_unary_rpc_method_handler(respond, response_serializer=serialize)

    def identify_signer(self, metadata: Any) -> Caller:
        """Return the site that signed a call.

        Raises:
            CallRefused: If the signature is missing or wrong, is not of now, or its key is not admitted.
        """
        key, when, signature = parse_signed_headers(metadata)
        caller = self.admitted.caller(key)
        if caller is None or not is_signed_by(key, when, signature):
            raise CallRefused(grpc.StatusCode.UNAUTHENTICATED, "Invalid signature")
        try:
            age_s = (dt.datetime.now(dt.UTC) - dt.datetime.fromisoformat(when)).total_seconds()
        except (ValueError, TypeError, OverflowError):  # no time, or a time without a zone
            age_s = float("inf")
        if not -AHEAD_S < age_s < OLD_S + AHEAD_S:
            raise CallRefused(grpc.StatusCode.UNAUTHENTICATED, "Invalid timestamp")
        process = _find_header(metadata, PROCESS)
        if len(process) > LONGEST_PROCESS:
            raise CallRefused(grpc.StatusCode.UNAUTHENTICATED, "Invalid process")
        return replace(caller, process=process, wait_s=requested_wait_s(_find_header(metadata, WAIT)))

    def _abort_call(self, context: Any, caller: Caller | None, name: str, refused: CallRefused) -> NoReturn:
        if caller is None:
            self._strangers.count(context.peer(), refused.reason)
        elif refused.noted:
            self._refused_calls.record_refusal(
                RefusedCall(caller.name, name, refused.reason, refused.other, refused.run)
            )
        context.abort(refused.code, refused.reason)
        raise AssertionError("abort raises")


def parse_signed_headers(metadata: Any) -> tuple[bytes, str, bytes]:
    """Return key, time and signature from the headers of a call.

    Raises:
        CallRefused: If a header is missing, occurs twice, or is too long.
    """
    headers: dict[str, Any] = {}
    for name, value in metadata or ():
        if name in (PUBLIC_KEY, TIME, SIGNATURE):
            if name in headers:
                raise CallRefused(grpc.StatusCode.UNAUTHENTICATED, f"{name} is there twice")
            headers[name] = value
    key, when, signature = (headers.get(name) for name in (PUBLIC_KEY, TIME, SIGNATURE))
    if not isinstance(key, bytes) or not isinstance(when, str) or not isinstance(signature, bytes):
        raise CallRefused(grpc.StatusCode.UNAUTHENTICATED, "Missing authentication metadata")
    if len(key) > LONGEST_KEY or len(signature) > LONGEST_SIGNATURE or len(when) > LONGEST_TIME:
        raise CallRefused(grpc.StatusCode.UNAUTHENTICATED, "Invalid authentication metadata")
    return key, when, signature


def _find_header(metadata: Any, header: str) -> str:
    return str(next((value for name, value in metadata or () if name == header), ""))
