"""A mean of arrays that are all there has the bits of one to which they are added one by one."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies.aggregation.means import BLOCK, STRETCH, Float32, MeanOfAll, RunningMean


def added(arrays: Sequence[Float32], weights: Sequence[float]) -> RunningMean:
    running = RunningMean(len(arrays[0]))
    for array, weight in zip(arrays, weights, strict=True):
        running.add(array, weight)
    return running


def equal_bits(arrays: Sequence[Float32], weights: Sequence[float], state: Float32) -> None:
    one, other = MeanOfAll(list(zip(arrays, weights, strict=True))), added(arrays, weights)
    assert one.mean.tobytes() == other.mean.tobytes()
    assert one.moved(state).tobytes() == other.moved(state).tobytes()
    assert one.moved(state).dtype == np.float32


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK + 1, STRETCH + 3, 2 * STRETCH])
def test_in_blocks_and_on_two_threads(size: int) -> None:
    draws = np.random.default_rng(size)
    arrays = [(10.0**power * draws.normal(size=size)).astype(np.float32) for power in (-3, 0, 5)]
    equal_bits(arrays, [3.0, 0.1, 7.0], draws.normal(size=size).astype(np.float32))


SOME = st.floats(width=32, allow_subnormal=True)


@given(
    st.integers(1, 5).flatmap(
        lambda size: st.tuples(
            st.lists(st.lists(SOME, min_size=size, max_size=size), min_size=1, max_size=6),
            st.lists(SOME, min_size=size, max_size=size),
        )
    ),
    st.data(),
)
@pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")
def test_for_any_numbers(numbers: tuple[list[list[float]], list[float]], data: st.DataObject) -> None:
    arrays = [np.array(one, np.float32) for one in numbers[0]]
    weight = st.floats(min_value=2.0**-20, max_value=2.0**40)
    weights = data.draw(st.lists(weight, min_size=len(arrays), max_size=len(arrays)))
    equal_bits(arrays, weights, np.array(numbers[1], np.float32))


def test_arrays_of_another_length_are_an_error() -> None:
    short, long = np.zeros(2, np.float32), np.zeros(3, np.float32)
    with pytest.raises(ValueError, match=r"expected shape \(2,\), got \(3,\)"):
        MeanOfAll([(short, 1.0), (long, 1.0)])
    with pytest.raises(ValueError, match=r"expected shape \(3,\), got \(2,\)"):
        MeanOfAll([(short, 1.0), (short, 1.0)]).moved(long)
