"""Whether scores can be taken at their word, and what deciding by them comes to, class by class."""

from dataclasses import dataclass

import numpy as np

from common.metrics.score_histograms import (
    DECIDED,
    HALF_WIDTHS,
    MIDDLES,
    TENTHS,
    THRESHOLD,
    Counts,
    Floats,
    ScoreHistogram,
)


@dataclass(frozen=True)
class ReliabilityBin:
    """Images whose score lies in one tenth of the scale; ``mean_score`` is None where there are none."""

    images: int
    positives: int
    mean_score: float | None


@dataclass(frozen=True)
class Calibration:
    """One class.

    Attributes:
        bins: Ten, from low scores to high; each has its upper border but not its lower one.
        expected_error: Mean over images of the distance between mean score and share of positives in the image's bin
            (ECE: Naeini et al., AAAI 2015).
        brier: Mean squared distance between score and label.
        within: How far both can be from what the scores themselves give; above 0 where a histogram stands for them.
    """

    bins: tuple[ReliabilityBin, ...]
    expected_error: float
    brier: float
    within: float = 0.0


@dataclass(frozen=True)
class Decisions:
    """Images of one class by label, and by whether their score is above 0.5."""

    true_positives: int
    false_negatives: int
    false_positives: int
    true_negatives: int

    @property
    def sensitivity(self) -> float | None:
        return _share(self.true_positives, self.false_negatives)

    @property
    def specificity(self) -> float | None:
        return _share(self.true_negatives, self.false_positives)

    @property
    def positive_predictive_value(self) -> float | None:
        return _share(self.true_positives, self.false_positives)

    @property
    def negative_predictive_value(self) -> float | None:
        return _share(self.true_negatives, self.false_negatives)

    @property
    def balanced_accuracy(self) -> float | None:
        sensitivity, specificity = self.sensitivity, self.specificity
        return None if sensitivity is None or specificity is None else (sensitivity + specificity) / 2

    @property
    def f1(self) -> float | None:
        return _share(2 * self.true_positives, self.false_negatives + self.false_positives)


def _share(part: int, rest: int) -> float | None:
    return part / (part + rest) if part + rest else None


def calibration(scores: Floats, labels: Floats) -> Calibration | None:
    """Scores and labels ``(n,)``, where the label is known; None where none is."""
    positives, negatives = ((labels == kind).astype(np.int64) for kind in (1, 0))
    return _calibration(np.asarray(scores, np.float64), positives, negatives)


def pooled_calibration(histogram: ScoreHistogram) -> Calibration | None:
    """Calibration from histograms, each score taken for the middle of its bin."""
    positives, negatives = histogram.positives, histogram.negatives
    return _calibration(MIDDLES, positives, negatives, HALF_WIDTHS)


def _calibration(
    scores: Floats, positives: Counts, negatives: Counts, half_widths: Floats | None = None
) -> Calibration | None:
    """Images by score, ``(m,)`` each: scores that may lie up to ``half_widths`` off, and how many images have them."""
    images = positives + negatives
    total = int(images.sum())
    if not total:
        return None
    tenth = np.searchsorted(TENTHS, scores, side="left")
    columns = (images, positives, np.where(images > 0, images * scores, 0.0))
    sums = np.stack([np.bincount(tenth, column, minlength=len(TENTHS) + 1) for column in columns], axis=1)
    errors = np.where(positives > 0, positives * (1 - scores) ** 2, 0) + np.where(
        negatives > 0, negatives * scores**2, 0
    )
    return Calibration(
        bins=tuple(ReliabilityBin(int(n), int(p), float(s / n) if n else None) for n, p, s in sums),
        expected_error=float(np.abs(sums[:, 2] - sums[:, 1]).sum()) / total,
        brier=float(errors.sum()) / total,
        within=0.0 if half_widths is None else _within(scores, positives, negatives, half_widths) / total,
    )


def _within(scores: Floats, positives: Counts, negatives: Counts, half_widths: Floats) -> float:
    """Summed over images: a score that is off by h moves the error by h, its square by 2dh + h^2 at distance d."""
    squares = (positives * (1 - scores) + negatives * scores) * 2 * half_widths
    images = positives + negatives
    return float(max((images * half_widths).sum(), (squares + images * half_widths**2).sum()))


def decisions(scores: Floats, labels: Floats) -> Decisions:
    """Scores and labels ``(n,)``; unknown labels are not counted."""
    above = np.asarray(scores) > THRESHOLD
    return Decisions(*(int(np.sum((labels == kind) & side)) for kind in (1, 0) for side in (above, ~above)))


def pooled_decisions(histogram: ScoreHistogram, border: int = DECIDED) -> Decisions:
    """Decisions by the lower border of a bin, from histograms; they are exact, for no bin has it inside.

    Args:
        border: First bin whose images count as positive; by default the threshold is 0.5.
    """
    found, missed = (int(part.sum()) for part in np.split(histogram.positives, [border])[::-1])
    alarms, right = (int(part.sum()) for part in np.split(histogram.negatives, [border])[::-1])
    return Decisions(found, missed, alarms, right)
