"""A Grid whose sites answer by script, under a clock that only their waiting moves."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from flwr.app import ConfigRecord, Error, Message, RecordDict

from polyclinic.common.wire.codec import encode_record
from polyclinic.common.wire.flower_messages import replace_metadata
from polyclinic.common.wire.records import Record

SUPERLINK = 1
LOST = 5
"""Flower's code for a site that gives no sign of life."""

Makes = Callable[[Message], Message]


class Clock:
    """Stands still while anything is computed; fails where a loop has no end."""

    def __init__(self) -> None:
        self.now = 0.0
        self._looks = 0

    def monotonic(self) -> float:
        self._looks += 1
        assert self._looks < 1000, "the clock is looked at for ever"
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        assert self.now < 1000, "waits for ever"
        self.now += seconds
        self._looks = 0


@dataclass(frozen=True)
class Answer:
    """What becomes of one message: ``make`` of it arrives so long after it was sent."""

    after_s: float
    make: Makes


@dataclass
class Site:
    """A site: its answers to the first, second, ... message, none to those after; when it is away, ``[from, to)``."""

    answers: Sequence[Answer] = ()
    away: tuple[float, float] = (0.0, 0.0)
    registered: bool = True


@dataclass
class ScriptedGrid:
    """Of Flower's Grid what our code calls.

    Attributes:
        sent: Every message that was accepted, in order, with the time.
        strays: Replies to messages of long ago, that come with the first ones asked for.
    """

    sites: Mapping[int, Site]
    clock: Clock
    sent: list[tuple[float, Message]] = field(default_factory=list)
    strays: list[Message] = field(default_factory=list)
    _due: dict[str, tuple[float, Message]] = field(default_factory=dict)

    def get_node_ids(self) -> list[int]:
        return [node for node, site in self.sites.items() if not site.away[0] <= self.clock.now < site.away[1]]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        registered = {node for node, site in self.sites.items() if site.registered}
        return [self._push(message) if message.metadata.dst_node_id in registered else "" for message in messages]

    def _push(self, message: Message) -> str:
        node = message.metadata.dst_node_id
        before = len(self.to(node))
        identifier = f"message {len(self.sent)}"
        message = replace_metadata(message, message_id=identifier)
        self.sent.append((self.clock.now, message))
        for answer in self.sites[node].answers[before : before + 1]:
            self._due[identifier] = (self.clock.now + answer.after_s, answer.make(message))
        return identifier

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        there = [name for name in message_ids if name in self._due and self._due[name][0] <= self.clock.now]
        strays, self.strays = self.strays, []
        return [*strays, *(self._due.pop(name)[1] for name in there)]

    def to(self, node: int) -> list[Message]:
        """What was sent to one site."""
        return [message for _, message in self.sent if message.metadata.dst_node_id == node]


def reply(text: str) -> Makes:
    """A good reply with this text."""
    return lambda message: Message(RecordDict({"reply": ConfigRecord({"text": text})}), reply_to=message)


def record(content: Record) -> Makes:
    """A reply that is this record."""
    return lambda message: Message(encode_record(content), reply_to=message)


def text(message: Message) -> str:
    """The text of a reply of :func:`reply`."""
    return str(message.content["reply"]["text"])


def failed(code: int, reason: str) -> Makes:
    """An error, as a site sends it."""
    return lambda message: Message(Error(code, reason), reply_to=message)


def lost(message: Message) -> Message:
    """The error that the SuperLink makes in the place of a site that is lost."""
    return replace_metadata(failed(LOST, "no sign of life")(message), src_node_id=SUPERLINK)


def at(after_s: float, make: Makes) -> Site:
    """A site that answers once."""
    return Site([Answer(after_s, make)])
