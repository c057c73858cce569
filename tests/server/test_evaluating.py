"""``flwr-sim evaluate`` and ``predict`` on somebody's own tables: what they read, say, write and refuse."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.metrics import average_precision_score, roc_auc_score

from common.data.base.spec import DigitsSpec
from common.data.load import load
from common.models.saved import load_model
from server.export.prediction import score_pictures
from studies.cli import main
from tests.server.commands import flwr_sim

Capture = pytest.CaptureFixture[str]
CLASSES = ("one", "three", "seven")
DIGIT = {"one": 1, "three": 3, "seven": 7}
EXPERIMENT = """
[run]
method = "surgical"
rounds = 2
[model]
architecture = "tiny_cnn"
channels = 1
image_size = 16
[training]
batch_size = 32
lr = 0.01
[data]
kind = "folder"
images = "pictures"
labels = "labels.csv"
image_column = "picture"
finding_column = "shows"
separator = "|"
classes = ["one", "three", "seven"]
patient_column = "person"
image_size = 16
[partition]
kind = "class_subsets"
sites = 2
shared = 1
[simulation]
backend = "inline"
"""
TEST = load(DigitsSpec(kind="digits"), Path()).test
DIGITS_SHOWN = TEST.labels.argmax(1)


def table(folder: Path, header: str, rows: Sequence[int], cells: str, name: str = "labels.csv") -> Path:
    """A csv beside pictures of digits; ``{row}``, ``{shows}`` and 0 or 1 in ``{one}``, ``{three}``, ``{seven}``."""
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    lines = [header]
    for row in rows:
        Image.fromarray(TEST.images[row]).resize((16, 16)).save(folder / "pictures" / f"{row}.png")
        flags = {name: int(DIGITS_SHOWN[row] == digit) for name, digit in DIGIT.items()}
        shows = "|".join(name for name, flag in flags.items() if flag)
        lines.append(cells.format(row=row, shows=shows, person=row // 2, **flags))
    (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder / name


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose experiment has its own names of columns."""
    folder = tmp_path_factory.mktemp("own")
    table(folder, "picture,shows,person", range(240), "{row}.png,{shows},p{person}")
    (folder / "own.toml").write_text(EXPERIMENT, encoding="utf-8")
    return run_of(folder / "own.toml")


def run_of(experiment: Path) -> Path:
    with pytest.raises(SystemExit, match="0"):
        main(["run", str(experiment), "--out", str(experiment.parent / "run")])
    return experiment.parent / "run"


def evaluated(capsys: Capture, run: Path, path: Path, *options: object) -> dict:  # type: ignore[type-arg]
    pictures = ("--images", path.parent / "pictures")
    ended = flwr_sim(capsys, "evaluate", run, path, *pictures, "--json", *options)
    assert ended.code == 0, ended.err
    return json.loads(ended.out)  # type: ignore[no-any-return]


def test_the_runs_own_column_names_are_known(run: Path, capsys: Capture, tmp_path: Path) -> None:
    rows = range(240, 340)
    path = table(tmp_path, "picture,shows,person", rows, "{row}.png,{shows},p{person}", "others.csv")
    found = evaluated(capsys, run, path)
    assert (found["images"], found["patients"], found["intervals_over"]) == (100, 50, "patients")
    assert found["data"] == "all of others.csv"
    network = load_model(run)
    resized = np.stack([np.asarray(Image.fromarray(TEST.images[row]).resize((16, 16))) for row in rows])
    scores = score_pictures(network, resized)
    for column, name in enumerate(network.class_names):
        labels, ours = DIGITS_SHOWN[list(rows)] == DIGIT[name], found["classes"][name]
        assert ours["auroc"] == pytest.approx(roc_auc_score(labels, scores[:, column]))
        assert ours["average_precision"] == pytest.approx(average_precision_score(labels, scores[:, column]))
        assert ours["sensitivity"] == pytest.approx(np.mean(scores[labels, column] > 0.5))
        assert ours["specificity"] == pytest.approx(np.mean(scores[~labels, column] <= 0.5))
        low, high = ours["auroc_interval"]
        assert low <= ours["auroc"] <= high
        assert high - low > 0 or ours["auroc"] == 1.0


