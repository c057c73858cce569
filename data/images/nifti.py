"""Read NIfTI files: one slice as an 8-bit picture in radiological orientation, or all voxels.

nibabel parses the header (NIfTI-1 or NIfTI-2, either byte order, qform or sform). For a slice, voxels are read plane by
plane from the start of the file, up to the last plane that the slice needs.
"""

import gzip
import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
from nibabel import orientations
from nibabel.nifti1 import Nifti1Header
from nibabel.nifti2 import Nifti2Header
from numpy.typing import NDArray

from polyclinic.data.base.decoded_size import (
    compute_decoded_file_size_limit,
    refuse_oversized_file,
)
from polyclinic.data.base.spec import Axis, PictureRenderingOptions
from polyclinic.data.images.dicom import choose_frame_index
from polyclinic.data.images.grey import apply_voi_window, rescale_to_unit_range
from polyclinic.data.images.rendered import RenderedPicture, compute_pixel_aspect

io_orientation: Any = orientations.io_orientation  # it has no types
AXES: dict[Axis, int] = {"sagittal": 0, "coronal": 1, "axial": 2}
"""Index of the world axis (RAS+: right, front, head) at right angles to the slices."""
_BYTES_PER_PIXEL = np.dtype(np.float64).itemsize
_PIECE = 1 << 16
_UNIT_OF_SPACE = 0b111
_OTHER_UNITS = {1: "metres", 3: "micrometres"}
"""NIfTI code -> unit of length. Code 2 is millimetres; code 0, unknown, is read as millimetres."""
_LARGEST = 1e30
"""Voxels with larger absolute values are clipped, because differences between them could overflow."""


@dataclass(frozen=True)
class NiftiHeader:
    """Shape, voxel type and orientation of a volume, from the file's header.

    Attributes:
        shape: Number of voxels along the file's three axes; the first axis varies fastest.
        kind: Data type of a voxel, with the file's byte order.
        start: Position of the first voxel in the decompressed file.
        slope: Factor of the stored values; ``intercept`` is added afterwards.
        orientation: ``(3, 2)``: for each axis of the file the world axis, and its direction, 1 or -1.
        voxel_sizes: ``(3,)``, the distance between two voxels along each axis of the file.
        affine: ``(4, 4)``, maps an index of the file to a position in mm in the patient (RAS+).
        states_orientation: False if the file does not state the orientation of its axes; ``affine`` is then nibabel's
            default.
    """

    shape: tuple[int, int, int]
    kind: np.dtype[Any]
    start: int
    slope: float
    intercept: float
    orientation: NDArray[np.float64]
    voxel_sizes: NDArray[np.float64]
    affine: NDArray[np.float64]
    states_orientation: bool

    @property
    def end(self) -> int:
        """Position after the last voxel in the decompressed file."""
        return self.start + self.plane_byte_size * self.shape[2]

    @property
    def plane_byte_size(self) -> int:
        """Number of bytes of one plane: all voxels with the same index along the file's third axis."""
        return self.shape[0] * self.shape[1] * self.kind.itemsize

    def find_nifti_file_axis(self, world: int) -> tuple[int, bool]:
        """Return the file's axis that is parallel to a world axis, and True if it has the opposite direction.

        Args:
            world: 0 for the axis to the patient's right, 1 to the front, 2 to the head.
        """
        axis = int(np.flatnonzero(self.orientation[:, 0] == world)[0])
        return axis, bool(self.orientation[axis, 1] < 0)


