"""FedLSM: what the authors' code computes on the same inputs, and what differs by hand."""

import copy
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from polyclinic.common.config import TrainingSection
from polyclinic.common.errors import BadInput
from polyclinic.common.models.network import Head, build_network
from polyclinic.common.models.state import ModelState
from polyclinic.common.models.zoo.spec import ModelSpec
from polyclinic.common.wire.records import NO_ARRAYS, ModelGroups
from polyclinic.strategies.engine.aggregator import merge_updates
from polyclinic.strategies.local.objective import ClientContext, LabelledExamples
from polyclinic.strategies.methods.fedlsm import (
    POSITIVE_SHARE,
    FedLSM,
    FedLSMParameters,
    FedLSMRound,
    MixedPairs,
    SureImages,
    TeacherLoss,
    assign_pseudo_labels,
    choose_pools,
    compute_row_weights,
    compute_uncertainty,
    draw_mixing_share,
)
from polyclinic.strategies.registry import build_experiment_strategy
from tests.client.rounds import plan, private_plan
from tests.federations import federation, json_lines, needs_of
from tests.strategies.states import make_reply

TRACE = json.loads((Path(__file__).parent / "traces" / "fedlsm.json").read_text(encoding="utf-8"))
"""See ``about`` in the file."""
NAN = float("nan")


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# ---------------------------------------------------------------------- the authors' steps


class TraceNetwork(nn.Sequential):
    """The network of the trace; ``load_state_dict`` fills it."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4))
        self.double().load_state_dict({name: tensor(values) for name, values in TRACE["begin"].items()})


@dataclass
class TraceBatch:
    """A batch whose network computes in float64, as the authors' code did for the trace."""

    annotated: Tensor = field(default_factory=lambda: torch.tensor(TRACE["annotated"]))

    def logits(self, model: nn.Module, view: Tensor) -> Tensor:
        return model(view)


