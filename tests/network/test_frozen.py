"""A frozen trunk over real processes: sent once, not at all where the hospital has the weights, the same model."""

from pathlib import Path
from typing import Any

import pytest

from polyclinic.common.config import read_experiment
from polyclinic.common.models.network import build_network
from polyclinic.common.models.saved import save_model
from polyclinic.strategies.registry import find_method_faults
from tests.network.federated import admitted, hash_in, undisturbed
from tests.network.real import PARTIAL, eventually, summary_of

pytestmark = pytest.mark.slow
HEAD = ("model.train=head", "run.rounds=3")


@pytest.mark.network
def test_a_hospital_receives_it_once_and_keeps_its_features_encrypted(tmp_path: Path) -> None:
    """South has the weights; north is killed in round 2 and goes on from what is on its disk."""
    with admitted(tmp_path, PARTIAL) as federation:
        simulated = undisturbed(federation.experiment, tmp_path / "simulation", *HEAD)
        weights = federation.south.folder / "weights"
        weights.mkdir()
        (weights / "trunk.safetensors").write_bytes((tmp_path / "simulation" / "model.safetensors").read_bytes())
        federation.coordinator.start()
        federation.gather()
        longer = (*HEAD, "training.epochs=120")
        run = federation.run(*longer)
        federation.north.works_on("train", 2)
        federation.north.program.kill()
        federation.gather()
        run.succeeds()
        federation.run(*HEAD, out="again").succeeds()
        eventually(lambda: federation.coordinator.now, "the coordinator answers")
    assert hash_in(tmp_path / "again") == simulated
    assert hash_in(federation.out) == undisturbed(federation.experiment, tmp_path / "longer", *longer)
    (size,) = {path.stat().st_size for site in federation.sites for path in site.folder.glob("state/frozen/*.f32")}
    first, second = (summary_of(tmp_path / name)["sites"] for name in ("run", "again"))
    assert first["east"]["bytes_down"] > size > first["south"]["bytes_down"]
    assert max(site["bytes_down"] for site in second.values()) < size
    for site in federation.sites:
        files = sorted((site.folder / "state" / "features").iterdir())
        assert [path.stem for path in files] == ["test", "train", "validation"]
        assert all(path.stat().st_mode & 0o077 == 0 for path in files)


@pytest.mark.long
def test_a_trunk_of_300_megabytes_crosses_the_wire_at_most_once(tmp_path: Path, record_property: Any) -> None:
    """A vision transformer of 85 million parameters, whose head alone is trained; south has its weights file."""
    network = ("model.architecture=timm:vit_base_patch16_224", "model.image_size=32", *HEAD)
    with admitted(tmp_path, PARTIAL) as federation:
        weights = federation.south.folder / "weights"
        weights.mkdir()
        file = read_experiment(federation.experiment, network, find_method_faults)
        trunk = build_network(file.experiment.model, ("",), file.experiment.run.seed)
        save_model(weights, trunk, label_contract_sha256="")
        federation.coordinator.start()
        federation.gather()
        for name in ("first", "second"):
            federation.run(*network, out=name).succeeds()
        (size,) = {path.stat().st_size for path in federation.east.folder.glob("state/frozen/*.f32")}
    first, second = (summary_of(tmp_path / name)["sites"] for name in ("first", "second"))
    record_property("bytes_down", {name: site["bytes_down"] for name, site in first.items()})
    assert size > 300e6
    for name in ("east", "north"):
        assert size < first[name]["bytes_down"] < 1.01 * size
    assert first["south"]["bytes_down"] < 0.01 * size
    assert all(site["bytes_down"] < 0.01 * size for site in second.values())
    assert all(site["bytes_up"] < 0.01 * size for site in (*first.values(), *second.values()))
