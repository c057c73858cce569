"""Masks in the cache: those of memory, read once, and again where a file or the grid of its picture changes."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from polyclinic.common.errors import BadInput
from polyclinic.data.base.image_set import (
    DatasetSplits,
    LazyPictures,
    deserialize_dataset_splits,
    hash_dataset,
    serialize_dataset_splits,
)
from polyclinic.data.base.masks import LazyMasks, concatenate_masks
from polyclinic.data.base.spec import FolderDatasetSpec
from polyclinic.data.images import mask_store, store
from polyclinic.data.images.pixel_cache import PIXELS_FILE, MemoryMappedPictures
from polyclinic.data.images.store import MEMORY_STORE, DecodedImageStore
from polyclinic.data.load import load_dataset
from polyclinic.data.tables import masks as table_masks
from tests.data.masked_volumes import PATIENTS, SHAPE, SPACING, folder_of, label_map, spec_of_masks
from tests.data.volume_files import write_nifti

SECRETS = pytest.mark.parametrize("secret", [None, bytes(range(32))], ids=["plain", "encrypted"])


@pytest.fixture(autouse=True)
def every_set_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also small sets are cached, at once."""
    monkeypatch.setattr(store, "CACHE_THRESHOLD_BYTES", 0)
    monkeypatch.setattr(store, "MIN_FILE_AGE_S", 0.0)
    monkeypatch.setattr(mask_store, "MIN_FILE_AGE_S", 0.0)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the mask files that are read."""
    read = list[str]()
    original = table_masks.read_packed_mask

    def counting(files: Any, *rest: Any) -> Any:
        read.extend(file.name for file in files if file is not None)
        return original(files, *rest)

    monkeypatch.setattr(table_masks, "read_packed_mask", counting)
    return read


def load(root: Path, place: DecodedImageStore, **more: Any) -> DatasetSplits:
    return load_dataset(spec_of_masks(**more), root, place)


@SECRETS
def test_masks_of_the_cache_are_those_of_memory(tmp_path: Path, secret: bytes | None) -> None:
    root, place = folder_of(tmp_path), DecodedImageStore(tmp_path / "cache", secret=secret)
    cached, again, memory = load(root, place), load(root, place), load(root, MEMORY_STORE)
    assert isinstance(cached.train.masks.stored, LazyMasks)  # type: ignore[union-attr]
    assert isinstance(memory.train.masks.stored, np.ndarray)  # type: ignore[union-attr]
    for splits in (cached, again):
        for ours, theirs in zip(splits.parts, memory.parts, strict=True):
            assert np.array_equal(ours.labels, theirs.labels)
            assert ours.masks is not None
            assert theirs.masks is not None
            assert ours.masks.spacing is not None
            assert theirs.masks.spacing is not None
            assert np.array_equal(ours.masks.spacing, theirs.masks.spacing)
            rows = np.arange(len(ours))
            areas = [masks.read_class_areas(rows, ours.class_names) for masks in (ours.masks, theirs.masks)]
            assert np.array_equal(*areas)


@SECRETS
def test_a_mask_is_read_from_its_file_once(tmp_path: Path, reads: list[str], secret: bytes | None) -> None:
    root, place = folder_of(tmp_path), DecodedImageStore(tmp_path / "cache", secret=secret)
    load(root, place)
    # The last three files are those of the first three under other names.
    assert len(reads) == len({label_map(row).tobytes() for row in range(PATIENTS)}) == 6
    reads.clear()
    load(root, place)
    assert reads == []


def test_masks_on_the_disk_are_indexed_as_an_array(tmp_path: Path) -> None:
    masks = load(folder_of(tmp_path), DecodedImageStore(tmp_path / "cache")).train.masks
    assert masks is not None
    every = masks.stored[:]
    assert every.shape == masks.stored.shape == (6, *SHAPE)
    assert every.ndim == masks.stored.ndim
    assert np.array_equal(masks.stored[2], every[2])
    assert np.array_equal(masks.stored[np.array([3, 1])], every[[3, 1]])
    assert np.array_equal(masks.stored[1:3], every[1:3])


def test_a_mask_that_changes_is_read_again(tmp_path: Path, reads: list[str]) -> None:
    root, place = folder_of(tmp_path), DecodedImageStore(tmp_path / "cache")
    load(root, place)
    reads.clear()
    changed = label_map(3)
    changed[0, 0, 0] = 7
    write_nifti(root / "m3.nii.gz", changed, SPACING)
    assert hash_dataset(*load(root, place).parts) == hash_dataset(*load(root, MEMORY_STORE).parts)
    assert reads[0] == "m3.nii.gz"


def test_a_mask_is_read_again_if_its_volume_has_another_grid(tmp_path: Path) -> None:
    root, place = folder_of(tmp_path), DecodedImageStore(tmp_path / "cache")
    load(root, place)
    write_nifti(root / "v2.nii.gz", np.ones((6, 10, 9), np.int16), SPACING)
    with pytest.raises(BadInput, match=r"6 x 10 x 8 voxels, and its volume 6 x 10 x 9"):
        load(root, place)


def test_other_values_of_a_label_map_are_other_masks(tmp_path: Path) -> None:
    root, place = folder_of(tmp_path), DecodedImageStore(tmp_path / "cache")
    first = load(root, place)
    exchanged = load(root, place, mask_values={"Liver": 7, "Spleen": 1})
    assert hash_dataset(*first.parts) != hash_dataset(*exchanged.parts)
    memory = load(root, MEMORY_STORE, mask_values={"Liver": 7, "Spleen": 1})
    assert hash_dataset(*exchanged.parts) == hash_dataset(*memory.parts)


def test_an_image_without_a_mask_shows_nothing_and_is_annotated_nowhere(tmp_path: Path) -> None:
    root = folder_of(tmp_path)
    table = (root / "labels.csv").read_text().replace(",m4.nii.gz,", ",,")
    (root / "labels.csv").write_text(table)
    cached, memory = load(root, DecodedImageStore(tmp_path / "cache")), load(root, MEMORY_STORE)
    assert hash_dataset(*cached.parts) == hash_dataset(*memory.parts)
    assert np.isnan(cached.validation.labels).any()


def test_a_mask_that_somebody_changed_in_the_cache_is_noticed(tmp_path: Path) -> None:
    root, place = folder_of(tmp_path), DecodedImageStore(tmp_path / "cache")
    load(root, place)
    (masks,) = [file for file in (tmp_path / "cache").glob(f"*/{PIXELS_FILE}") if '"masks"' in form_of(file)]
    content = bytearray(masks.read_bytes())
    content[5] ^= 1
    masks.write_bytes(content)
    with pytest.raises(BadInput, match="not what was written"):
        load(root, place)


def form_of(pixels: Path) -> str:
    return (pixels.parent / "form.json").read_text()


def test_a_broken_mask_is_named_and_the_others_stay_in_the_cache(tmp_path: Path, reads: list[str]) -> None:
    root, place = folder_of(tmp_path), DecodedImageStore(tmp_path / "cache")
    right = (root / "m3.nii.gz").read_bytes()
    (root / "m3.nii.gz").write_bytes(right[:40])
    with pytest.raises(BadInput, match=r'1 mask of 9 cannot be used: "v3\.nii\.gz"'):
        load(root, place)
    (root / "m3.nii.gz").write_bytes(right)
    reads.clear()
    load(root, place)
    assert reads == ["m3.nii.gz"]


def test_another_process_opens_the_masks_itself(tmp_path: Path) -> None:
    root = folder_of(tmp_path)
    splits = load(root, DecodedImageStore(tmp_path / "cache"))

    def describe(stored: LazyPictures) -> Any:
        return stored.describe_for_other_process() if isinstance(stored, MemoryMappedPictures) else None

    layout, arrays = serialize_dataset_splits(splits, describe)
    again = deserialize_dataset_splits(layout, arrays, MemoryMappedPictures.open_from_description)
    assert hash_dataset(*again.parts) == hash_dataset(*splits.parts)
    assert isinstance(again.train.masks.stored, LazyMasks)  # type: ignore[union-attr]
    assert again.train.masks.stored is again.test.masks.stored  # type: ignore[union-attr]
    copied_layout, copied_arrays = serialize_dataset_splits(splits)
    copied = deserialize_dataset_splits(copied_layout, copied_arrays)
    assert hash_dataset(*copied.parts) == hash_dataset(*splits.parts)


def test_masks_of_two_stores_are_joined(tmp_path: Path) -> None:
    root = folder_of(tmp_path)
    cached = load(root, DecodedImageStore(tmp_path / "cache")).train.masks
    memory = load(root, MEMORY_STORE).train.masks
    assert cached is not None
    assert memory is not None
    both = concatenate_masks([cached, memory])
    areas = both.read_class_areas(np.arange(len(both)), ("Liver", "Spleen"))
    assert np.array_equal(areas[: len(cached)], areas[len(cached) :])


def test_palettes_of_pictures_are_compared_from_the_cache_too(tmp_path: Path) -> None:
    lines = ["picture,mask,patient"]
    for row in range(6):
        Image.fromarray(np.full((8, 8), 20 * row, np.uint8)).save(tmp_path / f"p{row}.png")
        mask = Image.fromarray(np.eye(8, dtype=np.uint8), mode="P")
        mask.putpalette([0, 0, 0, 200, 30, 30] if row != 4 else [0, 0, 0, 30, 200, 30])
        mask.save(tmp_path / f"m{row}.png")
        lines.append(f"p{row}.png,m{row}.png,{chr(65 + row)}")
    (tmp_path / "labels.csv").write_text("\n".join(lines) + "\n")
    form = {"image_column": "picture", "image_size": 8, "spacing": None, "mask_values": {"Liver": 1}}
    settings = {key: value for key, value in form.items() if value is not None}
    spec = FolderDatasetSpec.model_validate(
        {"kind": "folder", "labels": "labels.csv", "images": ".", "patient_column": "patient", "mask_column": "mask"}
        | settings
    )
    for _ in range(2):
        with pytest.raises(BadInput, match="in the colour"):
            load_dataset(spec, tmp_path, DecodedImageStore(tmp_path / "cache"))


def test_an_unusable_cache_folder_costs_only_the_cache(tmp_path: Path) -> None:
    root, lines = folder_of(tmp_path), list[str]()
    (tmp_path / "file").write_text("")
    place = replace(DecodedImageStore(tmp_path / "file" / "cache"), tell=lines.append)
    assert hash_dataset(*load(root, place).parts) == hash_dataset(*load(root, MEMORY_STORE).parts)
    assert any("cannot be used" in line for line in lines)
    assert os.listdir(tmp_path).count("cache") == 0
