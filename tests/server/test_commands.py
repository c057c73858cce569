"""What a researcher types, typed: run, predict, evaluate, compare, demo; and that each experiment can be run."""

import csv
import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from PIL import Image

from polyclinic.common.config import read_experiment
from polyclinic.common.errors import Fault
from polyclinic.data.base.spec import DigitsDatasetSpec
from polyclinic.data.load import load_dataset
from polyclinic.server.reporting.run_claims import list_prominent_limitations
from polyclinic.server.runs.reader import read_run
from polyclinic.server.simulation import simulate
from polyclinic.server.simulation.simulate import check_simulation_experiment
from tests.data.dicom_files import dicom
from tests.data.nifti_files import write
from tests.federations import DIGITS
from tests.network.real import flwr_sim
from tests.server.commands import ROOT, needs_real_data

TEST = load_dataset(DigitsDatasetSpec(kind="digits"), Path()).test


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on digits, made by the command."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "digits.toml").write_text(DIGITS, encoding="utf-8")
    with patch("polyclinic.server.federation.set_up.write_run_pages"):
        ended = flwr_sim("run", folder / "digits.toml", "--out", folder / "run")
    assert ended.code == 0, ended.err
    return folder


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    (tmp_path / "a.toml").write_text(DIGITS, encoding="utf-8")
    return tmp_path / "a.toml"


def summary_test(finished: Path) -> dict:  # type: ignore[type-arg]
    return json.loads((finished / "run" / "summary.json").read_text(encoding="utf-8"))["test"]  # type: ignore[no-any-return]


def predicted(tmp_path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((tmp_path / "p.csv").read_text(encoding="utf-8").splitlines()))


