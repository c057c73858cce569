"""Assemble a DICOM volume from a folder with the slices of one series, or from one file of several frames.

Slices are sorted by their position along the normal of their plane (ImagePositionPatient, ImageOrientationPatient), not
by file name or InstanceNumber. Slices that do not form one rectangular grid are refused, and the message names them.
Reasons are: two series, two slices at one position, a gap, unequal sizes or directions, a tilted gantry. A missing
slice at either end cannot be detected.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyclinic.data.base.spec import VolumeSize
from polyclinic.data.images.dicom import read_dicom_frame_values
from polyclinic.data.images.file_kinds import is_dicom_file, read_first_bytes
from polyclinic.data.images.grey import (
    read_dicom_element_value,
    read_dicom_number,
    read_dicom_unsigned_integer,
)
from polyclinic.data.images.headers import (
    convert_dicom_keywords_to_tags,
    read_dicom_elements,
    refuse_large_dicom_elements,
)

_GROUPS = ("SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence")
_READ = convert_dicom_keywords_to_tags(
    *("SeriesInstanceUID", "SeriesDescription", "Rows", "Columns", "NumberOfFrames"),
    *("ImagePositionPatient", "ImageOrientationPatient", "PixelSpacing"),
    *_GROUPS,
)
_PLACES: Mapping[str, tuple[str, str]] = {
    "ImagePositionPatient": ("PlanePositionSequence", "the place of its slices"),
    "ImageOrientationPatient": ("PlaneOrientationSequence", "the direction of its slices"),
    "PixelSpacing": ("PixelMeasuresSequence", "the size of its pixels"),
}
"""DICOM element of a slice's plane -> the sequence that holds it in a file of several frames, and its meaning."""
_BESIDE_SLICES = ("DICOMDIR", "LICENSE")
_TEXT_SUFFIXES = (".txt", ".csv", ".json", ".xml", ".html", ".pdf", ".md", ".log")
"""Endings of text files, which may be in the folder of the slices. Any other file that is not a DICOM file is refused,
because it may be a truncated slice."""
_SAME_PLACE = 0.01
"""Two slices are at one position if their distance is below this share of the median distance."""
_MOST_UNEVEN = 0.1
"""Maximum difference between a slice distance and the median distance, as a share of the median."""
_MOST_TURNED = 0.01
"""Maximum difference between the direction cosines of two slices, which files round."""
_MOST_UNEQUAL_PIXELS = 1e-3
"""Maximum difference between the pixel sizes of two slices, as a share of the larger side of a pixel."""
_LONGEST_NAME = 30
_TO_RAS = np.array([-1.0, -1.0, 1.0])
"""Signs that convert DICOM's axes (left, back, head) to RAS axes (right, front, head)."""


@dataclass(frozen=True)
class DicomSlice:
    """One slice of a volume: the file or frame with its pixels, and its plane in the patient.

    Attributes:
        name: Name of the file, or number of the frame, for messages.
        file: The file; None for a frame of the only file.
        frame: Number of the frame, from 0.
        position: ``(3,)``, the centre of the first pixel in mm.
        directions: ``(2, 3)``, the unit vectors along a row and along a column.
        pixel: Height and width of a pixel in mm.
        size: Rows and columns.
    """

    name: str
    file: Path | None
    frame: int
    position: NDArray[np.float64]
    directions: NDArray[np.float64]
    pixel: tuple[float, float]
    size: tuple[int, int]


@dataclass(frozen=True)
class DicomVolume:
    """The grid of a DICOM volume, and a function that reads its voxels.

    Attributes:
        shape: Numbers of slices, rows and columns.
        affine: ``(4, 4)``, maps an index ``(slice, row, column, 1)`` to a position in mm in the patient (RAS+).
        kind: ``DICOM series`` or ``DICOM``.
        packed_bytes: Total size of the files.
        read_voxels: Returns the voxels ``(slices, rows, columns)`` as float32, NaN for padding.
        slices: The slices in the order of the first axis.
    """

    shape: VolumeSize
    affine: NDArray[np.float64]
    kind: str
    packed_bytes: int
    read_voxels: Callable[[], NDArray[np.float32]]
    slices: Sequence[DicomSlice]


