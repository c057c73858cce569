"""Flower's ``Grid`` of a run over the network: requests to hospitals and their replies, by way of the SuperLink.

It is used in the process of ``flwr-server run``. A run survives a restart of the SuperLink, because registrations,
messages and the run itself are in the SuperLink's database.
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
    LINK_PATIENCE_S,
    ReplyOrNoReplyReason,
    RunEndedBySuperLink,
    SuperLinkControlClient,
    SuperLinkUnreachable,
    convert_openssh_key_to_pem,
)
from polyclinic.server.deployment.superlink.messages import NoReplyReason
from polyclinic.server.deployment.superlink.object_store import (
    NO_REPLY,
    SPARE_BYTES,
    ObjectFileStore,
    ReplyArrayFiles,
    ReplySizeBound,
    read_masked_update_size,
)
from polyclinic.server.deployment.superlink.process import CLOCK, OBJECTS, open_shared_steady_clock
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

LOST_SIGNAL = signal.SIGUSR1
"""Signal by which the heartbeat thread interrupts the thread that leads."""
_log = logging.getLogger(__name__)
FILE_TIMEOUT_S, FILE_POLL_INTERVAL_S = 0.1, 0.005
MAX_REPLIES_PER_CALL, MAX_BYTES_PER_CALL = 4, 2**24
"""Replies returned by one call, and bytes of all but the first: the others stay in files until these are aggregated."""
CAME_WHILE_AWAY = "the process that led the run ended before it had noted this reply; the site was asked again"
_REASONS = {
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
        signal.signal(LOST_SIGNAL, signal.SIG_IGN)
        raise RunEndedBySuperLink(GIVEN_UP_MESSAGE)

    def send_run_heartbeats() -> None:
        """Send heartbeats over a connection of its own; interrupt the main thread if the SuperLink ended the run."""
        with closing(SuperLinkControlClient(coordinator)) as own_control:
            while not stop.wait(RUN_HEARTBEAT_INTERVAL_S):
                with suppress(SuperLinkUnreachable, OSError):
                    if not own_control.send_run_heartbeat(run) and not stop.is_set():
                        os.kill(os.getpid(), LOST_SIGNAL)
                        return

    with closing(SuperLinkControlClient(coordinator, patience_s=LINK_PATIENCE_S)) as control:
        nodes = None
        if members:
            nodes = [node.node_id for node in control.list_registered_sites() if node.name in members]
        run, earlier_replies = control.begin_run(nodes)
        stop = threading.Event()
        signal.signal(LOST_SIGNAL, raise_run_ended)
        threading.Thread(target=send_run_heartbeats, name="heartbeat", daemon=True).start()
        try:
            grid = NetworkGrid(
                control,
                run,
                files=ObjectFileStore(coordinator.state_path / OBJECTS),
                signer=RequestSigner(*ensure_valid_signing_key(coordinator), read_request_recipients),
                earlier_replies=earlier_replies,
                clock=open_shared_steady_clock(coordinator.state_path / CLOCK),
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
        names: Ids of all objects of the reply.
        since: Time at which the last object arrived.
        size: Bytes that have arrived.
        fault: Reason for rejecting the reply; empty if there is none so far.
        missing: Ids of objects that have not arrived. It also holds an empty id until the reply is examined for the
            first time, so that a new reply does not look complete.
    """

    status: ReplyOrNoReplyReason
    names: list[str]
    since: float = field(default_factory=time.monotonic)
    size: int = 0
    fault: str = ""
    missing: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.missing = [*self.names, ""]


