"""Compute a network's class probabilities of pictures, on the GPU if there is one."""

import numpy as np
import torch
from numpy.typing import NDArray

from polyclinic.common.models.gpu import move_network_to_device
from polyclinic.common.models.network import SplitNetwork, compute_image_probabilities
from polyclinic.data.base.image_set import ImageSet
from polyclinic.data.images.pixels import ImageTensors, convert_to_channels_first, load_pixels_on_device


def compute_picture_probabilities(
    network: SplitNetwork, images: NDArray[np.uint8] | ImageSet, device: str = ""
) -> NDArray[np.float32]:
    """Return probabilities ``(n, classes)`` of uint8 images.

    Args:
        network: The network.
        images: An array ``(n, height, width, 1 or 3)``, or a set of images.
        device: ``cpu`` or ``cuda``; empty for the GPU if there is one.
    """
    if not len(images):
        return np.zeros((0, len(network.class_names)), np.float32)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if isinstance(images, ImageSet):
        pixels = load_pixels_on_device(images, device)
    else:
        pixels = ImageTensors(convert_to_channels_first(images), None, torch.device(device))
    return compute_image_probabilities(move_network_to_device(network, device), pixels)
