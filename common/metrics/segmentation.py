"""Dice and 95 % Hausdorff distance by class and patient, their pooling over hospitals, and intervals over patients.

A patient's Dice is that of all of the patient's images together, as if they were one volume. It is defined for patients
in whom the class is outlined. The Hausdorff distance of a patient is the mean over the patient's images; it is defined
where a class is both outlined and predicted.

Hospitals send both as histograms over patients, which add up. A Dice lies between 0 and 1 as a score does. A distance d
is sent as ``MIDDLE_DISTANCE / (MIDDLE_DISTANCE + d)``, whose bins are as wide as 1 to 2 % of a distance from 1 to 100.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add

import numpy as np
from numpy.typing import NDArray

from polyclinic.common.metrics.bootstrap import CONFIDENCE_LEVEL, RESAMPLES, Interval
from polyclinic.common.metrics.score_histograms import (
    BIN_CENTRES,
    BINS,
    EDGES,
    Counts,
    ScoreHistogram,
    find_score_bins,
)
from polyclinic.data.images.outlines import find_border

Floats = NDArray[np.float64]
Areas = NDArray[np.bool_]

PERCENTILE = 95
MIDDLE_DISTANCE = 10.0
"""Distance, in mm or pixels, that the middle of a histogram stands for."""
ROUNDING = 1e-6
"""Share by which a mean may leave the bins of its values, because numbers travel rounded."""


def compute_hausdorff_distance(
    predicted: Areas, reference: Areas, spacing: Sequence[float] | None = None, percentile: float = PERCENTILE
) -> float:
    """Return the larger of both directions' percentile of the distances between two surfaces; NaN if one is empty.

    A surface is the pixels of an area with a neighbour outside, as in MONAI's ``compute_hausdorff_distance``; pixels at
    the border of the image count as surface.

    Args:
        predicted, reference: Masks of one shape, ``(*spatial)``.
        spacing: Side of a pixel along each axis, in mm; None measures in pixels.
    """
    from scipy import ndimage  # here: a program that computes no distance does not pay for its import

    if not predicted.any() or not reference.any():
        return float("nan")
    box = _find_bounding_box(predicted | reference)
    predicted = predicted[box]
    reference = reference[box]
    surfaces = [find_border(area) for area in (predicted, reference)]
    directed = list[float]()
    for surface, other in (surfaces, surfaces[::-1]):
        distances = ndimage.distance_transform_edt(~other, sampling=spacing)
        directed.append(float(np.percentile(distances[surface], percentile)))
    return max(directed)


def _find_bounding_box(area: Areas) -> tuple[slice, ...]:
    """Return the smallest box around an area, one pixel wider on each side where the image has one.

    Every surface of a part of the area is the same in the box: a pixel at its border belongs to the area only where the
    image ends.
    """
    box = list[slice]()
    for axis, side in enumerate(area.shape):
        others = tuple(other for other in range(area.ndim) if other != axis)
        inside = np.flatnonzero(area.any(axis=others))
        box.append(slice(max(int(inside[0]) - 1, 0), min(int(inside[-1]) + 2, side)))
    return tuple(box)


@dataclass(frozen=True)
class AreaComparison:
    """Predicted and outlined areas of the images of one part of the data, by class.

    Attributes:
        predicted, reference, common: Pixels of each image and class, ``(n, classes)``: predicted, outlined, and both.
        is_known: ``(n, classes)``, False where the class is not annotated.
        distances: Hausdorff distances ``(n, classes)``, NaN where undefined; None if they were not computed.
        loss: Mean loss over the images; None if no label is known.
    """

    predicted: NDArray[np.int64]
    reference: NDArray[np.int64]
    common: NDArray[np.int64]
    is_known: NDArray[np.bool_]
    distances: Floats | None = None
    loss: float | None = None


@dataclass(frozen=True)
class PatientFigures:
    """Figures of one class for each patient.

    Attributes:
        dice: Of each patient in whom the class is outlined.
        distances: Hausdorff distance of the same patients; infinite where nothing is predicted.
    """

    dice: Floats
    distances: Floats


def compute_patient_figures(compared: AreaComparison, patients: NDArray[np.str_], column: int) -> PatientFigures:
    """Return the figures of one class for each patient.

    Args:
        patients: ``(n,)``, the patient of each image.
        column: The class's column.
    """
    rows = np.flatnonzero(compared.is_known[:, column])
    names, place = np.unique(patients[rows], return_inverse=True)

    def add_up(values: NDArray[np.int64]) -> Floats:
        return np.bincount(place, values[rows, column], minlength=len(names)).astype(np.float64)

    predicted, reference, common = map(add_up, (compared.predicted, compared.reference, compared.common))
    shown = reference > 0
    dice = 2 * common[shown] / (predicted + reference)[shown]
    distances = np.full(len(names), np.inf)
    if compared.distances is not None:
        of_image = compared.distances[rows, column]
        defined = ~np.isnan(of_image)
        counts = np.bincount(place[defined], minlength=len(names))
        sums = np.bincount(place[defined], of_image[defined], minlength=len(names))
        distances[counts > 0] = sums[counts > 0] / counts[counts > 0]
    return PatientFigures(dice, distances[shown])


def compute_mean_dice(compared: AreaComparison, patients: NDArray[np.str_], columns: Sequence[int]) -> float | None:
    """Return the mean over classes of the mean Dice over patients; None if no class is outlined in any patient."""
    of_classes = [compute_patient_figures(compared, patients, column).dice for column in columns]
    return _average([float(dice.mean()) for dice in of_classes if len(dice)])


# ---------------------------------------------------------------------- histograms over patients


def make_patient_histogram(figures: PatientFigures) -> ScoreHistogram:
    """Return the histogram of a class's patients: by Dice (as ``positives``), and by distance (as ``negatives``)."""
    kinds = figures.dice, MIDDLE_DISTANCE / (MIDDLE_DISTANCE + figures.distances)
    return ScoreHistogram(*(np.bincount(find_score_bins(values), minlength=BINS) for values in kinds))


