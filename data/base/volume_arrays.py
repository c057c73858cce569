"""Arrays of volumes in the place of arrays of pictures."""

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

MOST_CHANNELS = 4
"""Most entries of a last axis of colours."""


def is_volume_array(shape: Sequence[int]) -> bool:
    """Return True if an array ``(n, depth, height, width)``, or with one channel as a fifth axis, holds volumes.

    A last axis of at most four entries is one of colours.
    """
    return (len(shape) == 4 and shape[3] > MOST_CHANNELS) or (len(shape) == 5 and shape[4] == 1)


def is_image_array(shape: Sequence[int]) -> bool:
    """Return True if an array is one of pictures, ``(n, height, width[, 3])``, or of volumes."""
    return len(shape) == 3 or (len(shape) == 4 and shape[3] == 3) or is_volume_array(shape)


def add_channel_axis(images: NDArray[Any]) -> NDArray[Any]:
    """Return volumes ``(n, depth, height, width)`` with one channel as a fifth axis; other arrays as they are."""
    return images[..., None] if images.ndim == 4 and is_volume_array(images.shape) else images
