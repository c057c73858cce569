"""A mean over sites that is known of a sample of them, and how far it may be from the mean over all.

Cochran, Sampling Techniques, 3rd ed. 1977, chapter 2: of ``n`` of ``N`` sites drawn at random, the variance of the mean
is ``(1 - n / N) s² / n``. A mean over classes adds up what each site contributes to all of them, for the classes are
tested at the same sites. Departure: where a plain draw misses a class, sites that annotate it are taken in
(:mod:`strategies.engine.membership`), and count here as if they had been drawn.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from common.metrics.bootstrap import LEVEL, Interval


@dataclass(frozen=True)
class SiteSample:
    """How many sites figures are of that stand for all.

    Attributes:
        asked: Sites that were drawn to test.
        of: Sites of the run.
        mean_auroc: 95 % interval of the mean over classes, for all sites; None where a class was tested at a single one
            of several, or where the figures are not means over sites.
        per_class: The same of the classes that have one.
    """

    asked: int
    of: int
    mean_auroc: Interval | None = None
    per_class: Mapping[str, Interval] = field(default_factory=dict)


def site_sample(
    values: Mapping[str, Mapping[str, float]], shares: Mapping[str, float], asked: int, of: int
) -> SiteSample:
    """The sample with its intervals.

    Args:
        values: Class -> site -> AUROC, of the sites that have one.
        shares: Class -> share of the sites that annotate it that were asked; 1 leaves nothing to chance.
    """
    tested = {name: of_sites for name, of_sites in values.items() if of_sites}
    unknown = [name for name, of_sites in tested.items() if len(of_sites) == 1 and shares[name] < 1]
    moved = {name: _moved(of_sites, shares[name]) for name, of_sites in tested.items() if name not in unknown}
    means = {name: float(np.mean(list(of_sites.values()))) for name, of_sites in tested.items()}
    per_class = {name: _around(means[name], of_sites) for name, of_sites in moved.items()}
    if unknown or not tested:
        return SiteSample(asked, of, None, per_class)
    together: dict[str, float] = {}
    for of_sites in moved.values():
        for site, by in of_sites.items():
            together[site] = together.get(site, 0.0) + by / len(moved)
    return SiteSample(asked, of, _around(float(np.mean(list(means.values()))), together), per_class)


def _moved(of_sites: Mapping[str, float], share: float) -> dict[str, float]:
    """The part that each site has in how far the mean may move: squared, they add up to its variance."""
    n = len(of_sites)
    if n == 1:
        return dict.fromkeys(of_sites, 0.0)
    mean, scale = float(np.mean(list(of_sites.values()))), ((1 - share) * n / (n - 1)) ** 0.5 / n
    return {site: scale * (value - mean) for site, value in of_sites.items()}


def _around(mean: float, moved: Mapping[str, float]) -> Interval:
    """Student's interval around a mean of shares, which lie between 0 and 1."""
    from scipy.special import stdtrit  # here: a program that only trains does not pay for its import

    variance = sum(by * by for by in moved.values())
    reach = float(stdtrit(max(len(moved) - 1, 1), (1 + LEVEL) / 2)) * variance**0.5
    return max(mean - reach, 0.0), min(mean + reach, 1.0)
