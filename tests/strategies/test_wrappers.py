"""Wrappers of any method: proximal term, clipping, server optimisers, surgical heads; and what is refused, with why."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from polyclinic.common.config import TrainingSection
from polyclinic.common.errors import BadInput
from polyclinic.common.models.network import Head, build_network
from polyclinic.common.models.saved import load_model
from polyclinic.common.models.state import ModelState, make_model_layout
from polyclinic.common.models.zoo.spec import ModelSpec
from polyclinic.common.wire.codec import compute_largest_rounding_errors, round_to_number_format
from polyclinic.common.wire.records import NO_ARRAYS, ModelGroups, NumberFormat, TrainReply
from polyclinic.server.runs.verify import verify_run
from polyclinic.strategies.aggregation.means import average_updates
from polyclinic.strategies.aggregation.server_optimizer import ServerOptimizer, compute_server_step
from polyclinic.strategies.engine.aggregator import update_global_model
from polyclinic.strategies.engine.exchange import find_update_form_fault
from polyclinic.strategies.engine.state import FederationState, deserialize_federation_state, make_initial_state
from polyclinic.strategies.local.objective import Batch, ClientContext, LabelledExamples, LocalRound, add_proximal_term
from polyclinic.strategies.local.updates import clip_update_to_norm, compress_trunk, compute_whole_update_norm
from polyclinic.strategies.methods.base import Method
from polyclinic.strategies.registry import build_strategy
from tests.federations import ALL_SHARED, Traffic, federation, finished, needs_of
from tests.strategies.folds import aggregated, stepped_by

SPEC = ModelSpec(architecture="tiny_cnn", channels=1, image_size=16)
NOTHING = LabelledExamples(torch.zeros(0), torch.zeros(0), torch.zeros(0))


def zero(network: Any, batch: Batch) -> torch.Tensor:
    return torch.zeros(())


@pytest.mark.parametrize(("head", "norm"), [(True, True), (False, True), (True, False)])
def test_the_proximal_term_is_half_mu_times_the_squared_distance_of_what_is_shared(head: bool, norm: bool) -> None:
    network = build_network(SPEC, ("a", "b"), 3)
    half = add_proximal_term(lambda situation: LocalRound(zero), 0.4, head=head, norm=norm)
    objective = half(ClientContext(network, NOTHING, NO_ARRAYS, NO_ARRAYS, 1, TrainingSection())).objective
    assert float(objective(network, None).detach()) == 0
    norms = [part for part in network.modules() if isinstance(part, torch.nn.BatchNorm2d)]
    assert norms
    with torch.no_grad():
        network.head.bias += torch.tensor([3.0, -1.0])
        norms[0].weight[0] += 2.0
        next(network.backbone.parameters()).view(-1)[0] += 1.0
    # 1 of the trunk, 4 of batch normalisation, 9 + 1 of the head
    expected = 0.2 * (1 + 4 * norm + 10 * head)
    assert float(objective(network, None).detach()) == pytest.approx(expected, rel=1e-4)


def test_fedprox_without_mu_would_be_fedavg_and_with_it_is_not(tmp_path: Path) -> None:
    runs = {
        "fedavg": ("run.method=fedavg",),
        "wrapped": ("run.method=fedavg", "method.proximal_mu=0.3"),
        "fedprox": ("run.method=fedprox", "method.proximal_mu=0.3"),
    }
    same = (ALL_SHARED, "training.epochs=2", "run.rounds=1")
    models = {name: federation(tmp_path, *run, *same, out=name)["model_sha256"] for name, run in runs.items()}
    assert models["fedprox"] == models["wrapped"] != models["fedavg"]


def update(trunk: list[float], head: list[float]) -> ModelGroups:
    rows = Head(("a",), np.array([head[:-1]], np.float32), np.array(head[-1:], np.float32))
    return ModelGroups(np.array(trunk, np.float32), None, rows)


def test_an_update_that_is_too_long_keeps_its_direction() -> None:
    long = update([3, 0], [0, -4, 12])  # length 13
    short = clip_update_to_norm(long, 6.5)
    assert compute_whole_update_norm(short) == pytest.approx(6.5, rel=1e-6)
    np.testing.assert_allclose([*short.trunk, *short.head.weight[0], *short.head.bias], [1.5, 0, 0, -2, 6], rtol=1e-6)
    assert clip_update_to_norm(long, 13.5) is long


@pytest.mark.parametrize(
    "method", ["surgical", "fedmlp", *(pytest.param(m, marks=pytest.mark.long) for m in ("fedsld", "vanilla"))]
)
def test_no_site_sends_more_than_the_bound(method: str, tmp_path: Path, traffic: Traffic) -> None:
    federation(tmp_path, f"run.method={method}", *needs_of(method), "method.clip_update=0.05")
    lengths = [compute_whole_update_norm(reply.update) for reply in traffic.replies]
    assert lengths == [pytest.approx(0.05, rel=1e-5)] * 6


@pytest.mark.parametrize("form", ["float16", "int8"])
def test_what_rounding_loses_goes_with_the_next_update(form: NumberFormat) -> None:
    generator, unsent, sent = np.random.default_rng(1), ModelGroups(), np.zeros(2000)
    updates = [generator.normal(size=2000).astype(np.float32) for _ in range(50)]
    for trunk in updates:
        update, unsent = compress_trunk(ModelGroups(trunk), unsent, form)
        assert update.trunk is not None
        sent += update.trunk
    total = np.sum(updates, axis=0, dtype=np.float64)
    np.testing.assert_allclose(sent + unsent.trunk, total, atol=1e-5)
    forgotten = np.sum([compress_trunk(ModelGroups(trunk), ModelGroups(), form)[0].trunk for trunk in updates], axis=0)
    assert np.abs(sent - total).mean() < np.abs(forgotten - total).mean() / 3


@pytest.mark.parametrize(("form", "bytes_a_number"), [("float16", 2), ("int8", 1 + 1 / 1024)])
def test_a_compressed_update_takes_fewer_bytes(form: str, bytes_a_number: float, tmp_path: Path) -> None:
    folder, plain = finished("run.method=surgical")
    small = federation(tmp_path, "run.method=surgical", f"method.compress_update={form}")
    numbers = sum(tensor.size for tensor in make_model_layout(load_model(folder)).trunk)
    for site, before in plain["sites"].items():
        saved = before["bytes_up"] - small["sites"][site]["bytes_up"]
        assert saved == pytest.approx(2 * numbers * (4 - bytes_a_number), rel=0.01)  # two rounds
        assert small["sites"][site]["bytes_down"] == pytest.approx(before["bytes_down"], rel=0.01)
    assert small["model_sha256"] != plain["model_sha256"]
    assert small["test"]["mean_auroc"] == pytest.approx(plain["test"]["mean_auroc"], abs=0.03)


@pytest.mark.parametrize(("form", "bytes_a_number"), [("float16", 2), ("int8", 1 + 1 / 1024)])
def test_a_model_in_fewer_bits_takes_fewer_bytes_down_and_can_be_verified(
    form: str, bytes_a_number: float, tmp_path: Path, traffic: Traffic
) -> None:
    folder, plain = finished("run.method=surgical")
    small = federation(tmp_path, "run.method=surgical", f"method.compress_model={form}", "run.keep_updates=true")
    numbers = sum(tensor.size for tensor in make_model_layout(load_model(folder)).trunk)
    for site, before in plain["sites"].items():
        # Two rounds, the validation after them, and the test.
        saved = before["bytes_down"] - small["sites"][site]["bytes_down"]
        assert saved == pytest.approx(4 * numbers * (4 - bytes_a_number), rel=0.01)
        assert small["sites"][site]["bytes_up"] == pytest.approx(before["bytes_up"], rel=0.01)
    assert {request.model.form for request in traffic.requests} == {form}
    assert small["model_sha256"] != plain["model_sha256"]
    assert small["test"]["mean_auroc"] == pytest.approx(plain["test"]["mean_auroc"], abs=0.03)
    assert verify_run(tmp_path / "run" / "receipt.json").faults == []


@pytest.mark.parametrize("form", ["float16", "int8"])
@pytest.mark.parametrize("parameters", [{}, {"server_optimizer": {"kind": "momentum"}}])
def test_what_rounding_a_model_loses_goes_into_the_next_one(form: NumberFormat, parameters: dict[str, Any]) -> None:
    """Steps far smaller than the format's move the model as far as they would without rounding."""
    rounds, step = 300, np.full(1500, {"float16": 1e-5, "int8": 1e-4}[form], np.float32)
    head = Head(("a",), np.zeros((1, 2), np.float32), np.zeros(1, np.float32))
    trunk = np.random.default_rng(2).normal(size=1500).astype(np.float32)
    begins = ModelState(trunk, np.zeros(0, np.float32), head)
    rounded = build_strategy("fedavg", {**parameters, "compress_model": form})
    exact = build_strategy("fedavg", parameters)

    def pass_rounds(method: Method) -> ModelState:
        state = make_initial_state(method.site, begins)
        model, moments = state.model, state.moments
        for server_round in range(1, rounds + 1):
            reply = TrainReply("run", server_round, "north", 1, None, None, None, 0.0, ModelGroups(step, None, None))
            means = average_updates(model, [reply], [1.0], method.head_mean_class)
            model, moments = update_global_model(method, server_round, means, moments)
        return model

    last, expected = pass_rounds(rounded), pass_rounds(exact)
    np.testing.assert_array_equal(last.trunk, round_to_number_format(last.trunk, form))
    errors = compute_largest_rounding_errors(last.trunk, form) + np.float32(1e-5)
    assert (np.abs(last.trunk - expected.trunk) <= errors).all()
    moved = np.mean(last.trunk - make_initial_state(rounded.site, begins).model.trunk)
    assert moved == pytest.approx(np.mean(expected.trunk - begins.trunk), rel=0.1)


