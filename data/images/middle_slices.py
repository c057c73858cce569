"""Draw a preview of a volume: its three middle slices side by side in one picture."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

_GAP = 1
"""Number of black columns between two slices."""


def show_middle_slices(volume: NDArray[Any]) -> NDArray[Any]:
    """Return the middle axial, coronal and sagittal slice of a volume side by side.

    The axial slice has the patient's front at the top and the right side on the left. The coronal slice has the head at
    the top and the right side on the left. The sagittal slice has the head at the top and the front on the left.

    Args:
        volume: ``(depth, height, width, channels)``.

    Returns:
        ``(rows, columns)`` for one channel, else ``(rows, columns, channels)``; below shorter slices it is black.
    """
    depth, height, width, channels = volume.shape
    slices = (volume[depth // 2], volume[::-1, height // 2], volume[::-1, :, width // 2])
    rows = max(each.shape[0] for each in slices)
    columns = sum(each.shape[1] for each in slices) + 2 * _GAP
    picture = np.zeros((rows, columns, channels), volume.dtype)
    left = 0
    for each in slices:
        picture[: each.shape[0], left : left + each.shape[1]] = each
        left += each.shape[1] + _GAP
    return picture[..., 0] if channels == 1 else picture
