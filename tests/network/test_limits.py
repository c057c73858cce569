"""Over the network: excessive plans, a site of another layout, another site's classes, and a damaged database."""

from collections.abc import Iterator

import pytest

from polyclinic.common.security.audit import AuditLog
from tests.network.federated import SLOW, Federation, events, sites_by_round
from tests.network.real import eventually, flwr_server

pytestmark = pytest.mark.slow


def test_every_site_declines_an_excessive_plan_and_works_on(federation: Federation) -> None:
    """One plan of tests/client/test_excessive_plans.py, over processes."""
    run, rule = federation.run("model.image_size=4096", once=True), "policy.maximum_image_size"
    assert run.ends() == 1
    assert run.output.count(f"declines: {rule}: ") >= 3
    for site in federation.sites:
        denied = [line for line in AuditLog(site.folder / "state").read_entries() if line.get("decision") == "deny"]
        assert (denied[-1]["record"], denied[-1]["rule"]) == ("RollCall", rule)
        assert site.program.runs


LIAR = """
import sys
from dataclasses import replace
from polyclinic.client import app
honest = app.answer_roll_call
app.answer_roll_call = lambda site, call: replace(honest(site, call), **LIE)
from polyclinic.client.cli import main
main(sys.argv[1:])
"""


@pytest.fixture
def liar(federation: Federation) -> Iterator[None]:
    """South ends with its refusal; it comes back honest, and admitted for any class."""
    yield
    federation.south.program.stop()
    request = federation.south.folder / "south.request"
    assert flwr_server("admit", federation.coordinator.folder, request, "--yes", "--classes", "").code == 0
    federation.gather()


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        ('{"layout": "another"}', "builds another model from this plan"),
        ('{"names": ("5", "secret"), "class_names": ("5", "secret")}', "which it was not admitted for"),
    ],
    ids=["layout", "claims"],
)
@pytest.mark.network
@pytest.mark.usefixtures("liar")
def test_a_site_that_does_not_fit_is_left_out_and_named(lie: str, reason: str, federation: Federation) -> None:
    request = federation.south.folder / "south.request"
    assert flwr_server("admit", federation.coordinator.folder, request, "--yes", "--classes", "0,1,5,6").code == 0
    federation.south.program.stop()
    program = f"LIE = {lie}{LIAR}"
    federation.south.start_by("-c", program, "start", federation.south.folder)
    federation.coordinator.sees(*federation.sites)
    federation.run("participation.min_sites=2", "run.rounds=1").succeeds()
    (left,) = events(federation.out, "left_out")
    assert left["site"] == "south"
    assert reason in left["reason"]
    assert sites_by_round(federation.out) == [["east", "north"]]
    assert reason in federation.south.program.output


@pytest.mark.network
def test_a_run_ends_in_the_same_model_after_a_database_is_damaged(federation: Federation) -> None:
    coordinator = federation.coordinator
    run = federation.run(SLOW, "run.rounds=4")
    eventually(lambda: (federation.out / "rounds.jsonl").exists(), "a round")
    coordinator.program.stop()
    database = coordinator.folder / "state" / "superlink.db"
    database.write_bytes(database.read_bytes()[:5000])
    coordinator.start().says("state/superlink.db is damaged")
    federation.ends_unharmed(run, 4, SLOW, "run.rounds=4")
