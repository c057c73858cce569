"""Run a segmentation network over a part of the data, and compare what it predicts with the outlines."""

from collections.abc import Callable, Iterator, Sequence
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from polyclinic.common.metrics.segmentation import AreaComparison, compute_hausdorff_distance
from polyclinic.common.models.network import (
    Precision,
    SplitNetwork,
    apply_doubling_single_image,
    autocast,
    decide_class_areas,
)
from polyclinic.common.models.parts import set_training_flag
from polyclinic.data.images.pixels import ImageTensors, MaskTensors

PIXELS_AT_A_TIME = 2**19
"""Pixels of the images of one batch, at least one image; a feature of all of them takes 2 MB."""
BatchLoss = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Logits and pixel labels of a batch -> its loss, and the weight of the batch in the mean."""


@torch.no_grad()
def iterate_logits(
    network: SplitNetwork, images: ImageTensors, precision: Precision = "auto"
) -> Iterator[tuple[NDArray[np.intp], Tensor]]:
    """Yield the logits of all images in order, with the images' indices, in batches that fit into memory."""
    set_training_flag(cast(nn.Module, network), training=False)
    pixels = int(np.prod(images.sides))
    size = max(1, PIXELS_AT_A_TIME // pixels)
    first = 0
    for batch in images.iterate_batches(size):
        if not len(batch):
            return
        with autocast(batch.device, precision):
            if network.spec.patch_size is None:
                logits = apply_doubling_single_image(network, batch.float()).float()
            else:  # the network doubles a single window, not the whole image
                logits = network(batch.float()).float()
        yield np.arange(first, first + len(batch)), logits
        first += len(batch)


@torch.no_grad()
def compare_with_masks(
    network: SplitNetwork,
    images: ImageTensors,
    masks: MaskTensors,
    labels: Tensor,
    precision: Precision = "auto",
    *,
    loss: BatchLoss | None = None,
    distances: bool = False,
) -> AreaComparison:
    """Return predicted and outlined areas of all images, for the network's head rows.

    Args:
        labels: Labels ``(n, rows)`` of the images, NaN where a class is not annotated.
        loss: Computes the loss of a batch; None for no loss.
        distances: Compute Hausdorff distances, which takes longer than the network.
    """
    shape = len(images), len(network.class_names)
    predicted, reference, common = (np.zeros(shape, np.int64) for _ in range(3))
    measured = np.full(shape, np.nan) if distances else None
    total, weights = 0.0, 0.0
    for rows, logits in iterate_logits(network, images, precision):
        index = torch.from_numpy(rows)
        truth = masks.make_pixel_labels(index, labels[index.to(labels.device)])
        if loss is not None:
            value, weight = loss(logits, truth)
            total = total + float(value) * float(weight)
            weights = weights + float(weight)
        areas = decide_class_areas(logits, network.spec.task)
        outlined = truth == 1
        for counts, of_kind in ((predicted, areas), (reference, outlined), (common, areas & outlined)):
            counts[rows] = of_kind.flatten(2).sum(2).cpu().numpy()
        if measured is not None:
            spacing = None if masks.spacing is None else masks.spacing[rows]
            measured[rows] = _measure_distances(areas.cpu().numpy(), outlined.cpu().numpy(), spacing)
    is_known = ~labels.isnan().cpu().numpy()
    return AreaComparison(predicted, reference, common, is_known, measured, total / weights if weights else None)


def _measure_distances(
    areas: NDArray[np.bool_], outlined: NDArray[np.bool_], spacing: NDArray[np.float64] | None
) -> NDArray[np.float64]:
    """Return the Hausdorff distance of each image and class, ``(batch, classes)``; NaN where undefined."""
    result = np.full(areas.shape[:2], np.nan)
    for row, column in np.ndindex(*areas.shape[:2]):
        side: Sequence[float] | None = None if spacing is None else spacing[row].tolist()
        result[row, column] = compute_hausdorff_distance(areas[row, column], outlined[row, column], side)
    return result
