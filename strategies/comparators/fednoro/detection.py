"""Who has noisy labels, and how much less they count: FedNoRo's maths.

Wu, Yu, Jiang, Cheng, Yan: "FedNoRo", IJCAI 2023, sections on noisy client detection and on robust updating.

A site's *loss indicator* is the mean loss of one model over its images of each class, a class being what the label
says. In a multi-label task each class is two, the images labelled negative and those labelled positive.
"""

import warnings

import numpy as np
from numpy.typing import NDArray

from strategies.aggregation.distances import Float64, distances_between

Floats = NDArray[np.floating]
Flags = NDArray[np.bool_]

VOTES = 9
"""Mixtures fitted from as many seeds; the division found most often holds, as in the authors' code."""


def loss_indicators(logits: Floats, labels: Floats) -> Float64:
    """Mean cross-entropy over a site's negatives and over its positives of each class; ``(classes, 2)``.

    Args:
        logits: ``(n, classes)``, unadjusted.
        labels: 1, 0, or NaN for left out, ``(n, classes)``.

    Returns:
        NaN where there is no such image.
    """
    losses = np.logaddexp(0.0, np.where(labels == 1, -1.0, 1.0) * logits.astype(np.float64))
    members = np.stack([labels == 0, labels == 1], axis=-1)  # (n, classes, 2)
    counts = members.sum(axis=0)
    sums = (losses[..., None] * members).sum(axis=0)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def noisy_sites(indicators: Floats) -> Flags:
    """The sites in the component of higher losses, of two Gaussians; ``(sites,)``.

    Each indicator is scaled to 0 to 1 over the sites; where a site has none, it is the lowest of all.

    Args:
        indicators: ``(sites, indicators)``, NaN where a site has none.
    """
    scaled = scaled_over_sites(indicators)
    if (scaled == scaled[0]).all():
        return np.zeros(len(scaled), np.bool_)
    votes = [_divided(scaled, seed) for seed in range(VOTES)]
    return max(votes, key=lambda one: sum(np.array_equal(one, other) for other in votes))  # the first of equals


def scaled_over_sites(indicators: Floats) -> Float64:
    """Each column from 0 to 1; a column alike at all sites is 0."""
    known = ~np.isnan(indicators)
    lowest = np.where(known, indicators, np.inf).min(axis=0)
    low = np.where(known.any(axis=0), lowest, 0.0)
    above = np.where(known, indicators - low, 0.0)
    spread = above.max(axis=0)
    return np.asarray(above / np.where(spread > 0, spread, 1.0), np.float64)


def _divided(scaled: Float64, seed: int) -> Flags:
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.mixture import GaussianMixture  # only the coordinator needs it, once a run

    mixture = GaussianMixture(n_components=2, random_state=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # few sites: any division that repeats will do
        found = mixture.fit_predict(scaled)
    return np.asarray(found == mixture.means_.sum(axis=1).argmax(), np.bool_)


def distance_aware(weights: Floats, products: Float64, noisy: Flags) -> Float64:
    """Each noisy site's weight times ``exp(-D)``, D its distance from the nearest clean site over the longest such.

    Args:
        weights: Plain weights, ``(sites,)``.
        products: Inner products of the sites' updates, ``(sites, sites)``.
        noisy: ``(sites,)``; where all are or none is, there is nothing to measure by, and the weights stay.
    """
    plain = np.asarray(weights, np.float64)
    if noisy.all() or not noisy.any():
        return plain
    nearest = distances_between(products)[:, ~noisy].min(axis=1)
    distance = np.where(noisy, nearest, 0.0)
    return np.asarray(plain * np.exp(-distance / (distance.max() or 1.0)), np.float64)
