"""Score histograms, which the coordinator can add up over sites, and the AUROC and average precision they imply.

A histogram does not tell the order of images inside a bin. AUROC and average precision therefore have a lower and an
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
"""Counts by score in one flat array: :data:`BINS` counts of the first class or row, then those of the next."""

THRESHOLD = 0.5
BINS = 1024
TENTH_EDGES = np.arange(1, 10) / 10
LOGIT_DIVISOR = 3.0
_EVEN = np.arange(1, BINS - len(TENTH_EDGES)) / (BINS - len(TENTH_EDGES))
_INNER = _EVEN**LOGIT_DIVISOR / (_EVEN**LOGIT_DIVISOR + (1 - _EVEN) ** LOGIT_DIVISOR)
EDGES = np.concatenate([[0.0], np.sort(np.concatenate([_INNER, TENTH_EDGES])), [1.0]])
"""Borders of the bins, ``(BINS + 1,)``: even in ``sigmoid(logit(p) / LOGIT_DIVISOR)``, and at every tenth besides.

A rare finding's scores lie near 0, those of a sure model near 0 and 1. Bins even in probability would put them into a
handful; bins even in the logit would be wide in the middle and need an end. This transform has about 85 bins a unit of
the logit at 0.5, 49 at 0.01 and 14 at 0.0001. The tenths make decisions at 0.5 and calibration by tenths exact.
"""
BIN_CENTRES = (EDGES[1:] + EDGES[:-1]) / 2
BIN_HALF_WIDTHS = (EDGES[1:] - EDGES[:-1]) / 2
FIRST_POSITIVE_BIN = int(np.searchsorted(EDGES, THRESHOLD))
"""First bin of the scores above :data:`THRESHOLD`."""


def make_empty_score_counts() -> ScoreCounts:
    """Return an empty array of counts; used as ``default_factory`` of dataclass fields."""
    return np.zeros(0, np.int64)


@dataclass(frozen=True)
class ScoreHistogram:
    """Numbers of positives and of negatives of one class in each score bin ``(low, high]``, ``(BINS,)`` each."""

    positives: Counts
    negatives: Counts

    def __post_init__(self) -> None:
        for counts in (self.positives, self.negatives):
            if counts.shape != (BINS,) or counts.min() < 0:
                raise ValueError(f"Expected {BINS} counts of 0 or more, got {counts.shape}.")

    def __add__(self, other: "ScoreHistogram") -> "ScoreHistogram":
        return ScoreHistogram(self.positives + other.positives, self.negatives + other.negatives)


def compute_score_histogram(scores: Floats, labels: Floats) -> ScoreHistogram:
    """Return the score histogram of one class from scores and labels ``(n,)``; labels NaN (unknown) are ignored.

    Raises:
        ValueError: If a score lies outside 0 to 1.
    """
    of_kind = [scores[labels == kind] for kind in (1, 0)]
    if not all((kind >= 0).all() and (kind <= 1).all() for kind in of_kind):
        raise ValueError("Expected probabilities, from 0 to 1.")
    positives, negatives = (np.bincount(find_score_bins(kind), minlength=BINS) for kind in of_kind)
    return ScoreHistogram(positives, negatives)


def parse_score_histograms(classes: Sequence[str], positives: Counts, negatives: Counts) -> dict[str, ScoreHistogram]:
    """Return the histograms of these classes from two flat arrays, with ``BINS`` counts for each class in turn.

    Raises:
        ValueError: If a class is repeated, an array has the wrong length, or a count is negative.
    """
    if len(set(classes)) < len(classes):
        raise ValueError("scores must be of tested classes, once each.")
    for kind, counts in (("positives", positives), ("negatives", negatives)):
        if counts.shape != (len(classes) * BINS,) or counts.min(initial=0) < 0:
            raise ValueError(f"scores of {kind} must be {BINS} counts for each reported class.")
    both = (counts.reshape(-1, BINS) for counts in (positives, negatives))
    return dict(zip(classes, map(ScoreHistogram, *both), strict=True))


def convert_histograms_to_rows(histograms: Mapping[str, ScoreHistogram]) -> tuple[tuple[str, ...], NDArray[np.float32]]:
    """Return the sorted class names, and their counts (positives, then negatives) as rows ``(classes, 2 * BINS)``.

    The rows are float32, in which counts are exact up to 2**24.
    """
    names = tuple(sorted(histograms))
    rows = [np.concatenate([histograms[name].positives, histograms[name].negatives]) for name in names]
    return names, np.array(rows, np.float32).reshape(-1, 2 * BINS)


def find_score_bins(scores: Floats) -> Counts:
    """Return the index of the histogram bin that holds each score."""
    return np.searchsorted(EDGES[1:-1], np.asarray(scores, np.float64), side="left")


def compute_pooled_auroc(histogram: ScoreHistogram) -> ValueWithError | None:
    """Return the AUROC with its error bound from a histogram; None without positives or negatives.

    A pair of a positive and a negative in the same bin may have either order.
    """
    positives = histogram.positives
    negatives = histogram.negatives
    pairs = int(positives.sum()) * int(negatives.sum())
    if not pairs:
        return None
    below = np.cumsum(negatives)  # negatives up to and with each bin
    # Python's integers: the pairs of some billion images, which sites may state, exceed 64 bits.
    each = positives.astype(object)
    won = int(each @ (below - negatives))
    open_ = int(each @ negatives)
    return ValueWithError.from_bounds(won / pairs, (won + open_) / pairs)


def compute_pooled_average_precision(histogram: ScoreHistogram) -> ValueWithError | None:
    """Return the average precision (scikit-learn's) with its error bound; None without positives or negatives.

    The upper bound assumes that in each bin all positives have one score above the negatives; the lower bound, that
    they have distinct scores below the negatives.
    """
    positives, negatives = histogram.positives[::-1], histogram.negatives[::-1]  # from the highest scores down
    total = int(positives.sum())
    wrong = np.cumsum(negatives)
    if not total or not wrong[-1]:
        return None
    right = np.cumsum(positives)
    is_filled = positives > 0
    squares = positives[is_filled].astype(np.float64) * right[is_filled]  # as integers they may exceed 64 bits
    high = np.sum(squares / (right + wrong - negatives)[is_filled]) / total
    # A positive of rank k (of all positives) in a bin with w negatives above or in it has precision
    # k / (k + w) = 1 - w / (k + w). Their sum needs no list of ranks, whose length a site could choose.
    lost = wrong * _sum_reciprocals(right - positives + wrong, right + wrong)
    low = np.sum(positives - lost) / total
    return ValueWithError.from_bounds(float(low), float(high))


_LISTED_SUMS = 64
_HARMONIC_NUMBERS = np.concatenate([[0.0], np.cumsum(1 / np.arange(1, _LISTED_SUMS + 1))])
"""The sums of the first 0 to 64 reciprocals."""


def _sum_reciprocals(after: Counts, until: Counts) -> Floats:
    """Return the sums of ``1 / j`` for the integers j above ``after``, up to and with ``until``, ``(n,)`` each.

    Up to 64, the sums are added up. Above, they follow from the Euler-Maclaurin series of the harmonic numbers, whose
    first omitted term is below 1e-16. The memory does not depend on the integers.
    """
    listed_until: Floats = _HARMONIC_NUMBERS[np.minimum(until, _LISTED_SUMS)]
    listed_after: Floats = _HARMONIC_NUMBERS[np.minimum(after, _LISTED_SUMS)]
    low = np.maximum(after, _LISTED_SUMS).astype(np.float64)
    high = np.maximum(until, _LISTED_SUMS).astype(np.float64)

    def correct(j: Floats) -> Floats:
        return 1 / (2 * j) - 1 / (12 * j**2) + 1 / (120 * j**4) - 1 / (252 * j**6)

    # log1p keeps all digits where few integers lie between two large ones.
    rest: Floats = np.log1p((high - low) / low) + (correct(high) - correct(low))
    total: Floats = (listed_until - listed_after) + rest
    return total
