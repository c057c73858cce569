"""Calibration, decision thresholds, decision counts and ROC curves of each class.

Thresholds are chosen on validation images; decisions at these thresholds are counted on test images.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from polyclinic.common.metrics.multi_class import compute_confusion_matrix, mask_single_class_images
from polyclinic.common.metrics.score_histograms import (
    BIN_CENTRES,
    BIN_HALF_WIDTHS,
    EDGES,
    FIRST_POSITIVE_BIN,
    TENTH_EDGES,
    THRESHOLD,
    Counts,
    Floats,
    ScoreHistogram,
    compute_score_histogram,
)
from polyclinic.common.models.zoo.spec import Task


@dataclass(frozen=True)
class ReliabilityBin:
    """A bin of a reliability diagram, a tenth of the score range; ``mean_score`` is None without images."""

    images: int
    positives: int
    mean_score: float | None


@dataclass(frozen=True)
class Calibration:
    """Calibration of one class: reliability bins, expected calibration error and Brier score.

    Attributes:
        bins: Ten bins from low scores to high; each includes its upper border, not its lower one.
        expected_error: Expected calibration error (Naeini et al., AAAI 2015).
        brier: Brier score.
        within: Bound of the errors of ``expected_error`` and ``brier``; above 0 if computed from a histogram.
    """

    bins: tuple[ReliabilityBin, ...]
    expected_error: float
    brier: float
    within: float = 0.0


@dataclass(frozen=True)
class DecisionCounts:
    """The confusion counts of one class at one threshold, and the rates that follow from them."""

    true_positives: int
    false_negatives: int
    false_positives: int
    true_negatives: int

    @property
    def sensitivity(self) -> float | None:
        return _compute_share_or_none(self.true_positives, self.false_negatives)

    @property
    def specificity(self) -> float | None:
        return _compute_share_or_none(self.true_negatives, self.false_positives)

    @property
    def balanced_accuracy(self) -> float | None:
        sensitivity = self.sensitivity
        specificity = self.specificity
        return None if sensitivity is None or specificity is None else (sensitivity + specificity) / 2

    @property
    def f1(self) -> float | None:
        return _compute_share_or_none(2 * self.true_positives, self.false_negatives + self.false_positives)


def _compute_share_or_none(part: int, rest: int) -> float | None:
    return part / (part + rest) if part + rest else None


def compute_calibration(scores: Floats, labels: Floats) -> Calibration | None:
    """Compute the calibration from scores and labels ``(n,)``, NaN for unknown; None if no label is known."""
    positives, negatives = ((labels == kind).astype(np.int64) for kind in (1, 0))
    return _compute_calibration_from_counts(np.asarray(scores, np.float64), positives, negatives)


def compute_pooled_calibration(histogram: ScoreHistogram) -> Calibration | None:
    """Compute the calibration from a score histogram, with the middle of a bin as its score; None without images."""
    positives = histogram.positives
    negatives = histogram.negatives
    return _compute_calibration_from_counts(BIN_CENTRES, positives, negatives, BIN_HALF_WIDTHS)


def _compute_calibration_from_counts(
    scores: Floats, positives: Counts, negatives: Counts, half_widths: Floats | None = None
) -> Calibration | None:
    """Compute the calibration from the numbers of images with each score; None without images.

    Args:
        scores: ``(m,)``.
        positives, negatives: Numbers of positive and of negative images with each score, ``(m,)``.
        half_widths: ``(m,)`` bounds of the errors of the scores; None if the scores are exact.
    """
    images = positives + negatives
    total = int(images.sum())
    if not total:
        return None
    tenth = np.searchsorted(TENTH_EDGES, scores, side="left")
    columns = (images, positives, np.where(images > 0, images * scores, 0.0))
    sums = np.stack([np.bincount(tenth, column, minlength=len(TENTH_EDGES) + 1) for column in columns], axis=1)
    errors = np.where(positives > 0, positives * (1 - scores) ** 2, 0) + np.where(
        negatives > 0, negatives * scores**2, 0
    )
    within = 0.0
    if half_widths is not None:  # a score that is off by h moves the error by h, its square by 2dh + h^2 at distance d
        squares = (positives * (1 - scores) + negatives * scores) * 2 * half_widths
        within = float(max((images * half_widths).sum(), (squares + images * half_widths**2).sum()))
    return Calibration(
        bins=tuple(ReliabilityBin(int(n), int(p), float(s / n) if n else None) for n, p, s in sums),
        expected_error=float(np.abs(sums[:, 2] - sums[:, 1]).sum()) / total,
        brier=float(errors.sum()) / total,
        within=within / total,
    )


def count_decisions(scores: Floats, labels: Floats) -> DecisionCounts:
    """Count the decisions at threshold 0.5 from scores and labels ``(n,)``; unknown labels are ignored."""
    above = np.asarray(scores) > THRESHOLD
    return DecisionCounts(*(int(np.sum((labels == kind) & side)) for kind in (1, 0) for side in (above, ~above)))


def count_pooled_decisions(histogram: ScoreHistogram, border: int = FIRST_POSITIVE_BIN) -> DecisionCounts:
    """Count the decisions from a score histogram; exact, because the threshold is the border of a bin.

    Args:
        border: Index of the first bin that counts as positive; by default the bin above 0.5.
    """
    detected, missed = (int(part.sum()) for part in np.split(histogram.positives, [border])[::-1])
    alarms, right = (int(part.sum()) for part in np.split(histogram.negatives, [border])[::-1])
    return DecisionCounts(detected, missed, alarms, right)


@dataclass(frozen=True)
class OperatingPoint:
    """A decision threshold of one class, chosen on validation images, with its decisions on test images.

    Attributes:
        rule: ``youden`` maximises sensitivity plus specificity (Youden, Cancer 1950); ``sensitivity`` is the highest
            threshold with at least the target sensitivity of the experiment.
        target: The target sensitivity; None under ``youden``.
        threshold: Images with a higher score count as positive.
        chosen_on: Numbers of positive and negative validation images.
        decisions: Decisions on the test images.
    """

    rule: Literal["youden", "sensitivity"]
    target: float | None
    threshold: float
    chosen_on: tuple[int, int]
    decisions: DecisionCounts


def choose_operating_points(
    validation: Mapping[str, ScoreHistogram], test: Mapping[str, ScoreHistogram], sensitivity: float
) -> dict[str, tuple[OperatingPoint, ...]]:
    """Choose an operating point by each of the two rules, for each class with enough images.

    A class needs validation images with both labels, and test images. Thresholds are borders of the histograms' bins,
    so that decisions are exact; a threshold between two borders may be slightly better. A class has no ``youden``
    point if no threshold is better than the same decision for all images.

    Args:
        validation: Class -> histogram of the scores on validation images.
        test: Class -> histogram of the same model's scores on test images.
        sensitivity: The target of the rule ``sensitivity``, above 0 and at most 1.
    """
    points = dict[str, tuple[OperatingPoint, ...]]()
    for name, chosen in validation.items():
        tested = test.get(name)
        if tested is None or not (tested.positives.any() or tested.negatives.any()):
            continue
        if not (chosen.positives.any() and chosen.negatives.any()):
            continue
        detected = _count_images_above_borders(chosen.positives)
        alarms = _count_images_above_borders(chosen.negatives)
        chosen_on = (int(detected[0]), int(alarms[0]))
        # Divided, not multiplied: 55 of 100 is 0.55, but 0.55 * 100 is a little more than 55.
        border = int(np.flatnonzero(detected / chosen_on[0] >= sensitivity)[-1])
        decided = count_pooled_decisions(tested, border)
        points[name] = (OperatingPoint("sensitivity", sensitivity, float(EDGES[border]), chosen_on, decided),)
        # Whole numbers: sums of two shares that are equal must compare equal. Python's, because sites may state so many
        # images that the products exceed 64 bits.
        above_chance = detected.astype(object) * chosen_on[1] - alarms.astype(object) * chosen_on[0]
        # Of the borders with the largest value, the middle of the longest row: far from small changes of scores.
        best = np.flatnonzero(above_chance == above_chance.max())
        widest = max(np.split(best, np.flatnonzero(np.diff(best) > 1) + 1), key=len)
        border = int(widest[len(widest) // 2])
        if above_chance[border] > 0:  # else the best "threshold" calls all images alike
            decided = count_pooled_decisions(tested, border)
            youden = OperatingPoint("youden", None, float(EDGES[border]), chosen_on, decided)
            points[name] = (youden, *points[name])
    return points


@dataclass(frozen=True)
class ThresholdDecisions:
    """The decisions on one class's images at one threshold."""

    threshold: float
    decisions: DecisionCounts


