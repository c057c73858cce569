"""One federation, three ways to run it, the same model bit for bit."""

from pathlib import Path

import pytest

from common.config import SimulationSection
from server.simulation.backends import choose_workers
from tests.federations import federation


@pytest.mark.slow
@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.long), 2])
def test_ray_gives_the_inline_model_bit_for_bit(workers: int, tmp_path: Path) -> None:
    inline = federation(tmp_path, out="inline")
    on_ray = federation(tmp_path, 'simulation.backend="ray"', f"simulation.workers={workers}", out="ray")
    assert (inline["backend"], on_ray["backend"]) == ("inline", "ray")
    assert inline["model_sha256"] == on_ray["model_sha256"]
    assert inline["test"] == on_ray["test"]
    assert not (tmp_path / "ray" / "images").exists()  # what the workers read is gone with them


def test_workers_are_chosen_by_what_is_there_and_never_more_than_sites() -> None:
    assert choose_workers(SimulationSection(gpus_per_site=0), sites=1, threads=1).count == 1
    assert choose_workers(SimulationSection(gpus_per_site=0, workers=7), sites=20, threads=1).count == 7
    assert choose_workers(SimulationSection(gpus_per_site=0), sites=1000, threads=10_000).count == 1
