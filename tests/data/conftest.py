"""Where the real data lies, and small sets made on the spot."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from pydantic import TypeAdapter

from polyclinic.data.base.image_set import DatasetSplits, ImageSet
from polyclinic.data.partition.spec import PartitionSpec

PROJECT = Path(__file__).resolve().parents[2]


def long(values: Iterable[Any]) -> list[Any]:
    """Return parameters for the long form of a test alone."""
    return [pytest.param(value, marks=pytest.mark.long) for value in values]


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real data, which is no part of the project."""
    folder = PROJECT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("needs the real data in ../shared/data")
    return folder


@pytest.fixture(scope="session")
def read_vectors() -> Callable[[str], dict[str, Any]]:
    """Read numbers computed with the authors' own code, by the name of their file."""
    folder = PROJECT.parent / "shared" / "vectors"
    if not folder.is_dir():
        pytest.skip("needs the vectors in ../shared/vectors")
    return lambda name: dict(json.loads((folder / f"{name}.json").read_text()))


def partition_spec(kind: str, **keys: Any) -> PartitionSpec:
    adapter: TypeAdapter[PartitionSpec] = TypeAdapter(PartitionSpec)
    return adapter.validate_python({"kind": kind, **keys})


def check_disjoint(hands: Iterable[Iterable[str]]) -> set[str]:
    """Check that no patient is in two hands, and return all patients."""
    sets = [set(hand) for hand in hands]
    everybody = set().union(*sets)
    assert sum(map(len, sets)) == len(everybody)
    return everybody


@pytest.fixture
def write_png(tmp_path: Path) -> Callable[[str], None]:
    """Write a small grey PNG under ``tmp_path``."""

    def write(name: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((6, 4), 200, dtype=np.uint8)).save(path, format="PNG")

    return write


def image_set(labels: NDArray[np.float32], patients: list[str], sources: list[str] | None = None) -> ImageSet:
    """Images of one grey with the labels and patients given; classes are called "a", "b", ..."""
    count, classes = labels.shape
    return ImageSet(
        stored=np.full((count, 2, 2), 90, dtype=np.uint8),
        labels=labels.astype(np.float32),
        class_names=tuple("abcdefghijklmnopqrstuvwxyz"[:classes]),
        patients=np.array(patients),
        sources=np.array(sources or [""] * count),
    )


def splits_of(patients: int, classes: int, seed: int = 0) -> DatasetSplits:
    """Train, validation and test sets of random labels, two images a patient."""
    random = np.random.default_rng(seed)

    def part(name: str, count: int) -> ImageSet:
        labels = (random.random((2 * count, classes)) < 0.4).astype(np.float32)
        names = [f"{name}{index // 2}" for index in range(2 * count)]
        return image_set(labels, names, [f"centre-{index // 2 % 3}" for index in range(2 * count)])

    return DatasetSplits(part("t", patients), part("v", max(1, patients // 3)), part("e", max(1, patients // 3)))


def one_class_each(classes: NDArray[np.intp], count: int, part: str = "t", each: int = 1) -> ImageSet:
    """Images of the classes given, of ``count`` in all; the first ``each`` are one patient's, and so on."""
    names = [f"{part}{index // each}" for index in range(len(classes))]
    return image_set(np.eye(count, dtype=np.float32)[classes], names)


def in_turn(images: int, classes: int, each: int = 1) -> NDArray[np.intp]:
    """Classes of images: all in turn, each for a run of ``each``."""
    return np.arange(images) // each % classes


def evenly(images: int, classes: int, part: str, each: int = 1) -> ImageSet:
    return one_class_each(in_turn(images, classes, each), classes, part, each)


def even_splits(each: int = 1) -> DatasetSplits:
    """Of each of five classes 120 training and 100 test patients with ``each`` images."""
    return DatasetSplits(evenly(600 * each, 5, "t", each), evenly(20, 5, "v"), evenly(500 * each, 5, "e", each))


Classes = Mapping[str, NDArray[np.intp]]


def mixture(classes: Classes, each: int = 1) -> DatasetSplits:
    """Tasks with their images' classes; one patient a run of ``each`` images; others' classes are unknown."""
    widths = [int(of_task.max()) + 1 for of_task in classes.values()]
    blocks, patients, sources = [], [], []
    for start, width, (task, of_task) in zip(np.cumsum([0, *widths]), widths, classes.items(), strict=False):
        block = np.full((len(of_task), sum(widths)), np.nan, dtype=np.float32)
        block[:, start : start + width] = np.eye(width)[of_task]
        blocks.append(block)
        patients += [f"{task}/{index // each}" for index in range(len(of_task))]
        sources += [task] * len(of_task)
    train = image_set(np.concatenate(blocks), patients, sources)
    nothing = train.select_rows(np.arange(0))
    return DatasetSplits(train, nothing, nothing)
