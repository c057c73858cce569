"""The hospital's half of an evaluation: how good the received model is on the site's own images."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from client.site.site import Site
from client.training.figures import (
    NOT_TESTED,
    counts_of_test,
    figures_of_test,
    histograms_of_sum,
    model_sha256,
    of_test,
    of_validation,
    or_no_figures,
    validation_figures,
    validation_histograms,
)
from client.training.model_and_images import Work, put, unpack, validated
from client.training.personal_parts import loss_here, parts_in_best_round
from common.metrics.auroc import ClassMetrics
from common.metrics.score_histograms import ScoreHistogram
from common.models.saved import save_model
from common.system.seeds import seed_of
from common.wire.bounds import loss_told
from common.wire.records import EvaluateReply, EvaluateRequest, Request
from common.wire.roll_call import UNKNOWN_COUNT
from strategies.local.training import Validation, reproducible

Hold = Callable[[Site, EvaluateRequest, Mapping[str, ScoreHistogram]], tuple[str, ...]]
"""Holds histograms of the test part until they are masked, and returns their classes."""


def hold_nothing(site: Site, request: EvaluateRequest, histograms: Mapping[str, ScoreHistogram]) -> tuple[str, ...]:
    """Have no figures in a sum."""
    return ()


def evaluate_round(site: Site, request: EvaluateRequest, hold: Hold = hold_nothing) -> EvaluateReply:
    """Answer with the validation loss and, for a test, with the metrics of the site's own classes on its test part.

    Args:
        hold: Where the plan has secure aggregation, the test part's figures leave in a sum alone, at every level: from
            the exact figures of some sites and the sum of all, those of the others could be worked out.
    """
    work = unpack(site, request)
    reply = or_no_figures(work, partial(_judged, work, request), None)
    reply = reply or _evaluation(request, site.name, Validation(), {}, model_sha256(work, request))
    if request.test and work.plan.privacy.secure_aggregation:
        return replace(reply, masked_classes=hold(site, request, histograms_of_sum(work)))
    return reply


def _judged(work: Work, request: EvaluateRequest) -> EvaluateReply:
    """The answer to a request."""
    site, plan, method = work.site, work.plan, work.method
    with reproducible(seed_of(plan.run.seed, request.round, site.name, "test"), plan.training.threads):
        validation = work.examples("validation")
        result = validated(work, validation)
        counts = NOT_TESTED if request.test else counts_of_test(work)
        if request.test and method.keeps_local_parts:
            put_best(work, request, result)
            result = validated(work, validation)
            save_model(site.folder / "model", work.whole, label_contract_sha256=request.contract)
        metrics, spread = figures_of_test(work) if request.test else ({}, {})
        chosen_on = validation_histograms(work) if request.test else {}
        validation_result = validation_figures(work, result)
    reply = _evaluation(request, site.name, validation_result, metrics, model_sha256(work, request))
    return replace(reply, **counts, **of_test(spread), **of_validation(chosen_on))


def put_best(work: Work, request: Request, found: Validation) -> None:
    """Put this site's own parts of the best round in place.

    Args:
        found: How good the network is with the parts of the last round.
    """
    memory, method = work.memory, work.method
    if method.selection == "site":
        loss = loss_here(work, found)
        better = loss is not None and loss < memory.best_loss  # False where the last round diverged
        best = memory.parts if better else memory.best
    else:
        best = parts_in_best_round(memory, request, memory.parts) or memory.parts
    put(work.network, best)


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
