"""One slice of a NIfTI volume to 8 bits, as a radiologist looks at it, without the rest of the volume in memory.

nibabel reads the header (NIfTI-1 and NIfTI-2, either order of bytes, both ways to say an orientation). The voxels are
read from front to back, one plane at a time, and not beyond the last one that the slice needs.
"""

import gzip
import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
from nibabel import orientations
from nibabel.nifti1 import Nifti1Header
from nibabel.nifti2 import Nifti2Header
from numpy.typing import NDArray

from common.data.base.decoded_size import largest_content, largest_picture, refuse_larger
from common.data.base.spec import Axis, Frame, Rendering
from common.data.images.dicom import stretched, windowed

io_orientation: Any = orientations.io_orientation  # it has no types
AXES: dict[Axis, int] = {"sagittal": 0, "coronal": 1, "axial": 2}
"""World axes: to the patient's right, to the front, to the head (RAS+)."""
_OF_A_PIXEL = np.dtype(np.float64).itemsize
_LARGEST = 1e30
"""Voxels beyond are damage; differences of such numbers would not be finite."""


@dataclass(frozen=True)
class Volume:
    """What the header says.

    Attributes:
        shape: Voxels along the three axes of the file, the first one fastest.
        orientation: For each axis of the file the world axis, and 1 or -1 for its direction ``(3, 2)``.
    """

    shape: tuple[int, int, int]
    kind: np.dtype[Any]
    start: int
    slope: float
    intercept: float
    orientation: NDArray[np.float64]

    @property
    def plane(self) -> int:
        """Bytes of the voxels with one place along the slowest axis."""
        return self.shape[0] * self.shape[1] * self.kind.itemsize

    def file_axis(self, world: int) -> tuple[int, bool]:
        """Return the axis of the file that runs along a world axis, and whether it runs backwards."""
        axis = int(np.flatnonzero(self.orientation[:, 0] == world)[0])
        return axis, bool(self.orientation[axis, 1] < 0)


class UnusableVolume(ValueError):
    """A NIfTI file whose head is whole, but says that it cannot be read here."""


def nifti_pixels(file: Path, rendering: Rendering) -> NDArray[np.uint8]:
    """Return ``(height, width)`` grey.

    An axial slice has the patient's front at the top, a coronal and a sagittal one the head; the patient's right is on
    the left, in a sagittal slice the front. Slices are counted from the feet, from the back and from the left.

    Raises:
        ValueError: If it is no volume of numbers, too large, damaged, or has no such slice.
    """
    with _opened(file) as content:
        volume = _volume(content)
        world = AXES[rendering.axis]
        axis, backwards = volume.file_axis(world)
        packed, pixels = file.stat().st_size, math.prod(volume.shape) // volume.shape[axis]
        unpacked = volume.start + volume.plane * volume.shape[2]
        refuse_larger(unpacked, max(packed, largest_content(packed, rendering.largest_mb)))
        refuse_larger(max(volume.plane, _OF_A_PIXEL * pixels), largest_picture(rendering.largest_mb))
        number = slice_index(volume.shape[axis], rendering)
        at = volume.shape[axis] - 1 - number if backwards else number
        values = _upright(_slice(content, volume, axis, at), volume, world)
    if not np.isfinite(values).any():
        raise ValueError("the slice holds no number, only NaN or infinite values")
    with np.errstate(all="ignore"):
        scaled = np.nan_to_num(values * volume.slope + volume.intercept, posinf=0, neginf=0)
    grey = np.clip(scaled, -_LARGEST, _LARGEST)
    shown = windowed(grey, *rendering.window) if rendering.window else stretched(grey, grey.min(), grey.max())
    return np.round(255 * shown).astype(np.uint8)


def slice_index(count: int, rendering: Rendering) -> int:
    """Return place of the chosen slice, from 0; the middle one of an even number is the later of the two.

    Raises:
        ValueError: If there are several and none is chosen, or there is no such slice.
    """
    frame: Frame | None = rendering.frame
    if frame == "middle":
        return count // 2
    slices = f"the NIfTI file has {count} {rendering.axis} slices"
    if frame is None and count > 1:
        raise ValueError(f'{slices}; choose one by data.frame, 1 to {count} or "middle"')
    if frame is not None and frame > count:
        raise ValueError(f"{slices}; data.frame = {frame} is none of them")
    return (frame or 1) - 1


