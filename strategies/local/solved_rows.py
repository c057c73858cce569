"""Head rows in closed form, from the features of a site's own images, mixed with the trained rows.

A solved row is Fisher's linear discriminant: ``w = (S + shrinkage * tr(S) / F * I)^-1 (m1 - m0)``, with the means m1
and m0 of the features of the site's images with and without the class, and S the mean squared deviation of the images
from the mean of their side, ``(F, F)``. It is scaled and shifted so that its logits have the standard deviation and the
mean of those of the trained row over the same images; so a mixture of both is a row on the same scale.

Closed-form heads in federated learning are by Fanì et al. (Fed3R, ICML 2024), He et al. (AFL, CVPR 2025) and Goswami et
al. (FedCOF, NeurIPS 2025), over a fixed trunk with one label for each image. Their sites send sums or means of
features. Here a site sends a row, as in any round, and only for the classes that it annotates.
"""

import torch
from torch import Tensor

from polyclinic.common.models.network import Model, compute_features_and_logits
from polyclinic.strategies.local.losses import LossFunction
from polyclinic.strategies.local.objective import Batch, ClientContext, LabelledExamples, LocalRound

MIN_IMAGES_PER_SIDE = 5
"""Smallest number of images with a class, and without it, from which its row is solved. A mean of fewer would nearly
show a single image."""


def solve_row(features: Tensor, present: Tensor, shrinkage: float) -> Tensor:
    """Return Fisher's linear discriminant ``(F,)`` of images with and without a class.

    Args:
        features: float64 ``(n, F)``.
        present: True for the images that show the class, bool ``(n,)``; at least one on each side.
        shrinkage: Multiple of the mean variance of a feature that is added to the diagonal of S.
    """
    positives = features[present]
    negatives = features[~present]
    difference = positives.mean(dim=0) - negatives.mean(dim=0)
    deviations = torch.cat([positives - positives.mean(dim=0), negatives - negatives.mean(dim=0)])  # (n, F)
    scatter = deviations.T @ deviations / len(deviations)  # (F, F)
    ridge = shrinkage * scatter.trace() / len(scatter)
    if ridge == 0:  # features that are equal within each side: any multiple of the difference separates them
        return difference
    row: Tensor = torch.linalg.solve(scatter + ridge * torch.eye(len(scatter), dtype=scatter.dtype), difference)
    return row


def mix_with_solved_row(
    weight: Tensor, bias: Tensor, features: Tensor, present: Tensor, share: float, shrinkage: float
) -> tuple[Tensor, Tensor]:
    """Return the mixture of a trained row and of the solved row on the trained row's scale.

    Args:
        weight: The trained row, float64 ``(F,)``.
        bias: Its bias, float64 ``()``.
        features: float64 ``(n, F)``.
        present: bool ``(n,)``.
        share: Weight of the solved row.
        shrinkage: As in :func:`solve_row`.
    """
    solved = solve_row(features, present, shrinkage)
    logits, trained = features @ solved, features @ weight + bias  # (n,)
    spread = logits.std()
    if spread == 0:  # it tells no image from another
        return weight, bias
    scale = trained.std() / spread
    shift = trained.mean() - scale * logits.mean()
    return (1 - share) * weight + share * scale * solved, (1 - share) * bias + share * shift


@torch.no_grad()
def solve_own_rows(network: Model, examples: LabelledExamples, share: float, shrinkage: float) -> Tensor:
    """Replace, in place, the head rows of classes that the site annotates by mixtures with their solved rows.

    A class with fewer than :data:`MIN_IMAGES_PER_SIDE` images on one side keeps its trained row.

    Args:
        share: Weight of the solved row in each mixture.
        shrinkage: As in :func:`solve_row`.

    Returns:
        The new logits of the images, ``(n, rows)``.
    """
    received, _ = compute_features_and_logits(network, examples.images, "float32")  # (n, F)
    features = received.double().cpu()
    labels = examples.labels.cpu()
    head = network.head
    for row in examples.annotated.cpu().nonzero().flatten().tolist():
        known = ~labels[:, row].isnan()
        present = labels[known, row] == 1
        if min(int(present.sum()), int((~present).sum())) < MIN_IMAGES_PER_SIDE:
            continue
        weight = head.weight[row].double().cpu()
        bias = head.bias[row].double().cpu()
        weight, bias = mix_with_solved_row(weight, bias, features[known], present, share, shrinkage)
        head.weight[row] = weight.to(head.weight)
        head.bias[row] = bias.to(head.bias)
    logits: Tensor = head(received)
    return logits


def make_solving_round(context: ClientContext, loss: LossFunction, share: float, shrinkage: float) -> LocalRound:
    """Solve the site's own rows on the received trunk; return a local round that does not change the model further.

    Args:
        loss: The training loss; the round reports its value with the new rows.
        share: As in :func:`solve_own_rows`.
        shrinkage: As in :func:`solve_row`.
    """
    examples = context.examples
    logits = solve_own_rows(context.network, examples, share, shrinkage)
    value = loss(logits, examples.labels, examples.annotated)

    def keep_model(model: Model, batch: Batch) -> Tensor:
        # No forward pass, which would move the running statistics of batch normalisation.
        return value + 0 * model.head.bias.sum()

    return LocalRound(keep_model, lr_factor=0.0)
