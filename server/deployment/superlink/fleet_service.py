"""Flower's Fleet API for hospitals: the handling of each call, on our own storage.

The caller is identified only by the key that signed the call, whereas Flower's own servicer trusts the body of the
request. A site may activate itself, answer each message that was handed to it once, and access the objects of its own
messages.
"""

import datetime as dt
import hashlib
import io
import threading
import zipfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from polyclinic.common import __version__
from polyclinic.common.security.call_signatures import ANOTHER_PROCESS_MESSAGE
from polyclinic.common.wire.fleet_protocol import (
    COORDINATOR_NODE_ID,
    MAX_SMALL_OBJECTS_TOTAL_BYTES,
    ActivateNodeResponse,
    ConfirmMessageReceivedResponse,
    DeactivateNodeResponse,
    GetFabResponse,
    GetRunResponse,
    PullMessagesResponse,
    PullObjectResponse,
    PushMessagesResponse,
    PushObjectResponse,
    Result,
    SendNodeHeartbeatResponse,
    index_by_sha256,
    list_tree_object_ids,
)
from polyclinic.common.wire.versions import describe_spoken_versions
from polyclinic.server.coordinator.state import record_site_sign_off, remove_site_sign_off
from polyclinic.server.deployment.superlink.authentication import CallingSite, HospitalCallRefused, RegisteredSiteKeys
from polyclinic.server.deployment.superlink.messages import (
    ReplyAcceptance,
    StoredMessage,
    SuperLinkStorage,
    parse_message_envelope,
)
from polyclinic.server.deployment.superlink.object_store import ParsedObjectPush, PullObjectResponseCache, is_object_id

MAX_WAITING_CALLS = 500
"""Calls that may wait for a message at a time, half of all threads; more calls get an empty response at once."""
MIN_HEARTBEAT_INTERVAL_S = 10
MAX_HEARTBEAT_INTERVAL_S = 120
"""Flower allows up to half an hour between heartbeats, which would show a lost site as connected for an hour."""
MAX_OBJECTS_PER_REPLY = 10_000
"""A model of 150 MB has ten objects. The run has a far lower limit for each reply."""
MAX_TREE_ENTRY_BYTES = 200
"""Bytes of one object's entry in a tree of object ids."""
MAX_REASON_CHARACTERS = 500
"""Characters of an error's reason that are stored in the database."""
MAX_ENVELOPE_BYTES = 16 * 1024
"""Bytes of a reply's envelope (its metadata)."""
MAX_EARLIER_PROCESSES = 64
"""Earlier processes of one site that are remembered, so that their calls can be refused."""

APP_BUNDLE_CONFIG = """[project]
name = "polyclinic"
version = "1"
description = "Names the app that every site has installed; carries no code."
license = "Apache-2.0"
dependencies = ["flwr"]
[tool.flwr.app]
publisher = "polyclinic"
[tool.flwr.app.components]
serverapp = "installed:on_the_coordinator"
clientapp = "installed:at_the_site"
[tool.flwr.app.config]
"""


def make_flower_app_bundle(content: str) -> bytes:
    """Return a Flower app bundle, a zip file with ``pyproject.toml`` alone; equal texts give equal bytes.

    Flower delivers a run's code in its bundle. Our bundle holds no code, and a site rejects a bundle with code.

    Args:
        content: Text of ``pyproject.toml``.
    """
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as bundle:
        bundle.writestr(zipfile.ZipInfo("pyproject.toml"), content)  # a ZipInfo has a fixed time
    return archive.getvalue()


APP_BUNDLE = make_flower_app_bundle(APP_BUNDLE_CONFIG)
APP_BUNDLE_SHA256 = hashlib.sha256(APP_BUNDLE).hexdigest()


@dataclass
class _CurrentAndEarlierProcesses:
    """The processes of one site.

    Attributes:
        current: Id of the process that signed on last.
        since: Time of its sign-on (ISO 8601, UTC).
        earlier: Ids of earlier processes, oldest first; a dict because it keeps their order.
    """

    current: str
    since: str
    earlier: dict[str, None] = field(default_factory=dict)


