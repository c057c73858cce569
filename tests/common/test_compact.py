"""Numbers in fewer bytes: what was rounded comes back bit for bit, and rounding errs by no more than it may."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from common.wire.codec import BLOCK, count_packed_bytes, pack_numbers, round_to_number_format, unpack_numbers
from common.wire.records import FORMS, Form

NUMBERS = arrays.arrays(
    np.float32, st.integers(0, 40), elements=st.floats(-(2.0**110), 2.0**110, width=32, allow_subnormal=True)
)


@given(NUMBERS, st.sampled_from(FORMS))
def test_what_was_rounded_comes_back_bit_for_bit_and_is_not_rounded_again(values: np.ndarray, form: Form) -> None:
    once = round_to_number_format(values, form)
    data = pack_numbers(once, form)
    assert len(data) == count_packed_bytes(len(values), form)
    np.testing.assert_array_equal(unpack_numbers(data, len(values), form), once)
    np.testing.assert_array_equal(round_to_number_format(once, form), once)


@pytest.mark.parametrize("size", [1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 7])
def test_each_block_has_a_scale_of_its_own(size: int) -> None:
    values = np.random.default_rng(size).normal(size=size).astype(np.float32)
    values[BLOCK:] *= 1e-4
    once = round_to_number_format(values, "int8")
    np.testing.assert_array_equal(unpack_numbers(pack_numbers(once, "int8"), size, "int8"), once)
    for start in range(0, size, BLOCK):
        block = slice(start, start + BLOCK)
        assert np.abs(values[block] - once[block]).max() <= np.abs(values[block]).max() / 127


def test_float16_errs_by_a_two_thousandth_and_ends_at_its_largest_number() -> None:
    values = np.array([1.0, 3.14159, -1e-3, 1e6, -1e30], np.float32)
    once = round_to_number_format(values, "float16")
    np.testing.assert_allclose(once[:3], values[:3], rtol=2**-11)
    np.testing.assert_array_equal(once[3:], [65504, -65504])


@pytest.mark.parametrize("form", FORMS)
def test_zeros_stay_zeros(form: Form) -> None:
    assert not unpack_numbers(
        pack_numbers(round_to_number_format(np.zeros(2000, np.float32), form), form), 2000, form
    ).any()


@pytest.mark.parametrize(
    ("data", "n", "form", "reason"),
    [
        (b"123", 1, "float16", "take 2 bytes, not 3"),
        (b"", 3, "int8", "take 4 bytes, not 0"),
        (bytes([121, 1]), 1, "int8", "scale of a block"),
        (bytes([128, 1]), 1, "int8", "scale of a block"),
    ],
)
def test_bytes_that_are_no_such_numbers_are_refused(data: bytes, n: int, form: Form, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        unpack_numbers(data, n, form)
