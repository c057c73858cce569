"""Losses and metrics as people have them: called in their own form, with values by hand, or refused before round 1."""

from collections.abc import Callable
from functools import partial
from typing import Any

import monai.losses
import numpy as np
import pytest
import torch
import torchvision.ops
from numpy.typing import NDArray
from sklearn import metrics
from torch import Tensor, nn
from torch.nn import functional

from polyclinic.common.config import Experiment, TrainingSection
from polyclinic.common.errors import BadInput
from polyclinic.common.metrics.auroc import compute_plugin_metric, load_plugin_metrics
from polyclinic.common.plugins import LOSSES, METRICS, PLUGIN_PREFIX, register_local_plugin
from polyclinic.strategies.local.losses import PLAIN_LOSSES, make_training_loss
from polyclinic.strategies.local.plugin_calls import SiteLabels, describe_softmax_like_loss, find_plugin_faults

LOGITS = torch.tensor([[1.0, -2.0, 0.5], [-0.3, 0.8, 2.0], [0.1, -1.5, -0.7], [2.2, 0.4, -0.2]])
LABELS = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0], [0.0, 0.0, 1.0], [1.0, 1.0, 0.0]])
BCE = functional.binary_cross_entropy_with_logits
EVERYWHERE = SiteLabels(fewest_classes=3)
SOME_CLASSES = SiteLabels(fewest_classes=1)
OWN_ROWS = SiteLabels(fewest_classes=1, has_rows_of_all_classes=False)
SOME_LABELS = SiteLabels(fewest_classes=3, has_unknown=True)


def experiment_with(loss: Any) -> Experiment:
    run = {"method": "partial_loss", "rounds": 1}
    model = {"architecture": "tiny_cnn", "channels": 1, "image_size": 16}
    training = {"loss": PLUGIN_PREFIX + register_local_plugin(LOSSES, loss)}
    return Experiment.model_validate({"run": run, "model": model, "training": training})


def faults(loss: Any, site_labels: SiteLabels) -> list[str]:
    return list(map(str, find_plugin_faults(experiment_with(loss), 3, "masked", site_labels)))


def value(loss: Any, labels: Tensor, annotated: Tensor) -> float:
    spec = TrainingSection.model_validate({"loss": PLUGIN_PREFIX + register_local_plugin(LOSSES, loss)})
    function = make_training_loss(spec, PLAIN_LOSSES["multi_label", "masked"], "multi_label", "masked", labels)
    logits = LOGITS.clone().requires_grad_()
    result = function(logits, labels, annotated)
    result.backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert not logits.grad[:, ~annotated].any()
    return float(result.detach())


def masked_bce(logits: Tensor, labels: Tensor, annotated: Tensor) -> Tensor:
    known = ~labels.isnan()
    return BCE(logits[known], labels[known])


def nan_to_num(logits: Tensor, labels: Tensor, annotated: Tensor) -> Tensor:
    entries = BCE(logits, labels.nan_to_num(), reduction="none")
    return (entries * ~labels.isnan()).sum() / (~labels.isnan()).sum()


def focal(logits: Tensor, labels: Tensor) -> Tensor:
    entries = BCE(logits, labels, reduction="none")
    return ((1 - torch.exp(-entries)) ** 2 * entries).mean()


