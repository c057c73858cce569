"""``flwr-sim evaluate`` of three models of three kinds over five simulated hospitals that label unlike classes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from sklearn.metrics import average_precision_score, brier_score_loss, roc_auc_score

from polyclinic.common.evaluation.figures import ALL_DATA
from polyclinic.common.models.saved import load_model
from polyclinic.common.models.scoring import compute_picture_probabilities
from polyclinic.data.images.reading import resize_images
from tests.common.evaluation.models import SIDE, describe, make_timm_network, write_onnx_model, write_timm_tensors
from tests.network.real import flwr_sim
from tests.server.commands import Ended

LISTS = {
    "east": ("0", "1", "2"),
    "north": ("0", "3"),
    "south": ("1", "2", "4"),
    "west": ("4", "5"),
    "centre": ("0", "5", "6", "7", "8", "9"),
}
OTHERS = {"other": ("0", "4", "nothing"), "third": ("1", "5", "null")}
"""Classes of the two foreign models; "null" is a synonym of the first class for one of them, and stands for 0."""
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
[evaluation]
pooled = true
[simulation]
backend = "inline"
[data]
kind = "digits"
image_size = 16
[partition]
kind = "class_lists"
[partition.lists]
"""

Scores = NDArray[np.float32]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run over five hospitals, their folders, and two models of others."""
    folder = tmp_path_factory.mktemp("five")
    lists = "\n".join(f"{site} = {json.dumps(names)}" for site, names in LISTS.items())
    (folder / "five.toml").write_text(EXPERIMENT + lists, encoding="utf-8")
    for command in (
        ("run", folder / "five.toml", "--out", folder / "run"),
        ("sites", folder / "five.toml", "--out", folder),
    ):
        ended = flwr_sim(*command)
        assert ended.code == 0, ended.err
    for place, site in enumerate(LISTS):
        keep_every_fifth_test_image(folder / site / "images.npz", place)
    describe(folder / "other.toml", write_onnx_model(folder / "other.onnx", 3), OTHERS["other"])
    tensors = write_timm_tensors(folder / "third.safetensors", 3)
    words = '[vocabulary.0]\nsynonyms = ["null"]\n'
    describe(folder / "third.toml", tensors, OTHERS["third"], more='architecture = "timm:test_resnet"', pixels=words)
    return folder


def keep_every_fifth_test_image(file: Path, first: int) -> None:
    """Give each simulated hospital test images of its own; one image in ten has unknown labels."""
    with np.load(file) as arrays:
        kept = {name: array[first::5] if name.startswith("test_") else array for name, array in arrays.items()}
    kept["test_labels"][first::10] = np.nan
    np.savez(file, **kept)


def evaluate(work: Path, out: Path, *options: object) -> Ended:
    models = [work / "run", work / "other.toml", work / "third.toml"]
    return flwr_sim("evaluate", *models, *(work / site / "site.toml" for site in LISTS), "--out", out, *options)


@pytest.fixture(scope="module")
def evaluated(work: Path) -> dict[str, Any]:
    ended = evaluate(work, work / "evaluated")
    assert ended.code == 0, ended.err
    content: dict[str, Any] = json.loads((work / "evaluated" / "evaluation.json").read_text(encoding="utf-8"))
    return content


def score_by_hand(work: Path, pixels: NDArray[np.uint8]) -> dict[str, dict[str, Scores]]:
    """Return model -> class -> scores, by each model's own library."""
    inputs = (resize_images(pixels, SIDE, "pad")[:, None].astype(np.float32) / 255 - 0.5) / 0.25
    session = onnxruntime.InferenceSession(str(work / "other.onnx"), providers=["CPUExecutionProvider"])
    logits = {"other": session.run(None, {session.get_inputs()[0].name: inputs})[0]}
    with torch.no_grad():
        logits["third"] = make_timm_network(3)(torch.from_numpy(inputs)).numpy()
    network = load_model(work / "run")
    scores = {"run": dict(zip(network.class_names, compute_picture_probabilities(network, pixels).T, strict=True))}
    for model, of_model in logits.items():
        names = [{"null": "0"}.get(name, name) for name in OTHERS[model]]
        scores[model] = dict(zip(names, (1 / (1 + np.exp(-of_model))).T, strict=True))
    return scores


def read_hospital(work: Path, site: str) -> tuple[NDArray[np.uint8], dict[str, NDArray[np.float32]]]:
    """Return the test pictures of a hospital, and class -> labels."""
    with np.load(work / site / "images.npz") as arrays:
        labels = arrays["test_labels"]
        return arrays["test_images"], {name: labels[:, column] for column, name in enumerate(LISTS[site])}


def check_figures(row: dict[str, Any], labels: NDArray[np.float32], scores: Scores) -> None:
    known = ~np.isnan(labels)
    labels, scores = labels[known], scores[known]
    assert (row["positives"], row["negatives"]) == ((labels == 1).sum(), (labels == 0).sum())
    assert row["auroc"] == pytest.approx(roc_auc_score(labels, scores), abs=1e-6)
    assert row["average_precision"] == pytest.approx(average_precision_score(labels, scores), abs=1e-5)
    assert row["calibration"]["brier"] == pytest.approx(brier_score_loss(labels, scores), abs=1e-5)
    for point in row["points"]:
        above = scores > point["threshold"]
        assert point["sensitivity"] == pytest.approx(above[labels == 1].mean())
        assert point["specificity"] == pytest.approx(1 - above[labels == 0].mean())


