"""FedIRM: relations, their mismatch and the teacher by hand; what is told when; where it is FedAvg."""

import math
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polyclinic.common.contract import LabelContract
from polyclinic.common.models.network import build_network
from polyclinic.common.models.zoo.spec import ModelSpec
from polyclinic.strategies.local.objective import update_teacher_average
from polyclinic.strategies.methods.base import RoundContext
from polyclinic.strategies.methods.fedirm import (
    FedIRM,
    average_class_relations,
    compute_log_relations,
    compute_relation_divergence,
    compute_unlabelled_loss_weight,
    copy_as_dropout_teacher,
    mask_confident_positives,
)
from tests.federations import Traffic, federation
from tests.strategies.states import make_reply

NAN = math.nan
PLAIN = "method.balanced=false"
seeds = st.integers(0, 2**32 - 1)


def test_a_relation_is_the_softened_mean_of_the_members_logits() -> None:
    # Row 0, both images: means 3 and 1, halved 1.5 and .5: 1 / (1 + e^-1). Row 1, the second: 2 and 1, e to 1.
    logits, members = torch.tensor([[2.0, 0.0], [4.0, 2.0]]), torch.tensor([[True, False], [True, True]])
    likely = 1 / (1 + math.exp(-1))
    relations = compute_log_relations(logits, members, 2.0).exp()
    np.testing.assert_allclose(relations, [[likely, 1 - likely], [likely, 1 - likely]], rtol=1e-6)
    cold = compute_log_relations(logits, members, 1.0).exp()
    np.testing.assert_allclose(cold[0, 0], 1 / (1 + math.exp(-2)), rtol=1e-6)


@given(seeds)
def test_every_row_sums_to_one_even_without_members(seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits, members = torch.from_numpy(rng.normal(scale=9, size=(5, 4))), torch.from_numpy(rng.random((5, 3)) < 0.3)
    np.testing.assert_allclose(compute_log_relations(logits, members, 2.0).exp().sum(dim=1), 1.0)


def test_an_entry_is_surely_shown_that_is_likely_and_of_little_entropy() -> None:
    # Entropies in nats: .325, .5004, .611, .198
    sure = mask_confident_positives(torch.tensor([[0.9, 0.8, 0.7, 0.05, 1.0]]), 0.5)
    assert sure.tolist() == [[True, False, False, False, True]]


def test_the_mismatch_is_the_divergence_both_ways_over_rows_that_both_sides_have() -> None:
    # Own (1/2, 1/2), theirs (.8, .2): .3 ln(.8 / .5) + .3 ln(.5 / .2) = .3 ln 4; rows 1 and 2 are only one side's
    own = torch.log(torch.tensor([[0.5, 0.5], [0.5, 0.5], [0.9, 0.1]], dtype=torch.float64))
    federation = torch.tensor([[0.8, 0.2], [0.8, 0.2], [NAN, NAN]], dtype=torch.float64)
    members = torch.tensor([[True, False, True], [False, False, False]])
    assert float(compute_relation_divergence(own, members, federation)) == pytest.approx(0.3 * math.log(4))
    assert float(compute_relation_divergence(own[1:], members[:, 1:], federation[1:])) == 0.0


@given(seeds)
def test_the_mismatch_is_nothing_between_equals_and_its_gradient_is_finite(seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(size=(5, 3))).requires_grad_()
    members, federation = torch.from_numpy(rng.random((5, 2)) < 0.5), torch.from_numpy(rng.dirichlet([1, 1, 1], 2))
    federation[0] = NAN
    own = compute_log_relations(logits, members, 2.0)
    assert float(compute_relation_divergence(own, members, own.detach().exp()).detach()) == pytest.approx(0, abs=1e-12)
    value = compute_relation_divergence(own, members, federation)
    value.backward()
    assert float(value.detach()) >= 0
    assert logits.grad.isfinite().all()


def test_relations_are_averaged_over_who_tells_them_and_what_is_none_is_left_out() -> None:
    relations = {
        "north": np.array([[0.9, 0.1], [NAN, NAN], [NAN, NAN]]),
        "south": np.array([[0.5, 0.5], [0.2, 0.8], [NAN, NAN]]),
        "west": np.array([[2.0, -1.0], [0.7, 0.7], [NAN, NAN]]),
    }
    np.testing.assert_allclose(average_class_relations(relations), [[0.7, 0.3], [0.2, 0.8], [NAN, NAN]])


def test_the_unlabelled_terms_weight_ramps_up_as_a_gaussian() -> None:
    shares = [compute_unlabelled_loss_weight(rounds, 30) for rounds in (0, 15, 30, 99)]
    np.testing.assert_allclose(shares, [math.exp(-5), math.exp(-1.25), 1.0, 1.0])
    assert compute_unlabelled_loss_weight(0, 0) == 1.0


SPEC = ModelSpec(architecture="tiny_cnn", channels=1, image_size=16, neck=8, dropout=0.5)


def test_the_teacher_is_a_running_mean_of_parameters_and_of_batch_normalisations_averages() -> None:
    network = build_network(SPEC, ("a", "b"), 3)
    teacher = copy_as_dropout_teacher(network)
    before = {name: value.clone() for name, value in teacher.state_dict().items() if value.is_floating_point()}
    with torch.no_grad():
        for name in before:
            network.state_dict()[name] += 4.0
    update_teacher_average(teacher, network, 0.75)
    assert any("running_var" in name for name in before)
    for name, value in before.items():
        torch.testing.assert_close(teacher.state_dict()[name], value + 1.0)  # a quarter of 4


def test_the_teacher_keeps_its_batch_normalisation_and_varies_by_dropout() -> None:
    network = build_network(SPEC, ("a", "b"), 3)
    teacher, images = copy_as_dropout_teacher(network), torch.rand(4, 1, 16, 16) * 255
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    assert not torch.equal(teacher(images), teacher(images))
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())
    assert not any(parameter.requires_grad for parameter in teacher.parameters())


