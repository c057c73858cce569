"""When a hospital leaves, the coordinator learns which runs and models hold something of it."""

import json
import shutil
from functools import cache
from pathlib import Path

import pytest

from polyclinic.server.runs.affected import AffectedRun, find_traces_of_site
from tests.federations import DIGITS, temporary_folder
from tests.network.real import flwr_sim

PARTITION = """
[partition]
kind = "missing_classes"
missing = 0
sites = {sites}
"""


@cache
def runs() -> Path:
    """A run of three sites, one that begins with its model at two other sites, and one that has nothing of either."""
    folder = temporary_folder("polyclinic-leaving-")
    for sites in (2, 3):
        (folder / f"{sites}.toml").write_text(DIGITS.split("[partition]")[0] + PARTITION.format(sites=sites))
    for name, sites, *options in (
        ("first", 3, "--set", "run.rounds=3"),
        ("second", 2, "--set", f"model.weights={folder / 'first'}"),
        ("third", 2, "--set", f"model.weights={folder / 'second'}"),
        ("other", 2),
    ):
        ended = flwr_sim("run", folder / f"{sites}.toml", "--out", folder / name, *options)
        assert ended.code == 0, ended.out
    return folder


ALL = ("first", "second", "third", "other")


def affected(site: str, *names: str) -> dict[str, AffectedRun]:
    traces = find_traces_of_site(site, [runs() / name for name in names])
    assert traces.unreadable == {}
    assert len(traces.affected) + len(traces.unaffected) == len(names)
    return {Path(run.folder).name: run for run in traces.affected}


def test_a_model_that_began_with_an_affected_model_is_affected_too_over_several_runs() -> None:
    found = affected("site-3", *ALL)
    assert list(found) == ["first", "second", "third"]
    assert [Path(run.began_from).name for run in found.values()] == ["", "first", "second"]
    assert [run.rounds for run in found.values()] == [(1, 2, 3), (), ()]
    assert found["first"].describe() == "trained in rounds 1 to 3"
    assert found["first"].other_sites == ("site-1", "site-2")
    summary = json.loads((runs() / "third" / "summary.json").read_text())
    assert found["third"].model_sha256 == summary["model_sha256"]


def test_a_site_that_trained_in_each_run_is_in_all_of_them_and_a_stranger_in_none() -> None:
    assert list(affected("site-1", *ALL)) == list(ALL)
    assert affected("site-9", *ALL) == {}


def test_a_run_that_has_not_ended_is_affected_by_its_audit(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(runs() / "first", folder)
    for name in ("receipt.json", "model.json", "model.safetensors"):
        (folder / name).unlink()
    (run,) = find_traces_of_site("site-3", [folder]).affected
    assert (run.rounds, run.model_sha256) == ((1, 2, 3), "")


@pytest.mark.parametrize("name", ["receipt.json", "model.json"])
def test_a_run_whose_files_are_damaged_is_named_and_not_passed_over(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "run"
    shutil.copytree(runs() / "first", folder)
    (folder / name).write_text("{}")
    traces = find_traces_of_site("site-3", [folder, tmp_path / "gone"])
    assert traces.affected == ()
    assert list(traces.unreadable) == [str(folder), str(tmp_path / "gone")]
    assert name in traces.unreadable[str(folder)]


def test_rounds_after_the_one_of_the_final_model_do_not_count(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(runs() / "first", folder)
    receipt = json.loads((folder / "receipt.json").read_text())
    for line in receipt["rounds"][:2]:
        del line["sites"]["site-3"]
    receipt["result_round"] = 2
    (folder / "receipt.json").write_text(json.dumps(receipt))
    assert find_traces_of_site("site-3", [folder]).affected == ()