def open_dicom_series(content: Path | bytes, largest_mb: int) -> DicomVolume:
    """Read the headers of a DICOM volume, and check that its slices form one rectangular grid.

    Args:
        content: A folder with the slices of one series, the path of a file of several frames, or its bytes.

    Raises:
        ValueError: If the slices do not form such a grid; the message names the slices at fault.
    """
    if isinstance(content, Path) and content.is_dir():
        files = list_series_files(content)
        if len(files) > 1:
            slices = _read_slices_of_files(files, largest_mb)
            packed = sum(file.stat().st_size for file in files)
            return _make_volume(slices, "DICOM series", packed, lambda order: _read_file_slices(order, largest_mb))
        content = files[0]
    data = content.read_bytes() if isinstance(content, Path) else content
    dataset = read_dicom_elements(data, largest_mb=largest_mb)
    slices = _read_slices_of_frames(dataset, largest_mb)
    return _make_volume(slices, "DICOM", len(data), lambda order: _read_frames(dataset, order, largest_mb))


def list_series_files(folder: Path) -> list[Path]:
    """Return the DICOM files of a folder with one series, sorted by name; hidden files, texts and DICOMDIR are ignored.

    Raises:
        ValueError: If another file is not a DICOM file, or if there is no DICOM file.
    """
    files = list[Path]()
    for file in sorted(folder.iterdir()):
        is_beside = file.name.startswith(".") or file.name.upper().startswith(_BESIDE_SLICES)
        if is_beside or file.name.lower().endswith(_TEXT_SUFFIXES) or file.is_dir():
            continue
        if not is_dicom_file(read_first_bytes(file)):
            raise ValueError(f"the folder holds {_quote(file.name)}, which is no DICOM file; it may be a slice cut off")
        files.append(file)
    if not files:
        raise ValueError("the folder holds no DICOM file")
    return files


def is_series_folder(folder: Path) -> bool:
    """Return True if the first two DICOM files of a folder are slices of one series at two positions."""
    planes = list[tuple[Any, Any]]()
    try:
        for file in sorted(folder.iterdir()):
            if file.is_dir() or not is_dicom_file(read_first_bytes(file)):
                continue
            with file.open("rb") as opened:
                head = read_dicom_elements(opened, _READ)
            uid, place = (read_dicom_element_value(head, key) for key in ("SeriesInstanceUID", "ImagePositionPatient"))
            planes.append((uid, None if place is None else tuple(place)))
            if len(planes) == 2:
                break
    except Exception:  # a damaged file, which reading reports
        return False
    if len(planes) < 2:
        return False
    (first_uid, first_place), (second_uid, second_place) = planes
    return first_uid == second_uid and None not in (first_place, second_place) and first_place != second_place


def merge_series_files(files: Iterable[Path]) -> list[Path]:
    """Return the files in the given order; the slices of one series are replaced by their folder."""
    merged, is_series = dict[Path, None](), dict[Path, bool]()
    for file in files:
        folder = file.parent
        if folder not in is_series:
            is_series[folder] = is_series_folder(folder)
        merged[folder if is_series[folder] else file] = None
    return list(merged)


def _quote(name: str) -> str:
    return f'"{name}"' if len(name) <= _LONGEST_NAME else f'"...{name[3 - _LONGEST_NAME :]}"'


# ---------------------------------------------------------------------- headers


