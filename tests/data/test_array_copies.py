"""Pictures that an npz file, or arrays, hold several times: refused across parts, and said where rows disagree."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from polyclinic.common.errors import BadInput
from polyclinic.common.plugins import DATASETS, register_local_plugin
from polyclinic.data import LabelledImages
from polyclinic.data.base.image_set import (
    DatasetSplits,
    ImageSet,
    LazyPictures,
    hash_dataset,
    hash_dataset_components,
)
from polyclinic.data.base.spec import NpzDatasetSpec, PluginDatasetSpec
from polyclinic.data.images.store import IN_MEMORY, DecodedImageStore
from polyclinic.data.load import load_dataset
from polyclinic.data.sources import npz

PICTURES = np.random.default_rng(7).integers(0, 256, (60, 8, 8), dtype=np.uint8)
LABELS = np.stack([np.arange(60) % 2, np.arange(60) % 3 == 0], axis=1).astype(np.float32)
DATA = {"images": PICTURES, "labels": LABELS}


@pytest.mark.parametrize("secret", [None, bytes(32)])
def test_pictures_are_compared_and_identified_in_a_cache_as_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secret: bytes | None
) -> None:
    rows = {"train": np.arange(40), "val": np.arange(40, 50), "test": np.arange(50, 60)}
    in_memory = of_npz(tmp_path, rows)
    monkeypatch.setattr(npz, "KEPT_BYTES", 0)
    place = DecodedImageStore(tmp_path / "cache", secret=secret)
    cached = load_dataset(NPZ, tmp_path, place)
    assert isinstance(cached.train.stored, LazyPictures)
    assert (hash_dataset(*cached.parts) == hash_dataset(*in_memory.parts)) == (secret is None)
    for each in (place, IN_MEMORY):
        with pytest.raises(BadInput, match='has 10 equal pictures in "train" and "test"'):
            of_npz(tmp_path, {**rows, "test": np.arange(30, 40)}, each)


NPZ = NpzDatasetSpec(kind="npz", path="a.npz", classes=("a", "b"))


def of_npz(
    folder: Path, parts: dict[str, NDArray[np.intp]], place: DecodedImageStore = IN_MEMORY, **arrays: NDArray[Any]
) -> DatasetSplits:
    """Load these rows, from a file that has other arrays where they are given."""
    rows = {f"{part}_{kind}": data[of_part] for part, of_part in parts.items() for kind, data in DATA.items()}
    np.savez(folder / "a.npz", allow_pickle=False, **{**rows, **arrays})
    return load_dataset(NPZ, folder, place)


def of_arrays(folder: Path, pictures: NDArray[np.uint8], labels: NDArray[Any], **fields: Any) -> DatasetSplits:
    data = LabelledImages(pictures, labels, ("a", "b"), **fields)
    name = register_local_plugin(DATASETS, lambda base, options: data)
    return load_dataset(PluginDatasetSpec(kind="plugin", name=name), folder)


def test_pictures_that_an_array_repeats_are_refused_where_nobody_knows_their_patients(tmp_path: Path) -> None:
    twice = np.tile(np.arange(60), 2)
    with pytest.raises(BadInput, match="holds 60 pictures again, and names no patients"):
        of_arrays(tmp_path, PICTURES[twice], LABELS[twice])
    assert len(of_arrays(tmp_path, PICTURES[twice], LABELS[twice], patients=[f"P{row}" for row in twice]).train)


def test_two_rows_of_one_picture_with_other_labels_are_said(tmp_path: Path) -> None:
    parts = {"train": np.r_[0:40, 0], "val": np.arange(40, 50), "test": np.arange(50, 60)}
    assert of_npz(tmp_path, parts).train.notes == ()
    (note,) = of_npz(tmp_path, parts, train_labels=np.concatenate([LABELS[:40], 1 - LABELS[:1]])).train.notes
    assert '"train[40]" is "train[0]"' in note


def test_pictures_of_one_grey_are_no_copies(tmp_path: Path) -> None:
    splits = of_arrays(tmp_path, np.zeros((60, 8, 8), np.uint8), LABELS)
    assert all(0 < len(part) < 60 for part in splits.parts)


def test_the_contents_of_a_data_set_say_what_has_changed_and_at_which_hospital() -> None:
    names = np.array(["p0", "p1", "p2", "p3"])
    images = ImageSet(
        stored=np.arange(4 * 64, dtype=np.uint8).reshape(4, 8, 8),
        labels=np.eye(4, 2, dtype=np.float32),
        class_names=("Mass", "Fluid"),
        patients=names,
        sources=np.array(["Ost", "Ost", "West", "West"]),
    )
    before = hash_dataset_components(images)
    labels = images.labels.copy()
    labels[3, 0] = 1
    after = hash_dataset_components(replace(images, labels=labels))
    assert before["images"] == "4"
    assert [key for key in before if before[key] != after[key]] == ["labels", "labels by picture", "hospital West"]
    assert [
        key
        for key, text in hash_dataset_components(replace(images, patients=names[::-1])).items()
        if text != before[key]
    ] == ["patients by picture", "hospital Ost", "hospital West"]
    order = np.array([2, 0, 3, 1])
    assert hash_dataset_components(images.select_rows(order[:1]), images.select_rows(order[1:])) == before
