"""NIfTI files made by nibabel."""

from pathlib import Path
from typing import Any

import nibabel
import numpy as np
from numpy.typing import NDArray

AFFINE = np.diag([2.0, 2.0, 5.0, 1.0])


def volume(kind: str = "<i2", shape: tuple[int, ...] = (5, 6, 7)) -> NDArray[Any]:
    """Numbers in Hounsfield's range."""
    return np.random.default_rng(3).integers(-1000, 1000, shape).astype(kind)


def write(path: Path, voxels: NDArray[Any], *, slope: float = 1, intercept: float = 0, version: int = 1) -> bytes:
    """Write ``.nii`` or ``.nii.gz``, and return its bytes."""
    image = (nibabel.Nifti1Image if version == 1 else nibabel.Nifti2Image)(voxels, AFFINE)
    image.header.set_slope_inter(slope, intercept)
    nibabel.save(image, path)
    return path.read_bytes()
