"""When a model counts as collapsed or stalled, and whose update harms: numbers by hand, and one lying judge."""

import math
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyclinic.common.config import ParticipationSection
from polyclinic.common.models.network import Head
from polyclinic.common.models.state import ModelState
from polyclinic.common.wire.records import ModelGroups
from polyclinic.strategies.engine.coordinator import Coordinator
from polyclinic.strategies.engine.events import FederationValidation, RollbackEvent, RunCallbacks
from polyclinic.strategies.engine.layers import (
    ModelCollapse,
    RollbackLayer,
    TrialSuspects,
    describe_model_collapse,
)
from polyclinic.strategies.engine.state import FederationState
from polyclinic.strategies.engine.trials import (
    MAX_JUDGES,
    MAX_STORED_CHANGES,
    UpdateTrial,
    compute_loss_change,
    describe_harm,
    has_loss_risen_beyond_noise,
    has_model_stalled,
    measure_harm,
    order_by_suspicion,
)
from polyclinic.strategies.registry import build_strategy
from tests.strategies.leading import small_plan

BEFORE = {"a": 0.5, "b": 0.6, "c": 0.7}
ZERO = np.zeros(1, np.float32)
MODEL = ModelState(ZERO, ZERO, Head(("x",), ZERO[:, None], ZERO))
STATE = FederationState(4, MODEL, sound_losses=BEFORE)
USUAL = dict.fromkeys("abc", 1.0)
"""Lengths of updates, in medians of the round."""


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
    assert compute_loss_change(dict.fromkeys("abc", 0.09), settled) == 0


def test_a_loss_has_risen_beyond_noise_where_the_rounds_before_do_not_explain_it() -> None:
    # Median -0.1, median absolute deviation 0.02: five robust deviations are 0.148, so all above 0.048 is beyond noise.
    calm = (-0.1, -0.12, -0.08, -0.1, -0.14, -0.06)
    assert has_loss_risen_beyond_noise(0.41, calm)
    assert not has_loss_risen_beyond_noise(0.4, calm)  # exp(0.4) is 1.49, which is a small rise
    # Median 0, median absolute deviation 0.3: five robust deviations are 2.2, or nine times the loss.
    wild = (0.3, -0.3, 0.4, -0.4, 0.0, 0.3, -0.3)
    assert not has_loss_risen_beyond_noise(2.2, wild)
    assert has_loss_risen_beyond_noise(2.3, wild)


def test_without_five_changes_or_without_a_change_no_loss_has_risen() -> None:
    assert not has_loss_risen_beyond_noise(5.0, (0.0,) * 4)
    assert has_loss_risen_beyond_noise(5.0, (0.0,) * 5)
    assert not has_loss_risen_beyond_noise(None, (0.0,) * 5)


def test_the_change_of_a_loss_is_its_median_over_sites_that_state_both() -> None:
    change = compute_loss_change({"a": 1.0, "b": 0.6, "c": 1.4, "new": 9.0}, {**BEFORE, "gone": 1.0})
    assert change == pytest.approx(np.log(2.0))  # 2, 1 and 2 times as high
    assert compute_loss_change({"new": 9.0}, BEFORE) is None


def update_of(*values: float) -> ModelGroups:
    return ModelGroups(trunk=np.array(values, np.float32))


def test_a_long_update_is_suspected_first_and_then_one_that_points_away_from_the_others() -> None:
    updates = {"a": update_of(1, 0.1), "b": update_of(1, -0.1), "c": update_of(-1, 0), "d": update_of(1, 0)}
    assert order_by_suspicion(updates, dict.fromkeys("abcd", 1.1))[0] == "c"
    assert order_by_suspicion(updates, {"a": 1.0, "b": 1.2, "c": 1.3, "d": 4.0})[:2] == ["d", "c"]
    huge = {**updates, "b": update_of(1e30, 1e30)}
    assert set(order_by_suspicion(huge, {})) == set("abcd")
    assert order_by_suspicion({"b": ModelGroups(), "a": ModelGroups()}, {}) == ["a", "b"]


def of(loss: dict[str, float], auroc: dict[str, float] | None = None) -> FederationValidation:
    return FederationValidation(loss, auroc or {})


