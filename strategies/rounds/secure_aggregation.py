"""The stages of secure aggregation as queries over Flower's Grid, through the round loop's own exchange."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid

from common.config import Plan
from common.metrics.pooled import SitesHistogram
from common.metrics.score_histograms import BINS, ScoreHistogram
from common.models.state import ModelState
from common.system.plain_text import shown
from common.wire.codec import R, Record, encode, payload_bytes
from common.wire.records import EvaluateReply, TrainReply
from common.wire.secure_aggregation import (
    TEST_ROUND,
    KeysAnswer,
    KeysRequest,
    MaskedAnswer,
    MaskedRequest,
    RevealAnswer,
    RevealRequest,
    SharesAnswer,
    SharesRequest,
)
from strategies.aggregation.mean import GivenMean, GivenRows, running_sum
from strategies.base.method import Method
from strategies.base.round_record import TooFewSites
from strategies.base.state import Means
from strategies.privacy.secure_aggregation.coordinator import MaskingFailed, Summing, SumRequest, UnmaskedSum
from strategies.privacy.secure_aggregation.fixed_point import ONE
from strategies.privacy.secure_aggregation.noise_shares import shares_of
from strategies.privacy.secure_aggregation.segments import SegmentLayout, rows_of
from strategies.privacy.secure_aggregation.supported import alike, largest_change
from strategies.rounds.ask_sites import Exchanges
from strategies.rounds.messages.replies import Replies, decoded

STAGES: Mapping[type, str] = {
    KeysRequest: "masking_keys",
    SharesRequest: "masking_shares",
    MaskedRequest: "masked_update",
    RevealRequest: "unmasking",
}
"""Names of the queries; a site's app has one function for each."""

Send = Callable[[Mapping[str, RecordDict], str, int], Iterator[tuple[str, Message]]]
"""Sends contents by site as messages of one type, and yields replies with their sites; the last is how many suffice."""

NOT_IN_THE_SUM = "what it said under secure aggregation does not fit the round"

OTHER_PAST = "it missed a round that the others go on from, and masked updates must have one past"

Said = KeysAnswer | SharesAnswer | MaskedAnswer | RevealAnswer


def masked_together(method: Exchanges, sites: Sequence[str]) -> list[str]:
    """The sites of a round that can be masked together: all in a run without secure aggregation.

    The others are reported as absent.
    """
    if not method.plan.privacy.secure_aggregation:
        return list(sites)
    chosen = alike(sites, method.state.counted, method)
    if left := sorted(set(sites) - set(chosen)):
        method.callbacks.on_absent("training", dict.fromkeys(left, OTHER_PAST))
    return chosen


@dataclass
class Questions:
    """Puts questions to sites, and notes who did not answer and what it cost.

    Attributes:
        absent: Site -> why its answer to the last question that it was asked does not count.
        bytes_up: Site -> bytes of its answers.
    """

    run: str
    round: int
    send: Send
    absent: dict[str, str] = field(default_factory=dict)
    bytes_up: dict[str, int] = field(default_factory=dict)

    def __call__(self, requests: Mapping[str, Record], expected: type[R], enough: int) -> Iterator[tuple[str, R]]:
        """See :class:`~strategies.privacy.secure_aggregation.coordinator.Ask`."""
        stage = STAGES[type(next(iter(requests.values())))]
        self.absent |= dict.fromkeys(requests, f"no reply to {stage.replace('_', ' ')} in time")
        for site, message in self.send(_encoded(requests), f"{MessageType.QUERY}.{stage}", enough):
            record, reason = decoded(message, expected)
            if message.has_content():
                self.bytes_up[site] = self.bytes_up.get(site, 0) + payload_bytes(message.content)
            if record is None or (reason := self._mismatch(record, site)):
                self.absent[site] = reason
                continue
            self.absent.pop(site, None)
            yield site, record

    def _mismatch(self, record: Record, site: str) -> str:
        assert isinstance(record, Said)
        came, wanted = (record.run, record.round, record.site), (self.run, self.round, site)
        return "" if came == wanted else shown(f"reply belongs to run, round, site {came}, expected {wanted}")


def queries(method: Exchanges, grid: Grid) -> Send:
    """What sends a query to some sites of the present exchange, and yields the replies with the sites' names."""

    def send(contents: Mapping[str, RecordDict], kind: str, enough: int) -> Iterator[tuple[str, Message]]:
        requests, deadline_s = method.requests, method.participation.round_deadline_s
        names = {method.sites.members[site].node_id: site for site in contents}
        messages = [requests.message(site, kind, content) for site, content in contents.items()]
        enough = max(enough, min(method.sites.needed(len(requests.expected)), len(messages)))
        for reply in method.exchanged(grid, messages, "masking", requests.known.round, deadline_s, enough):
            yield names[reply.metadata.src_node_id], reply

    return send


