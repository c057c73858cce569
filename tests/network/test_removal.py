"""Over the network: a hospital leaves, the coordinator sees which models hold something of it, and trains again."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.network.federated import Federation, admitted, sites_by_round
from tests.network.real import PARTIAL, flwr_server, summary_of

pytestmark = pytest.mark.slow


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    """Three hospitals of this test's own, for one of them does not come back."""
    with admitted(tmp_path, PARTIAL) as federation:
        federation.coordinator.start()
        federation.gather()
        yield federation


def test_a_hospital_that_leaves_is_refused_and_the_runs_with_it_are_listed_for_good(federation: Federation) -> None:
    coordinator = federation.coordinator
    federation.run("run.rounds=2", "run.name=with all", out="all", once=True).succeeds()
    without = ('participation.sites=["east", "south"]', "run.rounds=2", "run.name=without north")
    federation.run(*without, out="without", sites=0, once=True).succeeds()
    ended = flwr_server("remove", coordinator.folder, "north", "--reason", "contract ended", "--yes", "--json")
    assert ended.code == 0, ended.out
    traces = json.loads(ended.out)
    (run,) = traces["affected"]
    assert (run["name"], run["rounds"]) == ("with all", [1, 2])
    assert run["model_sha256"] == summary_of(federation.folder / "all")["model_sha256"]
    assert traces["unaffected"] == [str(federation.folder / "without")]
    record = json.loads((coordinator.folder / "removed" / "north.json").read_text())
    assert (record["site"], record["reason"]) == ("north", "contract ended")
    assert record["affected"] == traces["affected"]
    text = " ".join(flwr_server("remove", coordinator.folder, "north").out.split())  # asks no more: it is revoked
    assert "trained in rounds 1 to 2" in text
    federation.run("run.rounds=2", out="again", sites=2, once=True).succeeds()
    assert sites_by_round(federation.folder / "again") == [["east", "south"]] * 2
    assert "is not an admitted site" in flwr_server("remove", coordinator.folder, "nort", "--yes").err
