"""Volumes through a table: files and folders of slices, the cache on the disk, what is refused and what is counted."""

import csv
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from polyclinic.common.errors import BadInput
from polyclinic.data.base.image_set import concatenate_image_sets
from polyclinic.data.base.spec import FolderDatasetSpec, NpzDatasetSpec
from polyclinic.data.images import volume_pixels
from polyclinic.data.images.store import MEMORY_STORE, DecodedImageStore
from polyclinic.data.load import load_dataset
from polyclinic.data.tables.class_folders import list_class_folders
from tests.data.volume_files import write_nifti, write_series

COUNT = 12


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twelve patients: six NIfTI files, six folders of DICOM slices, all with other voxels."""
    (tmp_path / "images").mkdir()
    rows = [["scan", "patient", "Mass", "Fluid"]]
    for number in range(COUNT):
        voxels = np.random.default_rng(number).integers(-100, 900, (6, 8, 8)).astype(np.int16)
        name = f"p{number}.nii.gz" if number % 2 else f"p{number}/series"
        write = write_nifti if number % 2 else write_series
        write(tmp_path / "images" / name, voxels)
        rows.append([name, f"P{number}", str(int(number % 3 == 0)), str(number % 2)])
    with (tmp_path / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return tmp_path


def spec(**more: Any) -> FolderDatasetSpec:
    settings: dict[str, Any] = {
        "images": "images",
        "labels": "labels.csv",
        "image_column": "scan",
        "patient_column": "patient",
    }
    settings |= {
        "label_columns": ["Mass", "Fluid"],
        "image_size": [6, 8, 8],
        "window": [400, 1001],
        "resize": "stretch",
    }
    return FolderDatasetSpec.model_validate({"kind": "folder", **settings, **more})


def voxels_of(folder: Path, store: DecodedImageStore = MEMORY_STORE, **more: Any) -> NDArray[np.uint8]:
    whole = concatenate_image_sets(load_dataset(spec(**more), folder, store).parts)
    order = np.argsort(whole.patients)
    return whole.images[order]


def test_files_and_folders_become_volumes_with_five_axes(folder: Path) -> None:
    whole = concatenate_image_sets(load_dataset(spec(), folder).parts)
    assert whole.images.shape == (COUNT, 6, 8, 8, 1)
    assert whole.channels == 1
    assert len(set(whole.picture_digests.tolist())) == COUNT


def test_the_patient_of_a_series_is_that_of_its_slices(folder: Path) -> None:
    for number in range(1, COUNT, 2):
        shutil.rmtree(folder / "images" / f"p{number - 1}")
        voxels = np.random.default_rng(number).integers(-100, 900, (6, 8, 8))
        write_series(folder / "images" / f"p{number - 1}/series", voxels, PatientID=f"Q{number}")
    table = (folder / "labels.csv").read_text().splitlines()
    (folder / "labels.csv").write_text("\n".join([table[0], *table[1::2]]) + "\n")
    whole = concatenate_image_sets(load_dataset(spec(patient_column=None), folder).parts)
    assert sorted(whole.patients.tolist()) == sorted(f"Q{number}" for number in range(1, COUNT, 2))


def test_the_cache_on_the_disk_has_the_same_voxels_and_reads_no_file_twice(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polyclinic.data.images.store.CACHE_THRESHOLD_BYTES", 0)
    store = DecodedImageStore(folder / "cache")
    before = voxels_of(folder)
    assert (voxels_of(folder, store) == before).all()
    read = list[object]()
    monkeypatch.setattr(volume_pixels, "read_volume", lambda *of: read.append(of))
    assert (voxels_of(folder, store) == before).all()
    assert read == []


def test_a_slice_that_is_replaced_makes_the_volume_another_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyclinic.data.images.store.CACHE_THRESHOLD_BYTES", 0)
    store = DecodedImageStore(folder / "cache")
    before = voxels_of(folder, store)
    shutil.rmtree(folder / "images" / "p0")
    write_series(folder / "images" / "p0/series", np.random.default_rng(99).integers(-100, 900, (6, 8, 8)))
    after = voxels_of(folder, store)
    assert (after != before).any(axis=(1, 2, 3, 4)).sum() == 1


def test_a_series_that_was_copied_under_other_file_names_is_one_volume(folder: Path) -> None:
    copied = folder / "images" / "p2/series"
    shutil.rmtree(copied)
    shutil.copytree(folder / "images" / "p0/series", copied)
    for file in list(copied.iterdir()):
        file.rename(copied / f"other_{file.name}")
    whole = concatenate_image_sets(load_dataset(spec(duplicates="drop_from_training"), folder).parts)
    assert len(set(whole.picture_digests.tolist())) == COUNT - 1


def test_volumes_that_cannot_be_read_are_named_with_the_reason(folder: Path) -> None:
    write_series(folder / "images" / "p0/series", np.zeros((6, 8, 8)))[3].unlink()
    file = folder / "images" / "p1.nii.gz"
    file.write_bytes(file.read_bytes()[:-30])
    with pytest.raises(BadInput) as caught:
        load_dataset(spec(), folder)
    text = str(caught.value)
    assert "2 of 12 images cannot be read" in text
    assert '"p1.nii.gz" (damaged or cut off)' in text
    assert '"p0/series"' in text
    kept = concatenate_image_sets(load_dataset(spec(skip_budget=0.5), folder).parts)
    assert len(kept) == COUNT - 2
    assert {skip.name for skip in kept.skipped} == {"p0/series", "p1.nii.gz"}


def test_a_folder_that_the_table_names_and_that_is_missing_is_named(folder: Path) -> None:
    shutil.rmtree(folder / "images" / "p4")
    with pytest.raises(BadInput, match='"p4/series"'):
        load_dataset(spec(), folder)


def test_folders_are_no_pictures_for_a_run_of_pictures(folder: Path) -> None:
    with pytest.raises(BadInput, match='"p0/series"'):
        load_dataset(spec(image_size=16, frame="middle"), folder)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"image_size": 64, "spacing": [1, 1, 1]}, "spacing is for volumes"),
        ({"frame": "middle"}, "frame: only for pictures"),
        ({"color": True}, "color: only for pictures"),
        ({"value_range": [0, 100], "window": None}, "value_range: only for pictures"),
        ({"spacing": [1, 1]}, "spacing"),
        ({"spacing": [1, 0, 1]}, "spacing"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        spec(**changed)


def test_class_folders_have_a_series_for_one_volume(folder: Path) -> None:
    for number in range(4):
        name = ("ill", "well")[number % 2]
        voxels = np.random.default_rng(number).integers(0, 9, (3, 4, 4))
        write_series(folder / "sorted" / name / f"p{number}", voxels, prefix="I")
    for file in list((folder / "sorted").rglob("*.dcm")):
        file.rename(file.with_suffix(""))  # as many archives write them
    write_nifti(folder / "sorted" / "ill" / "p9.nii.gz", np.zeros((3, 4, 4), np.int16))
    listed = list_class_folders(folder / "sorted")
    assert {name: [str(path) for path in paths] for name, paths in listed.items()} == {
        "ill": ["ill/p0", "ill/p2", "ill/p9.nii.gz"],
        "well": ["well/p1", "well/p3"],
    }


# ---------------------------------------------------------------------- arrays


def write_npz(path: Path, *axes: int) -> NDArray[np.uint8]:
    """Write an npz file of 30 images with these axes, and return those of the training part."""
    arrays: dict[str, NDArray[Any]] = {}
    for part in ("train", "val", "test"):
        random = np.random.default_rng(len(part))
        arrays[f"{part}_images"] = random.integers(0, 256, (10, *axes), dtype=np.uint8)
        arrays[f"{part}_labels"] = random.integers(0, 2, (10, 2))
    np.savez(path, **arrays)
    return arrays["train_images"]


def of_npz(path: Path, **more: Any) -> NpzDatasetSpec:
    return NpzDatasetSpec.model_validate({"kind": "npz", "path": path.name, "classes": ["a", "b"], **more})


@pytest.mark.parametrize("axes", [(6, 7, 8), (6, 7, 8, 1)])
@pytest.mark.parametrize("kept_bytes", [1 << 20, 0])
def test_arrays_of_volumes_have_five_axes_in_memory_and_in_the_cache(
    axes: tuple[int, ...], kept_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polyclinic.data.sources.npz.MAX_IMAGE_BYTES_IN_MEMORY", kept_bytes)
    written = write_npz(tmp_path / "it.npz", *axes)
    train = load_dataset(of_npz(tmp_path / "it.npz"), tmp_path, DecodedImageStore(tmp_path / "cache")).train
    assert train.images.shape == (10, 6, 7, 8, 1)
    assert (train.images[..., 0] == written.reshape(10, 6, 7, 8)).all()


def test_a_last_axis_of_few_entries_is_one_of_colours_and_no_volume(tmp_path: Path) -> None:
    write_npz(tmp_path / "it.npz", 16, 16, 4)
    with pytest.raises(BadInput, match="expected uint8"):
        load_dataset(of_npz(tmp_path / "it.npz"), tmp_path)


def test_a_side_for_pictures_does_not_resize_volumes_and_without_it_they_are_read(tmp_path: Path) -> None:
    write_npz(tmp_path / "it.npz", 6, 7, 8)
    with pytest.raises(BadInput, match=r"image_size resizes pictures. Leave data.image_size out"):
        load_dataset(of_npz(tmp_path / "it.npz", image_size=16), tmp_path)
    assert load_dataset(of_npz(tmp_path / "it.npz"), tmp_path).test.stored.ndim == 5
