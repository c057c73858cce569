"""One exchange of messages with the sites: make and send requests, receive replies, and reject invalid replies.

A site that loses its connection during an exchange may come back. Only Flower's public ``Grid`` is used, so the same
code runs over the network, on Ray and in one process. Flower's own ``send_and_receive`` polls every 3 s, treats a site
as lost at the first missed sign of life, and then stops waiting for every site.

:mod:`polyclinic.common.wire.bounds` checks the ranges that hold for any reply. This module checks what depends on the
round: the sender, the expected model parts and statistics, and figures that fit the plan, the roll call and the elapsed
time. The checks never reject an honest site: a reply that cannot be judged counts.
"""

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from flwr.app import Error, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from polyclinic.common.config import HospitalPlan
from polyclinic.common.errors import WireError, quote_names
from polyclinic.common.models.state import FROZEN_PART_MISSING, FrozenPart, ModelState
from polyclinic.common.system.plain_text import make_printable_line
from polyclinic.common.wire.codec import AnyRecord, WrittenArrays, count_payload_bytes, decode_record, encode_record
from polyclinic.common.wire.flower_messages import make_request, replace_metadata
from polyclinic.common.wire.records import (
    Arrays,
    BenefitReply,
    EvaluateReply,
    EvaluateRequest,
    ModelGroups,
    Request,
    RollCallAnswer,
    TrainReply,
    TrainRequest,
)
from polyclinic.strategies.engine.events import ReplyArrival, TooFewSites
from polyclinic.strategies.engine.state import FederationState, select_reply_model_groups, select_site_model_groups
from polyclinic.strategies.local.site_method import compute_largest_epoch_count
from polyclinic.strategies.methods.base import Method, RoundContext

if TYPE_CHECKING:
    from polyclinic.strategies.engine.aggregator import Aggregator
    from polyclinic.strategies.engine.layers import CoordinatorRoundLayer

FIRST_POLL_S, MAX_POLL_S = 0.02, 0.1
CLOCK_DIFFERENCE_S = 1.0
NODE_UNAVAILABLE = 5
"""Flower's error code for a site without a sign of life; the site may come back."""
MAX_MISSING_REPORTED_AT_ONCE, REPORT_INTERVAL_S = 100, 1.0
"""Up to this many missing sites are reported at each change; more of them at most once in this interval."""
REVOKED_ERROR_CODE, REVOKED_ERROR_MESSAGE = 204, "its key is not admitted any more"
"""Our error code and message for a site that is no longer registered; the site gets no more work."""
REFUSED_REPLY = 203
"""Our error code for a reply that was rejected without reading it: not signed by its site, or far too large."""
MESSAGE_GONE = (3, 4)
"""Flower's error codes for a message or reply that the SuperLink deleted: it expired, or its site was removed."""
COORDINATOR_CODES = frozenset({*MESSAGE_GONE, NODE_UNAVAILABLE, REVOKED_ERROR_CODE, REFUSED_REPLY})
"""Error codes that only the coordinator's own programs set; a site that writes one gets :data:`SITE_FAILED`."""
SITE_FAILED = 2
"""Flower's error code for a site whose app failed."""
UNAVAILABLE_NODE_MESSAGE = "Node Unavailable"
"""Part of the error text of Flower's SuperLink for a site without a sign of life."""
NOT_CONNECTED_REASON = "it is not connected: stopped, or cut off"
CLOCK_RATE_TOLERANCE, CLOCK_TOLERANCE_S = 1.1, 60.0
"""Tolerances for a site whose clock runs faster than the coordinator's: a factor, and seconds."""

Reply = TypeVar("Reply", TrainReply, EvaluateReply, BenefitReply)
Q = TypeVar("Q", bound=Request)
Waiting = Callable[[Collection[int], Collection[int]], None]
"""Receives the nodes that have not replied, and the disconnected ones among them, whenever either changes."""


# ---------------------------------------------------------------------- requests


