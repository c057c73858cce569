"""Volumes of somebody's own: init, a run in this process and on Ray, its report, predictions and exported model."""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from polyclinic.common.config import read_experiment
from tests.data.volume_files import write_nifti, write_series
from tests.network.real import flwr_sim

CLASSES = ("Mass", "Fluid", "Device")
COUNT = 48


def draw(number: int) -> np.ndarray:
    """Draw a volume of 8 voxels a side, in which each class shows as a bright part of its own."""
    random = np.random.default_rng(number)
    voxels = random.normal(0, 20, (8, 8, 8))
    for place, _ in enumerate(CLASSES):
        if number >> place & 1:
            voxels[2 * place + 1, 2:6, 2:6] += 300
    return voxels.astype(np.int16)


@pytest.fixture(scope="module")
def hospital(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table, and for each line a NIfTI file or a folder of DICOM slices."""
    folder = tmp_path_factory.mktemp("volumes")
    (folder / "scans").mkdir()
    rows = [["file", "patient", *CLASSES]]
    for number in range(COUNT):
        if number % 4:
            name = f"p{number}.nii.gz"
            write_nifti(folder / "scans" / name, draw(number), (2, 1, 1))
        else:
            name = f"p{number}"
            write_series(folder / "scans" / name, draw(number), spacing=(2, 1, 1))
        rows.append([name, f"P{number}", *(str(number >> place & 1) for place, _ in enumerate(CLASSES))])
    with (folder / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return folder


@pytest.fixture(scope="module")
def experiment(hospital: Path) -> Path:
    """The experiment that init writes, with two rounds."""
    ended = flwr_sim("init", hospital / "labels.csv", "--out", hospital / "mine.toml")
    assert ended.code == 0, ended.err
    text = (hospital / "mine.toml").read_text(encoding="utf-8").replace("rounds = 20", "rounds = 2")
    (hospital / "mine.toml").write_text(text, encoding="utf-8")
    return hospital / "mine.toml"


def run(experiment: Path, out: Path, *options: str) -> dict[str, object]:
    ended = flwr_sim("run", experiment, "--out", out, *options)
    assert ended.code == 0, ended.err
    summary: dict[str, object] = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    return summary


@pytest.fixture(scope="module")
def finished(experiment: Path) -> Path:
    """The folder of a finished run, whose report shows example images."""
    out = experiment.parent / "run"
    run(experiment, out, "--backend", "inline", "--set", "evaluation.sample_grid=true")
    return out


def test_init_recognises_volumes_and_proposes_a_grid_of_equally_wide_voxels(experiment: Path) -> None:
    file = read_experiment(experiment).experiment
    assert file.model.architecture == "tiny_cnn_3d"
    assert file.model.image_size == file.data.image_size == (16, 8, 8)  # type: ignore[union-attr]


def test_init_says_shapes_spacings_and_memory(hospital: Path) -> None:
    ended = flwr_sim("init", hospital / "labels.csv", "--out", hospital / "again.toml")
    text = " ".join(ended.out.split())
    assert "8 × 8 × 8 voxels of 2 × 1 × 1 mm (depth × height × width)" in text
    assert "48 volumes of 16 × 8 × 8 voxels take" in text
    assert "no window: each volume is shown from its own 0.5th to its 99.5th percentile" in text


def test_init_takes_class_folders_of_volumes(tmp_path: Path) -> None:
    for number in range(24):
        name = tmp_path / "sorted" / ("ill", "well")[number % 2] / f"p{number}"
        write_series(name, draw(number % 2 * 7), SeriesInstanceUID=f"1.{number}", PatientID=f"P{number}")
    ended = flwr_sim("init", tmp_path / "sorted", "--out", tmp_path / "mine.toml")
    assert ended.code == 0, ended.err
    assert "a table of 24 pictures in 2 class folders" in " ".join(ended.out.split())
    assert read_experiment(tmp_path / "mine.toml").experiment.model.takes_volumes


@pytest.mark.slow
def test_a_run_on_ray_has_the_same_model_as_one_in_this_process(experiment: Path, finished: Path) -> None:
    pytest.importorskip("ray")
    other = run(experiment, experiment.parent / "ray", "--backend", "ray")
    own = json.loads((finished / "summary.json").read_text(encoding="utf-8"))
    assert other["model_sha256"] == own["model_sha256"]


def test_a_run_that_was_stopped_after_a_round_goes_on_to_the_same_model(experiment: Path, finished: Path) -> None:
    out = experiment.parent / "resumed"
    run(experiment, out, "--backend", "inline", "--set", "run.rounds=1")
    resumed = run(experiment, out, "--backend", "inline", "--resume")
    own = json.loads((finished / "summary.json").read_text(encoding="utf-8"))
    assert resumed["model_sha256"] == own["model_sha256"]


def test_the_report_shows_volumes_by_their_middle_slices(finished: Path) -> None:
    samples = json.loads((finished / "samples.json").read_text(encoding="utf-8"))
    assert any(each["samples"] for each in samples["classes"])
    assert (finished / "report.html").stat().st_size > 10_000


def test_predict_reads_files_and_series_as_the_training_did(hospital: Path, finished: Path) -> None:
    table = hospital / "all.csv"
    ended = flwr_sim("predict", finished, hospital / "scans", "--out", table)
    assert ended.code == 0, ended.err
    with table.open(encoding="utf-8", newline="") as file:
        predicted = {row["image"]: row for row in csv.DictReader(file)}
    assert sorted(predicted) == sorted(path.name for path in (hospital / "scans").iterdir())
    alone = hospital / "alone.csv"
    ended = flwr_sim("predict", finished, hospital / "scans" / "p4", "--out", alone)
    assert ended.code == 0, ended.err
    with alone.open(encoding="utf-8", newline="") as file:
        (row,) = csv.DictReader(file)
    assert row["image"] == "p4"
    assert all(float(row[name]) == pytest.approx(float(predicted["p4"][name]), abs=1e-6) for name in CLASSES)


def test_a_model_of_volumes_is_exported_and_checked_on_volumes(finished: Path, hospital: Path) -> None:
    pytest.importorskip("onnxruntime", reason="the export extra is not installed")
    pytest.importorskip("onnxscript", reason="the export extra is not installed")
    ended = flwr_sim("export", finished, "--to", "onnx", "--out", hospital / "it.onnx", "--check", hospital / "scans")
    assert ended.code == 0, ended.err
    assert (hospital / "it.onnx").stat().st_size > 100_000


def test_pictures_and_volumes_of_one_experiment_contradict_each_other(experiment: Path) -> None:
    text = experiment.read_text(encoding="utf-8")
    wrong = experiment.parent / "wrong.toml"
    wrong.write_text(
        text.replace('"tiny_cnn_3d"', '"tiny_cnn"').replace("image_size = [16, 8, 8]", "image_size = 16", 1)
    )
    ended = flwr_sim("run", wrong, "--out", experiment.parent / "none")
    assert ended.code == 2
    assert "data.image_size must be one number, of pictures" in " ".join(ended.err.split())


def test_a_method_for_pictures_alone_is_refused(experiment: Path) -> None:
    ended = flwr_sim("run", experiment, "--out", experiment.parent / "none", "--set", "run.method=fedfixmatch")
    assert ended.code == 2
    assert "fedfixmatch changes images by rules for pictures" in " ".join(ended.err.split())
    shutil.rmtree(experiment.parent / "none", ignore_errors=True)


def test_evaluate_reads_the_table_as_the_training_did(hospital: Path, finished: Path, experiment: Path) -> None:
    options = ("--images", hospital / "scans", "--out", hospital / "scores.csv")
    ended = flwr_sim("evaluate", finished, hospital / "labels.csv", *options)
    assert ended.code == 0, ended.err
    assert (hospital / "scores.csv").is_file()
    by_experiment = flwr_sim("evaluate", finished, experiment, "--out", hospital / "scores")
    assert by_experiment.code == 0, by_experiment.err
