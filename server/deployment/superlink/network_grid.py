"""Flower's ``Grid`` of a run over the network: it sends requests to hospitals and receives replies by the SuperLink.

The process of ``flwr-server run`` uses it. A run survives a restart of the SuperLink, because registrations, messages
and the run itself are in the SuperLink's database.
"""

import itertools
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

from flwr.app import Error, Message, RecordDict
from flwr.serverapp import Grid

from polyclinic.common.security.signatures import SignatureFault
from polyclinic.common.system.timers import RUN_HEARTBEAT_INTERVAL_S, UPLOAD_STALL_TIMEOUT_S
from polyclinic.common.wire.fleet_protocol import COORDINATOR_NODE_ID, ROLL_CALL_TYPE, list_tree_object_ids
from polyclinic.common.wire.flower_messages import make_message, make_request, read_metadata, replace_metadata
from polyclinic.common.wire.message_objects import (
    MessageTooLarge,
    count_array_bytes,
    decode_message_objects,
    encode_message_objects,
    forget_array_chunks,
    make_announcement,
)
from polyclinic.common.wire.versions import OLDEST_WIRE_VERSION, write_in_version
from polyclinic.server.coordinator.admission import read_unrevoked_sites
from polyclinic.server.coordinator.authority import ensure_valid_signing_key
from polyclinic.server.coordinator.folder import CoordinatorFolder
from polyclinic.server.coordinator.state import read_site_sign_offs
from polyclinic.server.deployment.superlink.control_client import (
    GIVEN_UP_MESSAGE,
    RUN_RETRY_TIMEOUT_S,
    ReplyStatus,
    RunEndedBySuperLink,
    SuperLinkControlClient,
    SuperLinkUnreachable,
    convert_openssh_key_to_pem,
)
from polyclinic.server.deployment.superlink.messages import NoReplyReason
from polyclinic.server.deployment.superlink.object_store import (
    NO_REPLY_BOUND,
    SPARE_BYTES,
    ObjectFileStore,
    ReplyArrayFiles,
    ReplySizeBound,
    read_masked_update_size,
)
from polyclinic.server.deployment.superlink.process import CLOCK_FILE, OBJECTS_FOLDER, open_shared_steady_clock
from polyclinic.server.deployment.superlink.request_signing import RequestRecipient, RequestSigner
from polyclinic.server.runs.live_status import describe_site_sign_off
from polyclinic.strategies.engine.events import ReplyArrival
from polyclinic.strategies.engine.exchange import (
    COORDINATOR_CODES,
    MESSAGE_GONE,
    NODE_UNAVAILABLE,
    REFUSED_REPLY,
    REVOKED_ERROR_CODE,
    REVOKED_ERROR_MESSAGE,
    SITE_FAILED,
)

RUN_LOST_SIGNAL = signal.SIGUSR1
"""Signal by which the heartbeat thread interrupts the main thread when the SuperLink has ended the run."""
_log = logging.getLogger(__name__)
FILE_TIMEOUT_S = 0.1
"""Time for which a call waits for the files of announced replies."""
FILE_POLL_INTERVAL_S = 0.005
MAX_REPLIES_PER_CALL = 4
"""Replies returned by one call; more replies stay in files until these are aggregated."""
MAX_BYTES_PER_CALL = 2**24
"""Bytes of the replies returned by one call; one reply is returned even if it is larger."""
INTERRUPTED_RUN_REASON = "the process that led the run ended before it had noted this reply; the site was asked again"
# Reason -> error code and message of the error reply.
_NO_REPLY_ERRORS = {
    NoReplyReason.MESSAGE_GONE: (MESSAGE_GONE[0], "the time of this message is over"),
    NoReplyReason.SITE_GONE: (NODE_UNAVAILABLE, "the site is not connected"),
}