@dataclass
class FrozenModelPartDelivery:
    """Sends the frozen part of a model, which is not trained, only to sites that do not store it yet.

    Attributes:
        part: The values of the frozen part.
        held: Sites that store the frozen part, because they sent a valid reply in this run.
        lost: Sites that reported the frozen part as missing.
    """

    part: FrozenPart
    held: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)

    def get_frozen_part_for_site(self, site: str, *, held_before: bool) -> ModelGroups:
        """Return the frozen part of the model if a site still needs it, otherwise an object without arrays.

        Args:
            held_before: True if the site stated at the roll call that it stores the frozen part.
        """
        needed = site in self.lost or not (held_before or site in self.held)
        return ModelGroups(trunk=self.part.values) if needed else ModelGroups()

    def record_frozen_part_at_site(self, site: str, fault: str) -> None:
        """Record, from the check of a site's reply, that the site stores or lacks the frozen part of the model.

        Args:
            fault: Why the reply does not count; empty if it counts, which shows that the site stores the part.
        """
        if not fault:
            self.held.add(site)
            self.lost.discard(site)
        elif FROZEN_PART_MISSING in fault:
            self.lost.add(site)


@dataclass(frozen=True)
class RequestSendTime:
    """The time when a request was sent, by two clocks.

    The monotonic clock may stop while a machine sleeps, and the wall clock may be changed by hand; so both are read.
    """

    monotonic: float = field(default_factory=time.monotonic)
    wall: float = field(default_factory=time.time)

    @property
    def max_possible_work_s(self) -> float:
        """Return the longest time in seconds that a site can have worked on the request so far."""
        return (
            CLOCK_RATE_TOLERANCE * max(time.monotonic() - self.monotonic, time.time() - self.wall) + CLOCK_TOLERANCE_S
        )


@dataclass
class ExchangeRequests:
    """Makes the requests of one exchange with the sites, and records what their replies must contain.

    Attributes:
        plan_json: The plan as hospitals receive it, in JSON.
        deadline_s: Seconds after which the exchange ends.
        context: The label contract (the classes that each site annotates), the round, and the data for the method.
        answers: Site -> its answer to the roll call, for all members of the run.
        images: Site -> number of images that counts for it, for the sites that claim too many.
        state: The coordinator's state at the beginning of the exchange.
        result_round: Round of the current result model; -1 for none.
        nodes: Site -> id of its Flower node.
        total_down: Site -> bytes sent to it in the whole run; :meth:`make_flower_message` adds to it.
        frozen: Delivery of the part of the model that is not trained; None if everything is trained.
        due_updates: Site -> the model groups that its reply must contain, with the values that were sent.
        sent_at: Site -> time of its request.
        bytes_down: Site -> bytes sent in this exchange.
        encoded_arrays: Arrays in the form in which they are sent, encoded once for all sites.
    """

    method: Method
    plan: HospitalPlan
    plan_json: str
    run: str
    deadline_s: float
    context: RoundContext
    answers: Mapping[str, RollCallAnswer]
    images: Mapping[str, int]
    state: FederationState
    result_round: int
    nodes: Mapping[str, int]
    total_down: Counter[str]
    frozen: FrozenModelPartDelivery | None = None
    due_updates: dict[str, ModelGroups] = field(default_factory=dict)
    sent_at: dict[str, RequestSendTime] = field(default_factory=dict)
    bytes_down: dict[str, int] = field(default_factory=dict)
    encoded_arrays: WrittenArrays = field(default_factory=dict)

    def make_train_message(self, site: str, model: ModelState, statistics: Arrays, *, update: bool) -> Message:
        """Make the message that requests training of a model from a site.

        Args:
            model: The global model; the site receives only its own head rows.
            statistics: Statistics of the method, sent with the model.
            update: True if the reply must contain an update.
        """
        request = self.make_request_record(partial(TrainRequest, statistics=statistics), site, model)
        annotated = self.context.contract.sites[site]
        due = select_reply_model_groups(request.model, self.method.site, annotated) if update else ModelGroups()
        self.due_updates[site] = due
        return self.make_flower_message(site, MessageType.TRAIN, encode_record(request, self.encoded_arrays))

    def make_evaluate_message(self, site: str, model: ModelState, *, test: bool) -> Message:
        """Make the message that requests an evaluation on a site's validation images or test images."""
        rows = self.method.site.parts.select_test_rows(site, self.context.contract) if test else None
        request = self.make_request_record(partial(EvaluateRequest, test=test), site, model, rows)
        self.due_updates[site] = ModelGroups()
        return self.make_flower_message(site, MessageType.EVALUATE, encode_record(request, self.encoded_arrays))

    def make_flower_message(self, site: str, kind: str, content: RecordDict) -> Message:
        """Make a Flower message for a site, and record the message's size and the send time.

        Args:
            kind: Flower's message type, such as ``train``.
            content: The encoded request.
        """
        size = count_payload_bytes(content)
        self.bytes_down[site] = self.bytes_down.get(site, 0) + size
        self.total_down[site] += size
        self.sent_at[site] = RequestSendTime()
        group = str(self.context.round)
        return make_request(content, self.nodes[site], kind, group_id=group, ttl=self.deadline_s)

    def make_request_record(
        self, make: Callable[..., Q], site: str, model: ModelState, rows: Sequence[str] | None = None
    ) -> Q:
        """Make a request of this run and round to one site, with the model and these of its head rows.

        Args:
            make: Record class of the request, or a function that makes the record from named fields.
            site: The site that receives the request.
            model: The model to train or evaluate.
            rows: Classes of the head rows; None for those that the site holds.
        """
        frozen = ModelGroups()
        if rows is None:
            rows = self.method.site.parts.select_own_rows(site, self.context.contract)
        if self.frozen is not None:
            held_before = self.answers[site].holds_frozen
            frozen = self.frozen.get_frozen_part_for_site(site, held_before=held_before)
        return make(
            run=self.run,
            round=self.context.round,
            plan=self.plan_json,
            contract=self.context.contract.hash,
            class_names=tuple(rows),
            counted=self.state.counted.get(site, 0),
            best=self.result_round,
            left_out=self.state.left_out.get(site, ""),
            model=select_site_model_groups(model, rows, self.method.site.parameters.compress_model),
            frozen=frozen,
        )


