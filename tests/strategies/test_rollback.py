"""When a model counts as collapsed or stalled, and whose update harms: numbers by hand, and one lying judge."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyclinic.common.config import ParticipationSection
from polyclinic.common.models.network import Head
from polyclinic.common.models.state import ModelState
from polyclinic.strategies.engine.coordinator import Coordinator
from polyclinic.strategies.engine.events import FederationValidation, RollbackEvent, RunCallbacks
from polyclinic.strategies.engine.layers import (
    ModelCollapse,
    RollbackLayer,
    describe_model_collapse,
    find_harmful_site,
    has_model_stalled,
)
from polyclinic.strategies.engine.state import FederationState
from polyclinic.strategies.registry import build_strategy
from tests.strategies.leading import small_plan

BEFORE = {"a": 0.5, "b": 0.6, "c": 0.7}
ZERO = np.zeros(1, np.float32)
MODEL = ModelState(ZERO, ZERO, Head(("x",), ZERO[:, None], ZERO))
STATE = FederationState(4, MODEL, sound_losses=BEFORE)


def test_a_model_has_collapsed_where_more_than_half_have_three_times_the_loss() -> None:
    reason = describe_model_collapse({"a": 1.6, "b": 1.9, "c": 0.7}, {}, BEFORE)
    assert reason.startswith("2 of 3 sites have a validation loss 3.17 times")  # 1.9 / 0.6
    assert describe_model_collapse({"a": 1.6, "b": 1.7, "c": 0.7}, {}, BEFORE) == ""


def test_sites_that_diverged_count_as_ruined_and_those_that_are_away_do_not() -> None:
    diverged = dict.fromkeys("ab", "training diverged in epoch 1")
    assert describe_model_collapse({"c": 0.7}, diverged, BEFORE) == "2 of 3 sites have no finite loss"
    assert describe_model_collapse({"c": 0.7}, dict.fromkeys("ab", "no reply within 60 s"), BEFORE) == ""


def test_one_site_states_no_collapse_where_the_others_keep_their_figures() -> None:
    assert describe_model_collapse({"a": 1e6}, {}, {"a": 0.5}) == ""
    assert describe_model_collapse({}, {"a": "training diverged in epoch 1"}, {}) == ""
    assert describe_model_collapse({"a": 1e6, "b": 0.6}, {}, BEFORE) == ""
    assert describe_model_collapse({"a": 1e6, "b": 1e6}, {}, BEFORE).startswith("2 of 2 sites")


def test_a_model_has_stalled_where_it_is_not_better_by_two_percent_at_more_than_half() -> None:
    assert has_model_stalled({"a": 0.5, "b": 0.6, "c": 0.1}, BEFORE)
    assert not has_model_stalled({"a": 0.48, "b": 0.57, "c": 0.9}, BEFORE)
    assert not has_model_stalled({}, BEFORE)


def test_small_losses_may_vary() -> None:
    settled = dict.fromkeys("abc", 0.01)
    assert describe_model_collapse(dict.fromkeys("abc", 0.09), {}, settled) == ""
    assert not has_model_stalled(dict.fromkeys("abc", 0.09), settled)


def of(loss: dict[str, float], auroc: dict[str, float] | None = None) -> FederationValidation:
    return FederationValidation(loss, auroc or {})


def test_the_culprit_is_the_site_without_which_the_others_are_twice_as_well_off() -> None:
    whole = of({"a": 1.0, "b": 1.2, "c": 1.4})
    without = {
        "a": of({"a": 0.9, "b": 1.1, "c": 1.3}),
        "b": of({"a": 0.4, "b": 2.0, "c": 0.7}),  # 2.5 and 2 times at a and c; its own word does not count
        "c": of({"a": 0.9, "b": 1.2, "c": 0.1}),
    }
    site, reason = find_harmful_site(whole, without)
    assert site == "b"
    assert "2 times the validation loss" in reason


def test_an_auroc_a_tenth_higher_without_an_update_names_its_site_too() -> None:
    loss = {"a": 0.69, "b": 0.69, "c": 0.69}
    whole = of(loss, {"a": 0.6, "b": 0.55, "c": 0.6})
    without = {site: of(loss, {"a": 0.61, "b": 0.57, "c": 0.62}) for site in "ab"}
    assert find_harmful_site(whole, {**without, "c": of(loss, {"a": 0.71, "b": 0.9, "c": 0.6})})[0] == "c"
    assert find_harmful_site(whole, {**without, "c": of(loss, {"a": 0.69, "b": 0.9, "c": 0.6})}) == ("", "")


def test_a_model_without_a_finite_loss_at_the_others_is_the_worst() -> None:
    whole = of({"b": 0.5})
    without = {"a": of({"a": 0.5, "b": 0.5, "c": 0.5}), "b": of({"a": 0.5, "b": 0.5, "c": 0.5}), "c": of({"b": 0.5})}
    site, reason = find_harmful_site(whole, without)
    assert site == "b"  # a and c have a loss without it, and none with it; of a's judges b has one both times
    assert "no finite validation loss" in reason


def test_a_silent_site_is_found_by_two_others_and_one_judge_has_nobody_left_out() -> None:
    bad, good = of({"a": 9.0, "b": 9.0}), of({"a": 0.3, "b": 0.3})
    assert find_harmful_site(bad, {"a": bad, "b": bad, "silent": good})[0] == "silent"
    alone, without = of({"a": 9.0}), of({"a": 0.3})
    assert find_harmful_site(alone, {"b": without, "silent": alone}) == ("", "")


words = st.floats(0.0, 1e6)


@given(st.data())
def test_one_lying_judge_of_three_or_more_neither_saves_itself_nor_has_another_left_out(data: Any) -> None:
    """It says of each model what it likes; the others find all models alike but the one without the harmful site."""
    sites = [f"s{number}" for number in range(data.draw(st.integers(3, 8)))]
    liar = sites[-1]
    harmful = data.draw(st.sampled_from(["", liar]))

    def judged(out: str) -> FederationValidation:
        loss = 0.3 if harmful and out == harmful else 0.9
        return of({**dict.fromkeys(sites, loss), liar: data.draw(words)})

    assert find_harmful_site(judged(""), {site: judged(site) for site in sites})[0] == harmful


class Going(RunCallbacks):
    """Has every round's state."""

    def on_rollback(self, rolled_back: RollbackEvent) -> FederationState | None:
        return FederationState(rolled_back.to, MODEL, excluded={"z": "later"})


