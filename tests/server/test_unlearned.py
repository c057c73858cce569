"""A class that a run's model has not learned has no column of noise among its predictions, and is named."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import safetensors
from PIL import Image
from sklearn.datasets import load_digits

import polyclinic as pc
from polyclinic.common.models.saved import read_model_description
from polyclinic.server.runs.schema import RoundFileLine
from polyclinic.server.runs.unlearned import (
    NO_POSITIVE_REASON,
    NOT_TRAINED_REASON,
    STAYED_MASKED_REASON,
    describe_classes_of_unknown_learning,
    find_classes_of_unknown_learning,
    find_unlearned_classes,
    read_unlearned_classes,
    select_rounds_of_model,
)
from tests.federations import INLINE_RUN
from tests.network.real import flwr_sim, summary_of

EXPERIMENT = f"""{INLINE_RUN}[data]
kind = "npz"
path = "digits.npz"
classes = ["large", "odd", "ghost"]
[partition]
kind = "class_lists"
[partition.lists]
east = ["large", "ghost"]
north = ["large", "odd"]
"""
SENTENCE = f"Left out, because the model has not learned them: ghost ({NO_POSITIVE_REASON})."
ROUNDS = (
    RoundFileLine(round=1, sites=("north",), absent={"east": "late"}, closed_rows=("rare",)),
    RoundFileLine(round=2, sites=("north", "east"), closed_rows=("rare", "mass")),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which no training image shows one of the classes; test images do."""
    folder = tmp_path_factory.mktemp("unlearned")
    digits, arrays, begin = load_digits(), {}, 0
    for part, end in {"train": 300, "val": 360, "test": 420}.items():
        target = digits.target[begin:end]
        ghost = (target == 3) if part == "test" else np.zeros(len(target), bool)
        arrays[f"{part}_images"] = np.kron(15 * digits.images[begin:end], np.ones((2, 2))).astype(np.uint8)
        arrays[f"{part}_labels"] = np.stack([target > 4, target % 2, ghost], axis=1).astype(np.uint8)
        begin = end
    np.savez(folder / "digits.npz", **arrays)
    Image.fromarray(arrays["test_images"][0]).save(folder / "picture.png")
    (folder / "experiment.toml").write_text(EXPERIMENT, encoding="utf-8")
    ended = flwr_sim("run", folder / "experiment.toml", "--out", folder / "run")
    assert ended.code == 0, ended.err
    return folder / "run"


def test_a_class_that_no_training_image_shows_is_named_by_the_run_and_carried_by_its_model(run: Path) -> None:
    assert summary_of(run)["unlearned"] == {"ghost": NO_POSITIVE_REASON}
    caution = "“ghost” was not learned: no training image of the run shows it."
    assert caution in summary_of(run)["claims"]["cautions"]
    assert read_model_description(run).unlearned == {"ghost": NO_POSITIVE_REASON}
    with safetensors.safe_open(run / "model.safetensors", "numpy") as file:
        about = json.loads(file.metadata()["polyclinic"])
        assert about["unlearned"] == ["ghost"]


def test_its_predictions_have_no_column_for_it_and_say_so(run: Path, tmp_path: Path) -> None:
    ended = flwr_sim("predict", run, run.parent / "picture.png", "--out", tmp_path / "predicted.csv")
    assert ended.code == 0, ended.err
    assert SENTENCE in ended.out
    with (tmp_path / "predicted.csv").open(encoding="utf-8", newline="") as file:
        header, row = csv.reader(file)
    assert header == ["image", "large", "odd", "unreadable"]
    with pytest.warns(pc.UnlearnedClassWarning, match="ghost"):
        table = pc.load(run).predict(run.parent / "picture.png")
    assert list(table.columns) == ["large", "odd"]
    assert [float(value) for value in row[1:3]] == pytest.approx(table.iloc[0].tolist(), abs=1e-6)


def test_a_model_of_an_earlier_release_is_judged_by_the_files_of_its_run(run: Path, tmp_path: Path) -> None:
    description = json.loads((run / "model.json").read_text(encoding="utf-8"))
    del description["unlearned"]
    (tmp_path / "model.json").write_text(json.dumps(description), encoding="utf-8")
    assert read_unlearned_classes(tmp_path) == {}  # the model alone does not say it
    for name in ("summary.json", "rounds.jsonl"):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    assert read_unlearned_classes(tmp_path) == {"ghost": NO_POSITIVE_REASON}


def test_a_row_that_was_not_learned_is_no_warm_start(run: Path, tmp_path: Path) -> None:
    ended = flwr_sim("run", run.parent / "experiment.toml", "--out", tmp_path / "next", "--set", f"model.weights={run}")
    assert ended.code == 0, ended.err
    assert summary_of(tmp_path / "next")["start"] == [f"2 of 3 rows of the head come from {run}; new: ghost"]
    assert f"2 of 3 rows of the head come from {run}; new: ghost." in " ".join(ended.out.split())


def test_a_class_is_unlearned_if_its_sites_were_absent_its_row_stayed_masked_or_nobody_has_a_positive() -> None:
    shown = {
        "edema": {"east": True},
        "mass": {"east": None, "north": False},
        "rare": {"north": True},
        "none": {"north": False},
    }
    of_first = select_rounds_of_model(ROUNDS, 1)
    assert find_unlearned_classes(list(shown), shown, of_first) == {
        "edema": NOT_TRAINED_REASON,
        "rare": STAYED_MASKED_REASON,
        "none": NO_POSITIVE_REASON,
    }
    reasons = {"rare": STAYED_MASKED_REASON, "none": NO_POSITIVE_REASON}
    assert find_unlearned_classes(list(shown), shown, ROUNDS) == reasons
    assert find_unlearned_classes(list(shown), shown, ROUNDS, warm=["rare"], has_own_images=True) == {}
    assert find_unlearned_classes(list(shown), shown, ()) == {}  # all figures are of the initial model then


def test_where_no_site_tells_that_an_image_shows_a_class_nobody_knows_whether_it_was_learned() -> None:
    shown = {
        "mass": {"east": None, "north": False},
        "edema": {"east": None, "north": True},
        "none": {"north": False},
        "rare": {"north": None},
    }
    unlearned = find_unlearned_classes(list(shown), shown, ROUNDS)
    assert unlearned == {"rare": STAYED_MASKED_REASON, "none": NO_POSITIVE_REASON}
    assert find_classes_of_unknown_learning(shown, unlearned, ROUNDS) == ["mass"]
    assert find_classes_of_unknown_learning(shown, unlearned, ROUNDS, warm=["mass"]) == []
    assert find_classes_of_unknown_learning(shown, unlearned, ROUNDS, has_own_images=True) == []
    assert find_classes_of_unknown_learning(shown, unlearned, ()) == []
    assert describe_classes_of_unknown_learning(["mass"]).startswith("Not known whether the model has learned mass: ")
