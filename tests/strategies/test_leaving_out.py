"""Sites whose claims, labels or layout do not fit are left out while others go on; one site cannot push others out.

Of sites that contradict each other the coordinator's list decides, then most sites, then who was admitted first.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from flwr.app import Message

from polyclinic.common.config import ParticipationSection
from polyclinic.common.errors import BadInput
from polyclinic.common.wire.codec import decode_record
from polyclinic.common.wire.fleet_protocol import REFUSAL_TYPE, ROLL_CALL_TYPE
from polyclinic.common.wire.records import Refusal, RefusalNoted, RollCallAnswer
from polyclinic.data.base.pixel_form import PixelForm
from polyclinic.strategies.engine.admission_limits import (
    MAX_UNLISTED_CLASSES,
    SiteAdmissionLimits,
)
from polyclinic.strategies.engine.membership import RunMembership
from polyclinic.strategies.registry import build_experiment_strategy
from tests.client.rounds import plan
from tests.strategies.scripted import Answer, Clock, ScriptedGrid, Site, record

HONEST = ("Effusion", "Nodule")
NAMES = ("north", "south", "east", "west")


def answer(name: str, classes: tuple[str, ...] = HONEST, **changes: Any) -> RollCallAnswer:
    return replace(RollCallAnswer("run-1", name, classes, classes, 10, 5, 9, "layout", "0.1.0"), **changes)


OTHERWISE = answer("west", ("effusion",))
"""A site that spells a class otherwise."""


def hospital(answer: RollCallAnswer, after_s: float = 0) -> Site:
    noted = RefusalNoted("run-1", answer.site)

    def make(message: Message) -> Message:
        return record(answer if message.metadata.message_type == ROLL_CALL_TYPE else noted)(message)

    return Site([Answer(after_s, make)] * 2)


def gathered(
    clock: Clock,
    *answers: RollCallAnswer,
    min_sites: int,
    method: str = "surgical",
    claims: Mapping[str, SiteAdmissionLimits] | None = None,
    expected: int = 0,
    begun_classes: tuple[str, ...] = (),
    begun_pixels: PixelForm | None = None,
) -> tuple[RunMembership, Any]:
    """The members of a run after the roll call, and the network that carried it.

    Args:
        answers: One of each site; without ``claims`` the sites were admitted in this order.
        expected: Number of sites that the run waits for; 0 for all.
    """
    of = plan(method, {})
    nodes = {number: each.site for number, each in enumerate(answers, start=7)}
    sites = {number: hospital(each, after_s=number - 7) for number, each in enumerate(answers, start=7)}
    grid: Any = ScriptedGrid(sites, clock)
    limits = claims or {each.site: SiteAdmissionLimits(order=place) for place, each in enumerate(answers)}
    members = RunMembership(
        build_experiment_strategy(of),
        of,
        ParticipationSection(min_sites=min_sites),
        "run-1",
        registered=lambda: nodes,
        claims=lambda: limits,
        pixels=begun_pixels,
    )
    members.call_roll(grid, expected or len(answers), begun_classes)
    return members, grid


def listing(*names: str, order: int) -> SiteAdmissionLimits:
    """What a site was admitted for, with the coordinator's list of classes."""
    return SiteAdmissionLimits(frozenset(names), order=order)


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
    assert [message.metadata.message_type for message in grid.to(9)][-1] == REFUSAL_TYPE
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
        (answer("south"), 0, r'"effusion" \(site west\) look like one class'),
        (answer("south"), 3, "site.toml of west"),
    ],
    ids=["every_site_is_needed", "too_few_are_left"],
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


# ---------------------------------------------------------------------- contradictions without a majority

OWN = ("(Effusion", "Nodule")
"""A class of another site, as a site writes it that wants that site out."""


@pytest.mark.parametrize("names", [("north", "aaa"), ("north", "zzz")], ids=["before it by name", "after it"])
@pytest.mark.parametrize(
    "spelling",
    ["(Effusion", "EFFUSION", "Effusi\u00f6n", "\u0415ffusion", "Effus\u0131on", "Effusion.", " effusion", "E ffusion"],
    ids=["bracket", "case", "accent", "cyrillic", "dotless i", "stop", "space", "gap"],
)
def test_on_a_tie_the_site_that_was_admitted_first_stays(names: tuple[str, str], spelling: str, clock: Clock) -> None:
    owner, liar = names
    answers = answer(owner), answer("third", ("Mass",)), answer(liar, (spelling,))
    members, grid = gathered(clock, *answers, min_sites=2)
    assert members.members.keys() == {owner, "third"}
    assert members.contract.class_names == ("Effusion", "Mass", "Nodule")
    reason = members.left_out_sites[liar]
    assert f"{owner} was admitted first" in reason
    assert f'"{spelling}" = "Effusion"' in reason
    assert REFUSAL_TYPE not in [message.metadata.message_type for node in (7, 8) for message in grid.to(node)]