@contextmanager
def open_network_grid(
    coordinator: CoordinatorFolder, members: Collection[str] = frozenset()
) -> Iterator["NetworkGrid"]:
    """Begin a run on the SuperLink, yield the run's Grid, and end the run.

    Args:
        members: Names of the sites that the run may ask; empty for all admitted sites.

    Raises:
        SuperLinkUnreachable: If the SuperLink does not answer.
        RunEndedBySuperLink: If the SuperLink has ended the run because heartbeats were missing.
    """
    logging.getLogger("flwr").setLevel(logging.CRITICAL)  # errors still come as exceptions

    def read_request_recipients() -> dict[int, RequestRecipient]:
        """Return node id -> site for the unrevoked members; names and keys come from the coordinator's files."""
        unrevoked = read_unrevoked_sites(coordinator, members).values()
        admitted = {convert_openssh_key_to_pem(site.public_key): site for site in unrevoked}
        sites = ((node.node_id, admitted.get(node.public_key)) for node in control.list_registered_sites())
        return {node: RequestRecipient(site.site, site.public_key) for node, site in sites if site is not None}

    def raise_run_ended(number: int, frame: object) -> NoReturn:
        signal.signal(RUN_LOST_SIGNAL, signal.SIG_IGN)
        raise RunEndedBySuperLink(GIVEN_UP_MESSAGE)

    def send_run_heartbeats() -> None:
        """Send heartbeats over a separate connection; interrupt the main thread if the SuperLink ended the run."""
        with closing(SuperLinkControlClient(coordinator)) as heartbeat_control:
            while not stop.wait(RUN_HEARTBEAT_INTERVAL_S):
                with suppress(SuperLinkUnreachable, OSError):
                    if not heartbeat_control.send_run_heartbeat(run) and not stop.is_set():
                        os.kill(os.getpid(), RUN_LOST_SIGNAL)
                        return

    with closing(SuperLinkControlClient(coordinator, retry_s=RUN_RETRY_TIMEOUT_S)) as control:
        nodes = None
        if members:
            nodes = [node.node_id for node in control.list_registered_sites() if node.name in members]
        run, earlier_replies = control.begin_run(nodes)
        stop = threading.Event()
        signal.signal(RUN_LOST_SIGNAL, raise_run_ended)
        threading.Thread(target=send_run_heartbeats, name="heartbeat", daemon=True).start()
        try:
            grid = NetworkGrid(
                control,
                run,
                files=ObjectFileStore(coordinator.state_path / OBJECTS_FOLDER),
                signer=RequestSigner(*ensure_valid_signing_key(coordinator), read_request_recipients),
                earlier_replies=earlier_replies,
                clock=open_shared_steady_clock(coordinator.state_path / CLOCK_FILE),
                signed_off=partial(read_site_sign_offs, coordinator.state_path),
                asks_all=not members,
            )
            yield grid
            grid.close()
        finally:
            stop.set()
            control.stop_retrying()
            try:
                control.end_run(run)
            except (SuperLinkUnreachable, RunEndedBySuperLink):
                logging.getLogger(__name__).info("the SuperLink did not receive that run %s is over", run)


@dataclass(frozen=True)
class _AwaitedRequest:
    """A request without its content, with the size limit of its reply."""

    message: Message
    bound: ReplySizeBound


@dataclass
class _IncompleteReply:
    """A reply that a site has announced, whose objects are still arriving.

    Attributes:
        object_ids: Ids of all objects of the reply.
        since: Monotonic time at which the last object arrived.
        size: Bytes that have arrived.
        fault: Reason for rejecting the reply; empty if there is none so far.
        missing: Ids of objects that have not arrived. It also holds an empty id until the reply is examined for the
            first time, so that a new reply does not look complete.
    """

    status: ReplyStatus
    object_ids: list[str]
    since: float = field(default_factory=time.monotonic)
    size: int = 0
    fault: str = ""
    missing: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.missing = [*self.object_ids, ""]


