"""Score histograms, which the coordinator can add up over sites, and AUROC and average precision computed from them.

A histogram does not contain the order of images inside a bin. AUROC and average precision therefore have a lower and an
upper bound, for the worst and the best order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polyclinic.common.metrics.measured import ValueWithError

Floats = NDArray[np.floating]
Counts = NDArray[np.int64]
ScoreCounts = NDArray[np.int64]
"""Counts by score in one flat array: the :data:`SCORE_BINS` counts of the first class or row, then those of
the next.
"""

DECISION_THRESHOLD = 0.5
SCORE_BINS = 1024
TENTH_EDGES = np.arange(1, 10) / 10
LOGIT_DIVISOR = 3.0
_EVEN_POSITIONS = np.arange(1, SCORE_BINS - len(TENTH_EDGES)) / (SCORE_BINS - len(TENTH_EDGES))
_TRANSFORMED_EDGES = _EVEN_POSITIONS**LOGIT_DIVISOR / (
    _EVEN_POSITIONS**LOGIT_DIVISOR + (1 - _EVEN_POSITIONS) ** LOGIT_DIVISOR
)
BIN_EDGES = np.concatenate([[0.0], np.sort(np.concatenate([_TRANSFORMED_EDGES, TENTH_EDGES])), [1.0]])
"""Borders of the bins, ``(SCORE_BINS + 1,)``: even in ``sigmoid(logit(p) / LOGIT_DIVISOR)``, and also every tenth.

