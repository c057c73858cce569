"""The replies of one exchange: how each is decoded and checked, those that count, and why the others do not.

:mod:`common.wire.bounds` has the ranges that hold for any reply. Here is what depends on the round: whose reply it is,
exactly the groups and statistics that were asked for, and figures that fit the plan, the roll call and the clock. An
honest site is never outside: where the coordinator cannot be sure, it says nothing."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar

import numpy as np
from flwr.app import Message
from numpy.typing import NDArray

from common.config import Plan
from common.errors import WireError, quoted
from common.metrics.multi_class import Tally
from common.system.plain_text import printable
from common.wire.codec import R, decode, payload_bytes
from common.wire.records import Arrays, BenefitReply, EvaluateReply, Groups, TrainReply
from strategies.engine.exchange import MESSAGE_GONE, NODE_UNAVAILABLE, REFUSED_REPLY
from strategies.engine.requests import Requests, SentAt
from strategies.engine.round_record import Arrival, FederationValidation, RoundRecord, TooFewSites
from strategies.local.site_method import most_epochs
from strategies.methods.base import Method

Reply = TypeVar("Reply", TrainReply, EvaluateReply, BenefitReply)
FLOWERS_WORDS = "Node Unavailable"
"""In the reason that Flower's SuperLink gives where a site shows no sign of life."""
NOT_CONNECTED = "it is not connected: stopped, or cut off"


