"""Choose test images of a segmentation for people to look at: for each class, images from the best Dice to the
worst.
"""

import base64
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polyclinic.common.metrics.segmentation import AreaComparison
from polyclinic.common.models.network import (
    Precision,
    SplitNetwork,
    decide_class_areas,
    select_head_row_labels,
)
from polyclinic.common.models.segmenting import compare_with_masks, iterate_logits
from polyclinic.data.base.image_set import ImageSet
from polyclinic.data.images.outlines import draw_outlines
from polyclinic.data.images.pixels import load_pixels_on_device, make_mask_tensors
from polyclinic.data.images.reading import encode_png_thumbnail


@dataclass(frozen=True)
class OutlinedImage:
    """One image with the outlines of the labelled and the predicted area of a class.

    Attributes:
        row: Index of the image.
        dice: Dice of this image alone.
        png: The picture as a PNG file in base64.
    """

    row: int
    dice: float
    png: str


def compare_test_images(
    network: SplitNetwork, images: ImageSet, device: str, precision: Precision = "auto", *, distances: bool = False
) -> AreaComparison:
    """Compare predicted and outlined areas of all images, for each class of the network.

    Args:
        network: The network.
        images: The images, with masks.
        device: ``cpu`` or ``cuda``.
        precision: Number format of the computation.
        distances: True to compute Hausdorff distances.
    """
    pixels = load_pixels_on_device(images, device)
    masks = make_mask_tensors(images, network.class_names, pixels.device)
    assert masks is not None, "checked when the data were loaded"
    labels = select_head_row_labels(images, network.class_names).to(pixels.device)
    return compare_with_masks(network, pixels, masks, labels, precision, distances=distances)


def rank_images(compared: AreaComparison, column: int) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Return the indices of the images in which a class is outlined, by rising Dice, and the Dice of each image."""
    rows = np.flatnonzero(compared.is_known[:, column] & (compared.reference[:, column] > 0))
    both = compared.common[rows, column]
    dice = 2 * both / (compared.predicted[rows, column] + compared.reference[rows, column])
    order = np.argsort(dice, kind="stable")
    return rows[order], dice[order]


def choose_spread_indices(count: int, limit: int) -> list[int]:
    """Return at most ``limit`` of the indices below ``count``: the last, the first, and others evenly between,
    descending.
    """
    return sorted({int(index) for index in np.linspace(0, count - 1, min(limit, count)).round()}, reverse=True)


def draw_chosen_images(
    network: SplitNetwork,
    images: ImageSet,
    chosen: dict[str, list[tuple[int, float]]],
    device: str,
    precision: Precision = "auto",
) -> dict[str, list[OutlinedImage]]:
    """Draw the outlines of chosen images of each class.

    Args:
        network: The network.
        images: The images, with masks.
        chosen: Class -> index and Dice of each of its images.
        device: ``cpu`` or ``cuda``.
        precision: Number format of the computation.
    """
    rows = np.array(sorted({row for class_images in chosen.values() for row, _ in class_images}), np.intp)
    if not len(rows):
        return {name: [] for name in chosen}
    selected = images.select_rows(rows)
    index_of_row = {int(row): index for index, row in enumerate(rows)}
    assert selected.masks is not None, "checked when the data were loaded"
    names = list(chosen)
    columns = [network.class_names.index(name) for name in names]
    outlined = selected.masks.read_class_areas(np.arange(len(rows)), names)  # (rows, names, *spatial)
    predicted = np.empty_like(outlined)
    for batch, logits in iterate_logits(network, load_pixels_on_device(selected, device), precision):
        predicted[batch] = decide_class_areas(logits, network.spec.task)[:, columns].cpu().numpy()

    pictures = selected.images
    drawn = dict[str, list[OutlinedImage]]()
    for column, (name, class_images) in enumerate(chosen.items()):
        drawn[name] = list[OutlinedImage]()
        for row, dice in class_images:
            index = index_of_row[row]
            picture = draw_outlines(pictures[index], outlined[index, column], predicted[index, column])
            png = encode_png_thumbnail(picture, max(picture.shape))
            drawn[name].append(OutlinedImage(row, dice, base64.b64encode(png).decode()))
    return drawn
