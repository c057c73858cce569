"""SCAFFOLD: controls by hand, where it ends on two parabolas, what a site's step is, what is refused."""

from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch

from polyclinic.common.config import TrainingSection
from polyclinic.common.contract import LabelContract
from polyclinic.common.errors import BadInput, WireError
from polyclinic.common.models.network import Head, build_network
from polyclinic.common.models.state import make_model_layout, read_model_state
from polyclinic.common.models.zoo.spec import ModelSpec
from polyclinic.common.wire.records import NO_ARRAYS, Arrays, ModelGroups, RollCallAnswer
from polyclinic.strategies.local.objective import ClientContext, LabelledExamples
from polyclinic.strategies.local.training import MiniBatch
from polyclinic.strategies.methods.base import RoundContext
from polyclinic.strategies.methods.scaffold import (
    CORRECTION,
    RATE_SUM,
    Scaffold,
    ScaffoldSite,
    count_optimizer_steps,
    flatten_groups,
)
from tests.federations import Traffic, federation, needs_of
from tests.strategies.states import make_reply

# ---------------------------------------------------------------------- two parabolas

CONTRACT = LabelContract(("a",), MappingProxyType({"east": ("a",), "west": ("a",)}))
CURVATURE, MINIMUM = {"east": 1.0, "west": 3.0}, {"east": 0.0, "west": 4.0}
STEPS, RATE = 2, 0.25


def make_context(statistics: Arrays, images: dict[str, int] | None = None) -> RoundContext:
    answers = {
        site: RollCallAnswer("run", site, ("a",), ("a",), count, 5, 9, "layout", "1")
        for site, count in (images or {"east": 10, "west": 10}).items()
    }
    return RoundContext("multi_label", CONTRACT, answers, statistics, 2)


def descend(site: str, x: float, correction: float) -> float:
    """Two steps on ``curvature / 2 (y - minimum)^2``; return the update."""
    y = x
    for _ in range(STEPS):
        y -= RATE * (CURVATURE[site] * (y - MINIMUM[site]) + correction)
    return y - x


def average(x: float, statistics: Arrays, *, corrected: bool = True) -> tuple[float, Arrays]:
    """One round of both sites under the coordinator's rules."""
    method, context = Scaffold(), make_context(statistics)
    sent = method.statistics_for(context)
    corrections = {site: float(sent(site).get(CORRECTION, np.zeros(1))[0]) * corrected for site in CURVATURE}
    moves = {site: descend(site, x, corrections[site]) for site in CURVATURE}
    replies = {
        site: make_reply(site, ModelGroups(np.array([move], np.float32)), **{RATE_SUM: [STEPS * RATE]})
        for site, move in moves.items()
    }
    return x + sum(moves.values()) / 2, method.aggregate_statistics(context, replies)


def test_the_first_controls_are_the_mean_gradients_of_the_steps_by_hand() -> None:
    # East stands at its minimum. West's gradients are 3 (0 - 4) = -12, then at y = 3: 3 (3 - 4) = -3.
    x, statistics = average(0.0, NO_ARRAYS)
    assert x == 3.75 / 2
    assert {site: array.tolist() for site, array in statistics.items()} == {"east": [0.0], "west": [-7.5]}
    sent = Scaffold().statistics_for(make_context(statistics))
    assert (sent("east")[CORRECTION].tolist(), sent("west")[CORRECTION].tolist()) == ([-3.75], [3.75])


def test_in_the_second_round_too_a_control_is_the_mean_of_the_uncorrected_gradients() -> None:
    x, statistics = average(0.0, NO_ARRAYS)
    _, later = average(x, statistics)
    # x is 1.875. East: gradient 1.875, y = 1.875 - (1.875 - 3.75) / 4 = 2.34375, gradient 2.34375.
    # West: gradient -6.375, y = 1.875 - (-6.375 + 3.75) / 4 = 2.53125, gradient -4.40625.
    assert later["east"].tolist() == pytest.approx([(1.875 + 2.34375) / 2])
    assert later["west"].tolist() == pytest.approx([(-6.375 - 4.40625) / 2])


