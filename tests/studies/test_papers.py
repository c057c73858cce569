"""Every experiment file after a paper has the paper's settings, or its study says where it departs from them."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from polyclinic.studies.study_file import PaperDeparture, PaperSetting, StudyFile, read_study
from supply.paper_settings import EXPERIMENTS, STUDIES, find_study_files, list_study_runs, read_defaults
from tests.studies.paper_settings import (
    faults_of_defaults,
    faults_of_files,
    faults_of_lists,
    keys_left,
    with_defaults,
)

ROOT = EXPERIMENTS.parent
PAGE = ROOT / "docs" / "papers.md"
FEDSLD = EXPERIMENTS / "papers" / "fedsld"


@pytest.mark.parametrize("folder", STUDIES, ids=lambda folder: folder.name)
def test_every_key_of_every_file_and_every_default_is_the_papers_or_a_listed_departure(folder: Path) -> None:
    study, files, defaults = read_study(folder, quick=False), find_study_files(folder), read_defaults()
    assert len(files) > 10
    assert faults_of_files(with_defaults(study, defaults), files) == []
    assert faults_of_lists(with_defaults(study, defaults), files) == []
    assert faults_of_defaults(study, files, defaults) == []
    assert [each.key for each in defaults.departures if each.key not in "\n".join(study.differs)] == []


def test_every_idle_key_is_left_at_its_default_by_some_file() -> None:
    """The lists of defaults have no key that is gone, and none that all files set."""
    studies = ((read_study(folder, quick=False), find_study_files(folder)) for folder in STUDIES)
    left = {key for study, files in studies for _, key, _ in keys_left(study, files)}
    assert set(read_defaults().idle) - left == set()


def test_the_short_study_of_the_sweeps_is_a_part_of_the_papers() -> None:
    whole, short = EXPERIMENTS / "papers" / "surgical", EXPERIMENTS / "surgical" / "sweeps"
    runs = {(trial.experiment, trial.overrides) for trial in list_study_runs(whole)}
    assert {(trial.experiment, trial.overrides) for trial in list_study_runs(short)} < runs


def fedsld(tmp_path: Path, old: str = "", new: str = "") -> dict[str, Path]:
    """FedSLD's first file with another line in the place of one, under its own name."""
    name = "fedsld/mnist_practical"
    original = (EXPERIMENTS / f"{name}.toml").read_text(encoding="utf-8")
    assert old in original
    (tmp_path / "mnist_practical.toml").write_text(original.replace(old, new), encoding="utf-8")
    return {name: tmp_path / "mnist_practical.toml"}


def with_parts(settings: tuple[PaperSetting, ...] = (), departures: tuple[PaperDeparture, ...] = ()) -> StudyFile:
    study = read_study(FEDSLD, quick=False)
    both = {"settings": (*study.settings, *settings), "departures": (*study.departures, *departures)}
    return study.model_copy(update=both)


SGD = 'optimizer = "sgd"'


@pytest.mark.parametrize(
    ("old", "new", "faults"),
    [
        (SGD, SGD, []),
        ("epochs = 5", "epochs = 3", ["training.epochs is 3, not 5, and no departure says so"]),
        ("reset_optimizer = true", "", ["training.reset_optimizer is False, not True, and no departure says so"]),
        (SGD, f"{SGD}\nmomentum = 0.5", ["training.momentum is 0.5, not 0.9, and no departure says so"]),
        (SGD, f"{SGD}\nweight_decay = 0.1", ["training.weight_decay is compared with nothing"]),
    ],
)
def test_a_changed_file_is_found(old: str, new: str, faults: list[str], tmp_path: Path) -> None:
    files = fedsld(tmp_path, old, new)
    assert faults_of_files(with_parts(), files) == [f"fedsld/mnist_practical: {each}" for each in faults]


def test_a_default_that_no_list_has_or_that_has_changed_is_found(tmp_path: Path) -> None:
    files, defaults = fedsld(tmp_path), read_defaults()
    idle = {key: value for key, value in defaults.idle.items() if key != "training.schedule"}
    changed = replace(defaults, settings=(), idle={**idle, "training.loss": "focal"})
    assert faults_of_defaults(with_parts(), files, changed) == [
        "fedsld/mnist_practical: participation.clip is 3.0 by default, and no list has it",
        "fedsld/mnist_practical: training.loss is plain by default, not focal",
        "fedsld/mnist_practical: training.schedule is constant by default, and no list has it",
    ]


def test_wrong_entries_of_a_study_are_found(tmp_path: Path) -> None:
    same = PaperDeparture(key="training.epochs", ours=5, why="it is the paper's", files=("*/mnist_practical",))
    assert faults_of_files(with_parts(departures=(same,)), fedsld(tmp_path)) == [
        "fedsld/mnist_practical: training.epochs is 5 as in the paper, and a departure says that it is not"
    ]
    nowhere = PaperSetting(key="training.precision", paper="float32", files=("*/imagenet",))
    alone = PaperDeparture(key="training.threads", ours=1, why="one core", files=("*",))
    hidden = PaperSetting(key="training.gradient_accumulation_steps", paper=4, value=1)
    assert faults_of_lists(with_parts((nowhere, hidden), (alone,)), find_study_files(FEDSLD)) == [
        "training.precision: ['*/imagenet'] is no file",
        "training.threads: a departure from no setting",
        "training.gradient_accumulation_steps: value hides the paper's 4",
    ]


def test_the_decisions_that_the_code_names_are_on_the_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    anchors = set(re.findall(r'<a id="([\w-]+)">', page))
    headings = re.findall(r"^#+ (Decisions: .+)$", page, re.MULTILINE)
    anchors |= {heading.lower().replace(":", "").replace(" ", "-") for heading in headings}
    folders = ("client", "common", "data", "polyclinic", "server", "strategies", "studies")
    code = [path.read_text(encoding="utf-8") for folder in folders for path in (ROOT / folder).rglob("*.py")]
    named = {anchor for text in code for anchor in re.findall(r"papers\.md#([\w-]+)", text)}
    assert len(named) > 10
    assert named - anchors == set()
