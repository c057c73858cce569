"""CBAFed: thresholds, tags, weights, and the connection with an earlier model."""

from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polyclinic.common.contract import LabelContract
from polyclinic.common.models.network import Head
from polyclinic.common.models.state import ModelState
from polyclinic.common.wire.records import ModelGroups, TrainReply
from polyclinic.strategies.aggregation.server_optimizer import Moments
from polyclinic.strategies.methods.base import RoundContext
from polyclinic.strategies.methods.cbafed import (
    CBAFed,
    assign_pseudo_labels,
    compute_label_and_tag_loss,
    compute_pseudo_label_thresholds,
)
from tests.federations import Traffic, federation, json_lines
from tests.strategies.states import make_reply

CONTRACT = LabelContract(("a", "b"), MappingProxyType({"north": ("a",), "south": ("b",)}))
STAGES = CBAFed({"stage_one_rounds": 2})


def replies(north: tuple[int, list[float]], south: tuple[int, list[float]]) -> dict[str, TrainReply]:
    """Replies of two sites: their images, and the entries of each class that they trained on."""
    return {
        site: make_reply(site, samples=images, entries=entries)
        for site, (images, entries) in (("north", north), ("south", south))
    }


def context(server_round: int) -> RoundContext:
    return RoundContext("multi_label", CONTRACT, {}, {}, server_round)


def test_a_threshold_is_the_classs_share_plus_the_base_less_the_spread() -> None:
    # Shares 0.5, 0.3, 0.2; mean 1/3; variance of a sample (0.02778 + 0.00111 + 0.01778) / 2 = 0.02333, root 0.15275.
    thresholds = compute_pseudo_label_thresholds(np.array([50.0, 30.0, 20.0]), 0.6, 0.5, 1.0)
    np.testing.assert_allclose(thresholds, [0.5 + 0.6 - 0.15275, 0.3 + 0.6 - 0.15275, 0.2 + 0.6 - 0.15275], atol=1e-5)


def test_thresholds_stay_within_their_bounds_and_one_class_alone_has_no_spread() -> None:
    thresholds = compute_pseudo_label_thresholds(np.array([97.0, 2.0, 1.0]), 0.84, 0.55, 0.95)  # spread 0.5514
    np.testing.assert_allclose(thresholds, [0.95, 0.55, 0.55])
    np.testing.assert_allclose(compute_pseudo_label_thresholds(np.array([7.0]), 0.45, 0.55, 0.95), [0.95])


@given(st.lists(st.integers(0, 10_000), min_size=2, max_size=14))
def test_thresholds_fall_for_rarer_classes(counts: list[int]) -> None:
    thresholds = compute_pseudo_label_thresholds(np.array(counts, np.float64), 0.45, 0.5, 0.95)
    order = np.argsort(counts, kind="stable")
    assert (np.diff(thresholds[order]) >= 0).all()
    assert ((thresholds >= 0.5) & (thresholds <= 0.95)).all()


def test_thresholds_come_from_what_all_sites_trained_on_in_the_round() -> None:
    # 40 and 60 entries: shares 0.4 and 0.6, spread 0.14142; base 0.45 gives 0.70858 and 0.90858.
    honest = replies((40, [40, 20]), (40, [0, 40]))
    thresholds = STAGES.aggregate_statistics(context(2), honest)["thresholds"]
    np.testing.assert_allclose(thresholds, [0.4 + 0.45 - 0.1414214, 0.6 + 0.45 - 0.1414214], atol=1e-6)
    # A site cannot claim more entries than it has images, nor fewer than none.
    boasting = replies((40, [9e9, 20]), (40, [-5, 40]))
    np.testing.assert_array_equal(STAGES.aggregate_statistics(context(2), boasting)["thresholds"], thresholds)


def test_before_the_last_round_of_stage_one_there_are_no_thresholds() -> None:
    nothing = TrainReply("run", 1, "north", 4, 0.5, None, None, 1.0, ModelGroups())
    assert STAGES.aggregate_statistics(context(1), {"north": nothing}) == {}


def test_sure_entries_are_tagged_on_both_sides_and_the_rest_left_out() -> None:
    probabilities = torch.tensor([[0.71, 0.71], [0.29, 0.29], [0.7, 0.3], [0.5, 0.15]])
    tags = assign_pseudo_labels(probabilities, torch.tensor([0.7, 0.8]))
    expected = [[1.0, np.nan], [0.0, np.nan], [np.nan, np.nan], [np.nan, 0.0]]
    np.testing.assert_array_equal(tags.numpy(), np.array(expected, np.float32))


def test_in_stage_two_a_site_weighs_the_entries_it_trained_on() -> None:
    trained = replies((40, [40, 20]), (10, [0, 10]))
    assert STAGES.site_weights(context(2), trained, [40.0, 10.0]) == [40.0, 10.0]
    np.testing.assert_allclose(STAGES.site_weights(context(3), trained, [40.0, 10.0]), [60.0, 10.0])
    np.testing.assert_allclose(STAGES.site_weights(context(3), trained, [1.0, 1.0]), [1.5, 1.0])


def test_where_nobody_trained_on_anything_the_plain_weights_stay() -> None:
    idle = replies((40, [0, np.nan]), (10, [0, 0]))
    assert STAGES.site_weights(context(3), idle, [40.0, 10.0]) == [40.0, 10.0]


def model(value: float) -> ModelState:
    values = np.array([value, -value], np.float32)
    return ModelState(values, values[:1] + 1, Head(("a",), values[None] * 2, values[:1]))


