"""What sites tell one another about classes: mean features of their negatives and positives, and their difficulty.

Sun et al., "FedMLP", MICCAI 2024, eq. 6 and 10 (specs 3.4; decisions M4 and M5).

What a site has nothing to say about is NaN: a prototype without images, the prototypes of a class it does not
label, the difficulty of a class it does. Means leave NaN out. All sums run in float64 in the order of site names.
"""

from collections.abc import Mapping
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]
Float64 = NDArray[np.float64]


def local_prototypes(features: Floats, labels: Floats) -> Float64:
    """Mean feature of a site's negatives and of its positives, class by class.

    The authors' code sends zeros where there is no image; we send nothing (NaN).

    Args:
        features: ``(n, features)``.
        labels: True labels 1, 0 or NaN for unknown, ``(n, classes)``; all NaN for a class the site does not label.

    Returns:
        Prototypes ``(classes, 2, features)``, negative first.
    """
    members = np.stack([labels == 0, labels == 1], axis=-1)  # (n, classes, 2)
    counts = members.sum(axis=0)  # (classes, 2)
    sums = np.tensordot(members.astype(np.float64), features.astype(np.float64), axes=(0, 0))
    return np.where(counts[..., None] > 0, sums / np.maximum(counts, 1)[..., None], np.nan)


def global_prototypes(local: Mapping[str, Floats], weights: Mapping[str, float]) -> Float64:
    """Average each prototype over the sites that have it; NaN where nobody does.

    Args:
        local: Site -> its prototypes, ``(classes, 2, features)``.
        weights: Site -> its training images, as in the authors' code, or 1 each, as in eq. 6.
    """
    return _mean_of_known(local, weights)


def difficulty(probabilities: Floats, low: float = 0.3, high: float = 0.7) -> Float64:
    """Share of images of which the model is sure, class by class: probability below ``low`` or above ``high``.

    Args:
        probabilities: Unadjusted, ``(n, classes)``.
    """
    return np.asarray(((probabilities < low) | (probabilities > high)).mean(axis=0), np.float64)


def global_difficulty(local: Mapping[str, Floats], weights: Mapping[str, float]) -> Float64:
    """Average each class's difficulty over the sites that do NOT label it; 1 where all do.

    Eq. 10 writes the sites that label it, but the paper's words are "negative class difficulty", and so the authors'
    code has it.

    Args:
        local: Site -> its :func:`difficulty`, NaN for classes that it labels, ``(classes,)``.
        weights: Site -> its training images.
    """
    return np.nan_to_num(_mean_of_known(local, weights), nan=1.0)


def global_statistics(
    told: Mapping[str, Mapping[str, Floats]],
    own: Mapping[str, NDArray[np.bool_]],
    images: Mapping[str, float],
    before: Mapping[str, Floats],
    weighting: Literal["samples", "uniform"],
) -> dict[str, NDArray[np.float32]]:
    """The global prototypes and difficulties after a round; what nobody says stays as it was.

    Args:
        told: Site -> its ``prototypes (classes, 2, features)`` and ``difficulty (classes,)``; at least one site.
        own: Site -> the classes that it labels, ``(classes,)``: of the others' prototypes it has no say, nor of the
            difficulty of its own.
        images: Site -> its training images.
        before: The global ones of the round before; empty where there were none.
        weighting: Of the prototypes.
    """
    weights = images if weighting == "samples" else dict.fromkeys(told, 1.0)
    seen = {site: np.where(own[site][:, None, None], said["prototypes"], np.nan) for site, said in told.items()}
    sure = {site: np.where(own[site], np.nan, said["difficulty"].clip(0, 1)) for site, said in told.items()}
    prototypes, sureness = global_prototypes(seen, weights), global_difficulty(sure, images)
    known = np.any([~np.isnan(values) for values in sure.values()], axis=0)
    return {
        "prototypes": _or(~np.isnan(prototypes), prototypes, before.get("prototypes", prototypes)),
        "difficulty": _or(known, sureness, before.get("difficulty", sureness)),
    }


def _or(said: NDArray[np.bool_], now: Floats, before: Floats) -> NDArray[np.float32]:
    return np.where(said, now, before).astype(np.float32)


def cosines(vectors: Floats) -> Float64:
    """Cosine of the angle between every two of some vectors, ``(n, features)``; NaN for one that is unknown or zero.

    Returns:
        ``(n, n)``, symmetric.
    """
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)  # (n, 1)
    unit = vectors / np.where(lengths > 0, lengths, np.nan)
    return np.clip(unit @ unit.T, -1.0, 1.0)


def _mean_of_known(local: Mapping[str, Floats], weights: Mapping[str, float]) -> Float64:
    shape = next(iter(local.values())).shape
    total, weight = np.zeros(shape), np.zeros(shape)
    for site in sorted(local):
        known = ~np.isnan(local[site])
        total += np.where(known, weights[site] * local[site].astype(np.float64), 0.0)
        weight += np.where(known, weights[site], 0.0)
    return np.where(weight > 0, total / np.where(weight > 0, weight, 1.0), np.nan)
