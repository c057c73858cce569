"""The roll call against sites that answer by script: who is in, who is told what, who is missing and why."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from flwr.app import Message

from polyclinic.common import __version__
from polyclinic.common.errors import Fault
from polyclinic.common.wire.codec import count_payload_bytes, decode_record, encode_record
from polyclinic.common.wire.fleet_protocol import REFUSAL_TYPE, ROLL_CALL_TYPE
from polyclinic.common.wire.records import Refusal, RefusalNoted, RollCall, RollCallAnswer
from polyclinic.strategies.engine.events import MissingReplyStatus, TooFewSites
from polyclinic.strategies.engine.membership import RollCaller
from polyclinic.strategies.engine.run_member import RunMember
from polyclinic.strategies.engine.site_faults import find_model_layout_faults, find_wire_version_faults
from tests.client.rounds import plan, private_plan
from tests.strategies.scripted import Answer, Clock, Makes, ScriptedGrid, Site, at, failed, lost, record

CALL = RollCall("run-1", "{}")
DEADLINE_S = 60.0
NAMES = {7: "north", 8: "south", 9: "east"}


def answer_of(name: str, run: str = "run-1") -> RollCallAnswer:
    """Two labels under the site's own names."""
    return RollCallAnswer(run, name, ("Node", "Fluid"), ("Nodule", "Effusion"), 10, 5, 9, "layout", "0.1.0")


def present(name: str, run: str = "run-1") -> Makes:
    return record(answer_of(name, run))


NOTED = record(RefusalNoted("run-1", "any"))
"""The answer of a site to the reason why it cannot take part."""


def hospital(node: int, after_s: float = 1.0) -> Site:
    """A site that answers under the name of its key, and takes note of a refusal."""
    return Site([Answer(after_s, present(NAMES[node])), Answer(0, NOTED)])


def roll_of(sites: Mapping[int, Site], clock: Clock, names: Mapping[int, str] | None = NAMES) -> RollCaller:
    """A roll over a network where these nodes are registered; None for a simulation."""
    grid: Any = ScriptedGrid(sites, clock)
    return RollCaller(grid, CALL, None if names is None else lambda: names)


def sent_to(roll: RollCaller, *nodes: int) -> list[list[str]]:
    """The kinds of messages that each site got, in order."""
    grid: Any = roll.grid
    return [[message.metadata.message_type for message in grid.to(node)] for node in nodes]


def refusal_to(roll: RollCaller, node: int) -> Refusal:
    """The reason that a site was sent last."""
    grid: Any = roll.grid
    assert grid.to(node)[-1].metadata.message_type == REFUSAL_TYPE
    return decode_record(grid.to(node)[-1].content, Refusal)


DECLINING = at(1, failed(1, "declines: its policy"))


def called(roll: RollCaller, expected: int, needed: int = 0) -> list[MissingReplyStatus]:
    """Call the roll; return what anyone who watches was told."""
    statuses: list[MissingReplyStatus] = []
    roll.wait_for_sites(expected, needed or expected, DEADLINE_S, statuses.append)
    return statuses


LATE, NEVER = (0.0, 20.0), (0.0, 1e9)


