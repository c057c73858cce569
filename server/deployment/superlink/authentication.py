"""Authentication of hospitals' calls to the SuperLink: the signature is checked before the request body is read.

Flower's protocol: three headers of a call hold a public key, the time, and a signature by that key. Flower checks them
after gRPC has read the whole request, and takes the public key of an activation from the body. This module checks the
headers first, identifies the caller only by the key that signed, and takes only calls that are signed for this
coordinator: another one, to which the same hospital connects, could otherwise repeat its headers here.

A hospital of an earlier wire version signs for no coordinator. Its calls are taken, unless the same key has signed a
call for this coordinator within the time for which headers are valid: the program that made that call would not make
this one.
"""

import datetime as dt
import logging
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from polyclinic.common.security.call_signatures import (
    MAX_PROCESS_CHARACTERS,
    PROCESS_HEADER,
    PUBLIC_KEY_HEADER,
    SIGNATURE_HEADER,
    TIME_HEADER,
    WAIT_HEADER,
    is_call_signature_valid,
    parse_wait_header_s,
)
from polyclinic.common.wire.versions import (
    PRESENT_RELEASE,
    RELEASE_HEADER,
    WIRE_FORMATS,
    StatedRelease,
    parse_release_header,
)
from polyclinic.server.deployment.superlink.refused_calls import RefusedCall, RefusedCallLog, UnknownCallerCounts

FRESH_S, REFRESH_S = 1.0, 0.2
"""Longest time for which the list of admitted keys is used, and shortest, where a key is not on the list."""
OLD_S, AHEAD_S = 300, 5
"""Greatest age of a signed time, and greatest difference between the two clocks beyond that."""
LONGEST_KEY, LONGEST_SIGNATURE, LONGEST_TIME = 1024, 256, 64
CALLS_PER_SITE = 16
"""Calls that one site may have in progress; a site needs two transfers, a heartbeat and a request for a message."""
CALLS_FOR_NO_COORDINATOR = not all(spoken.signs_calls_for_coordinator for spoken in WIRE_FORMATS.values())
"""True as long as sites of an earlier wire version sign their calls for no coordinator."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CallingSite:
    """The site whose key signed a call.

    Attributes:
        node_id: Flower's node id of the site.
        name: Name under which the site was admitted.
        key: Public key, PEM as Flower sends it.
        process: Id of the calling process, as stated in a header; empty for Flower's own programs.
        wait_s: Seconds for which the SuperLink may hold the call open until there is a message for the site; None if
            the call has no header with this time.
        stated: Wire version and release that the call states.
    """

    node_id: int
    name: str
    key: bytes
    process: str = ""
    wait_s: float | None = None
    stated: StatedRelease = PRESENT_RELEASE


class HospitalCallRefused(Exception):
    """Raised to refuse a hospital's call.

    Attributes:
        code: gRPC status code.
        reason: Explanation that is sent to the caller.
        other: Name of another site that the call was about; empty if the call was about the caller itself.
        noted: Whether to record the refusal for the coordinator's operator; always True if ``other`` is set.
        run: Flower's number of the run that the call was about; 0 for none.
    """

    def __init__(self, code: grpc.StatusCode, reason: str, *, other: str = "", noted: bool = False, run: int = 0):
        super().__init__(reason)
        self.code, self.reason, self.other, self.noted, self.run = code, reason, other, noted or bool(other), run


class RegisteredSiteKeys:
    """A cache of the registered sites' public keys.

    A look-up reads the keys again if the last reading is older than :data:`FRESH_S` seconds or, for a key that is not
    in the cache, older than :data:`REFRESH_S` seconds.

    Args:
        read: Reads the keys; returns public key -> site, for all registered sites.
    """

    def __init__(self, read: Callable[[], Mapping[bytes, CallingSite]]) -> None:
        self._read, self._lock = read, threading.Lock()
        self._callers: Mapping[bytes, CallingSite] = {}
        self._read_at = -FRESH_S

    def find_caller_by_key(self, key: bytes) -> CallingSite | None:
        """Return the site that is registered with this key; None for an unknown key."""
        with self._lock:
            age = time.monotonic() - self._read_at
            if age >= FRESH_S or (key not in self._callers and age >= REFRESH_S):
                self._callers, self._read_at = self._read(), time.monotonic()
            return self._callers.get(key)

    def find_site_name(self, node_id: int) -> str:
        """Return the name of the site with this node id; for an unknown id, a text with the id."""
        with self._lock:
            names = (caller.name for caller in self._callers.values() if caller.node_id == node_id)
            return next(names, f"node {node_id}")


@dataclass(eq=False)
class _CallInProgress:
    context: grpc.ServicerContext
    answered: bool = False


class ConcurrentCallLimiter:
    """Limits the calls in progress per site: beyond :data:`CALLS_PER_SITE`, the oldest call of that site is cancelled.

    So calls left behind by a broken connection end first, and no site can use up the threads of others. A call counts
    until gRPC reports its end, even if it is answered, because a response that the site never reads holds memory, too.
    """

    def __init__(self) -> None:
        self._calls = defaultdict[str, list[_CallInProgress]](list)
        self._lock = threading.Lock()

    @contextmanager
    def track_site_call(self, site: str, context: grpc.ServicerContext) -> Iterator[None]:
        """Count a call of a site as in progress; on leaving the block, mark the call as answered."""
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

    def count_calls_in_progress(self, site: str) -> int:
        """Return the number of calls that a site has in progress."""
        return len(self._calls[site])

    def _forget_call(self, site: str, call: _CallInProgress) -> None:
        with self._lock, suppress(ValueError):
            self._calls[site].remove(call)


LARGE_TRANSFERS = frozenset({"PushObject", "PullObject"})
"""Calls with a part of a model, megabytes each."""
TRANSFERS_AT_A_TIME = 4
"""Transfers that have their turn at a time; each takes two or three times its part of a model in memory.

