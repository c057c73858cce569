"""A hospital that lies in words and figures: nothing of it counts, and nothing of it reaches a person raw."""

import time
from pathlib import Path
from typing import Any

import pytest

from polyclinic.server.coordinator.folder import read_coordinator_folder
from polyclinic.server.reporting.live.files import RunFileWatcher, make_current_run_source
from polyclinic.server.reporting.live.page import render_live_page
from polyclinic.server.reporting.model_card import CARD
from tests.network.federated import connected, events
from tests.network.loose_talker import TEST, TRAINING
from tests.network.real import PARTIAL, eventually, flwr_client, flwr_server, summary_of, written
from tests.words import raw_in

pytestmark = pytest.mark.slow
LIAR = "south"
CHANGES = (f"run.rounds={len(TRAINING)}", "participation.min_sites=2")
MOST_MEGABYTES = 20
MOST_STATUS_S = 2.0


@pytest.mark.network
def test_what_cannot_be_does_not_count_and_is_printed_plainly(tmp_path: Path, record_property: Any) -> None:
    experiment = written(PARTIAL, tmp_path)
    out = tmp_path / "run"
    with connected(experiment, tmp_path / "machine", {LIAR: "tests.network.loose_talker"}) as (coordinator, sites):
        run = coordinator.run(experiment, out, *CHANGES, pages=True)
        eventually(lambda: not run.runs, "the run ends", within_s=600)
        run.succeeds()
        texts, times = [run.output], list[float]()
        for _ in range(3):
            began = time.process_time()
            texts.append(flwr_server("status", coordinator.folder).out)
            times.append(time.process_time() - began)
        for site in sites:
            checked = flwr_client("audit", "verify", site.folder, "--receipt", out / "receipt.json")
            assert checked.code == 0, checked.out
            texts += [site.program.output, flwr_client("status", site.folder).out]
            texts.append(flwr_client("audit", "show", site.folder).out)
    verified = flwr_server("verify", out)
    assert verified.code == 0, verified.out
    megabytes = sum(path.stat().st_size for path in out.rglob("*") if path.is_file()) / 1e6
    record_property("run folder, MB", round(megabytes, 3))
    record_property("status, s", round(min(times), 3))
    assert min(times) < MOST_STATUS_S
    assert megabytes < MOST_MEGABYTES
    assert (coordinator.folder / "state" / "present.json").stat().st_size < 2**20
    texts.append(
        render_live_page(
            RunFileWatcher(make_current_run_source(read_coordinator_folder(coordinator.folder))).poll_run_snapshot()
        )
    )
    _check_reasons(out, run.output)
    _check_files(out, texts)
    summary = summary_of(out)
    assert 0 <= summary["test"]["mean_auroc"] <= 1
    assert LIAR not in summary["per_site"]


def _check_reasons(out: Path, output: str) -> None:
    absent = {event["round"]: event for event in events(out, "absent")}
    reasons = {**dict(enumerate((reason for _, reason in TRAINING), start=1)), "test": TEST[1]}
    assert absent.keys() == reasons.keys()
    assert {event["site"] for event in absent.values()} == {LIAR}
    for number, reason in reasons.items():
        assert reason in absent[number]["reason"], number
        assert len(absent[number]["reason"]) <= 500
    for number in range(1, len(TRAINING) + 1):
        assert f"round {number} went without {LIAR}: {absent[number]['reason']}" in output
    assert "\n12:00:00  round 9 of 9" not in output


def _check_files(out: Path, texts: list[str]) -> None:
    pages = ("summary.json", "rounds.jsonl", "events.jsonl", "audit.jsonl", "receipt.json", "report.html", CARD)
    for name in pages:
        assert raw_in((out / name).read_text(encoding="utf-8"), "\n\t") == set(), name
    assert [raw_in(text) for text in texts] == [set()] * len(texts)
    assert max(map(len, (out / "audit.jsonl").read_bytes().splitlines())) < 2**14
