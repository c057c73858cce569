"""Pictures that an npz file, or arrays, hold several times: refused across parts, and said where rows disagree."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from common.data.base.image_set import Splits
from common.data.base.spec import NpzSpec, PluginSpec
from common.data.load import load_dataset
from common.errors import BadInput
from common.plugins import DATASETS, register_local_plugin
from polyclinic.data import LabelledImages

PICTURES = np.random.default_rng(7).integers(0, 256, (60, 8, 8), dtype=np.uint8)
LABELS = np.stack([np.arange(60) % 2, np.arange(60) % 3 == 0], axis=1).astype(np.float32)


def of_npz(folder: Path, parts: dict[str, NDArray[np.intp]], labels: NDArray[np.float32] = LABELS) -> Splits:
    arrays: dict[str, Any] = {f"{part}_images": PICTURES[rows] for part, rows in parts.items()}
    np.savez(folder / "a.npz", **arrays, **{f"{part}_labels": labels[rows] for part, rows in parts.items()})
    return load_dataset(NpzSpec(kind="npz", path="a.npz", classes=("a", "b")), folder)


def of_arrays(folder: Path, rows: NDArray[np.intp], **fields: Any) -> Splits:
    data = LabelledImages(PICTURES[rows], LABELS[rows], ("a", "b"), **fields)
    name = register_local_plugin(DATASETS, lambda base, options: data)
    return load_dataset(PluginSpec(kind="plugin", name=name), folder)


def test_a_test_part_of_an_npz_file_that_holds_training_pictures_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match='has 10 equal pictures in "train" and "test"'):
        of_npz(tmp_path, {"train": np.arange(40), "val": np.arange(40, 50), "test": np.arange(30, 40)})


def test_pictures_that_an_array_repeats_are_refused_where_nobody_knows_their_patients(tmp_path: Path) -> None:
    twice = np.tile(np.arange(60), 2)
    with pytest.raises(BadInput, match='equal pictures in "train" and'):
        of_arrays(tmp_path, twice)
    assert len(of_arrays(tmp_path, twice, patients=[f"P{row}" for row in twice]).train)


def test_two_rows_of_one_picture_with_other_labels_are_said(tmp_path: Path) -> None:
    parts = {"train": np.r_[0:40, 0], "val": np.arange(40, 50), "test": np.arange(50, 60)}
    assert of_npz(tmp_path, parts).train.notes == ()
    arrays: dict[str, Any] = {f"{part}_images": PICTURES[rows] for part, rows in parts.items()}
    labels = {f"{part}_labels": LABELS[rows] for part, rows in parts.items()}
    labels["train_labels"][40] = 1 - LABELS[0]
    np.savez(tmp_path / "b.npz", **arrays, **labels)
    (note,) = load_dataset(NpzSpec(kind="npz", path="b.npz", classes=("a", "b")), tmp_path).train.notes
    assert '"train[40]" is "train[0]"' in note


def test_pictures_of_one_grey_are_no_copies(tmp_path: Path) -> None:
    data = LabelledImages(np.zeros((60, 8, 8), np.uint8), LABELS, ("a", "b"))
    name = register_local_plugin(DATASETS, lambda base, options: data)
    assert len(load_dataset(PluginSpec(kind="plugin", name=name), tmp_path).train) == 42
