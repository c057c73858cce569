"""One exchange with the sites: send, collect, and bear with sites that are lost on the way and come back.

Only Flower's public ``Grid`` is used, so the same loop runs over the network, on Ray and in one process. Flower's own
``send_and_receive`` looks for replies every 3 s, takes a site for lost at the first sign, and then waits for nobody.
"""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from flwr.app import Error, Message
from flwr.serverapp import Grid

from common.wire.flower_objects import set_source

FIRST_POLL_S, MAX_POLL_S = 0.02, 0.1
CLOCKS_DIFFER_S = 1.0
NODE_UNAVAILABLE = 5
"""Flower's code for a site that gives no sign of life: it may come back."""
REVOKED, NOT_REGISTERED = 204, "its key is not admitted any more"
"""Our code for a site that is no longer registered, and its words: it gets no work again."""
REFUSED_REPLY = 203
"""Our code for a reply that came and was refused before it was read: not signed by its site, or far too heavy."""
MESSAGE_GONE = (3, 4)
"""Flower's codes for a message or reply that the SuperLink no longer has: its time ran out, or its site was removed."""

Registered = Callable[[], Collection[int]]
"""The nodes of the sites that may take part, connected or not."""
Waiting = Callable[[Collection[int], Collection[int]], None]
"""Told the nodes that have not replied yet, and those of them that are lost, whenever either changes."""


@dataclass(frozen=True)
class Patience:
    """How long an exchange goes on.

    Attributes:
        deadline_s: After it, the round goes on without the missing sites.
        enough: Good replies that make it worth not waiting for sites that are *lost*; sites at work are waited for.
    """

    deadline_s: float
    enough: int


class Pauses:
    """Between two looks for replies: short at first, longer where nothing comes."""

    def __init__(self) -> None:
        self._next_s = FIRST_POLL_S

    def begin(self) -> None:
        """Look often again: something arrived, and more may be on its way."""
        self._next_s = FIRST_POLL_S

    def wait(self) -> None:
        """Sleep."""
        time.sleep(self._next_s)
        self._next_s = min(self._next_s * 1.3, MAX_POLL_S)


def exchange(
    grid: Grid,
    messages: Sequence[Message],
    patience: Patience,
    waiting: Waiting,
    registered: Registered | None = None,
) -> Iterator[Message]:
    """Send every message and yield the replies; their source is the site, also where Flower itself made an error.

    Good replies are yielded as they come and not kept, errors at the end: a lost site that comes back before the
    deadline gets its message again, unless it is no longer registered.
    """
    going = Outstanding(grid, time.monotonic() + patience.deadline_s)
    going.send(messages)
    pauses = Pauses()
    waiting(*going.nodes)
    while (going.pending or going.lost) and time.monotonic() < going.deadline:
        arrived = False
        for reply in going.pulled():
            arrived = True
            if going.counts(reply):
                yield reply
        back = going.refuse_revoked(registered) | going.send_again()
        lost_are_needed = going.good < patience.enough <= going.good + len(going.lost)
        if not going.pending and not lost_are_needed:
            break
        if arrived or back:
            waiting(*going.nodes)
            pauses.begin()
        elif going.pending or going.lost:
            pauses.wait()
    yield from going.errors.values()


class Outstanding:
    """The messages of an exchange that have no good reply yet.

    Attributes:
        pending: Message id -> the message, which is at its site.
        lost: Node -> the message that it should have had.
        errors: Node -> its last reply, an error.
        good: Number of good replies.
    """

    def __init__(self, grid: Grid, deadline: float) -> None:
        self._grid, self.deadline, self.good = grid, deadline, 0
        self.pending: dict[str, Message] = {}
        self.lost: dict[int, Message] = {}
        self.errors: dict[int, Message] = {}

    @property
    def nodes(self) -> tuple[set[int], set[int]]:
        """Return the nodes without a good reply, and those of them that are lost."""
        return {*(message.metadata.dst_node_id for message in self.pending.values()), *self.lost}, set(self.lost)

    def send(self, messages: Sequence[Message]) -> None:
        """Send; a message to a site that is no longer registered is not waited for."""
        taken = pushed(self._grid, messages)
        self.pending |= taken
        for message in (each for each in messages if each.metadata.message_id not in taken):
            self._refuse(message)

    def refuse_revoked(self, registered: Registered | None) -> bool:
        """Wait no longer for lost sites that are not registered any more; return whether there were any."""
        revoked = sorted(set(self.lost) - set(registered())) if self.lost and registered else []
        for node in revoked:
            self._refuse(self.lost.pop(node))
        return bool(revoked)

    def _refuse(self, message: Message) -> None:
        refusal = Message(Error(REVOKED, NOT_REGISTERED), reply_to=message)
        set_source(refusal, message.metadata.dst_node_id)
        self.errors[message.metadata.dst_node_id] = refusal

    def pulled(self) -> Iterator[Message]:
        """Yield the replies that have arrived, each from its site's node."""
        for reply in self._grid.pull_messages(list(self.pending)) if self.pending else ():
            if (message := self.pending.pop(reply.metadata.reply_to_message_id, None)) is None:
                continue
            gone = reply.has_error() and reply.error.code in MESSAGE_GONE
            if gone and time.monotonic() >= self.deadline - CLOCKS_DIFFER_S:
                continue  # the deadline is here; the SuperLink saw it first
            node = message.metadata.dst_node_id
            set_source(reply, node)  # errors that the SuperLink makes come from node 1
            self.lost.pop(node, None)
            if reply.has_error() and reply.error.code == NODE_UNAVAILABLE:
                self.lost[node] = message
            yield reply

    def counts(self, reply: Message) -> bool:
        """Return whether a reply is a good one; an error is kept for the end."""
        node = reply.metadata.src_node_id
        self.errors.pop(node, None)
        if reply.has_error():
            self.errors[node] = reply
            return False
        self.good += 1
        return True

    def send_again(self) -> bool:
        """Send lost sites that are back their messages again; return whether there were any."""
        back = sorted(set(self.lost) & set(self._grid.get_node_ids())) if self.lost else []
        ttl, messages = max(self.deadline - time.monotonic(), 1.0), list[Message]()
        for lost in (self.lost.pop(node) for node in back):
            old = lost.metadata
            messages.append(Message(lost.content, old.dst_node_id, old.message_type, group_id=old.group_id, ttl=ttl))
        self.send(messages)
        return bool(back)


def pushed(grid: Grid, messages: Sequence[Message]) -> dict[str, Message]:
    """Send; return what was taken, by id. A message to a site that is no longer registered is not, and has no reply."""
    accepted = set(grid.push_messages(messages)) if messages else set()
    return {m.metadata.message_id: m for m in messages if m.metadata.message_id in accepted}