def repeat_trace() -> tuple[TeacherLoss, nn.Module, list[float]]:
    """Train on the trace's batches; return the loss with its teacher, the student, and the values of the loss."""
    student, batch, losses = TraceNetwork(), TraceBatch(), list[float]()
    parameters = FedLSMParameters(absent_below=0.1, unsure_absent_below=0.2, teacher_decay=0.9)
    local = TeacherLoss(parameters, copy.deepcopy(student).eval(), 4)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.2)
    student.train()
    for step, share in zip(TRACE["steps"], TRACE["by_entry"]["shares"], strict=True):
        drawn = {name: tensor(values) for name, values in step.items()}
        # A class that the site does not annotate has no label here, and the label 0 there.
        labels = {name: torch.where(batch.annotated, drawn[name], NAN) for name in drawn if name.endswith("labels")}
        sure = SureImages(drawn["weak"], drawn["strong"], labels["labels"])
        pairs = MixedPairs(drawn["unsure"], drawn["surest"], labels["unsure_labels"], labels["surest_labels"], share)
        loss = local.compute_loss(student, batch, sure, pairs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    local.follow_student(student)
    return local, student, losses


def test_losses_teacher_and_student_are_those_of_the_authors_code_to_the_last_digit() -> None:
    local, student, losses = repeat_trace()
    expected = TRACE["by_entry"]
    assert losses == pytest.approx(expected["losses"], rel=1e-12)
    for network, name in ((student, "model"), (local.teacher, "teacher")):
        for key, values in network.state_dict().items():
            torch.testing.assert_close(values.double(), tensor(expected[name][key]), rtol=1e-10, atol=1e-12, msg=key)
    images = sum(len(step["labels"]) for step in TRACE["steps"])
    assert local.compute_positive_shares() * images == pytest.approx(expected["class_nums"])
    assert min(expected["class_nums"][row] for row in (1, 3)) > 0  # pseudo-labels, in the classes that are missing


def test_as_published_the_mask_of_sure_entries_leaves_nothing_out_which_is_not_ours() -> None:
    # Their mean over all entries comes before the mask; see the head of its module.
    assert repeat_trace()[2][0] != pytest.approx(TRACE["as_published"]["losses"][0], rel=1e-3)


def test_the_images_are_ranked_as_the_authors_rank_them() -> None:
    trace, missing = TRACE["uncertainty"], ~torch.tensor(TRACE["annotated"])
    uncertainty = compute_uncertainty(tensor(trace["logits"]), missing)
    unsure, surest = choose_pools(uncertainty, len(trace["unsure"]) / 20, len(trace["surest"]) / 20)
    assert (unsure.tolist(), surest.tolist()) == (trace["unsure"], trace["surest"])


def test_head_rows_are_averaged_as_by_the_authors_and_the_trunk_by_images() -> None:
    trace = TRACE["aggregation"]
    zero = ModelState(np.zeros(9, np.float32), np.zeros(0, np.float32), head := make_head(np.zeros((4, 4))))
    replies = {}
    for number, (model, positives, images) in enumerate(
        zip(trace["models"], trace["positives"], trace["images"], strict=True)
    ):
        flat = np.concatenate([np.ravel(model[f"trunk.{key}"]) for key in ("weight", "bias")]).astype(np.float32)
        rows = make_head(np.c_[model["classifier.weight"], model["classifier.bias"]])
        shares = np.array(positives) / images
        replies[f"site-{number}"] = make_reply(
            f"site-{number}", ModelGroups(flat, None, rows), images, **{POSITIVE_SHARE: shares}
        )
    assert head.features == 3
    result = merge_updates(FedLSM(), None, zero, replies).means.add_means_to_model()
    average = trace["average"]
    trunk = np.concatenate([np.ravel(average[f"trunk.{key}"]) for key in ("weight", "bias")])
    np.testing.assert_allclose(result.trunk, trunk, rtol=1e-5)
    np.testing.assert_allclose(result.head.weight, average["classifier.weight"], rtol=1e-5)
    np.testing.assert_allclose(result.head.bias, average["classifier.bias"], rtol=1e-5)


def make_head(rows: Any) -> Head:
    """A head of four classes; the last column is the biases."""
    values = np.asarray(rows, np.float32)
    return Head(("a", "b", "c", "d"), values[:, :-1], values[:, -1])


# ---------------------------------------------------------------------- by hand


def test_a_row_weighs_positives_and_without_any_the_sites_weights() -> None:
    shares = [np.array([0.5, 0.0, NAN, 2.0]), np.array([0.1, 0.0, 0.25, 0.5])]
    first, second = compute_row_weights(shares, [10.0, 20.0])
    assert first.tolist() == [
        5.0,
        10.0,
        0.0,
        10.0,
    ]  # no more positives than images, and none where the site says nothing
    assert second.tolist() == pytest.approx([2.0, 20.0, 5.0, 10.0])


def test_a_missing_class_needs_a_sure_teacher() -> None:
    teacher = torch.tensor([[-9.0, 9.0, 0.0], [9.0, -9.0, 1.8]])  # the sigmoid of 1.8 is 0.858
    expected = torch.tensor([[0.0, 1.0, NAN], [1.0, 0.0, 1.0]])
    torch.testing.assert_close(assign_pseudo_labels(teacher, 0.85, 0.01), expected, equal_nan=True)
    torch.testing.assert_close(
        assign_pseudo_labels(teacher[1], 0.86, 0.0), torch.tensor([1.0, NAN, NAN]), equal_nan=True
    )


def test_pools_are_shares_of_the_images_and_do_not_meet() -> None:
    uncertainty = torch.tensor([0.3, 0.1, 0.1, 0.5, 0.2])
    unsure, surest = choose_pools(uncertainty, 0.4, 0.6)
    assert (unsure.tolist(), surest.tolist()) == ([3, 0], [1, 2, 4])
    assert [len(pool) for pool in choose_pools(uncertainty, 0.1, 0.01)] == [0, 1]
    with pytest.raises(ValidationError, match="add up to more than 1"):
        FedLSMParameters(uncertain_share=0.6, confident_share=0.5)


def test_the_share_of_a_mixture_is_drawn_anew_from_the_beta_distribution() -> None:
    generator = torch.Generator().manual_seed(1)
    shares = np.array([draw_mixing_share(0.2, generator) for _ in range(4000)])
    # Beta(a, a) has the mean 1/2 and the variance 1 / (4 (2 a + 1)).
    assert shares.mean() == pytest.approx(0.5, abs=0.03)
    assert shares.var() == pytest.approx(1 / (4 * 1.4), abs=0.01)


SPEC = ModelSpec(architecture="tiny_cnn", channels=1, image_size=16)
IMAGES = torch.randint(0, 256, (40, 1, 16, 16), generator=torch.Generator().manual_seed(2), dtype=torch.uint8)


def begin(annotated: list[bool], **parameters: Any) -> FedLSMRound:
    mask = torch.tensor(annotated)
    labels = torch.where(mask, torch.zeros(40, 2), NAN)
    examples = LabelledExamples(IMAGES, labels, mask)
    network = build_network(SPEC, ("a", "b"), 3)
    context = ClientContext(network, examples, NO_ARRAYS, NO_ARRAYS, 1, TrainingSection())
    return FedLSMRound(context, FedLSMParameters(**parameters))


def test_a_site_that_annotates_every_class_has_no_unsure_images() -> None:
    assert len(begin([True, True]).unsure) == 0
    assert len(begin([True, False]).unsure) == 2


def test_rows_of_a_run_follow_the_positives(tmp_path: Path) -> None:
    run = ("run.method=fedlsm", *needs_of("fedlsm"))
    ours = federation(tmp_path, *run, out="ours")["model_sha256"]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(FedLSM, "site_weights", lambda self, context, replies, weights: weights)
        plain = federation(tmp_path, *run, out="plain")["model_sha256"]
    assert ours != plain


@pytest.mark.parametrize(
    ("privacy", "why"),
    [
        ({"secure_aggregation": True}, "it weighs each update by what that update is"),
        ({"level": "sample", "noise_multiplier": 1.0}, "minimises more than each image's own loss"),
        ({"level": "patient", "noise_multiplier": 1.0}, "minimises more than each image's own loss"),
    ],
)
def test_masks_and_noise_in_each_step_are_refused(privacy: dict[str, object], why: str) -> None:
    with pytest.raises(BadInput, match=why):
        build_experiment_strategy(private_plan(plan("fedlsm"), **privacy))


def test_with_noise_on_updates_and_shares_every_site_still_counts(tmp_path: Path) -> None:
    noise = ("privacy.level=update", "privacy.noise_multiplier=1", "evaluation.checkpoint=last", "model.norm=group")
    federation(tmp_path, "run.method=fedlsm", *needs_of("fedlsm"), *noise)
    (rounds,) = tmp_path.rglob("rounds.jsonl")
    assert [len(line["sites"]) for line in json_lines(rounds)] == [3, 3]
