"""ConDistFL for classification: the distance by hand, its weight over the rounds, and what it leaves alone."""

import contextlib
import math
from pathlib import Path

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from polyclinic.common.config import TrainingSection
from polyclinic.common.models.network import build_network
from polyclinic.common.models.zoo.spec import ModelSpec
from polyclinic.common.wire.records import NO_ARRAYS
from polyclinic.strategies.local.losses import partial_loss
from polyclinic.strategies.local.objective import ClientContext, LabelledExamples
from polyclinic.strategies.local.training import MiniBatch
from polyclinic.strategies.methods.condistfl import (
    ConDistFLSite,
    compute_distance_from_teacher,
    compute_distillation_weight,
)
from tests.federations import federation

SPEC = ModelSpec(architecture="tiny_cnn", channels=1, image_size=16)
NAN = float("nan")


def logit(probability: float) -> float:
    return math.log(probability / (1 - probability))


def test_the_distance_is_the_divergence_of_softened_probabilities_by_hand() -> None:
    # At temperature 2, twice the logit of 3/4 and of 1/2. KL(3/4 || 1/2) = 3/4 ln(3/2) + 1/4 ln(1/2); the other is 0.
    teacher = torch.tensor([[2 * logit(0.75), 1.0]])
    student = torch.tensor([[2 * logit(0.5), 1.0]], requires_grad=True)
    distance = compute_distance_from_teacher(student, teacher, 2.0)
    expected = (0.75 * math.log(1.5) + 0.25 * math.log(0.5)) / 2
    assert float(distance.detach()) == pytest.approx(expected, rel=1e-5)
    distance.backward()
    # (sigmoid(student / 2) - 3/4) / 2, over two entries.
    torch.testing.assert_close(student.grad, torch.tensor([[(0.5 - 0.75) / 2 / 2, 0.0]]))


def test_the_weight_grows_from_the_first_round_to_the_last_as_in_the_authors_code() -> None:
    # Theirs: 0.01 + 0.99 / (rounds - 1) * (round - 1).
    weights = [compute_distillation_weight(done, 0.01, 1.0, 4) for done in range(6)]
    assert weights == pytest.approx([0.01 + 0.99 / 4 * done for done in range(5)] + [1.0])
    assert compute_distillation_weight(0, 0.01, 1.0, 0) == 1.0


def value_after(change: torch.Tensor, annotated: list[bool], **parameters: float) -> tuple[float, torch.Tensor]:
    """The objective of round 1 where training has moved the head's biases, and the logits now."""
    network = build_network(SPEC, ("a", "b"), 3).eval()
    generator = torch.Generator().manual_seed(2)
    images = torch.randint(0, 256, (3, 1, 16, 16), generator=generator, dtype=torch.uint8)
    mask = torch.tensor(annotated)
    labels = torch.where(mask, torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]]), NAN)
    context = ClientContext(network, LabelledExamples(images, labels, mask), NO_ARRAYS, NO_ARRAYS, 1, TrainingSection())
    objective = ConDistFLSite(parameters).make_local_round(context).objective
    batch = MiniBatch(torch.arange(3), images, labels, mask, None, contextlib.nullcontext(), generator)
    with torch.no_grad():
        network.head.bias += change
        logits = network(images.float())
        own = partial_loss(logits, labels, mask)
        return float(objective(network, batch)) - float(own), logits


def test_only_classes_that_the_site_does_not_annotate_are_held_to_the_received_model() -> None:
    of_own, _ = value_after(torch.tensor([1.5, 0.0]), [True, False], first_weight=0.5)
    assert of_own == pytest.approx(0.0, abs=1e-6)
    of_other, now = value_after(torch.tensor([0.0, 1.5]), [True, False], first_weight=0.5)
    received = ((now[:, 1] - 1.5) / 2).sigmoid()
    entropy = binary_cross_entropy_with_logits((now[:, 1] - 1.5) / 2, received)
    expected = 0.5 * float(binary_cross_entropy_with_logits(now[:, 1] / 2, received) - entropy)
    assert of_other == pytest.approx(expected, rel=1e-3)
    assert expected > 0.01
    everything, _ = value_after(torch.tensor([1.0, 1.0]), [True, True], first_weight=0.5)
    assert everything == pytest.approx(0.0, abs=1e-6)


def test_without_weight_a_run_is_that_of_the_partial_loss(tmp_path: Path) -> None:
    off = ("method.first_weight=0", "method.last_weight=0")
    hashes = [
        federation(tmp_path, *choices, "partition.shared=2", out=str(number))["model_sha256"]
        for number, choices in enumerate([("run.method=condistfl", *off), ("run.method=partial_loss",)])
    ]
    with_weight = federation(tmp_path, "run.method=condistfl", "partition.shared=2", out="on")["model_sha256"]
    assert hashes[0] == hashes[1] != with_weight