def count_decisions_at_points(
    histograms: Mapping[str, ScoreHistogram], points: Mapping[str, Sequence[OperatingPoint]]
) -> dict[str, ThresholdDecisions]:
    """Count the decisions on the images of each class at its first operating point; at 0.5 for a class without one.

    Args:
        histograms: Class -> histogram of the scores on the images, such as those of one site.
    """
    decided = dict[str, ThresholdDecisions]()
    for name, histogram in histograms.items():
        of_class = points.get(name, ())
        threshold = of_class[0].threshold if of_class else THRESHOLD
        border = int(np.searchsorted(EDGES, threshold))  # thresholds are borders of the bins
        decided[name] = ThresholdDecisions(threshold, count_pooled_decisions(histogram, border))
    return decided


def _count_images_above_borders(counts: Counts) -> Counts:
    """Return the number of images above each border of the bins, ``(BINS + 1,)``."""
    return np.append(np.cumsum(counts[::-1])[::-1], 0)


POINTS = 60
"""Most points of a curve, evenly along the ROC curve."""
NORMAL_95 = 1.959964

Shares = NDArray[np.float64]


@dataclass(frozen=True)
class RocCurve:
    """The points of the ROC and the precision-recall curve of one class, for thresholds that fall from 1 to 0.

    Attributes:
        detected, alarms: Numbers of true and of false positives at each threshold, from 0 to all.
    """

    detected: tuple[int, ...]
    alarms: tuple[int, ...]


