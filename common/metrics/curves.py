"""ROC and precision-recall curves of one class, from counts of its scores, and the intervals of their shares."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.metrics.score_histograms import ScoreHistogram

POINTS = 60
"""Kept of a curve at most, evenly along the ROC curve."""
NORMAL_95 = 1.959964

Shares = NDArray[np.float64]


@dataclass(frozen=True)
class RankingCurve:
    """Test images whose score is above a threshold that falls from 1 to 0.

    Attributes:
        found, alarms: Positives and negatives above it, from 0 to all of them; both have the same length.
    """

    found: tuple[int, ...]
    alarms: tuple[int, ...]


def curve_of(histogram: ScoreHistogram) -> RankingCurve | None:
    """The curve at the borders of the histogram's bins; None without positives or negatives."""
    found = np.concatenate([[0], np.cumsum(histogram.positives[::-1])])
    alarms = np.concatenate([[0], np.cumsum(histogram.negatives[::-1])])
    if not found[-1] or not alarms[-1]:
        return None
    along = found / found[-1] + alarms / alarms[-1]  # rises from 0 to 2
    kept = np.unique(np.searchsorted(along, np.linspace(0, along[-1], POINTS), side="left"))
    return RankingCurve(tuple(found[kept].tolist()), tuple(alarms[kept].tolist()))


def wilson(part: Shares, whole: Shares) -> tuple[Shares, Shares]:
    """Ends of the 95 % score interval of shares, each ``(n,)`` (Wilson, JASA 1927); ``whole`` is above 0."""
    share, square = part / whole, NORMAL_95**2
    middle = (share + square / (2 * whole)) / (1 + square / whole)
    half = NORMAL_95 / (1 + square / whole) * np.sqrt(share * (1 - share) / whole + square / (4 * whole**2))
    return np.maximum(middle - half, 0.0), np.minimum(middle + half, 1.0)
