"""Masked rounds under a coordinator that may change any field to any site: no update appears, and no small sum."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from polyclinic.common.wire.records import TrainRequest
from polyclinic.strategies.privacy.secure_aggregation.vectors import BODY_SEGMENT, choose_max_update_value
from polyclinic.strategies.registry import build_site_method
from tests.client.coordinator_of_any_kind import (
    CHANGED,
    FORGED,
    LAYOUT,
    AnyCoordinator,
    Found,
    Script,
    of_linear_network,
    open_sums,
    with_own_pixels,
)
from tests.client.masked import Hospitals, masked_plan

SITES = ("ash", "birch", "cedar", "elm")
Rows = Mapping[str, tuple[str, ...]]
ALIKE: Rows = dict.fromkeys(SITES, ("a", "b"))
UNLIKE: Rows = {"ash": ("a", "b"), "birch": ("a", "b"), "cedar": ("a", "c"), "elm": ("a", "b")}
LONGEST_SHADOW = 0.9
"""Correlation with one site's update that no sum, nor the difference of two, may reach."""
LONGEST_SHADOW_OF_A_ROW = 0.999
"""The same of one class's head row, which has few numbers and is much the same at all sites."""


def some_of(names: Sequence[str]) -> st.SearchStrategy[tuple[str, ...]]:
    """Some sites; in half of the cases all but one."""
    any_ = st.sets(st.sampled_from(sorted(names)), min_size=1).map(lambda chosen: tuple(sorted(chosen)))
    return st.one_of(st.sampled_from(names).map(lambda left: tuple(name for name in names if name != left)), any_)


def to_some(values: st.SearchStrategy[object]) -> st.SearchStrategy[dict[str, object]]:
    """The same for some sites and nothing for the others, or something else for each."""
    alike = st.tuples(some_of(SITES), values).map(lambda pair: dict.fromkeys(*pair))
    return st.one_of(alike, st.dictionaries(st.sampled_from(SITES), values, max_size=4))


NAMED_SITES = st.one_of(some_of(SITES).map(lambda names: dict.fromkeys(SITES, names)), to_some(some_of(SITES)))
LIES: dict[str, st.SearchStrategy[object]] = {
    "run": st.just("another"),
    "round": st.just(2),
    "model": st.just(1),
    "changed": to_some(st.sampled_from(CHANGED)),
    "members": NAMED_SITES,
    "relayed": to_some(some_of(SITES)),
    "letters": NAMED_SITES,
    "survivors": NAMED_SITES,
    "divisors": to_some(st.integers(1, 7)),
    "forged": to_some(st.sampled_from(FORGED)),
    "restarted": st.one_of(st.just(SITES), some_of(SITES)),
    "forgetful": st.sampled_from(SITES),
}
SCRIPTS = (
    st.lists(st.sampled_from(sorted(LIES)), max_size=4, unique=True)
    .flatmap(lambda names: st.fixed_dictionaries({name: LIES[name] for name in names}))
    .map(lambda lies: Script(**lies))
)


def all_that_is_found(
    scripts: Sequence[Script], rows: Rows, folder: Path, **policy: object
) -> tuple[AnyCoordinator, list[dict[Found, NDArray[np.float64]]]]:
    """Have the coordinator lead these attempts; return what it can work out of each."""
    hospitals = Hospitals(folder, SITES, policy={"networks": ("*",), **policy}, class_names=rows)
    for number, name in enumerate(SITES):
        hospitals.change(name, train=with_own_pixels(hospitals.sites[name].train, number))
    of = of_linear_network(masked_plan("surgical", {"clip_update": 1.0}))
    coordinator, largest = AnyCoordinator(hospitals, of, rows), choose_max_update_value(of, build_site_method(of))
    return coordinator, [open_sums(coordinator.lead(script), rows, largest) for script in scripts]


def shadow(vector: NDArray[np.float64], update: NDArray[np.float32]) -> float:
    """How closely a vector follows one site's update; 0 where there is nothing to follow."""
    lengths = float(np.linalg.norm(vector)) * float(np.linalg.norm(update))
    return abs(float(vector @ update)) / lengths if np.linalg.norm(update) > 0.01 and lengths else 0.0


