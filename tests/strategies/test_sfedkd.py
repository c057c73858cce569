"""SFedKD: who teaches whom by hand, both divergences in closed form, and what travels with the model passed on."""

import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch
from torch.nn.functional import kl_div, log_softmax

from polyclinic.common.config import TrainingSection
from polyclinic.common.contract import LabelContract
from polyclinic.common.errors import BadInput, WireError
from polyclinic.common.models.network import build_network
from polyclinic.common.models.state import read_model_state
from polyclinic.common.models.zoo.spec import ModelSpec, Task
from polyclinic.common.wire.records import NO_ARRAYS, ModelGroups, RollCallAnswer
from polyclinic.strategies.local.losses import partial_loss
from polyclinic.strategies.local.objective import ClientContext, LabelledExamples
from polyclinic.strategies.local.training import MiniBatch
from polyclinic.strategies.methods.base import RoundContext
from polyclinic.strategies.methods.scaffold import flatten_groups
from polyclinic.strategies.methods.sfedkd import (
    TEACHER_WEIGHTS,
    TEACHERS,
    SFedKD,
    SFedKDSite,
    choose_teachers,
    compute_class_distributions,
    compute_multi_class_divergences,
    compute_multi_label_divergences,
    compute_teacher_weights,
    make_teachers,
)
from polyclinic.strategies.registry import build_experiment_strategy, build_strategy
from tests.client.rounds import plan, private_plan
from tests.federations import federation, overheard

NAN = float("nan")

# ---------------------------------------------------------------------- who teaches whom

CONTRACT = LabelContract(
    ("a", "b", "c"), MappingProxyType({"east": ("a", "b"), "north": ("b", "c"), "west": ("a", "c")})
)


def answer(site: str, names: tuple[str, ...], positives: tuple[int, ...]) -> RollCallAnswer:
    negatives = tuple(20 - count for count in positives)
    return RollCallAnswer("run", site, names, names, 20, 5, 9, "layout", "1", positives=positives, negatives=negatives)


def make_context(**statistics: np.ndarray) -> RoundContext:
    answers = {
        "east": answer("east", ("a", "b"), (6, 2)),
        "north": answer("north", ("b", "c"), (5, 5)),
        "west": RollCallAnswer("run", "west", ("a", "c"), ("a", "c"), 20, 5, 9, "layout", "1"),  # keeps its counts
    }
    return RoundContext("multi_label", CONTRACT, answers, statistics, 2)


def test_a_site_is_known_by_its_shares_of_positives_and_without_counts_by_its_classes() -> None:
    shares = {site: row.tolist() for site, row in compute_class_distributions(make_context()).items()}
    assert shares == {"east": [0.75, 0.25, 0.0], "north": [0.0, 0.5, 0.5], "west": [0.5, 0.0, 0.5]}


def test_teachers_are_chosen_by_what_they_add_and_a_redundant_one_is_left_out() -> None:
    shares = {"a": np.array([0.9, 0.1, 0.0]), "b": np.array([0.8, 0.2, 0.0]), "c": np.array([0.0, 0.0, 1.0])}
    # Each alone covers 1, so a by name; then c adds 1 and b 0.1; b is last.
    assert choose_teachers(shares, 9) == ["a", "c", "b"]
    assert choose_teachers(shares, 2) == ["a", "c"]
    assert choose_teachers({"x": shares["a"], "y": shares["a"].copy()}, 2) == ["x"]


def test_like_data_weigh_in_target_knowledge_and_unlike_data_in_the_rest_by_hand() -> None:
    shares = compute_class_distributions(make_context())
    # Distances from east: to itself 0; to north (0.75 + 0.25 + 0.5) / 2 = 0.75; to west (0.25 + 0.25 + 0.5) / 2 = 0.5.
    weights = compute_teacher_weights(shares["east"], [shares[site] for site in ("east", "north", "west")])
    np.testing.assert_allclose(weights[:, 0], np.array([1.0, 0.25, 0.5]) / 1.75, rtol=1e-6)
    np.testing.assert_allclose(weights[:, 1], np.array([0.0, 0.75, 0.5]) / 1.25, rtol=1e-6)
    # One teacher, from the same data: nothing to weigh by.
    np.testing.assert_allclose(compute_teacher_weights(shares["east"], [shares["east"]]), [[1.0, 1.0]])


