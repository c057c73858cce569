"""DeLong's test of equal AUROCs of several models on the same images.

DeLong, DeLong and Clarke-Pearson, "Comparing the areas under two or more correlated receiver operating characteristic
curves: a nonparametric approach", Biometrics 1988. The placements come from ranks, by the fast algorithm of Sun and Xu,
IEEE Signal Processing Letters 2014, so that n images only take the time of sorting.

The test treats each image as independent. If patients have several images, it finds differences too often; then use
the bootstrap over patients (:func:`polyclinic.common.metrics.bootstrap.compare_resampled_aurocs`).
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]
MIN_VARIANCE = 1e-16
"""Variance of a difference below which only rounding is left, because both models rank all images alike."""


@dataclass(frozen=True)
class DelongComparison:
    """The difference of two AUROCs on the same images.

    Attributes:
        difference: AUROC of the first model minus that of the second.
        standard_error: Standard error of the difference.
        p_value: Two-sided p-value; None if the difference has no variance because both models rank all images alike.
    """

    difference: float
    standard_error: float
    p_value: float | None


def compute_delong_covariance(scores: Floats, labels: Floats) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the AUROC of each model ``(models,)``, and the covariance matrix of the AUROCs ``(models, models)``.

    Args:
        scores: ``(models, images)``.
        labels: 1 or 0, ``(images,)``; at least two of each.
    """
    from scipy.stats import rankdata  # imported here to spare programs that only train the import time

    positives = scores[:, labels == 1]
    negatives = scores[:, labels == 0]
    positive_count = positives.shape[1]
    negative_count = negatives.shape[1]
    ranks = rankdata(np.concatenate([positives, negatives], axis=1), axis=1)  # (models, images), midranks
    positive_ranks = rankdata(positives, axis=1)
    negative_ranks = rankdata(negatives, axis=1)
    # The placement of a positive is the share of negatives below it; ties count half.
    positive_placements = (ranks[:, :positive_count] - positive_ranks) / negative_count  # (models, positives)
    negative_placements = 1 - (ranks[:, positive_count:] - negative_ranks) / positive_count  # (models, negatives)
    covariance = np.cov(positive_placements) / positive_count + np.cov(negative_placements) / negative_count
    return positive_placements.mean(axis=1), np.atleast_2d(covariance)


def compare_by_delong(first: Floats, second: Floats, labels: Floats) -> DelongComparison | None:
    """Compare the AUROCs of two models on the same images; None with fewer than two positives or negatives.

    Args:
        first, second: Scores of the two models, ``(images,)``.
        labels: 1 or 0, ``(images,)``.
    """
    if min((labels == 1).sum(), (labels == 0).sum()) < 2:
        return None
    aurocs, covariance = compute_delong_covariance(np.stack([first, second]), labels)
    difference = float(aurocs[0] - aurocs[1])
    variance = float(covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1])
    if variance < MIN_VARIANCE:
        return DelongComparison(difference, 0.0, None)
    standard_error = math.sqrt(variance)
    return DelongComparison(difference, standard_error, compute_two_sided_p_value(difference / standard_error))


def compute_two_sided_p_value(z: float) -> float:
    """Return the two-sided p-value of a test statistic that is standard normal under the null hypothesis."""
    return 2 * NormalDist().cdf(-abs(z))