class LatestProcessAdmission:
    """Admits one process of each site: the one that signed on last. Safe to use from several threads.

    Two processes on copies of a site's folder would count the privacy budget separately. The later process is
    preferred, because a site may restart before its killed process is noticed. The state is kept in memory only.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sites: dict[int, _CurrentAndEarlierProcesses] = {}

    def register_latest_process(self, caller: CallingSite) -> None:
        """Make the caller's process the current one of its site."""
        now = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
        with self._lock:
            site = self._sites.setdefault(caller.node_id, _CurrentAndEarlierProcesses(caller.process, now))
            if caller.process == site.current:
                return
            site.earlier[site.current] = None
            site.current = caller.process
            site.since = now
            if len(site.earlier) > MAX_EARLIER_PROCESSES:
                del site.earlier[next(iter(site.earlier))]

    def is_latest_process(self, caller: CallingSite) -> bool:
        """Return whether the caller's process is the current one of its site."""
        with self._lock:
            site = self._sites.get(caller.node_id)
            return site is not None and site.current == caller.process

    def refuse_earlier_process(self, caller: CallingSite) -> None:
        """Raise :class:`HospitalCallRefused` if a later process of the caller's site has signed on."""
        with self._lock:
            site = self._sites.get(caller.node_id)
            if site is None or caller.process not in site.earlier:
                return
            reason = f"{ANOTHER_PROCESS_MESSAGE} {site.since}"
        # A process that was killed does not call: this one is alive, and the coordinator should know of it.
        raise HospitalCallRefused(grpc.StatusCode.UNAUTHENTICATED, reason, noted=True)