def test_the_culprit_is_the_site_without_which_the_others_are_twice_as_well_off() -> None:
    whole = of({"a": 1.0, "b": 1.2, "c": 1.4})
    without = {
        "a": of({"a": 0.9, "b": 1.1, "c": 1.3}),
        "b": of({"a": 0.4, "b": 2.0, "c": 0.7}),  # 2.5 and 2 times at a and c; its own word does not count
        "c": of({"a": 0.9, "b": 1.2, "c": 0.1}),
    }
    harms = {site: measure_harm(whole, trial, [site]) for site, trial in without.items()}
    assert [site for site, harm in harms.items() if harm.excludes_site] == ["b"]
    assert "2 times the validation loss" in describe_harm(harms["b"])


def test_an_auroc_a_tenth_higher_without_an_update_names_its_site_too() -> None:
    loss = {"a": 0.69, "b": 0.69, "c": 0.69}
    whole = of(loss, {"a": 0.6, "b": 0.55, "c": 0.6})
    assert not measure_harm(whole, of(loss, {"a": 0.61, "b": 0.57, "c": 0.62}), "a").excludes_site
    assert measure_harm(whole, of(loss, {"a": 0.71, "b": 0.9, "c": 0.6}), "c").excludes_site
    assert not measure_harm(whole, of(loss, {"a": 0.69, "b": 0.9, "c": 0.6}), "c").excludes_site


def test_a_model_without_a_finite_loss_at_the_others_is_the_worst() -> None:
    harm = measure_harm(of({"b": 0.5}), of({"a": 0.5, "b": 0.5, "c": 0.5}), "b")
    assert harm.excludes_site  # a and c have a loss without it, and none with it
    assert "no finite validation loss" in describe_harm(harm)
    assert not measure_harm(
        of({"b": 0.5}), of({"a": 0.5, "b": 0.5, "c": 0.5}), "a"
    ).excludes_site  # b has one both times


def test_a_silent_site_is_found_by_two_others_and_one_judge_has_nobody_left_out() -> None:
    assert measure_harm(of({"a": 9.0, "b": 9.0}), of({"a": 0.3, "b": 0.3}), ["silent"]).excludes_site
    assert not measure_harm(of({"a": 9.0}), of({"a": 0.3}), ["silent"]).is_in_group


words = st.floats(0.0, 1e6)


class Judged:
    """Sites that judge models; without the harmful site's update, the loss is a third.

    Attributes:
        asked: Number of judges of each model.
    """

    def __init__(self, harmful: str, liar: str = "", lies: Callable[[], float] = lambda: 0.0) -> None:
        self._harmful, self._liar, self._lies = harmful, liar, lies
        self.asked: list[int] = []

    def __call__(self, out: Collection[str], judges: Collection[str]) -> FederationValidation:
        self.asked.append(len(judges))
        loss = 0.3 if self._harmful in out else 0.9
        return of({site: self._lies() if site == self._liar else loss for site in judges})


def sites_of(count: int) -> list[str]:
    return [f"s{number:02}" for number in range(count)]


@given(st.data())
def test_one_lying_judge_of_three_or_more_neither_saves_itself_nor_has_another_left_out(data: Any) -> None:
    """It says of each model what it likes; the others find all models alike but those without the harmful site."""
    sites = sites_of(data.draw(st.integers(3, 16)))
    liar = data.draw(st.sampled_from(sites))
    harmful = data.draw(st.sampled_from(["", liar]))
    trial = UpdateTrial(Judged(harmful, liar, lambda: data.draw(words)), data.draw(st.permutations(sites)))
    assert trial.find_harmful_site(data.draw(st.permutations(sites)))[0] == harmful


@pytest.mark.parametrize("count", range(3, 17))
def test_a_harmful_site_is_found_by_halves_and_at_five_judges(count: int) -> None:
    sites = sites_of(count)
    for harmful in sites:
        judged = Judged(harmful)
        assert UpdateTrial(judged, sites[::-1]).find_harmful_site(sites)[0] == harmful
        assert len(judged.asked) <= 3 + 2 * math.ceil(math.log2(count))
        assert max(judged.asked) <= MAX_JUDGES


@pytest.mark.parametrize(("count", "models"), [(4, 4), (10, 4), (16, 4)])
def test_where_nobody_harms_both_halves_are_tried_and_no_more(count: int, models: int) -> None:
    judged = Judged("")
    assert UpdateTrial(judged, sites_of(count)[::-1]).find_harmful_site(sites_of(count)) == ("", "")
    assert len(judged.asked) <= models  # the whole model at the judges of each half, and the model without each half


def test_one_suspect_costs_two_models_at_five_judges() -> None:
    judged = Judged("s03")
    assert UpdateTrial(judged, sites_of(16)).find_harmful_site(["s03"])[0] == "s03"
    assert judged.asked == [5, 5]


