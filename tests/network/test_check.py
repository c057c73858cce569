"""The hospital's check against a running coordinator: what it is told, and that nobody takes it for present."""

import json
from typing import Any

import pytest

import client.check.connection
from client.connection.exit_codes import ExitCode
from tests.network.conftest import Hospital, Trial
from tests.network.real import Site, eventually, flwr_client

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_proxy")]


def checked(site: Site, trial: Trial) -> dict[str, Any]:
    ended = flwr_client("check", site.folder, "--json", "--images", 20, "--experiment", trial.experiment)
    result = json.loads(ended.out)
    assert ended.code == result["exit_code"], ended.err
    return dict(result["areas"]["connection"])


def connection_codes(connection: dict[str, Any]) -> list[int]:
    return [finding["exit_code"] for finding in connection["findings"] if finding["severity"] != "note"]


def test_an_admitted_site_is_told_clock_release_and_key_and_does_not_sign_on(trial: Trial, hospital: Hospital) -> None:
    connection = checked(hospital("careful"), trial)
    assert "this site's key is admitted" in connection["passed"]
    assert abs(connection["facts"]["clock_ahead_s"]) < 5
    assert trial.coordinator.now["sites"]["careful"]["state"] != "connected"


def test_a_revoked_site_is_told_so(trial: Trial, hospital: Hospital, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client.check.connection, "KEY_PATIENCE_S", 0.0)
    site = hospital("hasty")
    trial.coordinator.revoke(site)
    eventually(lambda: connection_codes(checked(site, trial)) == [ExitCode.KEY], "the key is refused")


def test_a_check_beside_a_running_client_disturbs_neither(trial: Trial, hospital: Hospital) -> None:
    site = hospital("watched")
    site.connect()
    assert connection_codes(checked(site, trial)) == []
    trial.coordinator.sees(site)
    assert site.program.runs
