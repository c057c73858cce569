"""FedFixMatch: pseudo-labels and their loss by hand, and what is left of it where nothing is missing."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polyclinic.strategies.methods.fedfixmatch import assign_confident_pseudo_labels, compute_unlabelled_loss
from tests.federations import ALL_SHARED, federation

NAN = math.nan


def logits(probabilities: list[list[float]]) -> torch.Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).logit()


def test_each_class_is_sure_by_itself_of_being_there_and_of_not() -> None:
    labels = assign_confident_pseudo_labels(logits([[0.96, 0.94, 0.5], [0.04, 0.06, 0.999]]), 0.95)
    np.testing.assert_array_equal(labels, [[1, NAN, NAN], [0, NAN, 1]])


def test_the_loss_of_the_sure_entries_is_divided_by_all() -> None:
    # Present at .7, absent at .2, two not sure: (-ln .7 - ln .8) / 4
    strong, pseudo = logits([[0.7, 0.9], [0.2, 0.3]]), torch.tensor([[1, NAN], [0, NAN]], dtype=torch.float64)
    assert float(compute_unlabelled_loss(strong, pseudo)) == pytest.approx((-math.log(0.7) - math.log(0.8)) / 4)


def test_only_the_strong_view_learns_and_only_where_the_weak_one_is_sure() -> None:
    weak, strong = logits([[0.99, 0.6]]).requires_grad_(), logits([[0.3, 0.3]]).requires_grad_()
    compute_unlabelled_loss(strong, assign_confident_pseudo_labels(weak, 0.95)).backward()
    assert weak.grad is None
    # (p - 1) / 2 and nothing
    np.testing.assert_allclose(strong.grad, [[-0.35, 0]])


@given(st.integers(0, 2**32 - 1), st.floats(0.51, 0.98))
def test_more_confidence_labels_fewer_entries_and_changes_no_label(seed: int, confidence: float) -> None:
    weak = torch.from_numpy(np.random.default_rng(seed).normal(scale=4, size=(5, 3)))
    lax, strict = (
        assign_confident_pseudo_labels(weak, confidence),
        assign_confident_pseudo_labels(weak, confidence + 0.01),
    )
    sure = ~strict.isnan()
    assert torch.equal(strict[sure], lax[sure])
    assert int(sure.sum()) <= int((~lax.isnan()).sum())


def test_with_nothing_missing_it_is_fedavg_and_so_is_fedirm(tmp_path: Path) -> None:
    runs = {
        "fedavg": ("run.method=fedavg",),
        "plain": ("run.method=fedfixmatch", "method.balanced=false"),
        "plain fedirm": ("run.method=fedirm", "method.supervised_rounds=0", "method.balanced=false"),
        "balanced": ("run.method=fedfixmatch",),
        "balanced fedirm": ("run.method=fedirm",),
    }
    models = {name: federation(tmp_path, *run, ALL_SHARED, out=name)["model_sha256"] for name, run in runs.items()}
    assert models["plain"] == models["plain fedirm"] == models["fedavg"]
    assert models["balanced"] == models["balanced fedirm"] != models["plain"]
