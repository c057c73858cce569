"""The site's end of Flower's Fleet API: gRPC over TLS, every call signed with the site's key.

It speaks the protocol of Flower's SuperNode 1.39 from within the process that trains, for three reasons, each measured
or read: SuperNode sleeps 3 s between messages; it ends the process on a refusal instead of saying why; and it would
hold the model a second time, in a process of its own, with a second port.
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

from client.connection.exit_codes import ExitCode, Refused, Unreachable
from client.site.statements import OtherName, Statements
from common.security.call_signatures import ANOTHER_PROCESS, WAIT, key_bytes, signed_headers
from common.security.signatures import SignatureFault, is_signed
from common.system.plain_text import grpc_words
from common.system.timers import CALL_TIMEOUT_S, CLOCKS_DIFFER_S, HEARTBEAT_INTERVAL_S, TLS_TIMEOUT_S
from common.wire.fleet_protocol import (
    CONTENT_OF_PULL,
    CONTENT_OF_PUSH,
    HELLO_METHOD,
    HELLO_SERVICE,
    SMALL_CONTENTS,
    ActivateNodeRequest,
    ActivateNodeResponse,
    ConfirmMessageReceivedRequest,
    ConfirmMessageReceivedResponse,
    DeactivateNodeRequest,
    DeactivateNodeResponse,
    GetFabRequest,
    GetFabResponse,
    GetRunRequest,
    GetRunResponse,
    Hello,
    Node,
    PullMessagesRequest,
    PullMessagesResponse,
    PullObjectRequest,
    PullObjectResponse,
    PushMessagesRequest,
    PushMessagesResponse,
    PushObjectRequest,
    PushObjectResponse,
    SendNodeHeartbeatRequest,
    SendNodeHeartbeatResponse,
    append_field,
    by_sha256,
    choose_small_objects,
    extract_field,
    object_ids,
)
from common.wire.fleet_protocol import SERVICE as FLEET
from common.wire.flower_objects import envelope, join_message, set_identity, split_message

BUNDLE_MAY_HOLD = {"pyproject.toml", ".info/CONTENT"}
BUNDLE_MAX_BYTES = 64 * 1024
SITE_RAISED, BUNDLE_REFUSED = 2, 7  # Flower's error codes
MOST_TIMES, MORE_BYTES = 4, 2**30
"""A request may take so many times the memory of what has come, and so much more: parts of an array may be equal."""
TRANSFERS = 2
"""At once, either way: on a slow line each must end before the call's time is over."""
FIRST_LOOK_S, LONGEST_LOOK_S = 0.05, 1.0
"""Between two tries to fetch an object that the coordinator is still writing."""
_ANSWERS = {
    "ActivateNode": ActivateNodeResponse,
    "DeactivateNode": DeactivateNodeResponse,
    "SendNodeHeartbeat": SendNodeHeartbeatResponse,
    "PullMessages": PullMessagesResponse,
    "PushMessages": PushMessagesResponse,
    "GetRun": GetRunResponse,
    "GetFab": GetFabResponse,
    "ConfirmMessageReceived": ConfirmMessageReceivedResponse,
}
T = TypeVar("T")

_CODES_OF_A_BAD_LINE = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.ABORTED,
}


class RunOver(Exception):
    """The run that a message belongs to has ended."""


class RequestRefused(Exception):
    """A request that this site does not even look at.

    Attributes:
        reason: For the coordinator and for the site's own log.
        message: For the reply.
        ends: Why the site stops; None where it goes on.
    """

    def __init__(self, reason: str, message: Message, ends: Refused | None = None) -> None:
        super().__init__(reason)
        self.reason, self.message, self.ends = reason, message, ends


class NotTaken(Exception):
    """The coordinator did not take a reply; says why."""


class NotThere(Exception):
    """A message's content is gone from the coordinator: it expired, or was taken back."""


