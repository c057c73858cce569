"""Which model is best, by whom it was judged."""

from dataclasses import replace

from strategies.engine.state import FederationState, with_validation
from tests.strategies.states import ONE


def best_after(*judgements: dict[str, float]) -> int:
    state = FederationState(0, ONE)
    for server_round, losses in enumerate(judgements):
        state = with_validation(replace(state, round=server_round), losses)
    return state.best_round


def test_the_lowest_mean_is_best_and_the_first_of_equals() -> None:
    # means .5, .375, .375, .4
    assert best_after({"a": 0.25, "b": 0.75}, {"a": 0.5, "b": 0.25}, {"a": 0.25, "b": 0.5}, {"a": 0.4, "b": 0.4}) == 1


def test_an_easy_site_alone_does_not_make_a_round_best() -> None:
    # Round 1 was judged by b alone, for whom round 0 was better; its .2 is below round 0's mean of .5 all the same.
    assert best_after({"a": 0.9, "b": 0.1}, {"b": 0.2}) == 0


def test_models_are_compared_over_the_sites_that_judged_both() -> None:
    assert best_after({"a": 0.9, "b": 0.1}, {"a": 0.8}) == 1


def test_models_that_no_site_judged_both_are_not_compared_and_no_judgement_changes_nothing() -> None:
    assert best_after({"a": 0.9}, {"b": 0.1}, {}) == 0