def _read_slices_of_files(files: Sequence[Path], largest_mb: int) -> list[DicomSlice]:
    slices, series = list[DicomSlice](), Counter[tuple[str, str]]()
    for file in files:
        with file.open("rb") as opened:
            head = read_dicom_elements(opened, _READ, largest_mb)
        refuse_large_dicom_elements(head, _READ, largest_mb)
        description = str(read_dicom_element_value(head, "SeriesDescription") or "")
        series[str(read_dicom_element_value(head, "SeriesInstanceUID") or ""), description] += 1
        if len({uid for uid, _ in series}) > 1:
            continue  # the others are only counted
        if int(read_dicom_number(head, "NumberOfFrames") or 1) > 1:
            raise ValueError(f"{_quote(file.name)} has several frames: the table must name the file, not its folder")
        slices.append(_read_slice(file.name, file, 0, head, [head], largest_mb))
    if len({uid for uid, _ in series}) > 1:
        named = [f"{_quote(text)} {count}" if text else f"{count}" for (_, text), count in series.most_common(3)]
        listed = ", ".join(named) + (", ..." if len(series) > 3 else "")
        raise ValueError(f"the folder holds {len(series)} series (files: {listed}); give each a folder")
    return slices


def _read_slices_of_frames(dataset: Any, largest_mb: int) -> list[DicomSlice]:
    refuse_large_dicom_elements(dataset, _READ, largest_mb)
    count = int(read_dicom_number(dataset, "NumberOfFrames") or 1)
    if count == 1:
        raise ValueError("it has one slice, which is no volume; a series needs the folder of all its slices")
    shared, of_frames = (read_dicom_element_value(dataset, keyword) or [] for keyword in _GROUPS)
    if len(of_frames) < count:
        problem = f"its {count} frames have no place in the patient (PerFrameFunctionalGroupsSequence)"
        raise ValueError(f"{problem}; it may be a film")
    return [
        _read_slice(f"frame {index + 1}", None, index, dataset, [of_frames[index], *shared[:1]], largest_mb)
        for index in range(count)
    ]


def _read_slice(
    name: str, file: Path | None, frame: int, head: Any, groups: Sequence[Any], largest_mb: int
) -> DicomSlice:
    """Read the size and the plane of one slice.

    Args:
        groups: Data sets that may hold the plane: the functional groups of a frame, or the header of a file with one
            frame.

    Raises:
        ValueError: If a value is missing or invalid.
    """
    position, directions, pixel = (_read_plane(name, groups, keyword) for keyword in _PLACES)
    rows, columns = (int(read_dicom_unsigned_integer(head, keyword) or 0) for keyword in ("Rows", "Columns"))
    if not rows or not columns:
        raise ValueError(f"{_quote(name)} holds no picture")
    if len(position) != 3 or len(directions) != 6 or len(pixel) != 2 or min(pixel) <= 0:
        raise ValueError(f"{_quote(name)} gives its plane in a wrong number of values")
    across, down = vectors = np.array(directions).reshape(2, 3)
    lengths = np.linalg.norm(vectors, axis=1)
    if np.abs(lengths - 1).max() > _MOST_TURNED or abs(float(across @ down)) > _MOST_TURNED:
        raise ValueError(f"{_quote(name)}: ImageOrientationPatient is not two unit vectors at right angles")
    return DicomSlice(name, file, frame, np.array(position), vectors, (pixel[0], pixel[1]), (rows, columns))


def _read_plane(name: str, groups: Sequence[Any], keyword: str) -> list[float]:
    """Return the numbers of one element of :data:`_PLACES` from the first group that has it."""
    sequence, meaning = _PLACES[keyword]
    for group in groups:
        inside = [group, *(read_dicom_element_value(group, sequence) or [])[:1]]
        for holder in inside:
            try:
                numbers = [float(number) for number in read_dicom_element_value(holder, keyword) or ()]
            except (TypeError, ValueError):
                raise ValueError(f"{_quote(name)}: {keyword} is not numbers") from None
            if numbers and np.isfinite(numbers).all():
                return numbers
    raise ValueError(f"{_quote(name)} does not say {meaning} ({keyword})")


# ---------------------------------------------------------------------- the grid


