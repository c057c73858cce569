"""Dice and 95 % Hausdorff distance by class and patient, their pooling over hospitals, and intervals over patients.

The Dice of a patient is computed over all of the patient's images together, as if they were one volume. It is defined
for patients in whom the class is outlined. The Hausdorff distance of a patient is the mean over the patient's images
in which the class is both outlined and predicted.

Hospitals send both as histograms over patients, which can be added up. A Dice lies between 0 and 1, like a score. A
distance d is sent as ``MIDDLE_DISTANCE / (MIDDLE_DISTANCE + d)``; for distances from 1 to 100 a bin is as wide as 1 to
2 % of the distance.
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
    BIN_EDGES,
    SCORE_BINS,
    Counts,
    ScoreHistogram,
    find_score_bins,
)
from polyclinic.data.images.outlines import find_border

Floats = NDArray[np.float64]
Areas = NDArray[np.bool_]

SURFACE_DISTANCE_PERCENTILE = 95
MIDDLE_DISTANCE = 10.0
"""Distance, in mm or pixels, that falls into the middle of a histogram."""
ROUNDING_TOLERANCE = 1e-6
"""Relative error that is allowed when a mean is compared with the bins of its values, because sent numbers are
rounded.
"""


def compute_hausdorff_distance(
    predicted: Areas,
    reference: Areas,
    spacing: Sequence[float] | None = None,
    percentile: float = SURFACE_DISTANCE_PERCENTILE,
) -> float:
    """Return the percentile Hausdorff distance of two areas: the larger of both directions; NaN if an area is empty.

    The surface of an area is its pixels with a neighbour outside, as in MONAI's ``compute_hausdorff_distance``; pixels
    at the border of the image count as surface.

    Args:
        predicted, reference: Masks of one shape, ``(*spatial)``.
        spacing: Side of a pixel along each axis, in mm; None measures in pixels.
        percentile: Percentile of the distances from one surface to the other, 0 to 100.
    """
    from scipy import ndimage  # imported here to spare programs that compute no distance the import time

    if not predicted.any() or not reference.any():
        return float("nan")
    box = _find_bounding_box(predicted | reference)
    predicted = predicted[box]
    reference = reference[box]
    surfaces = [find_border(area) for area in (predicted, reference)]
    directed_distances = list[float]()
    for surface, other in (surfaces, surfaces[::-1]):
        distances = ndimage.distance_transform_edt(~other, sampling=spacing)
        directed_distances.append(float(np.percentile(distances[surface], percentile)))
    return max(directed_distances)


def _find_bounding_box(area: Areas) -> tuple[slice, ...]:
    """Return the smallest box around an area, with a margin of one pixel inside the image.

    Because of the margin, the surface of any part of the area is the same in the box as in the image.
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
        predicted, reference, common: Numbers of pixels of each image and class, ``(n, classes)``, that are predicted,
            outlined, and both.
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
    """Dice and distance of one class for each patient in whom the class is outlined.

    Attributes:
        dice: Dice of each patient, ``(patients,)``.
        distances: Hausdorff distance of each patient, ``(patients,)``; infinite if nothing is predicted.
    """

    dice: Floats
    distances: Floats


def compute_patient_figures(compared: AreaComparison, patients: NDArray[np.str_], column: int) -> PatientFigures:
    """Return Dice and distance of one class for each patient in whom it is outlined.

    Args:
        compared: The compared areas of each image.
        patients: Patient of each image, ``(n,)``.
        column: Index of the class.
    """
    rows = np.flatnonzero(compared.is_known[:, column])
    names, patient_index = np.unique(patients[rows], return_inverse=True)

    def add_up(values: NDArray[np.int64]) -> Floats:
        return np.bincount(patient_index, values[rows, column], minlength=len(names)).astype(np.float64)

    predicted, reference, common = map(add_up, (compared.predicted, compared.reference, compared.common))
    is_outlined = reference > 0
    dice = 2 * common[is_outlined] / (predicted + reference)[is_outlined]
    distances = np.full(len(names), np.inf)
    if compared.distances is not None:
        image_distances = compared.distances[rows, column]
        defined = ~np.isnan(image_distances)
        counts = np.bincount(patient_index[defined], minlength=len(names))
        sums = np.bincount(patient_index[defined], image_distances[defined], minlength=len(names))
        distances[counts > 0] = sums[counts > 0] / counts[counts > 0]
    return PatientFigures(dice, distances[is_outlined])


