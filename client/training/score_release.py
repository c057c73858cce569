"""How the model's scores on a site's test part are spread: what its policy lets out of it."""

from collections.abc import Collection, Sequence
from typing import TypedDict

from client.site.policy import Policy
from common.metrics.score_histograms import Floats, score_histogram


class ToldScores(TypedDict):
    """Three fields of the reply to a test."""

    told_classes: tuple[str, ...]
    positive_scores: tuple[int, ...]
    negative_scores: tuple[int, ...]


NOTHING_TOLD = ToldScores(told_classes=(), positive_scores=(), negative_scores=())


def told_scores(
    policy: Policy, scores: Floats, labels: Floats, class_names: Sequence[str], hidden: Collection[str] = ()
) -> ToldScores:
    """Scores and labels ``(n, classes)``; nothing of ``hidden`` classes."""
    if not policy.score_histograms:
        return NOTHING_TOLD
    told = {
        name: score_histogram(scores[:, c], labels[:, c]) for c, name in enumerate(class_names) if name not in hidden
    }
    return ToldScores(
        told_classes=tuple(told),
        positive_scores=tuple(count for of_class in told.values() for count in of_class.positives.tolist()),
        negative_scores=tuple(count for of_class in told.values() for count in of_class.negatives.tolist()),
    )