# ---------------------------------------------------------------------- sending, and waiting for replies


def send_and_receive(
    grid: Grid,
    messages: Sequence[Message],
    waiting: Waiting,
    *,
    deadline_s: float,
    enough: int,
    registered: Callable[[], Collection[int]] | None = None,
) -> Iterator[Message]:
    """Send all messages, and yield at most one reply for each site.

    Good replies are yielded as they arrive. Errors are yielded at the end, because a site that is disconnected may come
    back before the deadline. Then its message is sent again, unless the site is no longer registered. Errors made by
    Flower get the site as their source.

    Args:
        waiting: Receives the nodes that have not replied, and the disconnected ones among them, whenever either
            changes; at most once a second while more than a hundred nodes have not replied.
        deadline_s: Seconds after which the exchange ends without the missing sites.
        enough: Number of good replies after which only connected sites are waited for, not disconnected ones.
        registered: Returns the nodes of the sites that may take part; None for all.
    """
    unanswered = UnansweredMessages(grid, time.monotonic() + deadline_s)
    unanswered.send_messages(messages)
    pause_s = FIRST_POLL_S
    waiting(*unanswered.unanswered_and_lost_nodes)
    reported = time.monotonic()
    unreported = False
    while (unanswered.pending or unanswered.lost) and time.monotonic() < unanswered.deadline:
        arrived = False
        for reply in unanswered.pull_replies():
            arrived = True
            if not reply.has_error():
                yield reply
            del reply  # a large one would stay in memory until the next one has come
        changed = (bool(unanswered.lost) and unanswered.resend_to_reconnected_sites(registered)) or arrived
        lost_are_needed = unanswered.good < enough <= unanswered.good + len(unanswered.lost)
        if not unanswered.pending and not lost_are_needed:
            break
        unreported = unreported or changed
        # Each report lists all missing sites: one after each of n replies would take n squared steps.
        few = len(unanswered.pending) + len(unanswered.lost) <= MAX_MISSING_REPORTED_AT_ONCE
        if unreported and (few or time.monotonic() - reported >= REPORT_INTERVAL_S):
            waiting(*unanswered.unanswered_and_lost_nodes)
            reported = time.monotonic()
            unreported = False
        if changed:
            pause_s = FIRST_POLL_S  # more may be on its way
        elif unanswered.pending or unanswered.lost:
            pause_s = sleep_between_polls(pause_s)
    yield from unanswered.errors.values()


def sleep_between_polls(pause_s: float) -> float:
    """Sleep ``pause_s`` seconds between two polls, and return the length of the next pause, which is longer."""
    time.sleep(pause_s)
    return min(pause_s * 1.3, MAX_POLL_S)


