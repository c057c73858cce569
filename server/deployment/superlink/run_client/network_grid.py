"""A run's Grid: the network twin of what :mod:`server.simulation.backends` lends."""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Error, Message, RecordDict
from flwr.serverapp import Grid

from common.security.signatures import SignatureFault
from common.wire.fleet_protocol import ROLL_CALL, object_ids
from common.wire.flower_objects import TooLarge, array_bytes, envelope, join_message, set_message_id, split_message
from server.deployment.superlink.control.client import Announced, Control
from server.deployment.superlink.objects.files import ObjectFiles
from server.deployment.superlink.objects.reply_bounds import MORE_BYTES, NOTHING, Bound, asked_for
from server.deployment.superlink.run_client.signing import Signing
from server.deployment.superlink.storage.messages import Lack
from server.runs.live_status import stopped_at
from strategies.engine.events import Arrival
from strategies.engine.exchange import MESSAGE_GONE, NODE_UNAVAILABLE, NOT_REGISTERED, REFUSED_REPLY, REVOKED

ARRIVING_S, LOOK_S = 0.1, 0.005
AT_A_TIME = 4
"""Replies handed over in one look: the others stay in their files until these are added up."""
UPLOAD_STALL_S = 120.0
"""How long nothing more of a reply that has been announced may arrive before it counts as cut off: the time that a
site gives one call."""
CAME_WHILE_AWAY = "the process that led the run ended before it had noted this reply; the site was asked again"
_LACKS = {
    Lack.MESSAGE_GONE: (MESSAGE_GONE[0], "the time of this message is over"),
    Lack.SITE_GONE: (NODE_UNAVAILABLE, "the site is not connected"),
}