@dataclass(frozen=True)
class ClassOverlap:
    """Figures of one class over all patients in whom it is outlined; None if undefined.

    Attributes:
        dice: Mean over these patients.
        interval: 95 % bootstrap interval of the mean over patients.
        hd95: Mean 95 % Hausdorff distance over the patients in whom something is predicted.
        hd95_interval: Its interval.
        patients: Number of patients in whom the class is outlined.
        missed: Number of these in whom nothing is predicted.
    """

    dice: float | None
    interval: Interval | None
    hd95: float | None
    hd95_interval: Interval | None
    patients: int
    missed: int


@dataclass(frozen=True)
class SegmentationSummary:
    """The figures of a segmentation test.

    Attributes:
        mean_dice: Mean over the classes with a Dice.
        per_class: Class -> its figures.
        interval: 95 % bootstrap interval of the mean; each resample draws the patients of each class.
        over: What was resampled: ``images`` if the patients are unknown.
        unit: The unit of distances: ``mm``, or ``pixels`` if the spacing is unknown.
    """

    mean_dice: float | None
    per_class: Mapping[str, ClassOverlap] = field(default_factory=dict)
    interval: Interval | None = None
    over: str = "patients"
    unit: str = "pixels"


@dataclass(frozen=True)
class _CountedValues:
    """Values with the number of patients who have each, so that exact values and histograms are averaged alike."""

    values: Floats
    counts: Counts

    @classmethod
    def from_each(cls, values: Floats) -> "_CountedValues":
        return cls(values, np.ones(len(values), np.int64))

    def average(self, generator: np.random.Generator | None) -> tuple[float | None, Interval | None, Floats | None]:
        """Return the mean over patients, its bootstrap interval, and the means of all resamples."""
        filled = np.flatnonzero(self.counts)
        values, counts, total = self.values[filled], self.counts[filled], int(self.counts.sum())
        if not total:
            return None, None, None
        # Of exact values the very mean that a hospital sends, to the last digit.
        mean = float(values.mean() if total == len(values) else counts @ values / total)
        if generator is None:
            return mean, None, None
        means = generator.multinomial(total, counts / total, RESAMPLES) @ values / total
        return mean, _make_interval(means), means


def summarise_patients(
    figures: Mapping[str, PatientFigures], generator: np.random.Generator | None
) -> SegmentationSummary:
    """Return the figures of all patients, exact.

    Args:
        figures: Class -> the figures of its patients.
        generator: Random generator of the bootstrap; None for no intervals.
    """
    values = dict[str, tuple[_CountedValues, _CountedValues, int]]()
    for name, of_class in figures.items():
        finite = of_class.distances[np.isfinite(of_class.distances)]
        missed = len(of_class.distances) - len(finite)
        values[name] = _CountedValues.from_each(of_class.dice), _CountedValues.from_each(finite), missed
    return _summarise(values, generator)


def summarise_patient_histograms(
    histograms: Mapping[str, ScoreHistogram], generator: np.random.Generator | None
) -> SegmentationSummary:
    """Return the figures of all patients from histograms over them.

    A value inside a bin counts as the middle of the bin, so that a mean Dice may be off by up to 0.002.

    Args:
        generator: Random generator of the bootstrap; None for no intervals, where a patient may count twice.
    """
    distances_of_bins = _convert_to_distance(BIN_CENTRES)
    values = dict[str, tuple[_CountedValues, _CountedValues, int]]()
    for name, histogram in histograms.items():
        # Nothing is predicted in patients at an infinite distance, which fall into the first bin.
        missed = int(histogram.negatives[0])
        predicted = histogram.negatives.copy()
        predicted[0] = 0
        dice = _CountedValues(BIN_CENTRES, histogram.positives)
        values[name] = dice, _CountedValues(distances_of_bins, predicted), missed
    return _summarise(values, generator)