def through(rounds: int, **parameters: float) -> dict[int, tuple[ModelState, Moments]]:
    """The mean of round r is the model of 10 r: what becomes of it, and what is remembered."""
    results: dict[int, tuple[ModelState, Moments]] = {}
    method, moments = CBAFed(parameters), dict[str, np.ndarray]()
    for server_round in range(1, rounds + 1):
        results[server_round] = method.finalize(server_round, model(10.0 * server_round), moments)
        moments = dict(results[server_round][1])
    return results


def test_each_stage_mixes_every_so_many_rounds_with_the_last_mixture_and_begins_anew() -> None:
    rounds = through(10, stage_one_rounds=5, residual_every=2, residual_stage_one=0.75, residual=0.5)
    # Stage 1 remembers 10; 0.75 * 10 + 0.25 * 30 = 15; 0.75 * 15 + 0.25 * 50 = 23.75.
    # Stage 2 remembers 60; (60 + 80) / 2 = 70; (70 + 100) / 2 = 85.
    expected = {1: 10, 2: 20, 3: 15, 4: 40, 5: 23.75, 6: 60, 7: 70, 8: 70, 9: 90, 10: 85}
    assert {server_round: float(state.trunk[0]) for server_round, (state, _) in rounds.items()} == expected


def test_every_group_of_the_model_is_mixed() -> None:
    mixed = through(2, residual_every=1, residual_stage_one=0.75)[2][0]  # 0.75 * 10 + 0.25 * 20 = 12.5
    np.testing.assert_allclose(mixed.trunk, [12.5, -12.5])
    np.testing.assert_allclose(mixed.norm, [13.5])
    np.testing.assert_allclose(mixed.head.weight, [[25.0, -25.0]])
    np.testing.assert_allclose(mixed.head.bias, [12.5])


def test_what_a_server_optimiser_remembers_is_kept() -> None:
    moments = {"trunk.first": np.ones(2)}
    _, after = CBAFed().finalize(1, model(1.0), moments)
    assert after["trunk.first"] is moments["trunk.first"]
    assert set(moments) == {"trunk.first"}


def test_without_a_connection_the_mean_is_the_model() -> None:
    for server_round, (state, moments) in through(7, residual_every=0).items():
        assert state.trunk[0] == 10.0 * server_round
        assert moments == {}


AT_WORK = (
    "run.method=cbafed", 'partition={kind = "missing_classes", sites = 3, missing = 6}',
    "run.rounds=3", "method.stage_one_rounds=2",
)  # fmt: skip


def test_sites_tell_what_they_trained_on_in_each_stage(tmp_path: Path, traffic: Traffic) -> None:
    summary = federation(tmp_path, *AT_WORK)
    annotated = {
        site: np.array([name in facts["classes"] for name in summary["classes"]])
        for site, facts in summary["sites"].items()
    }
    assert all(not reply.statistics for reply in traffic.replies if reply.round == 1)
    for reply in (reply for reply in traffic.replies if reply.round == 2):
        expected = np.where(annotated[reply.site], reply.train_samples, 0)
        np.testing.assert_array_equal(reply.statistics["entries"], expected)
    for reply in (reply for reply in traffic.replies if reply.round == 3):
        own, entries = annotated[reply.site], reply.statistics["entries"]
        assert (entries[own] == reply.train_samples).all()
        assert 0 < entries[~own].sum() < reply.train_samples * (~own).sum()
    thresholds = [line["learned"].get("thresholds") for line in json_lines(tmp_path / "run" / "rounds.jsonl")]
    assert thresholds[0] is None
    assert list(thresholds[1]) == summary["classes"]
    assert all(0.55 <= threshold <= 0.95 for threshold in thresholds[1].values())
    for request in traffic.requests:
        assert set(request.statistics) == ({"thresholds"} if request.round == 3 else set())


def test_thresholds_that_nothing_passes_leave_the_partial_loss(tmp_path: Path) -> None:
    strict = ("method.threshold_lowest=1", "method.threshold_highest=1", "method.residual_every=0")
    ours = federation(tmp_path, *AT_WORK, *strict, "method.balanced=false", "method.weighting=uniform", out="ours")
    plain = federation(tmp_path, *AT_WORK[1:3], "run.method=partial_loss", out="plain")
    assert ours["test"]["mean_auroc"] == pytest.approx(plain["test"]["mean_auroc"], abs=1e-3)


def test_the_tags_of_each_missing_class_are_a_mean_of_their_own_beside_that_of_the_labels() -> None:
    """Class a is labelled, b and c are tagged; logits 0 make every entry ln 2, a positive of b three times that."""
    nan = torch.nan
    targets = torch.tensor([[1.0, 1.0, nan], [0.0, 0.0, nan], [0.0, nan, nan], [nan, nan, 0.0]])
    weight = torch.tensor([2.0, 3.0, 1.0])
    loss = compute_label_and_tag_loss(torch.zeros(4, 3), targets, torch.tensor([True, False, False]), weight)
    labels, of_b, of_c = (2 + 1 + 1) / 3, (3 + 1) / 2, 1  # in units of ln 2
    assert float(loss) == pytest.approx(np.log(2) * (labels + of_b + of_c))


def test_without_any_tag_only_the_labels_count() -> None:
    targets = torch.tensor([[1.0, torch.nan], [0.0, torch.nan]])
    logits = torch.tensor([[2.0, 5.0], [-1.0, -7.0]])
    loss = compute_label_and_tag_loss(logits, targets, torch.tensor([True, False]), None)
    assert float(loss) == pytest.approx((np.log1p(np.exp(-2)) + np.log1p(np.exp(-1))) / 2, rel=1e-6)
