"""When a model is broken, and how a round is done again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies.rounds.guard.broken_model import broken
from strategies.rounds.guard.memory import GuardMemory

BEFORE = {"east": 0.5, "north": 1.0, "south": 2.0}


def test_more_than_half_of_the_sites_have_to_find_it_so() -> None:
    assert broken({"east": 1.6, "north": 1.0, "south": 2.0}, {}, BEFORE, 3) == ""
    said = broken({"east": 1.6, "north": 4.0, "south": 2.0}, {}, BEFORE, 3)
    assert said == (
        "2 of 3 sites cannot use the model of that round: a validation loss 3.2 times as high as before, or more"
    )


def test_training_that_diverges_is_a_sign_and_silence_is_none() -> None:
    diverged = "training diverged: not all numbers are finite. A lower training.lr usually helps."
    assert broken({}, {"east": diverged, "north": diverged}, BEFORE, 3)
    assert broken({}, dict.fromkeys(BEFORE, "no reply within 5 s"), BEFORE, 3) == ""
    assert broken({"south": float("inf")}, {}, {"south": 1.0}, 3).endswith("no finite loss")


@given(st.floats(allow_nan=False), st.sampled_from(["", "training diverged"]))
def test_one_of_three_breaks_nothing_whatever_it_says(loss: float, why: str) -> None:
    assert broken({"east": loss, "north": 1.1, "south": 2.1}, {"nobody": why} if not why else {}, BEFORE, 3) == ""


def test_a_round_is_done_again_with_all_then_without_each_then_with_all() -> None:
    guard, held = GuardMemory(), list[str]()
    for _ in range(4):
        guard = guard.next_try(7, ["east", "north"])
        held.append(guard.held)
    assert held == ["", "east", "north", ""]
    assert guard.tried_all
    assert guard.next_try(8, ["east"]).repeated == 8


def test_who_is_left_out_is_not_held_any_more() -> None:
    guard = GuardMemory().next_try(7, ["east", "north"]).next_try(7, [])
    assert guard.excluded == {"east"}
    condemned = guard.without({"east": "harm"})
    assert (condemned.held, condemned.to_hold, condemned.excluded) == ("", (), {"east"})


def test_judges_that_find_nothing_are_asked_after_longer_and_longer_pauses() -> None:
    guard = GuardMemory().acquitted(1)
    assert guard.quiet_until == 3
    assert guard.acquitted(3).quiet_until == 6


def test_its_facts_make_it_again() -> None:
    guard = GuardMemory({"east": {"trunk": 1.5}}, {"east": 0.5}, {"north": "harm"}, 3, "east", ("south",), True, 4, 8)
    assert GuardMemory(**{**guard.facts(), "to_hold": tuple(guard.facts()["to_hold"])}) == guard


@pytest.mark.parametrize("kind", ["liars", "losses", "lengths"])
def test_nothing_is_known_at_first(kind: str) -> None:
    assert getattr(GuardMemory(), kind) == {}
