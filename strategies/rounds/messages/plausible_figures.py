"""Figures of a reply that no honest site can send: more epochs than it was asked for, more time than has passed."""

from common.config import Plan
from common.wire.records import TrainReply
from strategies.base.method import Method
from strategies.rounds.messages.requests import SentAt


def too_many_epochs(reply: TrainReply, method: Method, plan: Plan) -> str:
    """Say that a site cannot have trained as many epochs as it says, or return an empty string."""
    if reply.epochs <= (most := most_epochs(method, plan)):
        return ""
    return f"says that it trained {reply.epochs:,} epochs, and was asked for at most {most:,}"


def most_epochs(method: Method, plan: Plan) -> int:
    """Local epochs of a round at most: a site that trains until its loss settles may go on to the rule's end."""
    return max(plan.training.epochs, method.settling.cap if method.settling else 0, 1)


def too_long(reply: TrainReply, asked: SentAt | None) -> str:
    """Say that a site cannot have trained for as long as it says, or return an empty string."""
    if asked is None or reply.seconds <= (longest := asked.longest_s):
        return ""
    return f"says that it trained for {reply.seconds:,.0f} s, and was asked at most {longest:,.0f} s ago"
