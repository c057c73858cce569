"""NIfTI and DICOM volumes made by nibabel and pydicom."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
from numpy.typing import NDArray
from pydicom.dataset import Dataset
from pydicom.uid import ExplicitVRLittleEndian

from tests.data.dicom_files import dicom

ACROSS, DOWN = (1, 0, 0), (0, 1, 0)
"""Directions of the rows and columns of an axial slice, in DICOM's axes."""


def head(shape: tuple[int, int, int] = (6, 5, 4)) -> NDArray[np.int16]:
    """Voxels ``(depth, height, width)`` that all differ, in the order of our axes."""
    return np.arange(np.prod(shape), dtype=np.int16).reshape(shape)


def write_nifti(
    path: Path, voxels: NDArray[Any], spacing: tuple[float, float, float] = (3, 2, 1), **header: Any
) -> Path:
    """Write voxels ``(depth, height, width)`` as a NIfTI file in RAS+, with this spacing in mm in the same order."""
    depth, height, width = spacing
    image = nibabel.Nifti1Image(voxels[:, ::-1, ::-1].transpose(2, 1, 0), np.diag([width, height, depth, 1.0]))
    for key, value in header.items():
        image.header[key] = value
    nibabel.save(image, path)
    return path


def write_series(
    folder: Path,
    voxels: NDArray[Any],
    *,
    spacing: tuple[float, float, float] = (3, 2, 1),
    start: float = 0.0,
    prefix: str = "IM",
    **elements: Any,
) -> list[Path]:
    """Write a folder with a DICOM file for each slice, named in an order that is not that of their positions."""
    folder.mkdir(parents=True, exist_ok=True)
    names = np.random.default_rng(0).permutation(len(voxels))
    files = []
    for number, plane in enumerate(voxels):
        file = folder / f"{prefix}{names[number]:03d}.dcm"
        place = [0, 0, start + number * spacing[0]]
        settings = {"SeriesInstanceUID": "1.2.3", "ImagePositionPatient": place, **elements}
        file.write_bytes(slice_file(plane, spacing, **settings))
        files.append(file)
    return files


def slice_file(plane: NDArray[Any], spacing: Sequence[float] = (3, 2, 1), **elements: Any) -> bytes:
    """Return a DICOM file with one axial slice of 16-bit signed values."""
    settings: dict[str, Any] = {
        "ImageOrientationPatient": [*ACROSS, *DOWN],
        "PixelSpacing": [spacing[1], spacing[2]],
        "BitsStored": 16,
        "HighBit": 15,
        "PixelRepresentation": 1,
        "PatientID": "P1",
        **elements,
    }
    return dicom(plane.astype("<i2"), syntax=ExplicitVRLittleEndian, **settings)


def multi_frame_file(voxels: NDArray[Any], order: Sequence[int], spacing: Sequence[float] = (3, 2, 1)) -> bytes:
    """Return an enhanced DICOM file whose frames are the slices in this order, each with its place."""
    frames, shared = list[Dataset](), Dataset()
    plane_orientation, measures = Dataset(), Dataset()
    plane_orientation.ImageOrientationPatient = [*ACROSS, *DOWN]
    measures.PixelSpacing = [spacing[1], spacing[2]]
    shared.PlaneOrientationSequence, shared.PixelMeasuresSequence = [plane_orientation], [measures]
    for number in order:
        position, frame = Dataset(), Dataset()
        position.ImagePositionPatient = [0, 0, number * spacing[0]]
        frame.PlanePositionSequence = [position]
        frames.append(frame)
    return dicom(
        np.ascontiguousarray(voxels[list(order)]).astype("<i2"),
        syntax=ExplicitVRLittleEndian,
        NumberOfFrames=len(order),
        BitsStored=16,
        HighBit=15,
        PixelRepresentation=1,
        SharedFunctionalGroupsSequence=[shared],
        PerFrameFunctionalGroupsSequence=frames,
    )
