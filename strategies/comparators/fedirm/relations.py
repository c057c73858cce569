"""How classes resemble one another in the eyes of a model, and how two such opinions differ.

Liu et al., "FedIRM", MICCAI 2021. A *relation* is a row over all classes that sums to one: what the model says on
average of the images that show one class, softened; the rows of all classes are the disease relation matrix.

Shapes: ``logits (n, classes)``; ``members (n, rows)`` says which images show the class of which row.
"""

import math
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.floating]


def log_relations(logits: Tensor, members: Tensor, temperature: float) -> Tensor:
    """Logarithm of each row's relation, ``(rows, classes)``: softmax of the members' mean logits over a temperature.

    A row without members says nothing; it is uniform.
    """
    weights = members.to(logits)
    means = weights.T @ logits / weights.sum(dim=0).clamp(min=1)[:, None]
    return torch.log_softmax(means / temperature, dim=1)


def surely_shown(probabilities: Tensor, entropy_below: float) -> Tensor:
    """Entries that are rather present than absent, with an entropy below a bound in nats; as ``probabilities``."""
    entropy: Tensor = torch.special.entr(probabilities) + torch.special.entr(1 - probabilities)
    return (probabilities > 0.5) & (entropy < entropy_below)


def mismatch(own: Tensor, members: Tensor, federation: Tensor) -> Tensor:
    """Kullback-Leibler divergence both ways, ``sum (p - q)(log p - log q)``, mean over the rows that both sides have.

    0 without a gradient where there is none.

    Args:
        own: :func:`log_relations`.
        members: Of those; a row without any is left out.
        federation: Relations ``(rows, classes)``, which get no gradient; a row that nobody told is NaN.
    """
    both = members.any(dim=0) & ~federation.isnan().any(dim=1)
    theirs = federation.nan_to_num(1.0).clamp(min=1e-8)
    divergences = ((own.exp() - theirs) * (own - theirs.log())).sum(dim=1)
    return torch.where(both, divergences, 0.0).sum() / both.sum().clamp(min=1)


def mean_relations(told: Mapping[str, Floats]) -> NDArray[np.float64]:
    """Mean of each row over the sites that tell it, each counting the same; NaN where nobody does.

    Args:
        told: Site -> its relations ``(classes, classes)``. A row that is none (it must sum to one, no entry below 0)
            counts as not told.
    """
    rows = np.stack([told[site].astype(np.float64) for site in sorted(told)])  # (sites, classes, classes)
    good = (rows >= 0).all(axis=2) & (np.abs(rows.sum(axis=2) - 1) < 1e-3)
    count = good.sum(axis=0)[:, None]
    total = np.where(good[..., None], rows, 0.0).sum(axis=0)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def ramp_up(finished: int, rounds: int) -> float:
    """Weight of what needs no labels: ``exp(-5 (1 - w / W)^2)`` after w of W rounds, then 1."""
    return math.exp(-5 * (1 - min(1.0, finished / rounds)) ** 2) if rounds else 1.0