def test_the_runs_own_table_is_scored_on_its_test_part_only(run: Path, capsys: Capture) -> None:
    ended = flwr_sim(capsys, "evaluate", run, run.parent / "labels.csv", "--json")
    found = json.loads(ended.out)
    test = json.loads((run / "summary.json").read_text(encoding="utf-8"))["test"]
    assert found["data"] == "the test part of labels.csv, as the run split it"
    assert {n: one["auroc"] for n, one in found["classes"].items()} == {
        n: pytest.approx(one["auroc"]) for n, one in test["per_class"].items()
    }


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--image-column", "pictur", '"pictur" is not a column'),
        ("--patient-column", "nobody", '"nobody" is not a column'),
        ("--classes", "one,tree", "names the label columns of an npz file"),
        ("--image-column", "person", 'is person; this is the run\'s own table, which the run read by "picture"'),
        ("--patient-column", "picture", 'is picture; this is the run\'s own table, which the run read by "person"'),
    ],
)
def test_unknown_and_other_columns_are_refused_on_the_runs_own_table_too(
    run: Path, capsys: Capture, option: str, value: str, said: str
) -> None:
    ended = flwr_sim(capsys, "evaluate", run, run.parent / "labels.csv", option, value)
    assert ended.code == 2, ended.out
    assert said in ended.err


def test_columns_are_found_by_name_by_option_and_by_what_they_hold(run: Path, capsys: Capture, tmp_path: Path) -> None:
    rows = range(240, 300)
    found = table(tmp_path / "a", "file,one,three,Patient ID", rows, "{row}.png,{one},{three},p{person}")
    named = table(tmp_path / "b", "one,three,a,b", rows, "{one},{three},{row}.png,p{person}")
    first = evaluated(capsys, run, found)
    second = evaluated(capsys, run, named, "--image-column", "a", "--patient-column", "b")
    unknown = evaluated(capsys, run, named)
    assert first["classes"] == second["classes"]
    assert (first["patients"], second["patients"], unknown["patients"]) == (30, 30, None)
    assert set(first["classes"]) == {"one", "three"}
    assert unknown["classes"]["one"]["auroc"] == first["classes"]["one"]["auroc"]


def test_a_column_that_is_not_there_is_named_with_those_that_are(run: Path, capsys: Capture, tmp_path: Path) -> None:
    path = table(tmp_path, "file,one", range(240, 250), "{row}.png,{one}")
    ended = flwr_sim(capsys, "evaluate", run, path, "--image-column", "fiel")
    assert ended.code == 2
    assert '"fiel" is not a column' in ended.err
    assert 'Did you mean "file"?' in ended.err
    other = table(tmp_path / "b", "file,nine", range(240, 250), "{row}.png,{one}")
    ended = flwr_sim(capsys, "evaluate", run, other, "--images", tmp_path / "b" / "pictures")
    assert ended.code == 2
    assert 'or the run\'s own column "shows"' in " ".join(ended.err.split())


def test_what_the_figures_do_not_show_is_said(run: Path, capsys: Capture, tmp_path: Path) -> None:
    rows = [row for row in range(240, 340) if DIGITS_SHOWN[row] != 7]
    path = table(tmp_path, "file,one,seven", rows, "{row}.png,{one},{seven}")
    ended = flwr_sim(capsys, "evaluate", run, path, "--images", tmp_path / "pictures")
    said = " ".join(ended.out.split())
    positives = sum(DIGITS_SHOWN[rows] == 1)
    assert ended.code == 0
    assert "“seven” was not tested: no positive test image." in said
    assert f"The figures for “one” rest on {positives} positive images." in said
    assert "does not say which images belong to one patient" in said
    assert f"over 1 of 2 classes on {len(rows)} images (all of labels.csv)" in said


def test_figures_are_written_as_csv_and_nothing_is_written_over(run: Path, capsys: Capture, tmp_path: Path) -> None:
    path = table(tmp_path, "file,one,three", range(240, 340), "{row}.png,{one},{three}")
    out = tmp_path / "figures.csv"
    found = evaluated(capsys, run, path, "--out", out)
    rows = {row["class"]: row for row in csv.DictReader(out.read_text(encoding="utf-8").splitlines())}
    assert set(rows) == {"one", "three"}
    for name, row in rows.items():
        assert float(row["auroc"]) == pytest.approx(found["classes"][name]["auroc"], abs=1e-6)
        ends = [float(row["auroc_low"]), float(row["auroc_high"])]
        assert ends == pytest.approx(found["classes"][name]["auroc_interval"], abs=1e-6)
    ended = flwr_sim(capsys, "evaluate", run, path, "--images", tmp_path / "pictures", "--out", out)
    assert (ended.code, "nothing is written over" in ended.err) == (2, True)


def test_a_few_images_are_enough(run: Path, capsys: Capture, tmp_path: Path) -> None:
    rows = [next(r for r in range(240, 300) if (DIGITS_SHOWN[r] == 1) == shown) for shown in (True, False)]
    path = table(tmp_path, "file,one,patient", rows, "{row}.png,{one},p{person}")
    assert evaluated(capsys, run, path)["images"] == 2


