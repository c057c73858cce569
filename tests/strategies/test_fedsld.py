"""FedSLD: the paper's formulas, its control, and what becomes of counts that a hospital keeps to itself."""

from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polyclinic.common.contract import LabelContract
from polyclinic.common.errors import BadInput
from polyclinic.common.models.zoo.spec import Task
from polyclinic.common.wire.records import NO_ARRAYS, UNKNOWN_COUNT, RollCallAnswer
from polyclinic.strategies.local.losses import partial_loss, softmax_loss_over_all_classes
from polyclinic.strategies.methods.base import RoundContext
from polyclinic.strategies.methods.fedsld import (
    collect_label_counts,
    compute_batch_class_weights,
    compute_batch_image_weights,
    compute_expected_label_weight,
    compute_label_entry_weights,
    compute_label_prior,
    compute_mean_label_weight,
    compute_site_label_prior,
    compute_weighted_binary_loss,
    compute_weighted_cross_entropy,
    find_uncounted_label_faults,
)
from tests.federations import federation, json_lines, read_vectors

VECTOR = read_vectors("fedsld.json")
needs_vectors = pytest.mark.skipif(not VECTOR, reason="../shared/vectors/fedsld.json is absent")
UNEVEN = torch.tensor([0.5, 0.3, 0.2])


def one_hot(classes: list[int], count: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(classes), count).float()


@needs_vectors
def test_the_prior_and_the_weights_of_a_batch_of_one_class_are_the_vectors() -> None:
    vector = VECTOR["prior"]
    counts = np.array(vector["counts_client_by_class"], float)
    images = np.repeat(counts.sum(axis=1, keepdims=True), counts.shape[1], axis=1)
    np.testing.assert_allclose(compute_label_prior(counts, images), vector["expected_prior"], rtol=1e-5, atol=1e-7)
    vector = VECTOR["one_class_batch"]
    weights = compute_batch_image_weights(one_hot(vector["y"], 4), torch.tensor(vector["prior"]))
    np.testing.assert_allclose(weights, [vector["expected_weight_each"]] * 3, rtol=1e-5)


@needs_vectors
def test_weights_losses_and_gradient_are_the_vectors() -> None:
    vector = VECTOR["loss"]
    logits = torch.tensor(vector["logits"], dtype=torch.float64, requires_grad=True)
    prior = torch.tensor(vector["prior"], dtype=torch.float64)
    labels = one_hot(vector["y"], len(prior)).double()
    np.testing.assert_allclose(
        compute_batch_class_weights(labels, prior), vector["class_weight_pb_over_prior"], rtol=1e-5
    )
    np.testing.assert_allclose(compute_batch_image_weights(labels, prior), vector["sample_weight"], rtol=1e-5)
    losses = {
        r: compute_weighted_cross_entropy(logits, labels, prior, r) for r in ("sum", "sum_over_batch", "weighted_mean")
    }
    values = {reduction: float(loss.detach()) for reduction, loss in losses.items()}
    assert values["sum"] == pytest.approx(vector["expected_sum_eq3"], rel=1e-5)
    assert values["sum_over_batch"] == pytest.approx(vector["expected_mean_over_B"], rel=1e-5)
    assert values["weighted_mean"] == pytest.approx(vector["expected_torch_weighted_mean"], rel=1e-5)
    losses["sum"].backward()
    np.testing.assert_allclose(logits.grad, vector["grad_logits_sum_eq3"], rtol=1e-4, atol=1e-6)
    assert float(compute_batch_image_weights(labels, prior).mean()) == pytest.approx(
        vector["chi2_factor_sum_pb2_over_prior"]
    )
    shares = np.array(vector["p_b"])
    assert compute_expected_label_weight(shares, prior.numpy()) == pytest.approx(
        vector["chi2_factor_sum_pb2_over_prior"]
    )


def test_a_batch_that_is_like_the_federation_weighs_every_image_one() -> None:
    labels = one_hot([0] * 5 + [1] * 3 + [2] * 2, 3)
    torch.testing.assert_close(compute_batch_image_weights(labels, UNEVEN), torch.ones(10))
    logits = torch.randn(10, 3, generator=torch.Generator().manual_seed(1))
    plain = softmax_loss_over_all_classes(logits, labels, torch.ones(3, dtype=torch.bool))
    torch.testing.assert_close(compute_weighted_cross_entropy(logits, labels, UNEVEN, "sum_over_batch"), plain)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40))
