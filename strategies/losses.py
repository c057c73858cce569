"""Local objectives over multi-label targets in which an entry may be unknown.

Shapes: ``logits (batch, rows)`` for the head rows that the site holds, ``labels (batch, rows)`` with 1, 0 or NaN for
unknown, ``annotated (rows,)`` which of them the site annotates at all.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits


class Loss(Protocol):
    """A local objective: a scalar to minimise."""

    def __call__(self, logits: Tensor, labels: Tensor, annotated: Tensor) -> Tensor: ...


def known_entries(logits: Tensor, labels: Tensor, annotated: Tensor) -> Tensor:
    """Binary cross-entropy, mean over the known entries (specs 1.4; 1.6 "partial loss").

    With no uncertain labels this is the mean over the batch of ``(1/|C_k|) sum over the site's classes``. A batch
    without any known entry gives 0 and no gradient.
    """
    known = ~labels.isnan()
    entries = binary_cross_entropy_with_logits(logits, labels.nan_to_num(), reduction="none")
    return torch.where(known, entries, 0.0).sum() / known.sum().clamp(min=1)


def missing_as_negative(logits: Tensor, labels: Tensor, annotated: Tensor) -> Tensor:
    """Binary cross-entropy with every class the site does not annotate taken as absent (specs 1.6 "vanilla FL").

    An uncertain label of a class that the site does annotate stays unknown.
    """
    return known_entries(logits, torch.where(annotated, labels, 0.0), annotated)