def test_a_model_is_not_rounded_unless_asked() -> None:
    folder, _ = finished("run.method=surgical")
    checkpoints = sorted((folder / "checkpoints").glob("*.safetensors"))
    assert not deserialize_federation_state(checkpoints[-1].read_bytes()).moments


def test_an_update_in_another_form_than_requested_does_not_count() -> None:
    trunk = np.array([1.0, -2.0], np.float32)
    requested = ModelGroups(trunk, form="int8")
    assert find_update_form_fault(ModelGroups(trunk), requested) == "trunk travels as float32, expected int8"
    assert find_update_form_fault(requested, requested) == ""


UPDATES = (np.array([0.5, -2.0]), np.array([-1.0, 0.25]))


def steps(**choices: Any) -> list[np.ndarray]:
    moments, result = {}, []
    for mean in UPDATES:
        step, moments = compute_server_step(ServerOptimizer(**choices), mean, moments, "trunk")
        result.append(step)
    return result


def test_momentum_adds_up_and_adam_and_yogi_are_algorithm_2_by_hand() -> None:
    np.testing.assert_allclose(steps(kind="momentum", beta1=0.5), [[0.5, -2], [0.25 - 1, -1 + 0.25]])
    # first value of the updates, 0.5 then -1; v begins at tau^2 = 0.25
    m1, m2 = 0.25, 0.5 * 0.25 - 0.5
    adam_v1 = 0.75 * 0.25 + 0.25 * 0.25
    yogi_v1 = 0.25 - 0.25 * 0.25 * 0  # sign(0.25 - 0.25) = 0
    variances = {"adam": (adam_v1, 0.75 * adam_v1 + 0.25 * 1.0), "yogi": (yogi_v1, yogi_v1 - 0.25 * 1.0 * -1)}
    for kind, (v1, v2) in variances.items():
        first, second = steps(kind=kind, lr=0.1, beta1=0.5, beta2=0.75, tau=0.5)
        assert first[0] == pytest.approx(0.1 * m1 / (v1**0.5 + 0.5)), kind
        assert second[0] == pytest.approx(0.1 * m2 / (v2**0.5 + 0.5)), kind


