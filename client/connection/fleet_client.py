"""The site's client for Flower's Fleet API: gRPC over TLS, with every call signed by the site's key.

The training process itself speaks the protocol of Flower's SuperNode 1.39, for three measured reasons. A SuperNode
waits 3 s between messages. It ends without an error text when the coordinator refuses it. It would keep a second copy
of the model, in another process with another port.
"""

import hashlib
import logging
import re
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar, cast

import grpc
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Error, Message
from google.protobuf.message import DecodeError

from polyclinic.client.connection.answer_bounds import (
    BUNDLE_MAX_BYTES,
    ReceivedByteCount,
    compute_message_size_bound,
    make_channel_options,
)
from polyclinic.client.connection.exit_codes import ClientExitCode, ConnectionNotAccepted, CoordinatorUnreachable
from polyclinic.client.site.policy import SitePolicy
from polyclinic.client.site.statements import SiteNameMismatch, SiteRecordSigner
from polyclinic.common.security.call_signatures import (
    ANOTHER_PROCESS_MESSAGE,
    WAIT_HEADER,
    encode_public_key_pem,
    make_signed_headers,
)
from polyclinic.common.security.phrase import compute_certificate_key_hash
from polyclinic.common.security.signatures import SignatureFault, is_record_signed
from polyclinic.common.system.plain_text import make_printable_line, shorten_grpc_details
from polyclinic.common.system.timers import CALL_TIMEOUT_S, HEARTBEAT_INTERVAL_S, MAX_CLOCK_DIFFERENCE_S, TLS_TIMEOUT_S
from polyclinic.common.wire import fleet_protocol as fleet
from polyclinic.common.wire.flower_messages import make_message_of_envelope
from polyclinic.common.wire.message_objects import (
    MessageTooLarge,
    decode_message_objects,
    encode_message_objects,
    make_announcement,
)
from polyclinic.common.wire.versions import WIRE_FORMATS, WIRE_VERSION, is_spoken, make_release_header

ALLOWED_BUNDLE_FILES = {"pyproject.toml", ".info/CONTENT"}
# Two of Flower's error codes.
SITE_ERROR_CODE = 2
BUNDLE_REFUSED_ERROR_CODE = 7
PARALLEL_TRANSFERS = 2
"""Number of objects transferred at a time; on a slow line, each must end before its call times out."""
MIN_FETCH_PAUSE_S = 0.05
"""First pause before another try to fetch an object that the coordinator is still writing."""
MAX_FETCH_PAUSE_S = 1.0
"""Longest pause before another try to fetch an object."""
_CALLS = ("ActivateNode", "DeactivateNode", "SendNodeHeartbeat", "PullMessages", "PushMessages", "GetRun", "GetFab")
RESPONSES = {call: getattr(fleet, f"{call}Response") for call in (*_CALLS, "PushObject", "ConfirmMessageReceived")}
T = TypeVar("T")

_CONNECTION_ERRORS = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.ABORTED,
}
_ENDED_RUN_ERRORS = {grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.FAILED_PRECONDITION}
"""gRPC status codes with which the coordinator answers calls about a run that has ended."""
CONNECTION_ERROR_DESCRIPTIONS = {
    "connection refused": "Connection refused",
    "connection reset": "Connection reset by peer",
    "broken pipe": "the connection was closed",
    "socket closed": "the connection was closed",
    "goaway": "the connection was closed",
    "no route to host": "No route to host",
    "network is unreachable": "Network is unreachable",
    "dns resolution failed": "its name cannot be resolved",
    "timed out": "no answer in time",
    "timeout": "no answer in time",
    "deadline exceeded": "no answer in time",
}
"""Words in gRPC's error text -> description of a failed connection for a person."""

UNACCEPTABLE_ANSWER_DESCRIPTIONS = {
    "message larger than max": "its answer is larger than any answer to this call, and was not read",
    "metadata size exceeds": "the headers of its answer are too long, and were not read",
    "compression algorithm": "its answer is compressed, and was not read",
    "exception deserializing": "its answer cannot be decoded",
}
"""Words in gRPC's error text -> description of an answer that no release of Polyclinic gives."""

_GRPC_ERROR_PREFIX = re.compile(r"^failed to connect to all addresses; last error: (\w+: )?(ipv[46]:\S+: )?")


