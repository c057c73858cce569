"""Over the network: a site that declines, what each side wrote down of a run, and a line that a kill tore."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.network.conftest import Trial
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