class UnansweredMessages:
    """The messages of an exchange that have no good reply yet.

    Attributes:
        pending: Message id -> a message that was sent and has no reply yet.
        lost: Node -> the message that a disconnected site did not receive or answer.
        errors: Node -> its last reply, if that is an error.
        good: Number of good replies.
    """

    def __init__(self, grid: Grid, deadline: float) -> None:
        self._grid = grid
        self.deadline = deadline
        self.good = 0
        self.pending: dict[str, Message] = {}
        self.lost: dict[int, Message] = {}
        self.errors: dict[int, Message] = {}

    @property
    def unanswered_and_lost_nodes(self) -> tuple[set[int], set[int]]:
        """Return the nodes without a good reply, and the disconnected nodes among them."""
        lost = set(self.lost)
        return lost.union(message.metadata.dst_node_id for message in self.pending.values()), lost

    def send_messages(self, messages: Sequence[Message]) -> None:
        """Send messages; a message to a site that is no longer registered is answered with an error at once."""
        accepted = push_flower_messages(self._grid, messages)
        self.pending |= accepted
        sent = {message.metadata.dst_node_id for message in accepted.values()}
        for message in messages:
            if message.metadata.dst_node_id not in sent:
                self._record_unregistered_site(message)

    def _record_unregistered_site(self, message: Message) -> None:
        self.errors[message.metadata.dst_node_id] = Message(
            Error(REVOKED_ERROR_CODE, REVOKED_ERROR_MESSAGE), reply_to=message
        )

    def pull_replies(self) -> Iterator[Message]:
        """Yield all replies that have arrived since the last call, and store errors for the end of the exchange."""
        for received in self._grid.pull_messages(self.pending.keys()) if self.pending else ():
            if (message := self.pending.pop(received.metadata.reply_to_message_id, None)) is None:
                continue
            # Errors that the SuperLink makes come from node 1.
            reply = replace_metadata(received, src_node_id=message.metadata.dst_node_id)
            gone = reply.has_error() and reply.error.code in MESSAGE_GONE
            if gone and time.monotonic() >= self.deadline - CLOCK_DIFFERENCE_S:
                continue  # the deadline is here; the SuperLink saw it first
            node = message.metadata.dst_node_id
            self.lost.pop(node, None)
            self.errors.pop(node, None)
            if reply.has_error():
                self.errors[node] = reply
                if reply.error.code == NODE_UNAVAILABLE:
                    self.lost[node] = message
            else:
                self.good += 1
            del received
            yield reply
            del reply

    def resend_to_reconnected_sites(self, registered: Callable[[], Collection[int]] | None) -> bool:
        """Resend messages to sites that have reconnected, and stop waiting for sites that are no longer registered.

        Returns:
            True if any site has reconnected or is no longer registered.
        """
        revoked = sorted(set(self.lost) - set(registered())) if registered else []
        for node in revoked:
            self._record_unregistered_site(self.lost.pop(node))
        back = sorted(set(self.lost) & set(self._grid.get_node_ids())) if self.lost else []
        ttl = max(self.deadline - time.monotonic(), 1.0)
        messages = list[Message]()
        for lost in [self.lost.pop(node) for node in back]:
            old = lost.metadata
            again = make_request(lost.content, old.dst_node_id, old.message_type, group_id=old.group_id, ttl=ttl)
            messages.append(again)
        self.send_messages(messages)
        return bool(revoked or back)


def push_flower_messages(grid: Grid, messages: Sequence[Message]) -> dict[str, Message]:
    """Send messages through Flower; return message id -> message for the messages that Flower accepted.

    Flower does not accept a message to a site that is no longer registered, and no reply to the message will come. The
    grid returns None, ours an empty text, in the place of such a message's id.
    """
    ids = grid.push_messages(messages) if messages else ()
    return {name: message for name, message in zip(ids, messages, strict=False) if name}


# ---------------------------------------------------------------------- replies