def rollback_of(sites: str = "abc", state: FederationState = STATE) -> RollbackLayer:
    coordinator = Coordinator(
        build_strategy("surgical", {}), small_plan(), ParticipationSection(), "run-1", callbacks=Going()
    )
    coordinator.state = state
    coordinator.sites.members = dict.fromkeys(sites)
    (rollback,) = [layer for layer in coordinator.layers if isinstance(layer, RollbackLayer)]
    return rollback


def test_a_collapsed_model_is_taken_back_once_and_sites_that_are_out_stay_out() -> None:
    rollback, broken = rollback_of(state=replace(STATE, excluded={"y": "why"})), of(dict.fromkeys("abc", 9.0))
    with pytest.raises(ModelCollapse) as raised:
        rollback.on_validation(broken, {})
    again = raised.value.state
    assert (again.round, again.repeated, dict(again.excluded)) == (3, 4, {"y": "why"})
    assert rollback.is_leave_out_trial_due(again, BEFORE, 3, too_long=False)
    rollback_of(state=replace(STATE, repeated=4)).on_validation(broken, {})


@pytest.mark.parametrize("sites", ["ab", "abcdefghijklmnopq"])
def test_among_two_sites_or_more_than_sixteen_no_model_is_tried_or_taken_back(sites: str) -> None:
    rollback = rollback_of(sites)
    rollback.on_validation(of(dict.fromkeys("abc", 9.0)), {})
    assert not rollback.is_leave_out_trial_due(STATE, dict.fromkeys(sites, 0.9), len(sites), too_long=True)


def test_updates_are_tried_where_one_was_too_long_or_the_model_stalled_but_not_before_a_pause_is_over() -> None:
    rollback, better = rollback_of(), dict.fromkeys("abc", 0.4)
    assert not rollback.is_leave_out_trial_due(STATE, better, 3, too_long=False)
    assert rollback.is_leave_out_trial_due(STATE, better, 3, too_long=True)
    assert rollback.is_leave_out_trial_due(STATE, BEFORE, 3, too_long=False)
    assert not rollback.is_leave_out_trial_due(replace(STATE, next_trial=6), BEFORE, 3, too_long=True)
    # A site that states no figure is tried like any other where two others state theirs.
    assert rollback.is_leave_out_trial_due(STATE, {"a": BEFORE["a"], "b": BEFORE["b"]}, 3, too_long=True)
    assert not rollback.is_leave_out_trial_due(STATE, {"a": BEFORE["a"]}, 3, too_long=True)
