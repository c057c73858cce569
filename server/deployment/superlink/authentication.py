"""Authentication of hospitals' calls to the SuperLink: the signature is checked before the request body is read.

In Flower's protocol, three headers of a call hold a public key, the time, and a signature by that key. Flower checks
them after gRPC has read the whole request, and takes the public key of an activation from the body. This module checks
the headers first, and identifies the caller only by the key that signed. The signature must also cover this
coordinator's authority (the audience of the signature). Otherwise another coordinator, to which the same hospital
connects, could replay the hospital's headers here.

A hospital of an earlier wire version signs without an audience. Such a call is accepted, unless the same key has signed
a call with an audience recently. A program that signs with an audience never signs without one, so the call is then a
replay.
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

MAX_KEY_CACHE_AGE_S = 1.0
"""Seconds after which the cached list of admitted keys is read again."""
MIN_KEY_RELOAD_INTERVAL_S = 0.2
"""Shortest time between two readings of the list, if a caller's key is not on it."""
MAX_SIGNATURE_AGE_S = 300
"""Greatest age of a signed time."""
MAX_CLOCK_DIFFERENCE_S = 5
"""Tolerated difference between the clocks of site and coordinator, beyond the greatest age."""
MAX_KEY_BYTES = 1024
MAX_SIGNATURE_BYTES = 256
MAX_TIME_CHARACTERS = 64
MAX_CALLS_PER_SITE = 16
"""Calls that one site may have in progress; a site needs two transfers, a heartbeat and a request for a message."""
ACCEPTS_CALLS_WITHOUT_AUDIENCE = not all(version.signs_calls_for_coordinator for version in WIRE_FORMATS.values())
"""True while this release speaks a wire version in which sites sign calls without an audience."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CallingSite:
    """The site whose key signed a call.

    Attributes:
        node_id: Flower's node id of the site.
        name: Name under which the site was admitted.
        key: Public key, PEM as Flower sends it.
        process: Id of the calling process, as stated in a header; empty for Flower's own programs.
        wait_s: Seconds for which the SuperLink may hold the call open until there is a message for the site (long
            polling); None if the call has no header with this time.
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
        noted: True to record the refusal for the coordinator's operator; always True if ``other`` is set.
        run: Flower's number of the run that the call was about; 0 for none.
    """

    def __init__(self, code: grpc.StatusCode, reason: str, *, other: str = "", noted: bool = False, run: int = 0):
        super().__init__(reason)
        self.code = code
        self.reason = reason
        self.other = other
        self.noted = noted or bool(other)
        self.run = run


class RegisteredSiteKeys:
    """A cache of the registered sites' public keys.

    A look-up reads the keys again if they were read more than :data:`MAX_KEY_CACHE_AGE_S` seconds ago. For a key that
    is not in the cache, they are read again after :data:`MIN_KEY_RELOAD_INTERVAL_S` seconds.

    Args:
        read: Reads the keys; returns public key -> site, for all registered sites.
    """

    def __init__(self, read: Callable[[], Mapping[bytes, CallingSite]]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._callers: Mapping[bytes, CallingSite] = {}
        self._read_at = -MAX_KEY_CACHE_AGE_S  # monotonic time of the last reading

    def find_caller_by_key(self, key: bytes) -> CallingSite | None:
        """Return the site that is registered with this key; None for an unknown key."""
        with self._lock:
            age = time.monotonic() - self._read_at
            if age >= MAX_KEY_CACHE_AGE_S or (key not in self._callers and age >= MIN_KEY_RELOAD_INTERVAL_S):
                self._callers = self._read()
                self._read_at = time.monotonic()
            return self._callers.get(key)

    def find_site_name(self, node_id: int) -> str:
        """Return the name of the site with this node id; for an unknown id, a text with the id."""
        with self._lock:
            names = (caller.name for caller in self._callers.values() if caller.node_id == node_id)
            return next(names, f"node {node_id}")


@dataclass(eq=False)
class _CallInProgress:
    """A call of a site that gRPC has not reported as ended.

    Attributes:
        answered: True once the response was handed to gRPC.
    """

    context: grpc.ServicerContext
    answered: bool = False


class ConcurrentCallLimiter:
    """Limits the calls in progress per site to :data:`MAX_CALLS_PER_SITE`, by cancelling the oldest call of the site.

    So calls of a broken connection end first, and no site can use up the threads of others. A call counts until gRPC
    reports its end, even if it is answered, because a response that the site never reads also holds memory.
    """

    def __init__(self) -> None:
        self._calls = defaultdict[str, list[_CallInProgress]](list)
        self._lock = threading.Lock()

    @contextmanager
    def track_site_call(self, site: str, context: grpc.ServicerContext) -> Iterator[None]:
        """Count a call of a site as in progress; at the end of the ``with`` block, mark the call as answered."""
        call = _CallInProgress(context)
        with self._lock:
            calls = self._calls[site]
            calls.append(call)
            # gRPC reports late that a call has ended: cancelling an answered call changes nothing for an honest site.
            surplus = sorted(calls, key=lambda other: not other.answered)[:-MAX_CALLS_PER_SITE]
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


LARGE_TRANSFER_METHODS = frozenset({"PushObject", "PullObject"})
"""Methods of the Fleet API whose calls carry parts of a model, megabytes each."""
MAX_CONCURRENT_TRANSFERS = 4
"""Transfers that run at the same time; each takes two or three times its part of a model in memory.

