"""The quarantine: a reply that cannot count is left out of its exchange, with the reason.

:mod:`common.wire.bounds` has the ranges that hold for any reply. Here is what depends on the round: whose reply it is,
exactly the groups and statistics that were asked for, and figures that fit the plan, the roll call and the clock. An
honest site is never outside: where the coordinator cannot be sure, it says nothing.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from flwr.app import Message
from numpy.typing import NDArray

from common.errors import quoted
from common.system.plain_text import shown
from common.wire.codec import payload_bytes
from common.wire.records import Arrays, BenefitReply, EvaluateReply, Groups, TrainReply
from strategies.aggregation.largest_share import counted_images
from strategies.base.round_record import Arrival
from strategies.rounds.messages.plausible_figures import too_long, too_many_epochs
from strategies.rounds.messages.replies import Replies, Reply, decoded, is_unfit
from strategies.rounds.messages.requests import Requests


def received(
    requests: Requests,
    replies: Iterable[Message],
    expected: type[Reply],
    *,
    on_reply: Callable[[Arrival], None],
    largest_share: float = 1.0,
    keep: Callable[[Reply], Reply] = lambda reply: reply,
    refuse: Callable[[str], None] = lambda site: None,
) -> Replies[Reply]:
    """Decode, match and check replies as they come; each site whose reply does not count has a reason.

    Args:
        requests: Those of the exchange.
        replies: In any order.
        expected: The record that a reply holds.
        on_reply: Receives every reply of a site that was asked.
        largest_share: Of all images, how many one site may count for.
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
            reason = shown(mismatch(requests, record, site))
            sizes[site] = payload_bytes(message.content)
        content = message.content if message.has_content() else None
        requests.frozen.note(site, reason)
        on_reply(Arrival(expected.__name__, requests.known.round, site, content, reason))
        if record is not None and not reason:
            absent.pop(site, None)
            accepted[site] = keep(_capped(requests, record, site, largest_share))
            continue
        absent[site] = reason
        refuse(site)
        if is_unfit(message):
            unfit.add(site)
    return Replies({site: accepted[site] for site in sorted(accepted)}, absent, sizes, frozenset(unfit))


def _capped(requests: Requests, record: Reply, site: str, largest_share: float) -> Reply:
    """The reply, with as many images as count where one site may not weigh more than a share of all."""
    if not isinstance(record, TrainReply) or largest_share >= 1:
        return record
    images = {one: requests.known.answers[one].train_samples for one in requests.expected}
    counted = counted_images(images, largest_share)
    capped: Reply = replace(record, train_samples=counted[site])  # type: ignore[call-arg]
    return capped


def mismatch(requests: Requests, record: TrainReply | EvaluateReply | BenefitReply, site: str) -> str:
    """Say why a well-formed reply does not belong to this exchange, or return an empty string."""
    known, method = requests.known, requests.method
    came, wanted = (record.run, record.round, record.site), (requests.run, known.round, site)
    if came != wanted:
        return f"reply belongs to run, round, site {came}, expected {wanted}"
    if isinstance(record, TrainReply):
        if record.train_samples != (said := known.answers[site].train_samples):
            return f"trained on {record.train_samples} images, said {said} at the roll call"
        expected = method.statistics_shape(known, site, requests.state.model.head.features)
        return (
            fault_in(record.update, requests.expected[site], requests.variances)
            or statistics_fault(record.statistics, expected)
            or too_many_epochs(record, method, requests.plan)
            or too_long(record, requests.sent_at.get(site))
        )
    masked = record.masked_classes if isinstance(record, EvaluateReply) else ()
    strangers = sorted({*record.class_names, *masked} - set(known.contract.sites[site]))
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


def statistics_fault(came: Arrays, expected: Mapping[str, tuple[int, ...]]) -> str:
    """Say why a reply's statistics cannot count, or return an empty string; NaN is "nothing to say"."""
    shapes = {name: array.shape for name, array in came.items()}
    return "" if shapes == dict(expected) else f"statistics are {shapes}, expected {dict(expected)}"


def _array_fault(name: str, came: NDArray[np.float32] | None, expected: NDArray[np.float32] | None) -> str:
    if came is None or expected is None:
        return "" if came is expected else f"{name} was {'not ' if expected is None else ''}expected"
    if came.shape != expected.shape:
        return f"{name} has shape {came.shape}, expected {expected.shape}"
    return "" if np.isfinite(came).all() else f"{name} holds values that are not finite"
