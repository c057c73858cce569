"""Secure aggregation as a layer around the coordinator's rounds: it sends the masking messages through ``Grid``."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from flwr.app import MessageType, RecordDict

from polyclinic.common.metrics.pooled import SummedScoreHistogram
from polyclinic.common.metrics.score_histograms import SCORE_BINS, ScoreHistogram
from polyclinic.common.models.state import ModelState
from polyclinic.common.system.plain_text import make_printable_line
from polyclinic.common.wire.codec import AnyRecord, count_payload_bytes, encode_record
from polyclinic.common.wire.records import EvaluateReply, Record, TrainReply
from polyclinic.common.wire.secure_aggregation import (
    STAGE_BY_REQUEST,
    TEST_ROUND,
    KeysAnswer,
    MaskedAnswer,
    RevealAnswer,
    SharesAnswer,
)
from polyclinic.strategies.aggregation.means import (
    MergedUpdates,
    PrecomputedHeadMean,
    PrecomputedMean,
    UpdateMeans,
    sum_in_order,
)
from polyclinic.strategies.engine.events import TooFewSites
from polyclinic.strategies.engine.exchange import ExchangeReplies, decode_reply
from polyclinic.strategies.engine.layers import CoordinatorRoundLayer, Merge, RoundOutcome
from polyclinic.strategies.privacy.secure_aggregation.coordinator import (
    MaskedSummation,
    MaskedSumRequest,
    MaskingFailed,
    UnmaskedSum,
)
from polyclinic.strategies.privacy.secure_aggregation.noise_shares import make_distributed_noise
from polyclinic.strategies.privacy.secure_aggregation.vectors import (
    FIXED_POINT_ONE,
    UpdateVectorLayout,
    choose_max_update_value,
    split_update_vector,
)

if TYPE_CHECKING:
    from polyclinic.strategies.engine.coordinator import Coordinator

MASKING_MISMATCH = "what it said under secure aggregation does not fit the round"

OTHER_LAST_ROUND = "it missed a round that the others go on from, and masked updates must have one past"

Answer = KeysAnswer | SharesAnswer | MaskedAnswer | RevealAnswer


class MaskingQueries:
    """Sends the messages of one masked sum to the sites; records missing answers and received bytes.

    Attributes:
        round: Round number of the sum.
        absent: Site -> why its answer to the last message that it got does not count.
        bytes_up: Site -> bytes of its answers.
    """

    def __init__(self, coordinator: "Coordinator", server_round: int) -> None:
        self._coordinator = coordinator
        self.run = coordinator.run
        self.round = server_round
        self.absent: dict[str, str] = {}
        self.bytes_up: dict[str, int] = {}

    def __call__(
        self, requests: Mapping[str, Record], expected: type[AnyRecord], enough: int
    ) -> Iterator[tuple[str, AnyRecord]]:
        """Send each site its request; yield site name and answer for each valid answer, on arrival.

        A site without a valid answer is recorded in :attr:`absent` with the reason.

        Args:
            requests: Site -> its request.
            expected: Record class of a valid answer.
            enough: Number of valid answers after which disconnected sites are not waited for. The run's minimum of
                replies is used if it is larger.
        """
        coordinator = self._coordinator
        stage = STAGE_BY_REQUEST[type(next(iter(requests.values())))]
        self.absent |= dict.fromkeys(requests, f"no reply to {stage.replace('_', ' ')} in time")
        names = {coordinator.sites.members[site].node_id: site for site in requests}
        kind = f"{MessageType.QUERY}.{stage}"
        exchange = coordinator.requests
        contents = dict[int, RecordDict]()
        for request in requests.values():  # one that goes to many sites is written once
            if id(request) not in contents:
                contents[id(request)] = encode_record(request)
        make = exchange.make_flower_message
        messages = [make(site, kind, contents[id(request)]) for site, request in requests.items()]
        enough = max(enough, min(coordinator.sites.count_needed_replies(len(exchange.due_updates)), len(messages)))
        for message in coordinator.exchange_messages(messages, "masking", exchange.context.round, enough=enough):
            site = names[message.metadata.src_node_id]
            record, reason = decode_reply(message, expected)
            if message.has_content():
                self.bytes_up[site] = self.bytes_up.get(site, 0) + count_payload_bytes(message.content)
            if record is not None:
                assert isinstance(record, Answer)
                origin = (record.run, record.round, record.site)
                expected_origin = (self.run, self.round, site)
                if origin != expected_origin:
                    problem = f"reply belongs to run, round, site {origin}, expected {expected_origin}"
                    reason = make_printable_line(problem)
            if record is None or reason:
                self.absent[site] = reason
                continue
            self.absent.pop(site, None)
            yield site, record


class SecureAggregationLayer(CoordinatorRoundLayer):
    """Requests masked updates from the sites after training, so that only the sum of updates is unmasked."""

    updates_in_replies = False

    def __init__(self, coordinator: "Coordinator") -> None:
        self._coordinator = coordinator

    def filter_sites_of_round(self, sites: list[str]) -> list[str]:
        """Return the sites whose updates can be masked together; the others are reported as absent.

        All sites can, unless sites keep local model parts. In that case only the largest group of sites with the same
        last counted round is returned. A site that missed a round has other local parts, and a malicious model could
        make its update stand out in the sum (hospital's half: ``client/training/secure_aggregation.py``).
        """
        coordinator = self._coordinator
        counted = coordinator.state.counted
        keeps_parts = coordinator.method.site.parts.keeps_local_parts
        pasts = {site: counted.get(site, 0) if keeps_parts else 0 for site in sites}
        most = max(sorted(set(pasts.values()), reverse=True), key=list(pasts.values()).count, default=0)
        chosen = [site for site in sites if pasts[site] == most]
        if left := sorted(set(sites) - set(chosen)):
            coordinator.callbacks.on_absent_sites("training", dict.fromkeys(left, OTHER_LAST_ROUND))
        return chosen

    def wrap_update_merge(self, merge: Merge) -> Merge:
        """Return a function that replaces ``merge``: it unmasks only the sum of the sites' updates.

        The sum contains the updates of the sites that take part to the end. The function raises :class:`TooFewSites` if
        too few sites answer, or if their answers do not fit together.
        """
        coordinator = self._coordinator
        method = self._coordinator.method.site
        payload = method.payload

        def merge_masked_updates(received: ExchangeReplies[TrainReply]) -> RoundOutcome:
            model = coordinator.state.model
            replies = received.accepted
            contract = coordinator.sites.contract
            queries = MaskingQueries(coordinator, coordinator.requests.context.round)
            layout = UpdateVectorLayout(
                len(model.trunk) if payload.trunk else 0,
                len(model.norm) if method.parts.sends_batch_norm else 0,
                model.head.features if payload.head else 0,
            )
            sent: dict[str, tuple[str, ...]] = dict.fromkeys(replies, ())
            for site in replies if payload.head else ():
                held = method.parts.select_own_rows(site, contract)
                sent[site] = tuple(sorted(method.parts.select_sent_rows(held, contract.sites[site])))
            classes = tuple(sorted({name for names in sent.values() for name in names}))
            bound = choose_max_update_value(coordinator.plan, method)
            shares = make_distributed_noise(coordinator.plan, method)
            request = MaskedSumRequest(queries.run, queries.round, sent, classes, layout, bound, shares)
            try:
                opened = MaskedSummation(request, queries).unmask_sum()
            except MaskingFailed as error:
                reasons = "; ".join(f"{site}: {why}" for site, why in {**received.absent, **queries.absent}.items())
                raise TooFewSites(f"round {queries.round}, secure aggregation: {error} {reasons}".strip()) from None
            sizes = {site: size + queries.bytes_up.get(site, 0) for site, size in received.bytes_up.items()}
            coordinator.sites.bytes_up.update(queries.bytes_up)
            gone = {
                site: queries.absent.get(site, MASKING_MISMATCH) for site in replies if site not in opened.survivors
            }
            summed = replace(received, bytes_up=sizes, unfit=frozenset()).drop_site_replies(gone)
            coordinator.refuse_too_few_replies(queries.round, summed)
            merged = MergedUpdates(convert_update_sum_to_means(opened, model))
            return RoundOutcome(summed, merged, time.monotonic(), opened.closed)

        return merge_masked_updates


def unmask_test_histograms(
    coordinator: "Coordinator", tested: ExchangeReplies[EvaluateReply]
) -> dict[str, SummedScoreHistogram]:
    """Return class -> the sum of the sites' masked histograms of test scores.

    The result omits classes whose sum stays masked. It is empty in a run without secure aggregation. It is also empty
    if unmasking fails; then the callbacks receive the reason.

    Args:
        tested: The replies to the test, which was the previous exchange.
    """
    rows = {site: reply.masked_classes for site, reply in tested.accepted.items() if reply.masked_classes}
    if not rows:
        return {}
    queries = MaskingQueries(coordinator, TEST_ROUND)
    classes = tuple(sorted({name for names in rows.values() for name in names}))
    layout = UpdateVectorLayout(trunk=0, norm=0, features=2 * SCORE_BINS - 1)
    try:
        request = MaskedSumRequest(queries.run, TEST_ROUND, rows, classes, layout, float(FIXED_POINT_ONE))
        opened = MaskedSummation(request, queries).unmask_sum()
        counts = opened.vector.reshape(len(classes), 2, SCORE_BINS).astype(np.int64)
        sums = {name: ScoreHistogram(*counts[row]) for row, name in enumerate(classes) if name in opened.rows}
    except (MaskingFailed, ValueError) as error:  # counts below 0 are no sum of histograms
        reasons = "; ".join(f"{site}: {why}" for site, why in queries.absent.items())
        absent = dict.fromkeys(sorted(rows), f"{error} {reasons}".strip())
        coordinator.callbacks.on_absent_sites("sum of test scores", absent)
        return {}
    finally:
        coordinator.sites.bytes_up.update(queries.bytes_up)
    return {name: SummedScoreHistogram(histogram, opened.rows[name]) for name, histogram in sums.items()}


def convert_update_sum_to_means(opened: UnmaskedSum, model: ModelState) -> UpdateMeans:
    """Convert an unmasked sum of updates into mean updates of trunk, batch normalisation and head.

    Args:
        opened: The unmasked sum, with the sites whose updates are in it.
        model: The model that the sites started training from.
    """
    request = opened.request
    part = 1 / opened.divisor
    trunk, norm, weight, bias = split_update_vector(request.layout, request.classes, opened.vector)
    whole = sum_in_order(part for _ in opened.survivors)
    names = model.head.class_names
    totals = np.array([sum_in_order(part for _ in opened.rows.get(name, ())) for name in request.classes])
    divisor = np.where(totals > 0, totals, 1.0)
    rows = [names.index(name) for name in request.classes]
    mean = np.zeros((len(names), request.layout.features)), np.zeros(len(names)), np.zeros(len(names), np.bool_)
    mean[0][rows], mean[1][rows], mean[2][rows] = weight / divisor[:, None], bias / divisor, totals > 0
    return UpdateMeans(
        model,
        trunk=PrecomputedMean(trunk / whole) if len(trunk) else None,
        norm=PrecomputedMean(norm / whole) if len(norm) else None,
        head=PrecomputedHeadMean(mean) if rows else None,
    )