class RunAlreadyEnded(Exception):
    """Raised if the run of a message has ended."""


class UnacceptableAnswer(CoordinatorUnreachable):
    """Raised for an answer that is larger than the limit of its call, compressed, or not decodable."""


class RequestRefused(Exception):
    """Raised for a request that this site refuses because of its size, its app bundle, or its signature.

    Attributes:
        reason: Explanation for the coordinator and for the site's own log.
        message: The request, to which the error reply belongs; without content if the content was not read.
        ends: The exception with which ``flwr-client`` ends; None if it continues.
        rule: Name of the broken rule in the site's audit log.
    """

    def __init__(
        self, reason: str, message: Message, ends: ConnectionNotAccepted | None = None, rule: str = "signature"
    ) -> None:
        super().__init__(reason)
        self.reason = make_printable_line(reason)
        self.message = message
        self.ends = ends
        self.rule = rule


class MessageUnreadable(Exception):
    """Raised if all parts of a message arrived but cannot be decoded; the text is the reason."""


class ReplyRejected(Exception):
    """Raised if the coordinator rejects a reply; the text is the reason."""


class MessageContentGone(Exception):
    """Raised if a message expired or was withdrawn, so that the coordinator no longer has or needs its content.

    It is also raised if the received bytes announce no message.
    """


