"""FedNoRo: indicators, who is noisy, what that changes at a site and in the mean."""

from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch

from polyclinic.common.contract import LabelContract
from polyclinic.common.wire.records import ModelGroups
from polyclinic.strategies.methods.base import RoundContext
from polyclinic.strategies.methods.fednoro import (
    FedNoRo,
    FedNoRoParameters,
    compute_distillation_divergence,
    compute_distillation_weight,
    compute_mean_loss_by_label,
    find_noisy_sites,
    lower_noisy_site_weights,
    scale_values_over_sites,
)
from tests.federations import Traffic, federation
from tests.strategies.states import make_reply

NAN = float("nan")
CONTRACT = LabelContract(
    ("a", "b"), MappingProxyType({"east": ("a", "b"), "north": ("a",), "south": ("a", "b"), "west": ("b",)})
)
STAGES = FedNoRo({"stage_one_rounds": 2})


def context(server_round: int, **noisy: float) -> RoundContext:
    statistics = {site: np.array([flag], np.float32) for site, flag in noisy.items()}
    return RoundContext("multi_label", CONTRACT, {}, statistics, server_round)


def test_indicators_are_mean_losses_of_what_is_labelled_negative_and_positive() -> None:
    # log(1 + e^z) for a negative of logit z, log(1 + e^-z) for a positive.
    logits = np.array([[0.0, 2.0], [1.0, -1.0], [-2.0, 3.0]])
    labels = np.array([[0.0, NAN], [1.0, 0.0], [0.0, 0.0]])
    indicators = compute_mean_loss_by_label(logits, labels)
    first = [(np.log(2) + np.log1p(np.exp(-2.0))) / 2, np.log1p(np.exp(-1.0))]
    second = [(np.log1p(np.exp(-1.0)) + np.log1p(np.exp(3.0))) / 2, NAN]
    np.testing.assert_allclose(indicators, [first, second])


def test_indicators_are_scaled_over_sites_and_who_has_none_is_the_lowest() -> None:
    scaled = scale_values_over_sites(np.array([[1.0, NAN, 5.0, NAN], [3.0, 2.0, 5.0, NAN], [2.0, 6.0, 5.0, NAN]]))
    np.testing.assert_allclose(scaled, [[0.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.5, 1.0, 0.0, 0.0]])


def test_the_sites_of_higher_losses_are_noisy_among_two_sites_too_and_nobody_where_all_are_alike() -> None:
    rng = np.random.default_rng(0)
    indicators = rng.normal(0.5, 0.02, (9, 4))
    indicators[[1, 4, 5], :] += [0.4, 0.3, 0.2, 0.5]
    np.testing.assert_array_equal(np.flatnonzero(find_noisy_sites(indicators)), [1, 4, 5])
    indicators[:, 2] = NAN
    np.testing.assert_array_equal(np.flatnonzero(find_noisy_sites(indicators)), [1, 4, 5])
    np.testing.assert_array_equal(find_noisy_sites(np.array([[0.9, 0.8], [0.1, NAN]])), [True, False])
    for alike in (np.full((4, 6), 0.3), np.full((1, 6), 0.3), np.full((3, 2), NAN)):
        assert not find_noisy_sites(alike).any()


def between(*places: float) -> np.ndarray:
    """Inner products of models on a line."""
    return np.outer(places, places)


def test_a_noisy_site_counts_less_the_further_it_is_from_the_nearest_clean_one() -> None:
    # Clean at 0 and 10, noisy at 1 and 14: nearest 1 and 4, over 4: exp(-1/4) and exp(-1).
    noisy = np.array([False, True, False, True])
    weights = lower_noisy_site_weights(np.array([5.0, 2.0, 3.0, 4.0]), between(0, 1, 10, 14), noisy)
    np.testing.assert_allclose(weights, [5.0, 2.0 * np.exp(-0.25), 3.0, 4.0 * np.exp(-1.0)])


@pytest.mark.parametrize(
    ("places", "noisy"),
    [((0, 1, 10), [False] * 3), ((0, 1, 10), [True] * 3), ((3, 3, 3), [False, True, False])],
    ids=["no_noisy_site", "no_clean_site", "none_that_strays"],
)
def test_the_mean_is_fedavgs_where_there_is(places: tuple[float, ...], noisy: list[bool]) -> None:
    weights = np.array([5.0, 2.0, 3.0])
    np.testing.assert_array_equal(lower_noisy_site_weights(weights, between(*places), np.array(noisy)), weights)


