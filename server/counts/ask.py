"""Ask hospitals to count: one question, and a masked sum of those that disclose only sums."""

from polyclinic.common.counts import MASKED_ROW_LENGTH, CountQuestion
from polyclinic.common.system.plain_text import format_utc_now
from polyclinic.common.wire.counts import COUNT_ROUND, CountReply, CountRequest
from polyclinic.common.wire.fleet_protocol import COUNT_TYPE
from polyclinic.server.counts.pool import CountResult, MaskedSum, SiteCounts, read_masked_rows
from polyclinic.server.questions.exchange import (
    MaskedQuestionQueries,
    QuestionAnswers,
    QuestionExchange,
    make_question_run,
)
from polyclinic.strategies.privacy.secure_aggregation.coordinator import (
    MaskedSummation,
    MaskedSumRequest,
    MaskingFailed,
)
from polyclinic.strategies.privacy.secure_aggregation.vectors import FIXED_POINT_ONE, UpdateVectorLayout

RUN_NAME_PREFIX = "count"
"""Prefix of the run name under which a question is asked."""


def ask_for_counts(exchange: QuestionExchange, question: CountQuestion) -> CountResult:
    """Ask the connected hospitals to count, and pool their answers."""
    request = CountRequest(make_question_run(RUN_NAME_PREFIX), question.model_dump_json())
    answers = exchange.ask_connected_sites(request, COUNT_TYPE, CountReply)
    sites = {name: SiteCounts.from_reply(reply, question) for name, reply in answers.answers.items()}
    time = format_utc_now()
    masked = _unmask_sum(exchange, request.run, answers)
    return CountResult(question, request.run, time, sites, answers.silent, masked)


def _unmask_sum(exchange: QuestionExchange, run: str, answers: QuestionAnswers[CountReply]) -> MaskedSum:
    """Return the secure sum over the hospitals that disclose their counts only in a sum; empty without such hospitals.

    If secure aggregation fails, the result has the reason as its ``fault``.
    """
    rows = {name: reply.masked_rows for name, reply in answers.answers.items() if reply.masked_rows}
    if not rows:
        return MaskedSum()
    names = tuple(sorted({row for site_rows in rows.values() for row in site_rows}))
    layout = UpdateVectorLayout(trunk=0, norm=0, features=MASKED_ROW_LENGTH - 1)
    queries = MaskedQuestionQueries(exchange, run, answers.nodes, {})
    try:
        request = MaskedSumRequest(run, COUNT_ROUND, rows, names, layout, float(FIXED_POINT_ONE))
        unmasked = MaskedSummation(request, queries).unmask_sum()
    except MaskingFailed as error:
        reasons = "; ".join(f"{site}: {why}" for site, why in sorted(queries.absent.items()))
        return MaskedSum(fault=f"{error} {reasons}".strip())
    numbers = unmasked.vector.reshape(len(names), MASKED_ROW_LENGTH).astype(int)
    sums = {name: numbers[index].tolist() for index, name in enumerate(names) if name in unmasked.rows}
    return read_masked_rows(sums, unmasked.rows, unmasked.survivors)