def render_nifti_slice(file: Path, rendering: PictureRenderingOptions) -> RenderedPicture:
    """Decode one slice of a NIfTI volume to an 8-bit grey picture.

    An axial slice has the patient's front at the top and the right side on the left. A coronal slice has the head at
    the top and the right side on the left. A sagittal slice has the head at the top and the front on the left. Axial
    slices are numbered from the feet, coronal slices from the back, sagittal slices from the left.

    A gzip file is decompressed to its end, because its checksum is there.

    Raises:
        ValueError: If the file is damaged, too large or not numeric, or has no such slice.
    """
    with open_nifti_file(file) as content:
        volume = read_nifti_header(content)
        world = AXES[rendering.axis]
        axis, backwards = volume.find_nifti_file_axis(world)
        packed, pixels = file.stat().st_size, math.prod(volume.shape) // volume.shape[axis]
        limit = max(packed, compute_decoded_file_size_limit(packed, rendering.largest_mb))
        refuse_oversized_file(volume.end, limit)
        refuse_oversized_file(max(volume.plane_byte_size, _BYTES_PER_PIXEL * pixels), rendering.largest_mb << 20)
        count = volume.shape[axis]
        number = choose_frame_index(rendering.frame, count, f"the NIfTI file has {count} {rendering.axis} slices")
        at = count - 1 - number if backwards else number
        values = _read_nifti_slice(content, volume, world, at)
        _read_gzip_checksum(content, limit)
    if not np.isfinite(values).any():
        raise ValueError("the slice holds no number, only NaN or infinite values")
    with np.errstate(all="ignore"):
        scaled = np.nan_to_num(values * volume.slope + volume.intercept, posinf=0, neginf=0)
    grey = np.clip(scaled, -_LARGEST, _LARGEST)
    if rendering.window:
        shown = apply_voi_window(grey, *rendering.window)
    else:
        shown = rescale_to_unit_range(grey, grey.min(), grey.max())
    picture = np.round(255 * shown).astype(np.uint8)
    is_blank = bool(picture.min() == picture.max() and grey.min() < grey.max())
    across, up = (volume.find_nifti_file_axis(other)[0] for other in range(3) if other != world)
    aspect = compute_pixel_aspect(volume.voxel_sizes[up], volume.voxel_sizes[across])
    return RenderedPicture(picture, is_blank, aspect)


@contextmanager
def open_nifti_file(file: Path) -> Iterator[IO[bytes]]:
    """Open a NIfTI file; a gzip file is decompressed while it is read."""
    with file.open("rb") as head:
        is_packed = head.read(2) == b"\x1f\x8b"
    with cast(IO[bytes], gzip.open(file)) if is_packed else file.open("rb") as content:
        yield content


def read_nifti_voxels(content: IO[bytes], header: NiftiHeader, limit: int) -> NDArray[np.float32]:
    """Return all voxels of an open file, rescaled, in the order of the file's axes; the first axis varies fastest.

    Args:
        limit: Maximum size of the decompressed file in bytes.

    Raises:
        ValueError: If the file is damaged.
    """
    content.seek(header.start)
    data = _read_exact_byte_count(content, header.end - header.start)
    _read_gzip_checksum(content, limit)
    stored = np.frombuffer(data, dtype=header.kind).reshape(header.shape, order="F")
    if header.slope == 1 and header.intercept == 0:
        with np.errstate(over="ignore"):
            return stored.astype(np.float32, order="K")
    with np.errstate(all="ignore"):
        scaled = stored * header.slope + header.intercept  # float64
        return scaled.astype(np.float32, order="K")


def _read_gzip_checksum(content: IO[bytes], limit: int) -> None:
    """Decompress a gzip file to its end, which checks its checksum; do nothing for a file that is not compressed."""
    while isinstance(content, gzip.GzipFile) and _read_nifti_bytes(content, _PIECE):
        refuse_oversized_file(content.tell(), limit)


