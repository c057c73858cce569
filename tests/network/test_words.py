"""A hospital that lies in words and figures: nothing of it counts, and nothing of it reaches a person raw."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from server.coordinator.folder import read_coordinator
from server.reporting.live.files import FileWatcher, source_of_current_run
from server.reporting.live.page import render_page
from server.reporting.model_card import CARD
from tests.network.federated import connected
from tests.network.loose_talker import TEST, TRAINING
from tests.network.real import (
    PARTIAL,
    Coordinator,
    eventually,
    flwr_client,
    flwr_server,
    lines_of,
    written,
)
from tests.words import raw_in

pytestmark = pytest.mark.slow
LIAR = "south"
CHANGES = (f"run.rounds={len(TRAINING)}", "participation.min_sites=2")
MOST_MEGABYTES = 20
MOST_STATUS_S = 2.0


def size_of(folder: Path) -> float:
    """Megabytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def timed_status(coordinator: Coordinator) -> tuple[str, float]:
    """What it says, and the seconds of this process, in which the command runs: the quickest of three."""
    taken = []
    for _ in range(3):
        began = time.process_time()
        said = flwr_server("status", coordinator.folder).out
        taken.append(time.process_time() - began)
    return said, min(taken)


@pytest.mark.network
def test_what_cannot_be_does_not_count_and_is_said_without_any_control_character(
    tmp_path: Path, record_property: Any
) -> None:
    experiment = written(PARTIAL, tmp_path)
    out = tmp_path / "run"
    with connected(experiment, tmp_path / "machine", {LIAR: "tests.network.loose_talker"}) as (coordinator, sites):
        run = coordinator.run(experiment, out, *CHANGES, pages=True)
        eventually(lambda: not run.runs, "the run ends", within_s=600)
        assert run.ends() == 0, run.said
        status, took_s = timed_status(coordinator)
        said = [run.said, status, *(flwr_client("status", site.folder).out for site in sites)]
        said += [site.program.said for site in sites]
        verified = [flwr_client("audit", "verify", site.folder, "--receipt", out / "receipt.json") for site in sites]
        said += [flwr_client("audit", "show", site.folder).out for site in sites]
    checked = flwr_server("verify", out)
    assert (checked.code, [one.code for one in verified]) == (0, [0] * len(sites)), checked.out
    assert took_s < MOST_STATUS_S
    assert size_of(out) < MOST_MEGABYTES
    assert (coordinator.folder / "state" / "present.json").stat().st_size < 2**20
    said += [render_page(FileWatcher(source_of_current_run(read_coordinator(coordinator.folder))).look())]
    record_property("run folder, MB", round(size_of(out), 3))
    record_property("status, s", round(took_s, 3))
    _check_reasons(out, run.said)
    _check_files(out, said)
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert 0 <= summary["test"]["mean_auroc"] <= 1
    assert LIAR not in summary["per_site"]


def _check_reasons(out: Path, said: str) -> None:
    absent = {one["round"]: one for one in lines_of(out / "events.jsonl") if one["event"] == "absent"}
    wanted = {**dict(enumerate((reason for _, reason in TRAINING), start=1)), "test": TEST[1]}
    assert absent.keys() == wanted.keys()
    assert {one["site"] for one in absent.values()} == {LIAR}
    for number, reason in wanted.items():
        assert reason in absent[number]["reason"], number
        assert len(absent[number]["reason"]) <= 500
    for number in range(1, len(TRAINING) + 1):
        assert f"round {number} went without {LIAR}: {absent[number]['reason']}" in said
    assert "\n12:00:00  round 9 of 9" not in said


def _check_files(out: Path, said: list[str]) -> None:
    pages = ("summary.json", "rounds.jsonl", "events.jsonl", "audit.jsonl", "receipt.json", "report.html", CARD)
    for name in pages:
        assert raw_in((out / name).read_text(encoding="utf-8"), "\n\t") == set(), name
    assert [raw_in(text) for text in said] == [set()] * len(said)
    assert max(map(len, (out / "audit.jsonl").read_bytes().splitlines())) < 2**14