def _encoded(requests: Mapping[str, Record]) -> dict[str, RecordDict]:
    """Encode the requests; one that goes to many sites is written once."""
    contents: dict[int, RecordDict] = {}
    for request in requests.values():
        if id(request) not in contents:
            contents[id(request)] = encode(request)
    return {site: contents[id(request)] for site, request in requests.items()}


@dataclass(frozen=True)
class Unmasked:
    """What came of a round.

    Attributes:
        received: The training replies of the sites whose updates are in the sum; why the others' are not.
        means: Of the updates.
        closed_rows: See :class:`~strategies.privacy.secure_aggregation.coordinator.UnmaskedSum`.
    """

    received: Replies[TrainReply]
    means: Means
    closed_rows: tuple[str, ...]


def unmasked_mean(
    questions: Questions,
    method: Method,
    plan: Plan,
    model: ModelState,
    received: Replies[TrainReply],
    *,
    rows: Mapping[str, Collection[str]],
) -> Unmasked:
    """The mean of the updates of the sites that have just trained.

    Args:
        model: What they started from.
        rows: Site -> head rows that it sends.

    Raises:
        TooFewSites: If too few stay to the end, or what they gave does not fit together.
    """
    replies = received.accepted
    layout = SegmentLayout(
        len(model.trunk) if method.traffic.trunk else 0,
        len(model.norm) if method.sends_norm else 0,
        model.head.features if method.traffic.head else 0,
    )
    sent = {site: tuple(sorted(rows[site])) if method.traffic.head else () for site in replies}
    classes = tuple(sorted({name for names in sent.values() for name in names}))
    shares = shares_of(plan, method)
    asked = SumRequest(questions.run, questions.round, sent, classes, layout, largest_change(plan, method), shares)
    try:
        opened = Summing(asked, questions).opened()
    except MaskingFailed as error:
        reasons = "; ".join(f"{site}: {why}" for site, why in {**received.absent, **questions.absent}.items())
        raise TooFewSites(f"round {questions.round}, secure aggregation: {error} {reasons}".strip()) from None
    gone = {site: questions.absent.get(site, NOT_IN_THE_SUM) for site in replies if site not in opened.survivors}
    kept = {site: reply for site, reply in replies.items() if site in opened.survivors}
    sizes = {site: size + questions.bytes_up.get(site, 0) for site, size in received.bytes_up.items()}
    return Unmasked(Replies(kept, {**received.absent, **gone}, sizes), means_of_sum(opened, model), opened.closed)


def summed_test(method: Exchanges, grid: Grid, tested: Replies[EvaluateReply]) -> dict[str, SitesHistogram]:
    """The sum of the score histograms that the sites hold back, by class; without classes that stay masked.

    Empty in a run without secure aggregation, and where the sum cannot be opened: the callbacks receive why.

    Args:
        tested: The replies to the test, the exchange before.
    """
    rows = {site: reply.masked_classes for site, reply in tested.accepted.items() if reply.masked_classes}
    if not rows:
        return {}
    questions = Questions(method.run, TEST_ROUND, queries(method, grid))
    classes = tuple(sorted({name for names in rows.values() for name in names}))
    layout = SegmentLayout(trunk=0, norm=0, features=2 * BINS - 1)
    try:
        opened = Summing(SumRequest(questions.run, TEST_ROUND, rows, classes, layout, float(ONE)), questions).opened()
        counts = opened.vector.reshape(len(classes), 2, BINS).astype(np.int64)
        sums = {name: ScoreHistogram(*counts[row]) for row, name in enumerate(classes) if name in opened.rows}
    except (MaskingFailed, ValueError) as error:  # counts below 0 are no sum of histograms
        reasons = "; ".join(f"{site}: {why}" for site, why in questions.absent.items())
        method.callbacks.on_absent("sum of test scores", dict.fromkeys(sorted(rows), f"{error} {reasons}".strip()))
        return {}
    finally:
        method.sites.bytes_up.update(questions.bytes_up)
    return {name: SitesHistogram(histogram, opened.rows[name]) for name, histogram in sums.items()}


def means_of_sum(opened: UnmaskedSum, model: ModelState) -> Means:
    """The means of the updates that are in a sum."""
    asked, part = opened.asked, 1 / opened.divisor
    trunk, norm, weight, bias = rows_of(asked.layout, asked.classes, opened.vector)
    whole = running_sum(part for _ in opened.survivors)
    names = model.head.class_names
    totals = np.array([running_sum(part for _ in opened.rows.get(name, ())) for name in asked.classes])
    divisor = np.where(totals > 0, totals, 1.0)
    rows = [names.index(name) for name in asked.classes]
    mean = np.zeros((len(names), asked.layout.features)), np.zeros(len(names)), np.zeros(len(names), np.bool_)
    mean[0][rows], mean[1][rows], mean[2][rows] = weight / divisor[:, None], bias / divisor, totals > 0
    return Means(
        model,
        trunk=GivenMean(trunk / whole) if len(trunk) else None,
        norm=GivenMean(norm / whole) if len(norm) else None,
        head=GivenRows(mean) if rows else None,
    )
