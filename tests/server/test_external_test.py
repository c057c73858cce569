"""A finished model on images of another place: who scores what, and that nothing is chosen by it."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from sklearn.metrics import roc_auc_score

from polyclinic.common.config import validate_experiment
from polyclinic.common.errors import BadInput
from polyclinic.common.models.network import compute_image_probabilities
from polyclinic.common.models.saved import load_model
from polyclinic.common.system.toml import parse_toml
from polyclinic.data.base.spec import FolderDatasetSpec
from polyclinic.data.images.pixels import convert_to_channels_first
from polyclinic.data.load import find_external_test_faults
from polyclinic.server.coordinator.folder import CoordinatorFolder
from polyclinic.server.deployment.network import NetworkBackend
from polyclinic.server.reporting.run_claims import describe_run_result
from polyclinic.server.runs.reader import RunFolderContent, read_run
from polyclinic.studies.comparison import compare_methods
from polyclinic.studies.comparison_report import (
    comparison_as_markdown,
    format_comparison_tables,
    write_comparison_report,
)
from tests.federations import experiment, federation, finished, temporary_folder

NAMES = ("3", "0", "7", "elsewhere")


def other_place() -> tuple[Path, np.ndarray, np.ndarray]:
    """Write an npz file of test arrays alone: blurred digits of 60 patients, three known classes and one unknown."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    rows = np.random.default_rng(5).permutation(len(digits.target))[:480]
    images = (np.kron(digits.images[rows], np.ones((2, 2))) * 12 + 30).astype(np.uint8)
    labels = np.stack([*(digits.target[rows] == digit for digit in (3, 0, 7)), rows % 2 == 0], 1)
    file = temporary_folder("polyclinic-elsewhere-") / "elsewhere.npz"
    patients = np.array([f"p{row % 60}" for row in range(480)])
    np.savez(file, test_images=images, test_labels=labels.astype(np.uint8), test_patient=patients)
    return file, images, labels


FILE, IMAGES, LABELS = other_place()
CLASSES = json.dumps(list(NAMES))
ELSEWHERE = f'external_test={{kind = "npz", path = "{FILE}", classes = {CLASSES}, patient_key = "patient"}}'


def oracle(folder: Path) -> dict[str, float]:
    """Return the AUROCs of a saved model, by scikit-learn."""
    network = load_model(folder)
    scores = compute_image_probabilities(network, convert_to_channels_first(IMAGES))
    return {
        name: float(roc_auc_score(LABELS[:, column], scores[:, network.class_names.index(name)]))
        for column, name in enumerate(NAMES)
        if name in network.class_names
    }


def test_the_global_model_is_scored_on_the_classes_in_common() -> None:
    folder, summary = finished(ELSEWHERE, pages=True)
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
    _, beside = finished(ELSEWHERE, pages=True)
    for key in ("model_sha256", "best_round", "test", "per_site", "contract_hash"):
        assert beside[key] == without[key]
    assert without["external"] is None


def test_sites_that_train_alone_are_scored_model_by_model() -> None:
    folder, summary = finished(ELSEWHERE, 'run.method="individual"')
    aurocs = [oracle(folder / "sites" / site / "model") for site in summary["sites"]]
    for name in ("3", "0", "7"):
        expected = np.mean([of_site[name] for of_site in aurocs if name in of_site])
        assert summary["external"]["per_class"][name]["auroc"] == pytest.approx(expected)
    assert summary["external"]["note"] == "mean over the owning sites' own models"


def test_all_images_of_a_table_or_of_a_made_set_are_test_images(tmp_path: Path) -> None:
    summary = federation(tmp_path, 'external_test={kind = "digits", image_size = 16}', "run.rounds=1")
    assert summary["external"]["per_class"]["0"]["positives"] == 178, "scikit-learn has so many zeros"


TABLE = 'kind = "folder", images = "nowhere", labels = "none.csv", image_column = "image", label_columns = ["3"]'


@pytest.mark.parametrize(
    ("spec", "fault"),
    [
        (f'kind = "npz", path = "{FILE}", classes = ["a", "b", "c", "d"]', r"external_test: labels .*no class in c"),
        ('kind = "npz", path = "missing.npz", classes = ["3"]', r"external_test\.path"),
        (f'kind = "npz", path = "{FILE}", classes = ["3"]', r"external_test\.classes"),
        (TABLE, r"external_test\.(labels|images)"),
    ],
    ids=["no class in common", "no such file", "too few names", "no such table"],
)
def test_a_fault_of_it_is_found_before_anything_is_written(spec: str, fault: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=fault):
        federation(tmp_path, f"external_test={{{spec}}}")
    assert not (tmp_path / "run").exists()


