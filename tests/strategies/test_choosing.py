"""One site that lies about its losses cannot have a bad round chosen, nor keep a good one from it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyclinic.common.wire.bounds import MAX_LOSS
from polyclinic.strategies.engine.events import FederationValidation
from polyclinic.strategies.engine.state import (
    LOSS_OFFSET,
    MAX_REGRET_FROM_NOISE,
    FederationState,
    compute_median_regret,
    deserialize_federation_state,
    is_better_model,
    record_model_validation,
    serialize_federation_state,
    update_best_model,
)
from polyclinic.strategies.local.method_traits import Criterion
from polyclinic.strategies.registry import STRATEGIES
from tests.strategies.states import TINY

NOISE = 1.05
"""Honest sites judge a round alike, up to this factor."""
BOUND = MAX_REGRET_FROM_NOISE * NOISE**3
"""Of the chosen round's honest mean loss over the lowest: the tolerated regret; noise in the chosen loss, in the lowest
one that it is held against, and in the lowest mean."""
Judgements = Sequence[Mapping[str, float]]


def chosen(rounds: Judgements) -> int:
    """The best round after all of them, from 0."""
    state, members = FederationState(0, TINY), max(map(len, rounds))
    for server_round, losses in enumerate(rounds):
        state = update_best_model(replace(state, round=server_round), losses, members)
    return state.best_round


def with_liar(honest: Judgements, lies: Sequence[float]) -> list[dict[str, float]]:
    return [{**losses, "liar": lie} for losses, lie in zip(honest, lies, strict=True)]


def honest_mean(losses: Mapping[str, float]) -> float:
    return float(np.mean([loss for site, loss in losses.items() if site != "liar"]))


@pytest.mark.parametrize(
    ("rounds", "best"),
    [
        # means .5, .375, .375, .4
        ([{"a": 0.25, "b": 0.75}, {"a": 0.5, "b": 0.25}, {"a": 0.25, "b": 0.5}, {"a": 0.4, "b": 0.4}], 1),
        # Round 1 was judged by b alone, for whom round 0 was better; its .2 is below round 0's mean of .5 all the same.
        ([{"a": 0.9, "b": 0.1}, {"b": 0.2}], 0),
        ([{"a": 0.9, "b": 0.1}, {"a": 0.8}], 1),
        ([{"a": 0.9}, {"b": 0.1}, {}], 0),
        ([{"honest": 0.1, "liar": 1.0}, {"honest": 0.6, "liar": 0.0}], 1),
    ],
    ids=[
        "the_lowest_mean_and_the_first_of_equals",
        "not_one_that_an_easy_site_alone_judged",
        "by_the_sites_that_judged_both",
        "the_first_where_no_site_judged_both_or_nobody_judged",
        "either_of_two_sites_as_nothing_tells_which_one_lies",
    ],
)
def test_the_best_round_is(rounds: Judgements, best: int) -> None:
    assert chosen(rounds) == best


def falling(sites: int) -> list[dict[str, float]]:
    """Losses that fall by a tenth a round at each site, which begin at 0.7 and 0.6, 0.5, ..., and rise at the end."""
    course = [0.9**step for step in range(12)] + [0.9 ** (12 - 3 * step) for step in range(1, 4)]
    return [{f"site {n}": (0.7 - 0.05 * n) * share for n in range(sites)} for share in course]


LIES = {
    "always 0": lambda n: 0.0,
    "0 in the first round, then the most": lambda n: 0.0 if n == 0 else MAX_LOSS,
    "0 in the last round, else the most": lambda n: 0.0 if n == 14 else MAX_LOSS,
    "alternating": lambda n: 0.0 if n % 2 else MAX_LOSS,
    "always the most": lambda n: MAX_LOSS,
    "rising": lambda n: 0.01 * 2**n,
    "falling": lambda n: 1e5 * 0.5**n,
    "turned round": lambda n: 1.0 - 0.9**n,
}


@pytest.mark.parametrize("sites", [3, 4, 10])
@pytest.mark.parametrize("lie", LIES)
def test_no_course_of_lies_has_a_bad_round_chosen(sites: int, lie: str) -> None:
    honest = falling(sites - 1)
    best = min(map(honest_mean, honest))
    round_chosen = chosen(with_liar(honest, [LIES[lie](n) for n in range(len(honest))]))
    assert honest_mean(honest[round_chosen]) <= MAX_REGRET_FROM_NOISE * best + LOSS_OFFSET


def test_by_the_mean_alone_one_site_would_choose_the_worst_round() -> None:
    """The attack that the majority is against: 0 in the last round, which is 1.9 times as bad as the best one."""
    rounds = with_liar(falling(3), [LIES["0 in the last round, else the most"](n) for n in range(15)])
    assert min(range(15), key=lambda n: sum(rounds[n].values())) == 14
    assert honest_mean(rounds[14]) > 1.8 * min(map(honest_mean, rounds))
    assert chosen(rounds) != 14


lies = st.one_of(st.floats(0, MAX_LOSS), st.floats(0, 2), st.sampled_from([0.0, MAX_LOSS]))


@given(data=st.data(), sites=st.sampled_from([3, 4, 5, 10]), rounds=st.integers(2, 12))
def test_a_liar_costs_no_more_than_the_stated_bound(data: st.DataObject, sites: int, rounds: int) -> None:
    course = data.draw(st.lists(st.floats(0.01, 3), min_size=rounds, max_size=rounds), label="course")
    scales = data.draw(st.lists(st.floats(0.2, 5), min_size=sites - 1, max_size=sites - 1), label="scales")
    noise = st.lists(st.floats(1, NOISE), min_size=sites - 1, max_size=sites - 1)
    honest = [
        {
            f"site {n}": scale * level * factor
            for n, (scale, factor) in enumerate(zip(scales, data.draw(noise), strict=True))
        }
        for level in course
    ]
    stated = data.draw(st.lists(st.one_of(st.none(), lies), min_size=rounds, max_size=rounds), label="lies")
    judged = [losses if lie is None else {**losses, "liar": lie} for losses, lie in zip(honest, stated, strict=True)]
    assert honest_mean(honest[chosen(judged)]) <= BOUND * min(map(honest_mean, honest)) + LOSS_OFFSET


@given(st.integers(1, 6), st.integers(0, 2**16), st.integers(1, 20), st.floats(0, 0.1))
def test_an_honest_course_is_judged_by_the_mean_alone(sites: int, seed: int, rounds: int, jitter: float) -> None:
    """Losses that fall and level off, and go up and down by up to a tenth at each site."""
    generator = np.random.default_rng(seed)
    level = 0.3 + 0.7 * np.exp(-np.arange(rounds) / 4)
    own = generator.uniform(0.2, 1.0, sites)
    losses = level[:, None] * own * (1 + jitter * generator.uniform(-1, 1, (rounds, sites)))  # (rounds, sites)
    judged = [dict(zip("abcdef", row.tolist(), strict=False)) for row in losses]
    sums = [sum(row[site] for site in sorted(row)) for row in judged]
    assert chosen(judged) == sums.index(min(sums))


def test_the_regret_is_the_smallest_one_that_more_than_half_of_the_sites_stay_within() -> None:
    lowest = {"a": 0.18, "b": 0.38, "c": 0.08, "d": 0.48}  # each with 0.02 more: 0.2, 0.4, 0.1, 0.5
    losses = {"a": 0.18, "b": 0.48, "c": 0.18, "d": 0.98}  # over them: 1, 1.25, 2, 2
    assert compute_median_regret(losses, lowest) == pytest.approx(2.0)
    assert compute_median_regret({site: losses[site] for site in "abc"}, lowest) == pytest.approx(1.25)


def test_the_lowest_losses_are_of_each_site_by_itself() -> None:
    state = FederationState(0, TINY)
    for losses in ({"a": 0.4, "c": 0.3}, {"a": 0.5, "b": 0.1}):
        state = update_best_model(state, losses, members=2)
    assert state.lowest_losses == {"a": 0.4, "b": 0.1, "c": 0.3}


def test_a_clearly_worse_mean_is_no_reason_where_most_sites_say_better() -> None:
    lowest = {"a": 0.1, "b": 0.1, "c": 0.1}
    assert is_better_model({"a": 0.1, "b": 0.1, "c": 1000.0}, {"a": 0.5, "b": 0.5, "c": 0.1}, lowest)
    assert not is_better_model({"a": 0.5, "b": 0.5, "c": 0.0}, {"a": 0.1, "b": 0.1, "c": 1000.0}, lowest)


Figures = Mapping[str, tuple[float, float | None]]
"""Site -> loss and AUROC, None where it has none."""


def judged(rounds: Sequence[Figures], criterion: Criterion = "auroc") -> FederationState:
    """The state after these rounds were judged."""
    state, members = FederationState(0, TINY), max(map(len, rounds))
    for server_round, sites in enumerate(rounds):
        losses = {site: loss for site, (loss, _) in sites.items()}
        aurocs = {site: auroc for site, (_, auroc) in sites.items() if auroc is not None}
        validation = FederationValidation(losses, aurocs)
        state = record_model_validation(replace(state, round=server_round), validation, criterion, members)
    return state


RISING_LOSS: Sequence[Figures] = [
    {site: (0.40 + 0.05 * step, 0.80 + 0.03 * step - 0.01 * place) for place, site in enumerate("abc")}
    for step in range(4)
]
"""FedMLP's course in small: the plain loss rises while every site's ranking improves."""


def test_by_auroc_the_round_is_chosen_that_ranks_best_though_its_loss_is_the_highest() -> None:
    assert judged(RISING_LOSS).best_round == 3
    assert judged(RISING_LOSS, "loss").best_round == 0


@pytest.mark.parametrize(
    ("losses", "best"),
    [
        ([{"a": 0.5}, {"a": 0.4}, {"a": 0.3}], 2),
        ([{"a": 0.5}, {"a": 0.3}, {"a": 0.4}], 1),
        ([{"a": 0.5}, {"a": 0.5}], 0),
        ([{"a": 0.5, "b": 0.5}, {"a": 0.4, "b": 0.6}], 0),  # half of the sites are no majority
        ([{"a": 0.5, "b": 0.5, "c": 0.5}, {"a": 0.4, "b": 0.4, "c": 0.6}], 1),
    ],
)
def test_of_equal_aurocs_the_round_with_the_lower_validation_loss_is_chosen(losses: Judgements, best: int) -> None:
    assert judged([{site: (loss, 1.0) for site, loss in each.items()} for each in losses]).best_round == best


def test_a_lower_loss_does_not_outweigh_a_lower_auroc() -> None:
    assert judged([{"a": (0.5, 0.95), "b": (0.5, 0.9)}, {"a": (0.1, 0.95), "b": (0.1, 0.89)}]).best_round == 0


def test_one_site_does_not_choose_among_rounds_of_equal_auroc() -> None:
    rounds: Sequence[Figures] = [
        {"a": (0.3, 1.0), "b": (0.3, 1.0), "liar": (1000.0, 1.0)},
        {"a": (0.9, 1.0), "b": (0.9, 1.0), "liar": (0.0, 1.0)},
    ]
    assert judged(rounds).best_round == 0


def test_the_validation_losses_of_the_best_round_outlive_a_restart() -> None:
    begun = judged([{"a": (0.5, 1.0)}, {"a": (0.4, 1.0)}])
    again = deserialize_federation_state(serialize_federation_state(begun))
    worse = FederationValidation({"a": 0.45}, {"a": 1.0})
    assert again.best_validation_losses == {"a": 0.4}
    assert record_model_validation(replace(again, round=2), worse, "auroc", 1).best_round == 1


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_every_method_is_chosen_by_ranking_unless_classes_exclude_one_another(name: str) -> None:
    assert STRATEGIES[name]().site.default_selection_criterion == "auroc"
    if STRATEGIES[name].site_class.traits.supports_multi_class:
        assert STRATEGIES[name](task="multi_class").site.default_selection_criterion == "loss"


AUROC_LIES = {
    "always 1": lambda n: 1.0,
    "1 in the first round, then 0": lambda n: float(n == 0),
    "1 in the last round, else 0": lambda n: float(n == 14),
    "alternating": lambda n: float(n % 2),
    "always 0": lambda n: 0.0,
    "turned round": lambda n: 0.9**n,
}


@pytest.mark.parametrize("sites", [3, 4, 10])
@pytest.mark.parametrize("lie", AUROC_LIES)
def test_no_course_of_stated_aurocs_has_a_bad_round_chosen(sites: int, lie: str) -> None:
    """Honest sites' AUROCs rise to 0.88 to 0.93 and fall to 0.6 at the end."""
    honest = falling(sites - 1)
    rounds = [
        {**{site: (0.5, 1 - 0.6 * loss) for site, loss in losses.items()}, "liar": (0.5, AUROC_LIES[lie](n))}
        for n, losses in enumerate(honest)
    ]
    wrong = [0.6 * honest_mean(losses) for losses in honest]
    assert wrong[judged(rounds).best_round] <= MAX_REGRET_FROM_NOISE * min(wrong) + LOSS_OFFSET


