"""Metrics over all sites' test images, from summed score histograms; and intervals of a mean over a sample of sites.

The interval of such a mean follows Cochran, Sampling Techniques, 3rd ed. 1977, chapter 2: of ``n`` of ``N`` sites drawn
at random, the variance of the mean is ``(1 - n / N) s² / n``. A mean over classes adds up what each site contributes to
all of them, because the classes are tested at the same sites. Departure: where a plain draw misses a class, sites that
annotate it are taken in (:mod:`strategies.engine.membership`), and count here as if they had been drawn.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add

import numpy as np

from common.metrics.bootstrap import LEVEL, Interval, pooled_interval
from common.metrics.calibration import (
    Calibration,
    DecisionCounts,
    RankingCurve,
    pooled_calibration,
    pooled_decisions,
    ranking_curve,
)
from common.metrics.measured import ValueWithError, mean_value_with_error
from common.metrics.score_histograms import ScoreHistogram, pooled_auroc, pooled_average_precision


@dataclass(frozen=True)
class SummedHistogram:
    """The sum of the score histograms of one class over the sites that it names."""

    histogram: ScoreHistogram
    sites: tuple[str, ...]


@dataclass(frozen=True)
class PooledClass:
    """The metrics of one class over the sites that reported it; None where they hold no positives or no negatives.

    Attributes:
        interval: 95 % interval of the AUROC over images; None where several sites share test images.
        balanced_accuracy: Exact balanced accuracy at probability 0.5.
        sites: The sites that reported.
        silent: Sites that annotate the class and did not report: by policy, for too few images, or in absence.
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
    curve: RankingCurve | None = None
    interval: Interval | None = None


@dataclass(frozen=True)
class PooledMetrics:
    """Metrics of all classes that a site reported; means are over classes with a value."""

    mean_auroc: ValueWithError | None
    mean_average_precision: ValueWithError | None
    per_class: Mapping[str, PooledClass]


def pool_site_histograms(
    sums: Mapping[str, SummedHistogram],
    owners: Mapping[str, Sequence[str]],
    generator: np.random.Generator | None = None,
) -> PooledMetrics | None:
    """Compute metrics over the images of all sites together; None where no site reported.

    Args:
        sums: Class -> its summed histogram.
        owners: Class -> the sites that annotate it, in the order of the run's classes.
        generator: Random generator of the intervals; None for no intervals.
    """
    results = dict[str, PooledClass]()
    for name in (name for name in owners if name in sums):
        histogram, sites = sums[name].histogram, sums[name].sites
        decided = pooled_decisions(histogram)
        results[name] = PooledClass(
            auroc=pooled_auroc(histogram),
            average_precision=pooled_average_precision(histogram),
            balanced_accuracy=decided.balanced_accuracy,
            positives=int(histogram.positives.sum()),
            negatives=int(histogram.negatives.sum()),
            sites=sites,
            silent=tuple(site for site in owners[name] if site not in sites),
            calibration=pooled_calibration(histogram),
            decisions=decided,
            curve=ranking_curve(histogram),
            interval=None if generator is None else pooled_interval(histogram, generator),
        )
    if not results:
        return None
    auroc, precision = (
        mean_value_with_error(getattr(result, figure) for result in results.values())
        for figure in ("auroc", "average_precision")
    )
    return PooledMetrics(auroc, precision, results)


def sum_histograms(
    reported: Mapping[str, Mapping[str, ScoreHistogram]], owners: Mapping[str, Sequence[str]]
) -> dict[str, SummedHistogram]:
    """Add up the histograms of each class over the sites that annotate it; a class without a report has no entry.

    Args:
        reported: Site -> class -> its histogram.
        owners: As in :func:`pool_site_histograms`.
    """
    sums = dict[str, SummedHistogram]()
    for name, sites in owners.items():
        histograms = {site: reported[site][name] for site in sites if name in reported.get(site, {})}
        if histograms:
            sums[name] = SummedHistogram(reduce(add, histograms.values()), tuple(histograms))
    return sums


@dataclass(frozen=True)
class SiteSampleIntervals:
    """Intervals for all sites' figures, estimated from a random sample of the sites.

    Attributes:
        drawn: Number of sites that were drawn to test.
        of: Number of sites of the run.
        mean_auroc: 95 % interval of the mean over classes, for all sites; None where a class was tested at only one of
            several sites, or where the figures are not means over sites.
        per_class: The interval of each class that has one.
    """

    drawn: int
    of: int
    mean_auroc: Interval | None = None
    per_class: Mapping[str, Interval] = field(default_factory=dict)


def estimate_from_sampled_sites(
    values: Mapping[str, Mapping[str, float]], shares: Mapping[str, float], drawn: int, of: int
) -> SiteSampleIntervals:
    """Return the sample with its intervals.

    Args:
        values: Class -> site -> AUROC, of the sites that have one.
        shares: Class -> share of its sites that were drawn; with 1 nothing is random.
    """
    tested = {name: of_sites for name, of_sites in values.items() if of_sites}
    unknown = [name for name, of_sites in tested.items() if len(of_sites) == 1 and shares[name] < 1]
    moved = dict[str, dict[str, float]]()  # each site's contribution to a mean's deviation; squares add up to variance
    for name, of_sites in tested.items():
        n = len(of_sites)
        if name not in unknown:
            mean, scale = float(np.mean(list(of_sites.values()))), ((1 - shares[name]) * n / max(n - 1, 1)) ** 0.5 / n
            moved[name] = {site: scale * (value - mean) for site, value in of_sites.items()}
    means = {name: float(np.mean(list(of_sites.values()))) for name, of_sites in tested.items()}
    per_class = {name: _student_interval(means[name], of_sites) for name, of_sites in moved.items()}
    if unknown or not tested:
        return SiteSampleIntervals(drawn, of, None, per_class)
    together: dict[str, float] = {}
    for of_sites in moved.values():
        for site, by in of_sites.items():
            together[site] = together.get(site, 0.0) + by / len(moved)
    return SiteSampleIntervals(drawn, of, _student_interval(float(np.mean(list(means.values()))), together), per_class)


def _student_interval(mean: float, moved: Mapping[str, float]) -> Interval:
    """Compute Student's interval around a mean of values from 0 to 1."""
    from scipy.special import stdtrit  # here: a program that only trains does not pay for its import

    variance = sum(by * by for by in moved.values())
    reach = float(stdtrit(max(len(moved) - 1, 1), (1 + LEVEL) / 2)) * variance**0.5
    return max(mean - reach, 0.0), min(mean + reach, 1.0)