def compute_mean_dice(compared: AreaComparison, patients: NDArray[np.str_], columns: Sequence[int]) -> float | None:
    """Return the mean over classes of the mean Dice over patients; None if no class is outlined in any patient."""
    dice_of_classes = [compute_patient_figures(compared, patients, column).dice for column in columns]
    return _average([float(dice.mean()) for dice in dice_of_classes if len(dice)])


# ---------------------------------------------------------------------- histograms over patients


def make_patient_histogram(figures: PatientFigures) -> ScoreHistogram:
    """Return a class's histogram over patients: ``positives`` are counts by Dice, ``negatives`` are counts by
    distance.
    """
    kinds = figures.dice, MIDDLE_DISTANCE / (MIDDLE_DISTANCE + figures.distances)
    return ScoreHistogram(*(np.bincount(find_score_bins(values), minlength=SCORE_BINS) for values in kinds))


@dataclass(frozen=True)
class ClassOverlap:
    """Metrics of one class over all patients in whom it is outlined; None if undefined.

    Attributes:
        dice: Mean Dice over these patients.
        interval: 95 % bootstrap interval of the mean Dice, over patients.
        hd95: Mean 95 % Hausdorff distance over the patients in whom something is predicted.
        hd95_interval: 95 % bootstrap interval of the mean distance.
        patients: Number of patients in whom the class is outlined.
        missed: Number of these patients in whom nothing is predicted.
    """

    dice: float | None
    interval: Interval | None
    hd95: float | None
    hd95_interval: Interval | None
    patients: int
    missed: int


@dataclass(frozen=True)
class SegmentationSummary:
    """The metrics of a segmentation test.

    Attributes:
        mean_dice: Mean over the classes with a Dice.
        per_class: Class -> its metrics.
        interval: 95 % bootstrap interval of the mean; each resample draws the patients of each class.
        over: The resampled unit: ``images`` if the patients are unknown.
        unit: The unit of distances: ``mm``, or ``pixels`` if the spacing is unknown.
    """

    mean_dice: float | None
    per_class: Mapping[str, ClassOverlap] = field(default_factory=dict)
    interval: Interval | None = None
    over: str = "patients"
    unit: str = "pixels"


@dataclass(frozen=True)
class _CountedValues:
    """Values and the number of patients with each value, so that the same code averages exact values and histograms."""

    values: Floats
    counts: Counts

    @classmethod
    def from_each(cls, values: Floats) -> "_CountedValues":
        return cls(values, np.ones(len(values), np.int64))

    def average(self, generator: np.random.Generator | None) -> tuple[float | None, Interval | None, Floats | None]:
        """Return the mean over patients, its bootstrap interval, and the means of all resamples."""
        filled = np.flatnonzero(self.counts)
        values = self.values[filled]
        counts = self.counts[filled]
        total = int(self.counts.sum())
        if not total:
            return None, None, None
        # The mean of exact values must equal the mean that a hospital sends, to the last bit.
        mean = float(values.mean() if total == len(values) else counts @ values / total)
        if generator is None:
            return mean, None, None
        means = generator.multinomial(total, counts / total, RESAMPLES) @ values / total
        return mean, _make_interval(means), means


def summarise_patients(
    figures: Mapping[str, PatientFigures], generator: np.random.Generator | None
) -> SegmentationSummary:
    """Return the metrics over all patients, from exact values.

    Args:
        figures: Class -> Dice and distance of its patients.
        generator: Random generator of the bootstrap; None for no intervals.
    """
    values = dict[str, tuple[_CountedValues, _CountedValues, int]]()
    for name, patient_figures in figures.items():
        finite = patient_figures.distances[np.isfinite(patient_figures.distances)]
        missed = len(patient_figures.distances) - len(finite)
        values[name] = _CountedValues.from_each(patient_figures.dice), _CountedValues.from_each(finite), missed
    return _summarise(values, generator)


def summarise_patient_histograms(
    histograms: Mapping[str, ScoreHistogram], generator: np.random.Generator | None
) -> SegmentationSummary:
    """Return the metrics over all patients, from histograms over the patients.

    A value inside a bin counts as the centre of the bin, so that a mean Dice may be wrong by up to 0.002.

    Args:
        histograms: Class -> histogram of :func:`make_patient_histogram`.
        generator: Random generator of the bootstrap. None for no intervals, which would be too narrow if the histograms
            count a patient twice.
    """
    distances_of_bins = _convert_to_distance(BIN_CENTRES)
    values = dict[str, tuple[_CountedValues, _CountedValues, int]]()
    for name, histogram in histograms.items():
        # The first bin has the patients in whom nothing is predicted: their distance is infinite.
        missed = int(histogram.negatives[0])
        predicted = histogram.negatives.copy()
        predicted[0] = 0
        dice = _CountedValues(BIN_CENTRES, histogram.positives)
        values[name] = dice, _CountedValues(distances_of_bins, predicted), missed
    return _summarise(values, generator)