class FleetClient:
    """One connection of a site to the coordinator; a lost connection is replaced by a new object.

    Args:
        ca_certificate: Certificate of the coordinator's authority, PEM. The signed calls are valid for it only.
        statements: Signs replies and verifies signatures of requests; None for a client that receives no requests.
        process: Id of this process; the coordinator allows one process for each site.
        policy: The site's policy, which bounds the size of messages.

    Attributes:
        wire: The connection's wire version; the newest until :meth:`exchange_hello` agrees on another one.
    """

    def __init__(
        self,
        address: str,
        ca_certificate: bytes,
        key: ec.EllipticCurvePrivateKey,
        statements: SiteRecordSigner | None = None,
        process: str = "",
        policy: SitePolicy | None = None,
    ) -> None:
        self._statements = statements
        self._process = process
        self._largest_message = compute_message_size_bound(policy or SitePolicy())
        for library in ("flwr", "grpc"):  # errors are still raised as exceptions
            logging.getLogger(library).setLevel(logging.CRITICAL)

        credentials = grpc.ssl_channel_credentials(ca_certificate)
        options = [
            *make_channel_options(),
            ("grpc.max_send_message_length", -1),
            ("grpc.keepalive_time_ms", 60_000),
            ("grpc.keepalive_timeout_ms", 20_000),
            ("grpc.enable_retries", 0),
        ]
        self._raw = grpc.secure_channel(address, credentials, options=options)
        self._key = key
        self._authority = compute_certificate_key_hash(ca_certificate.decode())

        parsers = {call: response.FromString for call, response in RESPONSES.items()}
        parsers["PullObject"] = lambda data: fleet.extract_protobuf_field(
            data, fleet.PULL_CONTENT_FIELD
        )  # without a copy
        parsers[fleet.HELLO_METHOD] = fleet.HelloAnswer.model_validate_json
        services = {fleet.HELLO_METHOD: fleet.HELLO_SERVICE}
        self._calls = {
            call: self._raw.unary_unary(
                f"/{services.get(call, fleet.FLEET_SERVICE)}/{call}",
                request_serializer=lambda request: request if type(request) is bytes else request.SerializeToString(),
                response_deserializer=parse,
            )
            for call, parse in parsers.items()
        }

        self._public_key = encode_public_key_pem(key.public_key())
        self._bundles: dict[int, str] = {}
        self._small: Mapping[str, bytes] = {}  # small objects that came with the last message
        self.node_id = 0
        self.wire = WIRE_VERSION

    def __enter__(self) -> "FleetClient":
        return self

    def __exit__(self, *exception: object) -> None:
        self._raw.close()

    # ------------------------------------------------------------------ presence

    def exchange_hello(self) -> fleet.HelloAnswer | None:
        """Call ``Hello``, and use the wire version of its answer for later calls.

        If this release does not speak that wire version, later calls keep the present one, and the caller must refuse
        the coordinator.

        Returns:
            The coordinator's clock, its release, and its verdict on this key; None if its release is too old for the
            call.

        Raises:
            ConnectionNotAccepted: If the call is not accepted with this key or clock.
            CoordinatorUnreachable: If nobody answers.
            UnacceptableAnswer: For an answer that no release of Polyclinic gives.
        """
        with _translate_grpc_errors():
            try:
                hello = self._say_hello()
                if hello.wire != self.wire and is_spoken(hello.wire):
                    self.wire = hello.wire
                    hello = self._say_hello()  # signed as the coordinator expects it, to learn if it admits this key
                return hello
            except grpc.RpcError as error:
                if error.code() == grpc.StatusCode.UNIMPLEMENTED:
                    return None
                if error.code() in _ENDED_RUN_ERRORS:  # the call is about no run; as a rule a proxy has refused it
                    reason = f"{error.code().name.lower().replace('_', ' ')}: {shorten_grpc_details(error.details())}"
                    raise UnacceptableAnswer(reason) from None
                raise

    def _say_hello(self) -> fleet.HelloAnswer:
        return cast(fleet.HelloAnswer, self._make_signed_call(fleet.HELLO_METHOD, b"", timeout=TLS_TIMEOUT_S))

    def activate_node(self, node_id: int) -> int:
        """Register this site as connected; return the node number of its key in the coordinator's SuperLink.

        A site whose process was killed still counts as connected for a while and cannot register again. It then sends a
        heartbeat under its earlier node number instead.

        Args:
            node_id: Node number of an earlier connection; 0 for none.

        Raises:
            ConnectionNotAccepted: If the key is not admitted.
            CoordinatorUnreachable: If nobody answers.
        """
        request = fleet.ActivateNodeRequest(public_key=self._public_key, heartbeat_interval=HEARTBEAT_INTERVAL_S)
        try:
            with _translate_grpc_errors(admitted_only=True):
                self.node_id = self._make_signed_call("ActivateNode", request).node_id
        except ConnectionNotAccepted:
            if not node_id:
                raise
            self.node_id = node_id
            self.send_heartbeat()
        return self.node_id

    def send_heartbeat(self) -> None:
        """Send a heartbeat, so that the coordinator counts this site as connected."""
        with _translate_grpc_errors():
            request = fleet.SendNodeHeartbeatRequest(node=self._flower_node, heartbeat_interval=HEARTBEAT_INTERVAL_S)
            answer = self._make_signed_call("SendNodeHeartbeat", request, timeout=10)
        if not answer.success:
            raise ConnectionNotAccepted.make_key_refusal_error("the coordinator no longer knows it")

    def deactivate_node(self) -> None:
        """Tell the coordinator that this site disconnects; a missing answer is ignored."""
        try:
            request = fleet.DeactivateNodeRequest(node_id=self.node_id)
            self._make_signed_call("DeactivateNode", request, timeout=3)
        except grpc.RpcError:
            return

    # ------------------------------------------------------------------ messages

    def receive_message(self, wait_s: float = 0.0) -> bytes | None:
        """Return the next message without its content (see :meth:`fetch_message_content`); None if there is no message.

        A message that this site has received and not answered comes again at the next call.

        Args:
            wait_s: Time for which the coordinator may hold the call until there is a message.
        """
        request = fleet.PullMessagesRequest(node=self._flower_node)
        wait = ((WAIT_HEADER, f"{wait_s:g}"),)
        with _translate_grpc_errors():
            answer = self._make_signed_call("PullMessages", request, more_headers=wait)
        self._small = fleet.index_by_sha256(answer.small_contents)
        answer.ClearField(fleet.SMALL_CONTENTS)
        return cast(bytes, answer.SerializeToString()) if answer.messages_list else None

    def fetch_message_content(self, received: bytes) -> Message:
        """Fetch the content of a received message.

        Args:
            received: The message as :meth:`receive_message` returned it.

        Raises:
            RunAlreadyEnded: If the run of the message has ended.
            MessageContentGone: If the content is gone.
            MessageUnreadable: If the content is no message.
            RequestRefused: If the run's Flower App Bundle contains code, or the request is not signed for this site.
        """
        metadata, tree = _parse_metadata_and_object_tree(received)
        if tree is None:
            raise MessageUnreadable("it names no objects")
        run_id = metadata.run_id
        message_id = metadata.message_id
        try:
            message = self._fetch_and_join_objects(run_id, message_id, tree)
            if not message.has_content():  # everything that follows reads the content
                raise MessageUnreadable("it reports an error, and no request does")
            if run_id not in self._bundles:
                self._bundles[run_id] = self._find_run_bundle_fault(run_id)
        except MessageTooLarge as error:
            unread = make_message_of_envelope(metadata)
            raise RequestRefused(str(error), unread, rule=self._largest_message.rule) from None
        except UnacceptableAnswer as error:
            raise RequestRefused(str(error), make_message_of_envelope(metadata), rule="answer size") from None
        if self._bundles[run_id]:
            raise RequestRefused(self._bundles[run_id], message)
        try:
            if self._statements is not None:
                self._statements.verify_request(message.content, message_id)
        except SiteNameMismatch as fault:
            problem = f"the coordinator does not take this site: {fault}"
            raise RequestRefused(str(fault), message, ConnectionNotAccepted(ClientExitCode.NAME, problem, "")) from None
        except SignatureFault as fault:
            reason = f"the coordinator did not sign this request for this site: {fault}"
            raise RequestRefused(reason, message) from None
        return message

    def make_unread_message(self, received: bytes) -> Message:
        """Return a received message without its content, which was not fetched or could not be read.

        Raises:
            MessageContentGone: If the bytes announce no message.
        """
        metadata, _ = _parse_metadata_and_object_tree(received)
        return make_message_of_envelope(metadata)

    def _fetch_and_join_objects(self, run_id: int, message_id: str, tree: Any) -> Message:
        """Fetch the objects of a message and put them together, within the bound of a message's size.

        Raises:
            MessageTooLarge: If the objects, or the arrays in them, are larger.
            MessageContentGone: If the content is gone.
            MessageUnreadable: If the content is no message.
        """
        count = ReceivedByteCount(self._largest_message)
        names = list(dict.fromkeys(fleet.list_tree_object_ids(tree)))
        count.check_number_of_objects(len(names))
        contents = {name: memoryview(self._small[name]) for name in names if name in self._small}
        missing = [name for name in names if name not in contents]
        fetch = partial(self._fetch_message_object, run_id, time.monotonic() + CALL_TIMEOUT_S, count)
        with _translate_grpc_errors():
            try:
                pulled = _transfer_objects_in_parallel(fetch, [(name,) for name in missing])
                contents |= dict(zip(missing, pulled, strict=True))
                return decode_message_objects(message_id, contents, self._largest_message.size)
            except MessageTooLarge:
                raise
            except ValueError as error:
                raise MessageUnreadable(make_printable_line(str(error))) from None

    def _find_run_bundle_fault(self, run_id: int) -> str:
        """Fetch a run's Flower App Bundle; return the reason to refuse it, empty if it is allowed."""
        with _translate_grpc_errors():
            run = self._make_signed_call("GetRun", fleet.GetRunRequest(node=self._flower_node, run_id=run_id)).run
            request = fleet.GetFabRequest(node=self._flower_node, hash_str=run.fab_hash, run_id=run_id)
            content = self._make_signed_call("GetFab", request).fab.content
        return find_app_bundle_fault(content, run.fab_hash)

    def check_run_active(self, run_id: int) -> None:
        """Check that a run is still active.

        Raises:
            RunAlreadyEnded: If no process of the coordinator leads the run any more.
        """
        with _translate_grpc_errors():
            request = fleet.GetRunRequest(node=self._flower_node, run_id=run_id)
            self._make_signed_call("GetRun", request, timeout=10)

    def send_reply(self, received: bytes, reply: Message) -> None:
        """Sign and send a reply, then tell the coordinator that the answered message is done.

        The reply gets the creation time and the lifetime of the answered message, because the site's clock may differ.

        Args:
            received: The answered message as :meth:`receive_message` returned it.

        Raises:
            ReplyRejected: If the coordinator rejects the reply.
            RunAlreadyEnded: If the run has ended.
            MessageContentGone: If the coordinator no longer accepts all parts of the reply.
        """
        run_id = reply.metadata.run_id
        answered = fleet.PullMessagesResponse.FromString(received).messages_list[0].metadata
        reply.metadata.created_at = answered.created_at
        reply.metadata.ttl = answered.ttl
        # A reply that is sent again after a lost connection keeps its signature.
        if self._statements and reply.has_content() and not is_record_signed(reply.content):
            reply.content = self._statements.sign_reply(reply.content, answered.message_id)
        tree, contents = encode_message_objects(reply)
        small = fleet.choose_small_objects((name, len(content)) for name, content in contents.items())
        request = fleet.PushMessagesRequest(
            node=self._flower_node,
            messages_list=[make_announcement(reply, tree.object_id)],
            message_object_trees=[tree],
            small_contents=[contents[name] for name in small],
        )
        with _translate_grpc_errors():
            try:
                answer = self._make_signed_call("PushMessages", request)
            except grpc.RpcError as error:
                if error.code() in (grpc.StatusCode.ALREADY_EXISTS, grpc.StatusCode.FAILED_PRECONDITION):
                    raise ReplyRejected(shorten_grpc_details(error.details())) from None
                raise
            names = set(answer.objects_to_push)
            push = partial(self._send_message_object, run_id, answer.session_id)
            _transfer_objects_in_parallel(
                push, [(name, content) for name, content in contents.items() if name in names]
            )
            if self._statements and reply.has_content():
                self._statements.count_accepted_reply(reply.content, answered.message_id)
            self.confirm_receipt(received)

    def _fetch_message_object(self, run_id: int, until: float, count: ReceivedByteCount, name: str) -> memoryview:
        """Return the content of the message object with the id ``name``.

        Args:
            until: Time of :func:`time.monotonic` until which the object may become available.
            count: Counts the bytes of the object's message.

        Raises:
            MessageContentGone: If the object is gone, or not available in time.
            MessageTooLarge: If the message has become too large with this object.
        """
        request = fleet.PullObjectRequest(node=self._flower_node, run_id=run_id, object_id=name)
        pause_s = MIN_FETCH_PAUSE_S
        while True:
            rest, content = self._make_signed_call("PullObject", request)
            answer = fleet.PullObjectResponse.FromString(rest)
            count.add_object(len(rest) + len(content))  # the view of the content keeps the whole answer in memory
            if answer.object_available:
                return cast(memoryview, content)
            if not answer.object_found or time.monotonic() > until:
                raise MessageContentGone(f"object {name} could not be found")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_FETCH_PAUSE_S)

    def _send_message_object(self, run_id: int, session: str, name: str, content: bytes) -> None:
        request = fleet.PushObjectRequest(node=self._flower_node, run_id=run_id, object_id=name, session_id=session)
        data = fleet.append_protobuf_field(request.SerializeToString(), fleet.PUSH_CONTENT_FIELD, content)
        if not self._make_signed_call("PushObject", data).stored:
            raise MessageContentGone(f"the coordinator does not need object {name} any more")

    def confirm_receipt(self, received: bytes) -> None:
        """Tell the coordinator that this site no longer needs the content of the message ``received``."""
        metadata, _ = _parse_metadata_and_object_tree(received)
        request = fleet.ConfirmMessageReceivedRequest(
            node=self._flower_node, run_id=metadata.run_id, message_object_id=metadata.message_id
        )
        with suppress(RunAlreadyEnded), _translate_grpc_errors():  # an ended run needs no confirmation
            self._make_signed_call("ConfirmMessageReceived", request)

    @property
    def _flower_node(self) -> fleet.Node:
        return fleet.Node(node_id=self.node_id)

    def _make_signed_call(
        self, call: str, request: Any, timeout: float = CALL_TIMEOUT_S, more_headers: tuple[tuple[str, str], ...] = ()
    ) -> Any:
        authority = self._authority if WIRE_FORMATS[self.wire].signs_calls_for_coordinator else ""
        signed = make_signed_headers(self._key, self._public_key, authority, self._process)
        metadata = (*signed, make_release_header(WIRE_VERSION), *more_headers)
        return self._calls[call](request, timeout=timeout, metadata=metadata)