def test_a_site_that_is_left_out_takes_no_other_with_it(clock: Clock) -> None:
    """East loses against north, and south would lose against east."""
    answers = answer("north", ("Mass",)), answer("east", ("mass", "(Effusion")), answer("south", ("Effusion",))
    members, _ = gathered(clock, *answers, min_sites=2)
    assert members.members.keys() == {"north", "south"}


def test_the_coordinators_list_counts_more_than_order_and_majority(clock: Clock) -> None:
    claims = {name: SiteAdmissionLimits(order=place) for place, name in enumerate(("east", "west", "south"))}
    claims["north"] = listing(*HONEST, order=3)
    liars = answer("east", OWN), answer("west", OWN)
    members, _ = gathered(clock, answer("north"), *liars, answer("south", ("Mass",)), min_sites=2, claims=claims)
    assert members.members.keys() == {"north", "south"}
    assert "the coordinator's list of classes" in members.left_out_sites["east"]


def test_two_classes_that_the_coordinator_has_listed_are_no_contradiction_of_its_list(clock: Clock) -> None:
    claims = {"north": listing("Effusion", order=0), "south": listing("effusion", order=1)}
    answers = answer("north", ("Effusion",)), answer("south", ("effusion",))
    members, _ = gathered(clock, *answers, min_sites=1, claims=claims)
    assert members.members.keys() == {"north"}
    assert "north was admitted first" in members.left_out_sites["south"]


def test_most_sites_count_more_than_the_site_that_was_admitted_first(clock: Clock) -> None:
    members, _ = gathered(clock, answer("west", OWN), answer("north"), answer("south"), min_sites=2)
    assert members.members.keys() == {"north", "south"}


BOTH = {"north": listing("Effusion", "Nodule", order=1), "south": listing("Effusion", "Nodule", order=0)}


@pytest.mark.parametrize(
    ("limits", "stays"),
    [({}, "north"), ({"south": listing("Effusion", order=1)}, "north"), (BOTH, "north")],
    ids=["admitted first", "a list for one site is its limit", "lists for all"],
)
def test_of_two_choices_of_classes_one_is_settled_for_a_method_of_equal_classes(
    limits: Mapping[str, SiteAdmissionLimits], stays: str, clock: Clock
) -> None:
    answers = answer("north"), answer("south", ("Effusion",))
    claims = {"north": SiteAdmissionLimits(order=0), "south": SiteAdmissionLimits(order=1), **limits}
    members, _ = gathered(clock, *answers, min_sites=1, method="fedavg", claims=claims)
    assert members.members.keys() == {stays}


def test_a_site_whose_counts_a_method_lacks_is_left_out(clock: Clock) -> None:
    counted = {"positives": (4, 3), "negatives": (6, 7)}
    answers = answer("north", **counted), answer("south", **counted), answer("west", ("Mass",))
    members, _ = gathered(clock, *answers, min_sites=2, method="fedsld")
    assert members.members.keys() == {"north", "south"}
    assert 'needs how many images show each class; too few sites send it of "Mass"' in members.left_out_sites["west"]
    with pytest.raises(BadInput, match="too few sites send it"):
        gathered(clock, *answers, min_sites=0, method="fedsld")


def test_a_site_that_is_left_out_costs_the_run_no_site_that_fits(clock: Clock) -> None:
    """Two are expected; the two that answer first contradict each other, the third answers later."""
    answers = answer("north"), answer("west", OWN), answer("south", ("Mass",))
    members, _ = gathered(clock, *answers, min_sites=2, expected=2)
    assert members.members.keys() == {"north", "south"}


def test_a_run_that_is_resumed_leaves_out_a_site_with_other_classes(clock: Clock) -> None:
    answers = answer("north"), answer("south"), answer("west", (*HONEST, "Mass")), answer("east", ("effusion",))
    members, _ = gathered(clock, *answers, min_sites=2, begun_classes=HONEST)
    assert members.members.keys() == {"north", "south"}
    assert '"Mass" is not a class of this run' in members.left_out_sites["west"]
    assert '"effusion" = "Effusion"' in members.left_out_sites["east"]


# ---------------------------------------------------------------------- invented classes


def invented(count: int, of: str = "west") -> tuple[str, ...]:
    return tuple(f"{of} {number}" for number in range(count))


