"""Several sites' test parts as one, from what their score histograms add up to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

import numpy as np

from common.metrics.bootstrap import Interval, pooled_interval
from common.metrics.calibration import Calibration, Decisions, pooled_calibration, pooled_decisions
from common.metrics.curves import RankingCurve, curve_of
from common.metrics.measured import Measured, mean_of
from common.metrics.score_histograms import ScoreHistogram, pooled_auroc, pooled_average_precision


@dataclass(frozen=True)
class SitesHistogram:
    """One class: the sum of the histograms of these sites."""

    histogram: ScoreHistogram
    sites: tuple[str, ...]


@dataclass(frozen=True)
class PooledClass:
    """One class over the sites that told; None where they hold no positives or no negatives.

    Attributes:
        interval: Of the AUROC over images, 95 %; None where a site's test images are another's, too.
        balanced_accuracy: At probability 0.5; exact.
        sites: Those that told.
        silent: Those that annotate the class and did not: by policy, for too few images, or as they were absent.
    """

    auroc: Measured | None
    average_precision: Measured | None
    balanced_accuracy: float | None
    positives: int
    negatives: int
    sites: tuple[str, ...]
    silent: tuple[str, ...]
    calibration: Calibration | None
    decisions: Decisions
    curve: RankingCurve | None = None
    interval: Interval | None = None


@dataclass(frozen=True)
class Pooled:
    """All classes; means are over those with a value. A class that no site reported is not in ``per_class``."""

    mean_auroc: Measured | None
    mean_average_precision: Measured | None
    per_class: Mapping[str, PooledClass]


def pooled(
    sums: Mapping[str, SitesHistogram],
    owners: Mapping[str, Sequence[str]],
    generator: np.random.Generator | None = None,
) -> Pooled | None:
    """Rank the images of all sites together; None where no site told anything.

    Args:
        sums: Class -> its histogram.
        owners: Class -> the sites that annotate it, in the order of the run's classes.
        generator: For the intervals; None for none.
    """
    results = {name: _of_class(sums[name], sites, generator) for name, sites in owners.items() if name in sums}
    if not results:
        return None
    each = results.values()
    return Pooled(mean_of(one.auroc for one in each), mean_of(one.average_precision for one in each), results)


def summed(
    told: Mapping[str, Mapping[str, ScoreHistogram]], owners: Mapping[str, Sequence[str]]
) -> dict[str, SitesHistogram]:
    """Add up each class over the sites that annotate it; a class of which no site told has no entry.

    Args:
        told: Site -> class -> its histogram.
        owners: As of :func:`pooled`.
    """
    of_owners = {name: {s: told[s][name] for s in sites if name in told.get(s, {})} for name, sites in owners.items()}
    return {
        name: SitesHistogram(reduce(add, found.values()), tuple(found)) for name, found in of_owners.items() if found
    }


def _of_class(found: SitesHistogram, annotating: Sequence[str], generator: np.random.Generator | None) -> PooledClass:
    histogram = found.histogram
    decided = pooled_decisions(histogram)
    return PooledClass(
        auroc=pooled_auroc(histogram),
        average_precision=pooled_average_precision(histogram),
        balanced_accuracy=decided.balanced_accuracy,
        positives=int(histogram.positives.sum()),
        negatives=int(histogram.negatives.sum()),
        sites=found.sites,
        silent=tuple(site for site in annotating if site not in found.sites),
        calibration=pooled_calibration(histogram),
        decisions=decided,
        curve=curve_of(histogram),
        interval=None if generator is None else pooled_interval(histogram, generator),
    )