def longest_shadow(
    coordinator: AnyCoordinator, opened: Sequence[Mapping[Found, NDArray[np.float64]]], part: str = BODY_SEGMENT
) -> float:
    """The closest that any open sum of one part, or difference of two, comes to one site's update of that part.

    Of head rows the biases are left out: also where nothing else is learned, they are.
    """
    numbers = LAYOUT.body_size if part == BODY_SEGMENT else LAYOUT.features
    sums = [value[:numbers] for sums in opened for (name, _), value in sums.items() if name == part]
    tried = [*sums, *(left - right for left, right in combinations(sums, 2))]
    single = [update[:numbers] for update in coordinator.updates_of(part)]
    return max((shadow(vector, update) for vector in tried for update in single), default=0.0)


def refuse_any_leak(scripts: Sequence[Script], rows: Rows) -> None:
    with tempfile.TemporaryDirectory() as name:
        coordinator, opened = all_that_is_found(scripts, rows, Path(name))
        for sums in opened:
            assert all(len(sites) >= 3 for _, sites in sums), sorted(map(str, sums))
        assert longest_shadow(coordinator, opened) < LONGEST_SHADOW
        assert max(longest_shadow(coordinator, opened, part) for part in "abc") < LONGEST_SHADOW_OF_A_ROW


@given(st.lists(SCRIPTS, min_size=1, max_size=2), st.sampled_from([ALIKE, UNLIKE]))
@example([Script(relayed=dict.fromkeys(("birch", "cedar", "elm"), ("ash", "birch", "elm")))], UNLIKE)  # was a KeyError
@settings(max_examples=15, deadline=None)
def test_no_update_and_no_small_sum_appears_whatever_the_coordinator_says(scripts: list[Script], rows: Rows) -> None:
    refuse_any_leak(scripts, rows)


@pytest.mark.long
@given(st.lists(SCRIPTS, min_size=1, max_size=4), st.sampled_from([ALIKE, UNLIKE]))
@settings(max_examples=500, deadline=None)
def test_no_update_and_no_small_sum_appears_in_four_attempts(scripts: list[Script], rows: Rows) -> None:
    refuse_any_leak(scripts, rows)


HONEST = Script()
REPEATED = Script(members=dict.fromkeys(SITES, SITES[1:]), restarted=SITES)


def test_an_honest_round_opens_the_sum_of_all_that_are_left_and_no_other(tmp_path: Path) -> None:
    lost = Script(round=2, survivors=dict.fromkeys(SITES, SITES[1:]))
    _, (opened, without_first) = all_that_is_found([HONEST, replace(lost, model=1)], UNLIKE, tmp_path)
    three, left = frozenset(("ash", "birch", "elm")), frozenset(SITES[1:])
    assert set(opened) == {(BODY_SEGMENT, frozenset(SITES)), ("a", frozenset(SITES)), ("b", three)}
    assert set(without_first) == {(BODY_SEGMENT, left), ("a", left)}


def test_where_hospitals_let_it_the_attacker_finds_one_update_by_asking_twice(tmp_path: Path) -> None:
    """So that the property above can fail."""
    coordinator, opened = all_that_is_found([HONEST, REPEATED], ALIKE, tmp_path, smallest_cohort=1)
    assert longest_shadow(coordinator, opened) > 0.999


def test_where_hospitals_let_it_the_attacker_finds_sums_of_two(tmp_path: Path) -> None:
    three = Script(members=dict.fromkeys(SITES, SITES[:3]), survivors=dict.fromkeys(SITES, SITES[:2]))
    _, (opened,) = all_that_is_found([three], ALIKE, tmp_path, smallest_cohort=2)
    assert frozenset(SITES[:2]) in {sites for _, sites in opened}


def test_every_field_of_a_request_to_train_is_changed_by_some_script() -> None:
    """``best``, ``left_out``, ``frozen`` and ``class_names`` change no arithmetic: test_masked_attacks.py has them."""
    changed = {"run", "round", "plan", "contract", "counted", "model", "statistics"}
    assert changed | {"best", "left_out", "frozen", "class_names"} == set(TrainRequest.__dataclass_fields__)
