"""What a researcher types, typed: run, predict, evaluate, compare, demo."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from common.data.base.spec import DigitsSpec
from common.data.load import load
from server.reporting.run_claims import prominent_limits
from server.runs.reader import read_run
from tests.common.data.dicom_files import dicom
from tests.common.data.nifti_files import write
from tests.federations import DIGITS
from tests.server.commands import flwr_sim, needs_real_data

ROOT = Path(__file__).parents[2]
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on digits, made by the command."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "digits.toml").write_text(DIGITS, encoding="utf-8")
    from studies.cli import main

    with pytest.raises(SystemExit, match="0"):
        main(["run", str(folder / "digits.toml"), "--out", str(folder / "run"), "--set", "run.rounds=3"])
    return folder


def test_predict_names_every_image_and_says_which_cannot_be_read(
    finished: Path, capsys: Capture, tmp_path: Path
) -> None:
    (tmp_path / "pictures").mkdir()
    for row, pixels in enumerate(load(DigitsSpec(kind="digits"), Path()).test.images[:3]):
        Image.fromarray(pixels).save(tmp_path / "pictures" / f"{row}.png")
    (tmp_path / "pictures" / "broken.png").write_bytes(b"\x89PNG and no more")
    ended = flwr_sim(capsys, "predict", finished / "run", tmp_path / "pictures", "--out", tmp_path / "p.csv")
    rows = list(csv.DictReader((tmp_path / "p.csv").read_text(encoding="utf-8").splitlines()))
    assert ended.code == 0
    assert "3 images -> " in ended.out
    assert "1 could not be read" in ended.out
    assert [row["image"] for row in rows] == ["0.png", "1.png", "2.png", "broken.png"]
    assert all(0 < float(row["7"]) < 1 for row in rows[:3])
    assert rows[3]["7"] == ""
    assert rows[3]["unreadable"]


def test_predict_says_what_limits_a_runs_model_and_nothing_of_a_model_alone(
    finished: Path, capsys: Capture, tmp_path: Path
) -> None:
    told = prominent_limits(read_run(finished / "run"))
    assert told
    Image.fromarray(load(DigitsSpec(kind="digits"), Path()).test.images[0]).save(tmp_path / "0.png")
    ended = flwr_sim(capsys, "predict", finished / "run", tmp_path / "0.png", "--out", tmp_path / "p.csv")
    assert all(text in " ".join(ended.out.split()) for text in told)
    (tmp_path / "model").mkdir()
    for name in ("model.json", "model.safetensors"):
        (tmp_path / "model" / name).write_bytes((finished / "run" / name).read_bytes())
    alone = flwr_sim(capsys, "predict", tmp_path / "model", tmp_path / "0.png", "--out", tmp_path / "q.csv")
    assert (alone.code, "!" in alone.out) == (0, False)


def test_predict_takes_the_frame_and_the_slice_that_are_named(finished: Path, capsys: Capture, tmp_path: Path) -> None:
    digits = load(DigitsSpec(kind="digits"), Path()).test.images[:3]  # (3, 8, 8)
    (tmp_path / "scans").mkdir()
    elements = {"BitsAllocated": 8, "BitsStored": 8, "HighBit": 7, "WindowCenter": 128, "WindowWidth": 256}
    (tmp_path / "scans" / "frames.dcm").write_bytes(dicom(digits, NumberOfFrames=3, **elements))
    write(tmp_path / "scans" / "volume.nii.gz", np.stack([digit[::-1, ::-1].T for digit in digits], axis=2))
    Image.fromarray(digits[1]).save(tmp_path / "scans" / "second.png")
    options = ("--frame", "2", "--window", "128,256")
    ended = flwr_sim(capsys, "predict", finished / "run", tmp_path / "scans", "--out", tmp_path / "p.csv", *options)
    assert ended.code == 0, ended.out
    rows = list(csv.DictReader((tmp_path / "p.csv").read_text(encoding="utf-8").splitlines()))
    assert [row["image"] for row in rows] == ["frames.dcm", "second.png", "volume.nii.gz"]
    assert [row["unreadable"] for row in rows] == [""] * 3
    assert len({row["7"] for row in rows}) == 1


def test_options_of_predict_that_cannot_be_understood_are_all_named(finished: Path, capsys: Capture) -> None:
    options = ("--frame", "first", "--axis", "up", "--window", "40")
    ended = flwr_sim(capsys, "predict", finished / "run", finished, "--out", finished / "no.csv", *options)
    assert ended.code == 2
    for words in (
        '--frame first: expected a number from 1, or "middle"',
        "--axis up: expected axial",
        "--window 40: exp",
    ):
        assert words in ended.out + ended.err


def test_predict_writes_nothing_over(finished: Path, capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text("mine", encoding="utf-8")
    ended = flwr_sim(capsys, "predict", finished / "run", tmp_path, "--out", tmp_path / "p.csv")
    assert ended.code == 2
    assert (tmp_path / "p.csv").read_text(encoding="utf-8") == "mine"


def test_evaluate_on_the_experiments_own_test_part_gives_the_runs_own_figures(finished: Path, capsys: Capture) -> None:
    ended = flwr_sim(capsys, "evaluate", finished / "run", finished / "digits.toml")
    summary = json.loads((finished / "run" / "summary.json").read_text(encoding="utf-8"))
    assert ended.code == 0
    assert f"{summary['test']['mean_auroc']:.3f}" in ended.out


def test_evaluate_on_an_npz_and_on_a_csv_needs_only_the_model_and_the_files(
    finished: Path, capsys: Capture, tmp_path: Path
) -> None:
    test = load(DigitsSpec(kind="digits"), Path()).test
    labels = test.labels.argmax(1)[:, None].astype(np.uint8)
    arrays = {f"{part}_images": test.images for part in ("train", "val", "test")}
    np.savez(tmp_path / "d.npz", **arrays, train_labels=labels, val_labels=labels, test_labels=labels)
    by_npz = flwr_sim(capsys, "evaluate", finished / "run", tmp_path / "d.npz", "--classes", ",".join("0123456789"))
    lines = ["image,3"]
    for row, pixels in enumerate(test.images):
        Image.fromarray(pixels).save(tmp_path / f"{row}.png")
        lines.append(f"{row}.png,{int(labels[row, 0] == 3)}")
    (tmp_path / "labels.csv").write_text("\n".join(lines), encoding="utf-8")
    by_csv = flwr_sim(capsys, "evaluate", finished / "run", tmp_path / "labels.csv")
    auroc = json.loads((finished / "run" / "summary.json").read_text(encoding="utf-8"))["test"]["per_class"]["3"][
        "auroc"
    ]
    assert (by_npz.code, by_csv.code) == (0, 0)
    assert f"{auroc:.3f}" in by_npz.out
    assert f"{auroc:.3f}" in by_csv.out


def test_compare_runs_all_keeps_what_is_there_and_tests_in_pairs(
    finished: Path, capsys: Capture, tmp_path: Path
) -> None:
    (tmp_path / "a.toml").write_text(DIGITS, encoding="utf-8")
    (tmp_path / "b.toml").write_text('extends = "a.toml"\n[run]\nmethod = "vanilla"\n', encoding="utf-8")
    command = (
        "compare",
        tmp_path / "a.toml",
        tmp_path / "b.toml",
        "--seeds",
        2,
        "--jobs",
        2,
        "--out",
        tmp_path / "out",
    )
    first = flwr_sim(capsys, *command)
    again = flwr_sim(capsys, *command)
    assert (first.code, again.code) == (0, 0), first.err
    assert "4 of 4 runs are there already." in again.out
    comparison = json.loads((tmp_path / "out" / "comparison.json").read_text(encoding="utf-8"))
    assert [method["label"] for method in comparison["methods"]] == ["surgical", "vanilla"]
    assert (tmp_path / "out" / "report.html").stat().st_size > 10_000


def test_compare_refuses_a_folder_of_another_experiment(finished: Path, capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(DIGITS, encoding="utf-8")
    (tmp_path / "out" / "a-seed0").mkdir(parents=True)
    (tmp_path / "out" / "a-seed0" / "mine.txt").write_text("mine", encoding="utf-8")
    ended = flwr_sim(capsys, "compare", tmp_path / "a.toml", "--seeds", 1, "--out", tmp_path / "out")
    assert ended.code == 2
    assert "holds another experiment, and nothing is written over" in ended.err


def test_compare_refuses_experiments_that_tables_could_not_tell_apart(capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(DIGITS, encoding="utf-8")
    (tmp_path / "b.toml").write_text('extends = "a.toml"\n[method]\nwarm_up_epochs = 1\n', encoding="utf-8")
    ended = flwr_sim(capsys, "compare", tmp_path / "a.toml", tmp_path / "b.toml", "--out", tmp_path / "out")
    assert ended.code == 2
    assert 'run.name: "surgical" is the name of "a.toml", "b.toml". Give each its own [run] name.' in ended.err


def test_compare_refuses_a_seed_that_it_would_overrule(capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(DIGITS, encoding="utf-8")
    ended = flwr_sim(capsys, "compare", tmp_path / "a.toml", "--out", tmp_path / "out", "--set", "run.seed=7")
    assert ended.code == 2
    assert "--set run.seed: is settled by --seeds." in ended.err


@needs_real_data
@pytest.mark.parametrize("name", ["nih_surgical", "nih_folder", "ham10000_surgical", "mnist_surgical"])
def test_the_projects_experiments_run_on_real_images(name: str, capsys: Capture, tmp_path: Path) -> None:
    small = ("--set", "run.rounds=1", "--set", "model.architecture=tiny_cnn", "--set", "model.image_size=16")
    file = ROOT / "experiments" / f"{name}.toml"
    ended = flwr_sim(capsys, "run", file, "--backend", "inline", "--out", tmp_path / "run", *small)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert ended.code == 0, ended.err
    assert summary["test"]["mean_auroc"] is not None


@pytest.mark.parametrize("name", ["thesis.txt", "surgical", "report.html"])
def test_the_demo_removes_no_folder_but_a_demos(name: str, capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / name).write_text("mine", encoding="utf-8")
    ended = flwr_sim(capsys, "demo", "--out", tmp_path)
    assert ended.code == 2
    assert (tmp_path / name).exists()
