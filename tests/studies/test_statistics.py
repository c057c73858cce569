"""Facts about paired comparisons."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import bootstrap, shapiro, ttest_1samp, ttest_rel, wilcoxon

from studies.statistics import (
    ALPHA,
    RESAMPLES,
    PairedTest,
    adjust_by_holm,
    correct_family,
    paired_over_classes,
    paired_over_classes_and_seeds,
    paired_test,
)


def generator() -> np.random.Generator:
    return np.random.default_rng(5)


def test_t_of_a_case_worked_by_hand() -> None:
    # Differences .01 .02 .03 .04: mean .025, SD .0129, t = .025 / (.0129 / 2) = 3.873 on 3 degrees -> p .0305.
    pairs = np.array([[0.81, 0.80], [0.72, 0.70], [0.93, 0.90], [0.64, 0.60]])
    result = paired_test(pairs, generator())
    assert result.mean_difference == pytest.approx(0.025)
    assert result.t_test_p == pytest.approx(0.0305, abs=5e-5)
    assert result.p == result.t_test_p
    assert result.wilcoxon_p is None


def test_wilcoxon_decides_where_differences_are_not_normal() -> None:
    other = np.linspace(0.6, 0.8, 9)
    reference = other + np.array([0.001, 0.002, 0.003, 0.0015, 0.0025, 0.0012, 0.0022, 0.0031, 0.3])
    result = paired_test(np.stack([reference, other], axis=1), generator())
    assert result.p == result.wilcoxon_p == pytest.approx(wilcoxon(reference - other).pvalue)
    assert result.t_test_p == pytest.approx(ttest_rel(reference, other).pvalue)


def test_the_interval_holds_the_mean_and_is_the_same_for_the_same_generator() -> None:
    pairs = np.random.default_rng(1).normal(0.8, 0.05, (14, 2))
    one, again = paired_test(pairs, generator()), paired_test(pairs, generator())
    assert one == again
    assert one.interval is not None
    assert one.mean_difference is not None
    assert one.interval[0] < one.mean_difference < one.interval[1]


@pytest.mark.parametrize(
    ("pairs", "reason"),
    [
        (np.empty((0, 2)), "0 pairs are too few"),
        (np.array([[0.8, 0.7], [0.7, 0.75]]), "2 pairs are too few"),
        (np.array([[0.8, 0.7], [0.7, 0.6], [0.6, 0.5]]), "all 3 differences are equal"),
        (np.full((5, 2), 0.8), "all 5 differences are equal"),
    ],
)
def test_what_cannot_be_tested_says_why(pairs: np.ndarray[tuple[int, int], np.dtype[np.float64]], reason: str) -> None:
    result = paired_test(pairs, generator())
    assert result.reason.startswith(reason)
    assert (result.p, result.normality_p, result.interval) == (None, None, None)


def test_values_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        paired_test(np.array([[0.8, np.nan]] * 3), generator())


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=3, max_size=12))
@settings(max_examples=60)
def test_ties_and_zeros_give_a_p_value_or_a_reason_but_no_warning(rows: list[tuple[int, int]]) -> None:
    result = paired_test(np.array(rows) / 10, np.random.default_rng(0))
    assert (result.p is None) == bool(result.reason)
    assert result.p is None or 0 <= result.p <= 1


def test_seeds_are_averaged_before_classes_are_paired() -> None:
    # Class a: (.9 + .7)/2 - (.6 + .6)/2 = .2;  b: .8 - .9 = -.1 (seed 1 has no value for the other);  c: .5 - .4 = .1.
    reference = {(0, "a"): 0.9, (1, "a"): 0.7, (0, "b"): 0.8, (1, "b"): 0.1, (0, "c"): 0.5, (2, "c"): 0.9}
    other = {(0, "a"): 0.6, (1, "a"): 0.6, (0, "b"): 0.9, (1, "b"): None, (0, "c"): 0.4}
    by_class = paired_over_classes(reference, other, generator())
    by_pair = paired_over_classes_and_seeds(reference, other, generator())
    assert (by_class.pairs, by_pair.pairs) == (3, 4)
    assert by_class.mean_difference == pytest.approx(0.2 / 3)
    assert by_pair.mean_difference == pytest.approx((0.3 + 0.1 - 0.1 + 0.1) / 4)


def test_holm_multiplies_from_the_smallest_on_and_never_falls() -> None:
    # Sorted .01 .03 .04 times 3 2 1 -> .03 .06 .04, the last lifted to .06; None does not count.
    assert adjust_by_holm([0.04, None, 0.01, 0.03]) == pytest.approx([0.06, None, 0.03, 0.06])
    assert adjust_by_holm([0.7, 0.9]) == [1.0, 1.0]
    assert adjust_by_holm([]) == []


def test_corrected_tests_carry_the_deciding_p_of_their_family() -> None:
    tests = [PairedTest(9, t_test_p=0.5, wilcoxon_p=0.02), PairedTest(2, reason="few"), PairedTest(9, t_test_p=0.3)]
    assert [each.holm_p for each in correct_family(tests)] == [0.04, None, 0.3]


seeds = st.integers(0, 10_000)


def random_pairs(seed: int) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """AUROCs of two methods; differences are normal, or skewed so that normality is rejected."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(3, 40))
    draw = rng.normal if rng.random() < 0.5 else rng.pareto
    other = rng.uniform(0.5, 0.9, count)
    return np.stack([other + 0.02 * draw(1.5, size=count) - 0.01, other], axis=1)


