"""A run's Grid: the network twin of what :mod:`server.simulation.backends` lends."""

import itertools
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Error, Message, Metadata
from flwr.app.message import make_message, remove_content_from_message
from flwr.common.constant import ErrorCode
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PushAppMessagesRequest
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_push_object_fn_protobuf
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.superlink.grid import HttpGrid

from common.wire.flower_objects import cut, message_of, names_in
from server.coordinator.connections import read_sign_offs
from server.coordinator.folder import Coordinator
from server.deployment.superlink.local.loopback import SecretInterceptor
from server.deployment.superlink.objects.files import ObjectFiles
from server.deployment.superlink.objects.reply_bounds import Bound, asked_for
from server.deployment.superlink.run_client.retry import retrying
from server.deployment.superlink.run_client.signing import Signing
from strategies.rounds.messages.deadline import REFUSED_REPLY

ARRIVING_S, LOOK_S = 0.1, 0.005
AT_A_TIME = 4
"""Replies handed over in one look: the others stay in their files until these are added up."""
UPLOAD_STALL_S = 120.0
"""How long nothing more of a reply that has been announced may arrive before it counts as cut off: the time that a
site gives one call."""


class NetworkGrid(HttpGrid):
    """Flower's Grid, with the names under which sites are registered; contents go through files, not through HTTP."""

    def __init__(self, coordinator: Coordinator, token: str, *, files: ObjectFiles, signing: Signing) -> None:
        address, certificate = coordinator.control_address, coordinator.ca_certificate.read_bytes()
        super().__init__(address, False, certificate, token=token)
        self._retry_invoker = retrying()
        version, task = RuntimeVersionHttpInterceptor("flwr-serverapp"), RuntimeTokenHttpInterceptor(token)
        ours: list[Any] = [version, task, SecretInterceptor(coordinator)]  # Flower's own client has the first two
        self._client = RuntimeHttpClient.from_server_address(
            address, False, certificate, ours, retry_invoker=self._retry_invoker
        )
        self._files, self._signing = files, signing
        self._announced: dict[str, _Announced] = {}  # by the message that is answered
        self._bounds: dict[str, Bound] = {}  # the same
        self._asked: dict[str, int] = {}  # the same: the node that it was sent to
        self._state = coordinator.state

    @property
    def runtime(self) -> RuntimeHttpClient:
        """Flower's Runtime API, as this run's task may use it."""
        return self._runtime_client

    def patience(self, tries: int) -> None:
        """Limit the tries of every call from now on."""
        self._retry_invoker.max_tries = tries

    def registered(self) -> Mapping[int, str]:
        """Names of all sites that may take part by node, connected or not."""
        return {node: site.name for node, site in self._signing.sites().items()}

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Sign messages, each for the site that it goes to, and send them."""
        sent = list(messages)
        for message in sent:
            self._signing.sign(message)
        return super().push_messages(sent)

    def _try_push_messages(self, run_id: int, messages: Iterable[Message]) -> list[str]:
        """Put all objects into the files but one, announce the messages, then that one and what is missing still.

        With nothing missing at all, Flower would keep its record of the announcement for ever.
        """
        sent = list(messages)
        for message in sent:
            cut(message)
        of_messages = [get_all_nested_objects(message) for message in sent]
        objects = {name: found for below in of_messages for name, found in below.items()}
        sizes = {name: len(found.deflate()) for name, found in objects.items()}
        last = sent[0].object_id if sent else ""
        for name, found in objects.items():
            if name != last:
                self._files.write(name, found.deflate())
        answer = self.runtime.PushMessages(
            PushAppMessagesRequest(
                messages_list=[message_to_proto(remove_content_from_message(message)) for message in sent],
                message_object_trees=[get_object_tree(message) for message in sent],
            )
        )
        announce = make_push_object_fn_protobuf(self.runtime.PushObject, self.node, run_id, answer.session_id)
        for name in dict.fromkeys(answer.objects_to_push):
            self._files.write(name, objects[name].deflate())
            announce(name, b"")
        bounds = (
            Bound.on_reply_to([sizes[name] for name in below], asked_for(message.content))
            for message, below in zip(sent, of_messages, strict=True)
        )
        self._bounds |= dict(zip(answer.message_ids, bounds, strict=True))
        nodes = (message.metadata.dst_node_id for message in sent)
        self._asked |= dict(zip(answer.message_ids, nodes, strict=True))
        for message in sent:
            self._signing.note_sent(message)
        return list(answer.message_ids)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Fetch the replies that are complete; one whose content is still on its way waits for the next call.

        Flower's own waits here, seconds at a time, for the one that is being uploaded. Where all have been announced,
        a look at the files is cheap, and is repeated for a moment.
        """
        wanted = list(message_ids)
        if asked := [name for name in wanted if name not in self._announced]:  # it forgets what it has told once
            answer = self.runtime.PullMessages(PullAppMessagesRequest(message_ids=asked))
            for proto, tree in zip(answer.messages_list, answer.message_object_trees, strict=True):
                self._announced[proto.metadata.reply_to_message_id] = _Announced(proto, names_in(tree))
        here, until = self._here(wanted), time.monotonic() + ARRIVING_S
        while not here and not asked and time.monotonic() < until:
            time.sleep(LOOK_S)
            here = self._here(wanted)
        few = dict(itertools.islice(here.items(), AT_A_TIME))
        for name in few:
            del self._announced[name]
        return [self._fetched(one) for one in few.values()]

    def _here(self, wanted: Iterable[str]) -> dict[str, "_Announced"]:
        return {name: one for name in wanted if (one := self._announced.get(name)) and self._arrived(one)}

    def _arrived(self, announced: "_Announced") -> bool:
        """Whether all of a reply's content is there, or never will be, or more of it than can be right."""
        missing = [name for name in announced.missing if name and not self._files.has(name)]
        if len(missing) < len(announced.missing):
            came = set(announced.missing) - set(missing)
            announced.size += sum(self._files.size(name) for name in came)
            announced.missing, announced.since = missing, time.monotonic()
        if bound := self._bounds.get(announced.proto.metadata.reply_to_message_id):
            announced.fault = bound.fault(len(announced.names), announced.size)
        return bool(announced.fault) or not missing or time.monotonic() - announced.since > UPLOAD_STALL_S

    def _fetched(self, announced: "_Announced") -> Message:
        proto = announced.proto
        self._bounds.pop(proto.metadata.reply_to_message_id, None)
        node = self._asked.pop(proto.metadata.reply_to_message_id, 0)
        if announced.fault:
            self._let_go(proto)
            return _error_reply(proto, REFUSED_REPLY, announced.fault)
        if announced.missing:
            reason = f"its reply was cut off: nothing came for {UPLOAD_STALL_S:.0f} s"
            return _error_reply(proto, ErrorCode.NODE_UNAVAILABLE, reason)
        message_id = proto.metadata.message_id
        try:
            message = message_of(message_id, {name: self._files.view(name) or b"" for name in announced.names})
        except ValueError as error:
            message = _error_reply(proto, REFUSED_REPLY, f"its reply cannot be read: {error}")
        self._let_go(proto)
        if message.has_error() and message.error.code == ErrorCode.NODE_UNAVAILABLE and (why := self._stopped(node)):
            return _error_reply(proto, ErrorCode.NODE_UNAVAILABLE, why)
        # An error holds no record, and is not signed: it counts for nothing but words.
        fault = self._signing.fault(proto.metadata.reply_to_message_id, message) if message.has_content() else ""
        return _error_reply(proto, REFUSED_REPLY, fault) if fault else message

    def _stopped(self, node: int) -> str:
        """That a site's operator stopped it, in words, where the site said so when it left; empty of a lost one."""
        when = read_sign_offs(self._state).get(self.registered().get(node, ""), "")
        return f"stopped by its operator at {when}" if when else ""

    def _let_go(self, proto: Any) -> None:
        """Tell the SuperLink that a reply's content is not needed any more."""
        message_id = proto.metadata.message_id
        self.runtime.ConfirmMessageReceived(
            ConfirmMessageReceivedRequest(node=self.node, run_id=self.run.run_id, message_object_id=message_id)
        )


@dataclass
class _Announced:
    """A reply that the SuperLink has announced; ``missing`` objects were last fewer at ``since``, ``size`` has come.

    Attributes:
        fault: Why it is refused, no matter what else of it comes.
    """

    proto: Any
    names: list[str]
    since: float = field(default_factory=time.monotonic)
    size: int = 0
    fault: str = ""
    missing: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.missing = [*self.names, ""]  # the empty name: not looked at yet


def _error_reply(proto: Any, code: int, reason: str) -> Message:
    """An error in the place of a reply that is of no use, as Flower's own Grid makes it."""
    came = proto.metadata
    metadata = Metadata(
        run_id=came.run_id,
        message_id="",
        src_node_id=came.src_node_id,
        dst_node_id=came.dst_node_id,
        reply_to_message_id=came.reply_to_message_id,
        group_id=came.group_id,
        ttl=came.ttl,
        message_type=came.message_type,
        created_at=came.created_at,
    )
    return make_message(metadata=metadata, error=Error(code, reason))
