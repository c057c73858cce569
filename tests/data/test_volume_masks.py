"""Masks of volumes: NIfTI files on the grid of their volume, wherever the axes of both files run."""

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest

from polyclinic.common.errors import BadInput
from polyclinic.common.models.network import build_network
from polyclinic.common.models.saved import save_model
from polyclinic.common.models.zoo.spec import ModelSpec
from polyclinic.common.prediction.masks import predict_masks
from polyclinic.data.base.image_set import ImageSet, concatenate_image_sets
from polyclinic.data.base.spec import PictureRenderingOptions
from polyclinic.data.images.masks import read_grid
from polyclinic.data.images.reading import DecodedImageFormat
from polyclinic.data.images.volume_masks import fit_volume_mask, restore_volume_mask, write_nifti_mask
from polyclinic.data.images.volumes import read_volume
from polyclinic.data.load import load_dataset
from tests.data.masked_volumes import PATIENTS, SHAPE, SPACING, folder_of, label_map, spec_of_masks, voxels
from tests.data.volume_files import write_nifti, write_series


def read(root: Path, **more: Any) -> ImageSet:
    images = concatenate_image_sets(load_dataset(spec_of_masks(**more), root).parts)
    return images.select_rows(np.argsort(images.lines))


def area(images: ImageSet, row: int, name: str) -> np.ndarray:
    assert images.masks is not None
    return images.masks.read_class_areas(np.array([row]), (name,))[0, 0]


def test_a_label_map_lies_on_the_voxels_of_its_volume(tmp_path: Path) -> None:
    images = read(folder_of(tmp_path))
    assert images.stored.shape[1:] == (*SHAPE, 1)
    assert all(np.array_equal(area(images, row, "Liver"), label_map(row) == 1) for row in range(PATIENTS))
    assert images.labels[:, 1].tolist() == [row % 2 for row in range(PATIENTS)]
    assert images.masks is not None
    assert images.masks.spacing is not None
    np.testing.assert_allclose(images.masks.spacing, [SPACING] * PATIENTS)


def test_a_mask_whose_axes_run_otherwise_is_turned_as_its_volume(tmp_path: Path) -> None:
    folder_of(tmp_path)
    image: Any = nibabel.load(tmp_path / "m4.nii.gz")
    turned = image.as_reoriented(nibabel.orientations.axcodes2ornt(("P", "I", "R")))
    nibabel.save(turned, tmp_path / "m4.nii.gz")
    assert np.array_equal(area(read(tmp_path), 4, "Liver"), label_map(4) == 1)


def test_a_coarser_grid_takes_the_nearest_voxel_and_states_its_spacing(tmp_path: Path) -> None:
    images = read(folder_of(tmp_path), image_size=(3, 5, 4), spacing=(6.0, 4.0, 2.0))
    # New voxel k covers old voxels 2k and 2k + 1, with its middle on the border of both: the second one counts.
    assert np.array_equal(area(images, 5, "Liver"), (label_map(5) == 1)[1::2, 1::2, 1::2])
    assert images.masks is not None
    assert images.masks.spacing is not None
    np.testing.assert_allclose(images.masks.spacing[5], (6.0, 4.0, 2.0))


def test_a_mask_as_nifti_fits_a_dicom_series(tmp_path: Path) -> None:
    folder_of(tmp_path)
    write_series(tmp_path / "series", voxels(4), spacing=SPACING)
    grid = read_grid(tmp_path / "series", DecodedImageFormat(SHAPE, False, "pad", PictureRenderingOptions()))
    # DICOM's patient axes run against NIfTI's: the same voxels have another affine.
    series: Any = nibabel.Nifti1Image(label_map(4), grid.affine)  # type: ignore[union-attr]
    nibabel.save(series, tmp_path / "m4.nii.gz")
    table = (tmp_path / "labels.csv").read_text().replace("v4.nii.gz", "series")
    (tmp_path / "labels.csv").write_text(table)
    assert np.array_equal(area(read(tmp_path), 4, "Liver"), label_map(4) == 1)


def of_other_size(root: Path) -> None:
    write_nifti(root / "m4.nii.gz", label_map(4)[:-1], SPACING)


def elsewhere(root: Path) -> None:
    write_nifti(root / "m4.nii.gz", label_map(4), (3.0, 2.0, 1.1))


def without_orientation(root: Path) -> None:
    values = label_map(4)[:, ::-1, ::-1].transpose(2, 1, 0)
    nibabel.save(nibabel.Nifti1Image(values, np.eye(4)), root / "m4.nii.gz")


def with_halves(root: Path) -> None:
    write_nifti(root / "m4.nii.gz", label_map(4) * np.float32(0.5), SPACING)


def with_value(root: Path) -> None:
    write_nifti(root / "m4.nii.gz", label_map(4) + np.uint8(2), SPACING)


def in_four_dimensions(root: Path) -> None:
    nibabel.save(nibabel.Nifti1Image(np.zeros((8, 10, 6, 2), np.uint8), np.diag([1, 2, 3, 1])), root / "m4.nii.gz")


def sheared(root: Path) -> None:
    affine = np.diag([1.0, 2.0, 3.0, 1.0])
    affine[0, 1] = 0.7
    nibabel.save(nibabel.Nifti1Image(label_map(4).transpose(2, 1, 0), affine), root / "m4.nii.gz")


def cut_off(root: Path) -> None:
    content = gzip.decompress((root / "m4.nii.gz").read_bytes())
    (root / "m4.nii.gz").write_bytes(gzip.compress(content[:-50]))


def as_picture(root: Path) -> None:
    (root / "m4.nii.gz").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(60))