def test_it_ends_at_the_minimum_of_the_sum_where_fedavg_does_not() -> None:
    ends = {}
    for corrected in (True, False):
        x, statistics = 0.0, NO_ARRAYS
        for _ in range(60):
            x, statistics = average(x, statistics, corrected=corrected)
        ends[corrected] = x
    assert ends[True] == pytest.approx(3.0, abs=1e-5)  # (1 * 0 + 3 * 4) / (1 + 3)
    # FedAvg rests where x = (0.75^2 x + 4 + 0.25^2 (x - 4)) / 2.
    assert ends[False] == pytest.approx(30 / 11, abs=1e-6)


def test_the_mean_control_weighs_sites_as_the_mean_model_does_and_one_without_a_control_is_zero() -> None:
    stored, images = {"west": np.array([8.0], np.float32)}, {"east": 30, "west": 10}
    plain, by_images = (Scaffold({"weighting": rule}) for rule in ("uniform", "samples"))
    context = make_context(stored, images)
    assert plain.statistics_for(context)("east")[CORRECTION].tolist() == [4.0]
    assert by_images.statistics_for(context)("east")[CORRECTION].tolist() == [2.0]
    assert by_images.statistics_for(context)("west")[CORRECTION].tolist() == [-6.0]


def test_a_site_that_does_not_count_is_in_no_mean_and_an_absent_one_keeps_its_control() -> None:
    stored = {"east": np.array([2.0], np.float32), "west": np.array([8.0], np.float32)}
    alone = make_context(stored, {"east": 10})
    assert Scaffold().statistics_for(alone)("east")[CORRECTION].tolist() == [0.0]
    reply = make_reply("east", ModelGroups(np.array([-1.0], np.float32)), **{RATE_SUM: [0.5]})
    later = Scaffold().aggregate_statistics(make_context(stored), {"east": reply})
    assert (later["east"].tolist(), later["west"].tolist()) == ([1 / 0.5 - 3.0], [8.0])  # sent: c - c_i = 5 - 2
    still = make_reply("east", ModelGroups(np.array([-1.0], np.float32)), **{RATE_SUM: [0.0]})
    assert Scaffold().aggregate_statistics(make_context(stored), {"east": still})["east"].tolist() == [2.0]


def test_steps_are_counted_where_several_batches_make_one() -> None:
    assert count_optimizer_steps(batches=14, epochs=2, batches_per_step=1) == 14
    assert count_optimizer_steps(batches=14, epochs=2, batches_per_step=3) == 6  # 3 + 3 + 1 batches, twice


# ---------------------------------------------------------------------- a site

SPEC = ModelSpec(architecture="tiny_cnn", channels=1, image_size=16)
EXAMPLES = LabelledExamples(torch.zeros(0), torch.zeros(0), torch.zeros(0))


def gradients_and_loss(statistics: Arrays, trunk: str = "fedavg") -> tuple[ModelGroups, float]:
    """The gradient of a site's objective at one batch, in the model's groups."""
    network = build_network(SPEC, ("a", "b"), seed=3)
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (4, 1, 16, 16), generator=generator, dtype=torch.uint8)
    labels, annotated = torch.tensor([[1.0, torch.nan]] * 4), torch.tensor([True, False])
    batch = MiniBatch(torch.arange(4), images, labels, annotated, None, nullcontext(), generator)
    context = ClientContext(network, EXAMPLES, statistics, NO_ARRAYS, 2, TrainingSection(optimizer="sgd"))
    value = ScaffoldSite({"trunk": trunk}).make_local_round(context).objective(network, batch)
    value.backward()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.zeros(()) if parameter.grad is None else parameter.grad)
    return ModelGroups.from_model(read_model_state(network)), float(value.detach())


