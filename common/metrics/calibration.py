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
    BIN_EDGES,
    BIN_HALF_WIDTHS,
    DECISION_THRESHOLD,
    FIRST_POSITIVE_BIN,
    TENTH_EDGES,
    Counts,
    Floats,
    ScoreHistogram,
    compute_score_histogram,
)
from polyclinic.common.models.zoo.spec import Task


@dataclass(frozen=True)
class ReliabilityBin:
    """One tenth of the score range in a reliability diagram.

    Attributes:
        images: Number of images with a score in the bin.
        positives: Number of positive images among them.
        mean_score: Mean score; None without images.
    """

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
        within: Largest possible error of ``expected_error`` and ``brier``; above 0 if computed from a histogram.
    """

    bins: tuple[ReliabilityBin, ...]
    expected_error: float
    brier: float
    within: float = 0.0


@dataclass(frozen=True)
class DecisionCounts:
    """Confusion counts of one class at one threshold, with sensitivity, specificity, balanced accuracy and F1."""

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
    """Compute the calibration of one class; None if no label is known.

    Args:
        scores: Probabilities, ``(n,)``.
        labels: 1, 0 or NaN for unknown, ``(n,)``.
    """
    positives, negatives = ((labels == kind).astype(np.int64) for kind in (1, 0))
    return _compute_calibration_from_counts(np.asarray(scores, np.float64), positives, negatives)


def compute_pooled_calibration(histogram: ScoreHistogram) -> Calibration | None:
    """Compute the calibration from a score histogram, where each score is the centre of its bin; None without
    images.
    """
    positives = histogram.positives
    negatives = histogram.negatives
    return _compute_calibration_from_counts(BIN_CENTRES, positives, negatives, BIN_HALF_WIDTHS)


def _compute_calibration_from_counts(
    scores: Floats, positives: Counts, negatives: Counts, half_widths: Floats | None = None
) -> Calibration | None:
    """Compute the calibration from the numbers of images with each score; None without images.

    Args:
        scores: Different scores, ``(m,)``.
        positives, negatives: Numbers of positive and of negative images with each score, ``(m,)``.
        half_widths: Largest possible errors of the scores, ``(m,)``; None if the scores are exact.
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
    """Count the decisions of one class at threshold 0.5; unknown labels are ignored.

    Args:
        scores: Probabilities, ``(n,)``.
        labels: 1, 0 or NaN for unknown, ``(n,)``.
    """
    above = np.asarray(scores) > DECISION_THRESHOLD
    return DecisionCounts(*(int(np.sum((labels == kind) & side)) for kind in (1, 0) for side in (above, ~above)))