def _make_volume(
    slices: Sequence[DicomSlice], kind: str, packed: int, read: Callable[[Sequence[DicomSlice]], NDArray[np.float32]]
) -> DicomVolume:
    """Sort slices along their normal, and check that they form one rectangular grid.

    Args:
        kind: ``DICOM series`` or ``DICOM``.
        packed: Total size of the files in bytes.
        read: Returns the voxels ``(slices, rows, columns)`` of sorted slices.
    """
    first = slices[0]
    for other in slices:
        if other.size != first.size:
            sizes = " and ".join(f"{rows} × {columns}" for rows, columns in (first.size, other.size))
            raise ValueError(f"{_quote(first.name)} and {_quote(other.name)} have unequal sizes, {sizes}")
        if np.abs(other.directions - first.directions).max() > _MOST_TURNED:
            raise ValueError(f"{_quote(first.name)} and {_quote(other.name)} lie in other directions, as a scout does")
        if np.abs(np.subtract(other.pixel, first.pixel)).max() > _MOST_UNEQUAL_PIXELS * max(first.pixel):
            raise ValueError(f"{_quote(first.name)} and {_quote(other.name)} have pixels of unequal sizes")
    across, down = first.directions
    normal = np.cross(across, down)
    order = sorted(slices, key=lambda each: (float(each.position @ normal), each.name))
    heights = np.array([float(each.position @ normal) for each in order])
    step = _check_distances(order, np.diff(heights))
    path = order[-1].position - order[0].position
    if np.linalg.norm(path - (path @ normal) * normal) > _MOST_TURNED * np.linalg.norm(path):
        raise ValueError("its slices are shifted against each other (a tilted gantry); resample it, as dcm2niix does")
    affine = np.eye(4)
    affine[:3, 0] = normal * step * _TO_RAS
    affine[:3, 1] = down * first.pixel[0] * _TO_RAS
    affine[:3, 2] = across * first.pixel[1] * _TO_RAS
    affine[:3, 3] = order[0].position * _TO_RAS
    return DicomVolume((len(order), *first.size), affine, kind, packed, lambda: read(order), order)


def _check_distances(order: Sequence[DicomSlice], distances: NDArray[np.float64]) -> float:
    """Return the mean distance between neighbouring slices in mm.

    Raises:
        ValueError: If two slices are at one position, or a distance differs too much from the median.
    """
    usual = float(np.median(distances))
    nearest, farthest = int(distances.argmin()), int(distances.argmax())
    if distances[nearest] <= max(_SAME_PLACE * usual, 1e-4):
        pair = f"{_quote(order[nearest].name)} and {_quote(order[nearest + 1].name)}"
        raise ValueError(f"{pair} are at one place: copies, or several volumes (of times, echoes) in one series")
    for place, word in ((farthest, "farther apart"), (nearest, "nearer")):
        if abs(distances[place] - usual) > _MOST_UNEVEN * usual:
            pair = f"{_quote(order[place].name)} and {_quote(order[place + 1].name)}"
            problem = f"{pair} are {word} than most, {distances[place]:.4g} and {usual:.4g} mm"
            raise ValueError(f"{problem}; slices are missing")
    return float(distances.mean())


# ---------------------------------------------------------------------- voxels


def _read_file_slices(order: Sequence[DicomSlice], largest_mb: int) -> NDArray[np.float32]:
    voxels = np.empty((len(order), *order[0].size), np.float32)
    for plane, each in zip(voxels, order, strict=True):
        assert each.file is not None
        dataset = read_dicom_elements(each.file.read_bytes(), largest_mb=largest_mb)
        plane[...] = read_dicom_frame_values(dataset, 0, largest_mb)
    return voxels


def _read_frames(dataset: Any, order: Sequence[DicomSlice], largest_mb: int) -> NDArray[np.float32]:
    voxels = np.empty((len(order), *order[0].size), np.float32)
    for plane, each in zip(voxels, order, strict=True):
        # Elements of one frame must not stay for the next.
        plane[...] = read_dicom_frame_values(copy.copy(dataset), each.frame, largest_mb)
    return voxels
