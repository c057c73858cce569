"""Bounds on one site: the length of its update, and its share of all images."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyclinic.common.models.network import Head
from polyclinic.common.wire.records import ModelGroups
from polyclinic.strategies.aggregation.bounds import (
    Lengths,
    cap_image_counts,
    clip_update_by_median_norms,
    compute_median_part_norms,
    compute_update_part_norms,
    find_dominant_sites,
)


def array(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def update(*, trunk: float = 1, norm: float = 1, rows: tuple[float, ...] = (1, 1)) -> ModelGroups:
    """Trunk and norm along (3, -4) / 5, each row along (2, -1) with bias 2, at the given lengths."""
    weight = np.array([[2 * row / 3, -row / 3] for row in rows], np.float32)
    head = Head(tuple("abc"[: len(rows)]), weight, array(*(2 * row / 3 for row in rows)))
    return ModelGroups(array(0.6 * trunk, -0.8 * trunk), array(0.6 * norm, -0.8 * norm), head)


def bounded(*updates: ModelGroups, clip: float = 3.0) -> list[tuple[ModelGroups, str]]:
    lengths = [compute_update_part_norms(groups) for groups in updates]
    medians = compute_median_part_norms(lengths)
    return [
        clip_update_by_median_norms(groups, length, medians, clip)
        for groups, length in zip(updates, lengths, strict=True)
    ]


def test_the_length_of_a_head_is_that_of_its_longest_row_with_its_bias() -> None:
    lengths = compute_update_part_norms(update(trunk=5, norm=7, rows=(2, 9)))
    assert lengths == pytest.approx({"trunk": 5, "batch normalisation": 7, "head row": 9})


def test_a_part_over_three_medians_is_shortened_to_them_and_the_others_keep_their_bits() -> None:
    honest, long = update(trunk=2), update(trunk=-20)
    results = bounded(honest, update(trunk=1), honest, long, honest)
    assert [reason for _, reason in results[:3]] == ["", "", ""]
    assert results[0][0] is honest
    short, reason = results[3]
    assert reason == "its trunk was 10 times the median length, and was shortened to 3 times"
    np.testing.assert_allclose(short.trunk, [-3.6, 4.8], rtol=1e-6)  # 6 along -(3, -4) / 5
    assert short.norm is long.norm
    assert short.head is long.head


def test_a_long_head_behind_a_short_trunk_is_shortened_row_by_row() -> None:
    long = update(trunk=0.01, rows=(9, 1, -30))
    short, reason = bounded(*[update(rows=(2, 1))] * 4, long)[4]
    assert reason.startswith("its head row was 15 times")
    np.testing.assert_allclose(short.head.bias, array(4, 2 / 3, -4), rtol=1e-6)  # rows of 6, 1 and 6
    np.testing.assert_allclose(short.head.weight[2], array(-4, 2), rtol=1e-6)
    assert short.head.weight[1].tobytes() == long.head.weight[1].tobytes()
    assert short.trunk is long.trunk


def test_of_two_sites_neither_is_shortened() -> None:
    assert [reason for _, reason in bounded(update(), update(trunk=1e30))] == ["", ""]


def test_what_nobody_else_moves_may_not_be_moved() -> None:
    still, moved = update(norm=0), update(norm=5)
    short, reason = bounded(still, still, moved)[2]
    assert reason.startswith("its batch normalisation was inf times")
    np.testing.assert_array_equal(short.norm, [0, 0])


@pytest.mark.parametrize("length", [1e30, 3e38])
def test_numbers_as_large_as_a_float32_holds_become_a_finite_update_of_the_bound(length: float) -> None:
    short, _ = bounded(update(), update(), update(trunk=length, norm=-length, rows=(length, 1)))[2]
    expected = {"trunk": 3, "batch normalisation": 3, "head row": 3}
    assert compute_update_part_norms(short) == pytest.approx(expected, rel=1e-5)


lengths = st.floats(1e-3, 1e6)


@given(st.lists(st.tuples(lengths, lengths, lengths), min_size=3, max_size=9), st.floats(1, 5))
def test_no_part_ends_longer_than_the_bound_and_directions_stay(parts: list[tuple[float, ...]], clip: float) -> None:
    updates = [update(trunk=trunk, norm=norm, rows=(row, row / 2)) for trunk, norm, row in parts]
    medians: Lengths = compute_median_part_norms([compute_update_part_norms(groups) for groups in updates])
    for before, (after, reason) in zip(updates, bounded(*updates, clip=clip), strict=True):
        now, then = compute_update_part_norms(after), compute_update_part_norms(before)
        assert all(now[part] <= clip * medians[part] * (1 + 1e-6) for part in now)
        assert bool(reason) == any(then[part] > clip * medians[part] for part in then)
        assert before.trunk is not None
        assert after.trunk is not None
        np.testing.assert_allclose(after.trunk / now["trunk"], before.trunk / then["trunk"], rtol=1e-5)


@given(st.lists(st.floats(0.01, 100), min_size=4, max_size=4), st.floats(0.01, 1e4), st.integers(0, 3))
def test_running_variances_stay_positive(before: list[float], times: float, long: int) -> None:
    """A site moves them to other positive values; a shortened move ends between the two."""
    variances = np.array(before, np.float32)
    moves = [np.float32(scale) * (variances[::-1] - variances) for scale in (0.1, 0.1, 0.1)]
    far = (np.float32(times) * variances[::-1] - variances).astype(np.float32)
    moves.insert(long, far)
    for after, _ in bounded(*(ModelGroups(norm=move.astype(np.float32)) for move in moves)):
        assert after.norm is not None
        assert (variances + after.norm > 0).all()


images = st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 10**9), min_size=1)


@given(images)
def test_by_default_every_image_counts(stated: dict[str, int]) -> None:
    assert cap_image_counts(stated, 1.0) == stated


@given(images, st.floats(0.01, 0.99))
def test_no_site_has_more_than_the_share_or_all_weigh_the_same(stated: dict[str, int], share: float) -> None:
    counted = cap_image_counts(stated, share)
    largest = max(counted.values())
    assert largest <= share * sum(counted.values()) + 1 or len(set(counted.values())) == 1  # whole images
    assert all(counted[site] <= stated[site] for site in stated)


@pytest.mark.parametrize(
    ("stated", "share", "counted"),
    [
        ({"a": 10**9, "b": 300, "c": 100}, 0.5, {"a": 400, "b": 300, "c": 100}),  # as much as the others together
        ({"a": 10**9, "b": 900, "c": 100}, 0.4, {"a": 200, "b": 200, "c": 100}),  # two count m: m = 0.4 (2 m + 100)
        ({"a": 500, "b": 300}, 0.3, {"a": 300, "b": 300}),  # equal weights exceed the share: all weigh the same
    ],
    ids=["a_billion", "two_above_the_cap", "a_share_below_equal_weights"],
)
def test_capped_counts_by_hand(stated: dict[str, int], share: float, counted: dict[str, int]) -> None:
    assert cap_image_counts(stated, share) == counted


@pytest.mark.parametrize(
    ("stated", "heavy"),
    [({"a": 10**9, "b": 10}, ["a"]), ({"a": 90, "b": 10}, []), ({"a": 91, "b": 9}, ["a"]), ({"a": 5}, []), ({}, [])],
)
def test_who_has_nearly_all_images_is_named(stated: dict[str, int], heavy: list[str]) -> None:
    assert list(find_dominant_sites(stated)) == heavy
