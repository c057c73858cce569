"""The hospital link: Flower's Fleet API, answered by us for the site whose key signed each call.

The protocol is Flower's, on Flower's database and object store. What is different: the key that signed a call is the
only word for who calls. A site activates itself, answers messages that were handed to it, once, and reaches the objects
of its own messages. Flower's own servicer takes all of that from the body of the request.
"""

import hashlib
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import grpc
from flwr.app.message.message import Message
from flwr.common.constant import (
    HEARTBEAT_MIN_INTERVAL,
    SUPERLINK_NODE_ID,
    Status,
)
from flwr.common.serde import fab_to_proto, message_from_proto, message_to_proto, run_to_proto
from flwr.proto.fab_pb2 import GetFabRequest, GetFabResponse
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    ActivateNodeResponse,
    DeactivateNodeRequest,
    DeactivateNodeResponse,
    PullMessagesRequest,
    PullMessagesResponse,
    PushMessagesRequest,
    PushMessagesResponse,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest, SendNodeHeartbeatResponse
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    ConfirmMessageReceivedResponse,
    PullObjectRequest,
    PullObjectResponse,
    PushObjectResponse,
)
from flwr.proto.run_pb2 import GetRunRequest, GetRunResponse
from flwr.server.superlink.utils import check_abort
from flwr.supercore.object_store import NoObjectInStoreError

from common.wire.flower_objects import names_in
from server.coordinator.connections import forget_sign_off, note_sign_off
from server.deployment.superlink.fleet.authentication import Admitted, Caller, CallRefused
from server.deployment.superlink.fleet.message_owners import Owners
from server.deployment.superlink.objects.files import ObjectFiles, is_name
from server.deployment.superlink.objects.service import Answers, Push, found

MOST_OBJECTS = 10_000
"""Objects of one reply; a model of 150 MB has ten. The coordinator's run holds each reply to a far lower bound."""
LONGEST_INTERVAL_S = 120
"""Between two signs of life. Flower allows half an hour, for an hour of which a site that is gone would seem there."""
LONGEST_ENTRY = 200
"""Bytes of one object's entry in a tree."""
LONGEST_REASON = 500
"""Characters of an error's reason that are kept in the database."""
LONGEST_WORDS = 16 * 1024
"""Bytes of a reply's own fields."""


