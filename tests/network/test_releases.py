"""Sites of other releases: of the same wire version each takes part, and everyone can read which release it has."""

import json
from pathlib import Path

import pytest

from polyclinic.common import __version__
from tests.network.conftest import Hospital, Trial
from tests.network.federated import events
from tests.network.real import flwr_server, summary_of

pytestmark = pytest.mark.slow

OTHER = "9.8.7"
OF_ANOTHER_RELEASE = (
    f"import sys, polyclinic.common; polyclinic.common.__version__ = {OTHER!r}; "
    "from polyclinic.client.cli import main; main(sys.argv[1:])"
)


def test_a_site_of_another_release_takes_part_and_both_sides_name_it(
    trial: Trial, hospital: Hospital, tmp_path: Path
) -> None:
    newer, same = hospital("newer-release"), hospital("same-release")
    newer.start_by("-c", OF_ANOTHER_RELEASE, "start", newer.folder).says("connected to trial")
    same.connect()
    trial.coordinator.sees(newer, same)
    out = tmp_path / "run"
    run = trial.coordinator.run(trial.experiment, out, "run.rounds=3", sites=2, pages=True, once=True)
    run.succeeds()
    expected = {newer.name: OTHER, same.name: __version__}
    assert run.output.count(OTHER) == 1  # once a run, and not once a round
    (event,) = events(out, "other_release")
    assert (event["site"], event["release"], event["coordinator"]) == (newer.name, OTHER, __version__)
    receipt, now = json.loads((out / "receipt.json").read_text(encoding="utf-8")), trial.coordinator.now
    for record in (summary_of(out), receipt, now):
        assert {site: record["sites"][site]["release"] for site in expected} == expected
    assert receipt["versions"]["polyclinic"] == now["release"] == __version__
    assert flwr_server("verify", out).code == 0
    for page in ("report.html", "MODEL_CARD.md"):
        assert OTHER in (out / page).read_text(encoding="utf-8")
    assert OTHER in flwr_server("status", trial.coordinator.folder).out
    assert newer.program.output.count(f"release {__version__}") == 1
    assert f"release {__version__}" not in same.program.output
    assert newer.now["coordinator_release"] == same.now["coordinator_release"] == __version__
