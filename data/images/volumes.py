"""Read volumes: NIfTI files and DICOM series.

A volume is an array ``(depth, height, width)``. The first axis runs from the feet to the head, the second from front to
back, the third from the patient's right to the left, so that ``voxels[k]`` is the axial slice that
:func:`polyclinic.data.images.nifti.render_nifti_slice` shows. A volume whose axes lie obliquely in the patient is
turned to the nearest of these axes, and not resampled.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from nibabel import orientations
from numpy.typing import NDArray

from polyclinic.data.base.decoded_size import LARGEST_MB, compute_decoded_file_size_limit, refuse_oversized_file
from polyclinic.data.base.spec import Spacing, VolumeSize
from polyclinic.data.images.dicom_series import open_dicom_series
from polyclinic.data.images.file_kinds import (
    explain_unsupported_file_type,
    is_dicom_file,
    is_nifti_file,
    read_first_bytes,
)
from polyclinic.data.images.nifti import open_nifti_file, read_nifti_header, read_nifti_voxels
from polyclinic.data.images.volume_header import ONE_SLICE, VolumeHeader

io_orientation: Any = orientations.io_orientation  # it has no types
NIFTI = "NIfTI"
"""Kind of a volume in a NIfTI file."""
_WORLD = ((2, 1), (1, -1), (0, -1))
"""For each axis of a volume the axis of the patient (RAS+: right, front, head), and its direction along it."""
_MOST_SHEAR = 0.01
"""Largest cosine between two axes of a grid that counts as rectangular; files round their numbers."""
_BYTES_PER_VOXEL = np.dtype(np.float32).itemsize


@dataclass(frozen=True)
class Volume:
    """Voxels with their place in the patient.

    Attributes:
        voxels: float32 ``(depth, height, width)``, after the file's own rescaling; NaN where the file has no number.
        affine: ``(4, 4)``, from an index ``(depth, height, width, 1)`` to mm in the patient (RAS+).
        kind: ``NIfTI``, ``DICOM series`` or ``DICOM``.
        knows_orientation: False if the file does not say how its axes lie in the patient; then they are taken to run
            from feet to head, from back to front and from left to right, as nibabel does.
        to_file: ``(4, 4)``, from an index ``(depth, height, width, 1)`` to one of the file's own axes: each axis is one
            of the file's, in the same or the opposite direction.
    """

    voxels: NDArray[np.float32]
    affine: NDArray[np.float64]
    kind: str = NIFTI
    knows_orientation: bool = True
    to_file: NDArray[np.float64] = field(default_factory=lambda: np.eye(4))

    @property
    def spacing(self) -> Spacing:
        """The distance of neighbouring voxels in mm, along depth, height and width."""
        return measure_spacing(self.affine)

    @property
    def header(self) -> VolumeHeader:
        """The grid of the volume."""
        depth, height, width = self.voxels.shape
        return VolumeHeader((depth, height, width), self.spacing, self.kind, self.knows_orientation)


def read_volume(content: Path | bytes, largest_mb: int = LARGEST_MB) -> Volume:
    """Read a NIfTI file, a folder with one DICOM series, or a DICOM file of several frames.

    Args:
        content: Path of the file or folder, or the bytes of a DICOM file.
        largest_mb: MiB that the voxels may always take; a large file may take more, see
            :mod:`polyclinic.data.base.decoded_size`.

    Raises:
        ValueError: If it is no volume, damaged, too large, or its voxels do not lie on a rectangular grid.
    """
    with _open_volume(content, largest_mb) as source:
        return _turn_to_canonical(source.read_voxels(), source)


def read_volume_header(content: Path | bytes, largest_mb: int = LARGEST_MB) -> VolumeHeader:
    """Read the grid of a volume, without its voxels.

    Raises:
        ValueError: As in :func:`read_volume`, but for damaged voxels.
    """
    return read_volume_grid(content, largest_mb).header


def read_volume_grid(content: Path | bytes, largest_mb: int = LARGEST_MB) -> Volume:
    """Return a volume of zeros on the grid of a file, whose voxels are not read.

    Raises:
        ValueError: As in :func:`read_volume_header`.
    """
    with _open_volume(content, largest_mb) as source:
        return _turn_to_canonical(np.broadcast_to(np.float32(0), source.shape), source)


@dataclass(frozen=True)
class _VolumeSource:
    """An open volume, in the order of the file's axes.

    Attributes:
        shape: Number of voxels along each axis of ``affine``.
        affine: ``(4, 4)``, from an index of the file to mm in RAS+.
        read_voxels: Returns float32 voxels of ``shape``.
    """

    shape: VolumeSize
    affine: NDArray[np.float64]
    kind: str
    read_voxels: Callable[[], NDArray[np.float32]]
    knows_orientation: bool = True


@contextmanager
def _open_volume(content: Path | bytes, largest_mb: int) -> Iterator[_VolumeSource]:
    """Open a volume of any kind; refuse a single slice, and voxels that take too much memory."""
    head = b""
    if isinstance(content, Path) and not content.is_dir():
        head = read_first_bytes(content)
        if not head:
            raise ValueError("empty, or damaged at its beginning")
        if not is_nifti_file(head) and not is_dicom_file(head):
            raise ValueError(f"no volume: {explain_unsupported_file_type(head)}")
    if isinstance(content, Path) and is_nifti_file(head):
        with open_nifti_file(content) as file:
            header = read_nifti_header(file)
            limit = _refuse_large_volume(header.shape, header.kind.itemsize, content.stat().st_size, largest_mb)
            yield _VolumeSource(
                header.shape,
                header.affine,
                NIFTI,
                lambda: read_nifti_voxels(file, header, limit),
                header.states_orientation,
            )
        return
    series = open_dicom_series(content, largest_mb)
    _refuse_large_volume(series.shape, _BYTES_PER_VOXEL, series.packed_bytes, largest_mb)
    yield _VolumeSource(series.shape, series.affine, series.kind, series.read_voxels)


def _refuse_large_volume(shape: VolumeSize, itemsize: int, packed: int, largest_mb: int) -> int:
    """Refuse a volume whose voxels take too much memory, or that has a single slice; return the limit in bytes."""
    if min(shape) == 1:
        sides = " × ".join(map(str, shape))
        raise ValueError(f"its shape is {sides}: {ONE_SLICE}")
    limit = max(packed, compute_decoded_file_size_limit(packed, largest_mb))
    refuse_oversized_file(math.prod(shape) * max(itemsize, _BYTES_PER_VOXEL), limit)
    return limit


def measure_spacing(affine: NDArray[np.float64]) -> Spacing:
    """Return the distance of neighbouring voxels in mm along each axis of an affine matrix ``(4, 4)``."""
    first, second, third = np.sqrt((affine[:3, :3] ** 2).sum(axis=0)).tolist()
    return first, second, third


def _turn_to_canonical(voxels: NDArray[np.float32], source: _VolumeSource) -> Volume:
    """Return a volume whose axes run as this module says; the voxels are a view of those that are given.

    Raises:
        ValueError: If the axes of the grid are not at right angles.
    """
    directions = source.affine[:3, :3] / np.array(measure_spacing(source.affine))
    cosines = np.abs(directions.T @ directions - np.eye(3))
    if not np.isfinite(cosines).all() or cosines.max() > _MOST_SHEAR:
        raise ValueError("its axes are not at right angles (sheared affine); resample it to a rectangular grid first")
    orientation = io_orientation(source.affine)
    to_old = np.zeros((4, 4))
    to_old[3, 3] = 1
    order, steps = list[int](), list[int]()
    for axis, (world, direction) in enumerate(_WORLD):
        old = int(np.flatnonzero(orientation[:, 0] == world)[0])
        step = int(orientation[old, 1]) * direction
        to_old[old, axis] = step
        to_old[old, 3] = 0 if step > 0 else source.shape[old] - 1
        order.append(old)
        steps.append(step)
    turned = voxels.transpose(order)[:: steps[0], :: steps[1], :: steps[2]]
    return Volume(turned, source.affine @ to_old, source.kind, source.knows_orientation, to_old)
