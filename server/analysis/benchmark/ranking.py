"""Average ranks over blocks, Friedman's test, and Nemenyi's critical difference.

Demsar, "Statistical Comparisons of Classifiers over Multiple Data Sets", JMLR 2006: methods are ranked in each block,
equal ones share their ranks; two methods differ if their average ranks do by the critical difference or more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import friedmanchisquare, rankdata, studentized_range

from server.analysis.statistics import ALPHA

FEWEST_BLOCKS = 3
FEWEST_METHODS = 3
MANY = 1e6
"""Degrees of freedom that stand for infinitely many, as Nemenyi's test has them."""


@dataclass(frozen=True)
class Ranking:
    """How methods rank over blocks.

    Attributes:
        ranks: Method -> average rank, 1 for the best; in the order of the ranks.
        p: Of Friedman's test that all methods are alike; None with fewer than three blocks or methods.
        critical_difference: Of two average ranks; None as above.
        cliques: Groups of methods, in the order of ranks, that the critical difference does not part; none within
            another.
    """

    blocks: int
    ranks: Mapping[str, float]
    p: float | None
    critical_difference: float | None
    cliques: tuple[tuple[str, ...], ...]


def ranking(scores: Mapping[str, Sequence[float]]) -> Ranking:
    """Rank methods by a score of which more is better.

    Args:
        scores: Method -> score in each block; all methods have the same blocks.
    """
    names = list(scores)
    if not names:
        return Ranking(0, {}, None, None, ())
    table = np.array([scores[name] for name in names], np.float64).reshape(len(names), -1)  # (methods, blocks)
    blocks = table.shape[1]
    means = rankdata(-table, axis=0).mean(axis=1)
    ordered = sorted(zip(means.tolist(), names, strict=True))
    ranks = {name: rank for rank, name in ordered}
    if blocks < FEWEST_BLOCKS or len(names) < FEWEST_METHODS:
        return Ranking(blocks, ranks, None, None, ())
    critical = critical_difference(len(names), blocks)
    return Ranking(blocks, ranks, float(friedmanchisquare(*table).pvalue), critical, cliques(ranks, critical))


def critical_difference(methods: int, blocks: int) -> float:
    """Smallest difference of two average ranks at which they differ by Nemenyi's test at :data:`ALPHA`."""
    quantile = float(studentized_range.ppf(1 - ALPHA, methods, MANY)) / np.sqrt(2)
    return float(quantile * np.sqrt(methods * (methods + 1) / (6 * blocks)))


def cliques(ranks: Mapping[str, float], critical: float) -> tuple[tuple[str, ...], ...]:
    """The largest groups of two or more neighbours whose ranks lie within less than the critical difference."""
    names, found = list(ranks), list[tuple[str, ...]]()
    for first in range(len(names)):
        inside = [name for name in names[first:] if ranks[name] - ranks[names[first]] < critical]
        group = tuple(inside)
        if len(group) > 1 and not (found and set(group) <= set(found[-1])):
            found.append(group)
    return tuple(found)
