"""Sites of other releases: of the same wire version each takes part, and everyone can read which release it has."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from client.connection.exit_codes import ExitCode
from common import __version__
from common.wire.fleet_protocol import WIRE_VERSION
from tests.network.conftest import Trial
from tests.network.real import Site, flwr_server

pytestmark = pytest.mark.slow

Hospital = Callable[[str], Site]
OTHER = "9.8.7"
OF_ANOTHER_RELEASE = (
    f"import sys, common; common.__version__ = {OTHER!r}; from client.cli import main; main(sys.argv[1:])"
)
OF_ANOTHER_WIRE = (
    f"import sys, common.wire.fleet_protocol; common.wire.fleet_protocol.WIRE_VERSION = {WIRE_VERSION + 1}; "
    "from client.cli import main; main(sys.argv[1:])"
)


def test_a_site_of_another_release_and_the_same_wire_takes_part_and_both_sides_name_the_releases(
    trial: Trial, hospital: Hospital, tmp_path: Path
) -> None:
    newer, same = hospital("newer-release"), hospital("same-release")
    newer.start_by("-c", OF_ANOTHER_RELEASE, "start", newer.folder).says("connected to trial")
    same.start().says("connected to trial")
    trial.coordinator.sees(newer, same)
    out = tmp_path / "run"
    run = trial.coordinator.run(trial.experiment, out, "run.rounds=3", sites=2, pages=True)
    assert run.ends() == 0, run.said
    expected = {newer.name: OTHER, same.name: __version__}
    assert run.said.count(OTHER) == 1  # once a run, and not once a round
    events = [json.loads(line) for line in (out / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    (event,) = [event for event in events if event["event"] == "other_release"]
    assert (event["site"], event["release"], event["coordinator"]) == (newer.name, OTHER, __version__)
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert {site: record["release"] for site, record in summary["sites"].items()} == expected
    receipt = json.loads((out / "receipt.json").read_text(encoding="utf-8"))
    assert {site: record["release"] for site, record in receipt["sites"].items()} == expected
    assert receipt["versions"]["polyclinic"] == __version__
    assert flwr_server("verify", out).code == 0
    assert OTHER in (out / "report.html").read_text(encoding="utf-8")
    assert OTHER in (out / "MODEL_CARD.md").read_text(encoding="utf-8")
    now = trial.coordinator.now
    assert {site: now["sites"][site]["release"] for site in expected} == expected
    assert now["release"] == __version__
    assert OTHER in flwr_server("status", trial.coordinator.folder).out
    assert newer.program.said.count(f"release {__version__}") == 1
    assert f"release {__version__}" not in same.program.said
    assert newer.now["coordinator_release"] == same.now["coordinator_release"] == __version__


def test_a_site_of_another_wire_version_reads_so_when_it_connects_and_ends_at_the_first_request(
    trial: Trial, hospital: Hospital, tmp_path: Path
) -> None:
    site = hospital("newer-wire")
    site.start_by("-c", OF_ANOTHER_WIRE, "start", site.folder).says(f"wire version {WIRE_VERSION}")
    trial.coordinator.sees(site)
    run = trial.coordinator.run(trial.experiment, tmp_path / "run", sites=1, once=True)
    assert run.ends() == 1
    assert "wire version" in run.said
    assert site.program.ends() == ExitCode.VERSION == 17
