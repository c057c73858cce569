"""Convert a volume to the 8-bit voxels that a network receives."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from polyclinic.data.base.spec import PictureRenderingOptions, Resize, VolumeSize, Window
from polyclinic.data.images.grey import apply_voi_window, rescale_to_unit_range
from polyclinic.data.images.volume_grid import FittedVolume, fit_volume
from polyclinic.data.images.volume_header import VolumeHeader
from polyclinic.data.images.volumes import Volume, read_volume

DARKEST_PERCENT, BRIGHTEST_PERCENT = 0.5, 99.5
"""Percentiles of a volume's values that are shown as black and as white if ``data.window`` is not set."""
_LARGEST = 1e30
"""Voxels with larger absolute values are clipped, because differences between them could overflow."""


@dataclass(frozen=True)
class RenderedVolume:
    """An 8-bit volume.

    Attributes:
        voxels: uint8 ``(depth, height, width, 1)``.
        is_blank: True if all voxels have one grey value although the values in the file differ, because the window
            misses all of them.
        header: The grid of the file.
    """

    voxels: NDArray[np.uint8]
    is_blank: bool
    header: VolumeHeader


def render_volume(
    content: Path | bytes, size: VolumeSize, resize: Resize, rendering: PictureRenderingOptions
) -> RenderedVolume:
    """Read a volume, resample it to ``size`` voxels, and convert it to 8 bits.

    Raises:
        ValueError: If the file is not a volume, is damaged or too large, or has no finite value.
    """
    volume = fill_missing_voxels(read_volume(content, rendering.largest_mb))
    fitted = fit_volume(volume, size, spacing=rendering.spacing, resize=resize)
    grey = convert_volume_to_8_bits(fitted, rendering.window)
    inside = fitted.voxels[fitted.filled]
    is_blank = bool(grey[fitted.filled].min() == grey[fitted.filled].max() and inside.min() < inside.max())
    return RenderedVolume(grey[..., None], is_blank, volume.header)


def fill_missing_voxels(volume: Volume) -> Volume:
    """Replace voxels that are NaN or infinite by the smallest finite value of the volume, which is air in CT.

    Raises:
        ValueError: If no voxel is finite.
    """
    voxels = volume.voxels
    is_number = np.isfinite(voxels)
    if not is_number.all():
        if not is_number.any():
            raise ValueError("the volume holds no number, only NaN or infinite values")
        voxels = np.where(is_number, voxels, voxels[is_number].min())
    if max(abs(float(voxels.min())), abs(float(voxels.max()))) > _LARGEST:
        voxels = voxels.clip(-_LARGEST, _LARGEST)
    return volume if voxels is volume.voxels else replace(volume, voxels=voxels)


def convert_volume_to_8_bits(volume: FittedVolume, window: Window | None) -> NDArray[np.uint8]:
    """Return a volume as grey values from 0 to 255, ``(depth, height, width)``; padding is black.

    Args:
        window: Centre and width, in the values of the file; with None, black and white are the 0.5th and the 99.5th
            percentile of the voxels without padding.
    """
    inside = volume.voxels[volume.filled]
    if window is not None:
        shown = apply_voi_window(inside, *window)
    else:
        low, high = np.percentile(inside, (DARKEST_PERCENT, BRIGHTEST_PERCENT))
        shown = rescale_to_unit_range(inside, low, high)
    grey = np.zeros(volume.voxels.shape, np.uint8)
    grey[volume.filled] = np.round(255 * shown).astype(np.uint8)
    return grey
