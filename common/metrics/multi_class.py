"""Metrics of multi-class tasks (every image has exactly one class), and accuracies per site as in FedSLD's paper.

Macro means are over the classes that occur in the test set, and use the whole test set. UniFed's released code instead
averages sensitivity, specificity and F1 over batches, with prediction and truth swapped. So only the accuracy can be
compared with UniFed's.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polyclinic.common.errors import ModelDiverged

Floats = NDArray[np.floating]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class MultiClassMetrics:
    """Macro metrics and accuracy of one model on one test set.

    Attributes:
        sensitivity: Macro recall.
        specificity: Macro true negative rate; None if all images are of one class.
        f1: Macro F1.
        images: Number of images with a known class; others are not counted.
    """

    accuracy: float
    sensitivity: float
    specificity: float | None
    f1: float
    images: int


@dataclass(frozen=True)
class CorrectPredictionCount:
    """Numbers of correctly classified and of all tested images of one site in one round."""

    correct: int
    tested: int

    @property
    def accuracy(self) -> float:
        """The accuracy; needs at least one tested image."""
        return self.correct / self.tested


@dataclass(frozen=True)
class RoundAccuracy:
    """Accuracy of one round.

    Attributes:
        mean: Mean of the sites' accuracies.
        pooled: Accuracy over all images of all sites.
    """

    mean: float
    pooled: float


@dataclass(frozen=True)
class BestClientAccuracies:
    """The accuracies that FedSLD's paper reports: the best over all rounds, optimistic because they use test images.

    Attributes:
        best_mean_client_test_accuracy: BMCTA, the largest mean over sites, reached in round ``best_mean_round``.
        best_test_accuracy: BTA, the largest over all sites' images, reached in round ``best_pooled_round``.
        per_site: Accuracy of every site that tested in ``best_mean_round``.
    """

    best_mean_client_test_accuracy: float
    best_mean_round: int
    best_test_accuracy: float
    best_pooled_round: int
    per_site: Mapping[str, float]


def compute_confusion_matrix(predicted: Integers, truth: Integers, classes: int) -> Integers:
    """Return the confusion matrix ``(classes, classes)``: true classes as rows, predictions as columns."""
    table = np.zeros((classes, classes), np.int64)
    np.add.at(table, (truth, predicted), 1)
    return table


def compute_multi_class_metrics(scores: Floats, labels: Floats) -> MultiClassMetrics | None:
    """Compute multi-class metrics; the class with the highest score is the prediction.

    Args:
        scores: Logits or probabilities, ``(n, classes)``.
        labels: ``(n, classes)``: 1 for the image's class, 0 or NaN (not annotated) for others. An image without a 1
            has an unknown class and is ignored.

    Returns:
        The metrics; None if no image has a known class.

    Raises:
        ModelDiverged: If a score is not finite.
        ValueError: If the shapes differ, a label is not 0, 1 or NaN, or an image has several classes.
    """
    if scores.shape != labels.shape:
        raise ValueError(f"Expected scores and labels of one shape, got {scores.shape} and {labels.shape}.")
    is_known = mask_single_class_images(labels)
    if not is_known.any():
        return None
    scores = scores[is_known]
    truth = np.argmax(labels[is_known] == 1, axis=1)
    if not np.isfinite(scores).all():
        raise ModelDiverged("scores of an image are NaN or infinite")
    table = compute_confusion_matrix(np.argmax(scores, axis=1), truth, labels.shape[1])
    correct = np.diag(table)  # (classes,), as the next two
    true = table.sum(axis=1)
    predicted = table.sum(axis=0)
    images = int(table.sum())
    present = true > 0
    negatives = images - true
    true_negatives = negatives - (predicted - correct)
    several = int(present.sum()) > 1
    return MultiClassMetrics(
        accuracy=int(correct.sum()) / images,
        sensitivity=float(np.mean(correct[present] / true[present])),
        specificity=float(np.mean(true_negatives[present] / negatives[present])) if several else None,
        f1=float(np.mean(2 * correct[present] / (true + predicted)[present])),
        images=images,
    )


def compute_round_accuracy(sites: Mapping[str, CorrectPredictionCount]) -> RoundAccuracy | None:
    """Return the accuracy of one round over the sites that tested at least one image; None without any such site."""
    counts = [count for _, count in sorted(sites.items()) if count.tested]
    if not counts:
        return None
    mean = float(np.mean([count.accuracy for count in counts]))
    return RoundAccuracy(mean, sum(count.correct for count in counts) / sum(count.tested for count in counts))


def find_best_client_accuracies(
    rounds: Mapping[int, Mapping[str, CorrectPredictionCount]],
) -> BestClientAccuracies | None:
    """Return the best accuracies over all rounds, the earliest round on a tie; None if no site ever tested.

    Args:
        rounds: Round number -> site -> its counts; a site without a reply has no entry.
    """
    tested = sorted(number for number, tallies in rounds.items() if tallies)
    round_accuracies = {number: accuracy for number in tested if (accuracy := compute_round_accuracy(rounds[number]))}
    if not round_accuracies:
        return None
    best_mean = max(round_accuracies, key=lambda number: round_accuracies[number].mean)
    best_pooled = max(round_accuracies, key=lambda number: round_accuracies[number].pooled)
    return BestClientAccuracies(
        best_mean_client_test_accuracy=round_accuracies[best_mean].mean,
        best_mean_round=best_mean,
        best_test_accuracy=round_accuracies[best_pooled].pooled,
        best_pooled_round=best_pooled,
        per_site={site: count.accuracy for site, count in sorted(rounds[best_mean].items()) if count.tested},
    )


def estimate_accuracy_density(accuracies: Sequence[float], points: int = 101) -> tuple[Floats, Floats] | None:
    """Return a grid of ``points`` values from 0 to 1, and a kernel density estimate of the sites' accuracies on it.

    The kernel is Gaussian with Scott's bandwidth. The result is None for fewer than two sites or equal accuracies. The
    area can be less than 1, because the density outside 0 to 1 is cut off.
    """
    if len(set(accuracies)) < 2:
        return None
    grid = np.linspace(0, 1, points)
    values = np.asarray(accuracies, dtype=np.float64)
    width = float(np.std(values, ddof=1)) * len(values) ** -0.2
    kernels = np.exp(-(((grid[:, None] - values) / width) ** 2) / 2)  # (points, sites)
    return grid, kernels.mean(axis=1) / (width * math.sqrt(2 * math.pi))


def mask_single_class_images(labels: Floats) -> NDArray[np.bool_]:
    """Return a mask ``(n,)`` of the images with exactly one label 1; the others have no known class.

    Raises:
        ValueError: If a label is not 0, 1 or NaN, or an image has several classes.
    """
    strange = labels[~(np.isnan(labels) | np.isin(labels, (0, 1)))]
    if strange.size:
        raise ValueError(f"Labels hold {strange[0]}; expected 0, 1 or NaN for unknown.")
    positives = np.sum(labels == 1, axis=1)
    if (positives > 1).any():
        raise ValueError(f"{int(np.sum(positives > 1))} images have several classes; expected one an image.")
    return positives == 1  # type: ignore[no-any-return]