class FleetService:
    """The methods of the Fleet API that a site calls.

    Args:
        folder: The coordinator's folder ``state``, where sign-offs are recorded; None to record none.
    """

    def __init__(self, storage: SuperLinkStorage, admitted: RegisteredSiteKeys, folder: Path | None = None) -> None:
        self._folder = folder
        self.processes = LatestProcessAdmission()
        self._sites = storage.sites
        self._runs = storage.runs
        self._messages = storage.messages
        self._admitted = admitted
        self._pulls = PullObjectResponseCache(storage.files)
        self._waiting = threading.Semaphore(MAX_WAITING_CALLS)

    # ------------------------------------------------------------------ presence

    def activate_site(self, caller: CallingSite, request: Any) -> Any:
        """Mark the calling site as connected."""
        if request.public_key != caller.key:
            other = self._admitted.find_caller_by_key(request.public_key)
            reason = "the public key in the request did not sign the call"
            raise _make_forged_call_refusal(reason, other.name if other else "")
        _refuse_wrong_heartbeat_interval(request.heartbeat_interval)
        _refuse_release_out_of_reach(caller)
        if not self._sites.mark_site_connected(caller.node_id, request.heartbeat_interval):
            raise HospitalCallRefused(grpc.StatusCode.FAILED_PRECONDITION, "this key is in use by another process")
        self._register_latest_process(caller)
        if self._folder is not None:
            remove_site_sign_off(self._folder, caller.name)
        return ActivateNodeResponse(node_id=caller.node_id)

    def _register_latest_process(self, caller: CallingSite) -> None:
        """Make the caller's process the current one of its site; record its process and release in the registry."""
        self.processes.register_latest_process(caller)
        self._sites.record_site_process(caller.node_id, caller.process)
        self._sites.record_site_release(caller.node_id, caller.stated)

    def sign_off_site(self, caller: CallingSite, request: Any) -> Any:
        """Mark the calling site as signed off."""
        self._refuse_foreign_node_id(caller, request.node_id)
        # Before the registry changes, because a run that sees the change reads the sign-off as its reason.
        if self._folder is not None:
            record_site_sign_off(self._folder, caller.name)
        if not self._sites.mark_site_signed_off(caller.node_id):
            raise HospitalCallRefused(grpc.StatusCode.FAILED_PRECONDITION, "this site is not connected")
        return DeactivateNodeResponse()

    def record_heartbeat(self, caller: CallingSite, request: Any) -> Any:
        """Record a heartbeat; the calling site counts as connected until its next heartbeat is overdue.

        Raises:
            HospitalCallRefused: If node id, interval or release are not valid, or this process has signed off.
        """
        self._refuse_foreign_node_id(caller, request.node.node_id)
        _refuse_wrong_heartbeat_interval(request.heartbeat_interval)
        _refuse_release_out_of_reach(caller)
        # Over a slow line, a heartbeat may come after the site has signed off.
        if self._sites.has_site_signed_off(caller.node_id) and self.processes.is_latest_process(caller):
            raise HospitalCallRefused(grpc.StatusCode.FAILED_PRECONDITION, "this process has signed off")
        if registered := self._sites.record_site_heartbeat(caller.node_id, request.heartbeat_interval):
            # A process that was started after a kill signs on by its heartbeat.
            self._register_latest_process(caller)
        return SendNodeHeartbeatResponse(success=registered)

    def refuse_registration(self, caller: CallingSite, request: Any) -> Any:
        """Refuse registration, because only the coordinator's operator admits sites."""
        reason = "sites are registered by flwr-server admit, not by a call"
        raise HospitalCallRefused(grpc.StatusCode.PERMISSION_DENIED, reason, noted=True)

    # ------------------------------------------------------------------ messages

    def pull_messages(self, caller: CallingSite, request: Any) -> Any:
        """Hand the calling site its next message; wait for one as long as the caller allows."""
        self._refuse_foreign_node_id(caller, request.node.node_id)
        node = caller.node_id
        # A program that states how long it waits reports by this call that it holds no request.
        again = caller.wait_s is not None
        number = self._messages.arrivals.count_arrived_messages(node)
        message = self._messages.hand_out_next_request(node, again=again)
        if message is None and caller.wait_s and self._waiting.acquire(blocking=False):
            try:
                self._messages.arrivals.wait_for_message(node, number, caller.wait_s)
            finally:
                self._waiting.release()
            # Meanwhile another process may have signed on, or the key may have been revoked.
            self.processes.refuse_earlier_process(caller)
            if self._admitted.find_caller_by_key(caller.key) is None:
                raise HospitalCallRefused(grpc.StatusCode.UNAUTHENTICATED, "Invalid signature")
            message = self._messages.hand_out_next_request(node, again=again)
        if message is None:
            return PullMessagesResponse()
        proto, tree = parse_message_envelope(message.envelope, message.tree)
        small = self._messages.read_small_message_objects(tree)
        return PullMessagesResponse(messages_list=[proto], message_object_trees=[tree], small_contents=small)

    def push_messages(self, caller: CallingSite, request: Any) -> Any:
        """Accept the calling site's reply to a message that was handed to it; accept only one reply per message."""
        self._refuse_foreign_node_id(caller, request.node.node_id)
        proto, tree = self._extract_permitted_reply(caller, request)
        metadata = proto.metadata
        self._refuse_inactive_run(metadata.run_id)
        outcome, missing = self._messages.accept_reply(StoredMessage.from_reply(proto, tree))
        if outcome is ReplyAcceptance.ANOTHER_WAS_ACCEPTED:
            raise self._make_second_reply_refusal(caller, metadata)
        if outcome is ReplyAcceptance.NOBODY_WAITS:
            reason = "nobody waits for this reply any more: its time is over, or its run"
            raise HospitalCallRefused(grpc.StatusCode.FAILED_PRECONDITION, reason, run=metadata.run_id)
        small = index_by_sha256(request.small_contents)
        store = partial(self._store_reply_object, caller, metadata.run_id)
        to_push = [name for name in missing if name not in small or not store(name, small[name])]
        results = [Result(key=metadata.message_id, value=0)]
        return PushMessagesResponse(results=results, objects_to_push=to_push, session_id=metadata.message_id)

    def confirm_message_received(self, caller: CallingSite, request: Any) -> Any:
        """Record that the calling site has received a message, so that the message's files may be deleted."""
        self._refuse_foreign_node_id(caller, request.node.node_id)
        name = request.message_object_id
        owner = self._messages.find_node_of_message(name)
        if not self._messages.was_request_handed_out(caller.node_id, name):
            if owner is None and not self._messages.is_object_needed(name):
                return ConfirmMessageReceivedResponse()  # its files were deleted before, or its run is over
            reason = "this message was not handed to this site"
            raise _make_forged_call_refusal(reason, self._find_site_name(owner), request.run_id)
        self._refuse_inactive_run(request.run_id)
        self._messages.release_message_objects(name)
        return ConfirmMessageReceivedResponse()

    def _extract_permitted_reply(self, caller: CallingSite, request: Any) -> tuple[Any, Any]:
        """Return envelope and object tree of a pushed reply; refuse a reply that the calling site may not send."""
        if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
            raise _make_forged_call_refusal("a call brings one reply and its one tree of objects")
        proto = request.messages_list[0]
        tree = request.message_object_trees[0]
        metadata = proto.metadata
        run = metadata.run_id
        request_id = metadata.reply_to_message_id
        owner = self._messages.find_node_of_message(request_id) if request_id else None
        if metadata.src_node_id != caller.node_id:
            stated_site = self._find_site_name(metadata.src_node_id)
            raise _make_forged_call_refusal("the reply names another site as its source", stated_site, run)
        if not request_id or metadata.dst_node_id != COORDINATOR_NODE_ID:
            raise _make_forged_call_refusal("a site sends replies to the coordinator and nothing else", run=run)
        if not self._messages.was_request_handed_out(caller.node_id, request_id):
            reason = "the reply answers a message that was not handed to this site"
            raise _make_forged_call_refusal(reason, self._find_site_name(owner), run)
        if proto.HasField("error"):
            # The run reads the whole error from the reply's objects. In the database it would only take space.
            proto.error.reason = proto.error.reason[:MAX_REASON_CHARACTERS]
        if proto.ByteSize() > MAX_ENVELOPE_BYTES or tree.ByteSize() > MAX_OBJECTS_PER_REPLY * MAX_TREE_ENTRY_BYTES:
            raise _make_forged_call_refusal("the reply's own fields are too long", run=run)
        object_ids: Collection[str] = list_tree_object_ids(tree)
        has_valid_ids = len(object_ids) <= MAX_OBJECTS_PER_REPLY and all(map(is_object_id, object_ids))
        if tree.object_id != metadata.message_id or not has_valid_ids:
            raise _make_forged_call_refusal("the tree of objects is not that of the reply")
        small: Sequence[bytes] = request.small_contents
        if sum(map(len, small)) > MAX_SMALL_OBJECTS_TOTAL_BYTES or len(small) > MAX_OBJECTS_PER_REPLY:
            raise _make_forged_call_refusal("the objects that came along with the reply are not small", run=run)
        accepted = self._messages.find_accepted_reply_id(request_id)
        owner = self._messages.find_node_of_message(metadata.message_id)
        if (accepted and accepted != metadata.message_id) or owner not in (None, caller.node_id):
            raise self._make_second_reply_refusal(caller, metadata)
        return proto, tree

    def _make_second_reply_refusal(self, caller: CallingSite, metadata: Any) -> HospitalCallRefused:
        owner = self._messages.find_node_of_message(metadata.message_id)
        reason = "another reply to this message was taken before"
        other = self._find_site_name(caller.node_id if owner is None else owner)
        return HospitalCallRefused(grpc.StatusCode.ALREADY_EXISTS, reason, other=other, run=metadata.run_id)

    # ------------------------------------------------------------------ runs

    def get_run_info(self, caller: CallingSite, request: Any) -> Any:
        """Return number and app bundle hash of a run in which the calling site takes part."""
        self._refuse_nonparticipating_site(caller, request.node.node_id, request.run_id)
        response = GetRunResponse()
        response.run.run_id = request.run_id
        response.run.fab_hash = APP_BUNDLE_SHA256
        return response

    def get_flower_app_bundle(self, caller: CallingSite, request: Any) -> Any:
        """Return the Flower app bundle of a run in which the calling site takes part."""
        self._refuse_nonparticipating_site(caller, request.node.node_id, request.run_id)
        if request.hash_str != APP_BUNDLE_SHA256:
            reason = "the run has no such app bundle"
            raise HospitalCallRefused(grpc.StatusCode.FAILED_PRECONDITION, reason, run=request.run_id)
        response = GetFabResponse()
        response.fab.hash_str = APP_BUNDLE_SHA256
        response.fab.content = APP_BUNDLE
        return response

    # ------------------------------------------------------------------ objects

    def push_object(self, caller: CallingSite, push: ParsedObjectPush) -> Any:
        """Store an object of a reply that the calling site has announced."""
        request = push.request
        name = request.object_id
        self._refuse_foreign_node_id(caller, request.node.node_id)
        if not self._messages.may_push_object(caller.node_id, name):
            raise _make_forged_call_refusal("the object belongs to no reply of this site", run=request.run_id)
        self._refuse_inactive_run(request.run_id)
        if not self._messages.is_object_needed(name) or hashlib.sha256(push.content).hexdigest() != name:
            return PushObjectResponse(stored=False)
        # An expired reply is not stored, so that the site does not count it as accepted.
        if self._messages.has_object_expired(caller.node_id, name):
            return PushObjectResponse(stored=False)
        return PushObjectResponse(stored=self._store_reply_object(caller, request.run_id, name, push.content))

    def _store_reply_object(self, caller: CallingSite, run_id: int, name: str, content: bytes | memoryview) -> bool:
        """Store an object of a reply; return False, and store nothing, if no message needs the object any longer.

        Args:
            name: Id of the object.

        Raises:
            HospitalCallRefused: If the reply exceeds its size limit.
        """
        if not self._messages.add_reply_bytes_within_limit(caller.node_id, name, len(content)):
            reason = "the reply weighs more than twice what was asked for"
            raise HospitalCallRefused(grpc.StatusCode.RESOURCE_EXHAUSTED, reason, noted=True, run=run_id)
        return self._messages.store_needed_object(name, content)

    def pull_object(self, caller: CallingSite, request: Any) -> bytes:
        """Return an object of a message that was handed to the calling site, as a serialized PullObjectResponse."""
        self._refuse_foreign_node_id(caller, request.node.node_id)
        if not self._messages.may_pull_object(caller.node_id, request.object_id):
            raise _make_forged_call_refusal("the object belongs to no message for this site", run=request.run_id)
        self._refuse_inactive_run(request.run_id)
        if response := self._pulls.get_pull_response(request.object_id):
            return response
        is_needed = self._messages.is_object_needed(request.object_id)
        return bytes(PullObjectResponse(object_found=is_needed, object_available=False).SerializeToString())

    # ------------------------------------------------------------------ checks

    def _refuse_foreign_node_id(self, caller: CallingSite, node_id: int) -> None:
        """Refuse a request with a node id other than that of the calling site."""
        if node_id != caller.node_id:
            # An honest site whose registration was renewed does this once, so it gets the answer of an unknown key.
            reason = "Invalid node ID: it is not that of the key that signed the call"
            raise HospitalCallRefused(grpc.StatusCode.UNAUTHENTICATED, reason, other=self._find_site_name(node_id))

    def _refuse_inactive_run(self, run_id: int) -> None:
        """Refuse a call about a run that has ended, or whose heartbeats are missing."""
        if not self._runs.is_run_active(run_id):
            raise HospitalCallRefused(grpc.StatusCode.PERMISSION_DENIED, "Run is finished.")

    def _refuse_nonparticipating_site(self, caller: CallingSite, node_id: int, run_id: int) -> None:
        """Refuse a call about a run that is over, or in which the calling site takes no part.

        Args:
            node_id: Node id in the request; the call is refused, too, if it is not that of the calling site.
        """
        self._refuse_foreign_node_id(caller, node_id)
        if not self._messages.is_site_in_run(caller.node_id, run_id):
            raise _make_forged_call_refusal("no message of this run was handed to this site", run=run_id)
        self._refuse_inactive_run(run_id)

    def _find_site_name(self, node_id: int | None) -> str:
        return "" if node_id is None else self._admitted.find_site_name(node_id)


