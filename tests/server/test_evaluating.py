"""``flwr-sim evaluate`` and ``predict`` on somebody's own tables: what they read, say, write and refuse."""

import csv
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from PIL import Image
from sklearn.metrics import average_precision_score, roc_auc_score

from polyclinic.common.models.saved import load_model
from polyclinic.common.models.scoring import compute_picture_probabilities
from polyclinic.common.patients.parts import PatientPartMemory
from polyclinic.data.base.image_set import PARTS, DatasetSplits
from polyclinic.data.base.spec import DigitsDatasetSpec
from polyclinic.data.base.splits import divide_splits_again
from polyclinic.data.load import load_dataset
from polyclinic.server.export.preflight import read_labelled_dataset
from tests.network.real import flwr_sim

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
[partition]
kind = "class_subsets"
sites = 2
shared = 1
[simulation]
backend = "inline"
[data]
image_size = 16
"""
OWN_TABLE = """
kind = "folder"
images = "pictures"
labels = "labels.csv"
image_column = "picture"
finding_column = "shows"
separator = "|"
classes = ["one", "three", "seven"]
patient_column = "person"
"""
OWN_ARRAYS = """
kind = "npz"
path = "digits.npz"
classes = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
keep = ["one", "three"]
patient_key = "person"
"""
TEST = load_dataset(DigitsDatasetSpec(kind="digits"), Path()).test
DIGITS_SHOWN = TEST.labels.argmax(1)


def table(folder: Path, header: str, rows: Sequence[int], cells: str, name: str = "labels.csv") -> Path:
    """A csv beside pictures of digits; ``{row}``, ``{shows}`` and 0 or 1 in ``{one}``, ``{three}``, ``{seven}``."""
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    lines = [header]
    for row in rows:
        Image.fromarray(TEST.images[row]).resize((16, 16)).save(folder / "pictures" / f"{row}.png")
        flags = {name: int(DIGITS_SHOWN[row] == digit) for name, digit in DIGIT.items()}
        shows = "|".join(name for name, flag in flags.items() if flag) or "No Finding"
        lines.append(cells.format(row=row, shows=shows, person=row // 2, **flags))
    (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder / name


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose experiment has its own names of columns."""
    folder = tmp_path_factory.mktemp("own")
    table(folder, "picture,shows,person", range(240), "{row}.png,{shows},p{person}")
    return run_of(folder / "own.toml", OWN_TABLE)


def run_of(experiment: Path, data: str) -> Path:
    experiment.write_text(EXPERIMENT + data, encoding="utf-8")
    with patch("polyclinic.server.federation.set_up.write_run_pages"):
        ended = flwr_sim("run", experiment, "--out", experiment.parent / "run")
    assert ended.code == 0, ended.err
    return experiment.parent / "run"


def evaluated(run: Path, path: Path, *options: object) -> dict[str, Any]:
    """Evaluate a run on a table whose pictures lie beside it, or on an npz file; return the figures."""
    pictures = ("--images", path.parent / "pictures") if (path.parent / "pictures").is_dir() else ()
    ended = flwr_sim("evaluate", run, path, *pictures, "--json", *options)
    assert ended.code == 0, ended.err
    figures: dict[str, Any] = json.loads(ended.out)
    return figures


def figures_of_run(run: Path) -> dict[str, Any]:
    figures: dict[str, Any] = json.loads((run / "summary.json").read_text(encoding="utf-8"))["test"]
    return figures


def aurocs(classes: dict[str, Any]) -> dict[str, float]:
    return {name: figures["auroc"] for name, figures in classes.items()}


def test_the_runs_own_column_names_are_known(run: Path, tmp_path: Path) -> None:
    rows = range(240, 340)
    path = table(tmp_path, "picture,shows,person", rows, "{row}.png,{shows},p{person}", "others.csv")
    figures = evaluated(run, path)
    assert (figures["images"], figures["patients"], figures["intervals_over"]) == (100, 50, "patients")
    assert figures["data"] == "all of others.csv"
    network = load_model(run)
    resized = np.stack([np.asarray(Image.fromarray(TEST.images[row]).resize((16, 16))) for row in rows])
    scores = compute_picture_probabilities(network, resized)
    for column, name in enumerate(network.class_names):
        labels, ours = DIGITS_SHOWN[list(rows)] == DIGIT[name], figures["classes"][name]
        assert ours["auroc"] == pytest.approx(roc_auc_score(labels, scores[:, column]))
        assert ours["average_precision"] == pytest.approx(average_precision_score(labels, scores[:, column]))
        assert ours["sensitivity"] == pytest.approx(np.mean(scores[labels, column] > 0.5))
        assert ours["specificity"] == pytest.approx(np.mean(scores[~labels, column] <= 0.5))
        low, high = ours["auroc_interval"]
        assert low <= ours["auroc"] <= high
        assert high - low > 0 or ours["auroc"] == 1.0


