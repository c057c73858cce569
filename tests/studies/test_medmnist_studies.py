"""Studies of FedSLD and UniFed on their papers' MedMNIST sets, on stand-ins of the same form."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from polyclinic.common.config import ExperimentFile, read_experiment
from polyclinic.common.simulation import load_simulated_data
from polyclinic.studies.study import list_study_trials
from polyclinic.studies.study_file import read_study
from tests.studies.published_runs import ROOT

NAMED = "../../../datasets/medmnist"
CLASSES = {"organamnist": 11, "pathmnist": 9, "octmnist": 4, "tissuemnist": 8}
IMAGES_A_CLASS = 120


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with files of MedMNIST's form, of one grey."""
    folder = tmp_path_factory.mktemp("medmnist")
    for name, classes in CLASSES.items():
        labels = np.repeat(np.arange(classes, dtype=np.uint8), IMAGES_A_CLASS)[:, None]
        color = (3,) if name == "pathmnist" else ()
        images = np.full((len(labels), 28, 28, *color), 90, np.uint8)
        parts = ("train", "val", "test")
        arrays = {f"{part}_images": images for part in parts} | {f"{part}_labels": labels for part in parts}
        np.savez_compressed(folder / f"{name}.npz", allow_pickle=False, **arrays)
    return folder


def files_of(method: str, folder: Path) -> Iterator[ExperimentFile]:
    """Every setting of a study with its first method, whose files are those of the folder."""
    path = ROOT / "experiments" / method / "medmnist"
    for grid in list_study_trials(read_study(path, quick=False), path, path, (), range(1)):
        for column in grid[0]:
            overrides = [text.replace(NAMED, str(folder)) for text in column[0].overrides]
            assert overrides != list(column[0].overrides)
            yield read_experiment(column[0].experiment, overrides)


def test_fedslds_settings_divide_both_sets_over_twelve_hospitals(folder: Path) -> None:
    classes = list[int]()
    for file in files_of("fedsld", folder):
        data = load_simulated_data(file.experiment, file.base_folder)
        assert len(data.parts) == 12
        classes.append(len(data.splits.class_names))
    assert sorted(classes) == [9, 9, 11, 11]


def test_unifeds_settings_have_eight_hospitals_of_each_of_three_sets_and_23_classes(folder: Path) -> None:
    files = list(files_of("unifed", folder))
    assert len(files) == 6
    for file in files:
        data = load_simulated_data(file.experiment, file.base_folder)
        assert (len(data.parts), len(data.splits.class_names)) == (24, 23)
        assert {len(part.class_names) for part in data.parts} == {4, 8, 11}
