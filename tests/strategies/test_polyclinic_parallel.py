"""Our method for hospitals that train at the same time: its row by hand, its last rounds, each part."""

from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from polyclinic.common.config import TrainingSection
from polyclinic.common.errors import BadInput
from polyclinic.common.models.network import Head, build_network, compute_features_and_logits
from polyclinic.common.models.state import ModelState, read_model_state
from polyclinic.common.models.zoo.spec import ModelSpec
from polyclinic.common.wire.records import NO_ARRAYS
from polyclinic.strategies.aggregation.server_optimizer import Moments
from polyclinic.strategies.local.objective import ClientContext, LabelledExamples
from polyclinic.strategies.local.solved_rows import mix_with_solved_row, solve_row
from polyclinic.strategies.methods.polyclinic_parallel import (
    PolyclinicParallel,
    PolyclinicParallelSite,
)
from tests.federations import Traffic, experiment, federation, finished
from tests.strategies.leading import lead

RUN = ("run.method=polyclinic_parallel", "run.rounds=4", "partition.shared=1", "training.batch_size=64")
NO_MOMENTUM = 'method.server_optimizer={kind="momentum",beta1=0}'

# ---------------------------------------------------------------------- a solved row

FEATURES = torch.tensor([[2.0, 0.0], [4.0, 2.0], [-1.0, 3.0], [-1.0, -1.0]], dtype=torch.float64)
PRESENT = torch.tensor([True, True, False, False])


def test_a_solved_row_is_fishers_discriminant_by_hand() -> None:
    # Means (3, 1) and (-1, 1). Deviations (-1, -1), (1, 1), (0, 2), (0, -2): S = [[2, 2], [2, 10]] / 4, trace 3.
    # With a shrinkage of 1, 3 / 2 is added: [[2, 1/2], [1/2, 4]] w = (4, 0), whose determinant is 31 / 4.
    row = solve_row(FEATURES, PRESENT, shrinkage=1.0)
    assert row.tolist() == pytest.approx([4 * 4 / 7.75, -4 * 0.5 / 7.75])


def test_features_without_spread_give_the_difference_of_the_means() -> None:
    features = torch.tensor([[1.0, 2.0], [1.0, 2.0], [0.0, 5.0]], dtype=torch.float64)
    assert solve_row(features, torch.tensor([True, True, False]), 0.1).tolist() == [1.0, -3.0]


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_the_mixture_has_the_trained_rows_mean_logit_and_only_solved_rows_keep_its_spread(share: float) -> None:
    weight, bias = torch.tensor([-1.0, 3.0], dtype=torch.float64), torch.tensor(0.5, dtype=torch.float64)
    trained = FEATURES @ weight + bias
    new_weight, new_bias = mix_with_solved_row(weight, bias, FEATURES, PRESENT, share, 1.0)
    mixed = FEATURES @ new_weight + new_bias
    solved = FEATURES @ solve_row(FEATURES, PRESENT, 1.0)
    standardised = (solved - solved.mean()) / solved.std()
    expected = (1 - share) * trained + share * (trained.mean() + trained.std() * standardised)
    torch.testing.assert_close(mixed, expected)
    assert float(mixed.mean()) == pytest.approx(float(trained.mean()))


# ---------------------------------------------------------------------- a site

SPEC = ModelSpec(architecture="tiny_cnn", channels=1, image_size=16)
NAN = float("nan")


def solve_at_site(labels: torch.Tensor, server_round: int) -> tuple[ModelState, ModelState, float]:
    """The model before and after the local round is made, and the factor of the learning rate; two rounds train."""
    network = build_network(SPEC, ("a", "b"), seed=3)
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (len(labels), 1, 16, 16), generator=generator, dtype=torch.uint8)
    examples = LabelledExamples(images, labels, torch.tensor([True, True]))
    before = read_model_state(network)
    context = ClientContext(network, examples, NO_ARRAYS, NO_ARRAYS, server_round, TrainingSection())
    local = PolyclinicParallelSite({"training_rounds": 2}).make_local_round(context)
    return before, read_model_state(network), local.lr_factor


def test_rows_are_solved_after_the_rounds_of_training_and_those_of_few_images_stay() -> None:
    # Class a: 6 images with it and 6 without; class b: 4 with it, 7 without, one unknown.
    labels = torch.tensor([[1.0, 1.0]] * 4 + [[1.0, NAN]] + [[1.0, 0.0]] + [[0.0, 0.0]] * 6)
    before, trained, factor = solve_at_site(labels, 2)
    assert (trained.head.weight.tolist(), factor) == (before.head.weight.tolist(), 1.0)
    before, solved, factor = solve_at_site(labels, 3)
    assert factor == 0
    assert solved.trunk.tolist() == before.trunk.tolist()
    assert solved.norm.tolist() == before.norm.tolist()
    assert not np.allclose(solved.head.weight[0], before.head.weight[0])
    assert solved.head.weight[1].tolist() == before.head.weight[1].tolist()


