"""Bring a volume to the grid of a data set: resampled, then cropped or padded around its middle.

Each axis is resampled on its own, with the triangle filter that Pillow calls bilinear: linear interpolation where
voxels become smaller, a weighted mean where they become larger, so that no structure is skipped. Sums run in one fixed
order, so that the result depends neither on the number of threads nor on a library of linear algebra.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyclinic.data.base.spec import Resize, Spacing, VolumeSize
from polyclinic.data.images.volumes import Volume

_SAME_SCALE = 1e-4
"""Relative difference up to which two spacings are one, because files round their numbers."""


@dataclass(frozen=True)
class FittedVolume:
    """A volume on the grid of a data set.

    Attributes:
        voxels: float32 ``(depth, height, width)``; 0 where ``filled`` does not reach.
        filled: The part of the grid that the volume fills; the rest is padding.
        affine: ``(4, 4)``, from an index ``(depth, height, width, 1)`` to mm in the patient (RAS+).
    """

    voxels: NDArray[np.float32]
    filled: tuple[slice, slice, slice]
    affine: NDArray[np.float64]


@dataclass(frozen=True)
class _AxisPlan:
    """How one axis is resampled.

    Attributes:
        scale: Width of a new voxel in old ones.
        origin: Centre of the grid's first voxel, as an index of the old axis; outside if the axis is padded.
        centres: ``(n,)``, the centres of the new voxels that the volume fills, as positions on the old axis, whose
            first voxel reaches from 0 to 1.
        filled: Where these voxels are on the new axis.
    """

    old: int
    scale: float
    origin: float
    centres: NDArray[np.float64]
    filled: slice


def fit_volume(
    volume: Volume, size: VolumeSize, *, spacing: Spacing | None = None, resize: Resize = "pad", nearest: bool = False
) -> FittedVolume:
    """Bring a volume to a grid of ``size`` voxels around its middle.

    Args:
        size: Numbers of voxels along depth, height and width.
        spacing: Distance of neighbouring voxels in mm: the volume is resampled to it, then cropped or padded. None
            resizes the whole volume, as ``resize`` says.
        resize: ``"pad"`` makes the whole volume fit, with voxels that are equally wide in all directions, and pads;
            ``"stretch"`` fills the grid along each axis.
        nearest: Take the nearest voxel instead of a mean, as masks need it, so that every value is one of the file's.
    """
    plans = _plan_axes(volume, size, spacing, resize)
    voxels: NDArray[Any] = volume.voxels
    # The axis that shrinks most goes first, which leaves the others less to do.
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
        # One width in mm for all directions, with which the longest side just fits.
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
    """Resample one axis with a triangle as wide as two new voxels, or two old ones if these are larger."""
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