With twelve hospitals and a ResNet-18, eight concurrent transfers took 214 MB and four took 182 MB.
"""
MAX_TURN_WAIT_S = 1.0
"""Seconds after which a transfer starts even if :data:`MAX_CONCURRENT_TRANSFERS` others are running."""


class TransferTurns:
    """Limits the number of concurrent transfers of large parts, so that many hospitals take no more memory than few.

    On fast lines, waiting does not delay the end of a round, because the running transfers keep the processor busy. A
    hospital on a slow line may hold its turn for seconds. So a transfer waits at most :data:`MAX_TURN_WAIT_S`, and no
    hospital can keep the others from sending.
    """

    def __init__(self) -> None:
        self._turns = threading.Semaphore(MAX_CONCURRENT_TRANSFERS)

    def wait_for_turn(self, context: grpc.ServicerContext) -> bool:
        """Wait for a turn, which lasts until the call of this context ends; return False if the wait timed out."""
        if not self._turns.acquire(timeout=MAX_TURN_WAIT_S):
            return False
        if not context.add_callback(self._turns.release):
            self._turns.release()
        return True


class SignatureAudience(Enum):
    """The coordinator for which a call is signed."""

    THIS_COORDINATOR = "this coordinator"
    NO_COORDINATOR = "no coordinator, as sites of an earlier wire version sign"


class CallSignatureVerifier:
    """Verifies the signatures of calls, and remembers when each key last signed for this coordinator.

    Args:
        authority: Hash of the public key of this coordinator's certificate authority: the audience of signatures.
        clock: Returns the time in seconds on a clock that never goes back.
    """

    def __init__(self, authority: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._authority = authority
        self._clock = clock
        self._last_call_times: dict[bytes, float] = {}  # key of a site -> time of its last call with an audience

    def find_signature_audience(self, key: bytes, when: str, signature: bytes) -> SignatureAudience | None:
        """Return for which coordinator a call is signed; None if the signature is not by this key."""
        if is_call_signature_valid(key, when, self._authority, signature):
            return SignatureAudience.THIS_COORDINATOR
        if ACCEPTS_CALLS_WITHOUT_AUDIENCE and is_call_signature_valid(key, when, "", signature):
            return SignatureAudience.NO_COORDINATOR
        return None

    def refuse_replay_without_audience(self, site: str, key: bytes, audience: SignatureAudience) -> None:
        """Refuse a call without an audience if the same key has signed with an audience recently.

        Such a call may be a replay by another coordinator, to which the site connects with the same key. A site that
        went back to an earlier release is accepted again once the headers of the later release have expired.

        Raises:
            HospitalCallRefused: With a status code after which a site tries again.
        """
        now = self._clock()
        if audience is SignatureAudience.THIS_COORDINATOR:
            self._last_call_times[key] = now
            return
        left_s = self._last_call_times.get(key, -math.inf) + MAX_SIGNATURE_AGE_S + MAX_CLOCK_DIFFERENCE_S - now
        if left_s > 0:
            reason = f"{site} has just called by a later release; an earlier one is taken in {left_s:.0f} s"
            raise HospitalCallRefused(grpc.StatusCode.UNAVAILABLE, reason)


class CallAuthenticator:
    """Makes gRPC handlers that authenticate the caller before they read the request.

    Args:
        authority: Hash of the public key of this coordinator's certificate authority: the audience of signatures.
        admitted: Cache of the registered sites' keys.
        refused_calls: Records refused calls of registered sites.
        unknown_callers: Counts refused calls of unknown callers.
        refuse_caller: Raises :class:`HospitalCallRefused` if a registered caller must not be answered.
    """

    def __init__(
        self,
        authority: str,
        admitted: RegisteredSiteKeys,
        refused_calls: RefusedCallLog,
        unknown_callers: UnknownCallerCounts,
        refuse_caller: Callable[[CallingSite], None],
    ) -> None:
        self._signatures = CallSignatureVerifier(authority)
        self.admitted = admitted
        self._refused_calls = refused_calls
        self._unknown_callers = unknown_callers
        self._refuse_caller = refuse_caller
        self.limit = ConcurrentCallLimiter()
        self._turns = TransferTurns()

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
                    if name in LARGE_TRANSFER_METHODS:
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
            except Exception as error:  # the edge of the process: the caller must not learn details of a failure
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
        audience = None if caller is None else self._signatures.find_signature_audience(key, when, signature)
        if caller is None or audience is None:
            raise HospitalCallRefused(grpc.StatusCode.UNAUTHENTICATED, "Invalid signature")
        try:
            age_s = (dt.datetime.now(dt.UTC) - dt.datetime.fromisoformat(when)).total_seconds()
        except (ValueError, TypeError, OverflowError):  # no time, or a time without a zone
            age_s = float("inf")
        if not -MAX_CLOCK_DIFFERENCE_S < age_s < MAX_SIGNATURE_AGE_S + MAX_CLOCK_DIFFERENCE_S:
            raise HospitalCallRefused(grpc.StatusCode.UNAUTHENTICATED, "Invalid timestamp")
        self._signatures.refuse_replay_without_audience(caller.name, key, audience)
        process = _find_call_header(metadata, PROCESS_HEADER)
        if len(process) > MAX_PROCESS_CHARACTERS:
            raise HospitalCallRefused(grpc.StatusCode.UNAUTHENTICATED, "Invalid process")
        return replace(
            caller,
            process=process,
            wait_s=parse_wait_header_s(_find_call_header(metadata, WAIT_HEADER)),
            stated=read_stated_release(metadata, audience),
        )

    def _record_and_abort_call(
        self, context: Any, caller: CallingSite | None, name: str, refused: HospitalCallRefused
    ) -> NoReturn:
        if caller is None:
            self._unknown_callers.count_refused_call(context.peer(), refused.reason)
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
    if len(key) > MAX_KEY_BYTES or len(signature) > MAX_SIGNATURE_BYTES or len(when) > MAX_TIME_CHARACTERS:
        raise HospitalCallRefused(grpc.StatusCode.UNAUTHENTICATED, "Invalid authentication metadata")
    return key, when, signature


def read_stated_release(metadata: Any, audience: SignatureAudience | None) -> StatedRelease:
    """Return the wire version and the release that a call states in its headers.

    Args:
        audience: Coordinator for which the call is signed; None if unknown. Then a call with the header counts as
            signed for this coordinator.
    """
    header = _find_call_header(metadata, RELEASE_HEADER)
    has_audience = bool(header) if audience is None else audience is SignatureAudience.THIS_COORDINATOR
    return parse_release_header(header, signed_for_coordinator=has_audience)


def _find_call_header(metadata: Any, header: str) -> str:
    """Return the first value of a header; empty if it is missing."""
    return str(next((value for name, value in metadata or () if name == header), ""))