def _transfer_objects_in_parallel(transfer: Callable[..., T], arguments: Sequence[tuple[Any, ...]]) -> list[T]:
    """Call ``transfer`` with each tuple of ``arguments``, at most :data:`PARALLEL_TRANSFERS` at a time.

    After a failure, no further call is started.
    """
    pool = ThreadPoolExecutor(PARALLEL_TRANSFERS)
    try:
        return list(pool.map(lambda each: transfer(*each), arguments))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def find_app_bundle_fault(content: bytes, fab_hash: str) -> str:
    """Return the reason to refuse a Flower App Bundle, such as code in it, without unpacking it; empty if allowed.

    Args:
        fab_hash: SHA-256 of the bundle that the run names.
    """
    if hashlib.sha256(content).hexdigest() != fab_hash:
        return "the app bundle is not the one that the run names"
    if len(content) > BUNDLE_MAX_BYTES:
        return f"the app bundle has {len(content)} bytes; one that carries no code has a few hundred"
    try:
        names = set(zipfile.ZipFile(BytesIO(content)).namelist())
    except (zipfile.BadZipFile, EOFError, OSError, ValueError, NotImplementedError) as error:
        return f"the app bundle cannot be read: {error}"
    if extra := sorted(names - ALLOWED_BUNDLE_FILES):
        return f"the app bundle carries {', '.join(extra[:5])}; this site runs only what its own image holds"
    return ""


