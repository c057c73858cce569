"""The length of a flat array is that of its blocks, and shows if a number is not finite."""

import math

import numpy as np
import pytest

from polyclinic.common.models.norms import BLOCK_LENGTH, compute_euclidean_norm

SIZES = [0, 1, 7, BLOCK_LENGTH - 1, BLOCK_LENGTH, BLOCK_LENGTH + 1, 3 * BLOCK_LENGTH, 100_003]


def make_numbers(size: int, scale: float = 1.0) -> np.ndarray:
    return (scale * np.random.default_rng(size).standard_normal(size)).astype(np.float32)


@pytest.mark.parametrize("size", SIZES)
def test_a_length_has_the_bits_of_squares_added_block_after_block(size: int) -> None:
    values = make_numbers(size)
    total = 0.0
    for start in range(0, size, BLOCK_LENGTH):
        block = values[start : start + BLOCK_LENGTH]
        total += float(block @ block)
    assert compute_euclidean_norm(values) == math.sqrt(total)


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1.0, 1e19, 3e37])
@pytest.mark.parametrize("size", SIZES)
def test_a_length_is_right_to_five_digits_also_where_float32_holds_no_square(size: int, scale: float) -> None:
    values = make_numbers(size, scale)
    expected = math.sqrt(np.square(values, dtype=np.float64).sum())
    assert compute_euclidean_norm(values) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("place", [0, BLOCK_LENGTH - 1, BLOCK_LENGTH, -1])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_one_number_that_is_not_finite_makes_the_length_not_finite(value: float, place: int) -> None:
    values = make_numbers(2 * BLOCK_LENGTH + 5)
    values[place] = value
    assert not math.isfinite(compute_euclidean_norm(values))


def test_the_largest_numbers_of_float32_have_a_finite_length() -> None:
    assert math.isfinite(compute_euclidean_norm(np.full(2 * BLOCK_LENGTH, np.finfo(np.float32).max)))