class Fleet:
    """The methods of the Fleet API that a site calls.

    Args:
        state: Flower's ``LinkState`` of the calling thread.
        store: Flower's object store of the calling thread.
        files: Where contents lie.
        owners: Which messages belong to which site.
        admitted: The keys that may call, for the names of sites.
        folder: The coordinator's ``state``, for the sites that signed off; None to note none.
    """

    def __init__(
        self,
        state: Callable[[], Any],
        store: Callable[[], Any],
        files: ObjectFiles,
        owners: Owners,
        admitted: Admitted,
        folder: Path | None = None,
    ) -> None:
        self._folder = folder
        self._state, self._store, self._files, self._owners, self._admitted = state, store, files, owners, admitted
        self._answers = Answers(files)
        self._one_at_a_time = threading.Lock()

    # ------------------------------------------------------------------ presence

    def activate(self, caller: Caller, request: ActivateNodeRequest) -> ActivateNodeResponse:
        """Note that the calling site is there."""
        if request.public_key != caller.key:
            other = self._admitted.caller(request.public_key)
            raise _forged("the public key in the request did not sign the call", other.name if other else "")
        _refuse_odd_interval(request.heartbeat_interval)
        if not self._state().activate_node(caller.node_id, request.heartbeat_interval):
            raise CallRefused(grpc.StatusCode.FAILED_PRECONDITION, "this key is in use by another process")
        if self._folder is not None:
            forget_sign_off(self._folder, caller.name)
        return ActivateNodeResponse(node_id=caller.node_id)

    def deactivate(self, caller: Caller, request: DeactivateNodeRequest) -> DeactivateNodeResponse:
        """Note that the calling site leaves."""
        self._refuse_another(caller, request.node_id)
        if self._folder is not None:  # before Flower's state says so: a run that hears of it looks here for the reason
            note_sign_off(self._folder, caller.name)
        if not self._state().deactivate_node(caller.node_id):
            raise CallRefused(grpc.StatusCode.FAILED_PRECONDITION, "this site is not connected")
        return DeactivateNodeResponse()

    def heartbeat(self, caller: Caller, request: SendNodeHeartbeatRequest) -> SendNodeHeartbeatResponse:
        """Note a sign of life of the calling site."""
        self._refuse_another(caller, request.node.node_id)
        _refuse_odd_interval(request.heartbeat_interval)
        known = self._state().acknowledge_node_heartbeat(caller.node_id, request.heartbeat_interval)
        return SendNodeHeartbeatResponse(success=known)

    def register(self, caller: Caller, request: Any) -> Any:
        """Refuse: sites are admitted by the coordinator."""
        reason = "sites are registered by flwr-server admit, not by a call"
        raise CallRefused(grpc.StatusCode.PERMISSION_DENIED, reason, noted=True)

    # ------------------------------------------------------------------ messages

    def pull_messages(self, caller: Caller, request: PullMessagesRequest) -> PullMessagesResponse:
        """Hand the calling site its next message."""
        self._refuse_another(caller, request.node.node_id)
        state, answer = self._state(), PullMessagesResponse()
        for message in state.get_message_ins(node_id=caller.node_id, limit=1):
            metadata = message.metadata
            try:
                tree = self._store().get_object_tree(metadata.message_id)
            except NoObjectInStoreError:
                state.delete_messages(message_ins_ids={metadata.message_id})
                continue
            names = names_in(tree)
            size = sum(map(self._files.size, names))
            self._owners.handed(caller.node_id, metadata.run_id, metadata.message_id, names, size)
            answer.messages_list.append(message_to_proto(message))
            answer.message_object_trees.append(tree)
        return answer

    def push_messages(self, caller: Caller, request: PushMessagesRequest) -> PushMessagesResponse:
        """Take the calling site's one reply to a message that was handed to it."""
        self._refuse_another(caller, request.node.node_id)
        message, names = self._reply(caller, request)
        metadata, state = message.metadata, self._state()
        self._refuse_over(metadata.run_id)
        asked, reply, tree = metadata.reply_to_message_id, metadata.message_id, request.message_object_trees[0]
        with self._one_at_a_time, state.session():
            session = state.start_session(metadata.run_id)
            try:
                stored, missing = state.store_message_and_object_tree(message, tree, session)
            except ValueError as error:  # the tree contradicts one that is there
                raise _forged(f"the reply's objects cannot be taken: {error}", run=metadata.run_id) from None
            if stored:
                self._owners.announced(caller.node_id, metadata.run_id, asked, reply, names)
            elif self._owners.reply_to(asked) != reply:
                reason = "nobody waits for this reply any more: its time is over, or its run"
                raise CallRefused(grpc.StatusCode.FAILED_PRECONDITION, reason, run=metadata.run_id)
            elif reply in self._store():
                # The reply was announced before and the run knows of it. The site lost the line in the middle of
                # sending its objects: those that are still missing are asked for again.
                missing = state.preregister_object_tree(tree, session)
        return PushMessagesResponse(results={reply: 0}, objects_to_push=missing, session_id=session)

    def confirm(self, caller: Caller, request: ConfirmMessageReceivedRequest) -> ConfirmMessageReceivedResponse:
        """Let go of a message that was handed to the calling site."""
        self._refuse_another(caller, request.node.node_id)
        name, owner = request.message_object_id, self._owners.owner_of(request.message_object_id)
        if not self._owners.was_handed(caller.node_id, name):
            if owner is None and not (is_name(name) and name in self._store()):
                return ConfirmMessageReceivedResponse()  # it is gone already: said twice, or its run is over
            raise CallRefused(
                grpc.StatusCode.PERMISSION_DENIED,
                "this message was not handed to this site",
                other=self._name(owner),
                noted=True,
                run=request.run_id,
            )
        self._refuse_over(request.run_id)
        self._store().delete(name)
        return ConfirmMessageReceivedResponse()

    def _reply(self, caller: Caller, request: PushMessagesRequest) -> tuple[Message, Collection[str]]:
        """The reply in a request, if it is one that the calling site may send; and the names of its objects."""
        if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
            raise _forged("a call brings one reply and its one tree of objects")
        proto, tree = request.messages_list[0], request.message_object_trees[0]
        metadata = proto.metadata
        run, asked = metadata.run_id, metadata.reply_to_message_id
        owner = self._owners.owner_of(asked) if asked else None
        if metadata.src_node_id != caller.node_id:
            raise _forged("the reply names another site as its source", self._name(metadata.src_node_id), run)
        if not asked or metadata.dst_node_id != SUPERLINK_NODE_ID:
            raise _forged("a site sends replies to the coordinator and nothing else", run=run)
        if not self._owners.was_handed(caller.node_id, asked):
            raise _forged("the reply answers a message that was not handed to this site", self._name(owner), run)
        if proto.HasField("error"):
            # The run reads the error in the reply's objects, and cuts it; here it would only fill the database.
            proto.error.reason = proto.error.reason[:LONGEST_REASON]
        if proto.ByteSize() > LONGEST_WORDS or tree.ByteSize() > MOST_OBJECTS * LONGEST_ENTRY:
            raise _forged("the reply's own fields are too long", run=run)
        names = _names(tree, metadata.message_id)
        first, owner = self._owners.reply_to(asked), self._owners.owner_of(metadata.message_id)
        if (first and first != metadata.message_id) or owner not in (None, caller.node_id):
            reason = "another reply to this message was taken before"
            raise CallRefused(
                grpc.StatusCode.ALREADY_EXISTS, reason, other=self._name(owner or caller.node_id), run=run
            )
        return message_from_proto(proto), names

    # ------------------------------------------------------------------ runs

    def get_run(self, caller: Caller, request: GetRunRequest) -> GetRunResponse:
        """What is known of a run in which the calling site takes part."""
        return GetRunResponse(run=run_to_proto(self._run(caller, request.node.node_id, request.run_id)))

    def get_bundle(self, caller: Caller, request: GetFabRequest) -> GetFabResponse:
        """The app bundle of a run in which the calling site takes part."""
        run = self._run(caller, request.node.node_id, request.run_id)
        bundle = self._state().get_fab(request.hash_str) if request.hash_str == run.fab_hash else None
        if bundle is None:
            raise CallRefused(grpc.StatusCode.FAILED_PRECONDITION, "the run has no such app bundle", run=request.run_id)
        return GetFabResponse(fab=fab_to_proto(bundle))

    def _run(self, caller: Caller, node_id: int, run_id: int) -> Any:
        self._refuse_another(caller, node_id)
        if not self._owners.takes_part(caller.node_id, run_id):
            reason = "no message of this run was handed to this site"
            raise CallRefused(grpc.StatusCode.PERMISSION_DENIED, reason, noted=True, run=run_id)
        self._refuse_over(run_id)
        (run,) = self._state().get_run_info(run_ids=[run_id])
        return run

    # ------------------------------------------------------------------ objects

    def push_object(self, caller: Caller, push: Push) -> PushObjectResponse:
        """Take an object of a reply that the calling site announced."""
        request, name = push.request, push.request.object_id
        self._refuse_another(caller, request.node.node_id)
        if not self._owners.may_push(caller.node_id, name):
            raise _forged("the object belongs to no reply of this site", run=request.run_id)
        self._refuse_over(request.run_id)
        if name not in self._store() or hashlib.sha256(push.content).hexdigest() != name:
            return PushObjectResponse(stored=False)
        if not self._owners.takes(caller.node_id, name, len(push.content)):
            raise CallRefused(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "the reply weighs more than twice what was asked for",
                noted=True,
                run=request.run_id,
            )
        self._files.write(name, push.content)
        # Flower's store only notes that the object is there: its content is in the file.
        stored = self._state().store_object(request.run_id, request.session_id, name, b"")
        return PushObjectResponse(stored=stored)

    def pull_object(self, caller: Caller, request: PullObjectRequest) -> bytes:
        """Hand out an object of a message that was handed to the calling site: a ``PullObjectResponse`` as bytes."""
        self._refuse_another(caller, request.node.node_id)
        if not self._owners.may_pull(caller.node_id, request.object_id):
            raise _forged("the object belongs to no message for this site", run=request.run_id)
        self._refuse_over(request.run_id)
        if answer := self._answers.of(request.object_id):
            return answer
        content = self._state().get_object(request.run_id, request.object_id)
        if content:  # its file was written since the look before
            return found(content)
        answer = PullObjectResponse(object_found=content is not None, object_available=False)
        return bytes(answer.SerializeToString())

    # ------------------------------------------------------------------ refusals

    def _refuse_another(self, caller: Caller, node_id: int) -> None:
        """Raise :class:`CallRefused` unless a request names the node of the key that signed it."""
        if node_id != caller.node_id:
            # An honest site that was registered anew does this once, so it is refused as an unknown key is.
            reason = "Invalid node ID: it is not that of the key that signed the call"
            raise CallRefused(grpc.StatusCode.UNAUTHENTICATED, reason, other=self._name(node_id))

    def _refuse_over(self, run_id: int) -> None:
        """Raise :class:`CallRefused` unless somebody leads the run."""
        if reason := check_abort(run_id, [Status.PENDING, Status.STARTING, Status.FINISHED], self._state()):
            raise CallRefused(grpc.StatusCode.PERMISSION_DENIED, reason)

    def _name(self, node_id: int | None) -> str:
        return "" if node_id is None else self._admitted.name_of(node_id)


def _forged(reason: str, other: str = "", run: int = 0) -> CallRefused:
    """A call that no honest program makes."""
    return CallRefused(grpc.StatusCode.PERMISSION_DENIED, reason, other=other, noted=True, run=run)


def _refuse_odd_interval(interval: float) -> None:
    if not HEARTBEAT_MIN_INTERVAL <= interval <= LONGEST_INTERVAL_S:
        reason = f"signs of life come every {HEARTBEAT_MIN_INTERVAL} to {LONGEST_INTERVAL_S} s, not {interval:g}"
        raise CallRefused(grpc.StatusCode.INVALID_ARGUMENT, reason)


def _names(tree: Any, root: str) -> Collection[str]:
    """Names of all objects of a reply's tree.

    Raises:
        CallRefused: If its root is not the message, or a name is no SHA-256, or there are too many.
    """
    names = names_in(tree)
    if tree.object_id != root or not all(map(is_name, names)) or len(names) > MOST_OBJECTS:
        raise _forged("the tree of objects is not that of the reply")
    return names
