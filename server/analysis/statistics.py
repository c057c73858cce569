"""Is one method better than another? Paired tests over classes.

The test is that of Kulkarni et al., ML4H 2024: a paired t-test over per-class AUROCs at alpha .05, with Shapiro-Wilk on
the differences. We add what makes the answer safe to read: Wilcoxon's signed-rank test where the differences are not
normal, Holm's correction over several comparisons, and a bootstrap interval for the mean difference.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

ALPHA = 0.05
FEWEST_PAIRS = 3
FEWEST_SEEDS = 3
"""Below this nothing is called better or worse: one training more may turn it round."""
RESAMPLES = 10_000

Scores = Mapping[tuple[int, str], float | None]  # (seed, class name) -> AUROC


@dataclass(frozen=True)
class PairedTest:
    """Reference minus other, pair by pair. ``None`` marks what the pairs do not allow, and ``reason`` says why.

    Attributes:
        pairs: Number of pairs in which both methods have a value.
        mean_difference: Above 0 where the reference scores higher.
        interval: 95 % percentile bootstrap interval of the mean difference; too narrow for a handful of pairs.
        t_test_p: Two-sided p-value of the paired t-test.
        normality_p: Shapiro-Wilk p-value of the differences.
        wilcoxon_p: Two-sided signed-rank p-value, only where normality is rejected.
        reason: Why nothing could be tested; empty where it could.
        holm_p: The deciding p-value after Holm's correction, once :func:`corrected` has set it.
        seeds: Number of seeds in which both methods have a value.
    """

    pairs: int
    mean_difference: float | None = None
    interval: tuple[float, float] | None = None
    t_test_p: float | None = None
    normality_p: float | None = None
    wilcoxon_p: float | None = None
    reason: str = ""
    holm_p: float | None = None
    seeds: int = 0

    @property
    def p(self) -> float | None:
        """The p-value that decides: Wilcoxon's where normality is rejected, else the t-test's."""
        return self.t_test_p if self.wilcoxon_p is None else self.wilcoxon_p


def paired_over_classes(reference: Scores, other: Scores, generator: np.random.Generator) -> PairedTest:
    """Average each class over the seeds that both methods have, then pair over classes: the paper's test."""
    pairs = _pairs(reference, other)
    by_class: dict[str, list[tuple[float, float]]] = {}
    for (_, name), pair in pairs.items():
        by_class.setdefault(name, []).append(pair)
    test = paired_test(_columns([np.mean(of_class, axis=0) for of_class in by_class.values()]), generator)
    return replace(test, seeds=_seeds(pairs))


def paired_over_classes_and_seeds(reference: Scores, other: Scores, generator: np.random.Generator) -> PairedTest:
    """Pair every class in every seed. Seeds of one class are not independent, so p-values come out too small."""
    pairs = _pairs(reference, other)
    return replace(paired_test(_columns(list(pairs.values())), generator), seeds=_seeds(pairs))


def paired_test(pairs: NDArray[np.float64], generator: np.random.Generator) -> PairedTest:
    """Test whether the two columns differ.

    Args:
        pairs: Reference and other, ``(pairs, 2)``.
        generator: Source of the bootstrap resamples.

    Raises:
        ValueError: If a value is not finite.
    """
    if not np.isfinite(pairs).all():
        raise ValueError("Expected finite values to compare, got NaN or infinity.")
    differences = pairs[:, 0] - pairs[:, 1]  # (pairs,)
    reason = _untestable(differences)
    if reason:
        return PairedTest(len(pairs), float(differences.mean()) if len(pairs) else None, reason=reason)
    from scipy.stats import shapiro, ttest_rel, wilcoxon  # here: a program that only trains does not pay for it

    normality_p = float(shapiro(differences).pvalue)
    return PairedTest(
        pairs=len(pairs),
        mean_difference=float(differences.mean()),
        interval=_bootstrap_interval(differences, generator),
        t_test_p=float(ttest_rel(pairs[:, 0], pairs[:, 1]).pvalue),
        normality_p=normality_p,
        wilcoxon_p=float(wilcoxon(differences).pvalue) if normality_p < ALPHA else None,
    )


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Adjust p-values for their number (Holm, Scand. J. Statist. 1979); ``None`` stays and does not count."""
    ascending = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, index) in enumerate(ascending):
        largest = max(largest, min(1.0, p * (len(ascending) - rank)))
        adjusted[index] = largest
    return adjusted


def corrected(tests: Sequence[PairedTest]) -> list[PairedTest]:
    """Return one family of tests with its Holm-corrected p-values filled in."""
    return [replace(test, holm_p=p) for test, p in zip(tests, holm([test.p for test in tests]), strict=True)]


def _pairs(reference: Scores, other: Scores) -> dict[tuple[int, str], tuple[float, float]]:
    both = sorted(reference.keys() & other.keys())
    pairs = {key: (reference[key], other[key]) for key in both}
    return {key: (a, b) for key, (a, b) in pairs.items() if a is not None and b is not None}


def _seeds(pairs: Iterable[tuple[int, str]]) -> int:
    return len({seed for seed, _ in pairs})


def _columns(pairs: Sequence[tuple[float, float] | NDArray[np.float64]]) -> NDArray[np.float64]:
    return np.asarray(pairs, dtype=np.float64).reshape(-1, 2)


def _untestable(differences: NDArray[np.float64]) -> str:
    if len(differences) < FEWEST_PAIRS:
        amount = "1 pair is" if len(differences) == 1 else f"{len(differences)} pairs are"
        return f"{amount} too few; a test needs at least {FEWEST_PAIRS}"
    if without_spread(differences):
        return f"all {len(differences)} differences are equal, so there is no spread to test against"
    return ""


def without_spread(differences: NDArray[np.float64]) -> bool:
    """Whether all are equal but for rounding."""
    return bool(np.ptp(differences) <= 1e-12 * max(1.0, float(np.abs(differences).max())))


def _bootstrap_interval(differences: NDArray[np.float64], generator: np.random.Generator) -> tuple[float, float]:
    drawn = generator.integers(len(differences), size=(RESAMPLES, len(differences)))
    low, high = np.quantile(differences[drawn].mean(axis=1), (0.025, 0.975))
    return float(low), float(high)
