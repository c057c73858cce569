"""Drawn volumes with outlines, in the folders of public data sets and of somebody's own disk."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image

from polyclinic.data.sources.drawn_organs import ORGANS, draw_organs
from tests.data.volume_files import write_nifti, write_series

SHAPE, SPACING = (10, 24, 24), (6.0, 3.0, 3.0)
NAMES = tuple(ORGANS)


def draw(count: int, seed: int = 0) -> list[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """Draw volumes in Hounsfield units, each with the area of each organ by its name."""
    images = draw_organs(count, SHAPE, np.random.default_rng(seed))
    assert images.masks is not None
    areas = images.masks.read_class_areas(np.arange(count), NAMES)
    grey = images.images[..., 0].astype(np.int16) - 100
    return [(voxels, dict(zip(NAMES, of_image, strict=True))) for voxels, of_image in zip(grey, areas, strict=True)]


def label_map(areas: Mapping[str, np.ndarray], values: Mapping[str, int]) -> np.ndarray:
    result = np.zeros(SHAPE, np.uint8)
    for name, value in values.items():
        result[areas[name]] = value
    return result


def write_nnunet(
    root: Path, count: int, values: Mapping[str, int], *, channel: str = "_0000", stem: str = "case"
) -> Path:
    """imagesTr/case_000_0000.nii.gz, labelsTr/case_000.nii.gz and dataset.json in nnU-Net's second form."""
    for number, (voxels, areas) in enumerate(draw(count)):
        write(root / "imagesTr" / f"{stem}_{number:03}{channel}.nii.gz", voxels)
        write(root / "labelsTr" / f"{stem}_{number:03}.nii.gz", label_map(areas, values))
    labels = {"background": 0, **values}
    description = {"channel_names": {"0": "CT"}, "labels": labels, "numTraining": count, "file_ending": ".nii.gz"}
    (root / "dataset.json").write_text(json.dumps(description))
    return root


def write_decathlon(root: Path, count: int, values: Mapping[str, int], stem: str = "liver") -> Path:
    """imagesTr/liver_0.nii.gz, labelsTr/liver_0.nii.gz, an image without labels, and the Decathlon's dataset.json."""
    write_nnunet(root, count, values, channel="", stem=stem)
    write(root / "imagesTs" / f"{stem}_900.nii.gz", draw(1, seed=9)[0][0])
    (root / "imagesTr" / f"._{stem}_000.nii.gz").write_bytes(b"of a Mac")
    labels = {"0": "background", **{str(value): name for name, value in values.items()}}
    (root / "dataset.json").write_text(json.dumps({"modality": {"0": "CT"}, "labels": labels}))
    return root


def write_cases(root: Path, count: int, values: Mapping[str, int]) -> Path:
    """case_00000/imaging.nii.gz and case_00000/segmentation.nii.gz, as KiTS has them."""
    for number, (voxels, areas) in enumerate(draw(count)):
        write(root / f"case_{number:05}" / "imaging.nii.gz", voxels)
        write(root / f"case_{number:05}" / "segmentation.nii.gz", label_map(areas, values))
    return root


def write_side_by_side(root: Path, count: int, values: Mapping[str, int]) -> Path:
    """volume-0.nii and segmentation-0.nii in one folder, as LiTS has them."""
    for number, (voxels, areas) in enumerate(draw(count)):
        write(root / f"volume-{number}.nii", voxels)
        write(root / f"segmentation-{number}.nii", label_map(areas, values))
    return root


def write_image_and_label_folders(root: Path, count: int, values: Mapping[str, int]) -> Path:
    """Training/img/img0001.nii.gz and Training/label/label0001.nii.gz, as BTCV has them."""
    for number, (voxels, areas) in enumerate(draw(count), start=1):
        write(root / "Training" / "img" / f"img{number:04}.nii.gz", voxels)
        write(root / "Training" / "label" / f"label{number:04}.nii.gz", label_map(areas, values))
    return root


def write_file_for_each_class(root: Path, count: int) -> Path:
    """s0001/ct.nii.gz and s0001/segmentations/Liver.nii.gz, ..., as TotalSegmentator has them."""
    for number, (voxels, areas) in enumerate(draw(count)):
        write(root / f"s{number:04}" / "ct.nii.gz", voxels)
        for name, area in areas.items():
            write(root / f"s{number:04}" / "segmentations" / f"{name}.nii.gz", area.astype(np.uint8))
    return root


def write_patients_of_series(root: Path, count: int, values: Mapping[str, int]) -> Path:
    """patient001/CT with the slices of a DICOM series, and patient001/seg.nii.gz on its grid."""
    for number, (voxels, areas) in enumerate(draw(count)):
        folder = root / f"patient{number:03}"
        write_series(folder / "CT", voxels, spacing=SPACING, SeriesInstanceUID=f"1.{number}", PatientID=f"P{number}")
        write_dicom_grid(folder / "seg.nii.gz", label_map(areas, values))
    return root


def write_pictures(root: Path, count: int, values: Mapping[str, int]) -> Path:
    """images/p0.png and masks/p0_mask.png: middle slices."""
    (root / "images").mkdir(parents=True)
    (root / "masks").mkdir()
    for number, (voxels, areas) in enumerate(draw(count)):
        middle = SHAPE[0] // 2
        Image.fromarray((voxels[middle] + 100).astype(np.uint8)).save(root / "images" / f"p{number}.png")
        Image.fromarray(label_map(areas, values)[middle]).save(root / "masks" / f"p{number}_mask.png")
    return root


def write(path: Path, voxels: np.ndarray, spacing: tuple[float, float, float] = SPACING) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_nifti(path, voxels, spacing)


def write_dicom_grid(path: Path, values: np.ndarray) -> None:
    """Write a mask on the grid of a series of :func:`tests.data.volume_files.write_series`, whose corner is at 0."""
    import nibabel

    affine = np.diag([-SPACING[2], -SPACING[1], SPACING[0], 1.0])
    nibabel.save(nibabel.Nifti1Image(values.transpose(2, 1, 0), affine), path)
