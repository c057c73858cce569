"""Notes for the user on the grids of volumes: unequal voxel sizes, cropped volumes, an unknown orientation."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from polyclinic.common.system.plain_text import format_bytes, format_count_with_noun
from polyclinic.data.base.spec import PictureRenderingOptions, Spacing, VolumeSize, describe_sides
from polyclinic.data.images.file_kinds import is_nifti_file, read_first_bytes
from polyclinic.data.images.volume_header import ONE_SLICE, VolumeHeader

MOST_UNLIKE = 1.5
"""Voxel sizes count as unequal if the largest is more than this many times the smallest."""


def survey_volumes(files: Sequence[Path]) -> list[VolumeHeader]:
    """Return the grids of files if all are volumes; empty if a file is a picture or a single slice.

    Unreadable files are ignored. A DICOM file with several frames counts as a picture, because it may be a film.
    """
    from polyclinic.data.images.volumes import read_volume_header  # takes a second

    volumes = list[VolumeHeader]()
    for file in files:
        if not file.is_dir() and not is_nifti_file(read_first_bytes(file)):
            return []
        try:
            volumes.append(read_volume_header(file))
        except (OSError, ValueError) as error:
            if ONE_SLICE in str(error):
                return []
    return volumes


def describe_grids(volumes: Sequence[VolumeHeader]) -> str:
    """Return a phrase with the smallest and the largest shape and spacing of volumes along each axis."""
    shape = describe_sides_of_volumes([volume.shape for volume in volumes])
    spacing = describe_sides_of_volumes([volume.spacing for volume in volumes])
    return f"{shape} voxels of {spacing} mm (depth × height × width)"


def describe_sides_of_volumes(sides: Sequence[Sequence[float]]) -> str:
    """Return the smallest and largest side of volumes along each axis, ``16 to 32 × 64 × 64``."""
    return " × ".join(_describe_range([of_volume[axis] for of_volume in sides]) for axis in range(3))


def describe_decoded_volumes(count: int, size: VolumeSize) -> str:
    """Return a clause with the number of volumes, their size, and the memory that they take once decoded."""
    memory = format_bytes(count * math.prod(size))
    return f"{count:,} volumes of {describe_sides(size)} take {memory} once decoded"


def _describe_range(values: Sequence[float]) -> str:
    smallest, largest = f"{min(values):.3g}", f"{max(values):.3g}"
    return smallest if smallest == largest else f"{smallest} to {largest}"


def find_median_spacing(volumes: Sequence[VolumeHeader]) -> Spacing:
    """Return the median spacing of volumes in mm along each axis, rounded to two digits."""
    depth, height, width = (
        float(f"{np.median([volume.spacing[axis] for volume in volumes]):.2g}") for axis in range(3)
    )
    return depth, height, width


def has_unlike_spacings(volumes: Sequence[VolumeHeader]) -> bool:
    """Return True if voxel sizes along an axis differ by more than the factor :data:`MOST_UNLIKE`."""
    spacings = np.array([volume.spacing for volume in volumes])
    return bool((spacings.max(axis=0) > MOST_UNLIKE * spacings.min(axis=0)).any())


def list_volume_notes(
    volumes: Sequence[VolumeHeader], size: VolumeSize, rendering: PictureRenderingOptions
) -> list[tuple[str, str]]:
    """Return notes on problems with these settings for volumes with these grids, as pairs of problem and remedy.

    Args:
        size: Depth, height and width in voxels to which all volumes are resized.
    """
    notes, read = list[tuple[str, str]](), format_count_with_noun(len(volumes), "volume")
    if rendering.window is None:
        problem = "no window: each volume is shown from its own 0.5th to its 99.5th percentile."
        notes.append((problem, "Right for MRI. For CT, window = [centre, width] shows all alike, such as [40, 400]."))
    if unknown := sum(not volume.knows_orientation for volume in volumes):
        problem = f"{unknown:,} of {read} that were read do not say how they lie in the patient (qform_code and "
        problem += "sform_code are 0): right and left may be exchanged."
        notes.append((problem, "Look at some, and convert them again from DICOM if sides are exchanged."))
    if rendering.spacing is not None:
        extent = np.multiply(size, rendering.spacing)
        sizes = [np.multiply(volume.shape, volume.spacing) for volume in volumes]
        # Losing less than one voxel does no harm.
        cropped = sum(bool((of_volume > extent + rendering.spacing).any()) for of_volume in sizes)
        if cropped:
            grid = " × ".join(f"{side:.4g}" for side in extent)
            problem = f"{cropped:,} of {read} that were read are larger than the grid of {grid} mm, and are cropped"
            notes.append((f"{problem} around their middle.", "A larger image_size or spacing keeps more."))
    elif has_unlike_spacings(volumes):
        problem = (
            "voxels of the files are unlike in size, and each volume is resized as a whole: an organ gets another "
        )
        steps = ", ".join(f"{step:g}" for step in find_median_spacing(volumes))
        remedy = f"spacing = [{steps}] under [data] resamples all to the median, then crops or pads."
        notes.append((f"{problem}size in each.", remedy))
    return notes
