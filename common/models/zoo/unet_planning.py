"""Choose voxel size, patch, batch and levels of a U-Net for volumes by the rules of nnU-Net.

Isensee, Jaeger, Kohl, Petersen and Maier-Hein, "nnU-Net: a self-configuring method for deep learning-based biomedical
image segmentation", Nature Methods 18, 2021. Numbers are those of the authors' nnU-Net v2 (``3d_fullres``), whose
configuration of 8 GB is our default. Axes are depth, height and width.

Departures: no axis of a patch is longer than the volumes in the cache, which all have one size; there is no coarser
configuration (``3d_lowres``) and none of single slices.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

ANISOTROPY = 3.0
"""Minimum ratio of voxel sides for an axis to count as coarse, compared with the other axes."""
COARSE_PERCENTILE = 10.0
"""Percentile of the spacings that replaces the median on a coarse axis, so that it is interpolated less."""
FIRST_PATCH_VOXELS = 256**3
SMALLEST_MAP_SIDE = 4
"""Smallest side of the feature maps at the lowest level."""
FEWEST_VOXELS = 2 * SMALLEST_MAP_SIDE
"""Fewest voxels of a volume along each axis. With fewer, no level halves the axis, and the planner of nnU-Net v2 stops
with an error (``get_pool_and_conv_props`` looks for the spacing of an axis that it has left out): such data get its
configuration of single slices."""
FIRST_FEATURES, MOST_FEATURES = 32, 320
CONVOLUTIONS = 2
"""Number of convolutions of each level, in the encoder and in the decoder."""
REFERENCE_VALUES, REFERENCE_GB, REFERENCE_BATCH = 560_000_000, 8.0, 2
"""Values of all feature maps of a batch of this size that fit a GPU of this memory."""
LARGEST_SHARE = 0.05
"""Maximum share of all voxels of the training volumes in one batch."""

Sides = tuple[int, ...]


@dataclass(frozen=True)
class UNetLevels:
    """The levels of a U-Net, from the full resolution down.

    Attributes:
        kernel_sizes: Side of the convolutions of each level along each axis; 1 while the voxels of an axis are coarse.
        strides: Factor by which each level is smaller than the level before, along each axis; 1 at the first level.
    """

    kernel_sizes: tuple[Sides, ...]
    strides: tuple[Sides, ...]

    @property
    def divisors(self) -> Sides:
        """Number by which each side of a patch is divided from the first to the last level."""
        return tuple(np.prod(self.strides, axis=0).tolist())

    @property
    def features(self) -> tuple[int, ...]:
        """Number of features of each level."""
        return tuple(count_level_features(level) for level in range(len(self.strides)))


@dataclass(frozen=True)
class UNetPlan:
    """The choice of nnU-Net's rules for volumes of one spacing.

    Attributes:
        patch_size: Depth, height and width in voxels.
        batch_size: Number of patches in a batch.
        levels: The levels of the network.
    """

    patch_size: Sides
    batch_size: int
    levels: UNetLevels


def count_level_features(level: int) -> int:
    """Return the number of features of a level; level 0 has the full resolution."""
    return min(MOST_FEATURES, FIRST_FEATURES << level)


def choose_target_spacing(
    median: Sequence[float], finer: Sequence[float], median_shape: Sequence[float]
) -> tuple[float, ...]:
    """Return the spacing to which all volumes are resampled: the median along each axis.

    If one axis has much longer voxels and much fewer of them than the others, it gets the 10th percentile, but no
    smaller voxels than the others.

    Args:
        median: Median spacing of the volumes along each axis, in mm.
        finer: Their 10th percentile (:data:`COARSE_PERCENTILE`).
        median_shape: Median number of voxels along each axis.
    """
    target = list(median)
    coarse = int(np.argmax(target))
    others = [axis for axis in range(len(target)) if axis != coarse]
    longest = max(target[axis] for axis in others)
    fewest = min(median_shape[axis] for axis in others)
    if target[coarse] > ANISOTROPY * longest and median_shape[coarse] * ANISOTROPY < fewest:
        target[coarse] = max(finer[coarse], longest)
    return tuple(target)


def choose_levels(spacing: Sequence[float], patch: Sequence[int]) -> UNetLevels:
    """Return the levels of a network for patches of a size.

    Each level halves the axes whose voxels are less than twice as long as the shortest, until a side would be below
    four.
    """
    voxel, size = np.array(spacing, np.float64), np.array(patch, np.int64)
    axes = len(voxel)
    kernel = np.ones(axes, np.int64)
    kernels, strides = list[Sides](), [(1,) * axes]
    while True:
        can_halve = size >= 2 * SMALLEST_MAP_SIDE
        if not can_halve.any():
            break
        can_halve &= voxel < 2 * voxel[can_halve].min()
        if can_halve.sum() == 1 and size[can_halve][0] < 3 * SMALLEST_MAP_SIDE:
            break
        kernel[voxel < 2 * voxel.min()] = 3  # and 3 it stays
        kernels.append(tuple(kernel.tolist()))
        strides.append(tuple(np.where(can_halve, 2, 1).tolist()))
        voxel = np.where(can_halve, voxel * 2, voxel)
        size = np.where(can_halve, -(-size // 2), size)
    return UNetLevels((*kernels, (3,) * axes), tuple(strides))


def count_map_values(patch: Sequence[int], strides: Sequence[Sides], classes: int) -> int:
    """Return the number of values of all feature maps of a network for one patch.

    Args:
        classes: Number of classes, without the background.
    """
    size, total = np.array(patch, np.int64), 0
    for level, stride in enumerate(strides):
        size = size // np.array(stride)
        convolved = CONVOLUTIONS
        if level < len(strides) - 1:  # the way up: another block, after a transposed convolution
            convolved += CONVOLUTIONS + 1
        total += convolved * count_level_features(level) * int(size.prod())
    return total + (classes + 1) * int(np.prod(patch))


def plan_unet(
    spacing: Sequence[float],
    median_shape: Sequence[float],
    largest_patch: Sequence[int],
    volumes: int,
    classes: int,
    memory_gb: float = REFERENCE_GB,
) -> UNetPlan:
    """Return patch, batch and levels for volumes of one spacing.

    Args:
        spacing: Sides of a voxel in mm.
        median_shape: Median number of voxels of the volumes along each axis, at this spacing.
        largest_patch: Size of the volumes in the cache.
        volumes: Number of training volumes.
        classes: Number of classes, without the background.
        memory_gb: Memory of the GPU for which the network is planned.
    """
    voxel = np.array(spacing, np.float64)
    aspect = 1 / voxel
    longest = aspect * (FIRST_PATCH_VOXELS / aspect.prod()) ** (1 / len(voxel))
    within = np.minimum(np.round(longest), np.minimum(np.round(median_shape), largest_patch))
    patch, levels = _fit_patch(spacing, within.astype(np.int64), largest_patch)
    most = REFERENCE_VALUES * memory_gb / REFERENCE_GB
    values = count_map_values(patch, levels.strides, classes)
    while values > most:
        shares = np.array(patch) / np.array(median_shape)
        axis = int(np.flatnonzero(shares == shares.max())[-1])
        if patch[axis] <= 2 * SMALLEST_MAP_SIDE:
            break
        patch, levels = _shorten_patch(spacing, patch, levels, axis)
        values = count_map_values(patch, levels.strides, classes)
    whole = float(np.prod(np.asarray(median_shape, np.float64))) * volumes
    of_memory = round(most / values * REFERENCE_BATCH)
    of_voxels = round(whole * LARGEST_SHARE / float(np.prod(patch)))
    return UNetPlan(patch, max(min(of_memory, of_voxels), REFERENCE_BATCH), levels)


def _fit_patch(spacing: Sequence[float], patch: Sequence[int], largest: Sequence[int]) -> tuple[Sides, UNetLevels]:
    """Return a patch with sides that the network's strides divide, and the network's levels.

    Sides are rounded up, or down if the volumes in the cache are shorter.
    """
    sides = np.array(patch)
    while True:
        levels = choose_levels(spacing, sides.tolist())
        divisors = np.array(levels.divisors)
        up = -(-sides // divisors) * divisors
        is_too_long = up > np.array(largest)
        if not is_too_long.any():
            return tuple(up.tolist()), levels
        sides = np.where(is_too_long, up - divisors, sides)  # of which the network may have fewer levels


def _shorten_patch(spacing: Sequence[float], patch: Sides, levels: UNetLevels, axis: int) -> tuple[Sides, UNetLevels]:
    """Return a patch that is shorter along one axis, and the levels of its network.

    The step is the divisor of the shorter patch, because the divisor of the present patch might skip possible sizes.
    """
    shorter = np.array(patch)
    shorter[axis] -= levels.divisors[axis]
    step = choose_levels(spacing, shorter.tolist()).divisors[axis]
    shorter = np.array(patch)
    shorter[axis] -= step
    return _fit_patch(spacing, shorter.tolist(), patch)
