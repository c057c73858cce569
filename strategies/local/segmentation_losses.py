"""Losses of segmentation in which classes that a site does not annotate are not taken for background.

Shapes: ``logits`` and ``labels (batch, rows, *spatial)``, labels 1, 0, or NaN for unknown; ``annotated (rows,)``.

Each loss is a cross-entropy, as a mean over pixels, plus a Dice loss, as a mean over classes. The Dice loss of a class
is computed over all pixels of a batch together, for an organ may be absent from a single slice.

The losses of ``exclusive_segmentation`` follow Shi, Xiao, Chen and Zhou, "Marginal loss and exclusion loss for
partially supervised multi-organ segmentation", Medical Image Analysis 2021. The background has no row: its logit is 0,
which gives the same probabilities as a row of its own, and no hospital owns it. Departures: the Dice loss leaves the
background out, as it is no class; where an image lacks single classes, they count as unknown in this image alone.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from polyclinic.common.models.network import decide_class_areas
from polyclinic.common.models.zoo.spec import Task
from polyclinic.strategies.local.losses import (
    LossFunction,
    Missing,
    fill_missing_labels,
    mean_over_mask,
    partial_loss,
)

DICE_SMOOTHING_PIXELS = 1.0
"""Pixels added to numerator and denominator of a Dice, which is then defined without labelled or predicted pixels."""


def dice_loss_of_known_pixels(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Return 1 minus the soft Dice, averaged over the classes with a known pixel; 0 without gradient if none has one.

    Args:
        probabilities: ``(batch, rows, *spatial)``.
    """
    is_known = ~labels.isnan()
    present = labels.nan_to_num()
    predicted = torch.where(is_known, probabilities, 0.0)
    return mean_over_mask(is_known.flatten(2).any(2).any(0), 1 - _compute_soft_dice(predicted, present))


def overlapping_loss(logits: Tensor, labels: Tensor, annotated: Tensor) -> Tensor:
    """Return the loss of classes that may overlap, over known pixels: binary cross-entropy plus Dice loss."""
    return partial_loss(logits, labels, annotated) + dice_loss_of_known_pixels(logits.sigmoid(), labels)


def overlapping_loss_over_all_classes(logits: Tensor, labels: Tensor, annotated: Tensor) -> Tensor:
    """Return :func:`overlapping_loss`; a class that the site does not annotate counts as absent from every pixel."""
    return overlapping_loss(logits, fill_missing_labels(labels, annotated, "negative"), annotated)


def marginal_loss(logits: Tensor, labels: Tensor, annotated: Tensor) -> Tensor:
    """Return the loss of exclusive classes in which unknown classes and the background are one (Shi et al.).

    The softmax is over the background, whose logit is 0, and all rows. A pixel that shows no known class has the
    probability of the background and of all unknown classes together. Images without any known class are left out.
    """
    background = logits.new_zeros(logits[:, :1].shape)
    unknown = labels.isnan()
    present = labels == 1
    whole = torch.cat([background, logits], 1)
    others = torch.cat([background, logits.masked_fill(~unknown, -torch.inf)], 1).logsumexp(1)  # (batch, *spatial)
    is_shown = present.any(1)
    # One row is left where a pixel shows a class; without any, the sum would be minus infinity and its gradient NaN.
    rows = torch.where(is_shown[:, None], present, True)
    shown = logits.masked_fill(~rows, -torch.inf).logsumexp(1)
    entropy = whole.logsumexp(1) - torch.where(is_shown, shown, others)
    has_label = (~unknown).any(1)
    cross_entropy = mean_over_mask(has_label, entropy)
    return cross_entropy + dice_loss_of_known_pixels(whole.softmax(1)[:, 1:], labels)