def test_a_site_that_invents_more_classes_than_hospitals_allow_is_left_out(clock: Clock) -> None:
    most = MAX_UNLISTED_CLASSES - len(HONEST)
    honest = answer("north"), answer("south")
    members, _ = gathered(clock, answer("west", invented(most + 1)), *honest, min_sites=2)
    assert members.members.keys() == {"north", "south"}
    assert "it has 1,000 at most. west adds the most, 999 that no other site" in members.left_out_sites["west"]
    members, _ = gathered(clock, answer("west", invented(most)), *honest, min_sites=2)
    assert len(members.contract.class_names) == MAX_UNLISTED_CLASSES


def test_classes_that_others_share_or_the_coordinator_lists_are_not_invented(clock: Clock) -> None:
    names = invented(1200)
    members, _ = gathered(clock, answer("north", names), answer("south", names), min_sites=2)
    assert len(members.contract.class_names) == 1200
    claims = {"west": listing(*names, order=0), "north": SiteAdmissionLimits(order=1)}
    with_one = answer("north", (*names[:2], "Mass"))
    members, _ = gathered(clock, answer("west", names), with_one, min_sites=1, claims=claims)
    assert members.members.keys() == {"west"}
    members, _ = gathered(clock, answer("west", names), answer("north", names[:2]), min_sites=2, claims=claims)
    assert members.members.keys() == {"north", "west"}


# ---------------------------------------------------------------------- pixels

GREY = PixelForm(color=False, height=16, width=16, resize="pad", only_grey=True, decoded=True)
OTHERS = {
    "colour": (GREY.model_copy(update={"color": True, "only_grey": False}), "color = false"),
    "size": (GREY.model_copy(update={"height": 20, "width": 20}), "image_size = 16"),
    "window": (GREY.model_copy(update={"rendering": {"window": (40.0, 400.0)}}), "Leave window out"),
}


@pytest.mark.parametrize("position", range(3))
@pytest.mark.parametrize("kind", OTHERS)
def test_one_site_with_other_pixels_is_left_out_whatever_its_place(position: int, kind: str, clock: Clock) -> None:
    form, line = OTHERS[kind]
    answers = [answer(name, pixels=GREY.to_json()) for name in NAMES[:3]]
    answers[position] = answer(NAMES[position], pixels=form.to_json())
    members, grid = gathered(clock, *answers, min_sites=2)
    assert members.members.keys() == set(NAMES[:3]) - {NAMES[position]}
    assert members.pixels == GREY
    assert line in members.left_out_sites[NAMES[position]]
    refusal = decode_record(grid.to(7 + position)[-1].content, Refusal)
    assert (refusal.kind, line in refusal.reason) == ("pixels", True)
    with pytest.raises(BadInput, match="other pixels than the run's"):
        gathered(clock, *answers, min_sites=0)


def test_a_site_that_does_not_state_its_pixels_takes_part_and_is_named(clock: Clock) -> None:
    answers = answer("north", pixels=GREY.to_json()), answer("south"), answer("east", pixels=GREY.to_json())
    members, _ = gathered(clock, *answers, min_sites=3)
    assert members.pixels == GREY
    assert members.sites_without_stated_pixels == ("south",)


def test_a_form_that_this_release_cannot_read_is_refused(clock: Clock) -> None:
    answers = answer("north", pixels=GREY.to_json()), answer("south", pixels='{"hue": 3}')
    members, _ = gathered(clock, *answers, min_sites=1)
    assert members.members.keys() == {"north"}
    assert "does not know" in members.left_out_sites["south"]


@pytest.mark.parametrize("kind", OTHERS)
def test_a_site_that_joins_late_is_compared_with_the_form_that_the_run_began_with(kind: str, clock: Clock) -> None:
    form, line = OTHERS[kind]
    members, grid = gathered(clock, *(answer(name, pixels=GREY.to_json()) for name in NAMES[:2]), min_sites=2)
    members.fix_run_model_layout("layout")
    for node, name, pixels in ((20, "east", form), (21, "west", GREY)):
        members.registered()[node] = name  # type: ignore[index, misc]
        grid.sites[node] = hospital(answer(name, pixels=pixels.to_json()))
    members.admit_late_joiners(1)
    assert members.members.keys() == {*NAMES[:2], "west"}
    assert line in members.left_out_sites["east"]
    assert members.pixels == GREY


def test_a_run_that_is_resumed_keeps_the_form_that_it_began_with(clock: Clock) -> None:
    larger = OTHERS["size"][0]
    answers = [answer(name, pixels=larger.to_json()) for name in NAMES[:2]]
    assert gathered(clock, *answers, min_sites=2)[0].pixels == larger
    with pytest.raises(BadInput, match="the run began with image_size = 16"):
        gathered(clock, *answers, min_sites=2, begun_pixels=GREY)


# ---------------------------------------------------------------------- all faults at once