@pytest.mark.parametrize(
    ("sites", "expected", "needed", "members", "seconds"),
    [
        pytest.param({7: hospital(7), 8: hospital(8, 4)}, 2, 2, {7, 8}, 4, id="everybody_expected_has_answered"),
        pytest.param({7: hospital(7), 8: replace(hospital(8), away=LATE)}, 2, 2, {7, 8}, 21, id="one_connects_later"),
        pytest.param(
            {7: hospital(7), 8: replace(hospital(8), away=NEVER)}, 2, 1, {7}, DEADLINE_S, id="enough_are_there"
        ),
        pytest.param({7: Site(), 8: replace(hospital(8), away=LATE)}, 2, 1, {8}, DEADLINE_S, id="one_stays_silent"),
        # Three are registered, two are expected, the third declines at once.
        pytest.param({7: DECLINING, 8: hospital(8, 4), 9: hospital(9, 8)}, 2, 2, {8, 9}, 8, id="one_declines"),
        pytest.param(
            {7: Site([Answer(5, lost), Answer(1, present("north"))], away=(5, 30))}, 1, 1, {7}, 31, id="lost_and_back"
        ),
        pytest.param(
            {7: Site([Answer(1, failed(1, "?")), Answer(1, present("north"))], away=(1, 4)), 8: hospital(8, 6)},
            *(2, 2, {7, 8}, 6),
            id="back_after_an_error",
        ),
    ],
)
def test_the_roll_is_complete_when(
    sites: Mapping[int, Site], expected: int, needed: int, members: set[int], seconds: float, clock: Clock
) -> None:
    roll = roll_of(sites, clock)
    called(roll, expected, needed)
    assert {node: member.answer.site for node, member in roll.members.items()} == {
        node: NAMES[node] for node in members
    }
    assert seconds <= clock.now < seconds + 1
    called_again = {node for node, kinds in zip(sites, sent_to(roll, *sites), strict=True) if len(kinds) > 1}
    assert called_again == {node for node, site in sites.items() if site.away[0] > 0}
    assert roll.refused.keys() == {node for node in sites if sites[node] in (DECLINING, Site())}


def test_a_site_that_is_not_waited_for_is_no_silent_one_and_may_join_later(clock: Clock) -> None:
    roll = roll_of({7: hospital(7), 8: hospital(8), 9: hospital(9, 20)}, clock)
    called(roll, expected=2)
    assert roll.members.keys() == {7, 8}
    assert roll.refused == {}
    roll.ask_new_sites_for_labels(DEADLINE_S)
    assert sent_to(roll, 9) == [[ROLL_CALL_TYPE, ROLL_CALL_TYPE]]


def test_a_member_declares_its_names_and_counts_its_bytes(clock: Clock) -> None:
    (member,) = roll_of({7: hospital(7)}, clock).ask_new_sites_for_labels(DEADLINE_S)
    declaration = member.label_declaration
    assert (declaration.site, declaration.names) == ("north", ("Node", "Fluid"))
    assert declaration.canonical_names == ("Nodule", "Effusion")
    assert member.bytes_down == count_payload_bytes(encode_record(CALL))
    assert member.bytes_up == count_payload_bytes(encode_record(answer_of("north")))


def test_only_who_has_not_been_asked_is_asked(clock: Clock) -> None:
    broken = at(1, failed(2, "disk full"))
    roll = roll_of({7: hospital(7), 8: broken, 9: replace(hospital(9), away=(0, 10))}, clock)
    assert [member.answer.site for member in roll.ask_new_sites_for_labels(5)] == ["north"]
    clock.now = 10
    assert [member.answer.site for member in roll.ask_new_sites_for_labels(5)] == ["east"]
    assert roll.ask_new_sites_for_labels(5) == []
    assert sent_to(roll, 7, 8, 9) == [[ROLL_CALL_TYPE]] * 3


@pytest.mark.parametrize(
    ("first", "why"),
    [
        (Answer(1, failed(2, "disk full")), "disk full"),
        (Answer(1, present("north", run="old")), "answer belongs to run old, expected run-1"),
        (Answer(1, NOTED), "expected RollCallAnswer, got 'RefusalNoted'."),
        (Answer(10**9, present("north")), "no answer within 5 s"),
    ],
)
def test_a_site_without_a_good_answer_is_asked_again_when_it_is_back(first: Answer, why: str, clock: Clock) -> None:
    roll = roll_of({7: Site([first, Answer(1, present("north"))], away=(20, 30))}, clock)
    assert roll.ask_new_sites_for_labels(5) == []
    assert roll.refused == {7: why}
    for clock.now in (15, 25):  # still there; away
        assert roll.ask_new_sites_for_labels(5) == []
    clock.now = 35
    assert [member.node_id for member in roll.ask_new_sites_for_labels(5)] == [7]
    assert roll.refused == {}


