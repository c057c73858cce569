"""A hospital group's own network, loss, data and metric over real processes: declined until allowed, then one model."""

from pathlib import Path

import pytest

from tests.network.federated import connected, hash_in
from tests.network.lying import connect_lying
from tests.network.real import flwr_sim, summary_of, written
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


def test_a_plug_in_is_declined_until_it_is_allowed_and_then_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "site-packages", monkeypatch)
    experiment = written(STRIPES, tmp_path)
    with connected(experiment, tmp_path / "machine") as (coordinator, sites):
        for rule, name, policy in (
            ("networks", "stairs", 'networks = ["plugin:stairs"]\nlosses = ["plugin:absolute"]'),
            ("metrics", "youden", 'metrics = ["plugin:youden"]'),
        ):
            declined = coordinator.run(experiment, tmp_path / rule)
            assert declined.ends() == 1
            assert declined.output.count(f'declines: policy.{rule}: it does not have "plugin:{name}"') >= 2
            for site in sites:
                site.end()
                site.edit(site.toml, ("[policy]", f"[policy]\n{policy}"))
                site.start()
            coordinator.sees(*sites)
        coordinator.run(experiment, tmp_path / "network").succeeds()
    per_class = summary_of(tmp_path / "network")["per_site"]["north"]["per_class"]
    assert set(per_class["vertical"]["more"]) == {"plugin:youden"}
    for backend in ("inline", "ray"):
        done = flwr_sim("run", experiment, "--backend", backend, "--out", tmp_path / backend)
        assert done.code == 0, done.err
    assert len({hash_in(tmp_path / name) for name in ("network", "inline", "ray")}) == 1


def test_a_hospital_that_adds_classes_up_to_the_width_of_a_plug_in_does_not_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With as many classes as features, the plug-in would be taken for a classifier with a head of its own."""
    install(tmp_path / "site-packages", monkeypatch)
    experiment = written(STRIPES.replace('metrics = ["plugin:youden"]', ""), tmp_path)
    with connected(experiment, tmp_path / "machine") as (coordinator, sites):
        for site in sites:
            site.end()
            site.edit(site.toml, ("[policy]", '[policy]\nnetworks = ["plugin:stairs"]\nlosses = ["plugin:absolute"]'))
        east, north = sites
        classes = "('vertical', *(f'invented {n}' for n in range(62)))"  # 64 with those of east
        east.start()
        connect_lying(north, f"names={classes}, class_names={classes}")
        coordinator.sees(*sites)
        coordinator.run(experiment, tmp_path / "run", "participation.min_sites=1", "run.rounds=1").succeeds()
        assert east.program.runs