def test_by_the_mean_alone_one_stated_auroc_would_choose_the_worst_round() -> None:
    rounds = [{"a": 0.1, "b": 0.1, "liar": 1.0}, {"a": 0.4, "b": 0.4, "liar": 0.0}]
    first, last = (sum(losses.values()) for losses in rounds)
    assert last < first
    assert judged([{site: (0.5, 1 - loss) for site, loss in losses.items()} for losses in rounds]).best_round == 0


def test_a_site_that_alone_states_an_auroc_does_not_choose_by_it() -> None:
    """The others' validation parts show one kind of image; the liar praises the round that all others hold worst."""
    rounds: Sequence[Figures] = [
        {"a": (0.3, None), "b": (0.3, None), "liar": (0.3, 0.1)},
        {"a": (0.9, None), "b": (0.9, None), "liar": (0.3, 1.0)},
    ]
    assert judged(rounds).criterion == "loss"
    assert judged(rounds).best_round == 0


def test_all_rounds_of_a_run_are_compared_by_one_criterion_over_a_restart_too() -> None:
    begun = judged([{"a": (0.5, None), "b": (0.5, None)}])
    again = deserialize_federation_state(serialize_federation_state(begun))
    assert again.criterion == "loss"
    later = FederationValidation({"a": 0.4, "b": 0.4}, {"a": 0.1, "b": 0.1})
    assert record_model_validation(replace(again, round=1), later, "auroc", 2).best_losses == {"a": 0.4, "b": 0.4}