MESSES = {
    of_other_size: "5 x 10 x 8 voxels, and its volume 6 x 10 x 8",
    elsewhere: "mm beside its volume",
    without_orientation: "mm beside its volume",
    with_halves: "whole numbers",
    with_value: "data.mask_values",
    in_four_dimensions: "",
    sheared: "sheared",
    cut_off: "",
    as_picture: "",
}


@pytest.mark.parametrize("spoil", MESSES, ids=lambda spoil: spoil.__name__)
def test_a_mask_that_cannot_be_right_is_refused_by_name(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    spoil(folder_of(tmp_path))
    with pytest.raises(BadInput) as refused:
        read(tmp_path)
    (fault,) = refused.value.faults
    assert fault.where == "data.mask_column"
    assert '"v4.nii.gz"' in fault.problem
    assert MESSES[spoil] in fault.problem


def test_whole_numbers_as_floats_are_read(tmp_path: Path) -> None:
    folder_of(tmp_path)
    write_nifti(tmp_path / "m4.nii.gz", label_map(4).astype(np.float64), SPACING)
    assert np.array_equal(area(read(tmp_path), 4, "Liver"), label_map(4) == 1)


@pytest.mark.parametrize("size", [SHAPE, (12, 20, 16), (8, 8, 8)])
def test_a_mask_comes_back_to_the_grid_of_its_volume(tmp_path: Path, size: tuple[int, int, int]) -> None:
    write_nifti(tmp_path / "v.nii", voxels(0), SPACING)
    spacing = (1.5, 1.0, 0.5) if size == (12, 20, 16) else SPACING
    form = DecodedImageFormat(size, False, "pad", PictureRenderingOptions(spacing=spacing))
    grid = read_grid(tmp_path / "v.nii", form)
    restored = restore_volume_mask(fit_volume_mask(label_map(3), grid, form), grid, form)  # type: ignore[arg-type]
    inside = np.ones(SHAPE, bool)
    if size == (8, 8, 8):  # ten rows, of which the grid holds the middle eight
        inside[:, [0, -1]] = False
    assert np.array_equal(restored, np.where(inside, label_map(3), 0))


def test_predict_writes_nifti_on_the_grid_of_the_volume(tmp_path: Path) -> None:
    form = {"architecture": "tiny_unet", "channels": 1, "image_size": SHAPE, "task": "exclusive_segmentation"}
    spec = ModelSpec.model_validate({**form, "image_size": (8, 12, 8)})
    network = build_network(spec, ("Liver", "Spleen"), seed=2)
    (tmp_path / "volumes").mkdir()
    write_nifti(tmp_path / "volumes" / "v.nii.gz", voxels(1), SPACING)
    save_model(tmp_path, network, label_contract_sha256="0" * 64)
    fitting = DecodedImageFormat((8, 12, 8), False, "pad", PictureRenderingOptions(spacing=SPACING))
    predict_masks(network.eval(), network.class_names, tmp_path / "volumes", fitting, tmp_path / "masks")
    mask: Any = nibabel.load(tmp_path / "masks" / "v.nii.gz")
    volume: Any = nibabel.load(tmp_path / "volumes" / "v.nii.gz")
    assert mask.shape == volume.shape
    np.testing.assert_allclose(mask.affine, volume.affine)
    assert set(np.unique(np.asarray(mask.dataobj))) <= {0, 1, 2}


def turn(image: Any, codes: str) -> Any:
    return image.as_reoriented(
        nibabel.orientations.ornt_transform(
            nibabel.orientations.io_orientation(image.affine), nibabel.orientations.axcodes2ornt(tuple(codes))
        )
    )


@pytest.mark.parametrize("codes", ["LAS", "RAS", "LPS", "PIR", "SRP", "AIL"])
def test_a_written_mask_has_the_voxel_order_and_affine_of_the_volumes_file(tmp_path: Path, codes: str) -> None:
    angle = 0.2  # in radians: an oblique volume
    rotation = [[np.cos(angle), -np.sin(angle), 0], [np.sin(angle), np.cos(angle), 0], [0, 0, 1]]
    affine = np.eye(4)
    affine[:3] = np.column_stack([rotation @ np.diag([1.0, 2.0, 5.0]), [4, -6, 9]])
    file = tmp_path / "v.nii.gz"
    nibabel.save(turn(nibabel.Nifti1Image(np.arange(7 * 7 * 7, dtype=np.int16).reshape(7, 7, 7), affine), codes), file)
    grid, stored = read_volume(file), nibabel.load(file)
    mask: Any = nibabel.Nifti1Image.from_bytes(write_nifti_mask(tmp_path / "m.nii", grid.voxels, grid))
    assert np.array_equal(mask.get_fdata(), stored.get_fdata())  # type: ignore[attr-defined]
    np.testing.assert_allclose(mask.affine, stored.affine, atol=1e-5)  # type: ignore[attr-defined]


def test_the_mask_of_a_volume_without_orientation_states_none(tmp_path: Path) -> None:
    image: Any = nibabel.Nifti1Image(voxels(0), np.diag([-3.0, 2.0, 1.0, 1.0]))
    image.set_sform(None, code=0)
    image.set_qform(None, code=0)
    nibabel.save(image, tmp_path / "v.nii.gz")
    grid = read_volume(tmp_path / "v.nii.gz")
    mask: Any = nibabel.Nifti1Image.from_bytes(write_nifti_mask(tmp_path / "m.nii", grid.voxels, grid))
    stored: Any = nibabel.load(tmp_path / "v.nii.gz")
    assert (int(mask.header["sform_code"]), int(mask.header["qform_code"])) == (0, 0)
    np.testing.assert_allclose(mask.affine, stored.affine, atol=1e-5)
    assert np.array_equal(mask.get_fdata(), stored.get_fdata())
