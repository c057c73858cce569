"""Robust means: worked by hand, and what they promise whatever a few sites send."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyclinic.common.models.network import Head
from polyclinic.common.models.state import ModelState
from polyclinic.common.wire.records import ModelGroups
from polyclinic.strategies.aggregation import means
from polyclinic.strategies.aggregation.means import MergedUpdates
from polyclinic.strategies.aggregation.robust import (
    RobustMeanRule,
    average_updates_robustly,
    choose_sites_by_krum,
    compute_robust_mean,
    compute_squared_site_distances,
)

MEDIAN = RobustMeanRule(kind="coordinate_median")
TRIMMED = RobustMeanRule(kind="trimmed_mean", fraction=0.2)
KRUM = RobustMeanRule(kind="krum", byzantine=1)
MULTI_KRUM = RobustMeanRule(kind="krum", byzantine=1, keep=3)
POINTS = [[0.0, 0.0], [1.0, 0.0], [2.5, 0.0], [4.5, 0.0], [0.0, 100.0]]
RULES = pytest.mark.parametrize("rule", [MEDIAN, TRIMMED, KRUM, MULTI_KRUM], ids=lambda rule: f"{rule.kind}{rule.keep}")


def of(rule: RobustMeanRule, vectors: Sequence[Sequence[float]]) -> np.ndarray:
    (mean,) = compute_robust_mean([[np.array(vector, np.float32)] for vector in vectors], rule)
    return mean


@pytest.mark.parametrize(
    ("rule", "updates", "mean"),
    [
        (MEDIAN, [[1, -2, 3], [4, 0, -1], [-100, 50, 2]], [1, 0, 2]),
        # sorted: -7 1 2 9, then -3 0 5 8: the means of the two in the middle
        (MEDIAN, [[1, 0], [9, 8], [-7, 5], [2, -3]], [1.5, 2.5]),
        # One of five goes at either end: (1 + 2 + 3) / 3, and (-4 + 0 - 2) / 3.
        (TRIMMED, [[1, -4], [2, 0], [3, 90], [10, -7], [-50, -2]], [2, -2]),
        # On a line, but for one. With byzantine = 1, the two nearest count: scores 1 + 6.25, 1 + 2.25, 2.25 + 4, ...
        (KRUM, POINTS, [1, 0]),
        (MULTI_KRUM, POINTS, [3.5 / 3, 0]),
    ],
    ids=["median_of_odd", "median_of_even", "trimmed_mean", "krum", "multi_krum"],
)
def test_a_robust_mean_by_hand(rule: RobustMeanRule, updates: list[list[float]], mean: list[float]) -> None:
    np.testing.assert_allclose(of(rule, updates), mean, rtol=1e-15)


@pytest.mark.parametrize(
    ("fraction", "sites", "cut"), [(0.1, 3, 1), (0.1, 10, 1), (0.1, 11, 2), (0.1, 30, 3), (0.2, 5, 1), (0.45, 4, 1)]
)
def test_a_fraction_cuts_off_at_least_one_and_leaves_at_least_one(fraction: float, sites: int, cut: int) -> None:
    assert RobustMeanRule(kind="trimmed_mean", fraction=fraction).count_trimmed_values(sites) == cut


def test_multi_krum_never_keeps_more_sites_than_are_right() -> None:
    distances = compute_squared_site_distances([[np.array(point, np.float32) for point in POINTS]])
    assert choose_sites_by_krum(distances, 1, keep=9) == [0, 1, 2, 3]


def test_distances_are_those_of_all_parts_together_and_stay_exact_beside_an_enormous_one() -> None:
    columns = ([[0, 1], [3, 1], [1e30, 0]], [[2], [-2], [0]])
    parts = [[np.array(site, np.float32) for site in part] for part in columns]
    distances = compute_squared_site_distances(parts)
    assert distances[0, 1] == distances[1, 0] == 9 + 16
    assert distances[0, 2] == pytest.approx(1e60)
    np.testing.assert_array_equal(np.diag(distances), 0)


sites_and_size = st.tuples(st.integers(5, 9), st.integers(1, 40), st.integers(0, 2**32))


def drawn(sites: int, size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(sites, size)).astype(np.float32)


@RULES
@given(sites_and_size, st.sampled_from([-1e30, -50.0, 50.0, 1e30]))
def test_order_does_not_matter_equals_have_the_plain_mean_and_one_site_cannot_leave_the_others_range(
    rule: RobustMeanRule, chosen: tuple[int, int, int], wrong: float
) -> None:
    updates = drawn(*chosen)
    np.testing.assert_allclose(of(rule, updates), of(rule, updates[::-1]), rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(of(rule, [updates[0]] * len(updates)), updates[0], rtol=1e-15)
    honest = updates[1:].copy()
    updates[0] = np.float32(wrong)
    mean = of(rule, updates)
    assert (mean >= honest.min(axis=0)).all()
    assert (mean <= honest.max(axis=0)).all()


@given(st.integers(0, 2**32), st.sampled_from([-1e6, 1e3]))
def test_as_many_liars_as_each_rule_bears_cannot_move_it_even_together(seed: int, wrong: float) -> None:
    updates = drawn(9, 12, seed)
    honest = updates[:6].copy()
    updates[6:] = np.float32(wrong)
    rules = (MEDIAN, RobustMeanRule(kind="trimmed_mean", fraction=1 / 3), RobustMeanRule(kind="krum", byzantine=3))
    for rule in rules:
        mean = of(rule, updates)
        assert (mean >= honest.min(axis=0)).all(), rule
        assert (mean <= honest.max(axis=0)).all(), rule


@pytest.mark.parametrize("rule", [MEDIAN, TRIMMED, KRUM], ids=lambda rule: rule.kind)
def test_blocks_of_long_vectors_have_the_same_bits(rule: RobustMeanRule, monkeypatch: pytest.MonkeyPatch) -> None:
    updates = drawn(5, 1001, 4)
    whole = of(rule, updates)
    monkeypatch.setattr(means, "NUMBERS_PER_BLOCK", 16)
    monkeypatch.setattr(means, "NUMBERS_PER_TASK", 160)
    np.testing.assert_array_equal(of(rule, updates), whole)


MODEL = ModelState(
    np.zeros(2, np.float32),
    np.zeros(1, np.float32),
    Head(("a", "b", "c"), np.zeros((3, 1), np.float32), np.zeros(3, np.float32)),
)


def update(trunk: Sequence[float], norm: float, **rows: float) -> ModelGroups:
    """Each row is its one weight, and its bias the tenfold."""
    weights = np.array(list(rows.values()), np.float32)
    head = Head(tuple(rows), weights[:, None], 10 * weights)
    return ModelGroups(np.array(trunk, np.float32), np.array([norm], np.float32), head)


UPDATES = [update([1, 5], 2, b=1, a=4), update([2, -9], 3, a=-2), update([60, 1], -4, a=1, b=7)]


def merged(rule: RobustMeanRule, updates: Sequence[ModelGroups] = UPDATES) -> MergedUpdates:
    return average_updates_robustly(MODEL, updates, [1.0, 1.0, 3.0, 1.0, 1.0][: len(updates)], rule)


def test_each_row_has_the_median_of_its_owners_and_with_too_few_of_them_their_plain_mean() -> None:
    result = merged(MEDIAN)
    after = result.means.add_means_to_model()
    np.testing.assert_array_equal(after.trunk, [2, 1])
    np.testing.assert_array_equal(after.norm, [2])
    # a: the median of 4, -2, 1; b: two owners, of weight 1 and 3: (1 + 3 * 7) / 4; c: nobody's
    np.testing.assert_array_equal(after.head.weight, [[1], [5.5], [0]])
    np.testing.assert_array_equal(after.head.bias, [10, 55, 0])
    assert result.plain == ("b",)


def test_with_fewer_sites_than_the_rule_needs_all_is_the_plain_mean_and_said_to_be() -> None:
    result = merged(KRUM)
    np.testing.assert_allclose(result.means.add_means_to_model().trunk, [(1 + 2 + 180) / 5, (5 - 9 + 3) / 5])
    assert result.plain == ("trunk", "a", "b")


def test_krum_takes_trunk_and_batch_normalisation_of_one_site_together() -> None:
    # By the trunk alone the site at 1, by batch normalisation alone that at 4; together (4, 4) has the lowest score.
    at = [(0, 9), (1, 9), (2, 0), (4, 4), (5, 4)]
    result = merged(KRUM, [update([trunk, 0], norm, a=trunk) for trunk, norm in at])
    # squared distances of (4, 4): 1, 20, 34, 41; two nearest: 21. Of (5, 4): 1, 25: 26. Of (1, 9): 1, 34: 35.
    after = result.means.add_means_to_model()
    assert (after.trunk[0], after.norm[0]) == (4, 4)
    assert result.plain == ()


def test_groups_that_nobody_sent_stay() -> None:
    after = merged(MEDIAN, [ModelGroups(trunk=groups.trunk) for groups in UPDATES]).means.add_means_to_model()
    np.testing.assert_array_equal(after.trunk, [2, 1])
    np.testing.assert_array_equal(after.norm, MODEL.norm)
    assert after.head is MODEL.head
