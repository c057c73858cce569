"""Sites of many are drawn from seed and round alone, and a sample that tests a model covers its classes if it can."""

import itertools
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyclinic.strategies.engine.membership import (
    MIN_EVALUATING_SITES,
    count_evaluating_sites,
    draw_random_site_names,
    draw_sites_covering_classes,
)

CLASSES = "abcdef"
ANNOTATED = st.dictionaries(
    st.integers(0, 40).map("site-{}".format), st.sets(st.sampled_from(CLASSES), min_size=1), min_size=1, max_size=20
)
SEEDS = st.lists(st.integers(0, 2**40), min_size=2, max_size=3)


def covered(annotated: Mapping[str, set[str]], sites: list[str]) -> set[str]:
    return set[str]().union(*(annotated[site] for site in sites))


SAMPLES = given(annotated=ANNOTATED, size=st.integers(1, 20), seed=SEEDS)
Annotated = dict[str, set[str]]


@SAMPLES
def test_a_sample_follows_from_seed_and_sites(annotated: Annotated, size: int, seed: list[int]) -> None:
    turned = dict(reversed(annotated.items()))
    assert draw_sites_covering_classes(annotated, size, seed) == draw_sites_covering_classes(turned, size, seed)
    assert draw_random_site_names(annotated, size, seed) == draw_random_site_names(list(turned), size, seed)


@SAMPLES
def test_a_sample_has_its_size_and_no_site_twice(annotated: Annotated, size: int, seed: list[int]) -> None:
    for sample in (draw_sites_covering_classes(annotated, size, seed), draw_random_site_names(annotated, size, seed)):
        assert len(sample) == min(size, len(annotated))
        assert sample == sorted(set(sample) & set(annotated))


@SAMPLES
def test_each_class_is_tested_where_sites_suffice(annotated: Annotated, size: int, seed: list[int]) -> None:
    sample, every = draw_sites_covering_classes(annotated, size, seed), covered(annotated, list(annotated))
    if size >= len(every):
        assert covered(annotated, sample) == every


@SAMPLES
def test_a_plain_draw_that_covers_the_classes_stays_as_it_is(annotated: Annotated, size: int, seed: list[int]) -> None:
    names = sorted(annotated)
    first = [names[place] for place in np.random.default_rng(seed).permutation(len(names))][:size]
    if covered(annotated, first) == covered(annotated, names):
        assert draw_sites_covering_classes(annotated, size, seed) == sorted(first)


@given(ANNOTATED, st.integers(1, 20), SEEDS, st.data())
def test_who_is_excluded_is_not_drawn_and_moves_nobody_else_from_a_sample_that_covers(
    annotated: Annotated, size: int, seed: list[int], data: st.DataObject
) -> None:
    gone = data.draw(st.sampled_from(sorted(annotated)))
    whole, rest = (
        draw_sites_covering_classes(annotated, size, seed),
        draw_sites_covering_classes(annotated, size, seed, {gone}),
    )
    assert gone not in rest
    same = {site: {"a"} for site in annotated}
    before, after = draw_sites_covering_classes(same, size, seed), draw_sites_covering_classes(same, size, seed, {gone})
    assert set(before) - {gone} <= set(after)
    assert len(whole) - len(rest) in (0, 1)


def test_every_site_is_drawn_as_often_as_any_other_where_no_class_is_rare() -> None:
    annotated = {f"site-{n:02d}": ("a",) for n in range(20)}
    counts = dict.fromkeys(annotated, 0)
    for server_round in range(2000):
        for site in draw_sites_covering_classes(annotated, 5, [7, server_round, 1]):
            counts[site] += 1
    # binomial: 2000 draws at 1/4: mean 500, standard deviation 19.4
    assert all(abs(count - 500) < 4.5 * 19.4 for count in counts.values())


def test_the_only_owner_of_a_class_is_drawn_in_every_round() -> None:
    annotated = {f"site-{n:03d}": ("a", "b") for n in range(300)} | {"west": ("a", "rare")}
    samples = [draw_sites_covering_classes(annotated, 10, [7, server_round, 1]) for server_round in range(50)]
    assert all("west" in sample for sample in samples)
    assert len(set(itertools.chain(*samples))) > 150  # the others change from round to round


@pytest.mark.parametrize(
    ("stated", "a_round", "sites"),
    [(None, 0, 0), (None, 50, MIN_EVALUATING_SITES), (None, 300, 300), (0, 50, 0), (7, 0, 7), (7, 50, 7)],
)
def test_as_many_are_asked_as_stated_or_as_train(stated: int | None, a_round: int, sites: int) -> None:
    assert count_evaluating_sites(stated, a_round) == sites


def test_the_draw_of_a_round_is_the_one_of_earlier_releases() -> None:
    names = [f"site-{n}" for n in range(9)]
    expected = sorted(np.random.default_rng([3, 4]).choice(names, 4, replace=False).tolist())
    assert draw_random_site_names(names, 4, [3, 4]) == expected
