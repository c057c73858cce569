"""What leaves a site about a judged model: losses, scores, counts and a hash, exactly or not at all.

Nothing leaves of classes of few patients (:mod:`client.site.disclosure`), and nothing of a model with parts that never
leave the site where masks or noise cover what is sent.
"""

from collections.abc import Callable, Collection, Sequence
from typing import TypedDict, TypeVar

import numpy as np

from client.site.disclosure import told_count, told_metrics
from client.site.policy import Policy
from client.training.model_and_images import Work, validated
from common.errors import BadInput
from common.metrics.auroc import ClassMetrics, metrics_of, or_undefined, per_class
from common.metrics.score_histograms import Floats, ScoreHistogram, score_histogram
from common.models.inference import label_matrix, scores_of
from common.models.state import arrays_sha256, layout_of, read_state, state_sha256
from common.wire.errors import WireError
from common.wire.records import Request, ScoreCounts, no_scores
from strategies.local.training import Validation, examples_of

Judged = TypeVar("Judged")
Nothing = TypeVar("Nothing")


def covers_local_parts(work: Work) -> bool:
    """Check whether parts of the model never leave and masks or noise on updates cover what is sent.

    Such parts are trained on bare data. Behind a trunk that the coordinator chooses, each figure of the model says
    something of them.
    """
    covered = work.plan.privacy.secure_aggregation or work.plan.privacy.level == "update"
    return covered and work.method.keeps_local_parts and not work.site.simulated


def validation_figures_leave(work: Work) -> bool:
    """Check whether figures of the validation part may leave: only then the site chooses an epoch by that part.

    The update depends on which epoch was chosen, and so says something of these images.
    """
    return work.site.policy.training_figures and not stays_for_noise(work) and not covers_local_parts(work)


def stays_for_noise(work: Work) -> bool:
    """Check whether the plan has noise, which does not cover figures, and the policy lets only covered things out."""
    return work.plan.privacy.level != "none" and not work.site.policy.metrics_outside_privacy


def or_no_figures(work: Work, judge: Callable[[], Judged], nothing: Nothing) -> Judged | Nothing:
    """Judge the model; where that fails, it has no figures: whether it fails can depend on one patient's image.

    Raises:
        BadInput, WireError: If the request cannot be answered, no matter on which images.
        Exception: What judging raised, in a simulation without masks and noise.
    """
    try:
        return judge()
    except (BadInput, WireError):
        raise
    except Exception as error:
        if work.site.simulated and not work.plan.privacy.covers:
            raise
        work.site.tell(f"the model could not be judged: {error}")
        return nothing


def validation_figures(work: Work, result: Validation) -> Validation:
    """Return what leaves of the validation figures: the loss is over classes that are not hidden.

    Args:
        result: Over all labels that the site chooses by.
    """
    site, network = work.site, work.network
    if not site.tells("validation") or not validation_figures_leave(work):
        return Validation()
    if not site.hides("validation") or site.trained_on("validation", work.plan) is not site.validation:
        return result  # no label of a hidden class is in it
    images = site.without_hidden("validation", work.plan.model.task)
    return validated(work, examples_of(images, work.seen("validation"), network.class_names))


def model_sha256(work: Work, request: Request) -> str:
    """Return the hash of the judged model; of the parts that were sent where masks or noise cover and others stay.

    A coordinator could try all values that training can give to a part that stays.
    """
    if work.method.keeps_local_parts and work.plan.privacy.covers and not work.site.simulated:
        return arrays_sha256(*(part for _, part in sorted(request.model.named().items())))
    return state_sha256(read_state(work.network), layout_of(work.network))


# ---------------------------------------------------------------------- the test part


def scored(work: Work, part: str) -> tuple[Floats, Floats, tuple[str, ...]]:
    """Return scores and labels ``(n, classes)`` of one part, for the classes the site annotates and the network has."""
    images, network = getattr(work.site, part), work.network
    scores = scores_of(network, work.seen(part), work.plan.training.precision)
    rows = [row for row, name in enumerate(network.class_names) if name in images.class_names]
    names = tuple(network.class_names[row] for row in rows)
    return scores[:, rows], label_matrix(images, names).numpy(), names


def figures_of_test(work: Work) -> tuple[dict[str, ClassMetrics], dict[str, ScoreHistogram]]:
    """Return each class's metrics on the test part, and how its scores are spread.

    Under secure aggregation there are none: they leave in a sum (:func:`histograms_of_sum`).
    """
    site, policy, evaluation = work.site, work.site.policy, work.plan.evaluation
    withheld = work.plan.privacy.secure_aggregation or covers_local_parts(work)
    if not len(site.test) or not policy.test_metrics or withheld:
        return {}, {}
    scores, labels, names = scored(work, "test")
    more = metrics_of(evaluation.metrics)
    if not site.simulated:  # that a metric fails, and how, can depend on one patient's image
        more = {name: or_undefined(name, metric, site.tell) for name, metric in more.items()}
    hidden = site.hides("test")
    metrics = {
        name: told_metrics(result, policy, hidden=name in hidden)
        for name, result in per_class(scores, labels, names, more).items()
    }
    return metrics, histograms(policy, scores, labels, names, hidden) if evaluation.pooled else {}


