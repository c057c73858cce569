"""Figures of a reply against what the coordinator knows itself: the plan, the roll call, the clock.

:mod:`common.wire.bounds` has the ranges that hold for any reply. Here is what depends on the round. An honest site is
never outside: where the coordinator cannot be sure, it says nothing.
"""

import time
from dataclasses import dataclass, field

from common.config import Plan
from common.wire.records import TrainReply
from strategies.base.method import Method

SLACK, SLACK_S = 1.1, 60.0
"""A site's clock may run a little faster than the coordinator's."""


@dataclass(frozen=True)
class SentAt:
    """When a request was sent, by both clocks: the one stands still while a machine sleeps, the other may be set."""

    monotonic: float = field(default_factory=time.monotonic)
    wall: float = field(default_factory=time.time)

    @property
    def longest_s(self) -> float:
        """Seconds that a site can have worked on it."""
        return SLACK * max(time.monotonic() - self.monotonic, time.time() - self.wall) + SLACK_S


def too_many_epochs(reply: TrainReply, method: Method, plan: Plan) -> str:
    """Say that a site cannot have trained as many epochs as it says, or return an empty string."""
    if reply.epochs <= (most := most_epochs(method, plan)):
        return ""
    return f"says that it trained {reply.epochs:,} epochs, and was asked for at most {most:,}"


def too_long(reply: TrainReply, asked: SentAt | None) -> str:
    """Say that a site cannot have trained for as long as it says, or return an empty string."""
    if asked is None or reply.seconds <= (longest := asked.longest_s):
        return ""
    return f"says that it trained for {reply.seconds:,.0f} s, and was asked at most {longest:,.0f} s ago"


def most_epochs(method: Method, plan: Plan) -> int:
    """Local epochs of a round at most: a site that trains until its loss settles may go on to the rule's end."""
    return max(plan.training.epochs, method.settling.cap if method.settling else 0, 1)
