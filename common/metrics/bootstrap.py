"""Bootstrap intervals of AUROCs, for every class and for their mean.

The Bayesian bootstrap (Rubin, Annals of Statistics 1981) draws an exponential weight for each patient in every
resample; all images of a patient have that weight. Resampling images with replacement would lose the few positives of
rare classes in some resamples; weights never do. All classes share the resamples of patients, which the interval of
their mean requires.

Every bootstrap interval is too narrow with few positives: with one positive patient only 17 of 100 "95 %" intervals
contain the true AUROC. Each interval is therefore widened to include the score interval of Newcombe (Statistics in
Medicine 2006, method 5), computed for the number of patients, not of images.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from polyclinic.common.metrics.score_histograms import ScoreHistogram, compute_pooled_auroc

RESAMPLES = 1000
CONFIDENCE_LEVEL = 0.95
BISECTION_STEPS = 60  # to the last bit of a number between 0 and 1
MIN_INTERVAL_WIDTH = 1e-5
"""Width below which an interval is only rounding, because weights are summed in float32."""
RESAMPLES_PER_BLOCK = 10  # small enough for the arrays to fit into a processor's cache

Floats = NDArray[np.floating]
Interval = tuple[float, float]


@dataclass(frozen=True)
class AurocIntervals:
    """95 % intervals of the AUROC of each class and of their mean; classes without an AUROC are left out.

    Attributes:
        over: The unit that was resampled: ``images`` if patients are unknown; None in files of old releases.
    """

    mean_auroc: Interval | None
    per_class: Mapping[str, Interval]
    resamples: int = RESAMPLES
    over: Literal["patients", "images"] | None = None


@dataclass(frozen=True)
class EstimateWithInterval:
    """An estimate with its 95 % interval, which contains the estimate."""

    value: float
    interval: Interval


@dataclass(frozen=True)
class RankedClassScores:
    """The test images of one class, sorted by score once to make weighted AUROCs of many resamples fast.

    Attributes:
        positives, negatives: Row numbers of images in the test set; negatives sorted by ascending score.
        cuts: Positions in ``negatives``, ``(m,)``, ascending without repeats: the start, the end, and for each positive
            the positions before and after the negatives with an equal score.
        below, upto: For each positive, the indices in ``cuts`` of these two positions.
    """

    positives: NDArray[np.intp]
    negatives: NDArray[np.intp]
    cuts: NDArray[np.intp]
    below: NDArray[np.intp]
    upto: NDArray[np.intp]

    @classmethod
    def from_scores(cls, scores: Floats, labels: Floats) -> "RankedClassScores":
        positives = np.flatnonzero(labels == 1)
        negatives = np.flatnonzero(labels == 0)
        negatives = negatives[np.argsort(scores[negatives], kind="stable")]
        ordered = scores[negatives]
        below, upto = (np.searchsorted(ordered, scores[positives], side) for side in ("left", "right"))
        cuts = np.unique(np.concatenate([below, upto, [0, len(negatives)]]))
        return cls(positives, negatives, cuts, np.searchsorted(cuts, below), np.searchsorted(cuts, upto))

    def compute_weighted_aurocs(self, weights: NDArray[np.float32]) -> Floats:
        """Return the weighted AUROC of each resample, ``(resamples,)``, from weights ``(images, resamples)``."""
        negative_weights = weights.take(self.negatives, 0, mode="clip")  # several times faster than indexing
        weight_between_cuts = np.add.reduceat(negative_weights, self.cuts[:-1], axis=0)  # (m - 1, resamples)
        weight_before_cut = np.zeros((len(self.cuts), weights.shape[1]))  # weight of the negatives before each cut
        np.cumsum(weight_between_cuts, axis=0, out=weight_before_cut[1:])
        positive_weights = weights.take(self.positives, 0, mode="clip")
        smaller_weight = weight_before_cut.take(self.below, 0, mode="clip")
        smaller_weight += weight_before_cut.take(self.upto, 0, mode="clip")
        # Ties count half: the sum has the weights below each positive twice, and tied weights once.
        smaller_pairs = np.einsum("ir,ir->r", positive_weights, smaller_weight) / 2
        pairs = weight_before_cut[-1] * positive_weights.sum(axis=0, dtype=np.float64)
        return np.asarray(np.minimum(smaller_pairs / pairs, 1.0))  # rounding may exceed 1


def bootstrap_auroc_intervals(
    scores: Floats,
    labels: Floats,
    patients: NDArray[np.str_],
    class_names: Sequence[str],
    generator: np.random.Generator,
) -> AurocIntervals:
    """Compute 95 % intervals of the AUROC of each class that has positives and negatives, and of their mean.

    Args:
        scores: ``(n, classes)``.
        labels: 1, 0 or NaN for unknown, ``(n, classes)``.
        patients: Patient of each image, ``(n,)``; the bootstrap resamples patients.
        class_names: Names of the columns.
    """
    columns = {name: c for c, name in enumerate(class_names) if {0.0, 1.0} <= set(np.unique(labels[:, c]).tolist())}
    if not columns:
        return AurocIntervals(None, {})
    ranked = [RankedClassScores.from_scores(scores[:, c], labels[:, c]) for c in columns.values()]
    resampled = ResampledAurocs.from_ranked_classes(ranked, patients, generator)
    return AurocIntervals(resampled.interval_of_mean_auroc, dict(zip(columns, resampled.wide, strict=True)))


@dataclass(frozen=True)
class ResampledAurocs:
    """AUROCs of several classes on the same images, and on every bootstrap resample of their patients.

    Attributes:
        observed: AUROCs on the images without resampling, ``(classes,)``.
        drawn: AUROCs on the resamples, ``(classes, resamples)``.
        narrow: Percentile interval of each class.
        wide: The percentile interval of each class, widened to include Newcombe's interval for few patients.
    """

    observed: Floats
    drawn: Floats
    narrow: Sequence[Interval]
    wide: Sequence[Interval]

    @classmethod
    def from_ranked_classes(
        cls, ranked: Sequence[RankedClassScores], patients: NDArray[np.str_], generator: np.random.Generator
    ) -> "ResampledAurocs":
        """Compute the AUROC of each class on :data:`RESAMPLES` resamples of the patients.

        Args:
            ranked: The ranked images of each class.
            patients: Patient of each image in the test set, ``(images,)``.
        """
        numbers, owner = np.unique(patients, return_inverse=True)
        drawn = []
        for _ in range(RESAMPLES // RESAMPLES_PER_BLOCK):
            weights = generator.standard_exponential((len(numbers), RESAMPLES_PER_BLOCK), dtype=np.float32)
            weights = weights.take(owner, 0, mode="clip")
            aurocs_of_classes = [ranking.compute_weighted_aurocs(weights) for ranking in ranked]
            drawn.append(np.stack(aurocs_of_classes))  # (classes, RESAMPLES_PER_BLOCK)
        aurocs = np.concatenate(drawn, axis=1)
        observed = np.array(
            [ranking.compute_weighted_aurocs(np.ones((len(owner), 1), np.float32))[0] for ranking in ranked]
        )
        patient_counts_of_classes = [
            (len(np.unique(owner[ranking.positives])), len(np.unique(owner[ranking.negatives]))) for ranking in ranked
        ]
        narrow = [_compute_percentile_interval(class_aurocs) for class_aurocs in aurocs]
        wide = [
            _compute_interval_hull(percentile_interval, compute_newcombe_interval(value, *patient_counts))
            for percentile_interval, value, patient_counts in zip(
                narrow, observed, patient_counts_of_classes, strict=True
            )
        ]
        return cls(observed, aurocs, narrow, wide)

    @property
    def interval_of_mean_auroc(self) -> Interval:
        """The 95 % interval of the mean AUROC over the classes, widened like the intervals of the classes."""
        mean = self.observed.mean()
        narrow = self.narrow
        wide = self.wide
        widths = [sum((high - low) ** 2 for low, high in each) for each in (narrow, wide)]
        if all(
            high - low < MIN_INTERVAL_WIDTH for low, high in narrow
        ):  # no width to scale, for instance after a perfect ranking
            below, above = (
                math.hypot(*(inner[end] - outer[end] for inner, outer in zip(narrow, wide, strict=True)))
                for end in (0, 1)
            )
            return max(float(mean - below / len(wide)), 0.0), min(float(mean + above / len(wide)), 1.0)
        factor = (widths[1] / widths[0]) ** 0.5
        low, high = _compute_percentile_interval(self.drawn.mean(axis=0))
        lowest = float(mean - factor * max(mean - low, 0.0))
        highest = float(mean + factor * max(high - mean, 0.0))
        return max(lowest, 0.0), min(highest, 1.0)

    @property
    def mean_auroc(self) -> EstimateWithInterval:
        """The mean AUROC over the classes, with its interval."""
        return EstimateWithInterval(float(self.observed.mean()), self.interval_of_mean_auroc)

    def select_classes(self, classes: slice) -> "ResampledAurocs":
        """Return the AUROCs and intervals of a slice of the classes."""
        return ResampledAurocs(self.observed[classes], self.drawn[classes], self.narrow[classes], self.wide[classes])


def compare_mean_aurocs(
    scores: Sequence[Floats], labels: Floats, patients: NDArray[np.str_], generator: np.random.Generator
) -> tuple[list[EstimateWithInterval], list[EstimateWithInterval]]:
    """Compare the mean AUROCs of several models on the same images.

    All models share the same resamples of the patients. The interval of a difference is the percentile interval of the
    resampled differences. It is extended to include the interval of Zou and Donner (Statistics in Medicine 2008), which
    combines the intervals of both means and their correlation, because with few positive patients the percentile
    interval alone is too narrow.

    Args:
        scores: Scores of each model, ``(n, classes)``.
        labels: 1, 0 or NaN for unknown, ``(n, classes)``; each class needs positives and negatives.
        patients: Patient of each image, ``(n,)``.
        generator: Draws the resamples.

    Returns:
        The mean AUROC of each model, and the mean AUROC of each further model minus that of the first.
    """
    classes = labels.shape[1]
    ranked = [RankedClassScores.from_scores(model[:, c], labels[:, c]) for model in scores for c in range(classes)]
    resampled = ResampledAurocs.from_ranked_classes(ranked, patients, generator)
    models = [resampled.select_classes(slice(m * classes, (m + 1) * classes)) for m in range(len(scores))]
    means = [model.mean_auroc for model in models]
    return means, [compare_resampled_aurocs(model, models[0]) for model in models[1:]]


def compare_resampled_aurocs(model: ResampledAurocs, reference: ResampledAurocs) -> EstimateWithInterval:
    """Return the mean AUROC of a model minus that of a reference, on the same images and resamples.

    The interval is computed as in :func:`compare_mean_aurocs`.
    """

    def compute_interval_reach(up: float, down: float, correlation: float) -> float:
        return math.sqrt(max(up * up + down * down - 2 * correlation * up * down, 0.0))

    mean = model.mean_auroc
    first = reference.mean_auroc
    model_means, reference_means = model.drawn.mean(axis=0), reference.drawn.mean(axis=0)
    value = mean.value - first.value
    varies = min(float(np.std(model_means)), float(np.std(reference_means))) > 1e-12
    correlation = float(np.corrcoef(model_means, reference_means)[0, 1]) if varies else 0.0
    below = compute_interval_reach(mean.value - mean.interval[0], first.interval[1] - first.value, correlation)
    above = compute_interval_reach(mean.interval[1] - mean.value, first.value - first.interval[0], correlation)
    low, high = _compute_interval_hull(
        _compute_percentile_interval(model_means - reference_means), (value - below, value + above)
    )
    return EstimateWithInterval(value, (max(min(low, value), -1.0), min(max(high, value), 1.0)))


def compute_newcombe_interval(auroc: float, positives: int, negatives: int) -> Interval:
    """Compute Newcombe's 95 % score interval of an AUROC.

    Args:
        positives, negatives: Numbers of independent positives and negatives, 1 or more each.
    """
    z = NormalDist().inv_cdf((1 + CONFIDENCE_LEVEL) / 2)
    shape = (positives + negatives) / 2 - 1

    def compute_excess(true: float) -> float:
        spread = 1 + shape * ((1 - true) / (2 - true) + true / (1 + true))
        return (auroc - true) ** 2 - z * z * true * (1 - true) * spread / (positives * negatives)

    # At 0 and 1 the true value itself is a root.
    low = 0.0 if compute_excess(0.0) <= 0 else _find_sign_change_by_bisection(compute_excess, 0.0, auroc)
    high = 1.0 if compute_excess(1.0) <= 0 else _find_sign_change_by_bisection(compute_excess, 1.0, auroc)
    return low, high


def _find_sign_change_by_bisection(function: Callable[[float], float], outside: float, inside: float) -> float:
    """Find by bisection the point between ``outside`` and ``inside`` at which a function changes its sign.

    Args:
        function: Positive at ``outside``, negative or 0 at ``inside``.
        outside, inside: Ends of the search interval.
    """
    # Importing scipy's root search takes a quarter of a second, more than all intervals of a run.
    for _ in range(BISECTION_STEPS):
        middle = (outside + inside) / 2
        outside, inside = (middle, inside) if function(middle) > 0 else (outside, middle)
    return inside


def _compute_interval_hull(interval: Interval, other: Interval) -> Interval:
    return min(interval[0], other[0]), max(interval[1], other[1])


def compute_pooled_auroc_interval(histogram: ScoreHistogram, generator: np.random.Generator) -> Interval | None:
    """Return the 95 % interval of a class's AUROC from its score histogram; None without positives or negatives.

    The bootstrap resamples images. The order of images inside a bin is unknown, so the lower end assumes the worst
    order in each resample, and the upper end the best.
    """
    is_filled = (histogram.positives + histogram.negatives) > 0
    positives = histogram.positives[is_filled]
    negatives = histogram.negatives[is_filled]
    if not positives.any() or not negatives.any():
        return None
    # The weights of n images add up to a gamma variate of shape n; (resamples, bins).
    positive_weights = generator.standard_gamma(positives, (RESAMPLES, len(positives)))
    negative_weights = generator.standard_gamma(negatives, (RESAMPLES, len(negatives)))
    pairs = positive_weights.sum(axis=1) * negative_weights.sum(axis=1)
    smaller_share = (positive_weights * (np.cumsum(negative_weights, axis=1) - negative_weights)).sum(axis=1) / pairs
    tied_share = (positive_weights * negative_weights).sum(axis=1) / pairs
    exact = compute_pooled_auroc(histogram)
    assert exact is not None, "there are positives and negatives"
    counts = int(positives.sum()), int(negatives.sum())
    low, _ = compute_newcombe_interval(max(exact.low, 0.0), *counts)
    _, high = compute_newcombe_interval(min(exact.high, 1.0), *counts)
    (worst, _) = _compute_percentile_interval(smaller_share)
    (_, best) = _compute_percentile_interval(smaller_share + tied_share)
    return _compute_interval_hull((worst, min(best, 1.0)), (low, high))


def _compute_percentile_interval(aurocs: Floats) -> Interval:
    low, high = np.quantile(aurocs, ((1 - CONFIDENCE_LEVEL) / 2, (1 + CONFIDENCE_LEVEL) / 2))
    return float(low), float(high)