def exclusion_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return how much unknown classes are predicted at pixels of known classes, which exclude them (Shi et al.).

    For each unknown class it is the Dice between its probability p and the pixels e of known classes, plus the mean of
    ``log(p + 1)`` over these pixels. Both are 0 if no unknown class is predicted there.
    """
    background = logits.new_zeros(logits[:, :1].shape)
    probabilities = torch.cat([background, logits], 1).softmax(1)[:, 1:]
    unknown = labels.isnan()
    occupied = (labels == 1).any(1, keepdim=True) & unknown  # (batch, rows, *spatial)
    predicted = torch.where(unknown, probabilities, 0.0)
    axes = [0, *range(2, labels.ndim)]
    common = torch.where(occupied, predicted, 0.0).sum(axes)
    pixels = occupied.sum(axes)
    dice = 2 * common / (predicted.sum(axes) + pixels + DICE_SMOOTHING_PIXELS)
    entropy = torch.where(occupied, torch.log1p(predicted), 0.0).sum(axes) / pixels.clamp(min=1)
    return mean_over_mask(unknown.flatten(2).any(2).any(0), dice + entropy)


def marginal_and_exclusion_loss(logits: Tensor, labels: Tensor, annotated: Tensor) -> Tensor:
    """Return the sum of :func:`marginal_loss` and :func:`exclusion_loss`."""
    return marginal_loss(logits, labels, annotated) + exclusion_loss(logits, labels)


def exclusive_loss_over_all_classes(logits: Tensor, labels: Tensor, annotated: Tensor) -> Tensor:
    """Return the loss of exclusive classes in which a class that the site does not annotate is background."""
    return marginal_loss(logits, fill_missing_labels(labels, annotated, "negative"), annotated)


def conditional_distillation_loss(
    student: Tensor, teacher: Tensor, labels: Tensor, annotated: Tensor, temperature: float
) -> Tensor:
    """Return the Dice loss between student and teacher over the classes that a site does not annotate, and background.

    Wang, Shen, Myronenko et al., arXiv 2412.18833, and NVFlare's research/condist-fl: probabilities are conditional on
    no class of the site being there, and pixels in which label or teacher shows one are left out. The Dice of each
    class is taken over the whole batch. Departure: :data:`DICE_SMOOTHING_PIXELS` is added, so that no batch divides by
    zero.

    Args:
        student: Logits ``(batch, rows, *spatial)`` of exclusive classes, the background's being 0.
        teacher: The teacher's logits of the same pixels.
        labels: The site's labels.
        temperature: Divisor of both logits.
    """
    own = annotated.reshape(1, -1, *[1] * (student.ndim - 2))
    others = torch.cat([annotated.new_ones(1), ~annotated])  # the background is a group like each other class

    def compute_conditional_probabilities(logits: Tensor) -> Tensor:
        scaled = functional.pad(logits.movedim(1, -1), (1, 0)).movedim(-1, 1) / temperature
        # The probability given that no own class is there: a softmax over the others alone.
        return scaled[:, others].softmax(1)

    shown_by_teacher = (decide_class_areas(teacher, "exclusive_segmentation") & own).any(1, keepdim=True)
    shown_by_label = ((labels == 1) & own).any(1, keepdim=True)
    counts = ~(shown_by_teacher | shown_by_label)
    targets = torch.where(counts, compute_conditional_probabilities(teacher), 0.0)
    predicted = torch.where(counts, compute_conditional_probabilities(student), 0.0)
    return (1 - _compute_soft_dice(predicted, targets)).mean()


def independent_distillation_loss(student: Tensor, teacher: Tensor, annotated: Tensor, temperature: float) -> Tensor:
    """Return the Dice loss between student and teacher over the classes that a site does not annotate.

    This is for classes that may overlap: conditional and plain probability are the same, and no pixel is left out.
    """
    others = ~annotated
    targets = (teacher[:, others] / temperature).sigmoid()
    predicted = (student[:, others] / temperature).sigmoid()
    return (1 - _compute_soft_dice(predicted, targets)).mean()


def _compute_soft_dice(predicted: Tensor, targets: Tensor) -> Tensor:
    """Return the Dice ``(rows,)`` between two kinds of probabilities, over all pixels of a batch together."""
    axes = [0, *range(2, predicted.ndim)]
    common = (predicted * targets).sum(axes)
    return (2 * common + DICE_SMOOTHING_PIXELS) / (predicted.sum(axes) + targets.sum(axes) + DICE_SMOOTHING_PIXELS)


SEGMENTATION_LOSSES: Mapping[tuple[Task, Missing], LossFunction] = {
    ("segmentation", "masked"): overlapping_loss,
    ("segmentation", "negative"): overlapping_loss_over_all_classes,
    ("exclusive_segmentation", "masked"): marginal_and_exclusion_loss,
    ("exclusive_segmentation", "negative"): exclusive_loss_over_all_classes,
}
"""The plain loss of segmentation by task and by the treatment of classes that the site does not annotate."""
