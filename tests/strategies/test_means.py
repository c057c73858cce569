"""Means by hand and by the plain sum: updates added one by one, all at once, in blocks and on threads, bit for bit."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from polyclinic.common.models.network import Head
from polyclinic.strategies.aggregation import means
from polyclinic.strategies.aggregation.means import (
    NUMBERS_PER_BLOCK,
    NUMBERS_PER_TASK,
    BlockwiseMean,
    Float32,
    WholeHeadMean,
    add_update_to_values,
    average_head_rows,
    sum_in_order,
)
from tests.strategies.folds import moved_by_mean, moved_head, owners_mean, weighted_mean

numbers = st.floats(-(2.0**100), 2.0**100, width=32)


@st.composite
def rounds(draw: st.DrawFn, elements: st.SearchStrategy[float] = numbers) -> tuple[Float32, list[Float32], list[float]]:
    """A state, updates of its length, and their weights."""
    size = draw(st.integers(0, 12))
    vector = arrays.arrays(np.float32, size, elements=elements)
    updates = draw(st.lists(vector, min_size=1, max_size=4))
    return draw(vector), updates, [draw(st.floats(0.5, 1e6)) for _ in updates]


def head(names: tuple[str, ...], *rows: tuple[float, float, float]) -> Head:
    """Rows of two weights and a bias."""
    values = np.array(rows, np.float32)
    return Head(names, values[:, :2].copy(), values[:, 2].copy())


def test_a_state_of_several_blocks_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(means, "NUMBERS_PER_BLOCK", 2)
    state = np.array([1, -2, 0.5, 0, 10], np.float32)
    first, second = np.array([4, 0, -4, 8, 1], np.float32), np.array([-8, 4, 0, 4, -3], np.float32)
    # means with weights 3 and 1: (12 - 8) / 4 = 1, (0 + 4) / 4 = 1, -12 / 4 = -3, (24 + 4) / 4 = 7, (3 - 3) / 4 = 0
    np.testing.assert_array_equal(weighted_mean([first, second], [3.0, 1.0]), [1, 1, -3, 7, 0])
    after = moved_by_mean(state, [first, second], [3.0, 1.0])
    np.testing.assert_array_equal(after, [2, -1, -2.5, 7, 10])
    assert after.dtype == np.float32


@given(rounds(), st.integers(1, 14))
def test_one_by_one_and_all_at_once_in_any_blocks_have_the_bits_of_the_plain_mean_and_change_nothing_lent(
    drawn: tuple[Float32, list[Float32], list[float]], block: int
) -> None:
    state, updates, weights = drawn
    before = [array.tobytes() for array in (state, *updates)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(means, "NUMBERS_PER_BLOCK", block)
        after = moved_by_mean(state, updates, weights)
        together = BlockwiseMean(list(zip(updates, weights, strict=True)))
        assert together.mean.tobytes() == weighted_mean(updates, weights).tobytes()
        assert together.add_mean_to_values(state).tobytes() == after.tobytes()
    assert after.tobytes() == add_update_to_values(state, weighted_mean(updates, weights)).tobytes()
    assert [array.tobytes() for array in (state, *updates)] == before
    assert not any(np.shares_memory(after, array) for array in (state, *updates))


@given(rounds(st.floats(width=32)))
@pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")
def test_any_numbers_have_the_same_bits_at_once(drawn: tuple[Float32, list[Float32], list[float]]) -> None:
    state, updates, weights = drawn
    together = BlockwiseMean(list(zip(updates, weights, strict=True)))
    assert together.add_mean_to_values(state).tobytes() == moved_by_mean(state, updates, weights).tobytes()


@pytest.mark.parametrize(
    "size",
    [0, 1, NUMBERS_PER_BLOCK - 1, NUMBERS_PER_BLOCK, NUMBERS_PER_BLOCK + 1, NUMBERS_PER_TASK + 3, 2 * NUMBERS_PER_TASK],
)
def test_at_the_edges_of_real_blocks_and_on_two_threads_they_have_the_bits_of_the_plain_mean(size: int) -> None:
    draws = np.random.default_rng(size)
    updates = [(10.0**power * draws.normal(size=size)).astype(np.float32) for power in (-3, 0, 5)]
    weights, state = [3.0, 0.1, 7.0], draws.normal(size=size).astype(np.float32)
    expected = add_update_to_values(state, weighted_mean(updates, weights)).tobytes()
    assert BlockwiseMean(list(zip(updates, weights, strict=True))).add_mean_to_values(state).tobytes() == expected
    assert moved_by_mean(state, updates, weights).tobytes() == expected


def test_sums_keep_what_float32_would_lose() -> None:
    # 2**24 + 1 is no float32: summed in float32, the one is lost. (2**24 + 1 - 2**24) / 3 + 0 = 1 / 3
    updates = [np.full(3, value, np.float32) for value in (2**24, 1, -(2**24))]
    after = moved_by_mean(np.zeros(3, np.float32), updates, [1.0, 1.0, 1.0])
    np.testing.assert_array_equal(after, np.full(3, 1 / 3, np.float32))


def test_arrays_as_they_come_off_the_wire_which_are_read_only_will_do() -> None:
    state, update = (np.frombuffer(np.array(values, "<f4").tobytes(), "<f4") for values in ([1, 2], [-3, 5]))
    assert not state.flags.writeable
    np.testing.assert_array_equal(moved_by_mean(state, [update], [2.0]), [-2, 7])


def test_arrays_of_another_length_and_updates_without_a_weight_are_refused() -> None:
    short, long = np.zeros(2, np.float32), np.zeros(3, np.float32)
    with pytest.raises(ValueError, match=r"expected shape \(2,\), got \(3,\)"):
        BlockwiseMean([(short, 1.0), (long, 1.0)])
    with pytest.raises(ValueError, match=r"expected shape \(3,\), got \(2,\)"):
        BlockwiseMean([(short, 1.0), (short, 1.0)]).add_mean_to_values(long)
    with pytest.raises(ValueError, match="zip"):
        moved_by_mean(short, [short, short], [1.0])


def test_a_running_sum_rounds_after_every_number_whatever_pythons_own_sum_does() -> None:
    # From Python 3.12 on sum() keeps what rounding loses, and gives 2.0 here.
    assert sum_in_order([1e16, 1.0, 1.0, -1e16]) == 0.0


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
    for site_head, share in zip(heads, weights, strict=True):
        whole.add(site_head, share)
    np.testing.assert_array_equal(whole.mean[0], weight)
    np.testing.assert_array_equal(whole.mean[1], bias)


def test_a_mean_of_whole_heads_refuses_a_head_of_other_rows() -> None:
    with pytest.raises(ValueError, match="expected rows"):
        WholeHeadMean(("a", "b"), 3).add(Head(("a",), np.zeros((1, 3), np.float32), np.zeros(1, np.float32)), 1.0)


def test_rows_with_weights_of_their_own_are_averaged_by_them_and_one_without_any_counts_as_not_sent() -> None:
    first = Head(("a", "b"), np.array([[1.0, -2.0], [3.0, 4.0]], np.float32), np.array([1.0, 7.0], np.float32))
    second = Head(("a", "b"), np.array([[5.0, 2.0], [9.0, 9.0]], np.float32), np.array([-3.0, 9.0], np.float32))
    mean = average_head_rows([first, second], [np.array([3.0, 0.0]), np.array([1.0, 0.0])])
    weight, bias, sent = mean.mean
    assert weight.tolist() == [[2.0, -1.0], [0.0, 0.0]]  # (3 * 1 + 5) / 4, (3 * -2 + 2) / 4
    assert (bias.tolist(), sent.tolist()) == ([0.0, 0.0], [True, False])
    with pytest.raises(ValueError, match="expected rows"):
        average_head_rows([first, second.select_rows(("b", "a"))], [np.ones(2), np.ones(2)])
