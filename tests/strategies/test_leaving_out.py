"""Sites whose claims, labels or layout do not fit are left out while others go on; one site cannot push others out."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from common.config import ParticipationSection
from common.errors import BadInput
from common.wire.fleet_protocol import REFUSAL
from common.wire.records import RefusalNoted, RollCallAnswer
from strategies.engine.claims import SiteAdmissionLimits, find_admission_limit_faults
from strategies.engine.membership import RunMembership
from strategies.registry import build_experiment_strategy
from tests.client.rounds import plan
from tests.strategies.scripted import Answer, Clock, ScriptedGrid, Site, record

HONEST = ("Effusion", "Nodule")
NAMES = ("north", "south", "east", "west")


def answer(name: str, classes: tuple[str, ...] = HONEST, **changes: Any) -> RollCallAnswer:
    return replace(RollCallAnswer("run-1", name, classes, classes, 10, 5, 9, "layout", "0.1.0"), **changes)


OTHERWISE = answer("west", ("effusion",))
"""A site that spells a class otherwise."""


def hospital(answer: RollCallAnswer) -> Site:
    return Site([Answer(0, record(answer)), Answer(0, record(RefusalNoted("run-1", answer.site)))])


def gathered(
    clock: Clock,
    *answers: RollCallAnswer,
    min_sites: int,
    method: str = "surgical",
    claims: Mapping[str, SiteAdmissionLimits] | None = None,
) -> tuple[RunMembership, Any]:
    """The members of a run after the roll call, and the network that carried it."""
    of = plan(method, {})
    nodes = {number: each.site for number, each in enumerate(answers, start=7)}
    grid: Any = ScriptedGrid({number: hospital(each) for number, each in enumerate(answers, start=7)}, clock)
    members = RunMembership(
        build_experiment_strategy(of),
        of,
        ParticipationSection(min_sites=min_sites),
        "run-1",
        registered=lambda: nodes,
        admission=[partial(find_admission_limit_faults, lambda: claims or {})],
    )
    members.call_roll(grid, len(answers))
    return members, grid


@pytest.mark.parametrize(
    ("changes", "limits", "reason"),
    [
        (
            {"classes": (*HONEST, "Mass")},
            SiteAdmissionLimits(frozenset(HONEST)),
            'claims "Mass", which it was not admitted',
        ),
        ({"train_samples": 10**9}, SiteAdmissionLimits(images=5000), "claims 1,000,000,000 training images"),
    ],
    ids=["a_class", "images"],
)
def test_a_site_that_claims_more_than_it_was_admitted_for_is_told_and_the_others_go_on(
    changes: dict[str, Any], limits: SiteAdmissionLimits, reason: str, clock: Clock
) -> None:
    lists = {"west": limits, "north": SiteAdmissionLimits(frozenset(HONEST), images=10)}
    answers = answer("north"), answer("south"), answer("west", **changes)
    members, grid = gathered(clock, *answers, min_sites=2, claims=lists)
    assert members.members.keys() == {"north", "south"}
    assert members.contract.class_names == HONEST
    assert reason in members.left_out_sites["west"]
    assert [message.metadata.message_type for message in grid.to(9)][-1] == REFUSAL
    with pytest.raises(BadInput, match=reason):
        gathered(clock, *answers, min_sites=0, claims=lists)


@pytest.mark.parametrize("position", range(3))
def test_one_site_that_spells_a_class_otherwise_is_left_out_whatever_its_name(position: int, clock: Clock) -> None:
    answers = [answer(name) for name in NAMES[:3]]
    answers[position] = answer(NAMES[position], ("effusion", "Nodule"))
    members, _ = gathered(clock, *answers, min_sites=2)
    assert members.members.keys() == set(NAMES[:3]) - {NAMES[position]}
    assert '"effusion" = "Effusion"' in members.left_out_sites[NAMES[position]]
    assert members.contract.class_names == HONEST


@pytest.mark.parametrize(
    ("south", "min_sites", "reason"),
    [
        (answer("south", ("Nodule",)), 1, "look like one class"),
        (answer("south"), 0, r'"effusion" \(site west\) look like one class'),
        (answer("south"), 3, "site.toml of west"),
    ],
    ids=["a_tie_is_nobodys_fault", "every_site_is_needed", "too_few_are_left"],
)
def test_one_class_in_two_spellings_stops_the_run_where(
    south: RollCallAnswer, min_sites: int, reason: str, clock: Clock
) -> None:
    with pytest.raises(BadInput, match=reason):
        gathered(clock, answer("north"), south, OTHERWISE, min_sites=min_sites)


def test_a_site_that_contradicts_itself_has_no_vote(clock: Clock) -> None:
    both = [answer(name, ("Effusion", "effusion")) for name in ("east", "west")]
    members, _ = gathered(clock, answer("north", ("Effusion",)), *both, min_sites=1)
    assert members.members.keys() == {"north"}
    assert '"Effusion", "effusion" look like one class' in members.left_out_sites["east"]


@pytest.mark.parametrize("classes", [(), ("Nodule", "Nodule")], ids=["none", "one twice"])
def test_a_site_without_good_labels_is_left_out(classes: tuple[str, ...], clock: Clock) -> None:
    members, _ = gathered(clock, answer("north"), answer("west", classes), min_sites=1)
    assert members.members.keys() == {"north"}


def test_one_site_with_another_class_does_not_stop_a_method_of_equal_classes(clock: Clock) -> None:
    answers = [answer(name) for name in NAMES[:3]]
    members, _ = gathered(clock, *answers, answer("west", (*HONEST, "Mass")), min_sites=2, method="fedavg")
    assert members.members.keys() == set(NAMES[:3])
    assert "fedavg needs the same classes at every site" in members.left_out_sites["west"]


def test_sites_that_build_another_model_are_left_out_with_their_classes(clock: Clock) -> None:
    west = answer("west", (*HONEST, "Mass"), layout="other")
    members, _ = gathered(clock, answer("north"), answer("south"), west, min_sites=2)
    assert members.contract.class_names == ("Effusion", "Mass", "Nodule")
    settled = members.fix_run_model_layout("layout")
    assert members.members.keys() == {"north", "south"} == set(settled.sites)
    assert settled.class_names == HONEST
    assert "builds another model" in members.left_out_sites["west"]
    sent = members.bytes_down["north"]
    assert members.fix_run_model_layout("layout") == settled
    assert members.bytes_down["north"] == sent


def test_where_most_build_another_model_than_the_coordinator_the_run_stops(clock: Clock) -> None:
    others = [answer(name, layout="other") for name in NAMES[:2]]
    members, _ = gathered(clock, *others, answer("west"), min_sites=2)
    with pytest.raises(BadInput, match="builds another model"):
        members.fix_run_model_layout("layout")
