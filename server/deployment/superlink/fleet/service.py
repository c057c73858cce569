"""The hospital link: Flower's Fleet API, answered by us for the site whose key signed each call.

The protocol is Flower's, the storage is ours. What is different: the key that signed a call is the only word for who
calls. A site activates itself, answers messages that were handed to it, once, and reaches the objects of its own
messages. Flower's own servicer takes all of that from the body of the request.
"""

import hashlib
import threading
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from common.wire.fleet_protocol import (
    COORDINATOR,
    SMALL_BYTES_IN_ALL,
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
    by_sha256,
    object_ids,
)
from server.coordinator.connections import forget_sign_off, note_sign_off
from server.deployment.superlink.fleet.authentication import Admitted, Caller, CallRefused
from server.deployment.superlink.fleet.bundle import BUNDLE, BUNDLE_SHA256
from server.deployment.superlink.fleet.one_process import OneProcess
from server.deployment.superlink.objects.files import is_name
from server.deployment.superlink.objects.service import Answers, Push
from server.deployment.superlink.storage.messages import Acceptance, StoredMessage, reply_from, told
from server.deployment.superlink.storage.storage import Storage

WAIT_AT_ONCE = 500
"""Calls that wait for a message at a time, half of those that are answered at a time; others are told at once that
there is none, and ask again."""
SHORTEST_INTERVAL_S = 10
"""Between two signs of life, as in Flower."""
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
        storage: Sites, runs and messages.
        admitted: The keys that may call, for the names of sites.
        folder: The coordinator's ``state``, for the sites that signed off; None to note none.
    """

    def __init__(self, storage: Storage, admitted: Admitted, folder: Path | None = None) -> None:
        self._folder, self.one_process = folder, OneProcess()
        self._sites, self._runs, self._messages = storage.sites, storage.runs, storage.messages
        self._admitted, self._answers = admitted, Answers(storage.files)
        self._room = threading.Semaphore(WAIT_AT_ONCE)

    # ------------------------------------------------------------------ presence

    def activate(self, caller: Caller, request: Any) -> Any:
        """Note that the calling site is there."""
        if request.public_key != caller.key:
            other = self._admitted.caller(request.public_key)
            raise _forged("the public key in the request did not sign the call", other.name if other else "")
        _refuse_odd_interval(request.heartbeat_interval)
        if not self._sites.activate(caller.node_id, request.heartbeat_interval):
            raise CallRefused(grpc.StatusCode.FAILED_PRECONDITION, "this key is in use by another process")
        self.one_process.sign_on(caller)
        if self._folder is not None:
            forget_sign_off(self._folder, caller.name)
        return ActivateNodeResponse(node_id=caller.node_id)

    def deactivate(self, caller: Caller, request: Any) -> Any:
        """Note that the calling site leaves."""
        self._refuse_another(caller, request.node_id)
        if self._folder is not None:  # before the storage says so: a run that hears of it looks here for the reason
            note_sign_off(self._folder, caller.name)
        if not self._sites.deactivate(caller.node_id):
            raise CallRefused(grpc.StatusCode.FAILED_PRECONDITION, "this site is not connected")
        return DeactivateNodeResponse()

    def heartbeat(self, caller: Caller, request: Any) -> Any:
        """Note a sign of life of the calling site."""
        self._refuse_another(caller, request.node.node_id)
        _refuse_odd_interval(request.heartbeat_interval)
        if self._sites.has_signed_off(caller.node_id) and self.one_process.is_present(caller):  # over a slow line
            raise CallRefused(grpc.StatusCode.FAILED_PRECONDITION, "this process has signed off")
        if known := self._sites.heartbeat(caller.node_id, request.heartbeat_interval):
            self.one_process.sign_on(caller)  # a process after a kill takes its place up like this
        return SendNodeHeartbeatResponse(success=known)

    def register(self, caller: Caller, request: Any) -> Any:
        """Refuse: sites are admitted by the coordinator."""
        reason = "sites are registered by flwr-server admit, not by a call"
        raise CallRefused(grpc.StatusCode.PERMISSION_DENIED, reason, noted=True)

    # ------------------------------------------------------------------ messages

    def pull_messages(self, caller: Caller, request: Any) -> Any:
        """Hand the calling site its next message."""
        self._refuse_another(caller, request.node.node_id)
        if (message := self._next(caller)) is None:
            return PullMessagesResponse()
        proto, tree = told(message)
        small = self._messages.small_contents(tree)
        return PullMessagesResponse(messages_list=[proto], message_object_trees=[tree], small_contents=small)

    def _next(self, caller: Caller) -> StoredMessage | None:
        """The next message for the calling site, as soon as there is one; None where none comes while it waits."""
        node, again = caller.node_id, caller.wait_s is not None
        number = self._messages.arrivals.number(node)
        found = self._messages.next_for(node, again=again)
        if found is not None or not caller.wait_s or not self._room.acquire(blocking=False):
            return found
        try:
            self._messages.arrivals.wait(node, number, caller.wait_s)
        finally:
            self._room.release()
        # Meanwhile another process may have taken its place, or its key may have been revoked.
        self.one_process.refuse_an_earlier_one(caller)
        if self._admitted.caller(caller.key) is None:
            raise CallRefused(grpc.StatusCode.UNAUTHENTICATED, "Invalid signature")
        return self._messages.next_for(node, again=again)

    def push_messages(self, caller: Caller, request: Any) -> Any:
        """Take the calling site's one reply to a message that was handed to it."""
        self._refuse_another(caller, request.node.node_id)
        proto, tree = self._reply(caller, request)
        said = proto.metadata
        self._refuse_over(said.run_id)
        outcome, missing = self._messages.answer(reply_from(proto, tree))
        if outcome is Acceptance.ANOTHER_WAS_TAKEN:
            raise self._answered_before(caller, said)
        if outcome is Acceptance.NOBODY_WAITS:
            reason = "nobody waits for this reply any more: its time is over, or its run"
            raise CallRefused(grpc.StatusCode.FAILED_PRECONDITION, reason, run=said.run_id)
        came_along, keep = by_sha256(request.small_contents), partial(self._kept, caller, said.run_id)
        wanted = [name for name in missing if name not in came_along or not keep(name, came_along[name])]
        results = [Result(key=said.message_id, value=0)]
        return PushMessagesResponse(results=results, objects_to_push=wanted, session_id=said.message_id)

    def confirm(self, caller: Caller, request: Any) -> Any:
        """Let go of a message that was handed to the calling site."""
        self._refuse_another(caller, request.node.node_id)
        name, owner = request.message_object_id, self._messages.owner_of(request.message_object_id)
        if not self._messages.was_handed(caller.node_id, name):
            if owner is None and not self._messages.needs(name):
                return ConfirmMessageReceivedResponse()  # it is gone already: said twice, or its run is over
            raise CallRefused(
                grpc.StatusCode.PERMISSION_DENIED,
                "this message was not handed to this site",
                other=self._name(owner),
                noted=True,
                run=request.run_id,
            )
        self._refuse_over(request.run_id)
        self._messages.let_go(name)
        return ConfirmMessageReceivedResponse()

    def _reply(self, caller: Caller, request: Any) -> tuple[Any, Any]:
        """The reply in a request, if it is one that the calling site may send; and the tree of its objects."""
        if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
            raise _forged("a call brings one reply and its one tree of objects")
        proto, tree = request.messages_list[0], request.message_object_trees[0]
        metadata = proto.metadata
        run, asked = metadata.run_id, metadata.reply_to_message_id
        owner = self._messages.owner_of(asked) if asked else None
        if metadata.src_node_id != caller.node_id:
            raise _forged("the reply names another site as its source", self._name(metadata.src_node_id), run)
        if not asked or metadata.dst_node_id != COORDINATOR:
            raise _forged("a site sends replies to the coordinator and nothing else", run=run)
        if not self._messages.was_handed(caller.node_id, asked):
            raise _forged("the reply answers a message that was not handed to this site", self._name(owner), run)
        if proto.HasField("error"):
            # The run reads the error in the reply's objects, and cuts it; here it would only fill the database.
            proto.error.reason = proto.error.reason[:LONGEST_REASON]
        if proto.ByteSize() > LONGEST_WORDS or tree.ByteSize() > MOST_OBJECTS * LONGEST_ENTRY:
            raise _forged("the reply's own fields are too long", run=run)
        _refuse_odd_tree(tree, metadata.message_id)
        _refuse_odd_contents(request.small_contents, run)
        first, owner = self._messages.reply_to(asked), self._messages.owner_of(metadata.message_id)
        if (first and first != metadata.message_id) or owner not in (None, caller.node_id):
            raise self._answered_before(caller, metadata)
        return proto, tree

    def _answered_before(self, caller: Caller, said: Any) -> CallRefused:
        owner = self._messages.owner_of(said.message_id)
        reason = "another reply to this message was taken before"
        other = self._name(caller.node_id if owner is None else owner)
        return CallRefused(grpc.StatusCode.ALREADY_EXISTS, reason, other=other, run=said.run_id)

    # ------------------------------------------------------------------ runs

    def get_run(self, caller: Caller, request: Any) -> Any:
        """What is known of a run in which the calling site takes part."""
        self._refuse_foreign(caller, request.node.node_id, request.run_id)
        found = GetRunResponse()
        found.run.run_id, found.run.fab_hash = request.run_id, BUNDLE_SHA256
        return found

    def get_bundle(self, caller: Caller, request: Any) -> Any:
        """The app bundle of a run in which the calling site takes part."""
        self._refuse_foreign(caller, request.node.node_id, request.run_id)
        if request.hash_str != BUNDLE_SHA256:
            raise CallRefused(grpc.StatusCode.FAILED_PRECONDITION, "the run has no such app bundle", run=request.run_id)
        found = GetFabResponse()
        found.fab.hash_str, found.fab.content = BUNDLE_SHA256, BUNDLE
        return found

    def _refuse_foreign(self, caller: Caller, node_id: int, run_id: int) -> None:
        """Raise :class:`CallRefused` unless the calling site takes part in a run that goes on."""
        self._refuse_another(caller, node_id)
        if not self._messages.takes_part(caller.node_id, run_id):
            reason = "no message of this run was handed to this site"
            raise CallRefused(grpc.StatusCode.PERMISSION_DENIED, reason, noted=True, run=run_id)
        self._refuse_over(run_id)

    # ------------------------------------------------------------------ objects

    def push_object(self, caller: Caller, push: Push) -> Any:
        """Take an object of a reply that the calling site announced."""
        request, name = push.request, push.request.object_id
        self._refuse_another(caller, request.node.node_id)
        if not self._messages.may_push(caller.node_id, name):
            raise _forged("the object belongs to no reply of this site", run=request.run_id)
        self._refuse_over(request.run_id)
        if not self._messages.needs(name) or hashlib.sha256(push.content).hexdigest() != name:
            return PushObjectResponse(stored=False)
        if self._messages.is_late(caller.node_id, name):  # the site must not count it among the replies that were taken
            return PushObjectResponse(stored=False)
        return PushObjectResponse(stored=self._kept(caller, request.run_id, name, push.content))

    def _kept(self, caller: Caller, run_id: int, name: str, content: bytes | memoryview) -> bool:
        """Keep an object of a reply; say whether it is still needed."""
        if not self._messages.takes(caller.node_id, name, len(content)):
            reason = "the reply weighs more than twice what was asked for"
            raise CallRefused(grpc.StatusCode.RESOURCE_EXHAUSTED, reason, noted=True, run=run_id)
        return self._messages.keep(name, content)

    def pull_object(self, caller: Caller, request: Any) -> bytes:
        """Hand out an object of a message that was handed to the calling site: a ``PullObjectResponse`` as bytes."""
        self._refuse_another(caller, request.node.node_id)
        if not self._messages.may_pull(caller.node_id, request.object_id):
            raise _forged("the object belongs to no message for this site", run=request.run_id)
        self._refuse_over(request.run_id)
        if answer := self._answers.of(request.object_id):
            return answer
        answer = PullObjectResponse(object_found=self._messages.needs(request.object_id), object_available=False)
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
        if not self._runs.goes_on(run_id):
            raise CallRefused(grpc.StatusCode.PERMISSION_DENIED, "Run is finished.")

    def _name(self, node_id: int | None) -> str:
        return "" if node_id is None else self._admitted.name_of(node_id)