def test_the_mean_weight_is_never_below_one(classes: list[int]) -> None:
    assert float(compute_batch_image_weights(one_hot(classes, 3), UNEVEN).mean()) >= 1 - 1e-5


def test_an_image_of_unknown_class_weighs_nothing_and_is_not_counted() -> None:
    labels = torch.cat([one_hot([0, 0, 1, 2], 3), torch.full((2, 3), torch.nan)])
    torch.testing.assert_close(
        compute_batch_image_weights(labels, UNEVEN), torch.tensor([1.0, 1.0, 0.25 / 0.3, 0.25 / 0.2, 0, 0])
    )
    logits = torch.zeros(6, 3)
    expected = (2 * 1 + 0.25 / 0.3 + 0.25 / 0.2) / 4 * np.log(3)
    assert float(compute_weighted_cross_entropy(logits, labels, UNEVEN, "sum_over_batch")) == pytest.approx(
        expected, rel=1e-5
    )


def test_in_a_multi_label_task_presence_and_absence_are_weighed_class_by_class() -> None:
    labels = torch.tensor([[1.0, torch.nan], [0.0, 1.0], [0.0, torch.nan], [0.0, torch.nan]])
    # class 0: 1 of 4 present against a prior of 0.1, 3 of 4 absent against 0.9; class 1: all that is known is present
    weights = compute_label_entry_weights(labels, torch.tensor([0.1, 0.5]))
    torch.testing.assert_close(weights, torch.tensor([[2.5, 0], [0.75 / 0.9, 2], [0.75 / 0.9, 0], [0.75 / 0.9, 0]]))


def test_a_multi_label_batch_that_is_like_the_federation_has_the_plain_loss() -> None:
    labels = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, torch.nan]])
    logits = torch.tensor([[0.5, -1.0], [2.0, 0.25], [-0.75, 3.0], [1.0, 0.0]])
    prior = torch.tensor([0.25, 2 / 3])
    plain = partial_loss(logits, labels, torch.ones(2, dtype=torch.bool))
    torch.testing.assert_close(compute_weighted_binary_loss(logits, labels, prior, "sum_over_batch"), plain)


def context(task: Task, **sites: tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...]]) -> RoundContext:
    """Each site's classes, and its counts of positives and negatives."""
    answers = {
        site: RollCallAnswer("run", site, names, names, 90, 0, 9, "layout", "1", positives, negatives)
        for site, (names, positives, negatives) in sites.items()
    }
    names = tuple(sorted({name for own, _, _ in sites.values() for name in own}))
    contract = LabelContract(names, MappingProxyType({site: own for site, (own, _, _) in sorted(sites.items())}))
    return RoundContext(task, contract, answers, NO_ARRAYS, 1)


def prior_for(counted: RoundContext, site: str) -> np.ndarray:
    return compute_site_label_prior(counted, compute_label_prior(*collect_label_counts(counted)), site)


def test_an_unknown_count_is_left_out_and_is_not_zero() -> None:
    both = ("a", "b")
    north, south = (both, (3, UNKNOWN_COUNT), (7, UNKNOWN_COUNT)), (both, (1, 12), (29, 18))
    counted = context("multi_label", north=north, south=south, west=(both, (), ()))
    np.testing.assert_allclose(prior_for(counted, "west"), [(3 + 1) / 40, 12 / 30])


def test_the_prior_of_a_site_runs_over_its_own_classes() -> None:
    counted = context("multi_class", north=(("a", "b"), (30, 10), (10, 30)), south=(("b", "c"), (20, 40), (40, 20)))
    # a: 30 of 40, b: 30 of 100; together 1.05
    np.testing.assert_allclose(prior_for(counted, "north"), [0.75 / 1.05, 0.3 / 1.05, 0], rtol=1e-6)


def test_a_class_that_nobody_counts_or_that_is_kept_where_others_have_none_stops_the_run_with_what_to_do() -> None:
    north = (("a", "b"), (3, UNKNOWN_COUNT), (7, UNKNOWN_COUNT))
    (fault,) = find_uncounted_label_faults(context("multi_label", north=north, south=(("b",), (), ())))
    assert '"b"' in fault.problem
    assert "label_counts = true under [policy]" in fault.remedy
    assert "smallest_count" in fault.remedy
    # else the images of the site that keeps its counts would weigh nothing
    counted = context("multi_label", north=(("a",), (0,), (10,)), south=(("a",), (UNKNOWN_COUNT,), (UNKNOWN_COUNT,)))
    assert [fault.where for fault in find_uncounted_label_faults(counted)] == ["run.method"]


