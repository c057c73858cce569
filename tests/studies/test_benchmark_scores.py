"""Scores of the benchmark's runs as files: others compute the published figures from them."""

import csv
import gzip
import subprocess
from pathlib import Path

import pytest
from rich.console import Console
from sklearn.metrics import roc_auc_score

from polyclinic.server.runs.reader import read_run
from polyclinic.server.simulation.simulate import simulate
from polyclinic.studies.benchmark_file import BenchmarkVariantPlan, PlannedRun
from polyclinic.studies.benchmark_results import find_git_commit, make_benchmark_result_line
from polyclinic.studies.benchmark_scores import write_test_scores
from tests.studies.published_runs import FOLDER


def planned_run(method: str) -> PlannedRun:
    plan = BenchmarkVariantPlan.read_benchmark_variant(FOLDER, "small")
    row = next(each for each in plan.variant_methods if each.label == method)
    return plan.make_planned_run("digits", "shared5", row, 3e-3, 0)


def read_table(path: Path) -> list[dict[str, str]]:
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_figures_of_a_line_can_be_computed_from_the_files_of_scores(tmp_path: Path) -> None:
    planned = planned_run("surgical")
    simulate(planned.experiment_file, tmp_path / "run", Console(quiet=True), pages=False)
    assert write_test_scores(planned, tmp_path / "run", tmp_path / "scores")
    line = make_benchmark_result_line(planned, read_run(tmp_path / "run"), 1.0)
    scores = read_table(tmp_path / "scores" / f"{planned.results_key}.csv.gz")
    labels = read_table(tmp_path / "scores" / "labels-digits.csv.gz")
    assert [row["image"] for row in scores] == [row["image"] for row in labels]
    assert all(row["patient"] for row in labels)
    assert len(line.classes) == 10
    for name, result in line.classes.items():
        truth, score = [int(row[name]) for row in labels], [float(row[name]) for row in scores]
        assert sum(truth) == result.positives
        assert roc_auc_score(truth, score) == pytest.approx(result.auroc, abs=2e-4)  # six decimals tie a few scores


def test_sites_that_keep_models_of_their_own_have_no_scores(tmp_path: Path) -> None:
    planned = planned_run("individual")
    simulate(planned.experiment_file, tmp_path / "run", Console(quiet=True), pages=False)
    assert not write_test_scores(planned, tmp_path / "run", tmp_path / "scores")
    assert not (tmp_path / "scores").exists()


def test_a_line_names_the_commit_of_the_checkout(tmp_path: Path) -> None:
    """As git itself prints it: on a branch, in a further work tree, without a branch, and with packed references."""

    def git(*words: str, at: Path) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(["git", *identity, *words], cwd=at, check=True, capture_output=True, text=True).stdout

    repository, further = tmp_path / "repository", tmp_path / "further"
    repository.mkdir()
    git("init", "-q", at=repository)
    git("commit", "-q", "--allow-empty", "-m", "first", at=repository)
    git("worktree", "add", "-q", str(further), at=repository)
    git("commit", "-q", "--allow-empty", "-m", "second", at=further)
    checkouts = {path: git("rev-parse", "HEAD", at=path).strip() for path in (repository, further)}
    assert len(set(checkouts.values())) == 2
    read = find_git_commit.__wrapped__
    assert {path: read(path) for path in checkouts} == checkouts
    git("pack-refs", "--all", at=repository)
    assert {path: read(path) for path in checkouts} == checkouts
    git("checkout", "-q", "--detach", at=further)
    assert {path: read(path) for path in checkouts} == checkouts
    assert read(tmp_path) == ""