The scores of a rare finding lie near 0, those of a confident model near 0 and 1. Bins of equal width in probability
would put them into a few bins. Bins of equal width in the logit would be wide in the middle and need an end. This
transform has about 85 bins per unit of the logit at 0.5, 49 at 0.01 and 14 at 0.0001. The tenths make decisions at 0.5
and calibration in tenths exact.
"""
BIN_CENTRES = (BIN_EDGES[1:] + BIN_EDGES[:-1]) / 2
BIN_HALF_WIDTHS = (BIN_EDGES[1:] - BIN_EDGES[:-1]) / 2
FIRST_POSITIVE_BIN = int(np.searchsorted(BIN_EDGES, DECISION_THRESHOLD))
"""Index of the first bin with scores above :data:`DECISION_THRESHOLD`."""


def make_empty_score_counts() -> ScoreCounts:
    """Return an empty array of counts; used as ``default_factory`` of dataclass fields."""
    return np.zeros(0, np.int64)


@dataclass(frozen=True)
class ScoreHistogram:
    """Numbers of positives and of negatives of one class in each score bin ``(low, high]``, ``(SCORE_BINS,)`` each."""

    positives: Counts
    negatives: Counts

    def __post_init__(self) -> None:
        for counts in (self.positives, self.negatives):
            if counts.shape != (SCORE_BINS,) or counts.min() < 0:
                raise ValueError(f"Expected {SCORE_BINS} counts of 0 or more, got {counts.shape}.")

    def __add__(self, other: "ScoreHistogram") -> "ScoreHistogram":
        return ScoreHistogram(self.positives + other.positives, self.negatives + other.negatives)


def compute_score_histogram(scores: Floats, labels: Floats) -> ScoreHistogram:
    """Return the score histogram of one class; images with an unknown label are ignored.

    Args:
        scores: Probabilities, ``(n,)``.
        labels: 1, 0 or NaN for unknown, ``(n,)``.

    Raises:
        ValueError: If a score of a known label lies outside 0 to 1.
    """
    scores_by_label = [scores[labels == kind] for kind in (1, 0)]
    if not all((kind >= 0).all() and (kind <= 1).all() for kind in scores_by_label):
        raise ValueError("Expected probabilities, from 0 to 1.")
    positives, negatives = (np.bincount(find_score_bins(kind), minlength=SCORE_BINS) for kind in scores_by_label)
    return ScoreHistogram(positives, negatives)


def parse_score_histograms(classes: Sequence[str], positives: Counts, negatives: Counts) -> dict[str, ScoreHistogram]:
    """Return class -> histogram from two flat arrays with ``SCORE_BINS`` counts for each class in turn.

    Raises:
        ValueError: If a class is repeated, an array has the wrong length, or a count is negative.
    """
    if len(set(classes)) < len(classes):
        raise ValueError("scores must be of tested classes, once each.")
    for kind, counts in (("positives", positives), ("negatives", negatives)):
        if counts.shape != (len(classes) * SCORE_BINS,) or counts.min(initial=0) < 0:
            raise ValueError(f"scores of {kind} must be {SCORE_BINS} counts for each reported class.")
    both = (counts.reshape(-1, SCORE_BINS) for counts in (positives, negatives))
    return dict(zip(classes, map(ScoreHistogram, *both), strict=True))


def convert_histograms_to_rows(histograms: Mapping[str, ScoreHistogram]) -> tuple[tuple[str, ...], NDArray[np.float32]]:
    """Return the sorted class names, and their counts (positives, then negatives) as rows ``(classes, 2 *
    SCORE_BINS)``.

    The rows are float32, in which counts are exact up to 2**24.
    """
    names = tuple(sorted(histograms))
    rows = [np.concatenate([histograms[name].positives, histograms[name].negatives]) for name in names]
    return names, np.array(rows, np.float32).reshape(-1, 2 * SCORE_BINS)


def find_score_bins(scores: Floats) -> Counts:
    """Return the index of the histogram bin of each score, ``(n,)``."""
    return np.searchsorted(BIN_EDGES[1:-1], np.asarray(scores, np.float64), side="left")


def compute_pooled_auroc(histogram: ScoreHistogram) -> ValueWithError | None:
    """Return the AUROC of a histogram with its largest possible error; None without positives or negatives.

    A positive and a negative in the same bin may have either order.
    """
    positives = histogram.positives
    negatives = histogram.negatives
    pairs = int(positives.sum()) * int(negatives.sum())
    if not pairs:
        return None
    below = np.cumsum(negatives)  # negatives up to and with each bin
    # Python's integers, because sites may state some billion images, whose pairs exceed 64 bits.
    positive_counts = positives.astype(object)
    smaller_pairs = int(positive_counts @ (below - negatives))
    same_bin_pairs = int(positive_counts @ negatives)
    return ValueWithError.from_bounds(smaller_pairs / pairs, (smaller_pairs + same_bin_pairs) / pairs)


def compute_pooled_average_precision(histogram: ScoreHistogram) -> ValueWithError | None:
    """Return the average precision (scikit-learn's) with its largest possible error; None without positives or
    negatives.

    The upper bound assumes that in each bin all positives have one score above the negatives. The lower bound assumes
    that they have distinct scores below the negatives.
    """
    # From the highest scores down.
    positives = histogram.positives[::-1]
    negatives = histogram.negatives[::-1]
    total = int(positives.sum())
    false_positives = np.cumsum(negatives)
    if not total or not false_positives[-1]:
        return None
    true_positives = np.cumsum(positives)
    is_filled = positives > 0
    squares = positives[is_filled].astype(np.float64) * true_positives[is_filled]  # as integers they may exceed 64 bits
    high = np.sum(squares / (true_positives + false_positives - negatives)[is_filled]) / total
    # A positive of rank k (of all positives) in a bin with w negatives above or in it has precision
    # k / (k + w) = 1 - w / (k + w). The sum over all ranks needs no list of ranks, whose length a site could choose.
    lost_precision = false_positives * _sum_reciprocals(
        true_positives - positives + false_positives, true_positives + false_positives
    )
    low = np.sum(positives - lost_precision) / total
    return ValueWithError.from_bounds(float(low), float(high))


_TABLE_LENGTH = 64
_HARMONIC_NUMBERS = np.concatenate([[0.0], np.cumsum(1 / np.arange(1, _TABLE_LENGTH + 1))])
"""Sums of the first 0 to 64 reciprocals, ``(65,)``."""


def _sum_reciprocals(after: Counts, until: Counts) -> Floats:
    """Return the sums of ``1 / j`` over the integers ``after < j <= until``, ``(n,)`` each.

    Up to 64, the sums come from a table. Above, they follow from the Euler-Maclaurin series of the harmonic numbers,
    whose first omitted term is below 1e-16. The memory does not depend on the integers.
    """
    listed_until: Floats = _HARMONIC_NUMBERS[np.minimum(until, _TABLE_LENGTH)]
    listed_after: Floats = _HARMONIC_NUMBERS[np.minimum(after, _TABLE_LENGTH)]
    low = np.maximum(after, _TABLE_LENGTH).astype(np.float64)
    high = np.maximum(until, _TABLE_LENGTH).astype(np.float64)

    def correct(j: Floats) -> Floats:
        return 1 / (2 * j) - 1 / (12 * j**2) + 1 / (120 * j**4) - 1 / (252 * j**6)

    # log1p keeps all digits where few integers lie between two large ones.
    rest: Floats = np.log1p((high - low) / low) + (correct(high) - correct(low))
    total: Floats = (listed_until - listed_after) + rest
    return total
