"""Paired tests of two methods over classes, and ranks of several methods over blocks.

The test is that of Kulkarni et al., ML4H 2024: a paired t-test over per-class AUROCs at alpha .05. The differences are
tested for normality (Shapiro-Wilk), but the t-test decides in any case. We add Holm's correction over several
comparisons, and a bootstrap interval of the mean difference.

Ranks follow Demsar, "Statistical Comparisons of Classifiers over Multiple Data Sets", JMLR 2006: methods are ranked in
each block; ties share the average rank. Two methods differ if their average ranks differ by at least the critical
difference.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from polyclinic.common.metrics.holm import adjust_by_holm

ALPHA = 0.05
MIN_PAIRS = 3
MIN_SEEDS = 3
"""With fewer seeds no method is called better or worse, because one more training could reverse the difference."""
BOOTSTRAP_RESAMPLES = 10_000
MIN_BLOCKS = 3
MIN_METHODS = 3

Scores = Mapping[tuple[int, str], float | None]  # (seed, class name) -> AUROC


@dataclass(frozen=True)
class PairedTest:
    """The paired test of the reference against another method; values that cannot be computed are None.

    Attributes:
        pairs: Number of pairs in which both methods have a value.
        mean_difference: Reference minus other method; above 0 if the reference scores higher.
        interval: 95 % percentile bootstrap interval of the mean difference; too narrow with few pairs.
        p_value: Two-sided p-value of the paired t-test.
        normality_p: Shapiro-Wilk p-value of the differences.
        reason: Reason why there is no test; empty if there is one.
        holm_p: P-value after Holm's correction; :func:`correct_family_by_holm` sets it.
        seeds: Number of seeds in which both methods have a value.
    """

    pairs: int
    mean_difference: float | None = None
    interval: tuple[float, float] | None = None
    p_value: float | None = None
    normality_p: float | None = None
    reason: str = ""
    holm_p: float | None = None
    seeds: int = 0


def compare_over_classes(reference: Scores, other: Scores, generator: np.random.Generator) -> PairedTest:
    """Test two methods paired by class, averaged over the common seeds, as Kulkarni et al. do."""
    by_class: dict[str, list[tuple[float, float]]] = {}
    pairs = _collect_common_pairs(reference, other)
    for (_, name), pair in pairs.items():
        by_class.setdefault(name, []).append(pair)
    means = np.array([np.mean(of_class, axis=0) for of_class in by_class.values()]).reshape(-1, 2)
    return replace(compute_paired_test(means, generator), seeds=len({seed for seed, _ in pairs}))


def compare_classes_and_seeds(reference: Scores, other: Scores, generator: np.random.Generator) -> PairedTest:
    """Test two methods paired by class and seed; p-values are too small, because seeds are not independent."""
    pairs = _collect_common_pairs(reference, other)
    test = compute_paired_test(np.array(list(pairs.values()), np.float64).reshape(-1, 2), generator)
    return replace(test, seeds=len({seed for seed, _ in pairs}))


def _collect_common_pairs(reference: Scores, other: Scores) -> dict[tuple[int, str], tuple[float, float]]:
    pairs = {key: (reference[key], other[key]) for key in sorted(reference.keys() & other.keys())}
    return {key: (a, b) for key, (a, b) in pairs.items() if a is not None and b is not None}


def compute_paired_test(pairs: NDArray[np.float64], generator: np.random.Generator) -> PairedTest:
    """Test if two methods differ over pairs of values.

    Args:
        pairs: Values of the reference and of the other method, ``(pairs, 2)``.

    Raises:
        ValueError: If a value is not finite.
    """
    if not np.isfinite(pairs).all():
        raise ValueError("Expected finite values to compare, got NaN or infinity.")
    differences = pairs[:, 0] - pairs[:, 1]  # (pairs,)
    mean = float(differences.mean()) if len(pairs) else None
    if len(pairs) < MIN_PAIRS:
        amount = "1 pair is" if len(pairs) == 1 else f"{len(pairs)} pairs are"
        return PairedTest(len(pairs), mean, reason=f"{amount} too few; a test needs at least {MIN_PAIRS}")
    if are_differences_equal(differences):
        reason = f"all {len(pairs)} differences are equal, so there is no spread to test against"
        return PairedTest(len(pairs), mean, reason=reason)
    drawn = generator.integers(len(pairs), size=(BOOTSTRAP_RESAMPLES, len(pairs)))
    low, high = np.quantile(differences[drawn].mean(axis=1), (0.025, 0.975))
    return PairedTest(
        pairs=len(pairs),
        mean_difference=mean,
        interval=(float(low), float(high)),
        p_value=float(stats.ttest_rel(pairs[:, 0], pairs[:, 1]).pvalue),
        normality_p=float(stats.shapiro(differences).pvalue),
    )


def are_differences_equal(differences: NDArray[np.float64]) -> bool:
    """Return True if all differences are equal except for rounding."""
    return bool(np.ptp(differences) <= 1e-12 * max(1.0, float(np.abs(differences).max())))


def correct_family_by_holm(tests: Sequence[PairedTest]) -> list[PairedTest]:
    """Return the tests of one family with Holm-corrected p-values."""
    return [
        replace(test, holm_p=p) for test, p in zip(tests, adjust_by_holm([test.p_value for test in tests]), strict=True)
    ]


@dataclass(frozen=True)
class MethodRanking:
    """The ranking of methods over blocks.

    Attributes:
        ranks: Method -> average rank, 1 for the best; sorted by rank.
        p: P-value of Friedman's test that all methods are equal; None with too few blocks or methods.
        critical_difference: Least significant difference of two average ranks; None if ``p`` is None.
        cliques: Largest groups of methods, neighbours by rank, that differ by less than the critical difference.
    """

    blocks: int
    ranks: Mapping[str, float]
    p: float | None
    critical_difference: float | None
    cliques: tuple[tuple[str, ...], ...]


def rank_methods(scores: Mapping[str, Sequence[float]]) -> MethodRanking:
    """Rank methods in each block by a score; the highest score has rank 1.

    Args:
        scores: Method -> score in each block; all methods have the same blocks.
    """
    if not scores:
        return MethodRanking(0, {}, None, None, ())
    table = np.array(list(scores.values()), np.float64).reshape(len(scores), -1)  # (methods, blocks)
    blocks, means = table.shape[1], stats.rankdata(-table, axis=0).mean(axis=1)
    ranks = {name: rank for rank, name in sorted(zip(means.tolist(), scores, strict=True))}
    if blocks < MIN_BLOCKS or len(scores) < MIN_METHODS:
        return MethodRanking(blocks, ranks, None, None, ())
    critical = compute_critical_difference(len(scores), blocks)
    return MethodRanking(
        blocks,
        ranks,
        float(stats.friedmanchisquare(*table).pvalue),
        critical,
        find_indistinct_method_groups(ranks, critical),
    )


def compute_critical_difference(methods: int, blocks: int) -> float:
    """Return the least significant difference of two average ranks by Nemenyi's test at :data:`ALPHA`."""
    # The test uses infinitely many degrees of freedom, approximated by a million.
    quantile = float(stats.studentized_range.ppf(1 - ALPHA, methods, 1e6)) / np.sqrt(2)
    return float(quantile * np.sqrt(methods * (methods + 1) / (6 * blocks)))


def find_indistinct_method_groups(ranks: Mapping[str, float], critical: float) -> tuple[tuple[str, ...], ...]:
    """Return the largest groups of neighbours by rank whose ranks differ by less than ``critical``."""
    names, groups = list(ranks), list[tuple[str, ...]]()
    for index, first in enumerate(names):
        group = tuple(name for name in names[index:] if ranks[name] - ranks[first] < critical)
        if len(group) > 1 and not (groups and set(group) <= set(groups[-1])):
            groups.append(group)
    return tuple(groups)
