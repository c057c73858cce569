"""Digits and phantoms: what needs no files."""

from pathlib import Path

import numpy as np
import pytest

from polyclinic.data.base.image_set import DatasetSplits
from polyclinic.data.base.spec import DigitsDatasetSpec, PhantomDatasetSpec
from polyclinic.data.load import find_dataset_faults, load_dataset
from polyclinic.data.sources import built_in
from polyclinic.data.sources.built_in import PHANTOM_CLASSES, draw_phantom_images


@pytest.fixture(scope="module")
def splits() -> DatasetSplits:
    return load_dataset(PhantomDatasetSpec(kind="phantom", images=600, image_size=32), Path())


def test_digits_are_1797_grey_images_of_ten_classes() -> None:
    splits = load_dataset(DigitsDatasetSpec(kind="digits"), Path())
    assert [len(part) for part in splits.parts] == [1257, 179, 361]
    assert splits.train.images.shape[1:] == (8, 8)
    assert (splits.train.images.min(), splits.train.images.max()) == (0, 255)
    assert (splits.train.labels.sum(axis=1) == 1).all()


@pytest.mark.parametrize("elsewhere", [False, True], ids=["the library's file", "a release that keeps it elsewhere"])
def test_digits_are_those_of_the_library(elsewhere: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from sklearn.datasets import load_digits as of_the_library

    if elsewhere:
        monkeypatch.setattr(Path, "is_file", lambda file: False)
    built_in._load_digit_images_and_labels.cache_clear()
    images, labels = built_in._load_digit_images_and_labels(None)
    np.testing.assert_array_equal(images, np.round(of_the_library().images * (255 / 16)))
    np.testing.assert_array_equal(labels, of_the_library().target)
    built_in._load_digit_images_and_labels.cache_clear()


def test_phantom_patients_stand_on_one_side_with_one_to_three_images(splits: DatasetSplits) -> None:
    patients = [set(part.patients.tolist()) for part in splits.parts]
    assert sum(map(len, patients)) == len(set.union(*patients))
    _, images = np.unique(splits.train.patients, return_counts=True)
    assert set(images.tolist()) == {1, 2, 3}
    assert sum(map(len, splits.parts)) == 600


def test_every_phantom_finding_is_there_but_not_common(splits: DatasetSplits) -> None:
    prevalence = splits.train.labels.mean(axis=0)
    assert len(prevalence) == len(PHANTOM_CLASSES) == 9
    assert (prevalence > 0.1).all()
    assert (prevalence < 0.4).all()


def test_the_same_seed_draws_the_same_phantoms_and_another_seed_others() -> None:
    first, same, other = (draw_phantom_images(25, 24, np.random.default_rng(seed)) for seed in (4, 4, 5))
    np.testing.assert_array_equal(first.images, same.images)
    np.testing.assert_array_equal(first.labels, same.labels)
    assert (first.images != other.images).any()


@pytest.mark.parametrize(
    ("finding", "brighter"),
    [("Cardiomegaly", True), ("Consolidation", True), ("Effusion", True), ("Mass", True), ("Emphysema", False)],
)
def test_findings_change_the_brightness_as_in_patients(splits: DatasetSplits, finding: str, brighter: bool) -> None:
    train = splits.train
    has = train.labels[:, PHANTOM_CLASSES.index(finding)] == 1
    chest = train.images[:, 6:24, 5:27].astype(np.float64)
    relative = chest.mean(axis=(1, 2)) / train.images[:, 28:].mean(axis=(1, 2))  # belly as exposure reference
    assert (relative[has].mean() > relative[~has].mean()) == brighter


def test_made_data_has_no_faults() -> None:
    for spec in (PhantomDatasetSpec(kind="phantom"), DigitsDatasetSpec(kind="digits")):
        assert find_dataset_faults(spec, Path()) == []