@dataclass(frozen=True)
class ExchangeReplies(Generic[Reply]):
    """The replies of one exchange, accepted and rejected.

    Attributes:
        accepted: Decoded replies by site name, sorted.
        absent: Site name -> why the site has no accepted reply.
        bytes_up: Site name -> bytes received.
        unfit: Sites whose reply was rejected; a subset of the absent sites.
    """

    accepted: Mapping[str, Reply]
    absent: Mapping[str, str]
    bytes_up: Mapping[str, int]
    unfit: frozenset[str] = frozenset()

    def drop_site_replies(self, dropped: Mapping[str, str]) -> "ExchangeReplies[Reply]":
        """Return the replies without those of the dropped sites, which are recorded as absent.

        Args:
            dropped: Site -> why its reply does not count.
        """
        accepted = {site: reply for site, reply in self.accepted.items() if site not in dropped}
        return replace(self, accepted=accepted, absent={**self.absent, **dropped})


def make_too_few_sites_error(what: str, replies: ExchangeReplies[Reply], expected: int) -> TooFewSites:
    """Make the error for too few replies; the message names the absent sites with their reasons.

    Args:
        what: Name of the exchange, such as ``round 3``, with which the message begins.
        replies: The replies of the exchange.
        expected: Number of expected replies, for the message.
    """
    reasons = "; ".join(f"{site}: {why}" for site, why in replies.absent.items())
    return TooFewSites(f"{what}: {len(replies.accepted)} of {expected} sites replied. {reasons}")


def decode_reply(message: Message, expected: type[AnyRecord]) -> tuple[AnyRecord | None, str]:
    """Decode a message; return the record, or None and the reason why the message contains no valid record.

    A site's text in a reason is escaped and shortened
    (:func:`polyclinic.common.system.plain_text.make_printable_line`).
    """
    if message.has_error():
        reason = message.error.reason or ""
        if message.error.code in MESSAGE_GONE:
            return None, "the site left the federation before it replied"
        if message.error.code == NODE_UNAVAILABLE and UNAVAILABLE_NODE_MESSAGE in reason:
            return None, NOT_CONNECTED_REASON
        # Flower's simulation wraps the site's own words: <class 'X'>:<'its words'>.
        wrapped = re.fullmatch(r"<class '[\w.]+'>:<'(.*)'>", reason, re.DOTALL)
        return None, make_printable_line(wrapped[1] if wrapped else reason) or f"error {message.error.code}"
    try:
        return decode_record(message.content, expected), ""
    except WireError as error:
        return None, make_printable_line(str(error))
    except Exception as error:  # as a site has written it: no reply ends a run
        return None, f"cannot be read: {type(error).__name__}"


def check_exchange_replies(
    requests: ExchangeRequests,
    replies: Iterable[Message],
    expected: type[Reply],
    on_reply: Callable[[ReplyArrival], None],
    layers: Sequence["CoordinatorRoundLayer"] = (),
    aggregator: "Aggregator | None" = None,
) -> ExchangeReplies[Reply]:
    """Decode and check replies as they arrive, and separate accepted from rejected replies.

    Args:
        replies: Messages in any order.
        expected: Record class of a valid reply.
        on_reply: Receives every reply of a site to a request.
        layers: Check training replies further, and may change them.
        aggregator: Receives the updates of accepted training replies, and the names of rejected sites.
    """
    names = dict(zip(requests.nodes.values(), requests.nodes, strict=True))
    absent = dict.fromkeys(requests.due_updates, f"no reply within {requests.deadline_s:.0f} s")
    accepted: dict[str, Any] = {}
    sizes: dict[str, int] = {}
    unfit: set[str] = set()

    def check_reply(message: Message, site: str) -> None:
        record: Any
        record, reason = decode_reply(message, expected)
        if record is not None:
            reason = find_reply_mismatch(requests, record, site)
            for layer in layers if isinstance(record, TrainReply) and not reason else ():
                reason = reason or layer.find_update_rejection_reason(record.update, requests.due_updates[site])
            reason = reason and make_printable_line(reason)
            sizes[site] = count_payload_bytes(message.content)
        content = message.content if message.has_content() else None
        if requests.frozen is not None:
            requests.frozen.record_frozen_part_at_site(site, reason)
        on_reply(ReplyArrival(expected.__name__, requests.context.round, site, content, reason))
        if record is not None and not reason:
            absent.pop(site, None)
            for layer in layers:
                record = layer.on_reply(record)
            accepted[site] = record if aggregator is None else aggregator.collect_update(record)
            return
        absent[site] = reason
        if aggregator is not None:
            aggregator.skip_site(site)
        # Any other error comes from an honest site that cannot continue, or stands for a disconnected site.
        if message.has_content() or message.error.code == REFUSED_REPLY:
            unfit.add(site)

    for message in replies:
        site = names.get(message.metadata.src_node_id, "")
        if site in requests.due_updates:
            check_reply(message, site)
        del message  # a large one would stay in memory until the next one has come
    ordered = dict(sorted(accepted.items(), key=itemgetter(0)))
    return ExchangeReplies(ordered, absent, sizes, frozenset(unfit))