def compute_roc_curve(histogram: ScoreHistogram) -> RocCurve | None:
    """Return the ROC curve of a score histogram, at borders of its bins; None without positives or negatives."""
    detected = np.concatenate([[0], np.cumsum(histogram.positives[::-1])])
    alarms = np.concatenate([[0], np.cumsum(histogram.negatives[::-1])])
    if not detected[-1] or not alarms[-1]:
        return None
    along = detected / detected[-1] + alarms / alarms[-1]  # rises from 0 to 2
    points = np.unique(np.searchsorted(along, np.linspace(0, along[-1], POINTS), side="left"))
    return RocCurve(tuple(detected[points].tolist()), tuple(alarms[points].tolist()))


def compute_wilson_interval(part: Shares, whole: Shares) -> tuple[Shares, Shares]:
    """Return lower and upper ends of the 95 % Wilson interval (JASA 1927) of the shares ``part / whole``, ``(n,)``."""
    share = part / whole
    square = NORMAL_95**2
    whole = whole.astype(np.float64)  # the square of a count may exceed 64 bits
    middle = (share + square / (2 * whole)) / (1 + square / whole)
    half = NORMAL_95 / (1 + square / whole) * np.sqrt(share * (1 - share) / whole + square / (4 * whole**2))
    return np.maximum(middle - half, 0.0), np.minimum(middle + half, 1.0)


@dataclass(frozen=True)
class ScoreQuality:
    """Calibration, decisions and curves of one model on one test set.

    Attributes:
        calibration: Class -> calibration; a class without a known label is left out.
        decisions: Class -> decisions at probability 0.5.
        top_class: Multi-class tasks: calibration of the highest score of each image; a correct prediction counts as a
            positive (Guo et al., ICML 2017).
        curves: Class -> ROC and precision-recall curve; a class without positives or negatives is left out.
        confusion: Multi-class tasks: confusion matrix, true classes as rows, predictions as columns, in the order of
            the run's classes.
    """

    calibration: Mapping[str, Calibration]
    decisions: Mapping[str, DecisionCounts]
    top_class: Calibration | None = None
    confusion: tuple[tuple[int, ...], ...] | None = None
    curves: Mapping[str, RocCurve] = field(default_factory=dict)


def compute_score_quality(scores: Floats, labels: Floats, class_names: Sequence[str], task: Task) -> ScoreQuality:
    """Compute calibration, decisions and curves from probabilities and labels (1, 0, NaN), ``(n, classes)`` each."""
    columns = {name: (scores[:, c], labels[:, c]) for c, name in enumerate(class_names)}
    calibrated = {name: compute_calibration(*pair) for name, pair in columns.items()}
    of_each = ScoreQuality(
        {name: result for name, result in calibrated.items() if result is not None},
        {name: count_decisions(*columns[name]) for name, result in calibrated.items() if result is not None},
        curves={
            name: curve
            for name, pair in columns.items()
            if (curve := compute_roc_curve(compute_score_histogram(*pair)))
        },
    )
    single = mask_single_class_images(labels) if task == "multi_class" else np.zeros(len(labels), np.bool_)
    if not single.any():
        return of_each
    scores = scores[single]
    labels = labels[single]
    answer = np.argmax(scores, axis=1)
    truth = np.argmax(labels == 1, axis=1)
    table = compute_confusion_matrix(answer, truth, labels.shape[1])
    right = (answer == truth).astype(np.float32)
    top = compute_calibration(scores.max(axis=1), right)
    rows = tuple(tuple(row) for row in table.tolist())
    return replace(of_each, top_class=top, confusion=rows)
