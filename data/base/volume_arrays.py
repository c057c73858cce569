"""Distinguish arrays of volumes from arrays of pictures by their shape."""

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

MAX_COLOR_CHANNELS = 4
"""A last axis of at most this length holds colour channels."""


def is_volume_array(shape: Sequence[int]) -> bool:
    """Return True if an array holds volumes: ``(n, depth, height, width)`` or ``(n, depth, height, width, 1)``.

    If the last of four axes has at most four entries, they are colour channels, and the array holds pictures.
    """
    return (len(shape) == 4 and shape[3] > MAX_COLOR_CHANNELS) or (len(shape) == 5 and shape[4] == 1)


def is_image_array(shape: Sequence[int]) -> bool:
    """Return True if an array holds pictures, ``(n, height, width[, 3])``, or volumes (:func:`is_volume_array`)."""
    return len(shape) == 3 or (len(shape) == 4 and shape[3] == 3) or is_volume_array(shape)


def add_channel_axis(images: NDArray[Any]) -> NDArray[Any]:
    """Add a channel axis to volumes: ``(n, depth, height, width, 1)``; other arrays are returned unchanged."""
    return images[..., None] if images.ndim == 4 and is_volume_array(images.shape) else images