def _make_forged_call_refusal(reason: str, other: str = "", run: int = 0) -> HospitalCallRefused:
    """Return the refusal of a call that no correct program makes; the refusal is recorded for the operator.

    Args:
        other: Name of another site that the call was about; empty if there is none.
        run: Flower's number of the run that the call was about; 0 for none.
    """
    return HospitalCallRefused(grpc.StatusCode.PERMISSION_DENIED, reason, other=other, noted=True, run=run)


def _refuse_release_out_of_reach(caller: CallingSite) -> None:
    """Raise :class:`HospitalCallRefused` if caller and coordinator speak no common wire version.

    Our own program learns this by the call ``Hello``, and does not connect.
    """
    if caller.stated.is_within_reach:
        return
    reason = (
        f"{caller.name} has release {caller.stated.release}, which speaks wire version {caller.stated.wire}; this "
        f"coordinator's release {__version__} speaks {describe_spoken_versions()}"
    )
    raise HospitalCallRefused(grpc.StatusCode.FAILED_PRECONDITION, reason, noted=True)


def _refuse_wrong_heartbeat_interval(interval: float) -> None:
    if not MIN_HEARTBEAT_INTERVAL_S <= interval <= MAX_HEARTBEAT_INTERVAL_S:
        reason = (
            f"signs of life come every {MIN_HEARTBEAT_INTERVAL_S} to {MAX_HEARTBEAT_INTERVAL_S} s, not {interval:g}"
        )
        raise HospitalCallRefused(grpc.StatusCode.INVALID_ARGUMENT, reason)
