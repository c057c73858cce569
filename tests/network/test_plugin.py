"""A hospital group's own network over real processes: declined where it is not allowed, the same model where it is."""

import json
from pathlib import Path

import pytest

from tests.network.real import Coordinator, exported, flwr_sim, machine, written
from tests.third_parties import install

pytestmark = [pytest.mark.slow, pytest.mark.network]

DIGITS = """
[run]
method = "surgical"
rounds = 2
seed = 3
[model]
architecture = "plugin:stairs"
channels = 1
image_size = 16
[data]
kind = "digits"
image_size = 16
[partition]
kind = "class_subsets"
sites = 2
shared = 2
"""


def test_a_plug_in_is_declined_until_it_is_allowed_and_then_trains_the_model_of_both_simulations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "site-packages", monkeypatch)
    experiment = written(DIGITS, tmp_path)
    with machine(tmp_path / "machine") as here:
        coordinator = Coordinator(here)
        sites = [coordinator.admit(coordinator.site(one)) for one in exported(experiment, here.folder / "data")]
        coordinator.start()
        for site in sites:
            site.start()
        coordinator.sees(*sites)
        declined = coordinator.run(experiment, tmp_path / "declined")
        assert declined.ends() == 1
        assert declined.said.count('declines: policy.networks: it does not have "plugin:stairs"') >= 2
        for site in sites:
            site.end()
            site.edit(site.toml, ("[policy]", '[policy]\nnetworks = ["plugin:stairs"]'))
            site.start()
        coordinator.sees(*sites)
        run = coordinator.run(experiment, tmp_path / "run")
        assert run.ends() == 0, run.said
    hashes = {json.loads((tmp_path / "run" / "summary.json").read_text())["model_sha256"]}
    for backend in ("inline", "ray"):
        done = flwr_sim("run", experiment, "--backend", backend, "--out", tmp_path / backend)
        assert done.code == 0, done.err
        hashes.add(json.loads((tmp_path / backend / "summary.json").read_text())["model_sha256"])
    assert len(hashes) == 1
