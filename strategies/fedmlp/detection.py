"""Which images of a class that a site does not label are tagged, and as what.

Sun et al., "FedMLP", MICCAI 2024 (specs 3.5, steps 2 to 4; decision M3). Letters: Z is how much more a feature is like
the negative prototype P0 than like the positive P1; tau0 and tau1 are the shares of the seemingly negative and
seemingly positive images that are tagged in a round; d is a class's difficulty, T a rate.

The authors' code drops a class's positives in a round that tags no negatives, by a condition typed twice; we do not.
"""

import math
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]
Tags = NDArray[np.int8]
"""1 for positive, 0 for negative, -1 for not tagged; ``(n,)`` of one class, or with classes behind it."""

Rounding = Literal["floor", "ceil"]
"""``floor`` is the authors': at their rates it tags no negative among fewer than 200 images. ``ceil``, for small sites,
tags at least one of each sign that there is, unless the share is 0."""


def z_scores(features: Floats, negative: Floats, positive: Floats) -> NDArray[np.float64]:
    """Cosine of each feature with the negative prototype less that with the positive; ``(n,)``.

    Args:
        features: ``(n, features)``.
        negative: P0, ``(features,)``; NaN where nobody has one, and so is the result.
        positive: P1.
    """
    return _cosines(features, negative) - _cosines(features, positive)


def share_tagged(difficulty: float, rate: float) -> float:
    """Share of images to tag in a round: tau = d T, from 0 to 1 for any difficulty that a site states."""
    return min(1.0, max(0.0, difficulty) * rate)


def tags(z: Floats, untagged: NDArray[np.bool_], tau_negative: float, tau_positive: float, rounding: Rounding) -> Tags:
    """Tag the surest images of one class: the largest Z as negative, the smallest as positive.

    The shares are of the untagged images with Z >= 0, and of those with Z < 0. Ties go to the lower index.

    Args:
        z: ``(n,)``.
        untagged: Images that have no tag yet, ``(n,)``.
        tau_negative: Share, 0 to 1, of the seemingly negative to tag.
        tau_positive: The same of the seemingly positive.
        rounding: Of share times images.

    Returns:
        This round's new tags, -1 for every other image, ``(n,)``.
    """
    found = np.full(len(z), -1, np.int8)
    found[_surest(-z, untagged & (z >= 0), tau_negative, rounding)] = 0
    found[_surest(z, untagged & (z < 0), tau_positive, rounding)] = 1
    return found


def with_tags(old: Tags, new: Tags) -> Tags:
    """Add new tags; an old one is never changed."""
    return np.where(old >= 0, old, new)


def _surest(rank: Floats, candidates: NDArray[np.bool_], share: float, rounding: Rounding) -> NDArray[np.intp]:
    """Indices of the share of candidates that ranks lowest."""
    indices = np.flatnonzero(candidates)
    wanted = share * len(indices)
    count = min(len(indices), math.floor(wanted) if rounding == "floor" else math.ceil(wanted))
    return indices[np.argsort(rank[indices], kind="stable")[:count]]


def _cosines(features: Floats, prototype: Floats) -> NDArray[np.float64]:
    """Cosine of each row with the prototype; 0 for a vector of zeros."""
    rows, column = features.astype(np.float64), prototype.astype(np.float64)
    lengths = np.linalg.norm(rows, axis=1) * np.linalg.norm(column)
    return np.asarray(rows @ column / np.where(lengths == 0, 1.0, lengths), np.float64)
