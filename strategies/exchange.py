"""One exchange with the sites: send, collect, and bear with sites that are lost on the way and come back.

Only Flower's public ``Grid`` is used, so the same loop runs over the network, on Ray and in one process. Flower's own
``send_and_receive`` looks for replies every 3 s, takes a site for lost at the first sign, and then waits for nobody.
"""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from flwr.app import Message
from flwr.serverapp import Grid

FIRST_POLL_S, MAX_POLL_S = 0.005, 0.1
NODE_UNAVAILABLE = 5
"""Flower's code for a site that gives no sign of life: it may come back."""

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


def exchange(grid: Grid, messages: Sequence[Message], patience: Patience, waiting: Waiting) -> list[Message]:
    """Send every message and return the replies; their source is the site, also where Flower itself made an error.

    A lost site that comes back before the deadline gets its message again.
    """
    deadline = time.monotonic() + patience.deadline_s
    replies: dict[int, Message] = {}  # by node
    pending = _pushed(grid, messages)
    lost: dict[int, Message] = {}  # node -> the message it should have had
    poll_s = FIRST_POLL_S
    waiting(_nodes(pending), ())
    while (pending or lost) and time.monotonic() < deadline:
        came = list(grid.pull_messages(list(pending))) if pending else []
        for reply in came:
            if (message := pending.pop(reply.metadata.reply_to_message_id, None)) is None:
                continue
            node = message.metadata.dst_node_id
            reply.metadata.__dict__["_src_node_id"] = node  # errors that the SuperLink makes come from node 1
            replies[node] = reply
            lost.pop(node, None)
            if reply.has_error() and reply.error.code == NODE_UNAVAILABLE:
                lost[node] = message
        if back := _back(grid, lost):
            pending |= _pushed(grid, [_again(lost.pop(node), deadline) for node in back])
        if not pending and not _worth_waiting(replies, lost, patience.enough):
            break
        if came or back:
            waiting(_nodes(pending) | set(lost), set(lost))
            poll_s = FIRST_POLL_S
        elif pending or lost:
            time.sleep(poll_s)
            poll_s = min(poll_s * 1.3, MAX_POLL_S)
    return list(replies.values())


def _pushed(grid: Grid, messages: Sequence[Message]) -> dict[str, Message]:
    """Send; those that the SuperLink does not take, for the site is no longer registered, have no reply."""
    accepted = set(grid.push_messages(messages)) if messages else set()
    return {m.metadata.message_id: m for m in messages if m.metadata.message_id in accepted}


def _worth_waiting(replies: dict[int, Message], lost: dict[int, Message], enough: int) -> bool:
    """Whether lost sites are needed, and would suffice."""
    good = sum(not reply.has_error() for reply in replies.values())
    return good < enough <= good + len(lost)


def _back(grid: Grid, lost: dict[int, Message]) -> list[int]:
    return sorted(set(lost) & set(grid.get_node_ids())) if lost else []


def _again(message: Message, deadline: float) -> Message:
    old = message.metadata
    ttl = max(deadline - time.monotonic(), 1.0)
    return Message(message.content, old.dst_node_id, old.message_type, group_id=old.group_id, ttl=ttl)


def _nodes(pending: dict[str, Message]) -> set[int]:
    return {message.metadata.dst_node_id for message in pending.values()}