def test_predict_names_every_image_and_says_which_cannot_be_read(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    for row, pixels in enumerate(TEST.images[:3]):
        Image.fromarray(pixels).save(tmp_path / "pictures" / f"{row}.png")
    (tmp_path / "pictures" / "broken.png").write_bytes(b"\x89PNG and no more")
    Image.fromarray(TEST.images[0]).save(tmp_path / "pictures" / "d.TIFF", "TIFF")
    (tmp_path / "pictures" / "notes.txt").write_text("no picture", encoding="utf-8")
    ended = flwr_sim("predict", finished / "run", tmp_path / "pictures", "--out", tmp_path / "p.csv")
    unread = "2 images could not be read, and are left out: broken.png (damaged or cut off) and d.TIFF ("
    expected = ("3 images -> ", unread, "no pictures: notes.txt")
    assert (ended.code, [part for part in expected if part not in ended.out]) == (0, [])
    rows = predicted(tmp_path)
    assert [row["image"] for row in rows] == ["0.png", "1.png", "2.png", "broken.png", "d.TIFF"]
    assert all(0 < float(row["7"]) < 1 for row in rows[:3])
    assert [(row["7"], bool(row["unreadable"])) for row in rows[3:]] == [("", True)] * 2


def test_predict_says_what_limits_a_runs_model_and_nothing_of_a_model_alone(finished: Path, tmp_path: Path) -> None:
    limits = list_prominent_limitations(read_run(finished / "run"))
    assert limits
    Image.fromarray(TEST.images[0]).save(tmp_path / "0.png")
    ended = flwr_sim("predict", finished / "run", tmp_path / "0.png", "--out", tmp_path / "p.csv")
    assert all(text in " ".join(ended.out.split()) for text in limits)
    (tmp_path / "model").mkdir()
    for name in ("model.json", "model.safetensors"):
        (tmp_path / "model" / name).write_bytes((finished / "run" / name).read_bytes())
    alone = flwr_sim("predict", tmp_path / "model", tmp_path / "0.png", "--out", tmp_path / "q.csv")
    assert (alone.code, "!" in alone.out) == (0, False)


def test_predict_takes_the_frame_and_the_slice_that_are_named(finished: Path, tmp_path: Path) -> None:
    digits = TEST.images[:3]  # (3, 8, 8)
    (tmp_path / "scans").mkdir()
    elements = {"BitsAllocated": 8, "BitsStored": 8, "HighBit": 7, "WindowCenter": 128, "WindowWidth": 256}
    (tmp_path / "scans" / "frames.dcm").write_bytes(dicom(digits, NumberOfFrames=3, **elements))
    write(tmp_path / "scans" / "volume.nii.gz", np.stack([digit[::-1, ::-1].T for digit in digits], axis=2))
    Image.fromarray(digits[1]).save(tmp_path / "scans" / "second.png")
    options = ("--frame", "2", "--window", "128,256")
    ended = flwr_sim("predict", finished / "run", tmp_path / "scans", "--out", tmp_path / "p.csv", *options)
    assert ended.code == 0, ended.out
    rows = predicted(tmp_path)
    assert [row["image"] for row in rows] == ["frames.dcm", "second.png", "volume.nii.gz"]
    assert [row["unreadable"] for row in rows] == [""] * 3
    assert len({row["7"] for row in rows}) == 1


def test_options_of_predict_that_cannot_be_understood_are_all_named_and_nothing_is_written_over(
    finished: Path, tmp_path: Path
) -> None:
    predict = ("predict", finished / "run", tmp_path, "--out", tmp_path / "p.csv")
    ended = flwr_sim(*predict, "--frame", "first", "--axis", "up", "--window", "40")
    faults = ("--frame first: ", "--axis up: ", "--window 40: ")
    assert (ended.code, [fault for fault in faults if fault not in ended.out + ended.err]) == (2, [])
    (tmp_path / "p.csv").write_text("mine", encoding="utf-8")
    assert (flwr_sim(*predict).code, (tmp_path / "p.csv").read_text(encoding="utf-8")) == (2, "mine")


def test_evaluate_on_an_experiment_an_npz_and_a_csv_gives_the_runs_own_figures(finished: Path, tmp_path: Path) -> None:
    by_experiment = flwr_sim("evaluate", finished / "run", finished / "digits.toml")
    assert (by_experiment.code, f"{summary_test(finished)['mean_auroc']:.3f}" in by_experiment.out) == (0, True)
    labels = TEST.labels.argmax(1)[:, None].astype(np.uint8)
    arrays = {f"{part}_images": TEST.images for part in ("train", "val", "test")}
    np.savez(tmp_path / "d.npz", **arrays, train_labels=labels, val_labels=labels, test_labels=labels)
    by_npz = flwr_sim("evaluate", finished / "run", tmp_path / "d.npz", "--classes", ",".join("0123456789"))
    lines = ["image,3"]
    for row, pixels in enumerate(TEST.images):
        Image.fromarray(pixels).save(tmp_path / f"{row}.png")
        lines.append(f"{row}.png,{int(labels[row, 0] == 3)}")
    (tmp_path / "labels.csv").write_text("\n".join(lines), encoding="utf-8")
    by_csv = flwr_sim("evaluate", finished / "run", tmp_path / "labels.csv")
    auroc = f"{summary_test(finished)['per_class']['3']['auroc']:.3f}"
    assert [(ended.code, auroc in ended.out) for ended in (by_npz, by_csv)] == [(0, True)] * 2


def test_compare_runs_all_and_tests_in_pairs_and_does_no_run_twice(experiment: Path, tmp_path: Path) -> None:
    other, out = tmp_path / "b.toml", tmp_path / "out"
    other.write_text('extends = "a.toml"\n[run]\nmethod = "vanilla"\n', encoding="utf-8")
    command = ("compare", experiment, other, "--seeds", 2, "--jobs", 2, "--set", "run.rounds=1", "--out", out)
    first, again = flwr_sim(*command), flwr_sim(*command)
    assert (first.code, again.code) == (0, 0), first.err
    assert "4 of 4 runs are there already." in again.out
    assert "By class: AUROC" in again.out
    sentences = again.out[again.out.index("By mean AUROC") : again.out.index("Report:")]
    assert max(map(len, sentences.splitlines())) <= 80
    comparison = json.loads((out / "comparison.json").read_text(encoding="utf-8"))
    assert [method["label"] for method in comparison["methods"]] == ["surgical", "vanilla"]
    assert (out / "report.html").stat().st_size > 10_000


def test_compare_refuses_a_folder_of_another_experiment(experiment: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / "a-seed0").mkdir(parents=True)
    (tmp_path / "out" / "a-seed0" / "mine.txt").write_text("mine", encoding="utf-8")
    ended = flwr_sim("compare", experiment, "--seeds", 1, "--out", tmp_path / "out")
    assert (ended.code, "holds another experiment" in ended.err) == (2, True)


def test_compare_refuses_two_of_one_name_and_a_seed_of_ones_own(experiment: Path, tmp_path: Path) -> None:
    (tmp_path / "b.toml").write_text('extends = "a.toml"\n[method]\nwarm_up_epochs = 1\n', encoding="utf-8")
    for arguments, fault in (
        ((tmp_path / "b.toml",), 'run.name: "surgical" is the name of "a.toml", "b.toml"'),
        (("--set", "run.seed=7"), "--set run.seed: is settled by --seeds."),
    ):
        ended = flwr_sim("compare", experiment, *arguments, "--out", tmp_path / "out")
        assert (ended.code, fault in ended.err) == (2, True), fault


@needs_real_data
@pytest.mark.parametrize(
    "name",
    [
        "nih_surgical",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("nih_folder", "ham10000_surgical", "mnist_surgical")),
    ],
)
def test_the_projects_experiments_run_on_real_images(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "polyclinic.server.federation.set_up.write_run_pages", lambda out: None
    )  # those of digits are enough
    small = ("--set", "run.rounds=1", "--set", "model.architecture=tiny_cnn", "--set", "model.image_size=16")
    file = ROOT / "experiments" / f"{name}.toml"
    ended = flwr_sim("run", file, "--backend", "inline", "--out", tmp_path / "run", *small)
    assert ended.code == 0, ended.err
    assert summary_test(tmp_path)["mean_auroc"] is not None