class NetworkGrid(Grid):
    """Flower's Grid by way of the SuperLink: contents are passed as files, calls go over the control socket.

    Args:
        run: The run's number.
        earlier_replies: Envelope and object tree of each reply that an earlier run received but did not record.
        clock: Returns the time on the steady clock that is shared with the SuperLink.
        signed_off: Returns site -> time of its sign-off.
        asks_all: Whether all connected sites may be asked; else only those whose names the signer knows.
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
        self._control, self._run, self._clock, self._signed_off = control, run, clock, signed_off
        self._asks_all = asks_all
        self._files, self._signer, self._earlier_replies = files, signer, earlier_replies
        self._arrays = ReplyArrayFiles(files.folder)
        self._requests: dict[str, _AwaitedRequest] = {}  # by the request's name, as are the next ones
        self._pending: dict[str, _IncompleteReply] = {}
        self._fetched: list[str] = []  # replies that were returned, and that may not be in the audit yet
        self._roll_calls: list[str] = []  # the same of a roll call: they are in the audit once the roll call is over

    def list_registered_sites(self) -> Mapping[int, str]:
        """Return node id -> name of all sites that may take part, connected or not."""
        return {node: site.name for node, site in self._signer.reload_recipients().items()}

    def list_site_processes(self) -> Mapping[int, str]:
        """Return node id -> identifier of the site's process that connected last, empty if none has connected."""
        return {node.node_id: node.process for node in self._control.list_registered_sites()}

    def list_wire_versions(self) -> Mapping[int, int]:
        """Return node id -> wire version to speak with the site.

        With a site that has not stated its own, the oldest version is spoken, which each site that may connect
        understands.
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
        announced, contents, versions = list[tuple[Any, Any]](), dict[str, bytes](), self.list_wire_versions()
        for message in messages:
            message.metadata.created_at = self._clock()
            version = versions.get(message.metadata.dst_node_id, OLDEST_WIRE_VERSION)
            message.content = write_in_version(message.content, version)
            self._signer.sign_request(message)
            # Flower's constructor knows neither run nor sender outside its own runtime.
            request = replace_metadata(message, run_id=self._run, src_node_id=COORDINATOR_NODE_ID)
            tree, parts = encode_message_objects(request)
            request = replace_metadata(request, message_id=tree.object_id)
            for name, content in parts.items():
                if name not in contents:
                    self._files.write_object(name, content)
            contents |= parts
            announced.append((make_announcement(request, tree.object_id), tree))
            sizes, assembled = [len(content) for content in parts.values()], count_array_bytes(message.content)
            bound = ReplySizeBound.compute_bound_for_request(sizes, assembled, read_masked_update_size(message.content))
            # The arrays stay on disk: what waits for the reply is the request without its content.
            self._requests[tree.object_id] = _AwaitedRequest(make_message(RecordDict(), read_metadata(request)), bound)
            self._signer.remember_sent_request(request)
        accepted, missing = self._control.announce_requests_to_superlink(self._run, announced)
        while missing:  # an earlier message has released them meanwhile
            for name in missing:
                self._files.write_object(name, contents[name])
            accepted, missing = self._control.announce_requests_to_superlink(self._run, announced)
        for message in messages:
            forget_array_chunks(message.content)  # the files have them
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
        if unannounced := [name for name in names if name not in self._pending]:
            for status in self._control.fetch_replies_or_failures(self._run, unannounced):
                if status.reason is None:
                    self._pending[status.request] = _IncompleteReply(status, list_tree_object_ids(status.tree))
                    continue
                code, reason = _REASONS[status.reason]
                request = self._requests.get(status.request)
                if status.reason is NoReplyReason.SITE_GONE and request is not None:
                    site = self.list_registered_sites().get(request.message.metadata.dst_node_id)
                    if site is None:
                        code, reason = REVOKED_ERROR_CODE, REVOKED_ERROR_MESSAGE
                    elif when := self._signed_off().get(site):
                        reason = describe_site_sign_off(when)
                errors.append(self._make_error_reply_message(status.request, code, reason))
        complete, until = self._find_finished_uploads(names), time.monotonic() + FILE_TIMEOUT_S
        while not complete and not unannounced and time.monotonic() < until:
            time.sleep(FILE_POLL_INTERVAL_S)
            complete = self._find_finished_uploads(names)
        replies, size = dict[str, _IncompleteReply](), 0
        for name, pending in itertools.islice(complete.items(), MAX_REPLIES_PER_CALL):
            size += pending.size
            if replies and size > MAX_BYTES_PER_CALL:
                break
            replies[name] = self._pending.pop(name)
        return [*errors, *(self._assemble_reply_message(pending) for pending in replies.values())]

    def receive_unrecorded_replies(self, run: str) -> Iterator[ReplyArrival]:
        """Yield replies to this run that arrived while the run was interrupted, so that they can be recorded.

        A reply's files may be deleted as soon as the caller asks for the next reply. Replies that are incomplete, not
        signed by their site or sent to another run are skipped, and their files may be deleted, too.

        Args:
            run: The run's identifier, which stays the same when the run is resumed.
        """
        for envelope, tree in self._earlier_replies:
            name, node = envelope.metadata.message_id, envelope.metadata.src_node_id
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
        """Return a reply to this run; None if it is cut off, of another run, or not signed by the site of that node."""
        size = sum(map(len, objects.values())) + SPARE_BYTES
        try:
            message = decode_message_objects(name, objects, size)
            if not message.has_content():
                return None  # an error, such as that a plan waits for approval
            statement = self._signer.verify_earlier_run_reply(node, message.content)
        except SignatureFault:
            return None
        except Exception as error:  # as a site has written it; the run goes on without it
            _log.warning("an earlier reply cannot be read: %r", error)
            return None
        if statement.run != run:
            return None
        return ReplyArrival(statement.record, statement.round, statement.site, message.content, CAME_WHILE_AWAY)

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
                pending.missing, pending.since = missing, time.monotonic()
            if request := self._requests.get(name):
                pending.fault = request.bound.find_reply_size_fault(len(pending.names), pending.size)
            if pending.fault or not missing or time.monotonic() - pending.since > UPLOAD_STALL_TIMEOUT_S:
                complete[name] = pending
        return complete

    def _assemble_reply_message(self, pending: _IncompleteReply) -> Message:
        name, metadata = pending.status.request, pending.status.envelope.metadata
        if pending.missing and not pending.fault:
            reason = f"its reply was cut off: nothing came for {UPLOAD_STALL_TIMEOUT_S:.0f} s"
            return self._make_error_reply_message(name, NODE_UNAVAILABLE, reason)
        fault, message, request = pending.fault, None, self._requests.get(name)
        bound = request.bound if request else NO_REPLY
        if not fault:
            try:
                contents = {part: self._files.map_object_into_memory(part) or b"" for part in pending.names}
                join = self._arrays.join_array
                message = decode_message_objects(metadata.message_id, contents, bound.assembled, join)
            except MessageTooLarge:
                fault = bound.reply_too_large_reason
            except ValueError as error:
                fault = f"its reply cannot be read: {error}"
        is_roll_call = request is not None and request.message.metadata.message_type == ROLL_CALL_TYPE
        (self._roll_calls if is_roll_call else self._fetched).append(metadata.message_id)
        # An error holds no record and is not signed: it counts for nothing but words.
        if message is not None and message.has_content():
            try:
                fault = self._signer.find_reply_signature_fault(name, message)
            except Exception as error:  # as a site has written it: no reply ends a run
                fault = f"its reply cannot be read: {type(error).__name__}"
        if fault or message is None:
            return self._make_error_reply_message(name, REFUSED_REPLY, fault)
        # A site that is connected and says that it is not would get its request again at once, until the deadline.
        if message.has_error() and message.error.code in COORDINATOR_CODES:
            return self._make_error_reply_message(name, SITE_FAILED, message.error.reason or "")
        self._requests.pop(name, None)
        # The envelope's sender signed the call; what the reply itself says of its sender may be any site.
        return replace_metadata(message, src_node_id=metadata.src_node_id)

    def _make_error_reply_message(self, name: str, code: int, reason: str) -> Message:
        if (request := self._requests.pop(name, None)) is not None:
            message = request.message
        else:  # no request of this run
            stranger = make_request(RecordDict(), 0, "train", group_id="", ttl=1.0)
            message = replace_metadata(stranger, message_id=name)
        return Message(Error(code, reason), reply_to=message)
