"""Over the network: a run has a title, which both sides read wherever the run is named."""

import json

import pytest

from polyclinic.server.reporting.model_card import render_model_card
from polyclinic.server.reporting.run_report import write_run_report
from tests.network.federated import Federation
from tests.network.real import flwr_client, flwr_server, summary_of

pytestmark = pytest.mark.slow
NAME = 'Chest "findings", first study'


def test_a_run_is_called_by_its_title_on_both_sides(federation: Federation) -> None:
    run = federation.run("run.rounds=1", options=("--name", NAME), once=True)
    run.succeeds()
    coordinator, out = federation.coordinator.folder, federation.out
    history = json.loads(flwr_server("runs", coordinator, "--json").out)
    assert history[-1]["name"] == NAME
    assert f"run {NAME} (done)" in flwr_server("status", coordinator).out
    assert summary_of(out)["name"] == NAME
    page = write_run_report(out).read_text(encoding="utf-8")
    assert "<title>Chest &#34;findings&#34;, first study, seed 3" in page
    assert "<h1>Chest &#34;findings&#34;, first study</h1>" in page
    assert render_model_card(out).startswith("# Model card: Chest")
    for site in federation.sites:
        site.program.says(f"({NAME}): roll call answered")
        assert f'"{NAME}" round 0' in flwr_client("audit", "show", site.folder, "--tail", 0).out


def test_without_a_title_a_run_is_called_after_its_experiment_file_also_when_it_is_resumed(
    federation: Federation,
) -> None:
    federation.run("run.rounds=1", once=True).succeeds()
    assert summary_of(federation.out)["name"] == "digits"
    other = federation.experiment.with_name("renamed.toml")
    other.write_bytes(federation.experiment.read_bytes())
    more = federation.coordinator.run(other, federation.out, "run.rounds=2", sites=3, options=("--resume",), once=True)
    more.succeeds()
    assert (summary_of(federation.out)["name"], summary_of(federation.out)["rounds"]) == ("digits", 2)
