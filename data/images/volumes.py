"""Read volumes: NIfTI files and DICOM series.

A volume is an array ``(depth, height, width)``. The first axis points from the feet to the head, the second from front
to back, the third from the patient's right to the left. So ``voxels[k]`` is the axial slice that
:func:`polyclinic.data.images.nifti.render_nifti_slice` shows. If the axes of a file are oblique in the patient, they
are only permuted and flipped to the nearest of these axes, and the voxels are not resampled.
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

from polyclinic.data.base.decoded_size import DEFAULT_LARGEST_MB, compute_decoded_file_size_limit, refuse_oversized_file
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
"""The attribute ``kind`` of a volume from a NIfTI file."""
_WORLD = ((2, 1), (1, -1), (0, -1))
"""For each axis of a volume, the parallel axis of the patient (0 right, 1 front, 2 head), and 1 or -1 for the same or
the opposite direction."""
_MOST_SHEAR = 0.01
"""A grid counts as rectangular if the cosine between two axes is at most this, because files round their numbers."""
_BYTES_PER_VOXEL = np.dtype(np.float32).itemsize


@dataclass(frozen=True)
class Volume:
    """The voxels of a volume and their position in the patient.

    Attributes:
        voxels: float32 ``(depth, height, width)``, after the rescaling that the file states; NaN for padding.
        affine: ``(4, 4)``, maps an index ``(depth, height, width, 1)`` to a position in mm in the patient (RAS+).
        kind: ``NIfTI``, ``DICOM series`` or ``DICOM``.
        knows_orientation: False if the file does not state the orientation of its axes; nibabel's default is then
            assumed: from left to right, from back to front, from feet to head.
        to_file: ``(4, 4)``, maps an index ``(depth, height, width, 1)`` to an index in the file; it only permutes and
            flips axes.
    """

    voxels: NDArray[np.float32]
    affine: NDArray[np.float64]
    kind: str = NIFTI
    knows_orientation: bool = True
    to_file: NDArray[np.float64] = field(default_factory=lambda: np.eye(4))

    @property
    def spacing(self) -> Spacing:
        """The distance between neighbouring voxels in mm, along depth, height and width."""
        return measure_spacing(self.affine)

    @property
    def header(self) -> VolumeHeader:
        """The grid of the volume."""
        depth, height, width = self.voxels.shape
        return VolumeHeader((depth, height, width), self.spacing, self.kind, self.knows_orientation)


def read_volume(content: Path | bytes, largest_mb: int = DEFAULT_LARGEST_MB) -> Volume:
    """Read a NIfTI file, a folder with one DICOM series, or a DICOM file of several frames.

    Args:
        content: Path of the file or folder, or the bytes of a DICOM file.
        largest_mb: Size limit for the voxels in MiB; it is higher for a large file, see
            :mod:`polyclinic.data.base.decoded_size`.

    Raises:
        ValueError: If the file is not a volume, is damaged or too large, or its grid is not rectangular.
    """
    with _open_volume(content, largest_mb) as source:
        return _turn_to_canonical(source.read_voxels(), source)


def read_volume_header(content: Path | bytes, largest_mb: int = DEFAULT_LARGEST_MB) -> VolumeHeader:
    """Read the grid of a volume, without its voxels.

    Raises:
        ValueError: As in :func:`read_volume`, except for damaged voxels.
    """
    return read_volume_grid(content, largest_mb).header


def read_volume_grid(content: Path | bytes, largest_mb: int = DEFAULT_LARGEST_MB) -> Volume:
    """Return a volume with the grid of a file and with zeros as voxels; the voxels of the file are not read.

    Raises:
        ValueError: As in :func:`read_volume_header`.
    """
    with _open_volume(content, largest_mb) as source:
        return _turn_to_canonical(np.broadcast_to(np.float32(0), source.shape), source)


@dataclass(frozen=True)
class _VolumeSource:
    """An open volume file, with axes in the order of the file.

    Attributes:
        shape: Number of voxels along each axis.
        affine: ``(4, 4)``, maps an index of the file to a position in mm in the patient (RAS+).
        read_voxels: Returns float32 voxels of ``shape``.
    """

    shape: VolumeSize
    affine: NDArray[np.float64]
    kind: str
    read_voxels: Callable[[], NDArray[np.float32]]
    knows_orientation: bool = True


@contextmanager
def _open_volume(content: Path | bytes, largest_mb: int) -> Iterator[_VolumeSource]:
    """Open a volume of any supported kind.

    Raises:
        ValueError: If the file is not a volume, has a single slice, or its voxels need too much memory.
    """
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
    """Refuse a volume with a single slice, or whose voxels need too much memory; return the memory limit in bytes.

    Args:
        itemsize: Bytes per voxel in the file.
        packed: Size of the files in bytes.
    """
    if min(shape) == 1:
        sides = " × ".join(map(str, shape))
        raise ValueError(f"its shape is {sides}: {ONE_SLICE}")
    limit = max(packed, compute_decoded_file_size_limit(packed, largest_mb))
    refuse_oversized_file(math.prod(shape) * max(itemsize, _BYTES_PER_VOXEL), limit)
    return limit


def measure_spacing(affine: NDArray[np.float64]) -> Spacing:
    """Return the distance between neighbouring voxels in mm along each axis of an affine matrix ``(4, 4)``."""
    first, second, third = np.sqrt((affine[:3, :3] ** 2).sum(axis=0)).tolist()
    return first, second, third


def _turn_to_canonical(voxels: NDArray[np.float32], source: _VolumeSource) -> Volume:
    """Permute and flip the axes of a volume to the order of this module; the voxels are not copied.

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