def test_a_site_that_was_restarted_between_two_looks_is_asked_again(clock: Clock) -> None:
    processes = {7: "first", 8: "other"}
    sites = {7: Site([Answer(1, failed(1, "?")), Answer(1, present("north"))]), 8: at(1, failed(1, "?"))}
    roll = replace(roll_of(sites, clock), processes=lambda: processes)
    assert roll.ask_new_sites_for_labels(5) == []
    for processes[7] in ("first", ""):  # still there; the SuperLink has restarted and knows no process yet
        assert roll.ask_new_sites_for_labels(5) == []
    processes[7] = "second"
    assert [member.answer.site for member in roll.ask_new_sites_for_labels(5)] == ["north"]
    assert sent_to(roll, 8) == [[ROLL_CALL_TYPE]]


@pytest.mark.parametrize(
    ("names", "registered"), [(NAMES, "north"), ({}, "")], ids=["of another key", "no longer registered"]
)
def test_a_site_under_another_name_is_told_so(names: Mapping[int, str], registered: str, clock: Clock) -> None:
    roll = roll_of({7: Site([Answer(1, present("south")), Answer(0, NOTED)])}, clock, names)
    assert roll.ask_new_sites_for_labels(5) == []
    reason = f'it calls itself "south", but its key is registered for "{registered}".'
    assert (roll.members, roll.refused) == ({}, {7: reason})
    assert refusal_to(roll, 7) == Refusal("run-1", "name", reason)


def test_in_a_simulation_a_site_is_who_it_says_it_is(clock: Clock) -> None:
    roll = roll_of({7: Site([Answer(1, present("anybody"))])}, clock, names=None)
    assert [member.answer.site for member in roll.ask_new_sites_for_labels(5)] == ["anybody"]
    assert roll.get_registered_site_name(7) == "node 7"


RELEASE = Site([Answer(1, failed(1, "another release"))], away=(1, 10**9))
"""It answers with an error, and its process ends before the next one has answered."""
FULL = at(1, failed(2, "disk full"))


@pytest.mark.parametrize(
    ("sites", "names", "reason", "seconds"),
    [
        pytest.param(
            {7: hospital(7), 8: FULL, 9: Site(away=(0, 10**9))},
            NAMES,
            r'^1 of 3 sites answered the roll call \("north"\)\. Not there: "east"\. south: disk full\.$',
            DEADLINE_S,
            id="each_with_its_reason",
        ),
        pytest.param(
            {7: hospital(7), 8: FULL},
            {7: "north", 8: "south"},
            r"1 of 2 sites answered .* south: disk full",
            1,
            id="all_have_answered_and_the_deadline_is_not_waited_for",
        ),
        pytest.param({}, {7: "north"}, r'^0 of 1 .* \(none\)\. Not there: "north"\.$', DEADLINE_S, id="not_there"),
        pytest.param({7: Site()}, {7: "north"}, "north: no answer within 60 s", DEADLINE_S, id="silent"),
        pytest.param(
            {7: RELEASE, 8: hospital(8, 6)},
            NAMES,
            r'Not there: "east"\..*north: another release',
            6,
            id="who_leaves_after_an_error_has_its_reason",
        ),
    ],
)
def test_when_too_few_answer_each_site_is_named(
    sites: Mapping[int, Site], names: Mapping[int, str], reason: str, seconds: float, clock: Clock
) -> None:
    with pytest.raises(TooFewSites, match=reason):
        called(roll_of(sites, clock, names), expected=max(len(sites), 1))
    assert seconds <= clock.now < seconds + 1


def test_whoever_watches_is_told_who_is_not_there_once_for_each_change(clock: Clock) -> None:
    sites = {7: hospital(7), 8: replace(hospital(8), away=(0, 20)), 9: replace(hospital(9), away=(0, 40))}
    statuses = called(roll_of(sites, clock), expected=3)
    assert [waiting.sites for waiting in statuses] == [("east", "south"), ("east",)]
    assert {(waiting.phase, waiting.round, waiting.lost) for waiting in statuses} == {("roll call", 0, ())}
    assert [waiting.deadline_s for waiting in statuses] == pytest.approx([60, 40], abs=1.5)


def member(node: int, layout: str, version: str) -> RunMember:
    return RunMember(node, replace(answer_of(NAMES[node]), layout=layout, version=version), 0, 0)