@given(seeds)
@settings(max_examples=100)
def test_each_p_value_is_that_of_scipy_on_the_differences(seed: int) -> None:
    pairs = random_pairs(seed)
    differences, result = pairs[:, 0] - pairs[:, 1], paired_test(pairs, generator())
    normality = shapiro(differences).pvalue
    assert result.mean_difference == pytest.approx(np.mean(differences))
    assert result.t_test_p == pytest.approx(ttest_1samp(differences, 0).pvalue)
    assert result.normality_p == pytest.approx(normality)
    rejected = wilcoxon(pairs[:, 0], pairs[:, 1]).pvalue if normality < ALPHA else None
    assert result.wilcoxon_p == (None if rejected is None else pytest.approx(rejected))
    assert result.p == (result.t_test_p if rejected is None else result.wilcoxon_p)


@pytest.mark.parametrize("seed", range(5))
def test_the_interval_is_close_to_the_percentile_bootstrap_of_scipy(seed: int) -> None:
    pairs = random_pairs(seed)
    differences, found = pairs[:, 0] - pairs[:, 1], paired_test(pairs, generator()).interval
    drawn = bootstrap(
        (differences,), np.mean, n_resamples=RESAMPLES, method="percentile", rng=np.random.default_rng(seed)
    )
    assert found is not None
    expected = drawn.confidence_interval
    assert found == pytest.approx((expected.low, expected.high), abs=0.05 * (found[1] - found[0]))


def rejected_step_by_step(p_values: list[float], alpha: float) -> set[int]:
    """Holm's procedure as he states it: the smallest first, against alpha / m, alpha / (m - 1), ... till one fails."""
    rejected = set[int]()
    for step, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        if p_values[index] > alpha / (len(p_values) - step):
            break
        rejected.add(index)
    return rejected


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8, unique=True), st.floats(0.001, 0.999))
def test_a_corrected_p_is_at_most_alpha_just_where_holms_procedure_rejects(p_values: list[float], alpha: float) -> None:
    adjusted = [p for p in adjust_by_holm(p_values) if p is not None]
    clear = [index for index, p in enumerate(adjusted) if abs(p - alpha) > 1e-9]  # but for rounding
    rejected = rejected_step_by_step(p_values, alpha)
    assert [index in rejected for index in clear] == [adjusted[index] <= alpha for index in clear]
