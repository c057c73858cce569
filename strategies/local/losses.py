"""Losses over labels of which some are unknown, for multi-label and multi-class tasks; used in local training.

Shapes: ``logits (batch, rows)`` for the site's head rows; ``labels (batch, rows)`` with 1, 0, or NaN for unknown;
``annotated (rows,)``, True for classes that the site annotates. In a multi-class task an image's class has the label 1.

The plain losses come first. ``[training]`` can choose the others, but only for training: validation uses the plain
loss, which is comparable between sites, rounds and runs.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, logsigmoid

from polyclinic.common import plugins
from polyclinic.common.config import STEP_NOISE_LEVELS, TrainingSection
from polyclinic.common.errors import BadInput, Fault
from polyclinic.common.models.zoo.spec import Task, is_segmentation
from polyclinic.common.plugins import PLUGIN_PREFIX, load_plugin_entry_point

Missing = Literal["masked", "negative"]
"""How the loss treats classes that a site does not annotate: omitted (``masked``), or absent (``negative``)."""


class LossFunction(Protocol):
    """A function that returns a scalar loss from logits, labels and the mask of annotated rows."""

    def __call__(self, logits: Tensor, labels: Tensor, annotated: Tensor) -> Tensor: ...


def partial_loss(logits: Tensor, labels: Tensor, annotated: Tensor, positive_weight: Tensor | None = None) -> Tensor:
    """Return the binary cross-entropy, averaged over the known entries (docs/papers.md#surgical-loss).

    An entry is one class of one image; it is known if its label is not NaN. A batch without any known entry gives 0 and
    no gradient.

    Args:
        positive_weight: Weight of the positives of each class, ``(rows,)``; None weighs all by 1.
    """
    is_known = ~labels.isnan()
    present = labels.nan_to_num()
    entries = binary_cross_entropy_with_logits(logits, present, reduction="none", pos_weight=positive_weight)
    return torch.where(is_known, entries, 0.0).sum() / is_known.sum().clamp(min=1)


def fill_missing_labels(labels: Tensor, annotated: Tensor, missing: Missing) -> Tensor:
    """Return the labels; if ``missing`` is ``negative``, the classes not annotated have the label 0.

    Args:
        labels: ``(batch, rows)``, or of each pixel ``(batch, rows, *spatial)``.
    """
    if missing == "masked":
        return labels
    return torch.where(annotated.reshape(-1, *[1] * (labels.ndim - 2)), labels, 0.0)


def compute_positive_weights(labels: Tensor) -> Tensor:
    """Return ``known labels / positives`` of each class, ``(rows,)``; 1 for a class without positives.

    FedMLP's authors weigh positives this way in all their baselines (docs/papers.md#fedmlp-baselines).

    Args:
        labels: All labels of a site, ``(n, rows)``, NaN for unknown.
    """
    is_known = (~labels.isnan()).sum(dim=0)
    positives = (labels == 1).sum(dim=0)
    return torch.where(positives > 0, is_known / positives.clamp(min=1), 1.0)


def missing_as_negative_loss(logits: Tensor, labels: Tensor, annotated: Tensor) -> Tensor:
    """Return the binary cross-entropy; classes that the site does not annotate count as negative.

    An unknown label of a class that the site does annotate stays unknown.
    """
    return partial_loss(logits, fill_missing_labels(labels, annotated, "negative"), annotated)


def softmax_loss_over_all_classes(logits: Tensor, labels: Tensor, annotated: Tensor) -> Tensor:
    """Return the mean cross-entropy over the images whose class is known, with a softmax over all classes."""
    return mean_over_mask(mask_images_of_known_class(labels), cross_entropy_per_image(logits, labels))


def softmax_loss_over_known_classes(logits: Tensor, labels: Tensor, annotated: Tensor) -> Tensor:
    """Return the mean cross-entropy over images of known class; the softmax omits classes with unknown label."""
    return softmax_loss_over_all_classes(mask_unknown_logits(logits, labels), labels, annotated)


def mask_unknown_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the logits with minus infinity for unknown labels; an image without any known label is unchanged."""
    unknown = labels.isnan()
    return logits.masked_fill(unknown & ~unknown.all(dim=1, keepdim=True), -torch.inf)


def cross_entropy_per_image(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of every image, ``(batch,)``; the value of an image of unknown class is meaningless."""
    return cross_entropy(logits, labels.nan_to_num().argmax(dim=1), reduction="none")


def mask_images_of_known_class(labels: Tensor) -> Tensor:
    """Return a mask of the images whose class is known, bool ``(batch,)``."""
    return (labels == 1).any(dim=1)


def mean_over_mask(chosen: Tensor, values: Tensor) -> Tensor:
    """Return the mean of the values that a mask selects; 0 without gradient if the mask selects none."""
    return torch.where(chosen, values, 0.0).sum() / chosen.sum().clamp(min=1)


class BatchWeight(Protocol):
    """A function that returns how much a batch counts in the mean over several batches, as a float32 scalar.

    It is the number by which the loss of the batch was divided.
    """

    def __call__(self, labels: Tensor, annotated: Tensor) -> Tensor: ...


def count_known_labels(labels: Tensor, annotated: Tensor) -> Tensor:
    """Return the number of known labels, by which :func:`partial_loss` divides."""
    return (~labels.isnan()).sum().float()


PLAIN_LOSSES: Mapping[tuple[Task, Missing], LossFunction] = {
    ("multi_label", "masked"): partial_loss,
    ("multi_label", "negative"): missing_as_negative_loss,
    ("multi_class", "masked"): softmax_loss_over_known_classes,
    ("multi_class", "negative"): softmax_loss_over_all_classes,
}
"""The plain loss by task and by the treatment of classes that the site does not annotate."""


def binary_loss_of_known_labels(logits: Tensor, labels: Tensor, annotated: Tensor) -> Tensor:
    """Return :func:`partial_loss` of labels that are all known, to the same bits in fewer steps."""
    entries = binary_cross_entropy_with_logits(logits, labels, reduction="none")
    return entries.sum() / entries.numel()


def softmax_loss_of_known_labels(logits: Tensor, labels: Tensor, annotated: Tensor) -> Tensor:
    """Return the mean cross-entropy of images whose labels are all known, to the same bits in fewer steps."""
    losses = cross_entropy(logits, labels.argmax(dim=1), reduction="none")
    return losses.sum() / len(losses)


LOSSES_OF_KNOWN_LABELS: tuple[tuple[LossFunction, LossFunction], ...] = (
    (partial_loss, binary_loss_of_known_labels),
    (missing_as_negative_loss, binary_loss_of_known_labels),
    (softmax_loss_over_known_classes, softmax_loss_of_known_labels),
    (softmax_loss_over_all_classes, softmax_loss_of_known_labels),
)
"""Each plain loss, with the loss that has the same value and gradient if all labels are known."""


def make_training_loss(
    spec: TrainingSection, plain: LossFunction, task: Task, missing: Missing, labels: Tensor
) -> LossFunction:
    """Return the loss that a site minimises: the one chosen in ``[training]``, or the method's own.

    Args:
        plain: The method's own loss.
        missing: How the loss treats classes that the site does not annotate.
        labels: Labels of the site's whole training part, ``(n, rows)``, NaN for unknown; for ``class_weights``.

    Raises:
        BadInput: If a chosen plug-in is not installed. The returned loss raises it if a plug-in returns no scalar.
    """
    if spec.loss == "plain" and not spec.class_weights:
        return plain
    if spec.loss.startswith(PLUGIN_PREFIX):
        loss = adapt_plugin_loss(load_plugin_entry_point(plugins.LOSSES, spec.loss.removeprefix(PLUGIN_PREFIX)))

        def compute_plugin_loss(logits: Tensor, labels: Tensor, annotated: Tensor) -> Tensor:
            targets = fill_missing_labels(labels, annotated, missing)
            value = loss(logits, targets, annotated)
            if not isinstance(value, Tensor) or value.ndim != 0:
                kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                raise BadInput([Fault("training.loss", f'"{spec.loss}" returned {kind}, not a scalar tensor.')])
            # A mean over the known labels is 0 / 0 where no label of a batch is known. Such a batch teaches nothing.
            if not value.isfinite() and bool(targets.isnan().all()):
                return (logits * 0.0).sum()
            return value

        return compute_plugin_loss
    if task == "multi_class":
        weights = compute_class_weights(labels) if spec.class_weights else None
        return partial(_compute_multi_class_loss, spec, missing, weights)
    positive_weight = compute_positive_weights(labels) if spec.class_weights else None
    return partial(_compute_multi_label_loss, spec, missing, positive_weight)


def adapt_plugin_loss(loss: Callable[..., Any]) -> LossFunction:
    """Return a plug-in's loss as a function of three arguments.

    A loss of two arguments, such as ``torch.nn.BCEWithLogitsLoss()``, gets only the entries of known classes.

    The third argument is given to a function that requires three, or calls its third ``annotated``.
    """
    try:
        function = loss.forward if isinstance(loss, nn.Module) else loss
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # no function, which its first call reports; or one of C
        return loss
    positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    takes_any = any(each.kind == each.VAR_POSITIONAL for each in parameters)
    third = positional[2] if len(positional) > 2 else None
    if takes_any or len(positional) < 2 or (third and (third.default is third.empty or third.name == "annotated")):
        return loss

    def compute_loss_of_known_classes(logits: Tensor, labels: Tensor, annotated: Tensor) -> Any:
        is_unknown = labels.isnan().all(dim=0).reshape(len(annotated), -1).all(1)
        known = annotated | ~is_unknown
        return loss(logits, labels) if bool(known.all()) else loss(logits[:, known], labels[:, known])

    return compute_loss_of_known_classes


def make_batch_weight(spec: TrainingSection, task: Task, missing: Missing, labels: Tensor) -> BatchWeight:
    """Return the function that weighs batches whose gradients are added up, to go with :func:`make_training_loss`.

    A multi-label loss is a mean over the known labels, and a multi-class loss a mean over the images of known class,
    weighted by the class weights. The same is assumed of the loss of a plug-in or of a method.

    Args:
        missing: How the loss treats classes that the site does not annotate.
        labels: Labels of the site's whole training part, ``(n, rows)``, NaN for unknown; for ``class_weights``.
    """
    if task != "multi_class":
        return lambda labels, annotated: count_known_labels(fill_missing_labels(labels, annotated, missing), annotated)
    class_weights = compute_class_weights(labels) if spec.class_weights else None
    return lambda labels, annotated: _compute_image_weights(labels, class_weights).sum()


def find_loss_setting_faults(training: TrainingSection, task: Task, allows_other_loss: bool, level: str) -> list[Fault]:
    """Return faults if the chosen loss or class weights make no sense with this method, task or privacy level.

    Args:
        allows_other_loss: True if the method lets ``[training]`` choose the loss.
        level: Level of differential privacy.
    """
    named = {"loss": training.loss != "plain", "class_weights": training.class_weights}
    chosen = [f"training.{key}" for key, is_set in named.items() if is_set]
    faults = []
    if not allows_other_loss:
        problem = "makes no sense here: the method has a loss of its own."
        faults += [Fault(key, problem, "Leave it out.") for key in chosen]
    if level in STEP_NOISE_LEVELS and training.loss != "plain":
        problem = f'with privacy.level = "{level}" each image\'s plain loss is minimised.'
        faults.append(Fault("training.loss", problem, "Leave it out."))
    if level != "none" and training.class_weights:
        problem = "counts a site's images, and no noise covers that."
        faults.append(Fault("training.class_weights", problem, "Leave it out."))
    if is_segmentation(task):
        ours = training.loss in ("focal", "asymmetric")
        named = {"loss": ours, "class_weights": training.class_weights}
        problem = "weighs labels of images; segmentation has Dice and cross-entropy over pixels."
        faults += [Fault(f"training.{key}", problem, "Leave it out.") for key, is_set in named.items() if is_set]
    if training.loss == "asymmetric" and task == "multi_class":
        problem = "the asymmetric loss asks of each class by itself whether it is there; here classes exclude others."
        faults.append(Fault("training.loss", problem, 'Use "focal", or model.task = "multi_label".'))
    if training.loss.startswith(PLUGIN_PREFIX) and training.class_weights:
        problem = "a loss of a plug-in gets no weights: it would be left out in silence."
        faults.append(Fault("training.class_weights", problem, "Let the plug-in weigh, or leave it out."))
    return faults


def compute_class_weights(labels: Tensor) -> Tensor:
    """Return balanced weights ``(rows,)``: images / (classes present * images of the class); 1 for an absent class.

    The weights of a site's images then sum to the number of images.

    Args:
        labels: All labels of a site, ``(n, rows)``, 1 for an image's class.
    """
    images = (labels == 1).sum(dim=0)
    present = (images > 0).sum().clamp(min=1)
    return torch.where(images > 0, images.sum() / (present * images.clamp(min=1)), 1.0)


def _compute_multi_label_loss(
    spec: TrainingSection,
    missing: Missing,
    positive_weight: Tensor | None,
    logits: Tensor,
    labels: Tensor,
    annotated: Tensor,
) -> Tensor:
    """Return the mean loss over the known labels of a multi-label task; 0 without gradient if no label is known."""
    targets = fill_missing_labels(labels, annotated, missing)
    is_known = ~targets.isnan()
    present = targets.nan_to_num()
    if spec.loss == "asymmetric":
        # Separate exponents for positives and negatives, whose probability is lowered by a margin (Ridnik et al., ICCV
        # 2021, eq. 7).
        of_positives, of_negatives = spec.asymmetric_gammas
        p = torch.sigmoid(logits)
        lowered = (p - spec.asymmetric_margin).clamp(min=0)
        positive = -((1 - p) ** of_positives) * logsigmoid(logits)
        negative = -(lowered**of_negatives) * torch.log1p(-lowered.clamp(max=1 - 1e-6))
        entries = torch.where(present > 0, positive, negative)
    else:
        entries = binary_cross_entropy_with_logits(logits, present, reduction="none")
        if spec.loss == "focal":  # (1 - p_t) ** gamma, Lin et al., ICCV 2017, eq. 4
            entries = entries * (1 - torch.exp(-entries)) ** spec.focal_gamma
    if positive_weight is not None:
        entries = entries * torch.where(present > 0, positive_weight, 1.0)
    return torch.where(is_known, entries, 0.0).sum() / is_known.sum().clamp(min=1)


def _compute_multi_class_loss(
    spec: TrainingSection, missing: Missing, weights: Tensor | None, logits: Tensor, labels: Tensor, annotated: Tensor
) -> Tensor:
    """Return the weighted mean of cross-entropy or focal loss over the images of known class."""
    losses = cross_entropy_per_image(mask_unknown_logits(logits, labels) if missing == "masked" else logits, labels)
    if spec.loss == "focal":
        losses = losses * (1 - torch.exp(-losses)) ** spec.focal_gamma
    weighs = _compute_image_weights(labels, weights)
    is_known = mask_images_of_known_class(labels)
    return torch.where(is_known, losses * weighs, 0.0).sum() / weighs.sum().clamp(min=torch.finfo(torch.float32).tiny)


def _compute_image_weights(labels: Tensor, class_weights: Tensor | None) -> Tensor:
    """Return the weight of each image by its class, float32 ``(batch,)``; 0 for an image of unknown class."""
    is_known = mask_images_of_known_class(labels)
    if class_weights is None:
        return is_known.float()
    return torch.where(is_known, class_weights[labels.nan_to_num().argmax(dim=1)], 0.0)