def read_nifti_header(content: IO[bytes]) -> NiftiHeader:
    """Read the header from the start of an open file.

    Raises:
        ValueError: If the header is damaged, or the kind of volume is not supported.
    """
    head = _read_exact_byte_count(content, Nifti1Header.template_dtype.itemsize)
    kind: Any = Nifti1Header
    if head[344:347] not in (b"n+1", b"ni1"):
        kind = Nifti2Header
        head += _read_exact_byte_count(content, Nifti2Header.template_dtype.itemsize - len(head))
    damaged = "the head of the NIfTI file is damaged"
    try:
        header = kind(head, check=False)
        shape, voxel_type = [int(side) for side in header.get_data_shape()], header.get_data_dtype()
        slope, intercept = header.get_slope_inter()
        affine = header.get_best_affine()
        orientation = io_orientation(affine)
        voxel_sizes = np.sqrt((np.asarray(affine, np.float64)[:3, :3] ** 2).sum(axis=0))
        start = int(header.get_data_offset())
        states_orientation = int(header["sform_code"]) > 0 or int(header["qform_code"]) > 0
        contradicts_itself = _has_unlike_directions(header)
        unit = int(header["xyzt_units"]) & _UNIT_OF_SPACE
    except Exception:  # nibabel raises several kinds of errors on damaged bytes
        raise ValueError(damaged) from None
    if bytes(header["magic"])[:2] == b"ni":
        raise ValueError("its voxels are in another file (.hdr and .img); save it as one .nii file")
    if voxel_type.kind not in "iuf":
        raise ValueError("its voxels are no single numbers (colour or complex values)")
    if len(shape) < 2 or min(shape) < 1 or any(side > 1 for side in shape[3:]):
        problem = "an axis has no voxel" if min(shape) < 1 else "only three axes are read"
        raise ValueError(f"its shape is {' × '.join(map(str, shape[:7]))}; {problem}")
    if start < len(head):
        raise ValueError(damaged)
    if sorted(orientation[:, 0]) != [0, 1, 2] or not (voxel_sizes > 0).all():
        raise ValueError("its affine (sform or qform) gives an axis no length or no direction; correct the header")
    if contradicts_itself:
        raise ValueError("its qform and sform give its axes other directions: programs show it mirrored; correct one")
    if unit in _OTHER_UNITS:
        raise ValueError(f"its header gives lengths in {_OTHER_UNITS[unit]} (xyzt_units); write them in millimetres")
    width, height, depth, *_ = (*shape, 1)
    scale = 1.0 if slope is None else float(slope)
    offset = float(intercept or 0)
    return NiftiHeader(
        (width, height, depth),
        voxel_type,
        start,
        scale,
        offset,
        orientation,
        voxel_sizes,
        np.asarray(affine, np.float64),
        states_orientation,
    )


def _has_unlike_directions(header: Any) -> bool:
    """Return True if qform and sform state different orientations of the axes.

    nibabel then uses the sform, and other programs the qform, so that right and left may be exchanged.
    """
    if not (int(header["sform_code"]) > 0 and int(header["qform_code"]) > 0):
        return False
    return not np.array_equal(io_orientation(header.get_sform()), io_orientation(header.get_qform()))


def _read_nifti_slice(content: IO[bytes], volume: NiftiHeader, world: int, at: int) -> NDArray[np.float64]:
    """Return a slice perpendicular to a world axis, transposed and flipped for display, ``(height, width)``.

    Args:
        content: The decompressed file.
        world: 0 for the axis to the patient's right, 1 to the front, 2 to the head.
        at: Index of the slice along the file's axis that is parallel to ``world``.
    """

    def read_next_plane() -> NDArray[Any]:
        plane = np.frombuffer(_read_exact_byte_count(content, volume.plane_byte_size), dtype=volume.kind)
        return plane.reshape(volume.shape[:2], order="F")  # (first axis, second axis)

    axis, _ = volume.find_nifti_file_axis(world)
    if axis == 2:
        content.seek(volume.start + at * volume.plane_byte_size)
        voxels = read_next_plane().astype(np.float64)
    else:
        content.seek(volume.start)
        rows = [read_next_plane().take(at, axis=axis).astype(np.float64) for _ in range(volume.shape[2])]
        voxels = np.stack(rows, axis=1)  # the two other axes are in the file's order
    left_to_right, up = (other for other in range(3) if other != world)
    across, upwards = (volume.find_nifti_file_axis(other) for other in (left_to_right, up))
    first_axis = 1 if axis == 0 else 0
    shown = voxels if first_axis == upwards[0] else voxels.T  # (up, across)
    # Axes towards the patient's right, front and head are reversed on display: the patient faces the viewer.
    return shown[:: 1 if upwards[1] else -1, :: 1 if across[1] else -1]


def _read_nifti_bytes(content: IO[bytes], size: int) -> bytes:
    """Read up to ``size`` bytes; raise a ``ValueError`` if the file is damaged."""
    try:
        return content.read(size)
    except (OSError, EOFError, zlib.error):
        raise ValueError("damaged or cut off") from None


def _read_exact_byte_count(content: IO[bytes], size: int) -> bytes:
    """Read exactly ``size`` bytes; raise a ``ValueError`` if the file ends earlier or is damaged."""
    data = _read_nifti_bytes(content, size)
    if len(data) < size:
        raise ValueError("damaged or cut off")
    return data
