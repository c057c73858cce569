"""What both programs say of themselves to a person, a machine and a health check; and the hospital's check."""

import json
from pathlib import Path
from typing import Any

import pytest

import polyclinic.client.check.connection
from polyclinic.client.connection.exit_codes import ClientExitCode
from tests.network.conftest import Hospital, Trial
from tests.network.real import Coordinator, Site, eventually, flwr_client, flwr_server

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_proxy")]


@pytest.mark.network
def test_both_sides_tell_what_a_run_waits_for_and_how_it_ended(
    trial: Trial, hospital: Hospital, tmp_path: Path
) -> None:
    coordinator, quick, slow = trial.coordinator, hospital("quick"), hospital("slow")
    for site in (quick, slow):
        site.connect()
    coordinator.sees(quick, slow)
    run = coordinator.run(trial.experiment, tmp_path / "run", "training.epochs=6", "run.rounds=2", sites=2)
    slow.works_on("train", 1)
    with slow.program.frozen():
        eventually(
            lambda: (coordinator.now["run"] or {}).get("waiting_for") == ["slow"], "the run waits for slow alone"
        )
        eventually(lambda: quick.now["state"] == "waiting", "quick has noted that its reply is sent")
        present, words = coordinator.now["run"], flwr_server("status", coordinator.folder).out
        at_quick = json.loads(flwr_client("status", quick.folder, "--json").out)
    assert (present["state"], present["phase"], present["round"], present["rounds"]) == ("running", "train", 1, 2)
    assert (present["sites"], present["lost"]) == (["quick", "slow"], [])
    assert "round 1 of 2, train" in words
    assert "waiting for slow, at most" in words
    assert (at_quick["state"], at_quick["round"], at_quick["rounds"], at_quick["rounds_done"]) == ("waiting", 1, 2, 1)
    assert at_quick["healthy"]
    run.succeeds()
    after = coordinator.now["run"]
    assert (after["state"], after["round"], after["waiting_for"], after["last_error"]) == ("done", 2, [], "")
    assert after["run_folder"] == str(tmp_path / "run")
    assert "round 2 of 2: 2 of 2 sites" in run.output
    assert "round 2 of 2 trained in" in slow.program.output


def test_a_site_says_whether_it_is_well_and_a_stopped_one_ends_with_0_and_is_gone_at_once(
    trial: Trial, hospital: Hospital
) -> None:
    site = hospital("well")
    for command in ("status", "health"):
        ended = flwr_client(command, site.folder)
        assert ended.code != 0
        assert f"{site.folder}: no flwr-client runs on this folder." in ended.err
    site.connect()
    eventually(lambda: site.now["state"] == "waiting", "the status is written")
    words = flwr_client("status", site.folder).out
    assert words.startswith("site well: waiting\ncoordinator trial: last answer ")
    assert "397 more days" in words
    health = flwr_client("health", site.folder)
    assert (health.code, health.out) == (0, "healthy\n")
    trial.coordinator.program.says("well connected")
    assert site.program.stop() == 0
    trial.coordinator.sees(site, state="stopped")
    assert "stopped on request" in site.program.output
    trial.coordinator.program.says(f"well signed off at {trial.coordinator.now['sites']['well']['stopped']}")
    site.connect()
    trial.coordinator.sees(site)
    assert trial.coordinator.now["sites"]["well"]["stopped"] is None


def test_a_coordinator_that_runs_is_well_and_names_sites_with_fingerprints(trial: Trial, hospital: Hospital) -> None:
    printed = flwr_client("init", hospital("listed").folder, "--name", "listed").out
    now = trial.coordinator.now
    assert flwr_server("health", trial.coordinator.folder).out == "healthy\n"
    assert (now["superlink"], now["address"]) == ("up", f"127.0.0.1:{trial.coordinator.port}")
    assert now["sites"]["listed"]["state"] == "not connected"
    assert now["sites"]["listed"]["fingerprint"] in printed


def test_a_coordinator_that_does_not_run_is_not_well_and_says_how_to_start_it(trial: Trial, tmp_path: Path) -> None:
    coordinator = Coordinator(trial.machine, "silent")
    health, status = (flwr_server(command, coordinator.folder) for command in ("health", "status"))
    assert (health.code, status.code) == (1, 0)
    assert "flwr-server start" in status.out
    assert flwr_server("run", coordinator.folder, trial.experiment, "--out", tmp_path / "run").code == 2


def checked(site: Site, trial: Trial) -> dict[str, Any]:
    ended = flwr_client("check", site.folder, "--json", "--images", 20, "--experiment", trial.experiment)
    result = json.loads(ended.out)
    assert ended.code == result["exit_code"], ended.err
    return dict(result["areas"]["connection"])


def connection_codes(connection: dict[str, Any]) -> list[int]:
    return [finding["exit_code"] for finding in connection["findings"] if finding["severity"] != "note"]


def test_a_check_tells_clock_and_key_without_signing_on_disturbs_no_running_client_and_finds_a_revoked_key(
    trial: Trial, hospital: Hospital, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = hospital("careful")
    connection = checked(site, trial)
    assert "this site's key is admitted" in connection["passed"]
    assert abs(connection["facts"]["clock_ahead_s"]) < 5
    assert trial.coordinator.now["sites"]["careful"]["state"] != "connected"
    site.connect()
    assert connection_codes(checked(site, trial)) == []
    trial.coordinator.sees(site)
    assert site.program.runs
    site.end()
    monkeypatch.setattr(polyclinic.client.check.connection, "REFUSED_KEY_RETRY_S", 0.0)
    trial.coordinator.revoke(site)
    eventually(lambda: connection_codes(checked(site, trial)) == [ClientExitCode.KEY], "the key is refused")