def test_a_site_solves_on_the_images_whose_label_is_known() -> None:
    labels = torch.tensor([[1.0, 0.0]] * 6 + [[0.0, 0.0]] * 6 + [[NAN, 0.0]] * 3)
    _, solved, _ = solve_at_site(labels, 3)
    network = build_network(SPEC, ("a", "b"), seed=3)
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (15, 1, 16, 16), generator=generator, dtype=torch.uint8)
    features = compute_features_and_logits(network, images)[0][:12].double()
    weight, bias = network.head.weight[0].detach().double(), network.head.bias[0].detach().double()
    expected, of_bias = mix_with_solved_row(weight, bias, features, labels[:12, 0] == 1, 0.5, 0.1)
    np.testing.assert_allclose(solved.head.weight[0], expected.numpy(), rtol=1e-5, atol=1e-6)
    assert solved.head.bias[0] == pytest.approx(float(of_bias), rel=1e-5)


# ---------------------------------------------------------------------- the coordinator's rule


def model_of(value: float) -> ModelState:
    head = Head(("a",), np.full((1, 2), 3 * value, np.float32), np.full(1, -value, np.float32))
    return ModelState(np.full(3, value, np.float32), np.full(2, 2 * value, np.float32), head)


def test_training_ends_with_the_mean_of_the_late_models_and_without_momentum() -> None:
    method = PolyclinicParallel({"training_rounds": 4, "mean_rounds": 3})
    moments: Moments = MappingProxyType({"trunk.first": np.array([7.0])})
    for server_round, value in ((1, 8.0), (2, 1.0), (3, 2.0)):
        model, moments = method.finalize(server_round, model_of(value), moments)
        assert model.trunk.tolist() == [value] * 3
        assert "trunk.first" in moments
    model, moments = method.finalize(4, model_of(6.0), moments)
    assert model.trunk.tolist() == pytest.approx([3.0] * 3)  # (1 + 2 + 6) / 3
    assert (model.norm.tolist(), model.head.bias.tolist()) == (pytest.approx([6.0] * 2), pytest.approx([-3.0]))
    assert not moments
    solved, moments = method.finalize(5, model_of(9.0), moments)
    assert solved.trunk.tolist() == [9.0] * 3
    assert not moments


# ---------------------------------------------------------------------- federations


def test_without_its_parts_it_is_surgical_aggregation_bit_for_bit() -> None:
    off = (NO_MOMENTUM, "method.mean_rounds=1", "method.solved_share=0")
    plain = finished("run.method=surgical", *RUN[1:], "run.rounds=3")[1]["model_sha256"]
    assert finished(*RUN, *off)[1]["model_sha256"] == plain


@pytest.mark.parametrize("part", [NO_MOMENTUM, "method.mean_rounds=1", "method.solved_share=0", "method.shrinkage=1"])
def test_each_part_ends_in_another_model(part: str) -> None:
    every = (*RUN, "method.mean_rounds=2", 'evaluation.checkpoint="last"')
    assert finished(*every)[1]["model_sha256"] != finished(*every, part)[1]["model_sha256"]


def test_the_last_round_moves_the_rows_alone(tmp_path: Path, traffic: Traffic) -> None:
    stages = ("method.training_rounds=3", "method.mean_rounds=2")
    ran = lead(experiment(tmp_path, *RUN, *stages), tmp_path / "run", 4)
    trained, solved = ran.states[2].model, ran.states[3].model
    assert solved.trunk.tobytes() == trained.trunk.tobytes()
    assert solved.norm.tobytes() == trained.norm.tobytes()
    assert not np.allclose(solved.head.weight, trained.head.weight)
    last = [reply for reply in traffic.replies if reply.round == 4]
    assert len(last) == 3
    for reply in last:
        assert reply.update.trunk is not None
        assert reply.update.norm is not None
        assert reply.update.head is not None
        assert not reply.update.trunk.any()
        assert not reply.update.norm.any()
        assert reply.update.head.weight.any()
        assert reply.train_loss is not None
        assert reply.train_loss > 0


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ('method.server_optimizer={kind="adam"}', "method.server_optimizer: makes no sense in polyclinic_parallel"),
        ('method.server_optimizer={kind="momentum",lr=2.0}', "solved rows would be taken for gradients"),
        ("run.rounds=1", "the head rows are solved in round 2"),
        ("method.training_rounds=4", "the head rows are solved in round 5"),
        ("model.task=multi_class", "polyclinic_parallel asks of each class by itself"),
    ],
)
def test_what_would_end_in_another_model_is_refused(setting: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput) as refused:
        federation(tmp_path, *RUN, setting)
    assert says in str(refused.value)


def test_masked_updates_end_in_the_same_model_to_within_their_rounding() -> None:
    # One round of training: over several, rounding makes other models in any method.
    run = (*RUN, "run.rounds=2", "partition.shared=10", 'evaluation.checkpoint="last"')
    masked, plain = (
        load_file(finished(*run, level)[0] / "model.safetensors")
        for level in ("privacy.secure_aggregation=true", 'participation.clip="off"')
    )
    assert masked.keys() == plain.keys()
    for name, values in plain.items():
        np.testing.assert_allclose(masked[name], values, rtol=0, atol=1e-5, err_msg=name)


def test_noise_in_each_step_is_refused_because_rows_are_solved_without_it(tmp_path: Path) -> None:
    noise = ("privacy.level=sample", "privacy.noise_multiplier=1.0", "privacy.max_grad_norm=1.0", 'model.norm="group"')
    with pytest.raises(BadInput, match="polyclinic_parallel minimises more than each image's own loss"):
        federation(tmp_path, *RUN, *noise, 'evaluation.checkpoint="last"')