With twelve hospitals and a ResNet-18, eight turns took 214 MB and four 182 MB.
"""
LONGEST_TURN_WAIT_S = 1.0
"""Time after which a transfer goes on without a turn."""


class TransferTurns:
    """Lets transfers of large parts wait for one another a moment, so that many hospitals take no more memory than few.

    Over a fast line, the transfers of all hospitals in a round end no later for it, because the processor is busy with
    those that have their turn. Hospitals on slow lines keep their turns for seconds. So a transfer does not wait longer
    than :data:`LONGEST_TURN_WAIT_S`: no hospital can keep the others from sending.
    """

    def __init__(self) -> None:
        self._turns = threading.Semaphore(TRANSFERS_AT_A_TIME)

    def wait_for_turn(self, context: grpc.ServicerContext) -> bool:
        """Wait for a turn, which lasts until the call of this context has ended; return False if there came none."""
        if not self._turns.acquire(timeout=LONGEST_TURN_WAIT_S):
            return False
        if not context.add_callback(self._turns.release):
            self._turns.release()
        return True


class SignedFor(Enum):
    """The coordinator that a call is signed for."""

    THIS_COORDINATOR = "this coordinator"
    NO_COORDINATOR = "no coordinator, as sites of an earlier wire version sign"


class CallSignatureVerifier:
    """Verifies the signatures of calls, and remembers which keys have signed for this coordinator lately.

    Args:
        authority: Hash of the key of this coordinator's authority, for which callers sign.
        clock: Returns the time in seconds on a clock that never goes back.
    """

    def __init__(self, authority: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._authority, self._clock = authority, clock
        self._last_named: dict[bytes, float] = {}  # key of a registered site -> time of its last call for us

    def find_what_was_signed(self, key: bytes, when: str, signature: bytes) -> SignedFor | None:
        """Return for which coordinator a call is signed; None if the signature is by another key."""
        if is_call_signature_valid(key, when, self._authority, signature):
            return SignedFor.THIS_COORDINATOR
        if CALLS_FOR_NO_COORDINATOR and is_call_signature_valid(key, when, "", signature):
            return SignedFor.NO_COORDINATOR
        return None

    def refuse_unnamed_repetition(self, site: str, key: bytes, signed: SignedFor) -> None:
        """Refuse a call for no coordinator if the same key has just signed for this one; otherwise remember the call.

        Another coordinator, to which the site connects by the same key, may have repeated the headers of such a call.
        A site that went back to an earlier release is taken again once headers of the later one have expired.

        Raises:
            HospitalCallRefused: With a status at which a site tries again.
        """
        now = self._clock()
        if signed is SignedFor.THIS_COORDINATOR:
            self._last_named[key] = now
            return
        left_s = self._last_named.get(key, -math.inf) + OLD_S + AHEAD_S - now
        if left_s > 0:
            reason = f"{site} has just called by a later release; an earlier one is taken in {left_s:.0f} s"
            raise HospitalCallRefused(grpc.StatusCode.UNAVAILABLE, reason)


class CallAuthenticator:
    """Makes gRPC handlers that authenticate the caller before they read the request.

    Args:
        authority: Hash of the key of this coordinator's authority, for which callers sign.
        refuse_caller: Raises :class:`HospitalCallRefused` if a registered caller must not be answered.
    """

    def __init__(
        self,
        authority: str,
        admitted: RegisteredSiteKeys,
        refused_calls: RefusedCallLog,
        strangers: UnknownCallerCounts,
        refuse_caller: Callable[[CallingSite], None],
    ) -> None:
        self._signatures = CallSignatureVerifier(authority)
        self.admitted, self._refused_calls, self._strangers = admitted, refused_calls, strangers
        self._refuse_caller, self.limit, self._turns = refuse_caller, ConcurrentCallLimiter(), TransferTurns()

    def make_authenticated_handler(
        self,
        name: str,
        answer: Callable[[CallingSite, Any], Any],
        parse: Callable[[bytes], Any],
        serialize: Callable[[Any], bytes],
    ) -> grpc.RpcMethodHandler:
        """Make the gRPC handler of one method.

        The method is declared as streaming, with a stream of one request, so that gRPC reads the request only after the
        caller is authenticated. The handler itself parses the request, because a request that gRPC fails to parse would
        block a thread for ever.

        Args:
            answer: Computes the response to a caller's request.
            parse, serialize: Convert the request from bytes and the response to bytes.
        """

        def respond_to_call(requests: Iterator[bytes], context: grpc.ServicerContext) -> Any:
            caller = None
            try:
                caller = self.identify_call_signer(context.invocation_metadata())
                with self.limit.track_site_call(caller.name, context):
                    if name in LARGE_TRANSFERS:
                        self._turns.wait_for_turn(context)
                    body = next(requests, None)  # raises RpcError for a call that has ended
                    if body is None:
                        raise HospitalCallRefused(grpc.StatusCode.INVALID_ARGUMENT, "the call has no request")
                    self._refuse_caller(caller)
                    try:
                        request = parse(body)
                    except (DecodeError, ValueError):  # of protobuf, and of our own parser of pushed objects
                        reason = "the request cannot be decoded"
                        raise HospitalCallRefused(grpc.StatusCode.INVALID_ARGUMENT, reason, noted=True) from None
                    return answer(caller, request)
            except HospitalCallRefused as refused:
                self._record_and_abort_call(context, caller, name, refused)
            except Exception as error:  # the edge of the process: the caller learns nothing of what is inside
                if context.is_active():
                    _log.error("%s failed: %r", name, error)
                    failure = HospitalCallRefused(grpc.StatusCode.INTERNAL, "the coordinator failed")
                    self._record_and_abort_call(context, caller, name, failure)
                raise

        return grpc.stream_unary_rpc_method_handler(respond_to_call, response_serializer=serialize)

    def identify_call_signer(self, metadata: Any) -> CallingSite:
        """Verify the signature in a call's headers; return the site that signed.

        Raises:
            HospitalCallRefused: If the signature is missing, wrong or too old, or its key is not registered.
        """
        key, when, signature = parse_signed_headers(metadata)
        caller = self.admitted.find_caller_by_key(key)
        signed = None if caller is None else self._signatures.find_what_was_signed(key, when, signature)
        if caller is None or signed is None:
            raise HospitalCallRefused(grpc.StatusCode.UNAUTHENTICATED, "Invalid signature")
        try:
            age_s = (dt.datetime.now(dt.UTC) - dt.datetime.fromisoformat(when)).total_seconds()
        except (ValueError, TypeError, OverflowError):  # no time, or a time without a zone
            age_s = float("inf")
        if not -AHEAD_S < age_s < OLD_S + AHEAD_S:
            raise HospitalCallRefused(grpc.StatusCode.UNAUTHENTICATED, "Invalid timestamp")
        self._signatures.refuse_unnamed_repetition(caller.name, key, signed)
        process = _find_call_header(metadata, PROCESS_HEADER)
        if len(process) > MAX_PROCESS_CHARACTERS:
            raise HospitalCallRefused(grpc.StatusCode.UNAUTHENTICATED, "Invalid process")
        return replace(
            caller,
            process=process,
            wait_s=parse_wait_header_s(_find_call_header(metadata, WAIT_HEADER)),
            stated=read_stated_release(metadata, signed),
        )

    def _record_and_abort_call(
        self, context: Any, caller: CallingSite | None, name: str, refused: HospitalCallRefused
    ) -> NoReturn:
        if caller is None:
            self._strangers.count_refused_call(context.peer(), refused.reason)
        elif refused.noted:
            call = RefusedCall(caller.name, name, refused.reason, refused.other, refused.run)
            self._refused_calls.record_refused_call(call)
        context.abort(refused.code, refused.reason)
        raise AssertionError("abort raises")


def parse_signed_headers(metadata: Any) -> tuple[bytes, str, bytes]:
    """Return public key, time and signature from the headers of a call.

    Raises:
        HospitalCallRefused: If a header is missing, occurs twice, or is too long.
    """
    headers: dict[str, Any] = {}
    for name, value in metadata or ():
        if name in (PUBLIC_KEY_HEADER, TIME_HEADER, SIGNATURE_HEADER):
            if name in headers:
                raise HospitalCallRefused(grpc.StatusCode.UNAUTHENTICATED, f"{name} is there twice")
            headers[name] = value
    key, when, signature = (headers.get(name) for name in (PUBLIC_KEY_HEADER, TIME_HEADER, SIGNATURE_HEADER))
    if not isinstance(key, bytes) or not isinstance(when, str) or not isinstance(signature, bytes):
        raise HospitalCallRefused(grpc.StatusCode.UNAUTHENTICATED, "Missing authentication metadata")
    if len(key) > LONGEST_KEY or len(signature) > LONGEST_SIGNATURE or len(when) > LONGEST_TIME:
        raise HospitalCallRefused(grpc.StatusCode.UNAUTHENTICATED, "Invalid authentication metadata")
    return key, when, signature


def read_stated_release(metadata: Any, signed: "SignedFor | None") -> StatedRelease:
    """Return the wire version and the release that a call states in its headers.

    Args:
        signed: The coordinator that the call is signed for; None if this is unknown. Then the header alone counts.
    """
    header = _find_call_header(metadata, RELEASE_HEADER)
    named = bool(header) if signed is None else signed is SignedFor.THIS_COORDINATOR
    return parse_release_header(header, signed_for_coordinator=named)


def _find_call_header(metadata: Any, header: str) -> str:
    return str(next((value for name, value in metadata or () if name == header), ""))