def read_message_id(received: bytes) -> str:
    """Return the id of a received message; empty if the bytes announce no message."""
    try:
        return str(_parse_metadata_and_object_tree(received)[0].message_id)
    except MessageContentGone:
        return ""


def make_error_reply(message: Message, code: int, reason: str) -> Message:
    """Return a reply that reports an error."""
    return Message(Error(code, reason), reply_to=message)


def is_message_expired(received: bytes, now: float) -> bool:
    """Return True if a received message has surely expired, even if the site's and the coordinator's clocks differ.

    Args:
        now: Unix time at this site.

    Raises:
        MessageContentGone: If the bytes are not a message.
    """
    metadata, _ = _parse_metadata_and_object_tree(received)
    return bool(metadata.created_at + metadata.ttl + MAX_CLOCK_DIFFERENCE_S <= now)


def _parse_metadata_and_object_tree(received: bytes) -> tuple[Any, Any]:
    """Return a message's metadata, and its object tree or None.

    Raises:
        MessageContentGone: If the bytes announce no message.
    """
    try:
        answer = fleet.PullMessagesResponse.FromString(received)
        trees = answer.message_object_trees
        return answer.messages_list[0].metadata, trees[0] if trees else None
    except (DecodeError, IndexError):
        raise MessageContentGone("what the coordinator sent is no message") from None