@dataclass(frozen=True)
class Replies(Generic[Reply]):
    """The replies of one exchange.

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
        """Return the replies without those of sites that do not count after all, each with the reason."""
        accepted = {site: reply for site, reply in self.accepted.items() if site not in dropped}
        return replace(self, accepted=accepted, absent={**self.absent, **dropped})


def is_unfit(message: Message) -> bool:
    """Return whether a site itself sent a reply that does not count: it has content, or our link refused its content.

    Another error is an honest site's way to say that it cannot go on, and a lost site's silence.
    """
    return message.has_content() or message.error.code == REFUSED_REPLY


def decoded(message: Message, expected: type[R]) -> tuple[R | None, str]:
    """Return the typed reply, or the reason why there is none.

    Here words of a site enter, those of an error reply and those that an error of ours repeats; from here on they are
    escaped and cut (:func:`common.system.plain_text.printable`).
    """
    if message.has_error():
        if message.error.code in MESSAGE_GONE:
            return None, "the site left the federation before it replied"
        if message.error.code == NODE_UNAVAILABLE and FLOWERS_WORDS in (message.error.reason or ""):
            return None, NOT_CONNECTED
        return None, printable(_unwrapped(message.error.reason or "")) or f"error {message.error.code}"
    try:
        return decode(message.content, expected), ""
    except WireError as error:
        return None, printable(str(error))


def _unwrapped(reason: str) -> str:
    """Return the site's own words, without what Flower's simulation wraps them in: ``<class 'X'>:<'its words'>``."""
    wrapped = re.fullmatch(r"<class '[\w.]+'>:<'(.*)'>", reason, re.DOTALL)
    return wrapped[1] if wrapped else reason


def figure_of(replies: Mapping[str, TrainReply], what: Literal["train_loss", "epsilon"]) -> dict[str, float]:
    """Return one figure of replies by site; a site that does not send it is left out."""
    figures = {site: getattr(reply, what) for site, reply in replies.items()}
    return {site: figure for site, figure in figures.items() if figure is not None}


def round_record(server_round: int, replies: Mapping[str, TrainReply], **figures: Any) -> RoundRecord:
    """Return the record of a round from its replies and from figures that the coordinator has."""
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
    """Return the validation figures of replies; a site that has none is left out."""
    return FederationValidation(
        {site: reply.validation_loss for site, reply in replies.items() if reply.validation_loss is not None},
        {site: reply.validation_auroc for site, reply in replies.items() if reply.validation_auroc is not None},
        {
            site: Tally(reply.test_correct, reply.test_images)
            for site, reply in replies.items()
            if reply.test_correct is not None and reply.test_images is not None
        },
    )


def too_few(what: str, replies: Replies[Reply], wanted: int) -> TooFewSites:
    """Return an error that names the sites that did not reply, each with its reason."""
    reasons = "; ".join(f"{site}: {why}" for site, why in replies.absent.items())
    return TooFewSites(f"{what}: {len(replies.accepted)} of {wanted} sites replied. {reasons}")


def received(
    requests: Requests,
    replies: Iterable[Message],
    expected: type[Reply],
    *,
    on_reply: Callable[[Arrival], None],
    keep: Callable[[Reply], Reply] = lambda reply: reply,
    refuse: Callable[[str], None] = lambda site: None,
) -> Replies[Reply]:
    """Decode, match and check replies as they come; each site whose reply does not count has a reason.

    Args:
        requests: Those of the exchange.
        replies: In any order.
        expected: The record that a reply holds.
        on_reply: Receives every reply of a site that was asked.
        keep: What is kept of a good reply.
        refuse: Receives at once the name of a site whose reply does not count.
    """
    names = {node: site for site, node in requests.nodes.items()}
    absent = dict.fromkeys(requests.expected, f"no reply within {requests.deadline_s:.0f} s")
    accepted: dict[str, Reply] = {}
    sizes: dict[str, int] = {}
    unfit: set[str] = set()
    for message in replies:
        site = names.get(message.metadata.src_node_id, "")
        if site not in requests.expected:
            continue
        record, reason = decoded(message, expected)
        if record is not None:
            reason = printable(mismatch(requests, record, site))
            sizes[site] = payload_bytes(message.content)
        content = message.content if message.has_content() else None
        requests.frozen.note(site, reason)
        on_reply(Arrival(expected.__name__, requests.context.round, site, content, reason))
        if record is not None and not reason:
            absent.pop(site, None)
            accepted[site] = keep(record)
            continue
        absent[site] = reason
        refuse(site)
        if is_unfit(message):
            unfit.add(site)
    return Replies({site: accepted[site] for site in sorted(accepted)}, absent, sizes, frozenset(unfit))


def mismatch(requests: Requests, record: TrainReply | EvaluateReply | BenefitReply, site: str) -> str:
    """Say why a well-formed reply does not belong to this exchange, or return an empty string."""
    context, method = requests.context, requests.method
    belongs, wanted = (record.run, record.round, record.site), (requests.run, context.round, site)
    if belongs != wanted:
        return f"reply belongs to run, round, site {belongs}, expected {wanted}"
    if isinstance(record, TrainReply):
        if record.train_samples != (stated := context.answers[site].train_samples):
            return f"trained on {record.train_samples} images, said {stated} at the roll call"
        expected = method.statistics_shape(context, site, requests.state.model.head.features)
        return (
            fault_in(record.update, requests.expected[site], requests.variances)
            or statistics_fault(record.statistics, expected)
            or too_many_epochs(record, method, requests.plan)
            or too_long(record, requests.sent_at.get(site))
        )
    masked = record.masked_classes if isinstance(record, EvaluateReply) else ()
    strangers = sorted({*record.class_names, *masked} - set(context.contract.sites[site]))
    if strangers:
        return f"tested {quoted(strangers)}, which it does not annotate"
    metrics = record.metric_names if isinstance(record, EvaluateReply) else ()
    unasked = sorted(set(metrics) - set(requests.plan.evaluation.metrics))
    return f"sent the metrics {quoted(unasked)}, which the plan does not ask for" if unasked else ""


def fault_in(update: Groups, sent: Groups, variances: Sequence[slice] = ()) -> str:
    """Say why an update cannot count, or return an empty string.

    Args:
        update: What came.
        sent: The groups expected back, as they went out.
        variances: Places of the running variances in batch normalisation.
    """
    for name in ("trunk", "norm"):
        if reason := _array_fault(name, getattr(update, name), getattr(sent, name)):
            return reason
    if update.norm is not None and sent.norm is not None:
        for place in variances:
            before = sent.norm[place].astype(np.float64)
            if (before + update.norm[place] < -1e-3 * (1 + np.abs(before))).any():  # more than rounding
                return "it makes a variance of batch normalisation negative"
    if update.form != sent.form:
        return f"trunk travels as {update.form}, expected {sent.form}"
    if (update.head is None) != (sent.head is None):
        return f"head was {'not ' if sent.head is None else ''}expected"
    if update.head is None or sent.head is None:
        return ""
    if update.head.class_names != sent.head.class_names:
        return f"head rows are {list(update.head.class_names)}, expected {list(sent.head.class_names)}"
    return _array_fault("head.weight", update.head.weight, sent.head.weight) or _array_fault(
        "head.bias", update.head.bias, sent.head.bias
    )


def statistics_fault(statistics: Arrays, expected: Mapping[str, tuple[int, ...]]) -> str:
    """Say why a reply's statistics cannot count, or return an empty string; NaN is "nothing to say"."""
    shapes = {name: array.shape for name, array in statistics.items()}
    return "" if shapes == dict(expected) else f"statistics are {shapes}, expected {dict(expected)}"


def _array_fault(name: str, array: NDArray[np.float32] | None, expected: NDArray[np.float32] | None) -> str:
    if array is None or expected is None:
        return "" if array is expected else f"{name} was {'not ' if expected is None else ''}expected"
    if array.shape != expected.shape:
        return f"{name} has shape {array.shape}, expected {expected.shape}"
    return "" if np.isfinite(array).all() else f"{name} holds values that are not finite"


def too_many_epochs(reply: TrainReply, method: Method, plan: Plan) -> str:
    """Say that a site cannot have trained as many epochs as it says, or return an empty string."""
    if reply.epochs <= (most := most_epochs(method.site, plan)):
        return ""
    return f"says that it trained {reply.epochs:,} epochs, and was asked for at most {most:,}"


def too_long(reply: TrainReply, sent_at: SentAt | None) -> str:
    """Say that a site cannot have trained for as long as it says, or return an empty string."""
    if sent_at is None or reply.seconds <= (longest := sent_at.longest_s):
        return ""
    return f"says that it trained for {reply.seconds:,.0f} s, and was asked at most {longest:,.0f} s ago"
