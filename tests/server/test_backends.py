"""One federation, three ways to run it, the same model bit for bit."""

from pathlib import Path

import pytest

from common.config import SimulationSection
from server.simulation.backends import choose_workers
from tests.federations import federation


@pytest.mark.slow
def test_ray_with_one_and_with_two_workers_gives_the_inline_model_bit_for_bit(tmp_path: Path) -> None:
    inline = federation(tmp_path, out="inline")
    one = federation(tmp_path, 'simulation.backend="ray"', "simulation.workers=1", out="one")
    two = federation(tmp_path, 'simulation.backend="ray"', "simulation.workers=2", out="two")
    assert (inline["backend"], one["backend"]) == ("inline", "ray")
    assert inline["model_sha256"] == one["model_sha256"] == two["model_sha256"]
    assert inline["test"] == one["test"]
    assert not (tmp_path / "one" / "images").exists()  # what the workers read is gone with them


def test_workers_are_chosen_by_what_is_there_and_never_more_than_sites() -> None:
    assert choose_workers(SimulationSection(gpus_per_site=0), sites=1, threads=1).count == 1
    assert choose_workers(SimulationSection(gpus_per_site=0, workers=7), sites=20, threads=1).count == 7
    assert choose_workers(SimulationSection(gpus_per_site=0), sites=1000, threads=10_000).count == 1
