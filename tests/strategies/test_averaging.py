"""Means worked by hand, entries unequal and of both signs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.models.network import Head
from strategies.aggregation.means import WholeHeadMean, running_sum
from tests.strategies.folds import moved_head, owners_mean, weighted_mean


def head(names: tuple[str, ...], *rows: tuple[float, float, float]) -> Head:
    """Rows of two weights and a bias."""
    values = np.array(rows, np.float32)
    return Head(names, values[:, :2].copy(), values[:, 2].copy())


def test_a_weighted_mean_by_hand() -> None:
    # (3 * [2, -4] + 1 * [-6, 8]) / 4 = [0, -1]
    mean = weighted_mean([np.array([2, -4], np.float32), np.array([-6, 8], np.float32)], [3.0, 1.0])
    np.testing.assert_array_equal(mean, [0.0, -1.0])


def test_rows_are_matched_by_name_and_averaged_over_their_owners_only() -> None:
    north = head(("b", "a"), (2.0, -1.0, 4.0), (1.0, 1.0, -3.0))
    south = head(("c", "b"), (5.0, -5.0, 0.5), (-4.0, 3.0, 2.0))
    weight, bias, sent = owners_mean([north, south], [1.0, 1.0], ("a", "b", "c", "d"))
    # a: north alone; b: ((2, -1) + (-4, 3)) / 2 and (4 + 2) / 2; c: south alone; d: nobody
    np.testing.assert_array_equal(weight, [[1, 1], [-1, 1], [5, -5], [0, 0]])
    np.testing.assert_array_equal(bias, [-3, 3, 0.5, 0])
    np.testing.assert_array_equal(sent, [True, True, True, False])


def test_sample_weights_count_among_a_rows_owners_only() -> None:
    north, south = head(("a",), (4.0, 0.0, 1.0)), head(("b", "a"), (9.0, 9.0, 9.0), (-2.0, 6.0, -1.0))
    weight, bias, _ = owners_mean([north, south], [10.0, 30.0], ("a", "b"))
    # a: (10 * (4, 0) + 30 * (-2, 6)) / 40 = (-0.5, 4.5), bias (10 - 30) / 40 = -0.5
    np.testing.assert_array_equal(weight, [[-0.5, 4.5], [9, 9]])
    np.testing.assert_array_equal(bias, [-0.5, 9])


def test_a_row_that_nobody_sent_stays_as_it_was() -> None:
    before = head(("a", "b"), (1.0, 2.0, 3.0), (-1.0, -2.0, -3.0))
    after = moved_head(before, [head(("b",), (0.5, 0.5, 1.0))], [1.0])
    np.testing.assert_array_equal(after.weight, [[1, 2], [-0.5, -1.5]])
    np.testing.assert_array_equal(after.bias, [3, -2])
    np.testing.assert_array_equal(before.weight, [[1, 2], [-1, -2]])


@given(st.data())
def test_with_equal_class_lists_the_owners_mean_is_the_plain_mean_bit_for_bit(data: st.DataObject) -> None:
    sites, classes = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    names = tuple(f"class {index}" for index in range(classes))
    weights = rng.uniform(1, 100, sites).tolist()
    kernels = rng.normal(size=(sites, classes, 3)).astype(np.float32)
    heads = [Head(names, kernel, kernel[:, 0].copy()) for kernel in kernels]
    weight, bias, _ = owners_mean(heads, weights, names)
    np.testing.assert_array_equal(weight, weighted_mean(list(kernels), weights))
    np.testing.assert_array_equal(bias, weighted_mean([kernel[:, 0] for kernel in kernels], weights))
    whole = WholeHeadMean(names, 3)
    for head, share in zip(heads, weights, strict=True):
        whole.add(head, share)
    np.testing.assert_array_equal(whole.mean[0], weight)
    np.testing.assert_array_equal(whole.mean[1], bias)


def test_a_mean_of_whole_heads_refuses_a_head_of_other_rows() -> None:
    with pytest.raises(ValueError, match="expected rows"):
        WholeHeadMean(("a", "b"), 3).add(Head(("a",), np.zeros((1, 3), np.float32), np.zeros(1, np.float32)), 1.0)


def test_a_running_sum_rounds_after_every_number_whatever_pythons_own_sum_does() -> None:
    # From Python 3.12 on sum() keeps what rounding loses, and gives 2.0 here.
    assert running_sum([1e16, 1.0, 1.0, -1e16]) == 0.0
