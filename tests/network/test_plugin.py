"""A hospital group's own network, loss, data and metric over real processes: declined until allowed, then one model."""

import json
from pathlib import Path

import pytest

from tests.network.real import Coordinator, Site, exported, flwr_sim, machine, written
from tests.third_parties import install

pytestmark = [pytest.mark.slow, pytest.mark.network]

STRIPES = """
[run]
method = "surgical"
rounds = 2
seed = 3
[model]
architecture = "plugin:stairs"
channels = 1
image_size = 16
[training]
loss = "plugin:absolute"
[evaluation]
metrics = ["plugin:youden"]
[data]
kind = "plugin"
name = "stripes"
options = { images = 800 }
[partition]
kind = "class_lists"
lists = { east = ["horizontal", "vertical"], north = ["vertical"] }
"""


def begin_anew(sites: list[Site], policy: str) -> None:
    """Stop the sites, allow something more, start them again."""
    for site in sites:
        site.end()
        site.edit(site.toml, ("[policy]", f"[policy]\n{policy}"))
        site.start()


def test_a_plug_in_is_declined_until_it_is_allowed_and_then_trains_the_model_of_both_simulations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "site-packages", monkeypatch)
    experiment = written(STRIPES, tmp_path)
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
        begin_anew(sites, 'networks = ["plugin:stairs"]\nlosses = ["plugin:absolute"]')
        coordinator.sees(*sites)
        declined = coordinator.run(experiment, tmp_path / "declined again")
        assert declined.ends() == 1
        assert declined.said.count('declines: policy.metrics: it does not have "plugin:youden"') >= 2
        begin_anew(sites, 'metrics = ["plugin:youden"]')
        coordinator.sees(*sites)
        run = coordinator.run(experiment, tmp_path / "run")
        assert run.ends() == 0, run.said
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert set(summary["per_site"]["north"]["per_class"]["vertical"]["more"]) == {"plugin:youden"}
    hashes = {summary["model_sha256"]}
    for backend in ("inline", "ray"):
        done = flwr_sim("run", experiment, "--backend", backend, "--out", tmp_path / backend)
        assert done.code == 0, done.err
        hashes.add(json.loads((tmp_path / backend / "summary.json").read_text())["model_sha256"])
    assert len(hashes) == 1
