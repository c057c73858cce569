"""A simulation has no site.toml and no hospitals: faults name the tables of its experiment."""

from pathlib import Path

from tests.federations import DIGITS
from tests.network.real import flwr_sim


def test_a_simulation_names_the_experiments_own_tables_once(tmp_path: Path) -> None:
    experiment = tmp_path / "experiment.toml"
    experiment.write_text(f"{DIGITS}\n[pixels]\nimage_size = 20\n", encoding="utf-8")
    ended = flwr_sim("run", experiment, "--out", tmp_path / "run")
    assert ended.code == 2
    assert ended.err.count("data.image_size: its images become other pixels than the run's") == 1
    assert "This line under [data] of the experiment settles it:\n    image_size = 20" in ended.err
    assert "site.toml" not in ended.err


def test_members_of_a_run_are_hospitals_and_no_simulated_sites(tmp_path: Path) -> None:
    experiment = tmp_path / "experiment.toml"
    experiment.write_text(f'{DIGITS}\n[participation]\nsites = ["site-1"]\n', encoding="utf-8")
    ended = flwr_sim("run", experiment, "--out", tmp_path / "run")
    assert ended.code == 2
    assert "participation.sites: names hospitals" in ended.err
    ended = flwr_sim("run", experiment, "--out", tmp_path / "run", "--set", "participation.sites=[]")
    assert ended.code == 0, ended.err
