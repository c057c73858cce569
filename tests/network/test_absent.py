"""Over the network: every admitted hospital that is not in a run is named, on the screen and in each file."""

import json
from pathlib import Path

import pytest

from polyclinic.common.security.audit import AuditLog
from polyclinic.server.reporting.run_report import write_run_report
from tests.network.federated import SLOW, Federation, events
from tests.network.real import flwr_server, summary_of
from tests.server.reports import body_text

pytestmark = pytest.mark.slow

WITHOUT = ("participation.min_sites=2", "participation.roll_call_deadline_s=6", "run.rounds=2")
NEVER = "south is admitted and never answered the roll call: the model was trained without it."


def cautions(out: Path) -> list[str]:
    return list(summary_of(out)["claims"]["cautions"])


def test_a_hospital_that_never_comes_is_named_on_the_screen_and_in_every_file(federation: Federation) -> None:
    federation.stop(federation.south)
    run = federation.run(*WITHOUT, once=True)
    run.succeeds()
    out = federation.out
    assert "the run begins without south, which is admitted and has not answered the roll call" in run.output
    assert NEVER in " ".join(run.output.split())
    (absence,) = events(out, "absent")
    assert (absence["round"], absence["site"]) == ("roll call", "south")
    (entry,) = [each for each in AuditLog(out).read_entries() if each["event"] == "left_out"]
    assert (entry["round"], entry["site"]) == ("roll call", "south")
    summary = summary_of(out)
    assert (summary["absent"], summary["left_out"], sorted(summary["sites"])) == (["south"], {}, ["east", "north"])
    assert NEVER in cautions(out)
    page = body_text(write_run_report(out).read_text(encoding="utf-8"))
    assert NEVER in page
    assert "southroll calladmitted, never answered" in page.replace(" south ", "south")
    assert "south was left out of roll call" in flwr_server("status", federation.coordinator.folder).out
    assert flwr_server("verify", out).code == 0


def test_a_hospital_that_comes_late_is_no_longer_named_absent(federation: Federation) -> None:
    federation.stop(federation.south)
    run = federation.run(SLOW, *WITHOUT[:2], "run.rounds=12", once=True)
    run.says("round 1 of 12")
    federation.south.connect()
    run.says("south joins in round")
    run.succeeds()
    assert summary_of(federation.out)["absent"] == []
    assert not any("never answered" in caution for caution in cautions(federation.out))
    present = json.loads((federation.coordinator.folder / "state" / "present.json").read_text(encoding="utf-8"))
    assert "south" not in present["left_out"]


def test_a_hospital_that_leaves_after_the_roll_call_is_named_with_its_last_round(federation: Federation) -> None:
    run = federation.run(SLOW, *WITHOUT[:2], "run.rounds=8", once=True)
    run.says("round 2 of 8")
    federation.stop(federation.south)
    run.succeeds()
    assert summary_of(federation.out)["absent"] == []
    assert any(
        caution.startswith("south took part last in round ") and caution.endswith(" of 8, and was absent at the end.")
        for caution in cautions(federation.out)
    )


def test_a_connected_hospital_that_gives_no_answer_is_named_with_the_reason(federation: Federation) -> None:
    with federation.south.program.frozen():
        run = federation.run(*WITHOUT, once=True)
        run.succeeds()
    assert summary_of(federation.out)["left_out"] == {"south": "no answer within 6 s"}
    assert "south was left out: no answer within 6 s." in cautions(federation.out)
    assert "the run goes on without south: no answer within 6 s" in run.output