class NetworkGrid(Grid):
    """Flower's Grid by way of the SuperLink: contents are passed as files, calls go over the control socket.

    Args:
        run: The run's number.
        earlier_replies: Envelope and object tree of each reply that an earlier run received but did not record.
        clock: Returns the time on the steady clock that is shared with the SuperLink.
        signed_off: Returns site -> time of its sign-off.
        asks_all: True if all connected sites may be asked; else only the members of the run, which the signer lists.
    """

    def __init__(
        self,
        control: SuperLinkControlClient,
        run: int,
        *,
        files: ObjectFileStore,
        signer: RequestSigner,
        earlier_replies: Sequence[tuple[Any, Any]] = (),
        clock: Callable[[], float],
        signed_off: Callable[[], Mapping[str, str]] = dict,
        asks_all: bool = True,
    ) -> None:
        self._control = control
        self._run = run
        self._clock = clock
        self._signed_off = signed_off
        self._asks_all = asks_all
        self._files = files
        self._signer = signer
        self._earlier_replies = earlier_replies
        self._arrays = ReplyArrayFiles(files.folder)
        self._requests: dict[str, _AwaitedRequest] = {}  # by message id of the request
        self._pending: dict[str, _IncompleteReply] = {}  # by message id of the request
        # Ids of returned replies. Their files are kept until the run has recorded the replies in its audit log: at the
        # next pull, or for answers to a roll call at the next push.
        self._fetched: list[str] = []
        self._roll_calls: list[str] = []

    def list_registered_sites(self) -> Mapping[int, str]:
        """Return node id -> name of all sites that may take part, connected or not."""
        return {node: site.name for node, site in self._signer.reload_recipients().items()}

    def list_site_processes(self) -> Mapping[int, str]:
        """Return node id -> identifier of the site's process that connected last, empty if none has connected."""
        return {node.node_id: node.process for node in self._control.list_registered_sites()}

    def list_wire_versions(self) -> Mapping[int, int]:
        """Return node id -> wire version of messages to the site.

        A site that has not stated its version gets the oldest version, which each site that may connect understands.
        """
        nodes = self._control.list_registered_sites()
        return {
            node.node_id: OLDEST_WIRE_VERSION if node.stated is None else node.stated.agreed_version for node in nodes
        }

    def set_run(self, run: Any) -> None:
        raise NotImplementedError("this Grid has no Flower run")

    @property
    def run(self) -> Any:
        raise NotImplementedError("this Grid has no Flower run")

    def create_message(self, *arguments: Any, **options: Any) -> Message:
        raise NotImplementedError("use Message(...)")

    def get_node_ids(self) -> Iterable[int]:
        """Return the node ids of the connected sites that the run may ask."""
        online = [node.node_id for node in self._control.list_registered_sites() if node.is_online]
        if self._asks_all:
            return online
        members = self.list_registered_sites()
        return [node for node in online if node in members]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        raise NotImplementedError("use push_messages and pull_messages")

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Write each message in its site's wire version, sign it, write its objects to files, and announce it.

        Returns:
            The messages' ids, in their order; an empty id for a message to a site that is no longer registered.
        """
        self._release_messages(self._roll_calls)
        messages = list(messages)
        versions = self.list_wire_versions()
        announced = list[tuple[Any, Any]]()  # envelope and tree of object ids of each request
        contents = dict[str, bytes]()  # object id -> content
        for message in messages:
            message.metadata.created_at = self._clock()
            version = versions.get(message.metadata.dst_node_id, OLDEST_WIRE_VERSION)
            message.content = write_in_version(message.content, version)
            self._signer.sign_request(message)
            # Outside Flower's runtime, the constructor of a message cannot set run and sender.
            request = replace_metadata(message, run_id=self._run, src_node_id=COORDINATOR_NODE_ID)
            tree, parts = encode_message_objects(request)
            request = replace_metadata(request, message_id=tree.object_id)
            for name, content in parts.items():
                if name not in contents:
                    self._files.write_object(name, content)
            contents |= parts
            announced.append((make_announcement(request, tree.object_id), tree))
            bound = ReplySizeBound.compute_bound_for_request(
                [len(content) for content in parts.values()],
                count_array_bytes(message.content),
                read_masked_update_size(message.content),
            )
            # The arrays stay on disk. Memory holds the request without its content until the reply arrives.
            self._requests[tree.object_id] = _AwaitedRequest(make_message(RecordDict(), read_metadata(request)), bound)
            self._signer.remember_sent_request(request)
        accepted, missing = self._control.announce_requests_to_superlink(self._run, announced)
        while missing:  # an earlier message with the same objects was released, which removed their files
            for name in missing:
                self._files.write_object(name, contents[name])
            accepted, missing = self._control.announce_requests_to_superlink(self._run, announced)
        for message in messages:
            forget_array_chunks(message.content)  # they are in files
        ids = [str(tree.object_id) for _, tree in announced]
        return [name if name in accepted else "" for name in ids]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the replies to these messages that have arrived completely.

        For a reply that will never come, an error message is returned. If all replies are announced but none is
        complete, wait a moment for their files.
        """
        self._release_messages(self._fetched)
        names = list(message_ids)
        errors = list[Message]()
        unannounced = [name for name in names if name not in self._pending]
        if unannounced:
            for status in self._control.fetch_replies_or_failures(self._run, unannounced):
                if status.reason is None:
                    self._pending[status.request] = _IncompleteReply(status, list_tree_object_ids(status.tree))
                    continue
                code, reason = _NO_REPLY_ERRORS[status.reason]
                request = self._requests.get(status.request)
                if status.reason is NoReplyReason.SITE_GONE and request is not None:
                    site = self.list_registered_sites().get(request.message.metadata.dst_node_id)
                    if site is None:
                        code, reason = REVOKED_ERROR_CODE, REVOKED_ERROR_MESSAGE
                    elif when := self._signed_off().get(site):
                        reason = describe_site_sign_off(when)
                errors.append(self._make_error_reply_message(status.request, code, reason))
        complete = self._find_finished_uploads(names)
        until = time.monotonic() + FILE_TIMEOUT_S
        while not complete and not unannounced and time.monotonic() < until:
            time.sleep(FILE_POLL_INTERVAL_S)
            complete = self._find_finished_uploads(names)
        replies = list[_IncompleteReply]()
        size = 0
        for name, pending in itertools.islice(complete.items(), MAX_REPLIES_PER_CALL):
            size += pending.size
            if replies and size > MAX_BYTES_PER_CALL:
                break
            replies.append(self._pending.pop(name))
        return [*errors, *map(self._assemble_reply_message, replies)]

    def receive_unrecorded_replies(self, run: str) -> Iterator[ReplyArrival]:
        """Yield replies to this run that arrived while the run was interrupted, so that they can be recorded.

        A reply's files may be deleted as soon as the caller asks for the next reply. Replies that are incomplete, not
        signed by their site or sent to another run are skipped, and their files may be deleted, too.

        Args:
            run: The run's identifier, which stays the same when the run is resumed.
        """
        for envelope, tree in self._earlier_replies:
            name = envelope.metadata.message_id
            node = envelope.metadata.src_node_id
            objects = {
                part: content
                for part in list_tree_object_ids(tree)
                if (content := self._files.map_object_into_memory(part)) is not None
            }
            arrival = self._read_unrecorded_reply(name, node, objects, run)
            if arrival is not None:
                yield arrival
            self._control.allow_message_file_deletion([name])
        self._earlier_replies = ()

    def _read_unrecorded_reply(
        self, name: str, node: int, objects: Mapping[str, memoryview], run: str
    ) -> ReplyArrival | None:
        """Return a reply to this run; None if it is incomplete, of another run, or not signed by the node's site."""
        size = sum(map(len, objects.values())) + SPARE_BYTES
        try:
            message = decode_message_objects(name, objects, size)
            if not message.has_content():
                return None  # an error, such as that a plan waits for approval
            statement = self._signer.verify_earlier_run_reply(node, message.content)
        except SignatureFault:
            return None
        except Exception as error:  # a site may send any bytes; the run goes on without this reply
            _log.warning("an earlier reply cannot be read: %r", error)
            return None
        if statement.run != run:
            return None
        return ReplyArrival(statement.record, statement.round, statement.site, message.content, INTERRUPTED_RUN_REASON)

    def close(self) -> None:
        """Let the SuperLink delete the files of all returned replies, because the finished run has recorded them."""
        self._release_messages(self._fetched)
        self._release_messages(self._roll_calls)

    def _release_messages(self, names: list[str]) -> None:
        if names:
            self._control.allow_message_file_deletion(names)
            names.clear()

    def _find_finished_uploads(self, names: Iterable[str]) -> dict[str, _IncompleteReply]:
        """Record which objects have arrived; return the replies that are complete, too large or have stalled.

        Args:
            names: Ids of requests.

        Returns:
            Id of a request -> its reply.
        """
        complete = dict[str, _IncompleteReply]()
        for name in names:
            if (pending := self._pending.get(name)) is None:
                continue
            missing = [part for part in pending.missing if part and not self._files.has_object(part)]
            if len(missing) < len(pending.missing):
                pending.size += sum(self._files.get_object_size(part) for part in set(pending.missing) - set(missing))
                pending.missing = missing
                pending.since = time.monotonic()
            if request := self._requests.get(name):
                pending.fault = request.bound.find_reply_size_fault(len(pending.object_ids), pending.size)
            if pending.fault or not missing or time.monotonic() - pending.since > UPLOAD_STALL_TIMEOUT_S:
                complete[name] = pending
        return complete

    def _assemble_reply_message(self, pending: _IncompleteReply) -> Message:
        """Return a reply with its content from files; an error message if it is incomplete or rejected."""
        name = pending.status.request
        metadata = pending.status.envelope.metadata
        if pending.missing and not pending.fault:
            reason = f"its reply was cut off: nothing came for {UPLOAD_STALL_TIMEOUT_S:.0f} s"
            return self._make_error_reply_message(name, NODE_UNAVAILABLE, reason)
        fault = pending.fault
        message = None
        request = self._requests.get(name)
        bound = request.bound if request else NO_REPLY_BOUND
        if not fault:
            try:
                contents = {part: self._files.map_object_into_memory(part) or b"" for part in pending.object_ids}
                join = self._arrays.join_array
                message = decode_message_objects(metadata.message_id, contents, bound.assembled, join)
            except MessageTooLarge:
                fault = bound.reply_too_large_reason
            except ValueError as error:
                fault = f"its reply cannot be read: {error}"
        is_roll_call = request is not None and request.message.metadata.message_type == ROLL_CALL_TYPE
        (self._roll_calls if is_roll_call else self._fetched).append(metadata.message_id)
        # An error message holds no record and is not signed: the run uses only its text.
        if message is not None and message.has_content():
            try:
                fault = self._signer.find_reply_signature_fault(name, message)
            except Exception as error:  # a site may send any bytes; no reply may end the run
                fault = f"its reply cannot be read: {type(error).__name__}"
        if fault or message is None:
            return self._make_error_reply_message(name, REFUSED_REPLY, fault)
        # Error codes that only the coordinator sets are replaced. With the code "not connected", for instance, the site
        # would get its request again at once, until the deadline.
        if message.has_error() and message.error.code in COORDINATOR_CODES:
            return self._make_error_reply_message(name, SITE_FAILED, message.error.reason or "")
        self._requests.pop(name, None)
        # The sender in the envelope signed the call. The sender in the reply's content may be false.
        return replace_metadata(message, src_node_id=metadata.src_node_id)

    def _make_error_reply_message(self, message_id: str, code: int, reason: str) -> Message:
        """Return an error as the reply to the request with this message id."""
        request = self._requests.pop(message_id, None)
        if request is not None:
            message = request.message
        else:  # the id is not of a request of this run
            unknown_request = make_request(RecordDict(), 0, "train", group_id="", ttl=1.0)
            message = replace_metadata(unknown_request, message_id=message_id)
        return Message(Error(code, reason), reply_to=message)