@contextmanager
def _opened(file: Path) -> Iterator[IO[bytes]]:
    """Open a file, through gzip where it is packed."""
    with file.open("rb") as opened:
        packed = opened.read(2) == b"\x1f\x8b"
        opened.seek(0)
        with gzip.open(opened, "rb") if packed else nullcontext(opened) as content:
            yield cast(IO[bytes], content)


def _volume(content: IO[bytes]) -> Volume:
    """Read the header; ``content`` stands behind it then.

    Raises:
        ValueError: If it is damaged, or of a kind that is not read here.
    """
    head = _exactly(content, Nifti1Header.template_dtype.itemsize)
    kind: Any = Nifti1Header
    if head[344:347] not in (b"n+1", b"ni1"):
        kind = Nifti2Header
        head += _exactly(content, Nifti2Header.template_dtype.itemsize - len(head))
    try:
        volume = _stated_volume(kind(head, check=False))
    except UnusableVolume:
        raise
    except Exception:  # nibabel raises several kinds on damaged bytes
        raise ValueError("the head of the NIfTI file is damaged") from None
    if volume.start < len(head) or sorted(volume.orientation[:, 0]) != [0, 1, 2]:
        raise ValueError("the head of the NIfTI file is damaged")
    return volume


def _stated_volume(header: Any) -> Volume:
    """Raise what nibabel raises on a damaged header, and ``ValueError`` as above."""
    shape, stored = [int(side) for side in header.get_data_shape()], header.get_data_dtype()
    if bytes(header["magic"])[:2] == b"ni":
        raise UnusableVolume("its voxels are in another file (.hdr and .img); save it as one .nii file")
    if stored.kind not in "iuf":
        raise UnusableVolume("its voxels are no single numbers (colour or complex values)")
    if len(shape) < 2 or min(shape) < 1 or any(side > 1 for side in shape[3:]):
        raise UnusableVolume(f"its shape is {' × '.join(map(str, shape[:7]))}; only three axes are read")
    width, height, depth, *_ = (*shape, 1)
    slope, intercept = header.get_slope_inter()
    scale = 1.0 if slope is None else float(slope)
    orientation = io_orientation(header.get_best_affine())
    start = int(header.get_data_offset())
    return Volume((width, height, depth), stored, start, scale, float(intercept or 0), orientation)


def _slice(content: IO[bytes], volume: Volume, axis: int, at: int) -> NDArray[np.float64]:
    """Return the voxels with place ``at`` along an axis of the file, in the file's order of the other two."""
    if axis == 2:
        content.seek(volume.start + at * volume.plane)
        return next(_planes(content, volume)).astype(np.float64)
    content.seek(volume.start)
    planes = _planes(content, volume)
    rows = [next(planes).take(at, axis=axis).astype(np.float64) for _ in range(volume.shape[2])]
    return np.stack(rows, axis=1)


def _planes(content: IO[bytes], volume: Volume) -> Iterator[NDArray[Any]]:
    """Yield planes ``(first axis, second axis)`` from here on."""
    while True:
        voxels = np.frombuffer(_exactly(content, volume.plane), dtype=volume.kind)
        yield voxels.reshape(volume.shape[:2], order="F")


def _exactly(content: IO[bytes], size: int) -> bytes:
    """Read so many bytes.

    Raises:
        ValueError: If there are fewer, or they are damaged.
    """
    try:
        data = content.read(size)
    except (OSError, EOFError, zlib.error):
        raise ValueError("damaged or cut off") from None
    if len(data) < size:
        raise ValueError("damaged or cut off")
    return data


def _upright(voxels: NDArray[np.float64], volume: Volume, world: int) -> NDArray[np.float64]:
    """Turn a slice ``(axis, axis)`` of the file into ``(height, width)`` as it is looked at."""
    left_to_right, up = (other for other in range(3) if other != world)
    axes = [axis for axis in range(3) if axis != volume.file_axis(world)[0]]
    across, upwards = (volume.file_axis(other) for other in (left_to_right, up))
    shown = voxels if axes[0] == upwards[0] else voxels.T  # (up, across)
    # Towards the right, the front and the head is backwards on a page: the patient faces the reader.
    return shown[:: 1 if upwards[1] else -1, :: 1 if across[1] else -1]