def test_a_site_has_no_say_in_what_it_does_not_annotate_and_what_nobody_tells_stays() -> None:
    contract = LabelContract(("a", "b"), MappingProxyType({"north": ("a",), "south": ("b",)}))
    before = {"relations": np.array([[0.5, 0.5], [0.1, 0.9]], np.float32)}
    replies = {
        "north": make_reply("north", relations=[[0.6, 0.4], [1.0, 0.0]]),
        "south": make_reply("south", relations=[[0.0, 1.0], [NAN, NAN]]),
    }
    after = FedIRM().aggregate_statistics(RoundContext("multi_label", contract, {}, before, 3), replies)
    np.testing.assert_allclose(after["relations"], [[0.6, 0.4], [0.1, 0.9]], rtol=1e-6)


def test_relations_of_own_classes_are_told_from_the_last_supervised_round_on(tmp_path: Path, traffic: Traffic) -> None:
    summary = federation(tmp_path, "run.method=fedirm", "run.rounds=3", "method.supervised_rounds=2")
    statistics = {(reply.round, *reply.statistics) for reply in traffic.replies}
    assert statistics == {(1,), (2, "relations"), (3, "relations")}
    assert {(request.round, *request.statistics) for request in traffic.requests} == {(1,), (2,), (3, "relations")}
    for reply in (reply for reply in traffic.replies if reply.statistics):
        own = [name in summary["sites"][reply.site]["classes"] for name in summary["classes"]]
        sums = reply.statistics["relations"].sum(axis=1)
        np.testing.assert_allclose(sums, np.where(own, 1.0, NAN), rtol=1e-5)


def test_supervised_rounds_are_the_partial_loss_and_what_follows_is_not(tmp_path: Path) -> None:
    partial = federation(tmp_path, "run.method=partial_loss", "method.weighting=samples", out="partial")
    no_second_stage = "method.unlabelled_weight=0"  # else a run of two supervised rounds is refused
    once, always = (
        federation(
            tmp_path, "run.method=fedirm", PLAIN, f"method.supervised_rounds={rounds}", *more, out=f"run-{rounds}"
        )
        for rounds, more in ((1, ()), (2, (no_second_stage,)))
    )
    assert always["model_sha256"] == partial["model_sha256"] != once["model_sha256"]
