"""Over the network: what one hospital states costs no other hospital its program, the run its end, or the model."""

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.network.conftest import Trial
from tests.network.federated import SLOW, events
from tests.network.lying import connect_lying
from tests.network.real import Site, flwr_server, summary_of

pytestmark = pytest.mark.slow

MANY = "('0', *(f'invented {n}' for n in range(1200)))"
EAST, NORTH, SOUTH = range(3)
NUMBERS = itertools.count()
"""The coordinator stays for all tests of a session, and each of its hospitals has a name of its own."""
ENOUGH = ("participation.min_sites=2", "participation.roll_call_deadline_s=60", "run.rounds=1")

Joins = Callable[..., Site]


@pytest.fixture
def joins(trial: Trial, tmp_path: Path) -> Iterator[Joins]:
    """Makes a hospital with the images of a place, admits it, and connects it.

    Its name begins with the one that is given. Synonyms are its words for classes.
    """
    sites: list[Site] = []

    def make(
        name: str,
        place: int,
        synonyms: Sequence[tuple[str, str]] = (),
        *,
        says: str = "",
        classes: str | None = None,
    ) -> Site:
        coordinator, name = trial.coordinator, f"{name}-{next(NUMBERS)}"
        site = coordinator.site(trial.sites[place], name)
        sites.append(site)
        coordinator.admit(site)
        if classes is not None:
            request = site.folder / f"{name}.request"
            assert flwr_server("admit", coordinator.folder, request, "--yes", "--classes", classes).code == 0
        spell(site, synonyms)
        if says:
            connect_lying(site, says)
        else:
            site.connect()
        coordinator.sees(site)
        return site

    yield make
    trial.coordinator.end_runs()
    for site in sites:
        site.end()
        trial.coordinator.revoke(site)


def spell(site: Site, synonyms: Sequence[tuple[str, str]]) -> None:
    """Write the site's words for classes into its file."""
    if synonyms:
        with site.toml.open("a", encoding="utf-8") as file:
            file.write("[data.synonyms]\n")
            file.writelines(f"{json.dumps(own)} = {json.dumps(new)}\n" for own, new in synonyms)


def left_out(folder: Path) -> dict[str, str]:
    return {line["site"]: line["reason"] for line in events(folder, "left_out")}


IN_BRACKETS = [("1", "(9"), ("2", "(8"), ("3", "(7")]
"""Classes of ``north`` alone."""


@pytest.mark.parametrize("name", ["aaa", "zzz"])
def test_who_spells_anothers_classes_otherwise_is_left_out_and_nobody_ends(
    name: str, joins: Joins, trial: Trial, tmp_path: Path
) -> None:
    owner, third = joins("owner", NORTH), joins("third", SOUTH)
    liar = joins(name, EAST, IN_BRACKETS)
    run = trial.coordinator.run(trial.experiment, tmp_path / "run", *ENOUGH, sites=3)
    run.succeeds()
    assert set(summary_of(tmp_path / "run")["sites"]) == {owner.name, third.name}
    assert left_out(tmp_path / "run").keys() == {liar.name}
    for output in (run.output, liar.program.output):
        assert f"{owner.name} was admitted first" in output
        assert '"1" = "9"' in output
    assert "stays connected" in liar.program.output
    assert all(site.program.runs for site in (owner, third, liar))
    # Corrected and started again, it takes part in the next run.
    liar.edit(liar.toml, *((f'"{own}" = "{new}"', f'"{own}" = "{own}"') for own, new in IN_BRACKETS))
    liar.end()
    liar.connect()
    trial.coordinator.sees(liar)
    trial.coordinator.run(trial.experiment, tmp_path / "next", *ENOUGH, sites=3).succeeds()
    assert set(summary_of(tmp_path / "next")["sites"]) == {owner.name, third.name, liar.name}


def test_the_coordinators_list_of_classes_counts_more_than_the_order_of_admission(
    joins: Joins, trial: Trial, tmp_path: Path
) -> None:
    liar, third = joins("early", EAST, IN_BRACKETS), joins("mid", SOUTH)
    owner = joins("owner", NORTH, classes="0,5,6,7,8,9")
    run = trial.coordinator.run(trial.experiment, tmp_path / "run", *ENOUGH, sites=3)
    run.succeeds()
    assert set(summary_of(tmp_path / "run")["sites"]) == {owner.name, third.name}
    assert "the coordinator's list of classes" in liar.program.output
    assert all(site.program.runs for site in (owner, third, liar))


