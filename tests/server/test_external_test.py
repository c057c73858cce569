"""A finished model on images of another place: who scores what, and that nothing is chosen by it."""

import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from sklearn.metrics import roc_auc_score

from common.data.images.pixels import channels_first
from common.errors import BadInput
from common.models.network import compute_scores
from common.models.saved import load_model
from server.coordinator.folder import Coordinator, CoordinatorFile
from server.deployment.network import NetworkBackend
from server.reporting.run_claims import run_result
from server.runs.reader import Run, read_run
from studies.comparison import compare
from studies.comparison_report import comparison_table, markdown_table, write_comparison_report
from tests.federations import experiment, federation, finished, temporary_folder

NAMES = ("3", "0", "7", "elsewhere")


def other_place() -> tuple[Path, np.ndarray, np.ndarray]:
    """An npz file with test arrays alone: blurred digits of 60 patients, three known classes and one unknown."""
    from sklearn.datasets import load_digits

    found = load_digits()
    rows = np.random.default_rng(5).permutation(len(found.target))[:240]
    pixels = np.kron(found.images[rows], np.ones((2, 2))) * 12 + 30
    labels = np.stack([found.target[rows] == 3, found.target[rows] == 0, found.target[rows] == 7, rows % 2 == 0], 1)
    file = temporary_folder("polyclinic-elsewhere-") / "elsewhere.npz"
    images = pixels.astype(np.uint8)
    patients = np.array([f"p{row % 60}" for row in range(240)])
    np.savez(file, test_images=images, test_labels=labels.astype(np.uint8), test_patient=patients)
    return file, images, labels


FILE, IMAGES, LABELS = other_place()
CLASSES = json.dumps(list(NAMES))
ELSEWHERE = f'external_test={{kind = "npz", path = "{FILE}", classes = {CLASSES}, patient_key = "patient"}}'


def oracle(folder: Path) -> dict[str, float]:
    """Of a saved model, by scikit-learn."""
    network = load_model(folder)
    scores = compute_scores(network, channels_first(IMAGES))
    known = [name for name in NAMES if name in network.class_names]
    return {
        name: float(roc_auc_score(LABELS[:, NAMES.index(name)], scores[:, network.class_names.index(name)]))
        for name in known
    }


def test_the_global_model_is_scored_on_the_classes_in_common() -> None:
    folder, summary = finished(ELSEWHERE)
    external, expected = summary["external"], oracle(folder)
    assert expected.keys() == {"3", "0", "7"}
    for name, auroc in expected.items():
        assert external["per_class"][name]["auroc"] == pytest.approx(auroc)
        assert external["per_class"][name]["positives"] == int(LABELS[:, NAMES.index(name)].sum())
    assert external["per_class"]["1"] == external["per_class"]["1"] | {"auroc": None, "positives": 0, "negatives": 0}
    assert external["mean_auroc"] == pytest.approx(np.mean(list(expected.values())))
    assert external["intervals"]["over"] == "patients"
    assert "elsewhere" not in external["per_class"]


def test_nothing_is_chosen_by_it() -> None:
    """The same model, test and chosen round as without; a roll call's hash of the labels too."""
    _, without = finished()
    _, beside = finished(ELSEWHERE)
    for key in ("model_sha256", "best_round", "test", "per_site", "contract_hash"):
        assert beside[key] == without[key]
    assert without["external"] is None


def test_sites_that_train_alone_are_scored_model_by_model() -> None:
    folder, summary = finished(ELSEWHERE, 'run.method="individual"')
    found = [oracle(folder / "sites" / site / "model") for site in summary["sites"]]
    for name in ("3", "0", "7"):
        expected = np.mean([one[name] for one in found if name in one])
        assert summary["external"]["per_class"][name]["auroc"] == pytest.approx(expected)
    assert summary["external"]["note"] == "mean over the owning sites' own models"


def test_all_images_of_a_table_or_of_a_made_set_are_test_images() -> None:
    _, summary = finished('external_test={kind = "digits", image_size = 16}')
    assert summary["external"]["per_class"]["0"]["positives"] == 178, "scikit-learn has so many zeros"


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (
            f'{{kind = "npz", path = "{FILE}", classes = ["a", "b", "c", "d"]}}',
            r"external_test: labels .*no class in c",
        ),
        ('{kind = "npz", path = "missing.npz", classes = ["3"]}', r"external_test\.path"),
        (f'{{kind = "npz", path = "{FILE}", classes = ["3"]}}', r"external_test\.classes"),
        (
            '{kind = "folder", images = "nowhere", labels = "none.csv", image_column = "image", label_columns = ["3"]}',
            r"external_test\.(labels|images)",
        ),
    ],
    ids=["no class in common", "no such file", "too few names", "no such table"],
)
def test_what_is_wrong_with_it_is_said_before_anything_is_written(said: str, expected: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=expected):
        federation(tmp_path, f"external_test={said}")
    assert not (tmp_path / "run").exists()


def test_a_coordinator_of_hospitals_is_told_the_same_before_anybody_is_asked(tmp_path: Path) -> None:
    file = experiment(tmp_path, 'external_test={kind = "npz", path = "missing.npz", classes = ["3"]}')
    coordinator = Coordinator(tmp_path / "coordinator", CoordinatorFile(name="trial", hosts=("127.0.0.1",), port=9092))
    with pytest.raises(BadInput, match=r"experiment\.toml: external_test\.path"):
        NetworkBackend(coordinator, file, 2, print).check(resume=False)


def test_a_person_reads_it_beside_the_other_result() -> None:
    folder, summary = finished(ELSEWHERE, pages=True)
    said = run_result(read_run(folder))
    inside = np.mean([summary["test"]["per_class"][name]["auroc"] for name in ("3", "0", "7")])
    assert "On the external test set (240 labelled images) the mean AUROC is " in said
    assert f"over 3 classes; over the same classes it is {inside:.3f}" in said
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "External test set</h2>" in page
    assert page.count("n/a: not labelled there") == 7
    card = (folder / "MODEL_CARD.md").read_text(encoding="utf-8")
    assert "On an external test set" in card


def runs(*overrides: str) -> list[Run]:
    """Two methods."""
    return [read_run(finished(f'run.method="{one}"', *overrides)[0]) for one in ("surgical", "partial_loss")]


def test_methods_are_compared_on_it_too(tmp_path: Path) -> None:
    found = compare(runs(ELSEWHERE))
    assert found.external is not None
    for run, method in zip(runs(ELSEWHERE), found.external.methods, strict=True):
        assert run.summary.external is not None
        assert method.auroc["all"].mean == pytest.approx(run.summary.external.mean_auroc)
    assert found.external.contrast("partial_loss").result.pairs == 3
    console = Console(width=160, no_color=True)
    with console.capture() as capture:
        console.print(comparison_table(found))
    assert "AUROC on the external test set" in capture.get()
    assert "### External test set" in markdown_table(found)
    page = write_comparison_report(found, tmp_path / "report.html").read_text(encoding="utf-8")
    assert "External test set</h2>" in page


def test_runs_of_which_one_lacks_it_are_compared_without(tmp_path: Path) -> None:
    mixed = [runs(ELSEWHERE)[0], runs()[1]]
    found = compare(mixed)
    assert found.external is None
    assert "External test set</h2>" not in write_comparison_report(found, tmp_path / "a.html").read_text()
