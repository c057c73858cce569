"""What the global model's scores are worth besides their order: calibration, decisions, confusion."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from common.metrics.calibration import Calibration, Decisions, calibration, decisions
from common.metrics.curves import RankingCurve, curve_of
from common.metrics.multi_class import confusion, known_rows
from common.metrics.score_histograms import Floats, score_histogram
from common.models.zoo.spec import Task


@dataclass(frozen=True)
class Quality:
    """One model on one test set.

    Attributes:
        calibration: Class -> calibration; a class without a known label is left out.
        decisions: Class -> decisions at probability 0.5; None as above.
        top_class: Where every image has exactly one class: calibration of the highest score, which counts as a
            positive where it belongs to the right class (Guo et al., ICML 2017).
        curves: Class -> ROC and precision-recall curve, where it has positives and negatives.
        confusion: None as above: images by class (rows) and answer (columns), in the order of the run's classes.
    """

    calibration: Mapping[str, Calibration]
    decisions: Mapping[str, Decisions]
    top_class: Calibration | None = None
    confusion: tuple[tuple[int, ...], ...] | None = None
    curves: Mapping[str, RankingCurve] = field(default_factory=dict)


def quality(scores: Floats, labels: Floats, class_names: Sequence[str], task: Task) -> Quality:
    """Probabilities and labels ``(n, classes)``; a label is 1, 0 or NaN for unknown."""
    columns = {name: (scores[:, c], labels[:, c]) for c, name in enumerate(class_names)}
    calibrated = {name: calibration(*pair) for name, pair in columns.items()}
    of_each = Quality(
        {name: found for name, found in calibrated.items() if found is not None},
        {name: decisions(*columns[name]) for name, found in calibrated.items() if found is not None},
        curves={name: found for name, pair in columns.items() if (found := curve_of(score_histogram(*pair)))},
    )
    known = known_rows(labels) if task == "multi_class" else np.zeros(len(labels), np.bool_)
    return _with_answers(of_each, scores[known], labels[known]) if known.any() else of_each


def _with_answers(of_each: Quality, scores: Floats, labels: Floats) -> Quality:
    answer, truth = np.argmax(scores, axis=1), np.argmax(labels == 1, axis=1)
    table = confusion(answer, truth, labels.shape[1])
    right = (answer == truth).astype(np.float32)
    top = calibration(scores.max(axis=1), right)
    rows = tuple(tuple(row) for row in table.tolist())
    return replace(of_each, top_class=top, confusion=rows)
