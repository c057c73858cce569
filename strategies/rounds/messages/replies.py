"""The replies of one exchange: how each is decoded, those that count, and why the others do not."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar

from flwr.app import Message

from common.metrics.multi_class import Tally
from common.system.plain_text import shown
from common.wire.codec import R, decode
from common.wire.errors import WireError
from common.wire.records import BenefitReply, EvaluateReply, TrainReply
from strategies.base.round_record import FederationValidation, RoundRecord, TooFewSites
from strategies.rounds.messages.deadline import MESSAGE_GONE, NODE_UNAVAILABLE, REFUSED_REPLY

Reply = TypeVar("Reply", TrainReply, EvaluateReply, BenefitReply)
FLOWERS_WORDS = "Node Unavailable"
"""In the reason that Flower's SuperLink gives where a site shows no sign of life."""
NOT_CONNECTED = "it is not connected: stopped, or cut off"


@dataclass(frozen=True)
class Replies(Generic[Reply]):
    """What came back from one exchange.

    Attributes:
        accepted: Decoded replies by site name, sorted.
        absent: Site name -> why its reply does not count.
        bytes_up: Site name -> bytes received.
        unfit: The sites that replied with what cannot count; they are among the absent.
    """

    accepted: Mapping[str, Reply]
    absent: Mapping[str, str]
    bytes_up: Mapping[str, int]
    unfit: frozenset[str] = frozenset()

    def without(self, dropped: Mapping[str, str]) -> "Replies[Reply]":
        """These, but for sites whose replies do not count after all, each with the reason."""
        accepted = {site: reply for site, reply in self.accepted.items() if site not in dropped}
        return replace(self, accepted=accepted, absent={**self.absent, **dropped})


def is_unfit(message: Message) -> bool:
    """Whether a reply that does not count came from its site: it has content, or our own link refused what it has.

    Another error is an honest site's way to say that it cannot go on, and a lost site's silence.
    """
    return message.has_content() or message.error.code == REFUSED_REPLY


def decoded(message: Message, expected: type[R]) -> tuple[R | None, str]:
    """The typed reply, or the reason why there is none.

    Here words of a site enter, those of an error reply and those that an error of ours repeats; from here on they are
    escaped and cut (:func:`common.system.plain_text.shown`).
    """
    if message.has_error():
        if message.error.code in MESSAGE_GONE:
            return None, "the site left the federation before it replied"
        if message.error.code == NODE_UNAVAILABLE and FLOWERS_WORDS in (message.error.reason or ""):
            return None, NOT_CONNECTED
        return None, shown(_unwrapped(message.error.reason or "")) or f"error {message.error.code}"
    try:
        return decode(message.content, expected), ""
    except WireError as error:
        return None, shown(str(error))


def _unwrapped(reason: str) -> str:
    """What the site said, without the class that Flower's simulation wraps it in: ``<class 'X'>:<'what it said'>``."""
    wrapped = re.fullmatch(r"<class '[\w.]+'>:<'(.*)'>", reason, re.DOTALL)
    return wrapped[1] if wrapped else reason


def figure_of(replies: Mapping[str, TrainReply], what: Literal["train_loss", "epsilon"]) -> dict[str, float]:
    """One figure of replies, by site; who does not tell it is left out."""
    figures = {site: getattr(reply, what) for site, reply in replies.items()}
    return {site: figure for site, figure in figures.items() if figure is not None}


def round_record(server_round: int, replies: Mapping[str, TrainReply], **figures: Any) -> RoundRecord:
    """What happened in a round: what its replies say, and the figures that the coordinator has."""
    return RoundRecord(
        round=server_round,
        sites=tuple(replies),
        train_loss=figure_of(replies, "train_loss"),
        site_seconds={site: reply.seconds for site, reply in replies.items()},
        epochs={site: reply.epochs for site, reply in replies.items()},
        epsilon=figure_of(replies, "epsilon"),
        arithmetic={site: reply.arithmetic for site, reply in replies.items()},
        **figures,
    )


def validation_of(replies: Mapping[str, TrainReply] | Mapping[str, EvaluateReply]) -> FederationValidation:
    """The validation figures of replies; who has none is left out."""
    return FederationValidation(
        {site: reply.validation_loss for site, reply in replies.items() if reply.validation_loss is not None},
        {site: reply.validation_auroc for site, reply in replies.items() if reply.validation_auroc is not None},
        {
            site: Tally(reply.test_correct, reply.test_images)
            for site, reply in replies.items()
            if reply.test_correct is not None and reply.test_images is not None
        },
    )


def too_few(what: str, came: Replies[Reply], wanted: int) -> TooFewSites:
    """Who replied to what, and why the others did not."""
    reasons = "; ".join(f"{site}: {why}" for site, why in came.absent.items())
    return TooFewSites(f"{what}: {len(came.accepted)} of {wanted} sites replied. {reasons}")