def test_predict_on_what_holds_no_image_is_a_fault_and_leaves_no_file(
    run: Path, capsys: Capture, tmp_path: Path
) -> None:
    out = tmp_path / "p.csv"
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "a.png").write_bytes(b"no picture")
    for wrong in (run.parent / "labels.csv", tmp_path / "broken", tmp_path / "broken" / "a.png"):
        ended = flwr_sim(capsys, "predict", run, wrong, "--out", out)
        assert (ended.code, out.exists()) == (2, False)
        assert "Traceback" not in ended.err
        assert "holds no image that can be read" in ended.err


# ---------------------------------------------------------------------- npz files

ARRAYS = """
[run]
method = "surgical"
rounds = 1
[model]
architecture = "tiny_cnn"
image_size = 16
[data]
kind = "npz"
path = "digits.npz"
classes = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
keep = ["one", "three"]
patient_key = "person"
image_size = 16
[partition]
kind = "class_subsets"
shared = 1
sites = 2
[simulation]
backend = "inline"
"""
PEOPLE = np.arange(len(DIGITS_SHOWN)) // 2


def npz(path: Path, **parts: range) -> Path:
    arrays: dict[str, Any] = {}
    for name, rows in parts.items():
        found = list(rows)
        arrays |= {f"{name}_images": TEST.images[found, ..., 0] if TEST.images.ndim == 4 else TEST.images[found]}
        arrays |= {f"{name}_labels": DIGITS_SHOWN[found].astype(np.uint8), f"{name}_person": PEOPLE[found].astype(str)}
    np.savez(path, **arrays)
    return path


@pytest.fixture(scope="module")
def run_on_arrays(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("arrays")
    npz(folder / "digits.npz", train=range(160), val=range(160, 200), test=range(200, 320))
    (folder / "arrays.toml").write_text(ARRAYS, encoding="utf-8")
    return run_of(folder / "arrays.toml")


def test_an_npz_file_is_read_as_the_run_read_its_own(run_on_arrays: Path, capsys: Capture) -> None:
    found = json.loads(flwr_sim(capsys, "evaluate", run_on_arrays, run_on_arrays.parent / "digits.npz", "--json").out)
    test = json.loads((run_on_arrays / "summary.json").read_text(encoding="utf-8"))["test"]
    assert {n: one["auroc"] for n, one in found["classes"].items()} == {
        n: pytest.approx(one["auroc"]) for n, one in test["per_class"].items()
    }
    shown = np.isin(DIGITS_SHOWN[200:320], (1, 3))
    assert found["images"] == shown.sum()
    assert found["patients"] == len(set(PEOPLE[200:320][shown]))


def test_an_npz_file_needs_no_other_part_than_the_one_that_is_scored(
    run_on_arrays: Path, capsys: Capture, tmp_path: Path
) -> None:
    whole = flwr_sim(capsys, "evaluate", run_on_arrays, run_on_arrays.parent / "digits.npz", "--json")
    alone = npz(tmp_path / "digits.npz", test=range(200, 320))
    assert json.loads(flwr_sim(capsys, "evaluate", run_on_arrays, alone, "--json").out) == json.loads(whole.out)


@pytest.mark.parametrize(
    ("data", "option", "value", "fault"),
    [
        ("digits.npz", "--patient-column", "persn", 'digits.npz has no array "test_persn"; its arrays are'),
        ("digits.npz", "--patient-column", "persn", 'Did you mean "test_person"?'),
        ("digits.npz", "--image-column", "file", "--image-column: says how to read a csv, and digits.npz is none."),
        ("digits.npz", "--images", ".", "--images: says how to read a csv, and digits.npz is none."),
        ("arrays.toml", "--classes", "one", "--classes: arrays.toml is an experiment, whose [data] says how to read"),
    ],
)
def test_an_option_that_does_not_fit_the_kind_of_file_is_refused(
    run_on_arrays: Path, capsys: Capture, data: str, option: str, value: str, fault: str
) -> None:
    ended = flwr_sim(capsys, "evaluate", run_on_arrays, run_on_arrays.parent / data, option, value)
    assert ended.code == 2
    assert fault in " ".join(ended.err.split())


def test_a_fault_of_an_npz_file_names_the_file_and_the_options_of_the_call(
    run: Path, run_on_arrays: Path, capsys: Capture, tmp_path: Path
) -> None:
    path = npz(tmp_path / "other.npz", test=range(200, 320))
    ended = flwr_sim(capsys, "evaluate", run, path)
    assert ended.code == 2
    assert ended.err.startswith("error --classes: the file names no classes, and its labels are of 10 classes.")
    empty = npz(tmp_path / "empty.npz", val=range(5))
    ended = flwr_sim(capsys, "evaluate", run_on_arrays, empty)
    assert ended.code == 2
    assert ended.err.startswith(f'error {empty}: empty.npz has no array "test_images"')