@pytest.mark.parametrize(
    ("says", "options", "reason"),
    [
        (
            "names=names[:2], class_names=names[:2], shown=''",
            ("run.method=fedavg",),
            "needs the same classes at every site",
        ),
        (f"names={MANY}, class_names={MANY}, shown=''", (), "that no other site annotates"),
        (
            "names=(*names, 'own'), class_names=(*names, 'own'), shown='', "
            "positives=(*answer.positives, -1), negatives=(*answer.negatives, -1)",
            ("run.method=fedsld", "method.heads=own"),
            "needs how many images show each class",
        ),
        ("layout='another'", (), "builds another model"),
    ],
    ids=["fewer classes", "1,200 classes", "a class without counts", "another layout"],
)
def test_with_min_sites_no_word_of_one_hospital_ends_the_run(
    says: str, options: tuple[str, ...], reason: str, joins: Joins, trial: Trial, tmp_path: Path
) -> None:
    honest = [joins("honest-1", EAST), joins("honest-2", EAST)]
    liar = joins("aaa", EAST, says=says)
    run = trial.coordinator.run(trial.experiment, tmp_path / "run", *ENOUGH, *options, sites=3)
    run.succeeds()
    summary = summary_of(tmp_path / "run")
    assert (set(summary["sites"]), summary["classes"]) == ({site.name for site in honest}, list("01234"))
    assert reason in left_out(tmp_path / "run")[liar.name]
    assert all(site.program.runs for site in honest)


def test_of_two_hospitals_with_other_classes_the_one_admitted_first_goes_on(
    joins: Joins, trial: Trial, tmp_path: Path
) -> None:
    first, second = joins("zzz-first", EAST), joins("aaa-second", NORTH)
    options = ("run.method=fedavg", "participation.min_sites=1", "run.rounds=1")
    run = trial.coordinator.run(trial.experiment, tmp_path / "run", *options, sites=2)
    run.succeeds()
    assert set(summary_of(tmp_path / "run")["sites"]) == {first.name}
    assert f"{first.name}, which was admitted first, annotates" in second.program.output
    assert first.program.runs
    assert second.program.runs


def test_who_is_left_out_takes_no_place_of_a_site_that_fits(joins: Joins, trial: Trial, tmp_path: Path) -> None:
    """Three are connected, two are expected, and the one that is left out answers first."""
    owner, third = joins("owner", NORTH), joins("third", SOUTH)
    liar = joins("aaa", EAST, IN_BRACKETS)
    with third.program.frozen():
        run = trial.coordinator.run(trial.experiment, tmp_path / "run", *ENOUGH, sites=2, once=True)
        liar.program.says("does not take this site")
    run.succeeds()
    assert set(summary_of(tmp_path / "run")["sites"]) == {owner.name, third.name}


def test_a_resumed_run_leaves_out_who_has_other_classes_than_before(joins: Joins, trial: Trial, tmp_path: Path) -> None:
    honest, other = joins("honest", NORTH), joins("other", NORTH)
    options = ("participation.min_sites=1", "run.rounds=4", SLOW)
    run = trial.coordinator.run(trial.experiment, tmp_path / "run", *options, sites=2, once=True)
    run.says("round 1 of 4")
    run.stop()
    other.end()
    spell(other, [("0", "(0")])
    other.connect()
    trial.coordinator.sees(other)
    trial.coordinator.run(trial.experiment, tmp_path / "run", *options, sites=2, options=["--resume"]).succeeds()
    assert summary_of(tmp_path / "run")["rounds"] == 4
    assert '"0" = "0"' in other.program.output
    assert honest.program.runs
    assert other.program.runs


def test_a_late_hospital_that_is_refused_joins_the_same_run_once_it_is_corrected(
    joins: Joins, trial: Trial, tmp_path: Path
) -> None:
    owner = joins("owner", EAST)
    options = ("participation.min_sites=1", "run.rounds=300", SLOW)
    run = trial.coordinator.run(trial.experiment, tmp_path / "run", *options, sites=1, once=True)
    run.says("round 1 of 300")
    late = joins("late", EAST, [("1", "(1")])
    late.program.says("does not take this site")
    assert '"1" = "1"' in late.program.output
    late.edit(late.toml, ('"1" = "(1"', '"1" = "1"'))
    late.end()
    late.connect()
    run.says(f"{late.name} joins in round")
    run.stop()
    assert owner.program.runs


A_BILLION_POSITIVE_IMAGES = (
    "train_samples=10**9, positives=(10**9,) * len(names), negatives=(0,) * len(names)"  # its replies have the truth
)


def test_a_hospital_whose_replies_never_count_leaves_the_model_as_if_it_were_not_there(
    joins: Joins, trial: Trial, tmp_path: Path
) -> None:
    honest = [joins("first", EAST), joins("second", NORTH), joins("third", SOUTH)]
    options = ("run.method=fedsld", "method.heads=own", "participation.min_sites=3", "run.rounds=2")
    trial.coordinator.run(trial.experiment, tmp_path / "without", *options, sites=3).succeeds()
    liar = joins("aaa", NORTH, says=A_BILLION_POSITIVE_IMAGES)
    trial.coordinator.run(trial.experiment, tmp_path / "with", *options, sites=4).succeeds()
    without, beside_it = (summary_of(tmp_path / name) for name in ("without", "with"))
    assert beside_it["model_sha256"] == without["model_sha256"]
    assert beside_it["statistics"]["counted"] == sorted(site.name for site in honest)
    # Hospitals of earlier tests stay admitted at this coordinator: they miss the roll call.
    absences = [event for event in events(tmp_path / "with", "absent") if event["site"] == liar.name]
    absent = {event["round"]: event["reason"] for event in absences}
    assert absent.keys() == {1, 2}
    assert all("trained on" in reason for reason in absent.values())
    assert liar.program.runs
