"""Pictures that an npz file, or arrays, hold several times: refused across parts, and said where rows disagree."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

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
from polyclinic.data.base.spec import FolderDatasetSpec, NpzDatasetSpec, PluginDatasetSpec
from polyclinic.data.images.store import MEMORY_STORE, DecodedImageStore
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
    monkeypatch.setattr(npz, "MAX_IMAGE_BYTES_IN_MEMORY", 0)
    place = DecodedImageStore(tmp_path / "cache", secret=secret)
    cached = load_dataset(NPZ, tmp_path, place)
    assert isinstance(cached.train.stored, LazyPictures)
    assert (hash_dataset(*cached.parts) == hash_dataset(*in_memory.parts)) == (secret is None)
    for each in (place, MEMORY_STORE):
        with pytest.raises(BadInput, match="has 10 of 10 pictures of its test part in its train part too"):
            of_npz(tmp_path, {**rows, "test": np.arange(30, 40)}, each)


NPZ = NpzDatasetSpec(kind="npz", path="a.npz", classes=("a", "b"))


def of_npz(
    folder: Path, parts: dict[str, NDArray[np.intp]], place: DecodedImageStore = MEMORY_STORE, **arrays: NDArray[Any]
) -> DatasetSplits:
    """Load these rows, from a file that has other arrays where they are given."""
    write_npz(folder, parts, **arrays)
    return load_dataset(NPZ, folder, place)


def write_npz(folder: Path, parts: dict[str, NDArray[np.intp]], **arrays: NDArray[Any]) -> None:
    rows = {f"{part}_{kind}": data[of_part] for part, of_part in parts.items() for kind, data in DATA.items()}
    np.savez(folder / "a.npz", allow_pickle=False, **{**rows, **arrays})


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
    even = np.repeat(np.arange(60) % 2 * 100, 64).reshape(60, 8, 8).astype(np.uint8)
    assert all(0 < len(part) < 60 for part in of_arrays(tmp_path, even, LABELS).parts)


@pytest.mark.parametrize("value", [0, 255])
def test_a_set_of_one_even_grey_is_refused_because_it_shows_nothing(tmp_path: Path, value: int) -> None:
    with pytest.raises(BadInput, match=f"every pixel of every picture is {value}"):
        of_arrays(tmp_path, np.full((60, 8, 8), value, np.uint8), LABELS)


PARTS = {"train": np.r_[0:40, 0:3], "val": np.r_[40:50, 5], "test": np.r_[50:60, 1, 1, 2, 45]}
"""Of 14 test pictures 3 are in training (1, 1 and 2) and one in validation (45); of 11 for validation one is (5)."""


def describe_copies(splits: DatasetSplits) -> list[tuple[str, str]]:
    return [(copy.name, copy.other_name) for copy in splits.test.shared]


COPIES = [("val[10]", "train[5]"), ("test[10]", "train[1]"), ("test[11]", "train[1]"), ("test[12]", "train[2]")]
COPIES = [(name.replace("val", "validation"), other) for name, other in COPIES] + [("test[13]", "validation[5]")]


def test_a_few_shared_pictures_are_noted_with_their_number_and_names(tmp_path: Path) -> None:
    splits = of_npz(tmp_path, PARTS)
    assert describe_copies(splits) == COPIES
    (note,) = [note for note in splits.train.notes if "test pictures are in the train part too" in note]
    assert note.startswith("3 of 14 test pictures")
    assert '"test[12]" is "train[2]"' in note
    assert [len(part) for part in splits.parts] == [43, 11, 14]


def drop_copies(folder: Path, parts: dict[str, NDArray[np.intp]]) -> DatasetSplits:
    write_npz(folder, parts)
    return load_dataset(NPZ.model_copy(update={"duplicates": "drop_from_training"}), folder)


def test_copies_are_dropped_from_the_earlier_part(tmp_path: Path) -> None:
    splits = drop_copies(tmp_path, PARTS)
    # Of training go 1 and 2 (each there twice) and 5, of validation 45; the test part stays.
    expected = [np.r_[0, 3, 4, 6:40, 0], np.r_[40:45, 46:50, 5], PARTS["test"]]
    for part, rows in zip(splits.parts, expected, strict=True):
        np.testing.assert_array_equal(part.images, PICTURES[rows])
        np.testing.assert_array_equal(part.labels, LABELS[rows])
    assert describe_copies(splits) == COPIES


def test_a_part_that_is_half_in_another_is_refused_and_read_with_the_remedy(tmp_path: Path) -> None:
    parts = {"train": np.arange(40), "val": np.arange(40, 50), "test": np.r_[30:40, 50:60]}
    with pytest.raises(BadInput) as refused:
        of_npz(tmp_path, parts)
    assert 'duplicates = "drop_from_training"' in refused.value.faults[0].remedy
    splits = drop_copies(tmp_path, parts)
    assert [len(part) for part in splits.parts] == [30, 10, 20]
    assert not set(splits.train.picture_digests) & set(splits.test.picture_digests)


def test_repeated_pictures_without_patients_are_read_with_the_remedy(tmp_path: Path) -> None:
    twice = np.tile(np.arange(60), 2)
    data = LabelledImages(PICTURES[twice], LABELS[twice], ("a", "b"))
    name = register_local_plugin(DATASETS, lambda base, options: data)
    spec = PluginDatasetSpec(kind="plugin", name=name, duplicates="drop_from_training")
    splits = load_dataset(spec, tmp_path)
    digests = [set(part.picture_digests.tolist()) for part in splits.parts]
    assert not digests[0] & digests[1]
    assert not digests[0] & digests[2]
    assert not digests[1] & digests[2]
    assert len(set().union(*digests)) == 60


def test_a_table_is_noted_and_read_without_the_copies_where_asked(tmp_path: Path) -> None:
    rows = ["file,patient,part,a"]
    for number in range(30):
        Image.fromarray(PICTURES[number % 25]).save(tmp_path / f"{number}.png")
        rows.append(f"{number}.png,p{number},{'train' if number < 20 else 'test'},{number % 2}")
    (tmp_path / "t.csv").write_text("\n".join(rows), encoding="utf-8")
    columns = {"image_column": "file", "patient_column": "patient", "split_column": "part", "label_columns": ("a",)}
    spec = FolderDatasetSpec(kind="folder", images=".", labels="t.csv", image_size=8, validation_fraction=0, **columns)
    splits = load_dataset(spec, tmp_path)
    assert describe_copies(splits) == [(f"{25 + row}.png", f"{row}.png") for row in range(5)]
    assert [len(part) for part in splits.parts] == [20, 0, 10]
    dropped = load_dataset(spec.model_copy(update={"duplicates": "drop_from_training"}), tmp_path)
    assert [len(part) for part in dropped.parts] == [15, 0, 10]


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
