"""A folder of small NIfTI volumes with label maps, for tests."""

from pathlib import Path
from typing import Any

import numpy as np

from polyclinic.data.base.spec import FolderDatasetSpec
from tests.data.volume_files import write_nifti

SHAPE, SPACING = (6, 10, 8), (3.0, 2.0, 1.0)
PATIENTS = 9


def voxels(row: int) -> np.ndarray:
    return np.random.default_rng(row).integers(-500, 500, SHAPE, dtype=np.int16)


def label_map(row: int) -> np.ndarray:
    """A liver in one corner, and a spleen of two voxels in every second volume."""
    values = np.zeros(SHAPE, np.uint8)
    values[1:3, 2:6, 1 : 3 + row % 3] = 1
    values[4, 7, 5:7] = 7 * (row % 2)
    return values


def folder_of(root: Path) -> Path:
    lines = ["volume,mask,patient,part"]
    for row in range(PATIENTS):
        write_nifti(root / f"v{row}.nii.gz", voxels(row), SPACING)
        write_nifti(root / f"m{row}.nii.gz", label_map(row), SPACING)
        lines.append(f"v{row}.nii.gz,m{row}.nii.gz,patient {chr(65 + row)},{('train', 'val', 'test')[row % 3]}")
    (root / "labels.csv").write_text("\n".join(lines) + "\n")
    return root


def spec_of_masks(**more: Any) -> FolderDatasetSpec:
    """The data set of :func:`folder_of`."""
    settings = {
        "kind": "folder",
        "labels": "labels.csv",
        "images": ".",
        "image_column": "volume",
        "patient_column": "patient",
        "split_column": "part",
        "image_size": SHAPE,
        "spacing": SPACING,
        "mask_column": "mask",
        "mask_values": {"Liver": 1, "Spleen": 7},
        **more,
    }
    return FolderDatasetSpec.model_validate(settings)
