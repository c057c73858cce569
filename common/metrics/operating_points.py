"""Thresholds chosen on validation images, and what deciding by them comes to on test images."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from common.metrics.calibration import Decisions, pooled_decisions
from common.metrics.score_histograms import EDGES, Counts, ScoreHistogram


@dataclass(frozen=True)
class OperatingPoint:
    """One threshold of one class.

    Attributes:
        rule: ``youden`` has the largest sum of sensitivity and specificity (Youden, Cancer 1950); ``sensitivity`` is
            the highest threshold with at least the sensitivity that the experiment names; both on validation images.
        target: That sensitivity; None for Youden's.
        threshold: An image counts as positive above it.
        chosen_on: Validation images with and without the finding.
        decisions: On the test images.
    """

    rule: Literal["youden", "sensitivity"]
    target: float | None
    threshold: float
    chosen_on: tuple[int, int]
    decisions: Decisions


def operating_points(
    validation: Mapping[str, ScoreHistogram], test: Mapping[str, ScoreHistogram], sensitivity: float
) -> dict[str, tuple[OperatingPoint, ...]]:
    """Two points a class; a class without positives or negatives in validation, or without test images, has none.

    Thresholds are borders of the histograms' bins, so the decisions are exact; between two borders there may be a
    slightly better one. Where no border is better than calling all images alike, there is no point of Youden's.

    Args:
        validation: Class -> scores on which thresholds are chosen.
        test: Class -> scores of the same model on other images.
        sensitivity: The target of the second rule, above 0 and at most 1.
    """
    both = {name: (chosen, test[name]) for name, chosen in validation.items() if name in test}
    return {
        name: _points(chosen, tested, sensitivity)
        for name, (chosen, tested) in both.items()
        if chosen.positives.any() and chosen.negatives.any() and (tested.positives.any() or tested.negatives.any())
    }


def _points(validation: ScoreHistogram, test: ScoreHistogram, sensitivity: float) -> tuple[OperatingPoint, ...]:
    found, alarms = _from(validation.positives), _from(validation.negatives)
    chosen_on = (int(found[0]), int(alarms[0]))
    # Whole numbers: sums of two shares that are equal must compare equal.
    above_chance = found * chosen_on[1] - alarms * chosen_on[0]
    youden = _middle_of_widest(above_chance)
    # Divided, not multiplied: 55 of 100 is 0.55, but 0.55 * 100 is a little more than 55.
    target = int(np.flatnonzero(found / chosen_on[0] >= sensitivity)[-1])
    by_sensitivity = OperatingPoint(
        "sensitivity", sensitivity, float(EDGES[target]), chosen_on, pooled_decisions(test, target)
    )
    if above_chance[youden] <= 0:  # the best "threshold" calls all images alike
        return (by_sensitivity,)
    return OperatingPoint(
        "youden", None, float(EDGES[youden]), chosen_on, pooled_decisions(test, youden)
    ), by_sensitivity


def _from(counts: Counts) -> Counts:
    """Images in each bin and above, ``(BINS + 1,)``: those above each border."""
    return np.append(np.cumsum(counts[::-1])[::-1], 0)


def _middle_of_widest(values: Counts) -> int:
    """The border in the middle of the longest row of borders with the largest value, for scores vary a little."""
    best = np.flatnonzero(values == values.max())
    rows = np.split(best, np.flatnonzero(np.diff(best) > 1) + 1)
    widest = max(rows, key=len)
    return int(widest[len(widest) // 2])
