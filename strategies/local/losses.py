"""Losses over targets in which an entry may be unknown, for multi-label and for multi-class tasks.

Shapes: ``logits (batch, rows)`` for the head rows that the site holds, ``labels (batch, rows)`` with 1, 0 or NaN for
unknown, ``annotated (rows,)`` which of them the site annotates at all. In a multi-class task one entry of a row is 1.
"""

from collections.abc import Mapping
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from common.models.zoo.spec import Task

Missing = Literal["masked", "negative"]
"""What a class counts as that a site does not annotate: left out of the loss, or absent."""


class Loss(Protocol):
    """A scalar to minimise."""

    def __call__(self, logits: Tensor, labels: Tensor, annotated: Tensor) -> Tensor: ...


def loss_for(task: Task, missing: Missing) -> Loss:
    """The plain loss of a task."""
    return LOSSES[task, missing]


def known_entries(logits: Tensor, labels: Tensor, annotated: Tensor, positive_weight: Tensor | None = None) -> Tensor:
    """Binary cross-entropy, mean over the known entries (specs 1.4; 1.6 "partial loss").

    With no uncertain labels this is the mean over the batch of ``(1/|C_k|) sum over the site's classes``. A batch
    without any known entry gives 0 and no gradient.

    Args:
        positive_weight: What a positive of each class weighs in the sum, ``(rows,)``; 1 where left out.
    """
    known = ~labels.isnan()
    entries = binary_cross_entropy_with_logits(
        logits, labels.nan_to_num(), reduction="none", pos_weight=positive_weight
    )
    return torch.where(known, entries, 0.0).sum() / known.sum().clamp(min=1)


def filled(labels: Tensor, annotated: Tensor, missing: Missing) -> Tensor:
    """The labels ``(batch, rows)``, with what the site does not annotate as ``missing`` says."""
    return torch.where(annotated, labels, 0.0) if missing == "negative" else labels


def positive_weights(labels: Tensor) -> Tensor:
    """Known entries of each class over its positives, ``(rows,)``; 1 where there is no positive.

    FedMLP's authors weigh positives so in all their baselines (specs 3.6).

    Args:
        labels: A whole site's, ``(n, rows)``, NaN for unknown.
    """
    known, positives = (~labels.isnan()).sum(dim=0), (labels == 1).sum(dim=0)
    return torch.where(positives > 0, known / positives.clamp(min=1), 1.0)


def missing_as_negative(logits: Tensor, labels: Tensor, annotated: Tensor) -> Tensor:
    """Binary cross-entropy with every class the site does not annotate taken as absent (specs 1.6 "vanilla FL").

    An uncertain label of a class that the site does annotate stays unknown.
    """
    return known_entries(logits, filled(labels, annotated, "negative"), annotated)


def among_all(logits: Tensor, labels: Tensor, annotated: Tensor) -> Tensor:
    """Cross-entropy, softmax over all rows: other sites' classes count as absent; mean over images of known class."""
    return mean_where(class_of_known(labels), image_losses(logits, labels))


def among_known(logits: Tensor, labels: Tensor, annotated: Tensor) -> Tensor:
    """Cross-entropy, softmax over the classes that are known of an image: of the others nothing is said."""
    return among_all(only_known(logits, labels), labels, annotated)


def only_known(logits: Tensor, labels: Tensor) -> Tensor:
    """Logits without the unknown entries; an image of which nothing is known keeps all."""
    unknown = labels.isnan()
    return logits.masked_fill(unknown & ~unknown.all(dim=1, keepdim=True), -torch.inf)


def image_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of every image ``(batch,)``; meaningless where its class is not known."""
    return cross_entropy(logits, labels.nan_to_num().argmax(dim=1), reduction="none")


def class_of_known(labels: Tensor) -> Tensor:
    """Whether each image's class is known, bool ``(batch,)``."""
    return (labels == 1).any(dim=1)


def mean_where(chosen: Tensor, values: Tensor) -> Tensor:
    """Mean of the chosen values; 0 without gradient where there is none."""
    return torch.where(chosen, values, 0.0).sum() / chosen.sum().clamp(min=1)


LOSSES: Mapping[tuple[Task, Missing], Loss] = {
    ("multi_label", "masked"): known_entries,
    ("multi_label", "negative"): missing_as_negative,
    ("multi_class", "masked"): among_known,
    ("multi_class", "negative"): among_all,
}
