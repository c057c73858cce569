"""Composites: real pictures side by side, no picture in two parts, the same ones for the same seed."""

from pathlib import Path

import numpy as np
import pytest

from polyclinic.data.base.spec import CompositesDatasetSpec
from polyclinic.data.load import find_dataset_faults, load_dataset

CLASSES = ("zero", "one", "two")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4 by 4 pixels: each picture of one grey value of its own, so that it is known wherever it lies."""
    folder = tmp_path_factory.mktemp("pictures")
    values = np.arange(1, 181)
    parts = {"train": values[:120], "test": values[120:]}
    arrays = {f"{part}_images": np.repeat(grey, 16).reshape(-1, 4, 4).astype(np.uint8) for part, grey in parts.items()}
    np.savez(folder / "grey.npz", **arrays, **{f"{part}_labels": grey % 3 for part, grey in parts.items()})
    return folder


def spec(**keys: object) -> CompositesDatasetSpec:
    settings = {"path": "grey.npz", "classes": CLASSES, "train": 200, "validation": 20, "test": 40, "image_size": 8}
    return CompositesDatasetSpec.model_validate({"kind": "composites", **settings, **keys})


def greys(images: np.ndarray) -> list[set[int]]:
    return [set(np.unique(image).tolist()) - {0} for image in images]


def test_labels_are_the_classes_of_the_pictures_that_an_image_holds(pictures: Path) -> None:
    part = load_dataset(spec(), pictures).test
    for image, label in zip(greys(part.images), part.labels, strict=True):
        assert {grey % 3 for grey in image} == set(np.flatnonzero(label).tolist())
        assert 1 <= len(image) <= 4


def test_no_picture_stands_in_two_parts(pictures: Path) -> None:
    splits = load_dataset(spec(), pictures)
    used = [set().union(*greys(part.images)) for part in splits.parts]
    assert sum(map(len, used)) == len(set().union(*used))


def test_a_picture_is_used_again_only_once_all_of_its_class_were_used(pictures: Path) -> None:
    part = load_dataset(spec(), pictures).train
    times = np.bincount([grey for image in greys(part.images) for grey in image], minlength=121)
    for kind in range(3):
        of_class = [times[grey] for grey in np.flatnonzero(times) if grey % 3 == kind]
        assert max(of_class) - min(of_class) <= 1


def test_each_class_is_rarer_than_the_one_before_by_the_factor(pictures: Path) -> None:
    """Of each four-cell image 2.5 cells on average are filled, class by class in shares 4/7, 2/7 and 1/7."""
    prevalence = load_dataset(spec(train=4000, falling=0.5), pictures).train.labels.mean(axis=0)
    expected = [np.mean([1 - (1 - share) ** cells for cells in (1, 2, 3, 4)]) for share in (4 / 7, 2 / 7, 1 / 7)]
    np.testing.assert_allclose(prevalence, expected, atol=0.03)


def test_the_same_seed_gives_the_same_images_and_another_gives_others(pictures: Path) -> None:
    first, again, other = (load_dataset(spec(seed=seed), pictures).test for seed in (0, 0, 1))
    assert np.array_equal(first.images, again.images)
    assert not np.array_equal(first.images, other.images)


def test_pictures_of_several_classes_are_refused(tmp_path: Path) -> None:
    images = np.zeros((6, 4, 4), np.uint8)
    labels = np.array([[1, 1, 0], [0, 1, 0], [0, 0, 1]] * 2)
    np.savez(tmp_path / "grey.npz", train_images=images, test_images=images, train_labels=labels, test_labels=labels)
    (fault,) = find_dataset_faults(spec(), tmp_path)
    assert (fault.where, "4 have none or several" in fault.problem) == ("data.path", True)