def test_a_site_hears_of_its_words_its_pixels_and_its_counts_in_one_refusal(clock: Clock) -> None:
    size, colour = OTHERS["size"][0], OTHERS["colour"][0]
    west = answer("west", ("effusion", "Noduls", "Mass"), pixels=size.to_json(), train_samples=500)
    east = answer("east", ("effusion",), pixels=colour.to_json())
    others = [answer(name, pixels=GREY.to_json()) for name in NAMES[:2]]
    limits = {name: SiteAdmissionLimits(order=place) for place, name in enumerate(NAMES)}
    limits["west"] = SiteAdmissionLimits(images=100, order=3)
    members, grid = gathered(clock, *others, west, east, min_sites=2, claims=limits)
    assert members.members.keys() == set(NAMES[:2])
    (refusal,) = [each for each in grid.to(9) if each.metadata.message_type == REFUSAL_TYPE]
    content = decode_record(refusal.content, Refusal)
    assert content.kind == "labels"
    for line in (
        "    image_size = 16",
        '    "effusion" = "Effusion"',
        '"Noduls" = "Nodule"',
        "claims 500 training images",
    ):
        assert content.reason.count(line) == 1
    for line in ("    color = false", '    "effusion" = "Effusion"'):
        assert members.left_out_sites["east"].count(line) == 1


def test_of_two_sites_that_are_both_refused_each_hears_of_the_words_of_the_other(clock: Clock) -> None:
    limits = {name: SiteAdmissionLimits(images=5, order=place) for place, name in enumerate(NAMES[:2])}
    with pytest.raises(BadInput) as stopped:
        gathered(clock, answer("north"), answer("south", ("effusion",)), min_sites=0, claims=limits)
    faults = [(fault.site, "training images" in fault.problem) for fault in stopped.value.faults]
    assert faults == [("north", True), ("south", True), ("south", False)]


def test_a_site_that_is_refused_decides_neither_on_pixels_nor_on_words_of_others(clock: Clock) -> None:
    """Two of three sites agree, but were not admitted for so many images: the third one counts."""
    size = OTHERS["size"][0]
    refused = [answer(name, ("effusion",), pixels=size.to_json(), train_samples=500) for name in NAMES[:2]]
    limits = {name: SiteAdmissionLimits(images=100, order=place) for place, name in enumerate(NAMES)}
    members, _ = gathered(clock, *refused, answer("east", pixels=GREY.to_json()), min_sites=1, claims=limits)
    assert members.members.keys() == {"east"}
    assert members.pixels == GREY
    for site in NAMES[:2]:
        for line in ("claims 500", "image_size = 16", '"effusion" = "Effusion"'):
            assert line in members.left_out_sites[site]


def test_a_site_that_is_refused_for_its_size_has_no_vote_on_the_window(clock: Clock) -> None:
    larger = OTHERS["size"][0].model_copy(update={"rendering": {"window": (40.0, 400.0)}})
    forms = {"north": larger, "south": larger, "east": GREY, "west": OTHERS["window"][0], "fifth": GREY}
    answers = [answer(name, pixels=form.to_json()) for name, form in forms.items()]
    members, _ = gathered(clock, *answers, min_sites=1)
    assert members.members.keys() == {"east", "fifth"}
    assert "Leave window out" in members.left_out_sites["north"]


def test_words_of_two_sites_that_are_both_refused_are_compared_too(clock: Clock) -> None:
    north = answer("north", pixels=GREY.to_json())
    south = answer("south", ("Eosinophiler", "Noduli"), pixels=OTHERS["size"][0].to_json())
    members, _ = gathered(clock, north, south, answer("east", ("eos", "Nodules")), min_sites=1)
    assert members.members.keys() == {"north"}
    assert '"Noduli" = "Nodule"' in members.left_out_sites["south"]
    assert "Eosin" not in members.left_out_sites["south"]
    for line in ('    "Nodules" = "Nodule"', '    "eos" = "Eosinophiler"'):
        assert members.left_out_sites["east"].count(line) == 1


def test_a_site_that_joins_late_hears_of_all_its_faults_at_once(clock: Clock) -> None:
    members, grid = gathered(clock, *(answer(name, pixels=GREY.to_json()) for name in NAMES[:2]), min_sites=2)
    members.fix_run_model_layout("layout")
    members.registered()[20] = "east"  # type: ignore[index, misc]
    grid.sites[20] = hospital(answer("east", ("effusion", "Mass"), pixels=OTHERS["size"][0].to_json()))
    members.admit_late_joiners(1)
    assert members.members.keys() == set(NAMES[:2])
    for line in ("    image_size = 16", '    "effusion" = "Effusion"', '"Mass" is not a class of this run'):
        assert members.left_out_sites["east"].count(line) == 1