def test_in_a_multi_class_task_the_counts_that_a_site_keeps_share_what_is_left_of_its_images() -> None:
    names, own = ("a", "b", "c"), UNKNOWN_COUNT
    north, south = (names, (60, own, own), (30, own, own)), (names, (0, 4, 6), (10, 6, 4))
    counted = context("multi_class", north=north, south=south)
    # north: 60 of 90 counted, 15 each left
    np.testing.assert_allclose(prior_for(counted, "north"), [60 / 100, 19 / 100, 21 / 100], rtol=1e-6)
    assert find_uncounted_label_faults(counted) == []


def test_the_controls_factor_is_the_mean_over_sites_by_images_without_those_that_have_no_label() -> None:
    counted = context("multi_class", north=(("a", "b"), (30, 0), (0, 30)), south=(("a", "b"), (5, 5), (5, 5)))
    # prior 35/40, 5/40; north 1 / (35/40), south .25 / (35/40) + .25 / (5/40)
    expected = (30 * (1 / 0.875) + 10 * (0.25 / 0.875 + 0.25 / 0.125)) / 40
    assert compute_mean_label_weight(counted) == pytest.approx(expected, rel=1e-6)
    without = context("multi_label", north=(("a",), (3,), (7,)), south=(("a",), (0,), (0,)))
    assert compute_mean_label_weight(without) == pytest.approx(1.0)


SKEWED = (
    'partition={kind = "dirichlet", alpha = 0.5, sites = 3, seed = 4}', "model.task=multi_class",
    "training.optimizer=sgd", "training.lr=0.05", "evaluation.test_each_round=true",
)  # fmt: skip


@pytest.mark.parametrize(
    "method",
    ["fedsld", *(pytest.param(name, marks=pytest.mark.long) for name in ("fedavg", "fedavg_scaled", "fedprox"))],
)
def test_every_site_is_tested_on_its_own_images_every_round_and_no_round_is_chosen(method: str, tmp_path: Path) -> None:
    summary = federation(tmp_path, f"run.method={method}", *SKEWED)
    accuracy = summary["client_accuracy"]
    assert set(accuracy["per_site"]) == set(summary["sites"])
    assert 1 <= accuracy["best_mean_round"] <= 2
    assert 0 < accuracy["best_test_accuracy"] <= 1
    assert summary["test"]["multi_class"]["images"] > 0
    assert summary["best_round"] is None
    means = [line["test_accuracy"]["mean"] for line in json_lines(tmp_path / "run" / "rounds.jsonl")]
    assert max(means) == pytest.approx(accuracy["best_mean_client_test_accuracy"])


def test_each_reduction_and_each_scale_makes_another_model(tmp_path: Path) -> None:
    variants = [f"run.method=fedsld method.reduction={name}" for name in ("sum_over_batch", "sum", "weighted_mean")]
    variants += [f"run.method=fedavg_scaled method.scale={name}" for name in ("federation", "batch")]
    models = {federation(tmp_path, *SKEWED, *choices.split(), out=choices)["model_sha256"] for choices in variants}
    assert len(models) == 5


def test_where_every_batch_is_like_the_federation_fedsld_is_fedavg(tmp_path: Path) -> None:
    # One site, and one batch a round: its shares are the prior, and every weight is one.
    alone = (
        'partition={kind = "class_subsets", sites = 1, shared = 10}', "model.task=multi_class",
        "training.optimizer=sgd", "training.batch_size=5000", "run.rounds=1",
    )  # fmt: skip
    fedsld, fedavg = (federation(tmp_path, f"run.method={name}", *alone, out=name) for name in ("fedsld", "fedavg"))
    for name, metrics in fedsld["test"]["per_class"].items():
        assert metrics["auroc"] == pytest.approx(fedavg["test"]["per_class"][name]["auroc"], abs=1e-3)


def test_counting_right_classes_needs_one_class_an_image_and_all_sites(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r'model\.task = "multi_class"'):
        federation(tmp_path, "evaluation.test_each_round=true")
    with pytest.raises(BadInput, match="sites_per_round"):
        federation(tmp_path, "run.method=fedsld", *SKEWED, "participation.sites_per_round=2")
