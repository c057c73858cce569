"""What both programs say of themselves: to a person, to a machine, to a container's health check."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.network.conftest import Trial
from tests.network.real import Coordinator, Site, eventually, flwr_client, flwr_server

pytestmark = pytest.mark.slow

Hospital = Callable[[str], Site]


@pytest.mark.network
def test_both_sides_tell_what_a_run_waits_for_and_what_became_of_it(
    trial: Trial, hospital: Hospital, tmp_path: Path
) -> None:
    coordinator, quick, slow = trial.coordinator, hospital("quick"), hospital("slow")
    for site in (quick, slow):
        site.start().says("connected to trial")
    coordinator.sees(quick, slow)
    run = coordinator.run(trial.experiment, tmp_path / "run", "training.epochs=6", "run.rounds=2", sites=2)
    slow.works_on("train", 1)
    with slow.program.frozen():
        eventually(
            lambda: (coordinator.now["run"] or {}).get("waiting_for") == ["slow"], "the run waits for slow alone"
        )
        present, words = coordinator.now["run"], flwr_server("status", coordinator.folder).out
        at_quick = json.loads(flwr_client("status", quick.folder, "--json").out)
    assert (present["state"], present["phase"], present["round"], present["rounds"]) == ("running", "train", 1, 2)
    assert (present["sites"], present["lost"]) == (["quick", "slow"], [])
    assert "round 1 of 2, train" in words
    assert "waiting for slow, at most" in words
    assert (at_quick["state"], at_quick["round"], at_quick["rounds"], at_quick["rounds_done"]) == ("waiting", 1, 2, 1)
    assert at_quick["healthy"]
    assert run.ends() == 0, run.said
    after = coordinator.now["run"]
    assert (after["state"], after["round"], after["waiting_for"], after["last_error"]) == ("done", 2, [], "")
    assert after["run_folder"] == str(tmp_path / "run")
    assert "round 2 of 2: 2 of 2 sites" in run.said
    assert "round 2 of 2 trained in" in slow.program.said


def test_a_site_says_who_it_is_connected_to_and_that_it_is_well(hospital: Hospital) -> None:
    site = hospital("well")
    site.start().says("connected to trial")
    eventually(lambda: site.now["state"] == "waiting", "the status is written")
    words = flwr_client("status", site.folder)
    assert words.out.startswith("site well: waiting\ncoordinator trial: last answer ")
    assert "its certificate is valid for 397 more days" in words.out
    health = flwr_client("health", site.folder)
    assert (health.code, health.out) == (0, "healthy\n")


def test_a_site_that_does_not_run_is_not_well_and_status_says_how_to_start_it(hospital: Hospital) -> None:
    site = hospital("asleep")
    for command in ("status", "health"):
        ended = flwr_client(command, site.folder)
        assert ended.code != 0
        assert (
            f"{site.folder}: no flwr-client runs on this folder. Its log says whether it waits after a refusal"
            in ended.err
        )


def test_a_site_that_was_told_to_stop_ends_with_0_and_is_gone_at_once(trial: Trial, hospital: Hospital) -> None:
    site = hospital("brief")
    site.start().says("connected to trial")
    trial.coordinator.program.says("brief connected")
    assert site.program.stop() == 0
    trial.coordinator.sees(site, state="stopped")
    assert "stopped on request" in site.program.said
    trial.coordinator.program.says(f"brief signed off at {trial.coordinator.now['sites']['brief']['stopped']}")
    site.start().says("connected to trial")
    trial.coordinator.sees(site)
    assert trial.coordinator.now["sites"]["brief"]["stopped"] is None


def test_a_coordinator_that_runs_is_well_and_names_every_site_with_its_fingerprint(
    trial: Trial, hospital: Hospital
) -> None:
    site = hospital("listed")
    said = flwr_client("init", site.folder, "--name", "listed").out
    found = trial.coordinator.now
    assert flwr_server("health", trial.coordinator.folder).out == "healthy\n"
    assert found["superlink"] == "up"
    assert found["address"] == f"127.0.0.1:{trial.coordinator.port}"
    assert found["sites"]["listed"]["state"] == "not connected"
    assert found["sites"]["listed"]["fingerprint"] in said


def test_a_coordinator_that_does_not_run_is_not_well_and_says_how_to_start_it(trial: Trial, tmp_path: Path) -> None:
    coordinator = Coordinator(trial.machine, "silent")
    health, status = (flwr_server(command, coordinator.folder) for command in ("health", "status"))
    assert (health.code, status.code) == (1, 0)
    assert "SuperLink down: start it with flwr-server start" in status.out
    run = flwr_server("run", coordinator.folder, trial.experiment, "--out", tmp_path / "run")
    assert run.code == 2
