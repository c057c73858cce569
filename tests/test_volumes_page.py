"""docs/volumes.md: its bodies are drawn, its commands run as they stand, and its keys are an experiment's."""

import csv
import shlex
import tomllib
from pathlib import Path

import numpy as np
import pytest

import polyclinic.studies.cli
from polyclinic.common.config import read_experiment
from polyclinic.common.models.zoo.spec import ModelSpec
from polyclinic.data.base.spec import FolderDatasetSpec
from tests.doc_pages import blocks, lines
from tests.network.real import typed

PAGE = "volumes"


def test_the_page_draws_bodies_and_its_commands_train_and_predict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("polyclinic.server.federation.set_up.write_run_pages", lambda *arguments, **options: None)
    (script,) = blocks(PAGE, "python")
    exec(compile(script, "docs/volumes.md", "exec"), {})
    init, run, predict = lines(PAGE)
    for program, *words in (init, [*run, "--set", "run.rounds=2"], predict):
        assert program == "flwr-sim"
        ended = typed(polyclinic.studies.cli.main, *words)
        assert ended.code == 0, ended.out + ended.err
    written = read_experiment(tmp_path / "bodies.toml").experiment
    assert written.model.image_size == (32, 32, 32)  # 24 voxels of 12 mm are 32 of 9 mm
    with (tmp_path / "scores.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 120
    assert np.isfinite([float(row["Fluid"]) for row in rows]).all()


def test_the_keys_of_the_page_are_those_of_an_experiment() -> None:
    (block,) = blocks(PAGE, "toml")
    tables = tomllib.loads(block)
    model = ModelSpec.model_validate(tables["model"])
    files = {"images": "a", "labels": "b", "image_column": "c", "label_columns": ["d"]}
    data = FolderDatasetSpec.model_validate(tables["data"] | files)
    assert model.image_size == data.image_size == (48, 64, 64)
    assert data.spacing == (3, 1.5, 1.5)


def test_the_measurements_of_the_page_name_a_program_that_is_there() -> None:
    text = (Path(__file__).parents[1] / "docs" / "volumes.md").read_text(encoding="utf-8")
    commands = [shlex.split(line) for line in text.splitlines() if line.startswith("    PYTHONPATH=.")]
    assert commands
    assert all((Path(__file__).parents[1] / words[2]).is_file() for words in commands)