@dataclass(frozen=True)
class SiteOverlap:
    """Metrics of one class over the patients of one hospital.

    Attributes:
        histogram: Histogram of the patients, see :func:`make_patient_histogram`.
        dice, hd95: Exact means over the patients; None if the hospital does not send them. Means that contradict the
            histogram are not used.
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
        """Number of these patients in whom nothing is predicted; their infinite distance falls into the first bin."""
        return int(self.histogram.negatives[0])

    @property
    def exact_dice(self) -> float | None:
        """The exact mean Dice; None if it is unknown or contradicts the histogram."""
        return _check_mean(self.dice, self.histogram.positives, BIN_EDGES[:-1], BIN_EDGES[1:])

    @property
    def exact_hd95(self) -> float | None:
        """The exact mean distance; None if it is unknown or contradicts the histogram."""
        predicted = self.histogram.negatives[1:]
        return _check_mean(
            self.hd95, predicted, _convert_to_distance(BIN_EDGES[2:]), _convert_to_distance(BIN_EDGES[1:-1])
        )


def _convert_to_distance(scores: Floats) -> Floats:
    """Return the distances that belong to scores above 0 in a histogram."""
    return MIDDLE_DISTANCE * (1 / scores - 1)


def _check_mean(mean: float | None, counts: Counts, low: Floats, high: Floats) -> float | None:
    """Return a mean over patients, or None if it lies outside the range that the bins allow.

    Args:
        mean: The mean that a hospital sent; None if it sent none.
        counts: Number of patients in each bin, ``(bins,)``.
        low, high: Borders of the bins, ``(bins,)``.
    """
    total = int(counts.sum())
    if mean is None or not total:
        return None
    least = float(counts @ low / total)
    most = float(counts @ high / total)
    return mean if least - ROUNDING_TOLERANCE <= mean <= most + ROUNDING_TOLERANCE * max(1.0, most) else None


def pool_site_overlaps(
    sites: Mapping[str, Sequence[SiteOverlap]], generator: np.random.Generator | None
) -> SegmentationSummary:
    """Return the metrics over the patients of all hospitals together.

    A mean is the mean of the hospitals' exact means, weighted by their patients. If one of them is unknown, it is the
    mean of the summed histograms. Intervals always come from the histograms.

    Args:
        sites: Class -> the metrics of each hospital that sends a histogram.
        generator: As in :func:`summarise_patient_histograms`.
    """
    sums = {name: reduce(add, (site.histogram for site in site_overlaps)) for name, site_overlaps in sites.items()}
    pooled = summarise_patient_histograms(sums, generator)
    per_class = dict[str, ClassOverlap]()
    for name, overlap in pooled.per_class.items():
        dice = _pool_exact_means([(site.exact_dice, site.patients) for site in sites[name]])
        hd95 = _pool_exact_means([(site.exact_hd95, site.patients - site.missed) for site in sites[name]])
        dice = overlap.dice if dice is None else dice
        hd95 = overlap.hd95 if hd95 is None else hd95
        per_class[name] = replace(overlap, dice=dice, hd95=hd95)
    return replace(pooled, mean_dice=average_dice(per_class.values()), per_class=per_class)


def _pool_exact_means(means: Sequence[tuple[float | None, int]]) -> float | None:
    """Return the mean of means, weighted by numbers of patients; None if a mean is unknown, or there is no patient."""
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
    """Return the metrics of all classes.

    Args:
        values: Class -> Dice values, distances, and number of patients without a prediction.
        generator: Random generator of the bootstrap; None for no intervals.
    """
    per_class = dict[str, ClassOverlap]()
    resampled = list[Floats]()
    for name, (of_dice, of_distance, missed) in values.items():
        dice, interval, means = of_dice.average(generator)
        hd95, hd95_interval, _ = of_distance.average(generator)
        per_class[name] = ClassOverlap(dice, interval, hd95, hd95_interval, int(of_dice.counts.sum()), missed)
        if means is not None:
            resampled.append(means)
    mean = average_dice(per_class.values())
    mean_interval = _make_interval(np.mean(resampled, axis=0)) if resampled else None
    return SegmentationSummary(mean, per_class, mean_interval)


def _average(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _make_interval(means: Floats) -> Interval:
    low, high = np.quantile(means, [(1 - CONFIDENCE_LEVEL) / 2, (1 + CONFIDENCE_LEVEL) / 2])
    return float(low), float(high)
