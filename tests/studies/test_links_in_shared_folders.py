"""A folder that somebody hands out holds links; nothing that a person runs in it writes through one.

The programs run as processes of their own, in a folder of the author below the person's home.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.processes import environment
from tests.studies.shared_experiments import DIGITS, EXPERIMENT, PROGRAM, STOPPED, Ended

OWN = "years of work\n"
FOLDER_DATA = """\
[data]
kind = "folder"
images = "images"
labels = "labels.csv"
image_column = "file"
label_columns = ["Mass", "Fluid"]
image_size = 16
"""
BENCHMARK = """\
title = "B"
reference = "fedavg"
learning_rates = [1e-3]
tuning_seed = 1000
[[data]]
name = "digits"
title = "P"
[[methods]]
name = "fedavg"
[[patterns]]
name = "p"
title = "p"
sites = 2
set = ['kind="missing_classes"', "missing=0"]
[forms.small]
title = "small"
rounds = 1
seeds = 1
blocks = [["digits", "p"]]
"""


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder of the author below the person's home, in which the person works."""
    folder = tmp_path / "home" / "shared"
    folder.mkdir(parents=True)
    return folder


def run(shared: Path, *words: str) -> Ended:
    """Run flwr-sim in the folder of the author, without a terminal."""
    own = {"HOME": str(shared.parent), "XDG_CACHE_HOME": str(shared.parent / "cache")}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words],
        cwd=shared,
        env=environment() | own,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )
    return Ended(ended.returncode, ended.stdout + ended.stderr)


def link(place: Path, target: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.unlink(missing_ok=True)
    place.symlink_to(os.path.relpath(target, place.parent))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An experiment of the author, with an image cache beside it that he has filled."""
    shared = tmp_path_factory.mktemp("author") / "shared"
    (shared / "images").mkdir(parents=True)
    lines = ["file,Mass,Fluid"]
    for number in range(300):  # files of 20 MB: fewer are decoded into memory
        pixels = np.full((256, 256), 65 + number % 25, np.uint8)
        pixels[0, 0], pixels[0, 1] = divmod(number, 256)
        Image.fromarray(pixels).save(shared / "images" / f"{number:03}.png", compress_level=0)
        lines.append(f"{number:03}.png,{number % 2},{number // 2 % 2}")
    (shared / "labels.csv").write_text("\n".join(lines), encoding="utf-8")
    text = EXPERIMENT.replace('backend = "inline"', 'backend = "inline"\nimage_cache = "cache"') + FOLDER_DATA
    (shared / "e.toml").write_text(text.replace("image_size = 16", "image_size = 256"), encoding="utf-8")
    ended = run(shared, "sites", "e.toml", "--out", "his")
    assert ended.code == 0, ended.text
    return shared


@pytest.mark.parametrize("name", ["pixels", "rows", "lock", "in_use", "form.json", "CACHEDIR.TAG"])
def test_no_link_in_an_image_cache_of_the_author_is_written_through(prepared: Path, shared: Path, name: str) -> None:
    shutil.copytree(prepared, shared, dirs_exist_ok=True)
    folder = next((shared / "cache").rglob("pixels")).parent
    for file in folder.iterdir():
        if file.name != "CACHEDIR.TAG":
            file.unlink()
    target = shared.parent / ".bash_profile"
    link(folder / name, target)
    ended = run(shared, "sites", "e.toml", "--out", "mine")
    assert not target.exists(), target.read_bytes()[:80]
    assert ended.code == 0, ended.text  # without the cache


def test_an_image_cache_that_is_a_link_to_a_folder_on_another_disk_goes_on_working(
    prepared: Path, shared: Path
) -> None:
    shutil.copytree(prepared, shared, dirs_exist_ok=True, ignore=shutil.ignore_patterns("cache"))
    (shared.parent / "disk").mkdir()
    (shared / "cache").symlink_to(shared.parent / "disk")
    ended = run(shared, "sites", "e.toml", "--out", "mine")
    assert ended.code == 0, ended.text
    assert next((shared.parent / "disk").rglob("pixels")).stat().st_size >= 300 * 256 * 256


@pytest.mark.parametrize("there", [True, False])
def test_results_of_a_benchmark_are_not_appended_to_what_a_link_names(shared: Path, there: bool) -> None:
    target = shared.parent / ".bash_profile"
    if there:
        target.write_text(OWN, encoding="utf-8")
    link(shared / "runs" / "benchmark" / "small.jsonl", target)
    (shared / "digits.toml").write_text(DIGITS, encoding="utf-8")
    (shared / "benchmark.toml").write_text(BENCHMARK, encoding="utf-8")
    ended = run(shared, "benchmark", ".")
    assert ended.code == STOPPED, ended.text
    assert "link" in ended.text
    assert (target.read_text(encoding="utf-8") if target.exists() else None) == (OWN if there else None)


@pytest.mark.parametrize("name", [".lock", "comparison.md", "comparison.json", "report.html"])
def test_a_comparison_empties_and_overwrites_no_file_that_a_link_names(shared: Path, name: str) -> None:
    target = shared.parent / "thesis.tex"
    target.write_text(OWN, encoding="utf-8")
    link(shared / "runs" / name, target)
    (shared / "e.toml").write_text(DIGITS, encoding="utf-8")
    ended = run(shared, "compare", "e.toml", "--seeds", "1", "--out", "runs")
    assert target.read_text(encoding="utf-8") == OWN, ended.text
    assert ended.code == (STOPPED if name == ".lock" else 0), ended.text  # a whole file replaces the link


def test_a_page_of_a_benchmark_overwrites_no_file_that_a_link_names(shared: Path) -> None:
    target = shared.parent / "thesis.tex"
    target.write_text(OWN, encoding="utf-8")
    link(shared / "out" / "benchmark.md", target)
    (shared / "digits.toml").write_text(DIGITS, encoding="utf-8")
    (shared / "benchmark.toml").write_text(BENCHMARK, encoding="utf-8")
    ended = run(shared, "benchmark", ".", "--minutes", "0", "--out", "out")
    assert ended.code == 0, ended.text
    assert target.read_text(encoding="utf-8") == OWN


@pytest.mark.parametrize("name", ["events.jsonl", "rounds.jsonl"])
def test_an_interrupted_run_of_the_author_goes_on_into_no_file_that_a_link_names(shared: Path, name: str) -> None:
    (shared / "e.toml").write_text(DIGITS, encoding="utf-8")
    assert run(shared, "run", "e.toml", "--out", "run").code == 0
    (shared / "run" / "summary.json").unlink()
    target = shared.parent / "thesis.jsonl"
    lines = (shared / "run" / name).read_text(encoding="utf-8")
    target.write_text(lines, encoding="utf-8")
    link(shared / "run" / name, target)
    ended = run(shared, "run", "e.toml", "--out", "run", "--set", "run.rounds=2", "--resume")
    assert target.read_text(encoding="utf-8") == lines, ended.text


def test_runs_that_are_a_link_to_a_folder_on_another_disk_go_on_working(shared: Path) -> None:
    (shared.parent / "disk").mkdir()
    (shared / "runs").symlink_to(shared.parent / "disk")
    (shared / "e.toml").write_text(DIGITS, encoding="utf-8")
    ended = run(shared, "compare", "e.toml", "--seeds", "1", "--out", "runs")
    assert ended.code == 0, ended.text
    assert (shared.parent / "disk" / "comparison.md").is_file()