def chosen_among(members: int, rounds: Judgements) -> tuple[int, bool]:
    """The best round, and whether the model of the last round is the result."""
    state = FederationState(0, TINY)
    for server_round, losses in enumerate(rounds):
        model = replace(TINY, trunk=TINY.trunk + server_round)
        state = update_best_model(replace(state, round=server_round, model=model), losses, members)
    return state.best_round, state.best_or_last_model is state.model


@pytest.mark.parametrize("members", [3, 4, 10])
@pytest.mark.parametrize("lie", LIES)
def test_where_the_others_keep_their_figures_one_site_does_not_choose(members: int, lie: str) -> None:
    rounds = [{"liar": LIES[lie](n)} for n in range(15)]
    assert chosen_among(members, rounds) == (-1, True)
    figures = [
        FederationValidation(losses, {site: 1 / (1 + loss) for site, loss in losses.items()}) for losses in rounds
    ]
    state = FederationState(0, TINY)
    for server_round, validation in enumerate(figures):
        state = record_model_validation(replace(state, round=server_round), validation, "auroc", members)
        assert state.best is None


@pytest.mark.parametrize("members", [3, 4, 10])
@pytest.mark.parametrize("lie", LIES)
def test_where_all_but_one_keep_their_figures_the_liar_holds_no_model_that_the_other_does_not(
    members: int, lie: str
) -> None:
    """The honest judge's losses fall, and rise at the end: only there may an earlier round be the result."""
    rounds = with_liar(falling(1), [LIES[lie](n) for n in range(15)])
    assert chosen_among(members, rounds[:12]) == (11, True)
    assert chosen_among(members, rounds)[0] >= 11