def test_figures_by_hospital_and_class_are_those_of_scikit_learn_on_the_same_scores(
    work: Path, evaluated: dict[str, Any]
) -> None:
    expected = dict[tuple[str, str, str], tuple[NDArray[np.float32], Scores]]()
    for site in LISTS:
        pixels, labels = read_hospital(work, site)
        for model, by_class in score_by_hand(work, pixels).items():
            for name in by_class.keys() & labels.keys():
                expected[site, model, name] = labels[name], by_class[name]
    rows = {(row["data"], row["model"], row["class"]): row for row in evaluated["figures"]}
    assert expected.keys() == {key for key in rows if key[0] != ALL_DATA}
    for key, (of_site, scores) in expected.items():
        check_figures(rows[key], of_site, scores)
    together = {key[1:]: row for key, row in rows.items() if key[0] == ALL_DATA}
    assert {name for _, name in together} == {"0", "1", "2", "4", "5"}  # one hospital alone annotates each other one
    for (model, name), row in together.items():
        parts = [expected[site, model, name] for site in LISTS if name in LISTS[site]]
        check_figures(row, *(np.concatenate(column) for column in zip(*parts, strict=True)))


def test_classes_that_a_model_or_a_hospital_lacks_are_said_and_have_no_figures(evaluated: dict[str, Any]) -> None:
    coverage = {(each["data"], each["model"]): each for each in evaluated["coverage"]}
    assert coverage["north", "run"]["tested"] == ["0", "3"]
    assert coverage["north", "other"]["not_in_model"] == ["3"]
    assert coverage["south", "third"]["not_annotated"] == ["5", "0"]
    said = (
        "north does not annotate “1”, “2”, “4”, “5”, “6”, “7”, “8”, “9” and “nothing”, and annotates “3”, which other "
        "lacks, and annotates “3”, which third lacks: no figures, and none of these counts as absent."
    )
    assert said in evaluated["limitations"]


def test_thresholds_of_the_run_are_those_of_its_validation_images(work: Path, evaluated: dict[str, Any]) -> None:
    chosen = json.loads((work / "run" / "summary.json").read_text(encoding="utf-8"))["test"]["operating_points"]
    assert chosen
    for row in evaluated["figures"]:
        if row["model"] == "run":
            thresholds = [point["threshold"] for point in row["points"]]
            assert thresholds == [point["threshold"] for point in chosen.get(row["class"], [{"threshold": 0.5}])]


def test_each_two_models_are_compared_on_the_images_of_the_classes_that_both_have(evaluated: dict[str, Any]) -> None:
    pairs = {(each["first"], each["second"], each["class_name"]) for each in evaluated["comparisons"]}
    shared = {("run", "other"): "04", ("run", "third"): "015", ("other", "third"): "0"}
    assert pairs == {(*pair, name) for pair, names in shared.items() for name in names}
    for each in evaluated["comparisons"]:
        low, high = each["difference"]["interval"]
        assert low <= each["difference"]["value"] <= high


def test_the_page_has_a_figure_of_each_hospital_and_names_models_by_hash(work: Path, evaluated: dict[str, Any]) -> None:
    page = (work / "evaluated" / "evaluation.html").read_text(encoding="utf-8")
    assert page.count('<svg role="img"') == 1 + len(LISTS)
    assert all(model["sha256"] in page for model in evaluated["models"])
    assert all(f"<h3>{site}</h3>" in page for site in LISTS)


def test_of_an_experiment_that_is_not_the_runs_own_the_first_line_says_so(work: Path, tmp_path: Path) -> None:
    own = flwr_sim("evaluate", work / "run", work / "five.toml", "--all")
    assert own.out.startswith("! All images count, also those of the training parts.")
    text = (
        (work / "five.toml")
        .read_text(encoding="utf-8")
        .replace("image_size = 16\n[partition]", "image_size = 20\n[partition]")
    )
    (tmp_path / "other.toml").write_text(text, encoding="utf-8")
    models = work / "run", work / "other.toml"
    ended = flwr_sim("evaluate", *models, tmp_path / "other.toml")
    assert ended.code == 0, ended.err
    assert ended.out.startswith("! other.toml is not the experiment of")
    ended = flwr_sim("evaluate", *models, work / "five.toml")
    assert "is not the experiment" not in ended.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "other.toml"), "no labelled images are named"),
        (("run", "other.toml", "labels.csv"), "is scored by one run alone"),
        (("run", "other.toml", "none.toml"), "there is no such file"),
        (("other.toml", "five.toml", "--classes", "a"), "is for a csv or npz file that one run scores"),
        (("run", "other.toml", "five.toml", "--by", "sex"), "this data has none"),
        (("run", "other.toml", "five.toml", "--by", "age:40,0"), "lower ends of bands in ascending order"),
    ],
)
def test_wrong_arguments_are_refused(work: Path, arguments: tuple[str, ...], message: str) -> None:
    (work / "labels.csv").write_text("image,0\n", encoding="utf-8")
    is_file = [word.endswith((".toml", ".csv")) or word == "run" for word in arguments]
    ended = flwr_sim(
        "evaluate", *(work / word if path else word for word, path in zip(arguments, is_file, strict=True))
    )
    assert ended.code == 2
    assert message in ended.err
