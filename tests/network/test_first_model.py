"""A coordinator whose program sends a first model of its own making, over real sockets."""

import json
import shutil

import pytest

from tests.network.federated import Federation
from tests.network.real import flwr_client, lines_of, settings

pytestmark = pytest.mark.slow
CRAFTED = """
import sys
import polyclinic.server.federation.run as run
from polyclinic.client.preview.attack.adversary import set_pixel_passing_weights
read_model_state = run.read_model_state
def crafted(network):
    set_pixel_passing_weights(network)
    return read_model_state(network)
run.read_model_state = crafted
from polyclinic.server.cli import main
main(sys.argv[1:])
"""
"""The published program, but for the first model: its convolutions hand images on to the dense layer."""
NETWORK = ("model.architecture=fedsld_cnn", "model.norm=group")


def test_every_hospital_refuses_a_crafted_first_model(federation: Federation) -> None:
    command = ("run", federation.coordinator.folder, federation.experiment, "--out", federation.out, "--once")
    run = federation.coordinator.lead("-c", CRAFTED, *command, *settings(*NETWORK))
    assert run.ends() == 1
    assert "round 1: 0 of 3 sites replied" in run.output
    stopped = lines_of(federation.out / "events.jsonl")[-1]
    for site in federation.sites:
        assert f"{site.name}: declines: run.first_model: " in stopped["reason"]
        shown = flwr_client("audit", "show", site.folder, "--json", "--tail", 3)
        answer, denied, error = map(json.loads, shown.out.splitlines()[-3:])
        assert (answer["direction"], answer["record"]) == ("out", "RollCallAnswer")
        assert (denied["direction"], denied["record"], denied["decision"]) == ("in", "TrainRequest", "deny")
        assert denied["rule"] == "run.first_model"
        assert "torch 2" in denied["reason"]
        assert denied["signature"]
        assert (error["direction"], error["kind"]) == ("out", "declined")
        assert site.program.runs
        assert denied["reason"] in site.program.output


def test_a_first_model_of_a_weights_file_is_compared_by_who_has_it(federation: Federation) -> None:
    """The first of the two runs is one of the published program without a file, of the same network."""
    federation.run(*NETWORK, "run.rounds=1", once=True, out="first").succeeds()
    file = federation.folder / "first" / "model.safetensors"
    folder = federation.south.folder / "weights"
    folder.mkdir()
    shutil.copy(file, folder / "trunk.safetensors")
    before = [site.program.output.count("is taken as it came") for site in federation.sites]
    federation.run(*NETWORK, "run.rounds=2", f"model.weights={file}", once=True).succeeds()
    shutil.rmtree(folder)
    after = [site.program.output.count("is taken as it came") for site in federation.sites]
    assert [count - earlier for count, earlier in zip(after, before, strict=True)] == [1, 1, 0]  # south has the file
