"""The command blocks of the docs run in a shell as they are printed; those of hours in a short form.

Other pages have tests of their own: README, tutorials, recipes, Flower, Python, new methods.
"""

import configparser
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.doc_pages import ROOT, blocks

LONGEST_S = 3600
WITH_DATA = pytest.mark.skipif(not (ROOT.parent / "shared" / "data").is_dir(), reason="../shared/data is absent")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder in which the commands of the docs can be typed: the environment, and a copy of the experiments."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    (folder / ".venv").symlink_to(sys.prefix)
    shutil.copytree(ROOT / "experiments", folder / "experiments")
    (tmp_path / "shared").symlink_to(ROOT.parent / "shared")
    return folder


def typed_in_a_shell(text: str, folder: Path) -> None:
    """Run a block as ``bash`` would, line after line; where a command asks, the person types y."""
    path = os.pathsep.join((str(folder / ".venv" / "bin"), os.environ["PATH"]))
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    options = {"cwd": folder, "env": environment, "capture_output": True, "text": True, "timeout": LONGEST_S}
    done = subprocess.run(["bash", "-e", "-c", f"yes | (\n{text}\n)"], **options)
    assert done.returncode == 0, f"{text}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


@pytest.mark.long
@WITH_DATA
def test_the_commands_of_simulation_run_one_after_the_other(checkout: Path) -> None:
    # Pictures in the form in which the run of the page reads digits.
    classes, random = [str(digit) for digit in range(10)], np.random.default_rng(0)
    (checkout / "scans").mkdir()
    rows = [",".join(("image", *classes))]
    for number in range(40):
        picture = random.integers(0, 255, (8, 8), dtype=np.uint8)
        Image.fromarray(picture).save(checkout / "scans" / f"{number}.png")
        rows.append(",".join((f"{number}.png", *(str(int(number % 10 == digit)) for digit in range(10)))))
    (checkout / "labels.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    block, _ = blocks("simulation")
    typed_in_a_shell(block, checkout)
    assert {"first", "short", "digits", "papers"} <= {path.name for path in (checkout / "runs").iterdir()}
    predicted = (checkout / "predictions.csv").read_text(encoding="utf-8").splitlines()
    assert len(predicted) == 1 + len(list((checkout / "scans").iterdir()))


@pytest.mark.long
def test_the_small_form_of_the_benchmark_runs_and_the_published_one_is_estimated(checkout: Path) -> None:
    small, estimate, _ = blocks("simulation")[1].replace("\\\n", " ").strip().splitlines()
    typed_in_a_shell(f"{small}\n{estimate}", checkout)
    assert list((checkout / "runs" / "benchmark").rglob("*.html"))


RESULTS = [
    line
    for page in ("results", "results-studies")
    for block in blocks(page)
    for line in block.replace("\\\n", " ").splitlines()
]
BENCHMARK = [line for line in RESULTS if "benchmark" in line]
WEIGHTS = "make weights"
RUNS = [line for line in RESULTS if line not in (*BENCHMARK, WEIGHTS)]


@pytest.mark.long
@WITH_DATA
@pytest.mark.parametrize("line", RUNS, ids=[" ".join(shlex.split(line)[1:3]) for line in RUNS])
def test_the_commands_behind_the_results_run_in_a_short_form(line: str, checkout: Path) -> None:
    if any(name in line for name in ("_head.toml", "_imagenet", "experiments/surgical/")):  # `make weights` first
        typed_in_a_shell(".venv/bin/flwr-sim weights weights/efficientnet_lite0.safetensors", checkout)
    line = re.sub(r"--set run\.rounds=\d+", "", re.sub(r"--seeds \d+", "--seeds 1", line))
    short = "--set run.rounds=1"
    if "fedmlp/nih_missing5.toml" in line:  # fedmlp alone: one round of each of its stages
        short = "--set run.rounds=2 --set method.stage_one_rounds=1"
    typed_in_a_shell(f"{line} --quick" if " study " in line else f"{line} {short}", checkout)
    assert list((checkout / "runs").rglob("report.html"))


@pytest.mark.long
@pytest.mark.parametrize("line", BENCHMARK, ids=[shlex.split(line)[-1] for line in BENCHMARK])
def test_the_commands_behind_the_benchmark_run_in_a_short_form(line: str, checkout: Path) -> None:
    (checkout / "benchmarks").symlink_to(ROOT / "benchmarks")
    short = line.replace("--workers 2", "--workers 1 --minutes 0").replace("digits,composites", "digits --rounds 5")
    typed_in_a_shell(short, checkout)


def test_the_unit_of_systemd_is_well_formed_and_its_command_parses() -> None:
    (unit,) = blocks("operations")
    parsed = configparser.ConfigParser()
    parsed.read_string(unit)
    assert set(parsed) == {"DEFAULT", "Unit", "Service", "Install"}
    program, command, *_ = shlex.split(parsed["Service"]["ExecStart"])
    assert (program, command) == ("flwr-server", "run")
