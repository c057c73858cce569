"""Over the network: two studies with no hospital in common at one coordinator at a time, and what is refused."""

import pytest

from tests.network.federated import SLOW, Federation, events, hash_in, sites_by_round
from tests.network.real import eventually, flwr_server, lines_of, summary_of

pytestmark = pytest.mark.slow

FIRST = ('participation.sites=["east", "north"]', "run.rounds=8", "run.name=first", SLOW)
SECOND = ('participation.sites=["south"]', "run.rounds=8", "run.name=second", SLOW)


def test_two_studies_go_on_side_by_side_through_kills_and_give_the_models_that_they_give_alone(
    federation: Federation,
) -> None:
    coordinator = federation.coordinator
    for name, settings in (("first", FIRST), ("second", SECOND)):
        federation.run(*settings, out=f"{name}-alone", sites=0, once=True).succeeds()
    first = federation.run(*FIRST, out="first", sites=0)
    second = federation.run(*SECOND, out="second", sites=0)
    for run in (first, second):
        run.says("round 1 of 8")
    names = [run["name"] for run in coordinator.now["runs"]]
    assert sorted(names) == ["first", "second"]
    status = flwr_server("status", coordinator.folder).out
    assert "run first (running)" in status
    assert "run second (running)" in status
    third = federation.run('participation.sites=["north"]', out="third", sites=0, once=True)
    assert third.ends() == 2
    assert "north takes part in another run, which has not ended: first (east, north)." in " ".join(
        third.output.split()
    )
    of_all = federation.run(out="of-all", once=True)
    assert of_all.ends() == 2
    at_work = "another flwr-server run is at work in this folder: first (east, north); second (south)."
    assert at_work in " ".join(of_all.output.split())
    coordinator.kill_leading(first)
    eventually(lambda: events(federation.folder / "first", "resumed"), "the first study resumes after the kill")
    for run in (first, second):
        run.succeeds()
    for name, members in (("first", ["east", "north"]), ("second", ["south"])):
        out = federation.folder / name
        assert hash_in(out) == hash_in(federation.folder / f"{name}-alone")
        assert sites_by_round(out) == [members] * 8
        assert sorted(summary_of(out)["sites"]) == members
        assert summary_of(out)["absent"] == []
        assert events(out, "absent") == []
        assert flwr_server("verify", out).code == 0
    assert events(federation.folder / "second", "resumed") == []
    ended = [line["name"] for line in lines_of(coordinator.folder / "state" / "runs.jsonl") if line["state"] == "done"]
    assert sorted(ended[-2:]) == ["first", "second"]


@pytest.mark.network
def test_the_superlink_s_death_costs_neither_study_anything(federation: Federation) -> None:
    for name, settings in (("first", FIRST), ("second", SECOND)):
        federation.run(*settings, out=f"{name}-alone", sites=0, once=True).succeeds()
    runs = [federation.run(*settings, out=name, sites=0) for name, settings in (("first", FIRST), ("second", SECOND))]
    for run in runs:
        run.says("round 2 of 8")
    federation.coordinator.kill_superlink()
    for run in runs:
        run.succeeds()
    for name in ("first", "second"):
        assert hash_in(federation.folder / name) == hash_in(federation.folder / f"{name}-alone")


def test_a_member_that_nobody_admitted_is_named(federation: Federation) -> None:
    run = federation.run('participation.sites=["west"]', sites=0, once=True)
    assert run.ends() == 2
    assert 'participation.sites: has "west"' in " ".join(run.output.split())