@contextmanager
def _translate_grpc_errors(admitted_only: bool = False) -> Iterator[None]:
    """Context manager that raises an exception of this module in place of gRPC's.

    Args:
        admitted_only: True if gRPC's status FAILED_PRECONDITION means that the key is not admitted; otherwise it means
            that the run has ended.
    """
    try:
        yield
    except DecodeError:
        raise CoordinatorUnreachable("an answer of the coordinator cannot be decoded") from None
    except grpc.RpcError as error:
        code = error.code()
        details = shorten_grpc_details(error.details())
        for words, description in UNACCEPTABLE_ANSWER_DESCRIPTIONS.items():
            if code in _CONNECTION_ERRORS and words in details.lower():
                raise UnacceptableAnswer(description) from None
        if code in _CONNECTION_ERRORS:
            # Only the cause is kept, without gRPC's words and the address around it.
            causes = [
                description for words, description in CONNECTION_ERROR_DESCRIPTIONS.items() if words in details.lower()
            ]
            cause = causes[0] if causes else _GRPC_ERROR_PREFIX.sub("", details)
            raise CoordinatorUnreachable(cause or code.name.lower().replace("_", " ")) from None
        if code == grpc.StatusCode.UNAUTHENTICATED and "timestamp" in details:
            raise ConnectionNotAccepted.make_clock_difference_error() from None
        if code == grpc.StatusCode.UNAUTHENTICATED and ANOTHER_PROCESS_MESSAGE in details:
            raise ConnectionNotAccepted.make_newer_process_error(details) from None
        if code == grpc.StatusCode.UNAUTHENTICATED or (admitted_only and code == grpc.StatusCode.FAILED_PRECONDITION):
            reason = "in use by another process: a second one here, or elsewhere with a copy of this key"
            raise ConnectionNotAccepted.make_key_refusal_error(
                reason if "in use" in details else "not admitted, or revoked"
            ) from None
        if code in _ENDED_RUN_ERRORS:
            raise RunAlreadyEnded(details) from None
        raise CoordinatorUnreachable(f"{code.name.lower()}: {details}") from None


def read_stored_node_id(path: Path) -> int:
    """Return the node number that an earlier connection stored; 0 if there is none."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0