def test_two_judges_together_keep_the_model_before_one_that_is_clearly_worse() -> None:
    good, bad = {"a": 0.5, "b": 0.6}, {"a": 0.9, "b": 0.9}
    assert chosen_among(3, [good, bad]) == (0, False)
    assert chosen_among(3, [good, {**bad, "a": 0.6}]) == (1, True)
    assert chosen_among(3, [bad, good]) == (1, True)


SILENT_FROM = [{"a": 0.9, "b": 0.9, "liar": 0.0}, *({"a": 0.9**n, "b": 0.9**n} for n in range(2, 7))]
"""The liar calls the untrained model perfect, then states nothing."""


def test_a_site_that_ceases_to_state_its_figures_does_not_hold_the_run_at_an_early_model() -> None:
    assert chosen_among(3, SILENT_FROM) == (5, True)
    assert chosen_among(3, [SILENT_FROM[0], *({"a": losses["a"]} for losses in SILENT_FROM[1:])]) == (-1, True)


def test_three_choose_again_as_soon_as_they_validate() -> None:
    three = [{"a": loss, "b": loss, "c": loss} for loss in (0.5, 0.4, 0.2, 0.3)]
    assert chosen_among(3, [{"a": 0.1, "b": 0.1, "c": 0.1}, {"a": 0.6}, *three]) == (4, False)
    assert chosen_among(3, [*three, {}]) == (-1, True)
    assert chosen_among(2, [{"a": 0.5, "b": 0.5}, {}]) == (0, False)


def test_a_third_site_that_joins_late_ends_the_choice_of_two() -> None:
    state = update_best_model(FederationState(0, TINY), {"a": 0.4, "b": 0.1}, 2)
    state = update_best_model(replace(state, round=1), {"a": 0.3, "b": 0.4, "c": 0.4}, 3)
    assert state.best_round == 1