def test_without_two_judges_nobody_is_left_out() -> None:
    judged = Judged("s00")
    assert UpdateTrial(judged, ["s00", "s01"]).find_harmful_site(["s00"]) == ("", "")
    assert judged.asked == []


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
    assert rollback.find_trial_suspects(again, BEFORE, USUAL).are_all
    rollback_of(state=replace(STATE, repeated=4)).on_validation(broken, {})


@pytest.mark.parametrize("sites", ["ab", "abcdefghijklmnopq"])
def test_among_two_sites_or_more_than_sixteen_no_model_is_tried_or_taken_back(sites: str) -> None:
    rollback = rollback_of(sites)
    rollback.on_validation(of(dict.fromkeys("abc", 9.0)), {})
    assert not rollback.find_trial_suspects(STATE, dict.fromkeys(sites, 0.9), dict.fromkeys(sites, 9.0)).sites


def test_a_long_update_is_tried_but_not_before_its_own_pause_is_over() -> None:
    rollback, long = rollback_of(), {"a": 1.0, "b": 4.0, "c": 1.0}
    assert rollback.find_trial_suspects(STATE, BEFORE, USUAL) == TrialSuspects()
    assert rollback.find_trial_suspects(STATE, BEFORE, long) == TrialSuspects(("b",))
    # This is round 5. After a trial in round 2, the next one is in round 3, or in round 6 while the loss falls.
    tried, better = replace(STATE, tried={"b": 2}, next_trial=6), dict.fromkeys("abc", 0.4)
    assert rollback.find_trial_suspects(tried, BEFORE, long) == TrialSuspects(("b",))
    assert rollback.find_trial_suspects(tried, better, long) == TrialSuspects()
    assert rollback.find_trial_suspects(replace(STATE, tried={"b": 4}), BEFORE, long) == TrialSuspects()
    assert rollback.find_trial_suspects(replace(STATE, tried={"b": 1}), better, long) == TrialSuspects(("b",))
    assert rollback.find_trial_suspects(tried, better, {**long, "a": 4.0}) == TrialSuspects(("a",))
    # A site that states no figure is tried like any other where two others state theirs.
    assert rollback.find_trial_suspects(STATE, {"a": 0.5, "c": 0.7}, long).sites == ("b",)
    assert not rollback.find_trial_suspects(STATE, {"a": 0.5}, long).sites


def test_an_update_as_long_as_all_others_together_is_tried_where_the_loss_does_not_fall() -> None:
    rollback, long = rollback_of(), {"a": 1.0, "b": 1.8, "c": 1.0}  # below the bound of 3
    assert rollback.find_trial_suspects(STATE, BEFORE, long) == TrialSuspects(("b",))
    assert rollback.find_trial_suspects(STATE, BEFORE, {**long, "b": 1.6}) == TrialSuspects()
    assert rollback.find_trial_suspects(STATE, dict.fromkeys("abc", 0.4), long) == TrialSuspects()
    four = rollback_of("abcd")
    assert four.find_trial_suspects(STATE, BEFORE, {**long, "b": 2.5, "d": 1.0}) == TrialSuspects()
    assert four.find_trial_suspects(STATE, BEFORE, {**long, "b": 2.6, "d": 1.0}) == TrialSuspects(("b",))


def test_all_are_tried_where_the_loss_rose_beyond_noise_and_nobody_where_it_stands_still() -> None:
    rollback, before = rollback_of(), replace(STATE, loss_changes=(-0.1, 0.0, -0.05, 0.02, -0.08))
    assert not rollback.find_trial_suspects(before, BEFORE, USUAL).sites
    risen = {site: 1.8 * loss for site, loss in BEFORE.items()}
    assert rollback.find_trial_suspects(before, risen, USUAL) == TrialSuspects(("a", "b", "c"), are_all=True)
    assert not rollback.find_trial_suspects(replace(before, next_trial=6), risen, USUAL).sites
    assert not rollback.find_trial_suspects(STATE, risen, USUAL).sites  # no rounds before that could explain it


def test_the_latest_changes_of_the_loss_are_stored() -> None:
    rollback, state = rollback_of(), STATE
    for _ in range(MAX_STORED_CHANGES + 10):
        state = rollback.update_state_after_round(replace(state, sound_losses=BEFORE), of(BEFORE | {"a": 0.25}))
    assert len(state.loss_changes) == MAX_STORED_CHANGES
    assert state.loss_changes[-1] == 0  # the median of one half and two that stay
