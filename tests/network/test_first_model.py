"""A coordinator whose program sends a first model of its own making, over real sockets."""

import json
import shutil
from pathlib import Path

import pytest

from tests.network.federated import Federation
from tests.network.real import flwr_client

pytestmark = pytest.mark.slow
CRAFTED = """
import sys
import server.federation.run as run
from client.preview.attack.adversary import pass_pixels_through
read_state = run.read_state
def crafted(network):
    pass_pixels_through(network)
    return read_state(network)
run.read_state = crafted
from server.cli import main
main(sys.argv[1:])
"""
"""The published program, but for the first model: its convolutions hand images on to the dense layer."""
NETWORK = ("model.architecture=fedsld_cnn", "model.norm=group")


def test_every_hospital_refuses_a_crafted_first_model_and_nothing_of_its_images_leaves(
    federation: Federation, tmp_path: Path
) -> None:
    sets = [part for override in NETWORK for part in ("--set", override)]
    command = ("run", federation.coordinator.folder, federation.experiment, "--out", tmp_path / "run", "--once", *sets)
    run = federation.coordinator.lead("-c", CRAFTED, *command)
    assert run.ends() == 1
    assert "round 1: 0 of 3 sites replied" in run.said
    stopped = json.loads((tmp_path / "run" / "events.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    for site in federation.sites:
        assert f"{site.name}: declines: run.first_model: " in stopped["reason"]
        shown = flwr_client("audit", "show", site.folder, "--json", "--tail", 3)
        came, denied, error = map(json.loads, shown.out.splitlines()[-3:])
        assert (came["direction"], came["record"]) == ("out", "RollCallAnswer")
        assert (denied["direction"], denied["record"], denied["decision"]) == ("in", "TrainRequest", "deny")
        assert denied["rule"] == "run.first_model"
        assert "torch 2" in denied["reason"]
        assert denied["signature"]
        assert (error["direction"], error["kind"]) == ("out", "declined")
        assert site.program.runs
        assert denied["reason"] in site.program.said


def test_a_run_that_begins_with_a_weights_file_is_compared_where_the_hospital_has_it(
    federation: Federation, tmp_path: Path
) -> None:
    """The first of the two runs is one of the published program without a file, of the same network."""
    first = federation.run(tmp_path / "first", *NETWORK, "run.rounds=1", once=True)
    assert first.ends() == 0, first.said
    file = tmp_path / "first" / "model.safetensors"
    folder = federation.south.folder / "weights"
    folder.mkdir()
    shutil.copy(file, folder / "trunk.safetensors")
    before = {site.name: site.program.said.count("is taken as it came") for site in federation.sites}
    run = federation.run(tmp_path / "run", *NETWORK, "run.rounds=2", f"model.weights={file}", once=True)
    assert run.ends() == 0, run.said
    shutil.rmtree(folder)
    lines = {site.name: site.program.said.count("is taken as it came") for site in federation.sites}
    assert {name: lines[name] - count for name, count in before.items()} == {"east": 1, "north": 1, "south": 0}
