"""The rules of a site's policy for questions, which are requests that train nothing and have no plan.

Each kind of question has an entry in :data:`QUESTIONS`, with the rules for the request and for the answer.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from flwr.app import RecordDict

from polyclinic.client.gate.policy_rules import PolicyVerdict
from polyclinic.client.site.policy import SitePolicy
from polyclinic.common.counts import NOT_STATED, UNKNOWN, parse_count_question
from polyclinic.common.errors import WireError
from polyclinic.common.models.zoo.spec import is_external_network
from polyclinic.common.plugins import PLUGIN_PREFIX
from polyclinic.common.system.plain_text import make_printable_line
from polyclinic.common.wire.codec import decode_record
from polyclinic.common.wire.counts import CountReply, CountRequest
from polyclinic.common.wire.delivery import DeliveryRequest
from polyclinic.common.wire.evaluation import ScoringReply, ScoringRequest
from polyclinic.common.wire.records import RefusalNoted

if TYPE_CHECKING:
    from polyclinic.common.evaluation.question import EvaluationQuestion

RuleResults = Iterator[tuple[str, str]]
"""Rules: the name of each, and the reason why a record breaks it, which is empty if the record does not."""


@dataclass(frozen=True)
class QuestionKind:
    """A kind of question that a hospital answers.

    Attributes:
        request, answer: The record classes.
        check_request: Yields the rules for the request.
        check_answer: Yields the rules for the answer, given policy, request and answer.
    """

    request: type[Any]
    answer: type[Any]
    check_request: Callable[[SitePolicy, Any], RuleResults]
    check_answer: Callable[[SitePolicy, Any, Any], RuleResults]


def check_count_request(policy: SitePolicy, request: CountRequest) -> RuleResults:
    """Yield the rules for a request to count."""
    try:
        question = parse_count_question(request.question)
    except ValueError as error:
        yield "question.form", str(error)
        return
    allowed = [table for table in question.asked_tables if table in policy.counts]
    reason = "it has none of the tables that the question asks for"
    if not policy.counts:
        reason = "it is empty"
        if policy.level == "private":
            reason += ' (level = "private" sets it): a count costs counts_epsilon, and this hospital has not listed any'
    yield "policy.counts", "" if allowed else reason


def check_count_answer(policy: SitePolicy, request: CountRequest, reply: CountReply) -> RuleResults:
    """Yield the rules for the answer to a request to count."""
    asked = parse_count_question(request.question).asked_tables
    foreign = sorted(set(reply.allowed) - set(policy.counts))
    yield "policy.counts", f"it does not have {', '.join(foreign)}" if foreign else ""
    unasked = sorted(set(reply.tables) - set(asked))
    yield "question.tables", f"it does not ask for {', '.join(unasked)}" if unasked else ""
    is_noisy = reply.noise > 0
    lacks_noise = policy.epsilon is not None and bool(reply.tables) and not is_noisy
    yield "policy.epsilon", "the counts would leave without noise" if lacks_noise else ""
    has_exact_images = is_noisy and bool(reply.images)
    yield "policy.epsilon", "numbers of images would leave beside noisy numbers of patients" if has_exact_images else ""
    lacks_masks = policy.masked_only and bool(reply.tables) and not is_noisy
    yield "policy.masked_only", "the counts would leave without masks" if lacks_masks else ""
    if is_noisy:
        return
    smallest = policy.smallest_count
    multiple = policy.round_counts_to
    # Two kinds of counts may be small, because they disclose nothing about a patient: those of unknown labels, and a 0
    # for "not stated", which says that the attribute is stated everywhere.
    is_small = any(
        patients < smallest
        for state, value, patients in zip(reply.states, reply.values, reply.patients, strict=True)
        if state != UNKNOWN and (value != NOT_STATED or patients)
    )
    yield "policy.smallest_count", f"it is {smallest}, and a count is of fewer patients" if is_small else ""
    is_exact = any(number % multiple for number in (*reply.patients, *reply.images))
    yield "policy.round_counts_to", f"it is {multiple}, and a count is not rounded" if is_exact else ""


EVALUATE_REMEDY = "evaluate the model at the hospital in place of it: flwr-client evaluate"


def check_scoring_request(policy: SitePolicy, request: ScoringRequest) -> RuleResults:
    """Yield the rules for a request to score models."""
    from polyclinic.common.evaluation.question import parse_evaluation_question

    try:
        question = parse_evaluation_question(request.question)
    except ValueError as error:
        yield "question.form", str(error)
        return
    yield "policy.evaluate", _find_unlisted_model(policy, question)
    is_open = not policy.masked_only and policy.epsilon is None
    stay = f"figures of a single hospital stay at home at level {policy.level}; {EVALUATE_REMEDY}"
    yield "policy.level", "" if is_open else stay
    yield "policy.test_metrics", "" if policy.test_metrics else f"it is false; {EVALUATE_REMEDY}"
    yield "question.sha256", question.find_content_fault(request.content)
    try:
        networks = question.list_architectures(request.content)
    except ValueError as error:
        yield "question.form", str(error)
        return
    foreign = [name for name in networks if is_external_network(name) or name.startswith(PLUGIN_PREFIX)]
    unlisted = [name for name in foreign if not any(fnmatchcase(name, pattern) for pattern in policy.networks)]
    yield "policy.networks", f'it does not have "{make_printable_line(unlisted[0])}"' if unlisted else ""


def _find_unlisted_model(policy: SitePolicy, question: "EvaluationQuestion") -> str:
    """Return the reason against a model that the policy does not list, with a line for the policy that allows it."""
    if policy.evaluate is True:
        return ""
    listed = policy.evaluate or ()
    unlisted = [model.sha256 for model in question.models if model.sha256 not in listed]
    if not unlisted:
        return ""
    needed = ", ".join(f'"{sha256}"' for sha256 in (*listed, *unlisted))
    state = "it does not list the model" if listed else "it is not set"
    return f"{state}; the hospital allows it with this line in [policy] of site.toml: evaluate = [{needed}]"


def check_scoring_answer(policy: SitePolicy, request: ScoringRequest, reply: ScoringReply) -> RuleResults:
    """Yield the rules for the answer with figures of models."""
    from polyclinic.common.evaluation.question import parse_evaluation_question

    question = parse_evaluation_question(request.question)
    yield "policy.evaluate", _find_unlisted_model(policy, question)
    unasked = {*reply.models, *reply.pair_firsts, *reply.pair_seconds} - {model.name for model in question.models}
    yield "question.models", "a figure is of a model that nobody asked for" if unasked else ""
    group_columns = set(reply.columns) - {""}
    yield "question.groups", "nobody asked for these subgroups" if group_columns - set(question.groups) else ""
    forbidden = sorted(column for column in group_columns if f"class_by_{column}" not in policy.counts)
    yield "policy.counts", f"it does not have class_by_{forbidden[0]}" if forbidden else ""
    has_scores = reply.has_histograms or bool(reply.point_rows or reply.score_sums)
    yield "policy.score_histograms", "it is false" if has_scores and not policy.score_histograms else ""
    smallest = policy.smallest_count
    multiple = policy.round_counts_to
    counts = (*reply.positives, *reply.negatives, *reply.positive_patients, *reply.negative_patients)
    is_small = any(count < smallest for count in counts) or (reply.models and reply.patients < smallest)
    yield "policy.smallest_count", f"it is {smallest}, and a figure is of fewer images or patients" if is_small else ""
    is_exact = any(number % multiple for number in (reply.images, reply.patients, *counts))
    yield "policy.round_counts_to", f"it is {multiple}, and a count is not rounded" if is_exact else ""


def check_delivery_request(policy: SitePolicy, request: DeliveryRequest) -> RuleResults:
    """Yield no rule: a package is verified before it is stored, and causes no training and no reply with figures."""
    yield from ()


def check_delivery_answer(policy: SitePolicy, request: DeliveryRequest, reply: RefusalNoted) -> RuleResults:
    """Yield the rules for the acknowledgement of a package."""
    yield "question.run", "" if reply.run == request.run else "the acknowledgement is of another question"


QUESTIONS: Mapping[str, QuestionKind] = {
    "CountRequest": QuestionKind(CountRequest, CountReply, check_count_request, check_count_answer),
    "ScoringRequest": QuestionKind(ScoringRequest, ScoringReply, check_scoring_request, check_scoring_answer),
    "DeliveryRequest": QuestionKind(DeliveryRequest, RefusalNoted, check_delivery_request, check_delivery_answer),
}
"""Record class of the request -> kind of the question."""


def decide_on_question(policy: SitePolicy, record_name: str, content: RecordDict) -> PolicyVerdict:
    """Return the policy's verdict on a question: that of the first rule that it breaks."""
    kind = QUESTIONS[record_name]
    try:
        request = decode_record(content, kind.request)
    except WireError as error:
        return PolicyVerdict("wire", str(error).removesuffix("."))
    return _find_broken_rule(kind.check_request(policy, request))


def decide_if_answer_may_leave(policy: SitePolicy, record_name: str, content: RecordDict, answer: Any) -> PolicyVerdict:
    """Return the policy's verdict on the answer to a question.

    Args:
        content: The question.
    """
    kind = QUESTIONS[record_name]
    return _find_broken_rule(kind.check_answer(policy, decode_record(content, kind.request), answer))


def _find_broken_rule(rules: RuleResults) -> PolicyVerdict:
    broken = (PolicyVerdict(rule, reason) for rule, reason in rules if reason)
    return next(broken, PolicyVerdict("policy"))
