"""What an image or an entry weighs in FedSLD's loss, and the weighted losses, on tensors.

Luo and Wu, "FedSLD", 2021, eq. 3 (specs 4.3, 4.4). Shapes: ``logits`` and ``labels (batch, rows)``, labels 1, 0 or NaN
for unknown; ``prior (rows,)``.
"""

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from common.models.zoo.spec import Task
from strategies.local.losses import class_of_known, image_losses, only_known

Reduction = Literal["sum_over_batch", "sum", "weighted_mean"]


def class_weights(labels: Tensor, prior: Tensor) -> Tensor:
    """``p_b(c) / P(c)`` of every class ``(rows,)``; 0 where the prior is 0, for such a class cannot occur."""
    known = class_of_known(labels)
    share = labels.nan_to_num().sum(dim=0) / known.sum().clamp(min=1)
    return _ratio(share, prior)


def _ratio(share: Tensor, prior: Tensor) -> Tensor:
    return torch.where(prior > 0, share / torch.where(prior > 0, prior, 1.0), 0.0)


def image_weights(labels: Tensor, prior: Tensor) -> Tensor:
    """Weight of every image ``(batch,)`` by its class; 0 where that is not known.

    Args:
        labels: ``(batch, rows)``, one 1 a row.
        prior: ``(rows,)``.
    """
    return labels.nan_to_num() @ class_weights(labels, prior)


def entry_weights(labels: Tensor, prior: Tensor) -> Tensor:
    """Weight of every entry ``(batch, rows)`` of a multi-label task; 0 where it is not known."""
    known = ~labels.isnan()
    share = labels.nan_to_num().sum(dim=0) / known.sum(dim=0).clamp(min=1)
    present, absent = _ratio(share, prior), _ratio(1 - share, 1 - prior)
    return torch.where(known, torch.where(labels == 1, present, absent), 0.0)


def weighted_cross_entropy(logits: Tensor, labels: Tensor, prior: Tensor, reduction: Reduction) -> Tensor:
    """Eq. 3 for a multi-class task; softmax over the classes known of an image."""
    weights = image_weights(labels, prior)
    known = class_of_known(labels)
    losses = torch.where(known, image_losses(only_known(logits, labels), labels), 0.0)
    return _reduced(losses * weights, weights, known.sum(), reduction)


def weighted_binary_cross_entropy(logits: Tensor, labels: Tensor, prior: Tensor, reduction: Reduction) -> Tensor:
    """Our extension to multi-label tasks; ``sum`` runs over images and takes the mean over a site's classes."""
    weights, known = entry_weights(labels, prior), ~labels.isnan()
    losses = binary_cross_entropy_with_logits(logits, labels.nan_to_num(), reduction="none") * weights
    if reduction == "sum":
        return losses.sum() / known.any(dim=0).sum().clamp(min=1)
    return _reduced(losses, weights, known.sum(), reduction)


def _reduced(weighted: Tensor, weights: Tensor, count: Tensor, reduction: Reduction) -> Tensor:
    if reduction == "sum":
        return weighted.sum()
    divisor = count.clamp(min=1) if reduction == "sum_over_batch" else weights.sum().clamp(min=1e-12)
    return weighted.sum() / divisor


WEIGHTS: Mapping[Task, Callable[[Tensor, Tensor], Tensor]] = {
    "multi_class": image_weights,
    "multi_label": entry_weights,
}
WEIGHTED: Mapping[Task, Callable[[Tensor, Tensor, Tensor, Reduction], Tensor]] = {
    "multi_class": weighted_cross_entropy,
    "multi_label": weighted_binary_cross_entropy,
}
