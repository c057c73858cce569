"""95 % intervals of a share and of the average precision, by the Bayesian bootstrap over patients.

All images of a patient have one weight in a resample (:mod:`polyclinic.common.metrics.bootstrap`). Every bootstrap
interval is too narrow with few patients, so the interval of a share is widened to include Wilson's for the number of
patients.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from polyclinic.common.metrics.bootstrap import CONFIDENCE_LEVEL, RESAMPLES, RESAMPLES_PER_BLOCK, Floats, Interval
from polyclinic.common.metrics.calibration import compute_wilson_interval

Weights = NDArray[np.float32]
"""Weight of each image in each resample, ``(images, resamples)``."""


def bootstrap_interval(
    compute: Callable[[Weights], Floats], patients: NDArray[np.str_], generator: np.random.Generator
) -> Interval:
    """Return the percentile interval of a metric over resamples of the patients.

    Args:
        compute: Returns the metric of each resample, ``(resamples,)``.
        patients: Patient of each image, ``(images,)``.
        generator: Draws the resamples.
    """
    names, owner = np.unique(patients, return_inverse=True)
    drawn = []
    for _ in range(RESAMPLES // RESAMPLES_PER_BLOCK):
        weights = generator.standard_exponential((len(names), RESAMPLES_PER_BLOCK), dtype=np.float32)
        drawn.append(compute(weights.take(owner, 0, mode="clip")))
    low, high = np.quantile(np.concatenate(drawn), ((1 - CONFIDENCE_LEVEL) / 2, (1 + CONFIDENCE_LEVEL) / 2))
    return float(low), float(high)


def bootstrap_share_interval(
    hits: NDArray[np.bool_], patients: NDArray[np.str_], generator: np.random.Generator
) -> Interval | None:
    """Return the interval of the share of images for which ``hits`` is True; None without images.

    Args:
        hits: ``(images,)``.
        patients: Patient of each image, ``(images,)``.
        generator: Draws the resamples.
    """
    if not len(hits):
        return None
    low, high = bootstrap_interval(
        lambda weights: weights[hits].sum(axis=0, dtype=np.float64) / weights.sum(axis=0, dtype=np.float64),
        patients,
        generator,
    )
    count = len(np.unique(patients))
    lowest, highest = compute_wilson_interval(np.array([hits.mean() * count]), np.array([float(count)]))
    return max(min(low, float(lowest[0])), 0.0), min(max(high, float(highest[0])), 1.0)


def bootstrap_average_precision_interval(
    scores: Floats, labels: Floats, patients: NDArray[np.str_], generator: np.random.Generator
) -> Interval | None:
    """Return the interval of the average precision; None without positives or negatives.

    Args:
        scores, labels: ``(images,)``; each label is 1 or 0.
        patients: Patient of each image, ``(images,)``.
    """
    if not (labels == 1).any() or not (labels == 0).any():
        return None
    order = np.argsort(-scores, kind="stable")
    ordered = scores[order]
    # Index of the last image among equal scores, because a threshold lies below all of them.
    ends = np.flatnonzero(np.append(np.diff(ordered) != 0, True))
    is_positive = (labels[order] == 1)[:, None]

    def compute(weights: Weights) -> Floats:
        of_image = weights.take(order, 0, mode="clip").astype(np.float64)
        above = np.cumsum(of_image, axis=0)[ends]  # (thresholds, resamples)
        detected = np.cumsum(of_image * is_positive, axis=0)[ends]
        gained = np.diff(detected, axis=0, prepend=0.0)
        precision: Floats = (gained * detected / above).sum(axis=0) / detected[-1]
        return precision

    return bootstrap_interval(compute, patients, generator)
