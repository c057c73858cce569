"""What ``flwr-server status`` can say of updates that did not count, or are unlike the others'."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from common.models.network import Head
from common.models.state import ModelState
from server.deployment.status import status_tables
from server.runs.folder import RunFolder
from server.runs.live_status import PresentRun, describe_part_in_run, read_present
from server.runs.reporter import RunReporter
from strategies.engine.events import FederationValidation, RoundRecord, WaitingStatus
from strategies.engine.state import FederationState

MODEL = ModelState(
    np.zeros(1, np.float32), np.zeros(1, np.float32), Head((), np.zeros((0, 1), np.float32), np.zeros(0, np.float32))
)


STATUS: dict[str, Any] = {
    "name": "trial",
    "address": "",
    "superlink": "up",
    "certificate_days": 9.0,
    "sites": {},
    "time": 40.0,
    "release": "0",
}


def status_lines(present: PresentRun, **facts: Any) -> list[str]:
    """The last part of ``flwr-server status``, about the run."""
    words = status_tables({**STATUS, **facts, "run": vars(present)}).renderables[-1]  # type: ignore[attr-defined]
    return str(words).splitlines()


def present_in(folder: Path) -> PresentRun:
    present = read_present(folder)
    assert present is not None
    return present


def done(number: int, **facts: Any) -> RoundRecord:
    nothing: dict[str, Any] = {"site_seconds": {}, "bytes_down": {}, "bytes_up": {}, "seconds": 1.0}
    facts = {"absent": {}, **nothing, **facts}
    return RoundRecord(
        number, ("east",), train_loss={"east": 0.5}, validation=FederationValidation(), aggregate_seconds=0.1, **facts
    )


def test_status_says_of_every_site_why_it_was_last_left_out_and_whose_update_was_too_long(
    tmp_path: Path,
) -> None:
    told: list[str] = []
    with RunReporter(PresentRun("run", "trial"), tmp_path, told.append) as reporter:
        reporter.began(["east", "north", "south"], 3)
        reporter.round_done(
            done(1, absent={"north": "trunk was expected", "south": "disk full"}), FederationState(1, MODEL)
        )
        reporter.round_done(
            done(2, absent={"north": "NaN"}, shortened={"south": "its trunk was 9 times"}), FederationState(2, MODEL)
        )
    present = present_in(tmp_path)
    assert present.left_out == {"north": "round 2: NaN", "south": "round 1: disk full"}
    assert present.shortened == {"south": "round 2: its trunk was 9 times"}
    assert "round 2: the update of south is too long: its trunk was 9 times" in told
    assert {
        "north was left out of round 2: NaN",
        "south was left out of round 1: disk full",
        "south sent too long an update in round 2: its trunk was 9 times",
    } <= set(status_lines(present))


def test_that_a_site_signed_off_is_told_once_and_of_a_lost_one_that_contact_was_lost(tmp_path: Path) -> None:
    told: list[str] = []
    at = "2026-11-24 06:52:27+00:00"
    signed_off = {"south": at}
    with RunReporter(PresentRun("run", "trial"), tmp_path, told.append, lambda: signed_off) as reporter:
        reporter.began(["east", "north", "south"], 3)
        for number in (1, 2):
            reporter.waiting(WaitingStatus("train", number, ("north", "south"), ("north", "south"), 600.0))
            absent = {"north": "it is not connected", "south": f"signed off at {at}"}
            reporter.round_done(done(number, absent=absent), FederationState(number, MODEL))
        now = present_in(tmp_path)
        assert now.stopped == {"south": at}
        assert [describe_part_in_run(now, site) for site in ("north", "south")] == [
            "lost, may come back",
            f"signed off at {at}",
        ]
        signed_off.clear()
        reporter.round_done(replace(done(3), sites=("east", "north", "south")), FederationState(3, MODEL))
        now = present_in(tmp_path)
        assert (list(now.lost), now.stopped) == ([], {})
    assert [line for line in told if "lost contact" in line] == [
        "lost contact with north; it gets its work again when it is back"
    ]
    assert [line for line in told if line.startswith("south signed off")] == [
        f"south signed off at {at}; it gets its work again when it is started"
    ]


def test_a_site_that_was_stopped_and_is_waited_for_all_the_same_is_said_to_be_stopped() -> None:
    at = "2026-11-24 06:52:27+00:00"
    present = PresentRun("run", "trial", rounds=3, waiting_for=("north", "south"), lost=("south",), deadline=100.0)
    same: dict[str, Any] = {"fingerprint": "", "classes": [], "max_images": 0}
    sites = {"north": {"state": "connected", **same}, "south": {"state": "stopped", "stopped": at, **same}}
    line = f"waiting for north, south (signed off at {at}), at most 60 s more"
    assert any(line in text for text in status_lines(present, sites=sites))


def test_events_have_a_stopped_site_once_and_again_when_it_is_stopped_again(tmp_path: Path) -> None:
    folder, at = RunFolder(tmp_path), "signed off at 06:52"
    folder.absent(1, {"south": at, "north": "NaN"}, ["east"])
    folder.absent("evaluate", {"south": at})
    folder.absent(2, {"south": at, "north": "NaN"}, ["east"])
    folder.absent(3, {}, ["east", "north", "south"])
    folder.absent(4, {"south": at}, ["east", "north"])
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    told = [(line["round"], line["site"]) for line in lines]
    assert told == [(1, "south"), (1, "north"), (2, "north"), (4, "south")]


def test_a_lost_site_is_lost_until_it_took_part_again_and_each_is_said_once(tmp_path: Path) -> None:
    told: list[str] = []
    reason = {"south": "it is not connected: stopped, or cut off"}
    with RunReporter(PresentRun("run", "trial"), tmp_path, told.append) as reporter:
        reporter.began(["east", "south"], 4)
        for number in (1, 2, 3):
            reporter.waiting(
                WaitingStatus("train", number, ("east", "south"), (), 600.0)
            )  # it is asked, as it may be back
            reporter.waiting(WaitingStatus("train", number, ("south",), ("south",), 600.0))
            reporter.round_done(done(number, absent=reason), FederationState(number, MODEL))
            assert list(present_in(tmp_path).lost) == ["south"]
        reporter.waiting(WaitingStatus("train", 4, ("east", "south"), (), 600.0))
        assert not any("south is back" in line for line in told)
        reporter.round_done(replace(done(4), sites=("east", "south")), FederationState(4, MODEL))
        assert list(present_in(tmp_path).lost) == []
    assert told.count("lost contact with south; it gets its work again when it is back") == 1
    assert [line for line in told if "went without" in line] == [
        "round 1 went without south: it is not connected: stopped, or cut off"
    ]
    assert [line for line in told if "south is back" in line] == ["south is back: it took part in round 4"]
    assert sum("1 of 2 sites, without south" in line for line in told) == 3