@pytest.mark.parametrize("trunk", ["fedavg", "fedbn"])
def test_a_sites_gradient_is_that_of_its_loss_plus_the_correction_and_its_loss_is_its_own(trunk: str) -> None:
    network = build_network(SPEC, ("a", "b"), seed=3)
    state, layout = read_model_state(network), make_model_layout(network)
    places = {tensor.name: layout.tensor_slices()[tensor.name] for tensor in layout.norm}
    numbers = ModelGroups.from_model(state) if trunk == "fedavg" else ModelGroups(trunk=state.trunk, head=state.head)
    size = len(flatten_groups(numbers))
    correction = np.random.default_rng(5).normal(size=size).astype(np.float32)
    (plain, loss), (corrected, same) = (gradients_and_loss(sent, trunk) for sent in ({}, {CORRECTION: correction}))
    assert same == loss
    for name, array in corrected.to_named_arrays().items():
        expected = plain.to_named_arrays()[name]
        begin = 0
        for group, values in numbers.to_named_arrays().items():
            if group == name:
                expected = expected + correction[begin : begin + values.size].reshape(values.shape)
            begin += values.size
        if name == "norm":  # its running statistics have no gradient
            has_gradient = np.ones(array.size, np.bool_)
            for tensor, place in places.items():
                has_gradient[place] &= "running" not in tensor
            array, expected = array[has_gradient], expected[has_gradient]
        np.testing.assert_allclose(array, expected, rtol=1e-5, atol=1e-6, err_msg=name)


def test_a_correction_of_another_model_is_refused() -> None:
    with pytest.raises(WireError, match=r"correction has shape \(3,\)"):
        gradients_and_loss({CORRECTION: np.zeros(3, np.float32)})


def test_a_row_that_a_site_does_not_annotate_moves_by_the_mean_of_those_that_do() -> None:
    network = build_network(SPEC, ("a", "b"), seed=3)
    state = read_model_state(network)
    weight = np.zeros_like(state.head.weight)
    weight[1] = 0.5
    head = Head(state.head.class_names, weight, np.zeros_like(state.head.bias))
    sent = flatten_groups(ModelGroups(np.zeros_like(state.trunk), np.zeros_like(state.norm), head))
    corrected, _ = gradients_and_loss({CORRECTION: sent})
    assert corrected.head is not None
    np.testing.assert_allclose(corrected.head.weight[1], 0.5)


# ---------------------------------------------------------------------- a federation


def test_what_sites_receive_follows_from_what_they_sent_by_option_two(tmp_path: Path, traffic: Traffic) -> None:
    """c_i - c + (x - y) / (K eta), as in the authors' algorithm, on the messages of three rounds."""
    federation(tmp_path, "run.method=scaffold", *needs_of("scaffold"), "run.rounds=3", "training.schedule=cosine")
    controls = dict[str, np.ndarray]()
    sites = sorted({reply.site for reply in traffic.replies})
    by_round = {number: [r for r in traffic.requests if r.round == number] for number in (1, 2, 3)}
    factors = {1: 1.0, 2: 0.75, 3: 0.25}  # half of 1 + cos(pi k / 3)
    for number in (1, 2, 3):
        mean = sum((controls[site] for site in sites), np.zeros(())) / 3 if controls else 0.0
        for request, site in zip(by_round[number], sites, strict=True):
            if number > 1:
                np.testing.assert_allclose(request.statistics[CORRECTION], mean - controls[site], rtol=1e-4, atol=1e-5)
            else:
                assert not request.statistics
        sent = {site: mean - controls[site] if controls else 0.0 for site in sites}
        for reply in (reply for reply in traffic.replies if reply.round == number):
            steps = -(-reply.train_samples // 64)
            eta = 0.05 * factors[number]
            assert reply.statistics[RATE_SUM].tolist() == pytest.approx([steps * eta])
            controls[reply.site] = -flatten_groups(reply.update) / (steps * eta) - sent[reply.site]


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("training.optimizer=adam", 'Set training.optimizer = "sgd"'),
        ("training.momentum=0.9", "training.momentum: is 0.9"),
        ("method.warm_up_epochs=1", "method.warm_up_epochs: makes no sense in scaffold"),
        ("privacy.secure_aggregation=true", "its coordinator reads each update by itself"),
    ],
)
def test_what_would_make_no_gradients_of_steps_is_refused(setting: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput) as refused:
        federation(tmp_path, "run.method=scaffold", *needs_of("scaffold"), setting)
    assert says in str(refused.value)


def test_noise_on_updates_is_refused(tmp_path: Path) -> None:
    noise = ('privacy.level="update"', "privacy.noise_multiplier=0.05", 'model.norm="group"')
    with pytest.raises(BadInput, match="scaffold divides each update by a number that the noise would change"):
        federation(tmp_path, "run.method=scaffold", *needs_of("scaffold"), *noise, 'evaluation.checkpoint="last"')
