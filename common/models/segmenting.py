"""Run a segmentation network over images, and compare the predicted areas with the outlines."""

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

PIXELS_PER_BATCH = 2**19
"""Number of pixels in a batch, which has at least one image; one feature of all pixels takes 2 MB."""
BatchLoss = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""A function that maps logits and pixel labels of a batch to its loss, and to the batch's weight in the mean."""


@torch.no_grad()
def iterate_logits(
    network: SplitNetwork, images: ImageTensors, precision: Precision = "auto"
) -> Iterator[tuple[NDArray[np.intp], Tensor]]:
    """Yield the indices and the logits of all images, in order, in batches that fit into memory."""
    set_training_flag(cast(nn.Module, network), training=False)
    pixels = int(np.prod(images.sides))
    size = max(1, PIXELS_PER_BATCH // pixels)
    first = 0
    for batch in images.iterate_batches(size):
        if not len(batch):
            return
        with autocast(batch.device, precision):
            if network.spec.patch_size is None:
                logits = apply_doubling_single_image(network, batch.float()).float()
            else:  # the sliding window doubles a batch of one window
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
    """Compare predicted and outlined areas of all images, for each head row of the network.

    Args:
        network: The network.
        images: The images, ``n``.
        masks: The outlined areas.
        labels: Labels ``(n, rows)`` of the images, NaN where a class is not annotated.
        precision: Number format of the computation.
        loss: Computes the loss of a batch; None for no loss.
        distances: True to compute Hausdorff distances, which takes longer than the network.
    """
    shape = len(images), len(network.class_names)
    predicted, reference, common = (np.zeros(shape, np.int64) for _ in range(3))
    distances_of_images = np.full(shape, np.nan) if distances else None
    loss_sum = 0.0
    weight_sum = 0.0
    for rows, logits in iterate_logits(network, images, precision):
        index = torch.from_numpy(rows)
        truth = masks.make_pixel_labels(index, labels[index.to(labels.device)])
        if loss is not None:
            value, weight = loss(logits, truth)
            loss_sum = loss_sum + float(value) * float(weight)
            weight_sum = weight_sum + float(weight)
        areas = decide_class_areas(logits, network.spec.task)
        outlined = truth == 1
        for counts, kind_areas in ((predicted, areas), (reference, outlined), (common, areas & outlined)):
            counts[rows] = kind_areas.flatten(2).sum(2).cpu().numpy()
        if distances_of_images is not None:
            spacing = None if masks.spacing is None else masks.spacing[rows]
            distances_of_images[rows] = _measure_distances(areas.cpu().numpy(), outlined.cpu().numpy(), spacing)
    is_known = ~labels.isnan().cpu().numpy()
    return AreaComparison(
        predicted, reference, common, is_known, distances_of_images, loss_sum / weight_sum if weight_sum else None
    )


def _measure_distances(
    areas: NDArray[np.bool_], outlined: NDArray[np.bool_], spacing: NDArray[np.float64] | None
) -> NDArray[np.float64]:
    """Return the Hausdorff distance of each image and class, ``(batch, classes)``; NaN where undefined."""
    result = np.full(areas.shape[:2], np.nan)
    for row, column in np.ndindex(*areas.shape[:2]):
        side: Sequence[float] | None = None if spacing is None else spacing[row].tolist()
        result[row, column] = compute_hausdorff_distance(areas[row, column], outlined[row, column], side)
    return result