def count_pooled_decisions(histogram: ScoreHistogram, border: int = FIRST_POSITIVE_BIN) -> DecisionCounts:
    """Count the decisions in a score histogram; exact, because the threshold is a border of its bins.

    Args:
        histogram: The scores of one class.
        border: Index of the first bin that counts as positive; by default the bin above 0.5.
    """
    true_positives, false_negatives = (int(part.sum()) for part in np.split(histogram.positives, [border])[::-1])
    false_positives, true_negatives = (int(part.sum()) for part in np.split(histogram.negatives, [border])[::-1])
    return DecisionCounts(true_positives, false_negatives, false_positives, true_negatives)


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
    so that decisions are exact; a threshold between two borders may be slightly better. A class has no ``youden`` point
    if no threshold is better than the same decision for all images.

    Args:
        validation: Class -> histogram of the scores on validation images.
        test: Class -> histogram of the same model's scores on test images.
        sensitivity: The target of the rule ``sensitivity``, above 0 and at most 1.
    """
    points = dict[str, tuple[OperatingPoint, ...]]()
    for name, validated in validation.items():
        tested = test.get(name)
        if tested is None or not (tested.positives.any() or tested.negatives.any()):
            continue
        if not (validated.positives.any() and validated.negatives.any()):
            continue
        detected = _count_images_above_borders(validated.positives)
        alarms = _count_images_above_borders(validated.negatives)
        chosen_on = (int(detected[0]), int(alarms[0]))
        # Divide instead of multiplying: 55 / 100 is 0.55, but 0.55 * 100 is a little more than 55.
        border = int(np.flatnonzero(detected / chosen_on[0] >= sensitivity)[-1])
        decided = count_pooled_decisions(tested, border)
        points[name] = (OperatingPoint("sensitivity", sensitivity, float(BIN_EDGES[border]), chosen_on, decided),)
        # Integers, because equal sums of two shares must compare equal. Python's integers, because sites may state so
        # many images that the products exceed 64 bits.
        above_chance = detected.astype(object) * chosen_on[1] - alarms.astype(object) * chosen_on[0]
        # Among the borders with the largest value, take the middle of the longest run, so that small changes of the
        # scores do not change decisions.
        best = np.flatnonzero(above_chance == above_chance.max())
        widest = max(np.split(best, np.flatnonzero(np.diff(best) > 1) + 1), key=len)
        border = int(widest[len(widest) // 2])
        if above_chance[border] > 0:  # else the best threshold decides the same for all images
            decided = count_pooled_decisions(tested, border)
            youden = OperatingPoint("youden", None, float(BIN_EDGES[border]), chosen_on, decided)
            points[name] = (youden, *points[name])
    return points


@dataclass(frozen=True)
class ThresholdDecisions:
    """The decisions on the images of one class at one threshold."""

    threshold: float
    decisions: DecisionCounts


def count_decisions_at_points(
    histograms: Mapping[str, ScoreHistogram], points: Mapping[str, Sequence[OperatingPoint]]
) -> dict[str, ThresholdDecisions]:
    """Count the decisions on the images of each class at its first operating point; at 0.5 for a class without one.

    Args:
        histograms: Class -> histogram of the scores on the images, such as those of one site.
        points: Class -> operating points.
    """
    decided = dict[str, ThresholdDecisions]()
    for name, histogram in histograms.items():
        class_points = points.get(name, ())
        threshold = class_points[0].threshold if class_points else DECISION_THRESHOLD
        border = int(np.searchsorted(BIN_EDGES, threshold))  # thresholds are borders of the bins
        decided[name] = ThresholdDecisions(threshold, count_pooled_decisions(histogram, border))
    return decided


def _count_images_above_borders(counts: Counts) -> Counts:
    """Return the number of images above each border of the bins, ``(BINS + 1,)``."""
    return np.append(np.cumsum(counts[::-1])[::-1], 0)


MAX_CURVE_POINTS = 60
"""Maximum number of points of a curve, evenly spaced along the ROC curve."""
Z_95 = 1.959964

Shares = NDArray[np.float64]


@dataclass(frozen=True)
class RocCurve:
    """The points of the ROC and the precision-recall curve of one class, for thresholds that fall from 1 to 0.

    Attributes:
        detected: Number of true positives at each threshold, from 0 to all positives.
        alarms: Number of false positives at each threshold, from 0 to all negatives.
    """

    detected: tuple[int, ...]
    alarms: tuple[int, ...]


def compute_roc_curve(histogram: ScoreHistogram) -> RocCurve | None:
    """Return the ROC curve of a score histogram, at borders of its bins; None without positives or negatives."""
    detected = np.concatenate([[0], np.cumsum(histogram.positives[::-1])])
    alarms = np.concatenate([[0], np.cumsum(histogram.negatives[::-1])])
    if not detected[-1] or not alarms[-1]:
        return None
    position = detected / detected[-1] + alarms / alarms[-1]  # rises from 0 to 2
    points = np.unique(np.searchsorted(position, np.linspace(0, position[-1], MAX_CURVE_POINTS), side="left"))
    return RocCurve(tuple(detected[points].tolist()), tuple(alarms[points].tolist()))


def compute_wilson_interval(part: Shares, whole: Shares) -> tuple[Shares, Shares]:
    """Return lower and upper ends of the 95 % Wilson intervals (JASA 1927) of shares.

    Args:
        part, whole: Counts, ``(n,)``; the shares are ``part / whole``.
    """
    share = part / whole
    square = Z_95**2
    whole = whole.astype(np.float64)  # the square of a count may exceed 64 bits
    middle = (share + square / (2 * whole)) / (1 + square / whole)
    half = Z_95 / (1 + square / whole) * np.sqrt(share * (1 - share) / whole + square / (4 * whole**2))
    return np.maximum(middle - half, 0.0), np.minimum(middle + half, 1.0)


@dataclass(frozen=True)
class ScoreQuality:
    """Calibration, decisions and curves of one model on one test set.

    Attributes:
        calibration: Class -> calibration; a class without a known label is left out.
        decisions: Class -> decisions at probability 0.5.
        top_class: In multi-class tasks, the calibration of the highest score of each image, where a correct prediction
            counts as positive (Guo et al., ICML 2017).
        curves: Class -> ROC and precision-recall curve; a class without positives or negatives is left out.
        confusion: In multi-class tasks, the confusion matrix with true classes as rows and predictions as columns, in
            the order of the run's classes.
    """

    calibration: Mapping[str, Calibration]
    decisions: Mapping[str, DecisionCounts]
    top_class: Calibration | None = None
    confusion: tuple[tuple[int, ...], ...] | None = None
    curves: Mapping[str, RocCurve] = field(default_factory=dict)


def compute_score_quality(scores: Floats, labels: Floats, class_names: Sequence[str], task: Task) -> ScoreQuality:
    """Compute calibration, decisions and curves of each class.

    Args:
        scores: Probabilities, ``(n, classes)``.
        labels: 1, 0 or NaN for unknown, ``(n, classes)``.
        class_names: Names of the columns.
        task: A multi-class task also has a confusion matrix.
    """
    columns = {name: (scores[:, c], labels[:, c]) for c, name in enumerate(class_names)}
    calibrated = {name: compute_calibration(*pair) for name, pair in columns.items()}
    quality = ScoreQuality(
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
        return quality
    scores = scores[single]
    labels = labels[single]
    predicted = np.argmax(scores, axis=1)
    truth = np.argmax(labels == 1, axis=1)
    table = compute_confusion_matrix(predicted, truth, labels.shape[1])
    is_correct = (predicted == truth).astype(np.float32)
    top = compute_calibration(scores.max(axis=1), is_correct)
    rows = tuple(tuple(row) for row in table.tolist())
    return replace(quality, top_class=top, confusion=rows)