def test_weights_change_in_stage_two_only() -> None:
    replies = {
        site: make_reply(site, ModelGroups(np.array([place], np.float32)))
        for site, place in (("east", 0), ("north", 2))
    }
    state = {"east": 0.0, "north": 1.0}
    assert STAGES.site_weights(context(2, **state), replies, [1.0, 1.0]) == [1.0, 1.0]
    np.testing.assert_allclose(STAGES.site_weights(context(3, **state), replies, [1.0, 1.0]), [1.0, np.exp(-1)])


def test_sites_are_judged_once_by_what_they_tell_in_the_last_round_of_stage_one() -> None:
    replies = {
        site: make_reply(site, indicators=np.full((2, 2), loss)) for site, loss in (("east", 0.1), ("north", 0.9))
    }
    assert STAGES.aggregate_statistics(context(1), replies) == {}
    verdicts = STAGES.aggregate_statistics(context(2), replies)
    assert {site: float(flag[0]) for site, flag in verdicts.items()} == {"east": 0.0, "north": 1.0}
    later = RoundContext("multi_label", CONTRACT, {}, verdicts, 3)
    assert STAGES.aggregate_statistics(later, replies) is verdicts


def test_a_site_that_was_not_judged_is_taken_for_noisy() -> None:
    state = context(3, east=0.0, north=1.0)
    assert [STAGES.is_noisy_site(state, site) for site in ("east", "north", "west")] == [False, True, True]
    assert STAGES.statistics_for(state)("west")["noisy"] == [1.0]
    assert STAGES.statistics_for(context(2))("west") == {}


def test_by_the_contract_every_site_that_lacks_a_class_is_noisy() -> None:
    method = FedNoRo({"noisy": "known"})
    assert [site for site in CONTRACT.sites if method.is_noisy_site(context(1), site)] == ["north", "west"]


def test_the_distillations_weight_rises_over_the_ramp() -> None:
    parameters = FedNoRoParameters(stage_one_rounds=10, ramp_rounds=40, distillation=0.8)
    weights = [compute_distillation_weight(server_round, parameters) for server_round in (11, 31, 51, 90)]
    np.testing.assert_allclose(weights, [0.8 * np.exp(-5), 0.8 * np.exp(-1.25), 0.8, 0.8])


def test_the_divergence_is_of_each_entrys_two_probabilities_over_the_chosen_classes() -> None:
    student = torch.tensor([[0.3, -1.0], [2.0, 0.5]], requires_grad=True)
    teacher = torch.tensor([[1.0, -1.0], [-0.5, 0.0]])
    p, q = student.detach().sigmoid(), teacher.sigmoid()
    entries = q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()
    both, first = torch.tensor([True, True]), torch.tensor([True, False])
    torch.testing.assert_close(compute_distillation_divergence(student, teacher, both).detach(), entries.mean())
    alone = compute_distillation_divergence(student, teacher, first)
    torch.testing.assert_close(alone.detach(), entries[:, 0].mean())
    (gradient,) = torch.autograd.grad(alone, student)
    torch.testing.assert_close(gradient, torch.stack([(p - q)[:, 0] / 2, torch.zeros(2)], dim=1))
    assert float(compute_distillation_divergence(student, teacher, ~both).detach()) == 0.0


def test_sites_that_lack_most_classes_are_found_by_indicators_that_go_up_once(tmp_path: Path, traffic: Traffic) -> None:
    every = [str(digit) for digit in range(10)]
    lists = {"east": every, "north": ["0", "1"], "south": every, "west": every}
    text = ", ".join(f"{site} = {classes}" for site, classes in lists.items()).replace("'", '"')
    settings = ("run.rounds=6", "method.stage_one_rounds=4", "training.epochs=2", "training.batch_size=16")
    lists_of_all = f'partition={{kind = "class_lists", lists = {{{text}}}}}'
    summary = federation(tmp_path, "run.method=fednoro", lists_of_all, *settings)
    assert {(reply.round, *reply.statistics) for reply in traffic.replies} == {
        (1,),
        (2,),
        (3,),
        (4, "indicators"),
        (5,),
        (6,),
    }
    assert {(request.round, *request.statistics) for request in traffic.requests} == {
        (1,),
        (2,),
        (3,),
        (4,),
        (5, "noisy"),
        (6, "noisy"),
    }
    assert summary["learned"] == {"noisy": ["north"]}
    verdicts = [float(request.statistics["noisy"][0]) for request in traffic.requests if request.round == 5]
    assert sorted(verdicts) == [0.0, 0.0, 0.0, 1.0]