def find_reply_mismatch(
    requests: ExchangeRequests, record: TrainReply | EvaluateReply | BenefitReply, site: str
) -> str:
    """Return why a decoded reply does not match its request; empty if it matches."""
    context = requests.context
    method = requests.method
    origin = (record.run, record.round, record.site)
    expected = (requests.run, context.round, site)
    if origin != expected:
        return f"reply belongs to run, round, site {origin}, expected {expected}"
    if isinstance(record, TrainReply):
        if record.train_samples != (stated := requests.answers[site].train_samples):
            return f"trained on {record.train_samples} images, said {stated} at the roll call"
        if fault := find_update_form_fault(record.update, requests.due_updates[site]):
            return fault
        due = dict(method.statistics_shape(context, site, requests.state.model.head.features))
        if record.statistics or due:  # NaN in a statistic is "nothing to say"
            shapes = {name: array.shape for name, array in record.statistics.items()}
            if shapes != due:
                return f"statistics are {shapes}, expected {due}"
        for statistic in method.site.payload.statistics:
            values = record.statistics.get(statistic.name)
            if values is not None and (fault := statistic.find_impossible_value(values)):
                return fault
        if record.epochs > (most := compute_largest_epoch_count(method.site, requests.plan)):
            return f"says that it trained {record.epochs:,} epochs, and was asked for at most {most:,}"
        if record.seconds > (longest := requests.sent_at[site].max_possible_work_s):
            return f"says that it trained for {record.seconds:,.0f} s, and was asked at most {longest:,.0f} s ago"
        return ""
    masked = record.masked_classes if isinstance(record, EvaluateReply) else ()
    strangers = sorted({*record.class_names, *masked} - set(context.contract.sites[site]))
    if strangers:
        return f"tested {quote_names(strangers)}, which it does not annotate"
    metrics = record.metric_names if isinstance(record, EvaluateReply) else ()
    extra = sorted(set(metrics) - set(requests.plan.test_metrics))
    return f"sent the metrics {quote_names(extra)}, which the plan does not ask for" if extra else ""


def find_update_form_fault(update: ModelGroups, sent: ModelGroups) -> str:
    """Return why an update has wrong groups, wrong shapes, or values that are not finite; empty if it is correct.

    Args:
        update: The model groups (trunk, batch normalisation, head) that the site sent.
        sent: The model groups that the site received and must return an update for.
    """
    fault = _find_shape_fault("trunk", update.trunk, sent.trunk) or _find_shape_fault("norm", update.norm, sent.norm)
    if fault:
        return fault
    for name, length in (("trunk", update.trunk_length), ("norm", update.norm_length)):
        if not math.isfinite(length):
            return f"{name} holds values that are not finite"
    if update.form != sent.form:
        return f"trunk travels as {update.form}, expected {sent.form}"
    if update.head is None or sent.head is None:
        return "" if update.head is sent.head else f"head was {'not ' if sent.head is None else ''}expected"
    if update.head.class_names != sent.head.class_names:
        return f"head rows are {list(update.head.class_names)}, expected {list(sent.head.class_names)}"
    fault = _find_array_fault("head.weight", update.head.weight, sent.head.weight)
    return fault or _find_array_fault("head.bias", update.head.bias, sent.head.bias)


def _find_shape_fault(name: str, array: NDArray[np.float32] | None, expected: NDArray[np.float32] | None) -> str:
    if array is None or expected is None:
        return "" if array is expected else f"{name} was {'not ' if expected is None else ''}expected"
    return "" if array.shape == expected.shape else f"{name} has shape {array.shape}, expected {expected.shape}"


def _find_array_fault(name: str, array: NDArray[np.float32], expected: NDArray[np.float32]) -> str:
    if fault := _find_shape_fault(name, array, expected):
        return fault
    return "" if np.isfinite(array).all() else f"{name} holds values that are not finite"