def state() -> FederationState:
    head = Head(("a", "b"), np.array([[1.0, 2], [3, 4]], np.float32), np.array([5.0, 6], np.float32))
    return FederationState(0, ModelState(np.array([1.0, -1], np.float32), np.array([7.0], np.float32), head))


def reply(site: str, step: float) -> TrainReply:
    head = Head(("a",), np.full((1, 2), step, np.float32), np.full(1, -step, np.float32))
    groups = ModelGroups(np.full(2, step, np.float32), np.full(1, step, np.float32), head)
    return TrainReply("run", 1, site, 10, 0.5, None, None, 1.0, groups)


def test_a_server_optimiser_moves_trunk_and_owned_rows_and_leaves_the_rest_as_without_it() -> None:
    replies, before = [reply("north", 1.0), reply("south", 3.0)], state()
    after, moments = stepped_by(ServerOptimizer(kind="momentum", lr=0.5), before, replies, [1.0, 1.0])
    np.testing.assert_allclose(after.trunk, [1 + 0.5 * 2, -1 + 0.5 * 2])
    np.testing.assert_allclose(after.head.weight, [[1 + 1, 2 + 1], [3, 4]])
    np.testing.assert_allclose(after.head.bias, [5 - 1, 6])
    np.testing.assert_array_equal(after.norm, aggregated(before.model, replies, [1.0, 1.0]).norm)
    assert set(moments) == {"trunk.first", "head a.first"}