class NetworkGrid(Grid):
    """Flower's Grid over the SuperLink; contents go through files, everything else through calls over a Unix socket.

    Args:
        run: Its number.
        left: Envelope and tree of each reply to an earlier run that nobody has let go of.
        clock: The steady clock that the SuperLink goes by.
        signed_off: Site -> when it said that it leaves.
    """

    def __init__(
        self,
        control: Control,
        run: int,
        *,
        files: ObjectFiles,
        signing: Signing,
        left: Sequence[tuple[Any, Any]] = (),
        clock: Callable[[], float],
        signed_off: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self._signed_off = signed_off
        self._control, self._run, self._clock = control, run, clock
        self._files, self._signing = files, signing
        self._asked: dict[str, _Asked] = {}  # by the name of the message
        self._announced: dict[str, _Announced] = {}  # by the message that is answered
        self._left = left
        self._fetched: list[str] = []  # replies that were handed over, and that may not be in the audit yet
        self._answers: list[str] = []  # the same, of a roll call: they are in the audit once the roll call is over

    def registered(self) -> Mapping[int, str]:
        """Names of all sites that may take part by node, connected or not."""
        return {node: site.name for node, site in self._signing.sites().items()}

    def set_run(self, run: Any) -> None:
        raise NotImplementedError("this Grid has no Flower run")

    @property
    def run(self) -> Any:
        raise NotImplementedError("this Grid has no Flower run")

    def create_message(self, *arguments: Any, **options: Any) -> Message:
        raise NotImplementedError("use Message(...)")

    def get_node_ids(self) -> Iterable[int]:
        """The sites that are connected."""
        return [node.node_id for node in self._control.nodes() if node.online]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages, and wait for their replies."""
        pending, until = set(self.push_messages(messages)), time.monotonic() + (timeout or float("inf"))
        replies = list[Message]()
        while pending and time.monotonic() < until:
            came = self.pull_messages(pending)
            replies += came
            pending -= {reply.metadata.reply_to_message_id for reply in came}
            time.sleep(0 if came else ARRIVING_S)
        return replies

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Sign messages, each for the site that it goes to; put their objects into files, and announce them.

        Returns:
            The names of those that were taken: a site that is no longer registered gets none.
        """
        self._let_go(self._answers)
        announced, contents = list[tuple[Any, Any]](), dict[str, bytes]()
        for message in messages:
            message.metadata.created_at = self._clock()
            self._signing.sign(message)
            tree, parts = split_message(message)
            for name, content in parts.items():
                if name not in contents:
                    self._files.write(name, content)
            contents |= parts
            announced.append((envelope(message), tree))
            sizes, together = [len(content) for content in parts.values()], array_bytes(message.content)
            bound = Bound.on_reply_to(sizes, together, asked_for(message.content))
            self._asked[message.metadata.message_id] = _Asked(_without_content(message), bound)
            self._signing.note_sent(message)
        taken, missing = self._control.push(self._run, announced)
        while missing:  # a message of before let go of them meanwhile
            for name in missing:
                self._files.write(name, contents[name])
            taken, missing = self._control.push(self._run, announced)
        return taken

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Fetch the replies that are complete; one whose content is still on its way waits for the next call.

        Where all have been announced, a look at the files is cheap, and is repeated for a moment.
        """
        self._let_go(self._fetched)
        wanted = list(message_ids)
        lacking = list[Message]()
        if asked := [name for name in wanted if name not in self._announced]:
            for found in self._control.replies(self._run, asked):
                if found.lack is None:
                    self._announced[found.asked] = _Announced(found, object_ids(found.tree))
                else:
                    lacking.append(self._lacking(found.asked, found.lack))
        here, until = self._here(wanted), time.monotonic() + ARRIVING_S
        while not here and not asked and time.monotonic() < until:
            time.sleep(LOOK_S)
            here = self._here(wanted)
        few = dict(itertools.islice(here.items(), AT_A_TIME))
        for name in few:
            del self._announced[name]
        return [*lacking, *(self._reply(one) for one in few.values())]

    def left_replies(self, run: str) -> Iterator[Arrival]:
        """Yield the replies to this run that were taken, and that no process had noted when it ended.

        A reply is let go of, and with it those to other runs, once the caller has noted it and asks for the next.
        """
        for left, tree in self._left:
            name, node = left.metadata.message_id, left.metadata.src_node_id
            objects = {part: content for part in object_ids(tree) if (content := self._files.view(part)) is not None}
            size = sum(map(len, objects.values())) + MORE_BYTES
            with contextlib.suppress(ValueError, SignatureFault):  # cut off, or not signed by the site of that node
                message = join_message(name, objects, size)
                statement = self._signing.statement_of(node, message.content)
                if statement.run == run:
                    yield Arrival(statement.record, statement.round, statement.site, message.content, CAME_WHILE_AWAY)
            self._control.let_go([name])
        self._left = ()

    def close(self) -> None:
        """Let go of the replies that were handed over: the run is done, and has noted them."""
        self._let_go(self._fetched)
        self._let_go(self._answers)

    def _let_go(self, names: list[str]) -> None:
        if names:
            self._control.let_go(names)
            names.clear()

    def _here(self, wanted: Iterable[str]) -> dict[str, "_Announced"]:
        return {name: one for name in wanted if (one := self._announced.get(name)) and self._arrived(one)}

    def _arrived(self, announced: "_Announced") -> bool:
        """Whether all of a reply's content is there, or never will be, or more of it than can be right."""
        missing = [name for name in announced.missing if name and not self._files.has(name)]
        if len(missing) < len(announced.missing):
            came = set(announced.missing) - set(missing)
            announced.size += sum(self._files.size(name) for name in came)
            announced.missing, announced.since = missing, time.monotonic()
        if asked := self._asked.get(announced.asked):
            announced.fault = asked.bound.fault(len(announced.names), announced.size)
        return bool(announced.fault) or not missing or time.monotonic() - announced.since > UPLOAD_STALL_S

    def _reply(self, announced: "_Announced") -> Message:
        name, said = announced.asked, announced.found.envelope.metadata
        if announced.missing and not announced.fault:
            reason = f"its reply was cut off: nothing came for {UPLOAD_STALL_S:.0f} s"
            return self._error(name, NODE_UNAVAILABLE, reason)
        fault, message, request = announced.fault, None, self._asked.get(name)
        bound = request.bound if request else NOTHING
        try:
            contents = {one: self._files.view(one) or b"" for one in announced.names} if not fault else {}
            message = join_message(said.message_id, contents, bound.together) if not fault else None
        except TooLarge:
            fault = bound.weighs_more
        except ValueError as error:
            fault = f"its reply cannot be read: {error}"
        is_answer = request is not None and request.message.metadata.message_type == ROLL_CALL
        (self._answers if is_answer else self._fetched).append(said.message_id)
        # An error holds no record, and is not signed: it counts for nothing but words.
        if message is not None and message.has_content():
            fault = self._signing.fault(name, message)
        if fault or message is None:
            return self._error(name, REFUSED_REPLY, fault)
        self._asked.pop(name, None)
        return message

    def _lacking(self, name: str, lack: Lack) -> Message:
        """An error in the place of a reply that will not come; a site that was stopped said so when it left."""
        code, reason = _LACKS[lack]
        asked = self._asked.get(name)
        if lack is Lack.SITE_GONE and asked is not None:
            site = self.registered().get(asked.message.metadata.dst_node_id)
            if site is None:
                code, reason = REVOKED, NOT_REGISTERED
            elif when := self._signed_off().get(site):
                reason = stopped_at(when)
        return self._error(name, code, reason)

    def _error(self, name: str, code: int, reason: str) -> Message:
        """An error in the place of a reply that is of no use, or will not come."""
        asked = self._asked.pop(name, None)
        if asked is None:  # nothing of this run
            asked = _Asked(Message(RecordDict(), 0, "train", ttl=1.0), NOTHING)
            set_message_id(asked.message, name)
        return Message(Error(code, reason), reply_to=asked.message)


@dataclass(frozen=True)
class _Asked:
    """A message that was sent, without its content, and what its reply may weigh."""

    message: Message
    bound: Bound


@dataclass
class _Announced:
    """A reply that the SuperLink has announced; ``missing`` objects were last fewer at ``since``, ``size`` has come.

    Attributes:
        fault: Why it is refused, no matter what else of it comes.
    """

    found: Announced
    names: list[str]
    since: float = field(default_factory=time.monotonic)
    size: int = 0
    fault: str = ""
    missing: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.missing = [*self.names, ""]  # the empty name: not looked at yet

    @property
    def asked(self) -> str:
        """The message that it answers."""
        return self.found.asked


def _without_content(message: Message) -> Message:
    said = message.metadata
    kept = Message(RecordDict(), said.dst_node_id, said.message_type, ttl=said.ttl, group_id=said.group_id)
    set_message_id(kept, said.message_id)
    return kept