@dataclass(frozen=True)
class SiteOverlap:
    """Figures of one class over the patients of one hospital.

    Attributes:
        histogram: Of its patients, see :func:`make_patient_histogram`.
        dice, hd95: Exact means over its patients; None if the hospital does not send them. They are not used where the
            histogram does not allow them.
    """

    histogram: ScoreHistogram
    dice: float | None = None
    hd95: float | None = None

    @property
    def patients(self) -> int:
        """Number of patients in whom the class is outlined."""
        return int(self.histogram.positives.sum())

    @property
    def missed(self) -> int:
        """Number of these in whom nothing is predicted: an infinite distance falls into the first bin."""
        return int(self.histogram.negatives[0])

    @property
    def exact_dice(self) -> float | None:
        """The exact mean Dice, if it is possible with these patients in their bins."""
        return _check_mean(self.dice, self.histogram.positives, EDGES[:-1], EDGES[1:])

    @property
    def exact_hd95(self) -> float | None:
        """The exact mean distance, if it is possible with these patients in their bins."""
        predicted = self.histogram.negatives[1:]
        return _check_mean(self.hd95, predicted, _convert_to_distance(EDGES[2:]), _convert_to_distance(EDGES[1:-1]))


def _convert_to_distance(scores: Floats) -> Floats:
    """Return the distances that scores above 0 stand for in a histogram."""
    return MIDDLE_DISTANCE * (1 / scores - 1)


def _check_mean(mean: float | None, counts: Counts, low: Floats, high: Floats) -> float | None:
    """Return a mean over patients, or None if it does not lie between those of the bins' borders."""
    total = int(counts.sum())
    if mean is None or not total:
        return None
    least = float(counts @ low / total)
    most = float(counts @ high / total)
    return mean if least - ROUNDING <= mean <= most + ROUNDING * max(1.0, most) else None


def pool_site_overlaps(
    sites: Mapping[str, Sequence[SiteOverlap]], generator: np.random.Generator | None
) -> SegmentationSummary:
    """Return the figures over the patients of all hospitals together.

    A mean is that of the hospitals' exact means, weighed by their patients. If one of them is unknown, the mean is that
    of the histograms. Intervals are always those of the histograms.

    Args:
        sites: Class -> the figures of each hospital that sends a histogram.
        generator: As in :func:`summarise_patient_histograms`.
    """
    sums = {name: reduce(add, (each.histogram for each in of_sites)) for name, of_sites in sites.items()}
    pooled = summarise_patient_histograms(sums, generator)
    per_class = dict[str, ClassOverlap]()
    for name, of_class in pooled.per_class.items():
        dice = _pool_exact_means([(each.exact_dice, each.patients) for each in sites[name]])
        hd95 = _pool_exact_means([(each.exact_hd95, each.patients - each.missed) for each in sites[name]])
        dice = of_class.dice if dice is None else dice
        hd95 = of_class.hd95 if hd95 is None else hd95
        per_class[name] = replace(of_class, dice=dice, hd95=hd95)
    return replace(pooled, mean_dice=average_dice(per_class.values()), per_class=per_class)


def _pool_exact_means(means: Sequence[tuple[float | None, int]]) -> float | None:
    """Return the mean of means, weighed by their numbers of patients; None if a mean is unknown, or nobody counts."""
    counted = [(mean, patients) for mean, patients in means if patients]
    exact = [(mean, patients) for mean, patients in counted if mean is not None]
    if not exact or len(exact) < len(counted):
        return None
    if len({mean for mean, _ in exact}) == 1:  # no rounding where hospitals test on the same images
        return exact[0][0]
    return math.fsum(mean * patients for mean, patients in exact) / sum(patients for _, patients in exact)


def average_dice(classes: Iterable[ClassOverlap]) -> float | None:
    """Return the mean over the classes that have a Dice; None if there are none."""
    return _average([each.dice for each in classes if each.dice is not None])


def _summarise(
    values: Mapping[str, tuple[_CountedValues, _CountedValues, int]], generator: np.random.Generator | None
) -> SegmentationSummary:
    """Return the figures from each class's Dice and distances, and its number of patients without a prediction."""
    per_class = dict[str, ClassOverlap]()
    resampled = list[Floats]()
    for name, (of_dice, of_distance, missed) in values.items():
        dice, interval, means = of_dice.average(generator)
        hd95, hd95_interval, _ = of_distance.average(generator)
        per_class[name] = ClassOverlap(dice, interval, hd95, hd95_interval, int(of_dice.counts.sum()), missed)
        if means is not None:
            resampled.append(means)
    mean = average_dice(per_class.values())
    of_mean = _make_interval(np.mean(resampled, axis=0)) if resampled else None
    return SegmentationSummary(mean, per_class, of_mean)


def _average(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _make_interval(means: Floats) -> Interval:
    low, high = np.quantile(means, [(1 - CONFIDENCE_LEVEL) / 2, (1 + CONFIDENCE_LEVEL) / 2])
    return float(low), float(high)