class Link:
    """One connection. Made anew after every loss; holds no state that matters but the node's number.

    Args:
        statements: Signs what is sent and checks what comes; None for a connection that takes no part in runs.
        process: Identifies the process that connects; the coordinator lets one of a site take part.
    """

    def __init__(
        self,
        address: str,
        ca_certificate: bytes,
        key: ec.EllipticCurvePrivateKey,
        statements: Statements | None = None,
        process: str = "",
    ) -> None:
        self._statements, self._process = statements, process
        for library in ("flwr", "grpc"):  # errors still come as exceptions
            logging.getLogger(library).setLevel(logging.CRITICAL)
        credentials = grpc.ssl_channel_credentials(ca_certificate)
        options = [
            ("grpc.max_send_message_length", -1),
            ("grpc.max_receive_message_length", -1),
            ("grpc.keepalive_time_ms", 60_000),
            ("grpc.keepalive_timeout_ms", 20_000),
            ("grpc.enable_retries", 0),
        ]
        self._raw = grpc.secure_channel(address, credentials, options=options)
        self._key = key
        self._fleet = _calls(self._raw)
        self._push_object = self._raw.unary_unary(
            f"/{FLEET}/PushObject", request_serializer=bytes, response_deserializer=PushObjectResponse.FromString
        )
        self._pull_object = self._raw.unary_unary(
            f"/{FLEET}/PullObject",
            request_serializer=lambda request: request.SerializeToString(),
            response_deserializer=lambda data: extract_field(data, CONTENT_OF_PULL),
        )
        self._hello = self._raw.unary_unary(
            f"/{HELLO_SERVICE}/{HELLO_METHOD}",
            request_serializer=bytes,
            response_deserializer=Hello.model_validate_json,
        )
        self._public_key = key_bytes(key.public_key())
        self._bundles: dict[int, str] = {}
        self._came_along: Mapping[str, bytes] = {}  # objects that came in the call that announced the last message
        self.node_id = 0

    def __enter__(self) -> "Link":
        return self

    def __exit__(self, *exception: object) -> None:
        self._raw.close()

    # ------------------------------------------------------------------ presence

    def hello(self) -> Hello | None:
        """What the coordinator says of itself, without signing on; None of one that cannot be asked.

        Raises:
            Unreachable: If nobody answers.
        """
        with _translated():
            try:
                return cast(Hello, self._call(self._hello, b"", timeout=TLS_TIMEOUT_S))
            except grpc.RpcError as error:
                if error.code() == grpc.StatusCode.UNIMPLEMENTED:
                    return None
                raise

    def activate(self, known_node_id: int) -> int:
        """Sign on; return the number that the coordinator's SuperLink has for this key.

        A site whose process was killed is still online there for a while, and cannot sign on again; it takes its place
        up by a sign of life, for which it must know its number.

        Args:
            known_node_id: From an earlier connection; 0 for none.

        Raises:
            Refused: If the key is not admitted.
            Unreachable: If nobody answers.
        """
        request = ActivateNodeRequest(public_key=self._public_key, heartbeat_interval=HEARTBEAT_INTERVAL_S)
        try:
            with _translated(admitted_only=True):
                self.node_id = self._call(self._fleet["ActivateNode"], request).node_id
        except Refused:
            if not known_node_id:
                raise
            self.node_id = known_node_id
            self.heartbeat()
        return self.node_id

    def heartbeat(self) -> None:
        """Give a sign of life."""
        with _translated():
            request = SendNodeHeartbeatRequest(node=self._node, heartbeat_interval=HEARTBEAT_INTERVAL_S)
            answer = self._call(self._fleet["SendNodeHeartbeat"], request, timeout=10)
        if not answer.success:
            raise Refused.key("the coordinator no longer knows it")

    def sign_off(self) -> None:
        """Tell the coordinator that this site leaves now; a missing answer does not matter."""
        try:
            self._call(self._fleet["DeactivateNode"], DeactivateNodeRequest(node_id=self.node_id), timeout=3)
        except grpc.RpcError:
            return

    # ------------------------------------------------------------------ messages

    def receive(self, wait_s: float = 0.0) -> bytes | None:
        """The next message for this site, without its content, in the form that :meth:`message` takes; or None.

        Only a process that has no message asks: one that was handed out before and is not answered comes again.

        Args:
            wait_s: How long the coordinator may hold the call until there is a message.
        """
        request, wait = PullMessagesRequest(node=self._node), ((WAIT, f"{wait_s:g}"),)
        with _translated():
            answer = self._call(self._fleet["PullMessages"], request, more_headers=wait)
        self._came_along = by_sha256(answer.small_contents)
        answer.ClearField(SMALL_CONTENTS)
        return cast(bytes, answer.SerializeToString()) if answer.messages_list else None

    def message(self, received: bytes) -> Message:
        """Fetch what belongs to a received message.

        Raises:
            RunOver: If its run has ended.
            NotThere: If its content is gone, or cannot be read.
            RequestRefused: If its run's app bundle carries code, or the coordinator did not sign it for this site.
        """
        metadata, tree = _first(received)
        run_id, message_id = metadata.run_id, metadata.message_id
        with _translated():
            try:
                contents = self._fetched(run_id, object_ids(tree))
                most = MOST_TIMES * sum(len(content) for content in contents.values()) + MORE_BYTES
                message = join_message(message_id, contents, most)
            except ValueError as error:
                raise NotThere(str(error)) from None
        set_identity(self.node_id, run_id)
        if fault := self._bundle_fault(run_id):
            raise RequestRefused(fault, message)
        self._refuse_unsigned(message)
        return message

    def _refuse_unsigned(self, message: Message) -> None:
        """Raise :class:`RequestRefused` unless the coordinator sent this message to this site."""
        if self._statements is None:
            return
        try:
            self._statements.accept(message.content, message.metadata.message_id)
        except OtherName as fault:
            problem = f"the coordinator does not take this site: {fault}"
            raise RequestRefused(str(fault), message, Refused(ExitCode.NAME, problem, "")) from None
        except SignatureFault as fault:
            reason = f"the coordinator did not sign this request for this site: {fault}"
            raise RequestRefused(reason, message) from None

    def refuse_if_over(self, run_id: int) -> None:
        """Ask whether anybody still leads a run.

        Raises:
            RunOver: If nobody does.
        """
        with _translated():
            self._call(self._fleet["GetRun"], GetRunRequest(node=self._node, run_id=run_id), timeout=10)

    def reply(self, received: bytes, reply: Message, seconds: float) -> None:
        """Send a reply, then let go of the message that it answers.

        Its time runs out when that of the message does, by the coordinator's clock: the site's may go otherwise.

        Args:
            seconds: Time that the site worked on it.

        Raises:
            NotTaken: If the coordinator refuses it.
            RunOver: If nobody waits for it any more.
            NotThere: If it cannot be sent whole.
        """
        run_id = reply.metadata.run_id
        asked = PullMessagesResponse.FromString(received).messages_list[0].metadata
        reply.metadata.created_at, reply.metadata.ttl = asked.created_at, asked.ttl
        # A reply that is sent again after a lost connection keeps its signature: it is the same reply.
        if self._statements and reply.has_content() and not is_signed(reply.content):
            reply.content = self._statements.signed(reply.content, asked.message_id)
        tree, contents = split_message(reply)
        request = PushMessagesRequest(
            node=self._node,
            messages_list=[envelope(reply)],
            message_object_trees=[tree],
            small_contents=[
                contents[name] for name in choose_small_objects((name, len(one)) for name, one in contents.items())
            ],
        )
        with _translated():
            answer = self._announced(request)
            wanted = set(answer.objects_to_push)
            push = partial(self._push, run_id, answer.session_id)
            _at_once(push, [(name, content) for name, content in contents.items() if name in wanted])
            if self._statements and reply.has_content():
                self._statements.was_taken(reply.content, asked.message_id)
            self.let_go(received)

    def _announced(self, request: Any) -> Any:
        """Announce a reply.

        Raises:
            NotTaken: If it is refused.
        """
        try:
            return self._call(self._fleet["PushMessages"], request)
        except grpc.RpcError as error:
            if error.code() in (grpc.StatusCode.ALREADY_EXISTS, grpc.StatusCode.FAILED_PRECONDITION):
                raise NotTaken(grpc_words(error.details())) from None
            raise

    def _fetched(self, run_id: int, names: Sequence[str]) -> Mapping[str, memoryview]:
        """The contents of these objects.

        Raises:
            NotThere: If one is gone, or is not written in time.
        """
        here = {name: memoryview(self._came_along[name]) for name in names if name in self._came_along}
        wanted = [name for name in dict.fromkeys(names) if name not in here]
        until = time.monotonic() + CALL_TIMEOUT_S
        contents = _at_once(lambda name: self._pulled(run_id, name, until), [(name,) for name in wanted])
        return here | dict(zip(wanted, contents, strict=True))

    def _pulled(self, run_id: int, name: str, until: float) -> memoryview:
        request = PullObjectRequest(node=self._node, run_id=run_id, object_id=name)
        pause_s = FIRST_LOOK_S
        while True:
            rest, content = self._call(self._pull_object, request)
            answer = PullObjectResponse.FromString(rest)
            if answer.object_available:
                return cast(memoryview, content)
            if not answer.object_found or time.monotonic() > until:
                raise NotThere(f"object {name} could not be found")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_LOOK_S)

    def _push(self, run_id: int, session: str, name: str, content: bytes) -> None:
        request = PushObjectRequest(node=self._node, run_id=run_id, object_id=name, session_id=session)
        data = append_field(request.SerializeToString(), CONTENT_OF_PUSH, content)
        if not self._call(self._push_object, data).stored:
            raise NotThere(f"the coordinator does not need object {name} any more")

    def let_go(self, received: bytes) -> None:
        """Tell the coordinator that a message's content is not needed any more."""
        metadata, _ = _first(received)
        request = ConfirmMessageReceivedRequest(
            node=self._node, run_id=metadata.run_id, message_object_id=metadata.message_id
        )
        with suppress(RunOver), _translated():  # with its run it is gone by itself
            self._call(self._fleet["ConfirmMessageReceived"], request)

    def _bundle_fault(self, run_id: int) -> str:
        """Why this run's app bundle is refused, or an empty string: a hospital runs what its own image holds."""
        if run_id not in self._bundles:
            with _translated():
                run = self._call(self._fleet["GetRun"], GetRunRequest(node=self._node, run_id=run_id)).run
                request = GetFabRequest(node=self._node, hash_str=run.fab_hash, run_id=run_id)
                content = self._call(self._fleet["GetFab"], request).fab.content
            self._bundles[run_id] = bundle_fault(content, run.fab_hash)
        return self._bundles[run_id]

    @property
    def _node(self) -> Node:
        return Node(node_id=self.node_id)

    def _call(
        self,
        method: Callable[..., Any],
        request: Any,
        timeout: float = CALL_TIMEOUT_S,
        more_headers: tuple[tuple[str, str], ...] = (),
    ) -> Any:
        said = (*signed_headers(self._key, self._public_key, self._process), *more_headers)
        return method(request, timeout=timeout, metadata=said)


