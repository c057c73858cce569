"""How the final model's scores are spread over a site's images: what its policy lets out of it."""

from collections.abc import Collection, Sequence
from typing import TypedDict

import numpy as np

from client.site.policy import Policy
from common.metrics.score_histograms import Floats, ScoreHistogram, score_histogram
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