def _forged(reason: str, other: str = "", run: int = 0) -> CallRefused:
    """A call that no honest program makes."""
    return CallRefused(grpc.StatusCode.PERMISSION_DENIED, reason, other=other, noted=True, run=run)


def _refuse_odd_interval(interval: float) -> None:
    if not SHORTEST_INTERVAL_S <= interval <= LONGEST_INTERVAL_S:
        reason = f"signs of life come every {SHORTEST_INTERVAL_S} to {LONGEST_INTERVAL_S} s, not {interval:g}"
        raise CallRefused(grpc.StatusCode.INVALID_ARGUMENT, reason)


def _refuse_odd_contents(contents: Sequence[bytes], run: int) -> None:
    """Raise :class:`CallRefused` if more bytes came along with a reply than may; a large object comes by itself."""
    if sum(map(len, contents)) > SMALL_BYTES_IN_ALL or len(contents) > MOST_OBJECTS:
        raise _forged("the objects that came along with the reply are not small", run=run)


def _refuse_odd_tree(tree: Any, root: str) -> None:
    """Raise :class:`CallRefused` unless a tree's root is the message, and its names are few and SHA-256."""
    names: Collection[str] = object_ids(tree)
    if tree.object_id != root or not all(map(is_name, names)) or len(names) > MOST_OBJECTS:
        raise _forged("the tree of objects is not that of the reply")
