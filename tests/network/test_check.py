"""The hospital's check against a running coordinator: what it is told, and that nobody takes it for present."""

import json
import os
from collections.abc import Callable
from typing import Any

import pytest

import client.check.connection
from client.connection.exit_codes import ExitCode
from tests.network.conftest import Trial
from tests.network.real import Site, eventually, flwr_client

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _no_proxy_here(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)


def checked(site: Site, trial: Trial) -> dict[str, Any]:
    ended = flwr_client("check", site.folder, "--json", "--images", 20, "--experiment", trial.experiment)
    told: dict[str, Any] = json.loads(ended.out)
    assert ended.code == told["exit_code"], ended.err
    return told


def connection_codes(told: dict[str, Any]) -> list[int]:
    return [one["exit_code"] for one in told["areas"]["connection"]["findings"] if one["severity"] != "note"]


def test_an_admitted_site_is_told_clock_release_and_key_and_does_not_sign_on(
    trial: Trial, hospital: Callable[[str], Site]
) -> None:
    site = hospital("careful")
    connection = checked(site, trial)["areas"]["connection"]
    assert "this site's key is admitted" in connection["passed"]
    assert abs(connection["facts"]["clock_ahead_s"]) < 5
    assert trial.coordinator.now["sites"]["careful"]["state"] != "connected"


def test_a_revoked_site_is_told_so(
    trial: Trial, hospital: Callable[[str], Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client.check.connection, "KEY_PATIENCE_S", 0.0)
    site = hospital("hasty")
    trial.coordinator.revoke(site)
    eventually(lambda: connection_codes(checked(site, trial)) == [ExitCode.KEY], "the key is refused")


def test_a_check_beside_a_running_client_disturbs_neither(trial: Trial, hospital: Callable[[str], Site]) -> None:
    site = hospital("watched")
    site.start().says("connected to trial")
    assert connection_codes(checked(site, trial)) == []
    trial.coordinator.sees(site)
    assert site.program.runs
