"""A site whose policy does not allow a run declines it with the reason; the run goes on without that site."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from client import simulation
from client.site.policy import Policy
from client.site.site import Site
from common.security.audit import Audit
from server.runs.verify import verify
from strategies.engine.events import TooFewSites
from tests.federations import federation

REASON = 'declines: policy.methods: it does not have "surgical".'


@pytest.fixture(autouse=True)
def _the_second_site_takes_part_in_fedavg_only(monkeypatch: pytest.MonkeyPatch) -> None:
    new_site = simulation._new_site

    def limited(*arguments: Any) -> Site:
        site = new_site(*arguments)
        return replace(site, policy=Policy(methods=("fedavg",))) if site.name == "site-2" else site

    monkeypatch.setattr(simulation, "_new_site", limited)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_run_goes_on_without_it_and_says_why(tmp_path: Path) -> None:
    summary = federation(tmp_path, "participation.min_sites=2", "run.rounds=1", "training.batch_size=128")
    run = tmp_path / "run"
    assert set(summary["sites"]) == {"site-1", "site-3"}
    # In simulation a node's name is its number: nodes are numbered from 2, and this one never said its name.
    said = [(line["site"], line["reason"]) for line in lines(run / "events.jsonl") if line["event"] == "left_out"]
    assert said == [("node 3", REASON)]
    assert [e["reason"] for e in Audit(run).entries() if e["event"] == "left_out"] == [REASON]
    assert [(e["record"], e["decision"]) for e in Audit(run / "sites" / "site-2").entries()] == [
        ("RollCall", "deny"),
        ("Error", "allow"),
    ]
    found = verify(run / "receipt.json")
    assert found.faults == []
    assert found.unknown == [
        "signatures: none, as in every simulation: the receipt does not prove who sent what",
        "sums: not added up again, for the run did not keep its updates (run.keep_updates); their hashes are checked",
    ]
    assert not (run / "updates").exists()


def test_a_run_that_needs_every_site_stops_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(TooFewSites) as stopped:
        federation(tmp_path)
    assert f"node 3: {REASON}" in str(stopped.value)
