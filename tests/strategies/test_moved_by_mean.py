"""The mean that is computed block by block is the plain one, bit for bit, whatever the block's size."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from strategies.aggregation import means
from strategies.aggregation.means import BLOCK, Float32, moved
from tests.strategies.folds import moved_by_mean, weighted_mean

numbers = st.floats(-(2.0**100), 2.0**100, width=32)


def vector(size: int) -> st.SearchStrategy[Float32]:
    return arrays.arrays(np.float32, size, elements=numbers)


@st.composite
def rounds(draw: st.DrawFn) -> tuple[Float32, list[Float32], list[float]]:
    """A state, updates of its length, and their weights."""
    size = draw(st.integers(0, 12))
    updates = draw(st.lists(vector(size), min_size=1, max_size=4))
    weights = [draw(st.floats(0.5, 1e6)) for _ in updates]
    return draw(vector(size)), updates, weights


def test_a_state_of_several_blocks_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(means, "BLOCK", 2)
    state = np.array([1, -2, 0.5, 0, 10], np.float32)
    first, second = np.array([4, 0, -4, 8, 1], np.float32), np.array([-8, 4, 0, 4, -3], np.float32)
    # means with weights 3 and 1: (12 - 8) / 4 = 1, (0 + 4) / 4 = 1, -12 / 4 = -3, (24 + 4) / 4 = 7, (3 - 3) / 4 = 0
    after = moved_by_mean(state, [first, second], [3.0, 1.0])
    np.testing.assert_array_equal(after, [2, -1, -2.5, 7, 10])
    assert after.dtype == np.float32


@given(rounds(), st.integers(1, 14))
def test_in_blocks_of_any_size_it_is_the_plain_mean_bit_for_bit(
    drawn: tuple[Float32, list[Float32], list[float]], block: int
) -> None:
    state, updates, weights = drawn
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(means, "BLOCK", block)
        after = moved_by_mean(state, updates, weights)
    assert after.tobytes() == moved(state, weighted_mean(updates, weights)).tobytes()


@pytest.mark.parametrize("size", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3])
def test_at_the_edges_of_real_blocks_it_is_the_plain_mean_bit_for_bit(size: int) -> None:
    generator = np.random.default_rng(size)
    state, *updates = generator.normal(size=(4, size)).astype(np.float32)
    weights = [1.0, 2.5, 7.0]
    after = moved_by_mean(state, updates, weights)
    assert after.tobytes() == moved(state, weighted_mean(updates, weights)).tobytes()


def test_sums_keep_what_float32_would_lose() -> None:
    # 2**24 + 1 is no float32: summed in float32, the one is lost. (2**24 + 1 - 2**24) / 3 + 0 = 1 / 3
    updates = [np.full(3, value, np.float32) for value in (2**24, 1, -(2**24))]
    after = moved_by_mean(np.zeros(3, np.float32), updates, [1.0, 1.0, 1.0])
    np.testing.assert_array_equal(after, np.full(3, 1 / 3, np.float32))


def test_the_weights_need_not_sum_to_one_and_their_scale_changes_nothing() -> None:
    state, updates = np.array([1, -1], np.float32), [np.array([3, -5], np.float32), np.array([-9, 7], np.float32)]
    # (1 * 3 + 2 * -9) / 3 = -5 and (1 * -5 + 2 * 7) / 3 = 3
    for scale in (0.25, 1.0, 4096.0):
        np.testing.assert_array_equal(moved_by_mean(state, updates, [scale, 2 * scale]), [-4, 2])


@given(rounds())
def test_what_is_lent_is_not_changed(drawn: tuple[Float32, list[Float32], list[float]]) -> None:
    state, updates, weights = drawn
    before = [array.tobytes() for array in (state, *updates)]
    result = moved_by_mean(state, updates, weights)
    assert [array.tobytes() for array in (state, *updates)] == before
    assert not any(np.shares_memory(result, array) for array in (state, *updates))


def test_arrays_as_they_come_off_the_wire_which_are_read_only_will_do() -> None:
    state, update = (np.frombuffer(np.array(values, "<f4").tobytes(), "<f4") for values in ([1, 2], [-3, 5]))
    assert not state.flags.writeable
    np.testing.assert_array_equal(moved_by_mean(state, [update], [2.0]), [-2, 7])


def test_an_update_without_its_weight_is_refused() -> None:
    state = np.zeros(2, np.float32)
    with pytest.raises(ValueError, match="zip"):
        moved_by_mean(state, [state, state], [1.0])
