"""Show a volume to people as one picture: its three middle slices side by side."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

_GAP = 1
"""Black columns between two slices."""


def show_middle_slices(volume: NDArray[Any]) -> NDArray[Any]:
    """Return the middle axial, coronal and sagittal slice of a volume side by side.

    The head is at the top of the coronal and the sagittal slice, the front at the top of the axial one and at the left
    of the sagittal one, and the patient's right at the left of the others.

    Args:
        volume: ``(depth, height, width, channels)``.

    Returns:
        ``(rows, columns)`` for one channel, else ``(rows, columns, channels)``; slices that are less high have black
        below.
    """
    depth, height, width, channels = volume.shape
    slices = (volume[depth // 2], volume[::-1, height // 2], volume[::-1, :, width // 2])
    rows, columns = max(each.shape[0] for each in slices), sum(each.shape[1] for each in slices) + 2 * _GAP
    picture = np.zeros((rows, columns, channels), volume.dtype)
    left = 0
    for each in slices:
        picture[: each.shape[0], left : left + each.shape[1]] = each
        left += each.shape[1] + _GAP
    return picture[..., 0] if channels == 1 else picture