DATA = """
kind = "folder"
images = "scans"
labels = "labels.csv"
image_column = "file"
finding_column = "finding"
classes = ["Mass", "Fluid"]
synonyms = {"Fx" = "Fracture"}
other_findings = ["Hernia", "Scar"]
not_assessed = ["99"]
"""
EXTERNAL = """
kind = "folder"
images = "there"
labels = "there.csv"
image_column = "file"
"""


@pytest.mark.parametrize(
    ("own", "classes", "others"),
    [
        ('finding_column = "dx"', ("Mass", "Fluid", "Fracture"), ("Hernia", "Scar")),
        ('finding_column = "dx"\nclasses = ["Mass", "scar"]', ("Mass", "scar", "Fracture"), ("Hernia",)),
        ('finding_column = "dx"\nsynonyms = {"M" = "Mass"}', ("Mass", "Fluid"), ("Hernia", "Scar")),
        ('finding_column = "dx"\nother_findings = []', ("Mass", "Fluid", "Fracture"), ()),
        ('label_columns = ["Mass", "Fx"]', ("Mass", "Fracture"), ()),
    ],
)
def test_its_table_is_read_by_the_names_of_the_run_where_it_has_none(
    own: str, classes: tuple[str, ...], others: tuple[str, ...]
) -> None:
    tree = parse_toml(f"[data]{DATA}[external_test]{EXTERNAL}{own}")
    tree |= {"run": {"method": "surgical"}, "model": {"architecture": "tiny_cnn", "image_size": 32}}
    external = validate_experiment(tree, Path()).experiment.external_test
    assert isinstance(external, FolderDatasetSpec)
    assert (external.class_names, external.other_findings) == (classes, others)


def test_a_fault_in_its_table_names_its_own_keys(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "a.png").write_bytes(b"")
    (tmp_path / "there.csv").write_text("file,dx\na.png,Hernja\na.png,Unheard\n")
    tree = parse_toml(f'[data]{DATA}[external_test]{EXTERNAL}finding_column = "dx"')
    tree |= {"run": {"method": "surgical"}, "model": {"architecture": "tiny_cnn", "image_size": 32}}
    faults = find_external_test_faults(
        validate_experiment(tree, tmp_path / "x.toml").experiment.external_test, tmp_path
    )
    text = " ".join(map(str, faults))
    assert "external_test.other_findings" in text
    assert not re.search(r"(?<!\w)data\.", text)


def test_a_coordinator_of_hospitals_finds_the_same_before_anybody_is_asked(
    coordinator: CoordinatorFolder, tmp_path: Path
) -> None:
    file = experiment(tmp_path, 'external_test={kind = "npz", path = "missing.npz", classes = ["3"]}')
    with pytest.raises(BadInput, match=r"experiment\.toml: external_test\.path"):
        NetworkBackend(coordinator, file, 2, print).load_and_check_data(resume=False)


def test_a_person_reads_it_beside_the_other_result() -> None:
    folder, summary = finished(ELSEWHERE, pages=True)
    sentence = describe_run_result(read_run(folder))
    inside = np.mean([summary["test"]["per_class"][name]["auroc"] for name in ("3", "0", "7")])
    assert "On the external test set (480 labelled images) the mean AUROC is " in sentence
    assert f"over 3 classes; over the same classes it is {inside:.3f}" in sentence
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert HEADING in page
    assert page.count("n/a: not labelled there") == 7
    assert "On an external test set" in (folder / "MODEL_CARD.md").read_text(encoding="utf-8")


HEADING = "External test set</h2>"


@pytest.fixture(scope="module")
def runs() -> tuple[RunFolderContent, RunFolderContent]:
    """Runs of two methods with an external test set."""
    other = finished('run.method="partial_loss"', ELSEWHERE)[0]
    return read_run(finished(ELSEWHERE, pages=True)[0]), read_run(other)


def test_methods_are_compared_on_it_too(tmp_path: Path, runs: tuple[RunFolderContent, RunFolderContent]) -> None:
    comparison = compare_methods(runs)
    assert comparison.external is not None
    for run, method in zip(runs, comparison.external.methods, strict=True):
        assert run.summary.external is not None
        assert method.auroc["all"].mean == pytest.approx(run.summary.external.mean_auroc)
    assert comparison.external.find_method_contrast("partial_loss").result.pairs == 3
    console = Console(width=160, no_color=True)
    with console.capture() as capture:
        console.print(format_comparison_tables(comparison))
    assert "External test set: all methods" in capture.get()
    assert "### External test set" in comparison_as_markdown(comparison)
    assert HEADING in write_comparison_report(comparison, tmp_path / "report.html").read_text(encoding="utf-8")


def test_runs_of_which_one_lacks_it_are_compared_without(
    tmp_path: Path, runs: tuple[RunFolderContent, RunFolderContent]
) -> None:
    comparison = compare_methods([read_run(finished()[0]), runs[1]])
    assert comparison.external is None
    assert HEADING not in write_comparison_report(comparison, tmp_path / "a.html").read_text()
