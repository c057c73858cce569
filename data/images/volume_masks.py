"""Read masks of volumes: NIfTI files with the same grid as the volume, that is, the same shape and affine."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
from numpy.typing import NDArray

from polyclinic.data.images.file_kinds import is_dicom_file, read_first_bytes
from polyclinic.data.images.reading import DecodedImageFormat
from polyclinic.data.images.volume_grid import FittedVolume, fit_volume
from polyclinic.data.images.volumes import NIFTI, Volume, measure_spacing, read_volume

_SAME_PLACE_MM = 0.1
"""Maximum distance in mm between corresponding voxels of a volume and its mask, because files round their numbers."""


def read_volume_mask(file: Path, grid: Volume, form: DecodedImageFormat) -> NDArray[np.float32]:
    """Return the numbers of a mask file, ``(depth, height, width)``, in the order of the volume's voxels.

    Raises:
        ValueError: If the file cannot be read, or has another grid than its volume.
    """
    if is_dicom_file(read_first_bytes(file)):
        raise ValueError(f"{file.name} is a DICOM file: save the mask of a volume as NIfTI")
    mask = read_volume(file, form.rendering.largest_mb)
    refuse_other_grid(file.name, mask, grid)
    return mask.voxels


def refuse_other_grid(name: str, mask: Volume, grid: Volume) -> None:
    """Refuse a mask whose grid differs from that of its volume; the values of voxels are ignored.

    Args:
        name: Name of the mask file, for the error message.

    Raises:
        ValueError: If the mask has another shape or another position in the patient.
    """
    shape = grid.voxels.shape
    if mask.voxels.shape != shape:
        sides = [" x ".join(map(str, each)) for each in (mask.voxels.shape, shape)]
        raise ValueError(f"{name} has {sides[0]} voxels, and its volume {sides[1]}: a mask lies on the same grid")
    corners = np.array([(*corner, 1) for corner in product(*((0, side - 1) for side in shape))]).T  # (4, 8)
    distance = float(np.linalg.norm(((mask.affine - grid.affine) @ corners)[:3], axis=0).max())
    if distance > _SAME_PLACE_MM:
        raise ValueError(f"{name} lies up to {distance:.1f} mm beside its volume in the patient: another affine")


def fit_volume_mask(values: NDArray[Any], grid: Volume, form: DecodedImageFormat) -> NDArray[np.float32]:
    """Resample a label map in the same way as its volume, by the nearest voxel; padding is 0, the background."""
    return _fit(replace(grid, voxels=values), form).voxels


def measure_fitted_spacing(grid: Volume, form: DecodedImageFormat) -> tuple[float, ...]:
    """Return the size of a voxel along each axis in mm, after the volume is resampled."""
    return measure_spacing(_fit(grid, form).affine)


def _fit(label_map: Volume, form: DecodedImageFormat) -> FittedVolume:
    assert isinstance(form.size, tuple)
    return fit_volume(label_map, form.size, spacing=form.rendering.spacing, resize=form.resize, nearest=True)


def restore_volume_mask(values: NDArray[Any], grid: Volume, form: DecodedImageFormat) -> NDArray[Any]:
    """Resample a mask back to the grid of its volume, by the nearest voxel; voxels that were cropped are 0."""
    to_old = np.linalg.inv(grid.affine) @ _fit(grid, form).affine  # a scale and an origin for each axis
    places, inside = list[NDArray[np.intp]](), list[NDArray[np.bool_]]()
    for axis, (old, new) in enumerate(zip(grid.voxels.shape, values.shape, strict=True)):
        index = np.round((np.arange(old) - to_old[axis, 3]) / to_old[axis, axis]).astype(np.intp)
        places.append(np.clip(index, 0, new - 1))
        inside.append((index >= 0) & (index < new))
    restored: NDArray[Any] = values[np.ix_(*places)]
    for axis, is_inside in enumerate(inside):
        np.moveaxis(restored, axis, 0)[~is_inside] = 0
    return restored


def write_nifti_mask(file: Path, values: NDArray[Any], grid: Volume) -> bytes:
    """Return the bytes of a NIfTI file with the mask of a volume, compressed if the name ends in .gz.

    The voxels have the order of the volume's file, so that mask and volume can be compared voxel by voxel. For a DICOM
    volume, the axes are columns, rows and slices, as when ITK reads a series. If the volume's file does not state its
    orientation, the mask file does not state it either.

    Args:
        values: The mask in the order of the volume, ``(depth, height, width)``.
    """
    make: Any = nibabel.Nifti1Image  # it has no types
    stored, affine = turn_to_file_order(values, grid), grid.affine @ np.linalg.inv(grid.to_file)
    if grid.kind != NIFTI:
        stored, affine = stored.transpose(2, 1, 0), affine[:, [2, 1, 0, 3]]
    image = make(stored, affine)
    image.header.set_xyzt_units("mm")
    if not grid.knows_orientation:
        image.set_sform(None, code=0)
        image.set_qform(None, code=0)
    content: bytes = image.to_bytes()
    if file.suffix == ".gz":
        import gzip

        return gzip.compress(content, mtime=0)
    return content


def turn_to_file_order(values: NDArray[Any], grid: Volume) -> NDArray[Any]:
    """Return a mask with the axes in the order of the volume's file; for DICOM ``(slices, rows, columns)``."""
    file_axes = np.abs(grid.to_file[:3, :3]).argmax(axis=0)
    steps = grid.to_file[:3, :3].sum(axis=0)
    unflipped = values[tuple(slice(None, None, int(step)) for step in steps)]
    return unflipped.transpose(np.argsort(file_axes))
