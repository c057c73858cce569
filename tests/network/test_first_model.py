"""A coordinator whose program sends a first model of its own making, over real sockets."""

import json
import shutil

import pytest

from tests.network.federated import EVERYBODY, Federation, events, hash_in, sites_by_round, undisturbed
from tests.network.real import flwr_client, lines_of, settings, summary_of

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
        shown = flwr_client("audit", "show", site.folder, "--json", "--tail", 5)
        entries = map(json.loads, shown.out.splitlines()[-5:])
        # A site that alone annotates a class is asked about it after the roll call.
        about_question = ("Question", "RefusalNoted")
        *_, answer, denied, error = [entry for entry in entries if entry.get("record") not in about_question]
        assert (answer["direction"], answer["record"]) == ("out", "RollCallAnswer")
        assert (denied["direction"], denied["record"], denied["decision"]) == ("in", "TrainRequest", "deny")
        assert denied["rule"] == "run.first_model"
        assert "torch 2" in denied["reason"]
        assert denied["signature"]
        assert (error["direction"], error["kind"]) == ("out", "declined")
        assert site.program.runs
        assert denied["reason"] in site.program.output


def first_models_taken(federation: Federation) -> list[int]:
    """How often each site took a first model without a comparison."""
    return [site.program.output.count("is taken as it came") for site in federation.sites]


def test_a_first_model_of_a_weights_file_is_compared_by_who_has_it(federation: Federation) -> None:
    """The first of the two runs is one of the published program without a file, of the same network."""
    federation.run(*NETWORK, "run.rounds=1", once=True, out="first").succeeds()
    file = federation.folder / "first" / "model.safetensors"
    folder = federation.south.folder / "weights"
    folder.mkdir()
    shutil.copy(file, folder / "trunk.safetensors")
    before = first_models_taken(federation)
    federation.run(*NETWORK, "run.rounds=2", f"model.weights={file}", once=True).succeeds()
    shutil.rmtree(folder)
    after = first_models_taken(federation)
    assert [count - earlier for count, earlier in zip(after, before, strict=True)] == [1, 1, 0]  # south has the file


def test_a_finished_run_s_folder_is_a_warm_start_with_its_head_and_the_same_model_as_in_simulation(
    federation: Federation,
) -> None:
    """North, whose classes 7, 8 and 9 nobody else has, comes to the second run alone."""
    without_north = ("participation.min_sites=2", "participation.roll_call_deadline_s=6")
    federation.stop(federation.north)
    federation.run("run.rounds=2", *without_north, once=True, out="first").succeeds()
    first = federation.folder / "first"
    folder = federation.south.folder / "weights"
    folder.mkdir()
    shutil.copy(first / "model.safetensors", folder / "model.safetensors")  # south compares the first model with it
    federation.gather()
    before = first_models_taken(federation)
    warm = (f"model.weights={first}", "run.rounds=2")
    run = federation.run(*warm, once=True, out="second")
    run.succeeds()
    shutil.rmtree(folder)
    after = first_models_taken(federation)
    assert [count - earlier for count, earlier in zip(after, before, strict=True)] == [1, 1, 0]
    sentence = f"7 of 10 rows of the head come from {first}; new: 7, 8 and 9"
    assert sentence in run.output
    (event,) = events(federation.folder / "second", "warm_start")
    assert event["sentences"] == [sentence]
    summary = summary_of(federation.folder / "second")
    assert summary["start"] == [sentence]
    assert f"{sentence}." in summary["claims"]["cautions"]
    assert sites_by_round(federation.folder / "second") == [EVERYBODY] * 2
    assert hash_in(federation.folder / "second") == undisturbed(federation.experiment, federation.folder / "sim", *warm)


def test_a_warm_start_that_hardly_learns_keeps_the_auroc_of_the_finished_model(federation: Federation) -> None:
    federation.run("run.rounds=3", once=True, out="first").succeeds()
    still = (f"model.weights={federation.folder / 'first'}", "run.rounds=1", "training.lr=1e-12", "model.norm=batch")
    federation.run(*still, "evaluation.checkpoint=last", once=True, out="second").succeeds()
    of_first, of_second = (summary_of(federation.folder / name)["per_site"] for name in ("first", "second"))
    for site in EVERYBODY:
        assert of_second[site]["mean_auroc"] == pytest.approx(of_first[site]["mean_auroc"], abs=0.005)
        assert of_first[site]["mean_auroc"] > 0.8
