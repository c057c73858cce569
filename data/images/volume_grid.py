"""Resample a volume to the voxel size of a data set, then crop or pad it around its centre.

Each axis is resampled separately, with the triangle filter that Pillow calls bilinear: linear interpolation where
voxels become smaller, and a weighted mean where they become larger, so that no structure is skipped. Sums have a fixed
order, so that the result depends neither on the number of threads nor on the linear algebra library.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyclinic.data.base.spec import Resize, Spacing, VolumeSize
from polyclinic.data.images.volumes import Volume

_SAME_SCALE = 1e-4
"""Two spacings are equal if their relative difference is at most this, because files round their numbers."""


@dataclass(frozen=True)
class FittedVolume:
    """A volume after resampling, cropping and padding to the image size of a data set.

    Attributes:
        voxels: float32 ``(depth, height, width)``; 0 outside ``filled``.
        filled: Slices of the voxels that come from the volume; the rest is padding.
        affine: ``(4, 4)``, maps an index ``(depth, height, width, 1)`` to a position in mm in the patient (RAS+).
    """

    voxels: NDArray[np.float32]
    filled: tuple[slice, slice, slice]
    affine: NDArray[np.float64]


@dataclass(frozen=True)
class _AxisPlan:
    """Parameters for resampling one axis.

    Attributes:
        old: Number of old voxels.
        scale: Width of a new voxel divided by that of an old voxel.
        origin: Centre of the first new voxel, as an index of the old axis; it is outside if the axis is padded.
        centres: ``(n,)``, the centres of the new voxels without padding, as positions on the old axis; the first old
            voxel extends from 0 to 1.
        filled: Slice of the new axis with these voxels.
    """

    old: int
    scale: float
    origin: float
    centres: NDArray[np.float64]
    filled: slice


def fit_volume(
    volume: Volume, size: VolumeSize, *, spacing: Spacing | None = None, resize: Resize = "pad", nearest: bool = False
) -> FittedVolume:
    """Resample, crop and pad a volume to ``size`` voxels around its centre.

    Args:
        size: Numbers of voxels along depth, height and width.
        spacing: Distance between neighbouring voxels in mm. The volume is resampled to it, then cropped or padded. With
            None, the whole volume is resized according to ``resize``.
        resize: ``"pad"`` fits the whole volume in, with cubic voxels, and pads; ``"stretch"`` fills each axis.
        nearest: Use the nearest voxel instead of a mean. Masks need it, because a mean of labels has no meaning.
    """
    plans = _plan_axes(volume, size, spacing, resize)
    voxels: NDArray[Any] = volume.voxels
    # Resample the axis that shrinks most first, so that the other axes have fewer voxels.
    for axis in sorted(range(3), key=lambda axis: (len(plans[axis].centres) / plans[axis].old, axis)):
        voxels = _take_nearest(voxels, axis, plans[axis]) if nearest else _resample_axis(voxels, axis, plans[axis])
    filled = (plans[0].filled, plans[1].filled, plans[2].filled)
    canvas = np.zeros(size, np.float32)
    canvas[filled] = voxels
    to_old = np.diag([*(plan.scale for plan in plans), 1.0])
    to_old[:3, 3] = [plan.origin for plan in plans]
    return FittedVolume(canvas, filled, volume.affine @ to_old)


def _plan_axes(volume: Volume, size: VolumeSize, spacing: Spacing | None, resize: Resize) -> list[_AxisPlan]:
    shape, own = volume.voxels.shape, volume.spacing
    if spacing is not None:
        scales = [new / old for new, old in zip(spacing, own, strict=True)]
    elif resize == "stretch":
        scales = [old / new for old, new in zip(shape, size, strict=True)]
    else:
        # The same voxel width in mm for all directions, such that the longest side just fits.
        width = max(old * step / new for old, step, new in zip(shape, own, size, strict=True))
        scales = [width / step for step in own]
    return [_plan_axis(old, new, scale) for old, new, scale in zip(shape, size, scales, strict=True)]


def _plan_axis(old: int, new: int, scale: float) -> _AxisPlan:
    if abs(scale - 1) <= _SAME_SCALE:
        scale = 1.0
    resampled = max(1, round(old / scale))
    cut = (resampled - new) // 2  # negative: so many voxels of padding in front
    first, last = max(cut, 0), min(cut + new, resampled)
    middle_to_middle = np.arange(first, last, dtype=np.float64) + (0.5 - resampled / 2)
    centres = middle_to_middle * scale + old / 2
    origin = (cut + 0.5 - resampled / 2) * scale + old / 2 - 0.5
    return _AxisPlan(old, scale, origin, centres, slice(first - cut, last - cut))


def _resample_axis(voxels: NDArray[Any], axis: int, plan: _AxisPlan) -> NDArray[np.float32]:
    """Resample one axis with a triangle filter that is two new voxels wide, or two old voxels if these are larger."""
    moved = np.moveaxis(voxels, axis, 0)
    result = np.empty((len(plan.centres), *moved.shape[1:]), np.float32)
    support = max(plan.scale, 1.0)
    for place, centre in enumerate(plan.centres):
        begin = max(int(centre - support + 0.5), 0)
        end = min(int(centre + support + 0.5), plan.old)
        distances = np.abs(np.arange(begin, end) + 0.5 - centre) / support
        weights = np.maximum(1 - distances, 0)
        weights = (weights / weights.sum()).astype(np.float32)
        row = result[place]
        np.multiply(moved[begin], weights[0], out=row)
        for step, weight in zip(range(begin + 1, end), weights[1:], strict=True):
            if weight:
                row += moved[step] * weight
    return np.moveaxis(result, 0, axis)


def _take_nearest(voxels: NDArray[Any], axis: int, plan: _AxisPlan) -> NDArray[Any]:
    places = np.clip(np.floor(plan.centres).astype(np.intp), 0, plan.old - 1)
    return voxels.take(places, axis=axis)
