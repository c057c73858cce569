"""What happens to a run when a program dies, hangs, comes late or goes: it goes on, or says why not."""

from pathlib import Path

import pytest

from tests.network.federated import (
    EVERYBODY,
    REMEMBERING,
    SLOW,
    Federation,
    admitted,
    events,
    hash_in,
    sites_by_round,
    undisturbed,
)
from tests.network.real import PARTIAL, lines_of

pytestmark = pytest.mark.slow


@pytest.mark.network
def test_sites_that_start_before_the_coordinator_wait_for_it(tmp_path: Path) -> None:
    with admitted(tmp_path, PARTIAL) as federation:
        for site in federation.sites:
            site.start().says("no connection to")
        federation.coordinator.start()
        for site in federation.sites:
            assert "Connection refused; trying again" in site.program.output
            for words in ("failed to connect to all addresses", "ipv4:", "UNKNOWN"):  # gRPC's
                assert words not in site.program.output
            site.program.says("connected to trial")


def test_a_site_killed_in_a_round_takes_its_work_up_again(federation: Federation) -> None:
    run = federation.run(SLOW, "run.rounds=3")
    federation.north.works_on("train", 2)
    federation.north.program.kill()
    federation.north.start().says("taking up again the work that was interrupted")
    federation.ends_unharmed(run, 3, SLOW, "run.rounds=3")


@pytest.mark.network
def test_a_site_that_comes_in_round_3_takes_part_from_round_4(federation: Federation) -> None:
    federation.stop(federation.south)
    run = federation.run(SLOW, "run.rounds=5", "participation.min_sites=2", sites=2)
    federation.north.works_on("train", 3)
    with federation.north.program.frozen():
        federation.south.start()
        federation.coordinator.sees(federation.south)
    run.succeeds()
    assert sites_by_round(federation.out) == [["east", "north"]] * 3 + [EVERYBODY] * 2
    (joined,) = events(federation.out, "joined")
    assert (joined["round"], joined["site"]) == (4, "south")
    assert "south joins in round 4" in run.output


@pytest.mark.network
def test_a_late_site_with_a_class_that_the_run_does_not_have_is_refused(federation: Federation) -> None:
    federation.stop(federation.north)
    run = federation.run(SLOW, "run.rounds=2", "participation.min_sites=2", sites=2)
    federation.east.works_on("train", 1)
    with federation.east.program.frozen():
        federation.north.connect()
    federation.north.program.says('"7" is not a class of this run.')
    run.succeeds()
    assert federation.north.program.runs
    assert sites_by_round(federation.out) == [["east", "south"]] * 2


@pytest.mark.network
def test_a_run_goes_on_without_a_site_that_was_stopped_and_says_why(federation: Federation) -> None:
    run = federation.run(SLOW, "run.rounds=3", "participation.min_sites=2")
    federation.south.works_on("train", 2)
    assert federation.south.program.stop() == 0
    run.succeeds()
    assert sites_by_round(federation.out) == [EVERYBODY, ["east", "north"], ["east", "north"]]
    for line in lines_of(federation.out / "rounds.jsonl")[1:]:
        assert line["absent"].keys() == {"south"}
        assert line["absent"]["south"]
    (absent,) = events(federation.out, "absent")  # its operator's stop is told once
    assert (absent["round"], absent["site"]) == (2, "south")
    assert f"round 2 went without south: {absent['reason']}" in run.output


@pytest.mark.network
def test_a_late_reply_does_not_count_and_its_site_is_in_the_next_round(federation: Federation) -> None:
    deadlines = ("participation.min_sites=2", "participation.round_deadline_s=12")
    run = federation.run(SLOW, "run.rounds=2", *deadlines)
    federation.south.works_on("train", 1)
    with federation.south.program.frozen():
        run.says("round 1 went without south: no reply within 12 s")
    run.succeeds()
    assert sites_by_round(federation.out) == [["east", "north"], EVERYBODY]
    assert lines_of(federation.out / "rounds.jsonl")[0]["absent"] == {"south": "no reply within 12 s"}


@pytest.mark.network
def test_a_roll_call_that_too_few_answer_stops_the_run_with_names(federation: Federation) -> None:
    federation.stop(federation.south)
    run = federation.run("participation.roll_call_deadline_s=6")
    assert run.ends() == 1
    assert 'Not there: "south".' in run.output
    assert federation.coordinator.now["run"]["state"] == "stopped"


@pytest.mark.network
def test_a_run_that_is_killed_twice_resumes_and_ends_in_the_same_model(federation: Federation) -> None:
    overrides = (SLOW, "run.rounds=4", REMEMBERING)
    options = ("--once",)
    for server_round in (2, 3):
        run = federation.run(*overrides, options=options)
        federation.north.works_on("train", server_round)
        run.kill()
        options = ("--once", "--resume")
    run = federation.run(*overrides, options=options)
    federation.ends_unharmed(run, 4, *overrides)
    assert len(events(federation.out, "resumed")) == 2


STAGES = {
    "polyclinic_passing": ("run.rounds=3",),  # two rounds of passing, then all solve their rows at once
    "polyclinic_parallel": ("run.rounds=4", "method.mean_rounds=2"),  # rounds 2 and 3 are averaged, 4 solves rows
    "sfedkd": ("run.rounds=3",),  # from round 2 on with teachers
    "fedlsm": ("run.rounds=3",),
    "condistfl": ("run.rounds=3",),
    "scaffold": ("run.rounds=3", "training.optimizer=sgd"),  # control variates at both ends
    "fedrep": ("run.rounds=3",),  # each hospital keeps its head
    "moon": ("run.rounds=3",),  # each hospital keeps its last model
    "ditto": ("run.rounds=3",),  # each hospital has a model of its own in its memory
}
"""Methods whose later rounds go on from more than a model, or are other rounds."""


@pytest.mark.network
@pytest.mark.parametrize("method", STAGES)
def test_killed_in_each_stage_a_method_ends_in_the_same_model(method: str, federation: Federation) -> None:
    """The leading process dies in round 2 and the last slow one, and a hospital in the last slow one and before it."""
    overrides = (f"run.method={method}", *STAGES[method], "training.epochs=24", REMEMBERING)  # a round of seconds
    rounds = int(STAGES[method][0].partition("=")[2])
    # Where all hospitals solve head rows at once, a round is over before a kill can hit it.
    last = rounds - 1 if method == "polyclinic_parallel" else rounds
    run = federation.run(*overrides, options=("--once",))
    federation.north.works_on("train", 2)
    run.kill()
    run = federation.run(*overrides, options=("--once", "--resume"))
    for site, server_round in ((federation.south, last - 1), (federation.east, last)):
        site.works_on("train", server_round)
        site.program.kill()
        site.start()
    federation.north.works_on("train", last)
    run.kill()
    run = federation.run(*overrides, options=("--once", "--resume"))
    run.succeeds()
    assert [sorted(sites) for sites in sites_by_round(federation.out)] == [EVERYBODY] * rounds  # a pass has its order
    assert hash_in(federation.out) == undisturbed(federation.experiment, federation.folder / "through", *overrides)
    assert len(events(federation.out, "resumed")) == 2


@pytest.mark.network
def test_a_killed_run_does_not_stand_in_the_way_of_the_next(federation: Federation) -> None:
    first = federation.run(SLOW, "run.rounds=3", once=True, out="first")
    federation.north.works_on("train", 1)
    first.kill()
    assert federation.coordinator.now["run"]["state"] == "interrupted"
    federation.run("run.rounds=1", out="second").succeeds()
    assert sites_by_round(federation.folder / "second") == [EVERYBODY]
