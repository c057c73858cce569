"""Sums over volumes: groups by hand, no patient alone, and the sum of two hospitals."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from polyclinic.common.volume_fingerprint import (
    LONGEST_FINGERPRINT,
    MOST_GROUPS,
    VolumeFingerprint,
    compute_percentile,
    group_volumes,
)


def test_groups_by_hand() -> None:
    values, patients = [2.0, 1.0, 1.0, 5.0, 3.0], ["a", "b", "c", "a", "d"]
    assert group_volumes(values, patients, 0) == ((1.0, 2), (2.0, 1), (3.0, 1), (5.0, 1))
    # 1, 1 of b and c; 2, 3 of a and d, which 5 of a alone joins: 10 / 3.
    assert group_volumes(values, patients, 2) == ((1.0, 2), (3.33333, 3))
    assert group_volumes(values, patients, 5) == ()


@given(st.lists(st.tuples(st.floats(0.1, 100), st.integers(0, 9)), min_size=1, max_size=60), st.integers(0, 6))
def test_every_group_is_of_enough_patients(volumes: list[tuple[float, int]], smallest: int) -> None:
    values, patients = [value for value, _ in volumes], [str(patient) for _, patient in volumes]
    groups = group_volumes(values, patients, smallest)
    if len(set(patients)) < smallest:
        assert groups == ()
        return
    assert sum(count for _, count in groups) == len(values)
    assert len(groups) <= MOST_GROUPS
    ordered = [patient for _, patient in sorted(zip(values, patients, strict=True), key=lambda each: each[0])]
    first = 0
    for _, count in groups:
        assert len(set(ordered[first : first + count])) >= min(smallest, len(set(patients)))
        first += count


def fingerprint_of(spacing: float, count: int, grey: tuple[int, ...] = ()) -> VolumeFingerprint:
    axes = (((spacing, count),),) * 3
    return VolumeFingerprint.model_validate({"spacing": axes, "extent": axes, "grey": grey})


def test_two_hospitals_add_up() -> None:
    both = fingerprint_of(1.0, 2, (0, 5, 1)) + fingerprint_of(3.0, 1, (2, 0, 1))
    assert both.volumes == 3
    assert both.spacing == (((1.0, 2), (3.0, 1)),) * 3
    assert both.grey == (2, 5, 2)
    assert (both + fingerprint_of(1.0, 1)).grey == ()
    assert VolumeFingerprint.model_validate_json(both.to_json()) == both


@pytest.mark.parametrize("wrong", [{"spacing": 0.0}, {"spacing": -1.0}, {"spacing": float("inf")}, {"count": 0}])
def test_impossible_sums_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        fingerprint_of(**({"spacing": 1.0, "count": 1} | wrong))  # type: ignore[arg-type]


def test_the_longest_fingerprint_fits_its_field() -> None:
    random = np.random.default_rng(0)
    axes = [[(float(f"{value:.6g}"), 10**9) for value in random.uniform(1e5, 1e6, MOST_GROUPS)] for _ in range(3)]
    tables = {"spacing": axes, "extent": axes, "grey": [2**53] * 256}
    assert len(VolumeFingerprint.model_validate(tables).to_json()) <= LONGEST_FINGERPRINT


@given(
    st.lists(st.tuples(st.floats(0.1, 100), st.integers(1, 9)), min_size=1, max_size=20), st.sampled_from([0, 10, 50])
)
def test_a_percentile_of_groups_is_that_of_all_volumes(groups: list[tuple[float, int]], percentile: float) -> None:
    values, counts = zip(*groups, strict=True)
    expected = np.percentile(np.repeat(values, counts), percentile)
    assert compute_percentile(groups, percentile) == pytest.approx(expected)


def test_a_percentile_of_a_billion_volumes_takes_no_memory() -> None:
    assert compute_percentile(((1.0, 10**9), (3.0, 10**9)), 50) == 2.0
