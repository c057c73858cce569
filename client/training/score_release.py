"""How the final model's scores are spread over a site's images, and how many it gets right: what may leave of it."""

from collections.abc import Collection, Sequence
from typing import TypedDict

import numpy as np

from client.site.disclosure import told_count
from client.site.policy import Policy
from client.training.model_and_images import Work
from common.metrics.score_histograms import Floats, ScoreHistogram, score_histogram
from common.models.inference import label_matrix, scores_of
from common.wire.records import ScoreCounts, no_scores


class ScoresOnTest(TypedDict):
    """Three fields of the reply to a test, of the test part."""

    told_classes: tuple[str, ...]
    positive_scores: ScoreCounts
    negative_scores: ScoreCounts


class ScoresOnValidation(TypedDict):
    """Three more, of the validation part."""

    validation_classes: tuple[str, ...]
    validation_positive_scores: ScoreCounts
    validation_negative_scores: ScoreCounts


def told_scores(
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


def of_test(told: dict[str, ScoreHistogram]) -> ScoresOnTest:
    """The fields of the reply."""
    return ScoresOnTest(told_classes=tuple(told), positive_scores=_positives(told), negative_scores=_negatives(told))


def of_validation(told: dict[str, ScoreHistogram]) -> ScoresOnValidation:
    """The fields of the reply."""
    return ScoresOnValidation(
        validation_classes=tuple(told),
        validation_positive_scores=_positives(told),
        validation_negative_scores=_negatives(told),
    )


def _positives(told: dict[str, ScoreHistogram]) -> ScoreCounts:
    return np.concatenate([no_scores(), *(of_class.positives for of_class in told.values())])


def _negatives(told: dict[str, ScoreHistogram]) -> ScoreCounts:
    return np.concatenate([no_scores(), *(of_class.negatives for of_class in told.values())])


class TestCounts(TypedDict):
    """How many images of the site's test part there are, and how many the network puts into the right class."""

    test_images: int | None
    test_correct: int | None


NOT_TESTED = TestCounts(test_images=None, test_correct=None)


def counts_right_images(work: Work) -> bool:
    """Whether the experiment asks for that every round, and the site's policy lets it be told.

    That goes with exact figures only: of every model that is judged it leaves, and noise on each would average out.
    """
    policy = work.site.policy
    return work.plan.evaluation.test_each_round and policy.test_metrics and policy.exact_figures


def tally_of(work: Work) -> TestCounts:
    """Count them, unless the test part is of few patients."""
    site, test, network = work.site, work.site.test, work.network
    if not site.tells("test"):
        return NOT_TESTED
    labels = label_matrix(test, network.class_names).nan_to_num().numpy()
    known = labels.any(axis=1)
    if not known.any():
        return TestCounts(test_images=0, test_correct=0)
    scores = scores_of(network, work.seen("test"), work.plan.training.precision)
    right = scores.argmax(axis=1) == labels.argmax(axis=1)
    images, correct = (told_count(int(count), site.policy) for count in (known.sum(), (right & known).sum()))
    return TestCounts(test_images=images, test_correct=correct)
