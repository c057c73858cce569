"""Over the network: a site that declines, what each side wrote down of a run, and a line that a kill tore."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.network.conftest import Trial
from tests.network.federated import SLOW, Federation
from tests.network.real import Site, eventually, flwr_client, flwr_server

pytestmark = pytest.mark.torture

Hospital = Callable[[str], Site]


def test_a_site_that_declines_goes_on_and_what_the_other_sent_is_in_both_audits(
    trial: Trial, hospital: Hospital, tmp_path: Path
) -> None:
    open_one, picky = hospital("open"), hospital("picky")
    picky.edit(picky.toml, ("[policy]", '[policy]\nmethods = ["fedavg"]'))
    for site in (open_one, picky):
        site.start().says("connected to trial")
    out = tmp_path / "run"
    options = ("run.rounds=2", "participation.min_sites=1", "run.keep_updates=true")
    run = trial.coordinator.run(trial.experiment, out, *options, sites=2)
    assert run.ends() == 0, run.said
    reason = 'declines: policy.methods: it does not have "surgical".'
    assert f"the run goes on without picky: {reason}" in run.said
    assert set(json.loads((out / "summary.json").read_text(encoding="utf-8"))["sites"]) == {"open"}
    assert picky.program.runs
    assert f"this site {reason}" in picky.program.said

    verified = flwr_server("verify", out / "receipt.json")
    assert verified.code == 0, verified.out
    assert "round 2: 1 updates make the model" in verified.out
    assert flwr_client("audit", "verify", open_one.folder, "--receipt", out / "receipt.json").code == 0

    open_one.program.kill()
    audit = open_one.folder / "state" / "audit.jsonl"
    with audit.open("ab") as file:
        file.write(audit.read_bytes().splitlines()[-1][:100])
    open_one.start().says("the audit's last line was torn by a kill (100 bytes)")
    eventually(lambda: flwr_client("audit", "verify", open_one.folder).code == 0, "the chain goes on")
    assert "was torn by a kill; entry" in flwr_client("audit", "verify", open_one.folder).out

    lines = audit.read_bytes().splitlines(keepends=True)
    audit.write_bytes(b"".join(lines[:2] + lines[3:]))
    assert flwr_client("audit", "verify", open_one.folder).code == 1


def test_a_site_that_its_operator_stopped_is_not_waited_for_stands_once_in_the_events_and_is_named_by_resume(
    federation: Federation, tmp_path: Path
) -> None:
    coordinator, north, out = federation.coordinator, federation.north, tmp_path / "run"
    sets = (SLOW, "run.rounds=500", "participation.min_sites=1", "participation.roll_call_deadline_s=8")
    run = federation.run(out, *sets)
    run.says("round 2 of 500")
    assert north.program.stop() == 0
    run.says("north signed off at")
    began, seen = coordinator.now["run"]["round"], list[str]()
    until = time.monotonic() + 60
    while (now := coordinator.now["run"])["round"] < began + 8 and time.monotonic() < until:
        seen += now["waiting_for"]
    assert seen
    assert "north" not in seen
    assert run.stop() == 3
    events = (out / "events.jsonl").read_text(encoding="utf-8")
    assert events.count("signed off") == 1
    again = federation.run(out, *sets, options=("--resume",))
    assert again.ends() == 1
    assert 'Not there of the sites that took part: "north". Start them, and resume.' in " ".join(again.said.split())


def test_a_site_whose_coordinator_is_away_reads_no_words_of_grpc(federation: Federation) -> None:
    site = federation.south
    assert federation.coordinator.program.stop() == 0
    try:
        site.program.says("trying again for as long as it takes")
    finally:
        federation.coordinator.start()
    said = site.program.said
    for words in ("failed to connect to all addresses", "ipv4:", "UNKNOWN"):
        assert words not in said, said
