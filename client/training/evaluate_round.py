"""The hospital's half of an evaluation: how good the received model is on the site's own images."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from client.site.site import Site
from client.training.model_and_images import Work, put, unpack, validated
from client.training.personal_parts import loss_here, parts_in_best_round
from client.training.score_release import NOT_TESTED, counts_right_images, of_test, of_validation, tally_of, told_scores
from client.training.told_validation import ToldFigures, without_gaps
from common.metrics.auroc import ClassMetrics
from common.metrics.plugin import metrics_of
from common.metrics.score_histograms import Floats, ScoreHistogram
from common.models.inference import label_matrix, scores_of
from common.models.saved import save_model
from common.system.seeds import seed_of
from common.wire.bounds import loss_told
from common.wire.records import EvaluateReply, EvaluateRequest, Request
from common.wire.roll_call import UNKNOWN_COUNT
from strategies.local.training import Validation, reproducible


def evaluate_round(site: Site, request: EvaluateRequest) -> EvaluateReply:
    """Answer with the validation loss and, for a test, with the metrics of the site's own classes on its test part."""
    work = unpack(site, request)
    figures = ToldFigures(work, request)
    if (reply := figures.or_nothing(partial(_judged, work, request, figures), None)) is not None:
        return reply
    return _evaluation(request, site.name, Validation(), {}, figures.told_model_sha256)


def _judged(work: Work, request: EvaluateRequest, figures: ToldFigures) -> EvaluateReply:
    """The answer to a request."""
    site, plan, method = work.site, work.plan, work.method
    with reproducible(seed_of(plan.run.seed, request.round, site.name, "test"), plan.training.threads):
        validation = work.examples("validation")
        found = validated(work, validation)
        tally = tally_of(work) if counts_right_images(work) and not request.test else NOT_TESTED
        if request.test and method.keeps_local_parts:
            put_best(work, request, figures, found)
            found = validated(work, validation)
            save_model(site.folder / "model", work.whole, label_contract_sha256=request.contract)
        asked = request.test and figures.tests
        metrics, tested = _tested(work, figures) if asked else ({}, {})
        chosen_on = _validation_scores(work) if asked else {}
        told = figures.validation(found, validation)
    reply = _evaluation(request, site.name, told, metrics, figures.told_model_sha256)
    return replace(reply, **tally, **of_test(tested), **of_validation(chosen_on))


def put_best(work: Work, request: Request, figures: ToldFigures, found: Validation) -> None:
    """Put this site's own parts of the best round in place.

    Args:
        found: How good the network is with the parts of the last round.
    """
    memory, method = work.memory, work.method
    if method.selection == "site":
        judged = found if figures.exact else figures.validation(found, work.examples("validation"))
        loss = loss_here(work, judged)
        better = loss is not None and loss < memory.best_loss  # False where the last round diverged
        best = memory.parts if better else memory.best
    else:
        best = parts_in_best_round(memory, request, memory.parts) or memory.parts
    put(work.network, best)
    figures.other_parts_put()


def scored(work: Work, part: str) -> tuple[Floats, Floats, tuple[str, ...]]:
    """Scores and labels ``(n, classes)`` of one part, for the classes the site annotates and the network has."""
    images, network = getattr(work.site, part), work.network
    scores = scores_of(network, work.seen(part), work.plan.training.precision)
    rows = [row for row, name in enumerate(network.class_names) if name in images.class_names]
    names = tuple(network.class_names[row] for row in rows)
    return scores[:, rows], label_matrix(images, names).numpy(), names


def _validation_scores(work: Work) -> dict[str, ScoreHistogram]:
    """How scores on the validation part are spread, on which the coordinator chooses thresholds."""
    site, asked = work.site, work.plan.evaluation.pooled
    if not asked or not site.policy.score_histograms or not len(site.validation) or not site.tells("validation"):
        return {}
    return told_scores(site.policy, *scored(work, "validation"), site.hides("validation"))


def _tested(work: Work, figures: ToldFigures) -> tuple[dict[str, ClassMetrics], dict[str, ScoreHistogram]]:
    """Metrics and spread of scores on the test part."""
    if not len(work.site.test) or not work.site.policy.test_metrics:
        return {}, {}
    own, labels, names = scored(work, "test")
    if not work.site.policy.exact_figures:
        own = without_gaps(own)
    hidden, policy = work.site.hides("test"), work.site.policy
    metrics = figures.tested(own, labels, names, metrics_of(work.plan.evaluation.metrics))
    return metrics, told_scores(policy, own, labels, names, hidden) if work.plan.evaluation.pooled else {}


def _evaluation(
    request: EvaluateRequest, site: str, found: Validation, metrics: dict[str, ClassMetrics], sha256: str
) -> EvaluateReply:
    names = tuple(metrics)
    more = tuple(next((one.more for one in metrics.values()), ()))
    column: Callable[[str], tuple[float, ...]] = lambda key: tuple(_columns(metrics, key))  # noqa: E731
    return EvaluateReply(
        run=request.run,
        round=request.round,
        site=site,
        validation_loss=loss_told(found.loss),
        validation_auroc=found.mean_auroc,
        class_names=names,
        auroc=column("auroc"),
        average_precision=column("average_precision"),
        balanced_accuracy=column("balanced_accuracy"),
        positives=tuple(_count(metrics[name].positives) for name in names),
        negatives=tuple(_count(metrics[name].negatives) for name in names),
        model_sha256=sha256,
        metric_names=more,
        metric_values=tuple(_number(one.more[name]) for one in metrics.values() for name in more),
    )


def _count(count: int | None) -> int:
    return UNKNOWN_COUNT if count is None else count


def _columns(metrics: dict[str, ClassMetrics], key: str) -> Iterator[float]:
    for one in metrics.values():
        yield _number(getattr(one, key))


def _number(value: float | None) -> float:
    return np.nan if value is None else float(value)