def _calls(channel: grpc.Channel) -> Mapping[str, Any]:
    """The calls of the Fleet API that bring no object, by name."""
    return {
        name: channel.unary_unary(
            f"/{FLEET}/{name}",
            request_serializer=lambda request: request.SerializeToString(),
            response_deserializer=answer.FromString,
        )
        for name, answer in _ANSWERS.items()
    }


def _at_once(transfer: Callable[..., T], each: Sequence[tuple[Any, ...]]) -> list[T]:
    """Make :data:`TRANSFERS` of these transfers at a time; none is begun after one has failed.

    Raises:
        Exception: What the first one raised that failed.
    """
    pool = ThreadPoolExecutor(TRANSFERS)
    try:
        return list(pool.map(lambda arguments: transfer(*arguments), each))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def bundle_fault(content: bytes, fab_hash: str) -> str:
    """Say why an app bundle is not a mere name, or return an empty string. Nothing in it is ever run or unpacked."""
    if hashlib.sha256(content).hexdigest() != fab_hash:
        return "the app bundle is not the one that the run names"
    if len(content) > BUNDLE_MAX_BYTES:
        return f"the app bundle has {len(content)} bytes; one that carries no code has a few hundred"
    try:
        names = set(zipfile.ZipFile(BytesIO(content)).namelist())
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        return f"the app bundle cannot be read: {error}"
    if extra := sorted(names - BUNDLE_MAY_HOLD):
        return f"the app bundle carries {', '.join(extra[:5])}; this site runs only what its own image holds"
    return ""