class Smooth(nn.Module):
    """A loss with a parameter of its own and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("smoothing", torch.tensor(0.1))
        self.calls = 0

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        self.calls += 1
        smoothing: Any = self.smoothing
        return BCE(logits, labels * (1 - smoothing) + smoothing / 2)


def entries_of(labels: Tensor) -> Tensor:
    return BCE(LOGITS, labels, reduction="none")


# Each returns the value by hand for logits, labels of all classes.
TWO_ARGUMENTS: dict[str, tuple[Any, Callable[[Tensor], Tensor]]] = {
    "BCEWithLogitsLoss": (nn.BCEWithLogitsLoss(), lambda entries: entries.mean()),
    "BCEWithLogitsLoss, sum": (nn.BCEWithLogitsLoss(reduction="sum"), lambda entries: entries.sum()),
    "the function": (BCE, lambda entries: entries.mean()),
    "a lambda": (lambda logits, labels: BCE(logits, labels), lambda entries: entries.mean()),
    "a partial": (partial(BCE, reduction="sum"), lambda entries: entries.sum()),
    "with names of scikit-learn": (lambda input, target: BCE(input, target), lambda entries: entries.mean()),
    "a module of one's own": (focal, lambda entries: ((1 - torch.exp(-entries)) ** 2 * entries).mean()),
    "MONAI FocalLoss": (
        monai.losses.FocalLoss(gamma=2.0),
        lambda entries: ((1 - torch.exp(-entries)) ** 2 * entries).mean(),
    ),
    "torchvision focal": (
        partial(torchvision.ops.sigmoid_focal_loss, alpha=-1, gamma=2, reduction="mean"),
        lambda entries: ((1 - torch.exp(-entries)) ** 2 * entries).mean(),
    ),
}


@pytest.mark.parametrize(("loss", "by_hand"), TWO_ARGUMENTS.values(), ids=TWO_ARGUMENTS)
def test_losses_of_two_arguments_get_the_classes_of_the_site(loss: Any, by_hand: Callable[[Tensor], Tensor]) -> None:
    for site_labels in (EVERYWHERE, SOME_CLASSES, OWN_ROWS):
        assert faults(loss, site_labels) == []
    everything = torch.ones(3, dtype=torch.bool)
    assert value(loss, LABELS, everything) == pytest.approx(float(by_hand(entries_of(LABELS))), rel=1e-5)
    two = torch.tensor([True, False, True])
    labels = torch.where(two, LABELS, torch.nan)
    assert value(loss, labels, two) == pytest.approx(float(by_hand(entries_of(LABELS)[:, two])), rel=1e-5)


def test_a_loss_with_state_is_called_as_it_is() -> None:
    assert faults(Smooth(), EVERYWHERE) == []
    assert value(Smooth(), LABELS, torch.ones(3, dtype=torch.bool)) == pytest.approx(
        float(BCE(LOGITS, LABELS * 0.9 + 0.05))
    )


THREE_ARGUMENTS: dict[str, Any] = {
    "the known alone": masked_bce,
    "NaN as 0 and a mask": nan_to_num,
    "any arguments": lambda *arguments: masked_bce(*arguments),
    "a default": lambda logits, labels, annotated=None: masked_bce(logits, labels, annotated),
}


@pytest.mark.parametrize("loss", THREE_ARGUMENTS.values(), ids=THREE_ARGUMENTS)
def test_losses_of_three_arguments(loss: Any) -> None:
    for site_labels in (EVERYWHERE, SOME_CLASSES, OWN_ROWS, SOME_LABELS):
        assert faults(loss, site_labels) == []
    labels = LABELS.clone()
    labels[0, 0] = labels[2, 1] = torch.nan
    known = ~labels.isnan()
    expected = float(entries_of(LABELS)[known].mean())
    assert value(loss, labels, torch.ones(3, dtype=torch.bool)) == pytest.approx(expected)


REFUSED: dict[str, tuple[Any, SiteLabels, str]] = {
    # wrong model: NaN, or a part of the labels
    "BCE where labels are unknown": (nn.BCEWithLogitsLoss(), SOME_LABELS, r"known = ~labels.isnan\(\)"),
    "three arguments without a mask": (lambda x, y, annotated: BCE(x, y), SOME_CLASSES, "unknown"),
    "a weight of all classes at a site of one": (
        nn.BCEWithLogitsLoss(pos_weight=torch.ones(3)),
        OWN_ROWS,
        "training.class_weights",
    ),
    # no training
    "reduction none": (nn.BCEWithLogitsLoss(reduction="none"), EVERYWHERE, "shape"),
    "a float": (lambda x, y: BCE(x, y).item(), EVERYWHERE, "float"),
    "detached": (lambda x, y: BCE(x, y).detach(), EVERYWHERE, "nothing is trained"),
    "a constant": (lambda x, y: torch.zeros(()), EVERYWHERE, "nothing is trained"),
    "nothing": (lambda x, y: None, EVERYWHERE, "NoneType"),
    # wrong model: a softmax is trained, and sigmoids are read
    "CrossEntropyLoss": (nn.CrossEntropyLoss(), EVERYWHERE, "multi_class"),
    "CrossEntropyLoss where sites have own rows": (nn.CrossEntropyLoss(), OWN_ROWS, "multi_class"),
    "its function": (functional.cross_entropy, EVERYWHERE, "multi_class"),
    "its function with an argument": (partial(functional.cross_entropy, label_smoothing=0.1), EVERYWHERE, "sigmoid"),
    "MONAI FocalLoss with softmax": (monai.losses.FocalLoss(use_softmax=True), EVERYWHERE, "multi_class"),
    "infinite": (lambda x, y: BCE(x, y) / 0, EVERYWHERE, "returns inf"),
    "BCELoss of logits": (nn.BCELoss(), EVERYWHERE, "RuntimeError"),
    "one argument": (lambda x: x.mean(), EVERYWHERE, "TypeError"),
    "four arguments": (lambda a, b, c, d: a.mean(), EVERYWHERE, "TypeError"),
    "an exception": (lambda x, y: x.missing, EVERYWHERE, "AttributeError"),
    "a class, not its object": (nn.BCEWithLogitsLoss, EVERYWHERE, "loss=BCEWithLogitsLoss()"),
}


@pytest.mark.parametrize(("loss", "site_labels", "problem"), REFUSED.values(), ids=REFUSED)
def test_losses_that_would_train_nothing_or_end_the_run_are_refused(
    loss: Any, site_labels: SiteLabels, problem: str
) -> None:
    (text,) = faults(loss, site_labels)
    assert any(word in text for word in problem.replace("\\", "").split("|")), text


def test_a_loss_that_fails_where_a_site_has_fewer_classes_is_refused_by_what_it_gets() -> None:
    def needs_all(logits: Tensor, labels: Tensor, annotated: Tensor) -> Tensor:
        if not annotated.all() or logits.shape[1] < 3:
            raise ValueError("all classes are needed")
        return masked_bce(logits, labels, annotated)

    assert faults(needs_all, EVERYWHERE) == []
    for site_labels, advice in ((SOME_CLASSES, False), (OWN_ROWS, True)):
        (text,) = faults(needs_all, site_labels)
        assert "fails at a site that annotates 1 of 3 classes: ValueError: all classes are needed." in text
        assert ("training.class_weights" in text) is advice


def note_on(loss: Any) -> str:
    return describe_softmax_like_loss(experiment_with(loss), 3, "masked")


def rank(logits: Tensor, labels: Tensor) -> Tensor:
    """Compare the scores of the images, class by class, as a surrogate of the AUROC does."""
    pairs = logits[:, None] - logits[None]
    return (functional.softplus(-pairs) * (labels[:, None] > labels[None])).mean()


def test_a_loss_of_differences_between_classes_is_named_and_no_other() -> None:
    assert "softmax" in note_on(lambda scores, labels: functional.cross_entropy(scores, labels))
    assert "softmax" in note_on(lambda scores, labels: -(scores.log_softmax(1) * labels).mean())
    for loss, _ in TWO_ARGUMENTS.values():
        assert note_on(loss) == ""
    assert note_on(rank) == ""


def test_a_weight_of_all_classes_is_right_where_every_site_has_all() -> None:
    weight = torch.tensor([1.0, 2.0, 3.0])
    loss = nn.BCEWithLogitsLoss(pos_weight=weight)
    assert faults(loss, EVERYWHERE) == []
    expected = torch.where(LABELS == 1, weight, 1.0) * entries_of(LABELS)
    assert value(loss, LABELS, torch.ones(3, dtype=torch.bool)) == pytest.approx(float(expected.mean()))


# ---------------------------------------------------------------------- metrics

SCORES = np.array([0.1, 0.4, 0.35, 0.8, 0.65, 0.2])
TRUTH = np.array([0.0, 0.0, 1.0, 1.0, 1.0, 0.0])


def youden(scores: NDArray[Any], labels: NDArray[Any]) -> float:
    return float(((scores >= 0.5) & (labels == 1)).sum() / 3 - ((scores >= 0.5) & (labels == 0)).sum() / 3)


class Torchlike(nn.Module):
    """As a metric of TorchMetrics: tensors in, the labels whole numbers, a tensor out."""

    def forward(self, preds: Tensor, target: Tensor) -> Tensor:
        assert target.dtype == torch.int64
        return ((preds >= 0.5) == target.bool()).float().mean()


class Product:
    def __call__(self, scores: NDArray[Any], labels: NDArray[Any]) -> np.float32:
        return np.float32((scores * labels).sum())


def sensitivity(y_true: NDArray[Any], y_pred: NDArray[Any]) -> float:
    return float(((y_pred >= 0.5) & (y_true == 1)).sum() / (y_true == 1).sum())


METRIC_VALUES: dict[str, tuple[Any, float | None]] = {
    "roc_auc_score": (metrics.roc_auc_score, 8 / 9),
    "average_precision_score": (metrics.average_precision_score, (1 + 1 + 3 / 4) / 3),
    "brier_score_loss": (metrics.brier_score_loss, float(((SCORES - TRUTH) ** 2).mean())),
    "log_loss": (
        metrics.log_loss,
        float(-np.log(np.where(TRUTH == 1, SCORES, 1 - SCORES)).mean()),
    ),
    "a partial of scikit-learn's": (partial(metrics.roc_auc_score, max_fpr=None), 8 / 9),
    "scores and labels of scikit-learn": (lambda scores, labels: metrics.roc_auc_score(labels, scores), 8 / 9),
    "y_true of one's own": (sensitivity, 2 / 3),
    "scores and labels": (youden, 2 / 3),
    "an object": (Product(), float((SCORES * TRUTH).sum())),
    "a torch module": (Torchlike(), 5 / 6),
    "a tensor": (lambda scores, labels: torch.tensor(0.25), 0.25),
    "an int": (lambda scores, labels: 3, 3.0),
    "a bool": (lambda scores, labels: True, 1.0),
    "NaN": (lambda scores, labels: float("nan"), None),
    "None": (lambda scores, labels: None, None),
    "writes into its arguments": (lambda scores, labels: float(scores.sort() or labels.fill(0) or 0.5), 0.5),
}


def measured(metric: Any) -> float | None:
    name = PLUGIN_PREFIX + register_local_plugin(METRICS, metric)
    return compute_plugin_metric(name, load_plugin_metrics([name])[name], SCORES, TRUTH)


@pytest.mark.parametrize(("metric", "expected"), METRIC_VALUES.values(), ids=METRIC_VALUES)
def test_metrics(metric: Any, expected: float | None) -> None:
    assert measured(metric) == (None if expected is None else pytest.approx(expected))


NO_METRICS: dict[str, Any] = {
    "a dictionary": lambda scores, labels: {"auc": 0.5},
    "a word": lambda scores, labels: "good",
    "an array": lambda scores, labels: np.array([0.25]),
    "one for each image": lambda scores, labels: scores,
    "infinite": lambda scores, labels: float("inf"),
    "an exception": lambda scores, labels: scores.missing,
    "f1_score of probabilities": metrics.f1_score,
    "one argument": lambda scores: 0.5,
    "a name": "roc_auc_score",
}


@pytest.mark.parametrize("metric", NO_METRICS.values(), ids=NO_METRICS)
def test_metrics_without_a_number_are_refused(metric: Any) -> None:
    with pytest.raises(BadInput):
        measured(metric)