@pytest.mark.parametrize("name", ["thesis.txt", "surgical", "report.html"])
def test_the_demo_removes_no_folder_but_a_demos(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("mine", encoding="utf-8")
    assert flwr_sim("demo", "--out", tmp_path).code == 2
    assert (tmp_path / name).exists()


EXPERIMENTS = ROOT / "experiments"
AFTER_A_PAPER = sorted(
    path
    for path in EXPERIMENTS.glob("*/*.toml")
    if path.name not in ("pyproject.toml", "defaults.toml")
    and path.parent.name not in ("benchmark", "ablation", "condistfl")
)


FEWEST_SITES = {"surgical": 4, "nih_chexpert": 2, "nih_chexpert_seven": 2}
"""Folder, or file of a table whose hospitals are two archives -> fewest sites."""
WITHOUT = ("model.weights=none", "model.weights_sha256=none")
NO_WEIGHTS = {"surgical": (*WITHOUT, "method.trunk=fedavg"), "fedmlp": WITHOUT}
"""The data are the same without the weights, which are not in the repository."""


@needs_real_data
@pytest.mark.parametrize("scale", ["small", pytest.param("full", marks=pytest.mark.long)])
@pytest.mark.parametrize("folder", sorted({path.parent.name for path in AFTER_A_PAPER}))
def test_every_row_of_a_papers_table_fits_its_data(folder: str, scale: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # A table of a hundred thousand rows takes seconds to check, and many experiments have the same.
    faults, data_faults = dict[tuple[str, Path], list[Fault]](), simulate.find_dataset_faults

    def checked_once(spec: Any, base: Path) -> list[Fault]:
        key = spec.model_dump_json(), base
        if key not in faults:
            faults[key] = data_faults(spec, base)
        return faults[key]

    monkeypatch.setattr(simulate, "find_dataset_faults", checked_once)
    sites = {}
    for path in sorted((EXPERIMENTS / folder).glob("*.toml"), key=lambda path: same_data_together(path, scale)):
        _, data = check_simulation_experiment(read_experiment(path, [f"scale={scale}", *NO_WEIGHTS.get(folder, ())]))
        sites[path.stem] = len(data.parts)
    usual = FEWEST_SITES.get(folder, 5)
    assert [name for name, count in sites.items() if count < FEWEST_SITES.get(name, usual)] == []


def same_data_together(path: Path, scale: str) -> str:
    """Return a sort key: the loaded data of the last experiment stay, so those of one data set follow one another."""
    experiment = read_experiment(path, [f"scale={scale}"]).experiment
    assert experiment.data is not None
    assert experiment.partition is not None
    return experiment.data.model_dump_json() + experiment.partition.model_dump_json() + str(experiment.run.seed)
