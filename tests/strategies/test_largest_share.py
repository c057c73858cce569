"""No site weighs more than its largest share, and by default every count is what the site said."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies.aggregation.bounds import counted_images, heavy_sites

images = st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 10**9), min_size=1)


@given(images)
def test_by_default_every_image_counts(stated: dict[str, int]) -> None:
    assert counted_images(stated, 1.0) == stated


@given(images, st.floats(0.01, 0.99))
def test_no_site_has_more_than_the_share_or_all_weigh_the_same(stated: dict[str, int], share: float) -> None:
    counted = counted_images(stated, share)
    largest = max(counted.values())
    assert largest <= share * sum(counted.values()) + 1 or len(set(counted.values())) == 1  # whole images
    assert all(counted[site] <= stated[site] for site in stated)


def test_a_billion_images_weigh_as_much_as_the_others_together_at_one_half() -> None:
    assert counted_images({"a": 10**9, "b": 300, "c": 100}, 0.5) == {"a": 400, "b": 300, "c": 100}


def test_two_sites_above_the_cap_count_alike() -> None:
    # At 0.4 of all two sites count m each: m = 0.4 (2 m + 100), m = 200.
    assert counted_images({"a": 10**9, "b": 900, "c": 100}, 0.4) == {"a": 200, "b": 200, "c": 100}


def test_a_share_that_equal_weights_exceed_makes_all_weigh_the_same() -> None:
    assert counted_images({"a": 500, "b": 300}, 0.3) == {"a": 300, "b": 300}


@pytest.mark.parametrize(
    ("stated", "heavy"),
    [({"a": 10**9, "b": 10}, ["a"]), ({"a": 90, "b": 10}, []), ({"a": 91, "b": 9}, ["a"]), ({"a": 5}, []), ({}, [])],
)
def test_who_has_nearly_all_images_is_named(stated: dict[str, int], heavy: list[str]) -> None:
    assert list(heavy_sites(stated)) == heavy
