"""A simulation counts known labels before it trains: classes of one label, and images without any."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from polyclinic.server.reporting.run_claims import list_further_limitations, list_prominent_limitations
from polyclinic.server.runs.reader import read_run
from tests.network.real import flwr_sim
from tests.server.commands import Ended


def made(folder: Path, cells: Sequence[str], count: int, header: str = "file,patient,Fluid,Mass") -> Path:
    """Write pictures, a table whose lines have these labels in turn, and its experiment; return the table."""
    (folder / "scans").mkdir()
    lines = [header]
    for number in range(count):
        Image.fromarray(np.full((20, 20), number, np.uint8)).save(folder / "scans" / f"{number:03}.png")
        lines.append(f"{number:03}.png,p{number},{cells[number % len(cells)]}")
    path = folder / "labels.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    ended = flwr_sim("init", path, "--out", folder / "mine.toml")
    assert ended.code == 0, ended.err
    return path


def ran(path: Path, *settings: str) -> Ended:
    """Run the experiment of a table for two rounds."""
    options = [part for setting in ("run.rounds=2", *settings) for part in ("--set", setting)]
    return flwr_sim("run", path.parent / "mine.toml", "--out", path.parent / "run", "--backend", "inline", *options)


@pytest.fixture
def marked(tmp_path: Path) -> Path:
    """A table of two columns of 1 and blank, and its experiment."""
    return made(tmp_path, ("1,", ",1", "1,1"), 60)


def test_classes_without_any_negative_are_said_before_training_with_the_line_to_write(marked: Path) -> None:
    ended = ran(marked)
    assert ended.code == 0, ended.err
    text = " ".join(ended.out.split())
    said = text.index('NO CLASS WILL HAVE AN AUROC. Every known label of "Fluid", "Mass" says present')
    assert said < text.index("none of 2 classes has an AUROC")
    assert 'write blank = "negative" in [data]' in text
    limits = list_prominent_limitations(read_run(marked.parent / "run"))
    assert any("says present" in limit for limit in limits)
    assert not any("more rounds" in limit for limit in limits)


def test_the_line_to_write_gives_the_run_an_auroc(marked: Path) -> None:
    ended = ran(marked, 'data.blank="negative"')
    assert ended.code == 0, ended.err
    assert "says present" not in ended.out
    assert read_run(marked.parent / "run").summary.test.mean_auroc is not None


def test_images_without_a_known_label_are_counted_apart(tmp_path: Path) -> None:
    ended = ran(made(tmp_path, ("1,0", "0,1", "0,0", ","), 80))
    assert ended.code == 0, ended.err
    run = read_run(tmp_path / "run")
    (sentence,) = [each for each in list_further_limitations(run) if "have no known label" in each]
    assert sentence in " ".join(ended.out.split())
    training = sum(site.train_samples or 0 for site in run.summary.sites.values())
    assert f" of {training} training images" in sentence
    tested = run.summary.test.per_class["Fluid"].images
    assert tested is not None
    unlabelled, every = (int(word) for word in sentence.split(" and ")[1].split() if word.isdigit())
    assert every - unlabelled == tested


@pytest.mark.parametrize(("cell", "is_said"), [("0", True), ("", False)])
def test_init_says_where_no_label_is_missing_and_methods_give_one_model(
    cell: str, is_said: bool, tmp_path: Path
) -> None:
    labels = [
        f"{hospital},{number % 2},{number // 2 % 2 if hospital == 'North' else cell}"
        for number in range(4)
        for hospital in ("North", "South")
    ]
    path = made(tmp_path, labels, 80, "file,patient,hospital,Fluid,Mass")
    ended = flwr_sim("init", path, "--out", tmp_path / "again.toml")
    assert ("surgical and vanilla train the same model here" in " ".join(ended.out.split())) == is_said
    if is_said:
        hashes = [model_of(path, tmp_path / method, f'run.method="{method}"') for method in ("surgical", "vanilla")]
        assert hashes[0] == hashes[1]


def model_of(path: Path, out: Path, setting: str) -> str | None:
    """Run the experiment of a table for a round; return the hash of its model."""
    options = ("--backend", "inline", "--set", "run.rounds=1", "--set", setting)
    ended = flwr_sim("run", path.parent / "mine.toml", "--out", out, *options)
    assert ended.code == 0, ended.err
    return read_run(out).summary.model_sha256


def outlined(folder: Path) -> Path:
    """Write pictures of two hospitals with masks, of which those of south never show the liver; return the file."""
    rows = ["file,patient,hospital,mask"]
    for number in range(40):
        hospital = ("north", "south")[number % 2]
        values = np.zeros((16, 16), np.uint8)
        values[2:6, 2:6] = 1 if hospital == "north" else 0
        values[9:13, 9:13] = 2
        Image.fromarray(values).save(folder / f"m{number}.png")
        Image.fromarray(values * 90 + np.uint8(number)).save(folder / f"p{number}.png")
        rows.append(f"p{number}.png,p{number},{hospital},m{number}.png")
    (folder / "labels.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    path = folder / "organs.toml"
    path.write_text(
        """
[run]
method = "surgical"
rounds = 1
[model]
task = "segmentation"
architecture = "tiny_unet"
channels = 1
image_size = 16
[data]
kind = "folder"
labels = "labels.csv"
images = "."
image_column = "file"
patient_column = "patient"
source_column = "hospital"
mask_column = "mask"
mask_values = { Liver = 1, Kidney = 2 }
image_size = 16
[partition]
kind = "class_lists"
images = "source"
lists = { north = ["Liver", "Kidney"], south = ["Liver", "Kidney"] }
""",
        encoding="utf-8",
    )
    return path


@pytest.mark.parametrize("claims", [True, False])
def test_an_organ_that_a_site_annotates_and_never_shows_is_said(claims: bool, tmp_path: Path) -> None:
    path = outlined(tmp_path)
    if not claims:
        path.write_text(path.read_text().replace('south = ["Liver", "Kidney"]', 'south = ["Kidney"]'))
    ended = flwr_sim("run", path, "--out", tmp_path / "run", "--backend", "inline")
    assert ended.code == 0, ended.err
    sentence = 'south annotates "Liver", and none of its training masks show it'
    assert (sentence in " ".join(ended.out.split())) == claims
    assert "north annotates" not in ended.out