def histograms_of_sum(work: Work) -> dict[str, ScoreHistogram]:
    """Return how scores on the test part are spread, for a sum over sites.

    Counts of a model that cannot be judged are zero: whether it can may depend on one patient's image.
    """
    site, policy = work.site, work.site.policy
    allowed = policy.score_histograms and work.plan.evaluation.pooled and not stays_for_noise(work)
    if not len(site.test) or not allowed or covers_local_parts(work):
        return {}
    hidden = site.hides("test")
    names = [name for name in work.network.class_names if name in site.test.class_names and name not in hidden]
    none = np.zeros(0)
    nothing = {name: score_histogram(none, none) for name in names}
    return or_no_figures(work, lambda: histograms(policy, *scored(work, "test"), hidden), nothing) or nothing


def validation_histograms(work: Work) -> dict[str, ScoreHistogram]:
    """Return how scores on the validation part are spread, on which the coordinator chooses thresholds."""
    site = work.site
    if not work.plan.evaluation.pooled or not site.policy.score_histograms or work.plan.privacy.secure_aggregation:
        return {}
    if not len(site.validation) or not site.tells("validation") or covers_local_parts(work):
        return {}
    return histograms(site.policy, *scored(work, "validation"), site.hides("validation"))


def histograms(
    policy: Policy, scores: Floats, labels: Floats, class_names: Sequence[str], hidden: Collection[str] = ()
) -> dict[str, ScoreHistogram]:
    """Count scores ``(n, classes)`` by labels ``(n, classes)``, but not of ``hidden`` classes.

    Returns:
        Nothing where the policy does not allow it, or where a network that diverged has no scores.
    """
    if not policy.score_histograms or not np.isfinite(scores).all():
        return {}
    columns = {name: column for column, name in enumerate(class_names) if name not in hidden}
    return {name: score_histogram(scores[:, column], labels[:, column]) for name, column in columns.items()}


class HistogramsOfTest(TypedDict):
    """Three fields of the reply to a test, of the test part."""

    told_classes: tuple[str, ...]
    positive_scores: ScoreCounts
    negative_scores: ScoreCounts


class HistogramsOfValidation(TypedDict):
    """Three more, of the validation part."""

    validation_classes: tuple[str, ...]
    validation_positive_scores: ScoreCounts
    validation_negative_scores: ScoreCounts


def of_test(spread: dict[str, ScoreHistogram]) -> HistogramsOfTest:
    """Return the fields of the reply that hold the test part's histograms."""
    return HistogramsOfTest(
        told_classes=tuple(spread), positive_scores=_positives(spread), negative_scores=_negatives(spread)
    )


def of_validation(spread: dict[str, ScoreHistogram]) -> HistogramsOfValidation:
    """Return the fields of the reply that hold the validation part's histograms."""
    return HistogramsOfValidation(
        validation_classes=tuple(spread),
        validation_positive_scores=_positives(spread),
        validation_negative_scores=_negatives(spread),
    )


def _positives(spread: dict[str, ScoreHistogram]) -> ScoreCounts:
    return np.concatenate([no_scores(), *(of_class.positives for of_class in spread.values())])


def _negatives(spread: dict[str, ScoreHistogram]) -> ScoreCounts:
    return np.concatenate([no_scores(), *(of_class.negatives for of_class in spread.values())])


class TestCounts(TypedDict):
    """How many images of the site's test part there are, and how many the network puts into the right class."""

    test_images: int | None
    test_correct: int | None


NOT_TESTED = TestCounts(test_images=None, test_correct=None)


def counts_of_test(work: Work) -> TestCounts:
    """Count test images that the network puts into the right class, where the plan asks and the policy allows it.

    Images that show nothing but hidden classes are not counted.
    """
    site, network = work.site, work.network
    if not (work.plan.evaluation.test_each_round and site.policy.test_metrics and site.tells("test")):
        return NOT_TESTED
    if covers_local_parts(work):
        return NOT_TESTED
    images = site.without_hidden("test", work.plan.model.task)
    labels = label_matrix(images, network.class_names).nan_to_num().numpy()
    known = labels.any(axis=1)
    if not known.any():
        return TestCounts(test_images=0, test_correct=0)
    scores = scores_of(network, work.seen("test"), work.plan.training.precision)
    right = scores.argmax(axis=1) == labels.argmax(axis=1)
    total, correct = (told_count(int(count), site.policy) for count in (known.sum(), (right & known).sum()))
    return TestCounts(test_images=total, test_correct=correct)