# ---------------------------------------------------------------------- divergences


def logit(probability: float) -> float:
    return math.log(probability / (1 - probability))


def test_present_entries_are_the_target_and_all_others_the_rest_by_hand() -> None:
    # At temperature 2: KL(3/4 || 1/2) where a is present; KL(1/4 || 1/2), as much, where b is unknown; c is equal.
    teacher = torch.tensor([[2 * logit(0.75), 2 * logit(0.25), 0.6]])
    student = torch.tensor([[0.0, 0.0, 0.6]])
    labels = torch.tensor([[1.0, NAN, 0.0]])
    each = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    target, rest = compute_multi_label_divergences(student, teacher, labels, 2.0)
    assert float(target) == pytest.approx(4 * each / 3, rel=1e-5)
    assert float(rest) == pytest.approx(4 * each / 3, rel=1e-5)
    target, rest = compute_multi_label_divergences(student, teacher, torch.full((1, 3), NAN), 2.0)
    assert float(target) == 0.0
    assert float(rest) == pytest.approx(8 * each / 3, rel=1e-5)


def test_both_parts_make_up_plain_distillation_as_in_dkds_equation() -> None:
    # KD = TCKD + (1 - p_t of the teacher) NCKD for each image (DKD, eq. 6).
    generator = torch.Generator().manual_seed(4)
    student, teacher = (3 * torch.randn(1, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    labels = torch.tensor([[0.0, 0.0, 1.0, 0.0, 0.0]], dtype=torch.float64)
    temperature = 1.5
    target, others = compute_multi_class_divergences(student, teacher, labels, temperature)
    own, theirs = (log_softmax(logits / temperature, dim=1) for logits in (student, teacher))
    whole = kl_div(own, theirs, log_target=True, reduction="batchmean") * temperature**2
    share = 1 - float(theirs[0, 2].exp())
    assert float(target) + share * float(others) == pytest.approx(float(whole), rel=1e-12)
    assert float(target) > 0.01
    assert float(others) > 0.01


def test_an_image_of_unknown_class_teaches_nothing_and_spoils_no_gradient() -> None:
    labels = torch.tensor([[0.0, 1.0, 0.0], [NAN, NAN, NAN]])
    student = torch.tensor([[1.0, 2.0, 0.5], [0.3, -1.0, 4.0]], requires_grad=True)
    teacher = torch.tensor([[0.0, 1.0, -0.5], [2.0, 2.0, 2.0]])
    alone = compute_multi_class_divergences(student[:1], teacher[:1], labels[:1], 1.0)
    both = compute_multi_class_divergences(student, teacher, labels, 1.0)
    assert [part.item() for part in both] == [part.item() for part in alone]
    sum(both).backward()
    assert student.grad.isfinite().all()
    assert not student.grad[1].any()
    nothing = compute_multi_class_divergences(student, teacher, torch.full((2, 3), NAN), 1.0)
    assert [part.item() for part in nothing] == [0.0, 0.0]


# ---------------------------------------------------------------------- what travels, and what is minimised

SPEC = ModelSpec(architecture="tiny_cnn", channels=1, image_size=16)
IMAGES = torch.randint(0, 256, (4, 1, 16, 16), generator=torch.Generator().manual_seed(2), dtype=torch.uint8)
LABELS = torch.tensor([[1.0, NAN], [0.0, NAN], [1.0, NAN], [0.0, NAN]])
ANNOTATED = torch.tensor([True, False])


def test_a_site_minimises_its_labels_loss_plus_the_weighted_parts_of_each_teacher() -> None:
    network, *others = (build_network(SPEC, ("a", "b"), seed).eval() for seed in (3, 4, 5))
    flat = np.stack([flatten_groups(ModelGroups.from_model(read_model_state(other))) for other in others])
    statistics = {TEACHERS: flat, TEACHER_WEIGHTS: np.array([[0.2, 0.7], [0.8, 0.3]], np.float32)}
    context = ClientContext(
        network, LabelledExamples(IMAGES, LABELS, ANNOTATED), statistics, NO_ARRAYS, 2, TrainingSection()
    )
    objective = SFedKDSite({"weight": 0.5}).make_local_round(context).objective
    batch = MiniBatch(torch.arange(4), IMAGES, LABELS, ANNOTATED, None, nullcontext(), torch.Generator())
    with torch.no_grad():
        logits, *opinions = (model(IMAGES.float()) for model in (network, *others))
        parts = [compute_multi_label_divergences(logits, opinion, LABELS, 2.0) for opinion in opinions]
        expected = float(partial_loss(logits, LABELS, ANNOTATED))
        expected += 0.5 * float(0.2 * parts[0][0] + 0.7 * parts[0][1] + 0.8 * parts[1][0] + 0.3 * parts[1][1])
        assert float(objective(network, batch)) == pytest.approx(expected, rel=1e-5)


def test_the_models_of_the_chosen_stops_teach_in_the_next_round() -> None:
    models = {
        site: read_model_state(build_network(SPEC, ("a", "b", "c"), seed)) for seed, site in enumerate(CONTRACT.sites)
    }
    method, context = SFedKD({"teachers": 2}), make_context()
    assert method.statistics_for(context)("east") == {}
    stored = method.aggregate_statistics(replace(context, site_models=models), {})
    assert list(stored) == ["east", "north"]  # 1, then 1 + 0.25 + 0.5 against 1 + 0.5 by west
    sent = method.statistics_for(make_context(**stored))("west")
    for row, site in enumerate(("east", "north")):
        np.testing.assert_array_equal(sent[TEACHERS][row], flatten_groups(ModelGroups.from_model(models[site])))
    assert sent[TEACHER_WEIGHTS].shape == (2, 2)


def test_a_site_that_does_not_count_teaches_nobody() -> None:
    stored = {site: np.full(4, seed, np.float32) for seed, site in enumerate(("east", "north"))}
    context = make_context(**stored)
    fewer = replace(context, answers={site: context.answers[site] for site in ("east", "west")})
    assert SFedKD().statistics_for(fewer)("west")[TEACHERS].tolist() == [[0.0] * 4]


def test_teachers_travel_from_the_second_round_on_and_each_round_has_an_order_of_its_own(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patched:
        traffic = overheard(patched)
        federation(tmp_path, "run.method=sfedkd", "partition.shared=2", "method.teachers=2", "run.rounds=3")
    counts = [(request.round, len(request.statistics.get(TEACHERS, ()))) for request in traffic.requests]
    assert counts == [(1, 0)] * 3 + [(2, 2)] * 3 + [(3, 2)] * 3
    replies = [reply.site for reply in traffic.replies]
    assert len({tuple(replies[begin : begin + 3]) for begin in (0, 3, 6)}) > 1


@pytest.mark.parametrize(
    ("privacy", "why"),
    [
        ({"secure_aggregation": True}, "the model is passed on from site to site"),
        ({"level": "sample", "noise_multiplier": 1.0}, "minimises more than each image's own loss"),
    ],
)
def test_masks_and_noise_in_each_step_are_refused(privacy: dict[str, object], why: str) -> None:
    with pytest.raises(BadInput, match=why):
        build_experiment_strategy(private_plan(plan("sfedkd"), **privacy))


@pytest.mark.parametrize(
    ("parameters", "task", "why"),
    [
        ({"trunk": "fedbn"}, "multi_label", "the whole network is passed on"),
        ({}, "segmentation", "tells an image's own class from all others"),
    ],
)
def test_what_makes_no_sense_is_refused(parameters: dict[str, str], task: Task, why: str) -> None:
    with pytest.raises(BadInput, match=why):
        build_strategy("sfedkd", parameters, task)


def test_a_teacher_of_another_network_is_refused() -> None:
    network = build_network(SPEC, ("a", "b"), 3)
    statistics = {TEACHERS: np.zeros((1, 3), np.float32), TEACHER_WEIGHTS: np.ones((1, 2), np.float32)}
    with pytest.raises(WireError, match=r"teacher has shape \(3,\)"):
        make_teachers(network, statistics)