def test_momentum_of_nothing_and_length_one_is_plain_averaging() -> None:
    replies, before = [reply("north", 1.0), reply("south", 3.5)], state()
    plain = aggregated(before.model, replies, [10.0, 10.0])
    after, _ = stepped_by(ServerOptimizer(kind="momentum", beta1=0.0), before, replies, [10.0, 10.0])
    for name in ("trunk", "norm"):
        np.testing.assert_array_equal(getattr(after, name), getattr(plain, name))
    np.testing.assert_array_equal(after.head.weight, plain.head.weight)


COVERING = {("surgical", "momentum"), ("surgical", "adam"), ("surgical", "yogi"), ("fedmlp", "adam")}
"""A run of every optimiser and of a method with stages; ``make test-network`` runs every method under each."""


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        pytest.param(method, kind, marks=() if (method, kind) in COVERING else pytest.mark.long)
        for method in ("surgical", "fedsld", "fedmlp", "fedprox")
        for kind in ("momentum", "adam", "yogi")
    ],
)
def test_every_averaging_method_runs_under_every_server_optimiser(method: str, kind: str, tmp_path: Path) -> None:
    optimizer = f'method.server_optimizer={{kind = "{kind}"}}'
    _, plain = finished(f"run.method={method}", *needs_of(method))
    wrapped = federation(tmp_path, f"run.method={method}", *needs_of(method), optimizer)
    assert wrapped["rounds"] == 2
    assert wrapped["model_sha256"] != plain["model_sha256"]


@pytest.mark.parametrize("method", ["fedsld", "fedmlp"])
def test_with_surgical_heads_a_site_sends_its_own_rows_only(method: str, tmp_path: Path, traffic: Traffic) -> None:
    needs = [need for need in needs_of(method) if not need.startswith("partition")]
    summary = federation(tmp_path, f"run.method={method}", *needs, "partition.shared=2", "method.heads=own")
    own = {site: set(facts["classes"]) for site, facts in summary["sites"].items()}
    sent = [(reply.site, set(reply.update.head.class_names)) for reply in traffic.replies if reply.update.head]
    assert len(sent) == 6
    assert all(rows == own[site] for site, rows in sent)


ALONE = "every site trains by itself"
POOLED = "there is one pseudo-site, and nothing to average"
PASSED = "the model is passed on, not averaged"
WEIGHS = "it weighs the sites by a rule of its own"


@pytest.mark.parametrize(
    ("method", "parameters", "reason"),
    [
        ("individual", {"server_optimizer": {"kind": "adam"}}, f"{ALONE}, and nothing is averaged"),
        ("individual", {"proximal_mu": 0.1}, ALONE),
        ("individual", {"mean": "coordinate_median"}, ALONE),
        ("centralised", {"mean": "coordinate_median"}, POOLED),
        ("unifed", {"server_optimizer": {"kind": "yogi"}}, PASSED),
        ("fedseq", {"clip_update": 1.0}, PASSED),
        ("unifed", {"trunk": "fedbn"}, "the whole network is passed on, batch normalisation too"),
        ("unifed", {"weighting": "samples"}, PASSED),
        ("unifed", {"compress_update": "int8"}, PASSED),
        ("fedseq", {"compress_model": "float16"}, PASSED),
        ("individual", {"compress_model": "float16"}, ALONE),
        ("unifed", {"mean": {"kind": "krum"}}, PASSED),
        ("fedseq", {"warm_up_epochs": 3}, PASSED),
        ("server_only", {"proximal_mu": 0.3}, PASSED),
        ("rscfed", {"mean": "coordinate_median"}, f"makes no sense in rscfed: {WEIGHS}"),
        ("cbafed", {"mean": "trimmed_mean"}, WEIGHS),
        ("fednoro", {"mean": "coordinate_median"}, WEIGHS),
        ("surgical", {"server_optimizer": {"kind": "adam", "beta": 1}}, 'Did you mean "beta'),
        ("surgical", {"mean": {"kind": "trimmed_mean", "byzantine": 1}}, "byzantine is no key of trimmed_mean"),
        ("surgical", {"mean": {"kind": "krum", "byzantin": 1}}, 'Did you mean "byzantine"?'),
        ("surgical", {"mean": "median"}, "method.mean.kind: must be 'coordinate_median', 'trimmed_mean' or 'krum'"),
        ("fedmlp", {"sure_below": 0.8, "sure_above": 0.2}, "sure_below, 0.8, must not lie above sure_above, 0.2"),
        ("fedmlp", {"weighted_partial_loss": False}, "consistency makes no sense without weighted_partial_loss"),
        ("fedmlp", {"trunk": "fedbn"}, "its teacher is the model of all"),
    ],
)
def test_a_combination_without_sense_is_refused(method: str, parameters: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadInput) as refused:
        build_strategy(method, parameters)
    assert reason in str(refused.value)
