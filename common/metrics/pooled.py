"""Metrics over all sites' test images from summed score histograms, and intervals if only a sample of sites tests.

The intervals for a sample follow Cochran, Sampling Techniques, 3rd ed. 1977, chapter 2: for ``n`` of ``N`` sites drawn
at random, the variance of a mean over sites is ``(1 - n / N) s² / n``. The variance of the mean over classes first adds
up the contributions of each site to all classes, because the classes are tested at the same sites. One departure: if
the random draw misses a class, further sites are added (:mod:`polyclinic.strategies.engine.membership`), and these
count as drawn at random.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add

import numpy as np

from polyclinic.common.metrics.bootstrap import CONFIDENCE_LEVEL, Interval, compute_pooled_auroc_interval
from polyclinic.common.metrics.calibration import (
    Calibration,
    DecisionCounts,
    RocCurve,
    compute_pooled_calibration,
    compute_roc_curve,
    count_pooled_decisions,
)
from polyclinic.common.metrics.measured import ValueWithError, average_values_with_error
from polyclinic.common.metrics.score_histograms import (
    ScoreHistogram,
    compute_pooled_auroc,
    compute_pooled_average_precision,
)


@dataclass(frozen=True)
class SummedScoreHistogram:
    """The sum of one class's score histograms over sites.

    Attributes:
        histogram: The sum.
        sites: Names of the sites in the sum.
    """

    histogram: ScoreHistogram
    sites: tuple[str, ...]


@dataclass(frozen=True)
class PooledClassMetrics:
    """The metrics of one class over the images of all sites that reported a score histogram; None if undefined.

    Attributes:
        interval: 95 % bootstrap interval of the AUROC over images; None if several sites share test images.
        balanced_accuracy: Exact balanced accuracy at probability 0.5.
        sites: The sites that reported a histogram.
        silent: Sites that annotate the class but reported no histogram, for instance by policy or for too few images.
    """

    auroc: ValueWithError | None
    average_precision: ValueWithError | None
    balanced_accuracy: float | None
    positives: int
    negatives: int
    sites: tuple[str, ...]
    silent: tuple[str, ...]
    calibration: Calibration | None
    decisions: DecisionCounts
    curve: RocCurve | None = None
    interval: Interval | None = None


@dataclass(frozen=True)
class PooledMetrics:
    """The metrics of each class that a site reported, and the means over the classes for which a metric is defined."""

    mean_auroc: ValueWithError | None
    mean_average_precision: ValueWithError | None
    per_class: Mapping[str, PooledClassMetrics]


def compute_pooled_metrics(
    sums: Mapping[str, SummedScoreHistogram],
    owners: Mapping[str, Sequence[str]],
    generator: np.random.Generator | None = None,
) -> PooledMetrics | None:
    """Compute metrics over the images of all sites together; None if no site reported a histogram.

    Args:
        sums: Class -> its summed histogram.
        owners: Class -> the sites that annotate it; the classes are in the order of the run.
        generator: Random generator of the bootstrap intervals; None for no intervals.
    """
    results = dict[str, PooledClassMetrics]()
    for name in owners:
        if name not in sums:
            continue
        histogram = sums[name].histogram
        sites = sums[name].sites
        decided = count_pooled_decisions(histogram)
        results[name] = PooledClassMetrics(
            auroc=compute_pooled_auroc(histogram),
            average_precision=compute_pooled_average_precision(histogram),
            balanced_accuracy=decided.balanced_accuracy,
            positives=int(histogram.positives.sum()),
            negatives=int(histogram.negatives.sum()),
            sites=sites,
            silent=tuple(site for site in owners[name] if site not in sites),
            calibration=compute_pooled_calibration(histogram),
            decisions=decided,
            curve=compute_roc_curve(histogram),
            interval=None if generator is None else compute_pooled_auroc_interval(histogram, generator),
        )
    if not results:
        return None
    auroc, precision = (
        average_values_with_error(getattr(result, figure) for result in results.values())
        for figure in ("auroc", "average_precision")
    )
    return PooledMetrics(auroc, precision, results)


def sum_site_histograms(
    reported: Mapping[str, Mapping[str, ScoreHistogram]], owners: Mapping[str, Sequence[str]]
) -> dict[str, SummedScoreHistogram]:
    """Add up the histograms of each class over the sites that annotate it; leave out a class without any histogram.

    Args:
        reported: Site -> class -> score histogram.
        owners: Class -> the sites that annotate it.
    """
    sums = dict[str, SummedScoreHistogram]()
    for name, sites in owners.items():
        histograms = {site: reported[site][name] for site in sites if name in reported.get(site, {})}
        if histograms:
            sums[name] = SummedScoreHistogram(reduce(add, histograms.values()), tuple(histograms))
    return sums


@dataclass(frozen=True)
class SiteSampleIntervals:
    """95 % intervals of the AUROC over all sites of a run, estimated from a random sample of the sites.

    Attributes:
        drawn: Number of sites that were drawn to test the model.
        of: Number of all sites of the run.
        mean_auroc: Interval of the mean over classes; None if a class was tested at only one of its several sites, or
            the AUROCs are not means over sites.
        per_class: Class -> interval, for classes that have one.
    """

    drawn: int
    of: int
    mean_auroc: Interval | None = None
    per_class: Mapping[str, Interval] = field(default_factory=dict)


def estimate_sampled_site_intervals(
    values: Mapping[str, Mapping[str, float]], shares: Mapping[str, float], drawn: int, of: int
) -> SiteSampleIntervals:
    """Estimate intervals of the AUROCs over all sites from the AUROCs of the sampled sites.

    Args:
        values: Class -> site -> AUROC, for sites that have one.
        shares: Class -> share of its sites that were drawn; a share of 1 has no sampling error.
        drawn, of: Numbers of sites that were drawn to test, and of all sites.
    """
    tested = {name: of_sites for name, of_sites in values.items() if of_sites}
    without_variance = [name for name, of_sites in tested.items() if len(of_sites) == 1 and shares[name] < 1]
    # Class -> site -> contribution to the deviation of the class's mean; the squares add up to its variance.
    contributions = dict[str, dict[str, float]]()
    for name, of_sites in tested.items():
        n = len(of_sites)
        if name not in without_variance:
            mean = float(np.mean(list(of_sites.values())))
            scale = ((1 - shares[name]) * n / max(n - 1, 1)) ** 0.5 / n
            contributions[name] = {site: scale * (value - mean) for site, value in of_sites.items()}
    means = {name: float(np.mean(list(of_sites.values()))) for name, of_sites in tested.items()}
    per_class = {name: _compute_t_interval(means[name], of_sites) for name, of_sites in contributions.items()}
    if without_variance or not tested:
        return SiteSampleIntervals(drawn, of, None, per_class)
    summed_contributions: dict[str, float] = {}
    for of_sites in contributions.values():
        for site, contribution in of_sites.items():
            summed_contributions[site] = summed_contributions.get(site, 0.0) + contribution / len(contributions)
    return SiteSampleIntervals(
        drawn, of, _compute_t_interval(float(np.mean(list(means.values()))), summed_contributions), per_class
    )


def _compute_t_interval(mean: float, contributions: Mapping[str, float]) -> Interval:
    """Compute Student's 95 % interval of a mean AUROC over sites, limited to the range 0 to 1.

    Args:
        mean: The mean AUROC.
        contributions: Site -> its contribution to the deviation of the mean; the squares add up to the mean's variance.
    """
    from scipy.special import stdtrit  # imported here to spare programs that only train the import time

    variance = sum(contribution * contribution for contribution in contributions.values())
    half_width = float(stdtrit(max(len(contributions) - 1, 1), (1 + CONFIDENCE_LEVEL) / 2)) * variance**0.5
    return max(mean - half_width, 0.0), min(mean + half_width, 1.0)