def test_of_a_whole_table_the_first_line_says_that_the_model_may_have_been_trained_on_it(
    run: Path, tmp_path: Path
) -> None:
    path = table(tmp_path, "picture,shows,person", range(240, 280), "{row}.png,{shows},p{person}", "others.csv")
    assert evaluated(run, path)["may_be_trained_on"] is True
    ended = flwr_sim("evaluate", run, path, "--images", tmp_path / "pictures")
    assert ended.out.startswith("! These images may contain images that the model was trained on")
    own = flwr_sim("evaluate", run, run.parent / "labels.csv", "--images", run.parent / "pictures")
    assert "may contain images" not in own.out


@pytest.fixture(scope="module")
def run_with_words(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model alone, as a hospital receives it, with the study's vocabulary."""
    folder = tmp_path_factory.mktemp("delivered")
    shutil.copy(run / "model.safetensors", folder)
    description = json.loads((run / "model.json").read_text(encoding="utf-8"))
    description["vocabulary"] = {
        name: {"synonyms": [word], "definition": ""} for name, word in {"one": "eins", "three": "drei"}.items()
    }
    (folder / "model.json").write_text(json.dumps(description), encoding="utf-8")
    return folder


def test_words_of_the_models_vocabulary_are_columns_of_its_classes(
    run: Path, run_with_words: Path, tmp_path: Path
) -> None:
    rows = range(240, 340)
    study = table(tmp_path / "a", "file,one,three", rows, "{row}.png,{one},{three}")
    german = table(tmp_path / "b", "file,eins,drei", rows, "{row}.png,{one},{three}")
    assert evaluated(run_with_words, german)["classes"] == evaluated(run_with_words, study)["classes"]
    check_refused(run, german, (), 'expected at least one of "one"')


SITE_TOML = """
name = "south"
[data]
kind = "folder"
images = "pictures"
labels = "labels.csv"
image_column = "Datei"
patient_column = "Fall"
label_columns = ["eins", "Drei", "other"]
present = ["ja"]
absent = ["nein"]
image_size = 16
annotates = ["eins", "Drei"]
{more}
[data.synonyms]
"Drei" = "three"
[policy]
level = "trusted"
"""


def write_site_table(folder: Path) -> None:
    """A hospital's table with German words in its cells."""
    path = table(folder, "Datei,Fall,eins,Drei,other", range(240, 340), "{row}.png,p{person},{one},{three},{seven}")
    head, *lines = path.read_text(encoding="utf-8").splitlines()
    cells = {"0": "nein", "1": "ja"}
    own = [",".join([*line.split(",")[:2], *(cells[cell] for cell in line.split(",")[2:])]) for line in lines]
    path.write_text("\n".join([head, *own]) + "\n", encoding="utf-8")


def test_a_hospitals_site_toml_is_scored_on_its_own_test_part_as_its_program_has_it(
    run_with_words: Path, tmp_path: Path
) -> None:
    write_site_table(tmp_path)
    (tmp_path / "site.toml").write_text(SITE_TOML.format(more=""), encoding="utf-8")
    splits = load_dataset(read_labelled_dataset(tmp_path / "site.toml").spec, tmp_path)
    figures = evaluated_site(run_with_words, tmp_path)
    assert figures["data"] == "the test part of site.toml's data"
    assert figures["may_be_trained_on"] is False
    assert figures["images"] == len(splits.test)
    assert set(figures["classes"]) == {"one", "three"}
    shown = splits.test.labels[:, splits.class_names.index("Drei")]
    assert figures["classes"]["three"]["positives"] == int((shown == 1).sum())
    # The parts that the site remembers count, and who opted out does not.
    PatientPartMemory(tmp_path / "state").keep_known_parts(swap_parts(splits), store=True)
    assert evaluated_site(run_with_words, tmp_path)["images"] == len(splits.train)
    gone = splits.train.patients[0]
    (tmp_path / "site.toml").write_text(SITE_TOML.format(more=f'opt_out = ["{gone}"]'), encoding="utf-8")
    assert evaluated_site(run_with_words, tmp_path)["images"] == int((splits.train.patients != gone).sum())


@pytest.mark.parametrize("other", ["three", "drei"], ids=["by its synonyms", "by the model's vocabulary"])
def test_two_columns_of_a_hospital_that_mean_one_class_are_scored_as_one(
    other: str, run_with_words: Path, tmp_path: Path
) -> None:
    write_site_table(tmp_path)
    text = SITE_TOML.format(more="").replace(
        'annotates = ["eins", "Drei"]', f'annotates = ["eins", "three", "{other}"]'
    )
    text = text.replace('"Drei" = "three"', f'"Drei" = "three"\n"other" = "{other}"')
    (tmp_path / "site.toml").write_text(text, encoding="utf-8")
    splits = load_dataset(read_labelled_dataset(tmp_path / "site.toml").spec, tmp_path)
    PatientPartMemory(tmp_path / "state").keep_known_parts(swap_parts(splits), store=True)
    columns = [splits.train.labels[:, splits.class_names.index(name)] for name in ("Drei", "other")]
    figures = evaluated_site(run_with_words, tmp_path)
    assert set(figures["classes"]) == {"one", "three"}
    assert (
        figures["classes"]["three"]["positives"] == int((np.fmax(*columns) == 1).sum()) > int((columns[0] == 1).sum())
    )


SWAPPED = {"train": "test", "validation": "validation", "test": "train"}


def swap_parts(splits: DatasetSplits) -> DatasetSplits:
    """Make the training part, which has more images, the test part."""
    parts = [np.array([SWAPPED[part]] * len(images)) for part, images in zip(PARTS, splits.parts, strict=True)]
    return divide_splits_again(splits, parts)


def evaluated_site(run: Path, folder: Path) -> dict[str, Any]:
    ended = flwr_sim("evaluate", run, folder / "site.toml", "--json")
    assert ended.code == 0, ended.err
    figures: dict[str, Any] = json.loads(ended.out)
    return figures


def test_the_runs_own_table_is_scored_on_its_test_part_only(run: Path) -> None:
    figures = evaluated(run, run.parent / "labels.csv")
    assert figures["data"] == "the test part of labels.csv, as the run split it"
    assert aurocs(figures["classes"]) == pytest.approx(aurocs(figures_of_run(run)["per_class"]))


def check_refused(run: Path, data: Path, option: Sequence[object], *faults: str) -> None:
    """Evaluate a run with an option that is refused."""
    ended = flwr_sim("evaluate", run, data, *option)
    errors = " ".join(ended.err.split())
    assert (ended.code, [fault for fault in faults if fault not in errors]) == (2, []), errors


@pytest.mark.parametrize(
    ("option", "value", "fault"),
    [
        ("--image-column", "pictur", '"pictur" is not a column'),
        ("--patient-column", "nobody", '"nobody" is not a column'),
        ("--classes", "one,tree", "names the label columns of an npz file"),
        ("--image-column", "person", 'which the run read by "picture"'),
        ("--patient-column", "picture", 'which the run read by "person"'),
    ],
)
def test_other_columns_are_refused_on_the_runs_own_table(run: Path, option: str, value: str, fault: str) -> None:
    check_refused(run, run.parent / "labels.csv", (option, value), fault)


def test_columns_are_found_by_name_by_option_and_by_what_they_hold(run: Path, tmp_path: Path) -> None:
    rows = range(240, 300)
    plain = table(tmp_path / "a", "file,one,three,Patient ID", rows, "{row}.png,{one},{three},p{person}")
    odd = table(tmp_path / "b", "one,three,a,b", rows, "{one},{three},{row}.png,p{person}")
    first = evaluated(run, plain)
    second = evaluated(run, odd, "--image-column", "a", "--patient-column", "b")
    third = evaluated(run, odd)
    assert first["classes"] == second["classes"]
    assert (first["patients"], second["patients"], third["patients"]) == (30, 30, None)
    assert set(first["classes"]) == {"one", "three"}
    assert third["classes"]["one"]["auroc"] == first["classes"]["one"]["auroc"]


def test_a_column_that_is_not_there_is_named_with_those_that_are(run: Path, tmp_path: Path) -> None:
    path = table(tmp_path, "file,one", range(240, 250), "{row}.png,{one}")
    check_refused(run, path, ("--image-column", "fiel"), '"fiel" is not a column', 'Did you mean "file"?')
    other = table(tmp_path / "b", "file,nine", range(240, 250), "{row}.png,{one}")
    check_refused(run, other, ("--images", tmp_path / "b" / "pictures"), 'the run\'s own column "shows"')


def test_the_limits_of_the_figures_are_told(run: Path, tmp_path: Path) -> None:
    rows = [row for row in range(240, 340) if DIGITS_SHOWN[row] != 7]
    path = table(tmp_path, "file,one,seven", rows, "{row}.png,{one},{seven}")
    ended = flwr_sim("evaluate", run, path, "--images", tmp_path / "pictures")
    text = " ".join(ended.out.split())
    limits = (
        "“seven” was not tested",
        f"“one” rest on {sum(DIGITS_SHOWN[rows] == 1)} positive images",
        "which images belong to one patient",
        f"No mean AUROC can be given on {len(rows)} images (all of labels.csv): a mean counts the classes that",
    )
    assert (ended.code, [limit for limit in limits if limit not in text]) == (0, []), text


def test_figures_are_written_as_csv_and_nothing_is_written_over(run: Path, tmp_path: Path) -> None:
    path = table(tmp_path, "file,one,three", range(240, 340), "{row}.png,{one},{three}")
    out = tmp_path / "figures.csv"
    classes = evaluated(run, path, "--out", out)["classes"]
    rows = {row["class"]: row for row in csv.DictReader(out.read_text(encoding="utf-8").splitlines())}
    assert set(rows) == {"one", "three"}
    for name, row in rows.items():
        assert float(row["auroc"]) == pytest.approx(classes[name]["auroc"], abs=1e-6)
        ends = [float(row["auroc_low"]), float(row["auroc_high"])]
        assert ends == pytest.approx(classes[name]["auroc_interval"], abs=1e-6)
    ended = flwr_sim("evaluate", run, path, "--images", tmp_path / "pictures", "--out", out)
    assert (ended.code, "nothing is written over" in ended.err) == (2, True)


def test_a_few_images_are_enough(run: Path, tmp_path: Path) -> None:
    rows = [next(r for r in range(240, 300) if (DIGITS_SHOWN[r] == 1) == shown) for shown in (True, False)]
    path = table(tmp_path, "file,one,patient", rows, "{row}.png,{one},p{person}")
    assert evaluated(run, path)["images"] == 2


def test_predict_on_what_holds_no_image_is_a_fault_and_leaves_no_file(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "p.csv"
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "a.png").write_bytes(b"no picture")
    for wrong in (run.parent / "labels.csv", tmp_path / "broken", tmp_path / "broken" / "a.png"):
        ended = flwr_sim("predict", run, wrong, "--out", out)
        assert (ended.code, out.exists()) == (2, False)
        assert "holds no image that can be read" in ended.err


PEOPLE = np.arange(len(DIGITS_SHOWN)) // 2


def npz(path: Path, **parts: range) -> Path:
    arrays: dict[str, Any] = {}
    for name, numbers in parts.items():
        rows = list(numbers)
        arrays |= {f"{name}_images": TEST.images[rows], f"{name}_labels": DIGITS_SHOWN[rows].astype(np.uint8)}
        arrays[f"{name}_person"] = PEOPLE[rows].astype(str)
    np.savez(path, **arrays)
    return path


@pytest.fixture(scope="module")
def run_on_arrays(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("arrays")
    npz(folder / "digits.npz", train=range(160), val=range(160, 200), test=range(200, 320))
    return run_of(folder / "arrays.toml", OWN_ARRAYS)


def test_an_npz_file_is_read_as_the_runs_own_and_needs_one_part(run_on_arrays: Path, tmp_path: Path) -> None:
    figures = evaluated(run_on_arrays, run_on_arrays.parent / "digits.npz")
    assert aurocs(figures["classes"]) == pytest.approx(aurocs(figures_of_run(run_on_arrays)["per_class"]))
    shown = np.isin(DIGITS_SHOWN[200:320], (1, 3))
    assert figures["images"] == shown.sum()
    assert figures["patients"] == len(set(PEOPLE[200:320][shown]))
    assert evaluated(run_on_arrays, npz(tmp_path / "digits.npz", test=range(200, 320))) == figures


@pytest.mark.parametrize(
    ("data", "option", "value", "faults"),
    [
        ("digits.npz", "--patient-column", "persn", ['no array "test_persn"', 'Did you mean "test_person"?']),
        ("digits.npz", "--image-column", "file", ["--image-column: ", "digits.npz is none."]),
        ("digits.npz", "--images", ".", ["--images: ", "digits.npz is none."]),
        ("arrays.toml", "--classes", "one", ["--classes: arrays.toml is an experiment"]),
    ],
)
def test_an_option_that_does_not_fit_the_kind_of_file_is_refused(
    run_on_arrays: Path, data: str, option: str, value: str, faults: list[str]
) -> None:
    check_refused(run_on_arrays, run_on_arrays.parent / data, (option, value), *faults)


def test_a_fault_of_an_npz_file_names_file_and_options(run: Path, run_on_arrays: Path, tmp_path: Path) -> None:
    check_refused(run, npz(tmp_path / "other.npz", test=range(200, 320)), (), "error --classes: ")
    empty = npz(tmp_path / "empty.npz", val=range(5))
    check_refused(run_on_arrays, empty, (), f'error {empty}: empty.npz has no array "test_images"')
