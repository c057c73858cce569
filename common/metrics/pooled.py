"""Several sites' test parts as one, from what their score histograms add up to."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

import numpy as np

from common.metrics.bootstrap import Interval, pooled_interval
from common.metrics.calibration import Calibration, Decisions, pooled_calibration, pooled_decisions
from common.metrics.curves import RankingCurve, curve_of
from common.metrics.score_histograms import Bounded, ScoreHistogram, pooled_auroc, pooled_average_precision


@dataclass(frozen=True)
class PooledClass:
    """One class over the sites that told; None where they hold no positives or no negatives.

    Attributes:
        interval: Of the AUROC over images, 95 %; None where a site's test images are another's, too.
        balanced_accuracy: At probability 0.5; exact.
        sites: Those that told.
        silent: Those that annotate the class and did not: by policy, for too few images, or as they were absent.
    """

    auroc: Bounded | None
    average_precision: Bounded | None
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

    mean_auroc: Bounded | None
    mean_average_precision: Bounded | None
    per_class: Mapping[str, PooledClass]


def pooled(
    told: Mapping[str, Mapping[str, ScoreHistogram]],
    owners: Mapping[str, Sequence[str]],
    generator: np.random.Generator | None = None,
) -> Pooled | None:
    """Add the sites up; None where none told anything.

    Args:
        told: Site -> class -> its histogram.
        owners: Class -> the sites that annotate it, in the order of the run's classes.
        generator: For the intervals; None for none.
    """
    results = {name: _of_class(found, owners[name], generator) for name, found in _by_class(told, owners).items()}
    if not results:
        return None
    each = results.values()
    return Pooled(mean_of(one.auroc for one in each), mean_of(one.average_precision for one in each), results)


def summed(
    told: Mapping[str, Mapping[str, ScoreHistogram]], owners: Mapping[str, Sequence[str]]
) -> dict[str, ScoreHistogram]:
    """Class -> the sum of its histograms over the sites that annotate it; arguments as of :func:`pooled`."""
    return {name: reduce(add, found.values()) for name, found in _by_class(told, owners).items()}


def _by_class(
    told: Mapping[str, Mapping[str, ScoreHistogram]], owners: Mapping[str, Sequence[str]]
) -> dict[str, dict[str, ScoreHistogram]]:
    """Class -> site -> histogram, without classes of which nobody told."""
    of_owners = {name: {s: told[s][name] for s in sites if name in told.get(s, {})} for name, sites in owners.items()}
    return {name: found for name, found in of_owners.items() if found}


def mean_of(values: Iterable[Bounded | None]) -> Bounded | None:
    """The mean over those there are: its bounds are the means of theirs."""
    rows = [(value.value, value.at_least, value.at_most) for value in values if value is not None]
    return Bounded(*np.mean(rows, axis=0).tolist()) if rows else None


def _of_class(
    found: Mapping[str, ScoreHistogram], annotating: Sequence[str], generator: np.random.Generator | None
) -> PooledClass:
    histogram = reduce(add, found.values())
    decided = pooled_decisions(histogram)
    return PooledClass(
        auroc=pooled_auroc(histogram),
        average_precision=pooled_average_precision(histogram),
        balanced_accuracy=decided.balanced_accuracy,
        positives=int(histogram.positives.sum()),
        negatives=int(histogram.negatives.sum()),
        sites=tuple(found),
        silent=tuple(site for site in annotating if site not in found),
        calibration=pooled_calibration(histogram),
        decisions=decided,
        curve=curve_of(histogram),
        interval=None if generator is None else pooled_interval(histogram, generator),
    )