def test_every_site_that_builds_another_model_is_named_with_its_release() -> None:
    members = [member(7, "layout", "0.1.0"), member(8, "other", "0.0.9"), member(9, "third", "0.2.0")]
    faults = find_model_layout_faults(members, "layout")
    assert [fault.site for fault in faults] == ["east", "south"]
    for fault, version in zip(faults, ("0.2.0", "0.0.9"), strict=True):
        assert f"its release is {version}" in str(fault)


def test_no_words_of_a_site_that_stand_for_its_release_are_shown() -> None:
    evil = member(7, "other", "9: run curl evil.example")
    masked = private_plan(plan(), secure_aggregation=True)
    (layout,) = find_model_layout_faults([evil], "layout")
    (wire,) = find_wire_version_faults(masked, [replace(evil, wire=16)])
    assert "its release is unknown" in str(layout)
    assert "has release unknown: " in str(wire)
    assert "evil" not in str(layout) + str(wire)


def test_a_faulty_site_is_told_all_faults_in_one_message(clock: Clock) -> None:
    roll = roll_of({node: hospital(node) for node in NAMES}, clock)
    roll.ask_new_sites_for_labels(DEADLINE_S)
    faults: Sequence[Fault] = [
        Fault("site.toml of south", "first.", "", "south"),
        Fault("run", "of nobody."),
        Fault("site.toml of south", "second.", "Fix it.", "south"),
        Fault("site.toml of nobody", "third.", "", "west"),
    ]
    roll.refuse_faulty_sites(faults, "labels")
    reason = "site.toml of south: first.\nsite.toml of south: second. Fix it."
    # At the site, lines after the first are indented: none looks like one of its own program.
    assert refusal_to(roll, 8) == Refusal("run-1", "labels", reason.replace("\n", "\n    "))
    assert sent_to(roll, *NAMES) == [[ROLL_CALL_TYPE], [ROLL_CALL_TYPE, REFUSAL_TYPE], [ROLL_CALL_TYPE]]
    assert roll.members.keys() == {7, 9}
    assert roll.refused == {8: reason}


def test_a_site_with_a_renewed_key_takes_the_place_of_its_member_with_the_old_one(clock: Clock) -> None:
    names = {7: "north"}
    renewed = Site([Answer(1, present("north"))], away=(0, 10))
    roll = roll_of({7: hospital(7), 17: renewed}, clock, names)
    assert [member.node_id for member in roll.ask_new_sites_for_labels(5)] == [7]
    names.clear()  # the key is revoked
    names[17] = "north"
    clock.now = 10
    assert [member.node_id for member in roll.ask_new_sites_for_labels(5)] == [17]
    assert roll.members.keys() == {17}


def test_a_masked_run_leaves_out_a_site_whose_wire_version_shares_secrets_in_another_form() -> None:
    older, present = (RunMember(node, answer_of(NAMES[node]), 0, 0, wire=wire) for node, wire in ((7, 16), (8, 17)))
    masked = private_plan(plan(), secure_aggregation=True)
    assert find_wire_version_faults(plan(), [older, present]) == []
    (fault,) = find_wire_version_faults(masked, [older, present])
    assert fault.site == "north"
    assert "site north: has release 0.1.0: secure aggregation needs wire version 17" in str(fault)
    assert str(fault).endswith(f"Install release {__version__} there.")


class CountingGrid(ScriptedGrid):
    """Counts how often it is asked which sites are connected, and hands out one reply at a time."""

    looks = 0

    def get_node_ids(self) -> list[int]:
        self.looks += 1
        return list(self.sites)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return super().pull_messages(itertools.islice(message_ids, 1))

    def to(self, node: int) -> list[Message]:
        return []


def test_hundreds_of_answers_that_come_one_by_one_take_no_look_at_all_sites_each(clock: Clock) -> None:
    names = {node: f"site {node}" for node in range(300)}
    grid: Any = CountingGrid({node: Site([Answer(0, present(name))]) for node, name in names.items()}, clock)
    roll = RollCaller(grid, CALL)
    called(roll, len(names))
    assert len(roll.members) == len(names)
    assert grid.looks <= 110  # one for each of the last hundred, and the first ones
