"""One exchange with the sites: send, collect, and bear with sites that are lost on the way and come back.

Only Flower's public ``Grid`` is used, so the same loop runs over the network, on Ray and in one process. Flower's own
``send_and_receive`` looks for replies every 3 s, takes a site for lost at the first sign, and then waits for nobody.
"""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from flwr.app import Message
from flwr.serverapp import Grid

FIRST_POLL_S, MAX_POLL_S = 0.02, 0.1
CLOCKS_DIFFER_S = 1.0
NODE_UNAVAILABLE = 5
"""Flower's code for a site that gives no sign of life: it may come back."""
REFUSED_REPLY = 203
"""Our code for a reply that came and was refused before it was read: not signed by its site, or far too heavy."""
MESSAGE_GONE = (3, 4)
"""Flower's codes for a message or reply that the SuperLink no longer has: its time ran out, or its site was removed."""

Waiting = Callable[[Collection[int], Collection[int]], None]
"""Told the nodes that have not replied yet, and those of them that are lost, whenever either changes."""


@dataclass(frozen=True)
class Patience:
    """How long an exchange goes on.

    Attributes:
        deadline_s: After it, whoever is missing is missing.
        enough: Good replies that make it worth not waiting for sites that are *lost*; sites at work are waited for.
    """

    deadline_s: float
    enough: int


class Pauses:
    """Between two looks for replies: short at first, longer where nothing comes."""

    def __init__(self) -> None:
        self._next_s = FIRST_POLL_S

    def begin(self) -> None:
        """Something came: more may be on its way."""
        self._next_s = FIRST_POLL_S

    def wait(self) -> None:
        """Sleep."""
        time.sleep(self._next_s)
        self._next_s = min(self._next_s * 1.3, MAX_POLL_S)


def exchange(grid: Grid, messages: Sequence[Message], patience: Patience, waiting: Waiting) -> Iterator[Message]:
    """Send every message and yield the replies; their source is the site, also where Flower itself made an error.

    Good replies are yielded as they come and not kept, errors at the end: a lost site that comes back before the
    deadline gets its message again.
    """
    deadline = time.monotonic() + patience.deadline_s
    good, errors = 0, dict[int, Message]()  # by node
    pending = pushed(grid, messages)
    silent = _nodes(pending)  # by message
    lost: dict[int, Message] = {}  # node -> the message it should have had
    pauses = Pauses()
    waiting(set(silent.values()), ())
    while (pending or lost) and time.monotonic() < deadline:
        came = False
        for reply in grid.pull_messages(list(pending)) if pending else ():
            if (message := pending.pop(reply.metadata.reply_to_message_id, None)) is None:
                continue
            node = silent.pop(reply.metadata.reply_to_message_id)
            if _gone(reply) and time.monotonic() >= deadline - CLOCKS_DIFFER_S:
                continue  # the deadline is here; the SuperLink saw it first
            came = True
            reply.metadata.__dict__["_src_node_id"] = node  # errors that the SuperLink makes come from node 1
            lost.pop(node, None)
            errors.pop(node, None)
            if not reply.has_error():
                good += 1
                yield reply
                continue
            errors[node] = reply
            if reply.error.code == NODE_UNAVAILABLE:
                lost[node] = message
        if back := _back(grid, lost):
            again = pushed(grid, [_again(lost.pop(node), deadline) for node in back])
            pending |= again
            silent |= _nodes(again)
        if not pending and not good < patience.enough <= good + len(lost):  # lost sites are needed, and would suffice
            break
        if came or back:
            waiting({*silent.values(), *lost}, set(lost))
            pauses.begin()
        elif pending or lost:
            pauses.wait()
    yield from errors.values()


def pushed(grid: Grid, messages: Sequence[Message]) -> dict[str, Message]:
    """Send; return what was taken, by id. A message to a site that is no longer registered is not, and has no reply."""
    accepted = set(grid.push_messages(messages)) if messages else set()
    return {m.metadata.message_id: m for m in messages if m.metadata.message_id in accepted}


def _gone(reply: Message) -> bool:
    return reply.has_error() and reply.error.code in MESSAGE_GONE


def _back(grid: Grid, lost: dict[int, Message]) -> list[int]:
    return sorted(set(lost) & set(grid.get_node_ids())) if lost else []


def _again(message: Message, deadline: float) -> Message:
    old = message.metadata
    ttl = max(deadline - time.monotonic(), 1.0)
    return Message(message.content, old.dst_node_id, old.message_type, group_id=old.group_id, ttl=ttl)


def _nodes(sent: dict[str, Message]) -> dict[str, int]:
    return {name: message.metadata.dst_node_id for name, message in sent.items()}