def error_reply(message: Message, code: int, reason: str) -> Message:
    """A reply that says what went wrong."""
    return Message(Error(code, reason), reply_to=message)


def expired(received: bytes, now: float) -> bool:
    """Whether nobody waits for a reply any more, as far as two clocks can tell.

    Raises:
        NotThere: If that is no message.
    """
    metadata, _ = _first(received)
    return bool(metadata.created_at + metadata.ttl + CLOCKS_DIFFER_S <= now)


def _first(received: bytes) -> tuple[Any, Any]:
    """Metadata of the received message, and the tree of its objects.

    Raises:
        NotThere: If either is lacking.
    """
    try:
        answer = PullMessagesResponse.FromString(received)
        return answer.messages_list[0].metadata, answer.message_object_trees[0]
    except (DecodeError, IndexError):
        raise NotThere("what the coordinator sent is no message") from None


@contextmanager
def _translated(admitted_only: bool = False) -> Iterator[None]:
    """gRPC's errors as the few that matter to a site."""
    try:
        yield
    except DecodeError:
        raise Unreachable("an answer of the coordinator cannot be decoded") from None
    except grpc.RpcError as error:
        code, details = error.code(), grpc_words(error.details())
        if code in _CODES_OF_A_BAD_LINE:
            raise Unreachable(_in_words(code, details)) from None
        if code == grpc.StatusCode.UNAUTHENTICATED and "timestamp" in details:
            raise Refused.clock() from None
        if code == grpc.StatusCode.UNAUTHENTICATED and ANOTHER_PROCESS in details:
            raise Refused.superseded(details) from None
        if code == grpc.StatusCode.UNAUTHENTICATED or (admitted_only and code == grpc.StatusCode.FAILED_PRECONDITION):
            used = "in use by another process: a second one here, or elsewhere with a copy of this key"
            raise Refused.key(used if "in use" in details else "not admitted, or revoked") from None
        if code in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.FAILED_PRECONDITION):
            raise RunOver(details) from None
        raise Unreachable(f"{code.name.lower()}: {details}") from None


_WORDS_OF_A_BAD_LINE = {
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
"""Words of gRPC's errors -> what a person is told: of a refusal as a plain connection is, which is tried first."""

_WRAPPING = re.compile(r"^failed to connect to all addresses; last error: (\w+: )?(ipv[46]:\S+: )?")


def _in_words(code: grpc.StatusCode, details: str) -> str:
    """An error of the line without gRPC's wrapping, which repeats the address; words that are not known stay."""
    known = [said for words, said in _WORDS_OF_A_BAD_LINE.items() if words in details.lower()]
    return known[0] if known else _WRAPPING.sub("", details) or code.name.lower().replace("_", " ")


def read_node_id(path: Path) -> int:
    """The number of an earlier connection, 0 where there was none."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0
