"""Five hundred crossing questions, and a reader who solves their answers for each hidden count, at each level."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from polyclinic.client.app import make_client_app
from polyclinic.client.site.policy import SitePolicy
from polyclinic.client.site.site import Site
from polyclinic.common.counts import COUNT_TABLES, MASKED_TABLES, CountQuestion
from polyclinic.common.security.identity import format_public_key_line
from polyclinic.server.counts.ask import ask_for_counts
from polyclinic.server.counts.pool import CountResult
from polyclinic.server.questions.exchange import QuestionExchange
from polyclinic.strategies.privacy.secure_aggregation.site import SiteSigningIdentity
from tests.client.counted import (
    ATTRIBUTES,
    CLASSES,
    Cell,
    HospitalsGrid,
    Reader,
    ReaderOfSums,
    asked,
    counting_site,
    made_images,
    random_question,
    true_cells,
)

QUESTIONS = 500
SMALLEST, WIDTH = 10, 5
NAMED = ("sex", "age")
"""Attributes of most hospitals here: the attack looks at each hidden count, and there are many of years and devices."""


def list_values(truth: Mapping[Cell, object]) -> dict[str, tuple[str, ...]]:
    """The values that a reader knows of: those that occur, and both sexes."""
    values = {name: {key[3] for key in truth if key[0] == name} for name in ATTRIBUTES}
    values["sex"] |= {"female", "male"}
    for name in ("sex", "age", "year"):
        values[name].add("not stated")
    return {name: tuple(sorted(of)) for name, of in values.items()}


def list_hidden(truth: Mapping[Cell, tuple[int, int]], told: Mapping[Cell, object]) -> list[Cell]:
    """The counts that are hidden; a missing label says nothing about a patient."""
    return [key for key in truth if key not in told and key[2] != "not annotated"]


def own_numbers(truth: Mapping[Cell, tuple[int, int]], hidden: list[Cell]) -> dict[Cell, bool]:
    """Hidden count -> whether it is small, but for values of classes that are hidden as a whole."""
    classes = {key[1] for key in hidden if key[0] == "class"}
    return {key: truth[key][0] < SMALLEST for key in hidden if key[0] == "class" or key[1] not in classes}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "named"),
    [(2, NAMED), pytest.param(3, ATTRIBUTES, marks=pytest.mark.long), pytest.param(7, NAMED, marks=pytest.mark.long)],
)
def test_no_hidden_count_follows_from_500_questions_to_a_trusting_hospital(
    seed: int, named: tuple[str, ...], tmp_path: Path
) -> None:
    images = made_images(seed, one_class_each=seed == 3, named=named)
    site, random = counting_site(tmp_path, images), np.random.default_rng(seed)
    told = dict[Cell, tuple[int, int]]()
    for number in range(QUESTIONS):
        reply = asked(site, random_question(random, COUNT_TABLES, CLASSES), f"count-{number}")
        for key, place in reply.cells.items():
            numbers = reply.patients[place], reply.images[place]
            assert told.setdefault(key, numbers) == numbers
    truth = {key: numbers for key, numbers in true_cells(images).items() if key[0].split("_")[-1] in ("class", *named)}
    values = {name: of for name, of in list_values(truth).items() if name in named}
    hidden = list_hidden(truth, told)
    assert len(hidden) > 20
    equations = {key: numbers for key, numbers in told.items() if key[0] != "intensity"}
    patients = Reader(
        CLASSES, values, {key: of for key, (of, _) in equations.items()}, None, own_numbers(truth, hidden), SMALLEST
    )
    pictures = Reader(CLASSES, values, {key: of for key, (_, of) in equations.items()}, None)
    for reader in (patients, pictures):
        widths = {key: np.subtract(*reversed(reader.find_range(key))) for key in hidden}
        assert min(widths.values()) >= WIDTH, widths


def masked_grid(folder: Path, seeds: Mapping[str, int]) -> HospitalsGrid:
    """Hospitals at level masked, with keys of their own."""
    sites = {}
    for name, seed in seeds.items():
        key = ec.generate_private_key(ec.SECP256R1())
        identity = SiteSigningIdentity(key, format_public_key_line(key, name))
        site = counting_site(folder / name, made_images(seed, named=NAMED), name, level="masked")
        sites[name] = replace(site, identity=identity)
    return HospitalsGrid({name: make_client_app(lambda context, site=site: site) for name, site in sites.items()})


@pytest.mark.slow
@pytest.mark.long
def test_no_hidden_count_follows_from_the_sums_of_hospitals_that_tell_sums_only(tmp_path: Path) -> None:
    seeds = {"east": 2, "north": 4, "south": 6}
    grid = masked_grid(tmp_path, seeds)
    random = np.random.default_rng(1)
    results = list[CountResult]()
    for _ in range(QUESTIONS):
        question = random_question(random, MASKED_TABLES, CLASSES)
        results.append(ask_for_counts(QuestionExchange(grid, 60.0), question))
    everything = ask_for_counts(QuestionExchange(grid, 60.0), CountQuestion())
    assert everything.masked.fault == ""
    assert everything.masked.sites == tuple(seeds)
    assert all(site.cells == {} for site in everything.sites.values())  # nothing of one hospital
    for result in results:
        assert result.masked.cells.items() <= everything.masked.cells.items()
    sums, truths = everything.masked, {name: true_cells(made_images(seed, named=NAMED)) for name, seed in seeds.items()}
    told = {
        name: list_told(counting_site(tmp_path / name, made_images(seed, named=NAMED))) for name, seed in seeds.items()
    }
    equations = dict[Cell, tuple[list[str], int]]()
    for key, hiding in sums.hidden.items():
        telling = [name for name in seeds if key in told[name]]
        assert len(seeds) - hiding == len(telling)
        if telling:
            part = sums.cells[key].patients
            assert part == sum(told[name][key] for name in telling)
            assert "not annotated" in key or "not stated" in key or part >= SMALLEST * len(telling)
            if key[0] in ("class", "class_by_sex", "sex"):
                equations[key] = telling, part
    readers, hidden = dict[str, Reader](), list[tuple[str, Cell]]()
    values = {"sex": ("female", "male", "not stated")}
    for name, truth in truths.items():
        own = {key: number for key, number in truth.items() if key[0] in ("class", "class_by_sex", "sex")}
        hides = list_hidden(own, told[name])
        readers[name] = Reader(CLASSES, values, {}, None, own_numbers(own, hides), SMALLEST)
        hidden += [(name, key) for key in hides]
    assert len(hidden) > 10
    reader = ReaderOfSums(readers, equations)
    widths = {place: np.subtract(*reversed(reader.find_range(*place))) for place in hidden}
    assert min(widths.values()) >= WIDTH, widths


def list_told(site: Site) -> dict[Cell, int]:
    """What a hospital would tell of patients without masks, from the sheet that it has."""
    reply = asked(site)
    return {key: reply.patients[place] for key, place in reply.cells.items()}


@pytest.mark.slow
def test_hospitals_sum_with_the_same_hospitals_each_time(tmp_path: Path) -> None:
    grid = masked_grid(tmp_path, {"east": 2, "north": 4, "south": 6, "west": 8})
    question = CountQuestion(tables=("class",))
    apps = grid.apps
    grid.apps = {name: apps[name] for name in ("east", "north", "south")}
    first = ask_for_counts(QuestionExchange(grid, 60.0), question)
    grid.apps = apps
    again = ask_for_counts(QuestionExchange(grid, 60.0), question)
    assert first.masked.sites == again.masked.sites == ("east", "north", "south")
    assert first.masked.cells == again.masked.cells


@pytest.mark.slow
def test_no_count_follows_from_500_questions_to_a_hospital_that_trusts_nobody(tmp_path: Path) -> None:
    images = made_images(2, named=("sex",))
    tables = ("class", "class_by_sex", "sex")
    site = counting_site(tmp_path, images, level="private", counts=tables)
    random, told, deviation = np.random.default_rng(2), dict[Cell, int](), 0.0
    for number in range(QUESTIONS):
        reply = asked(site, random_question(random, tables, CLASSES), f"count-{number}")
        deviation = reply.noise
        for key, place in reply.cells.items():
            assert told.setdefault(key, reply.patients[place]) == reply.patients[place]
    train_and_validation = images.select_rows(np.arange(2 * (len(images) // 3)))
    truth = true_cells(train_and_validation)
    values = {"sex": ("female", "male", "not stated")}
    reader = Reader(CLASSES, values, told, None, slack=5 * deviation)
    for key in told:
        low, high = reader.find_range(key, whole=False)
        assert high - low >= WIDTH, key
    assert max(abs(told[key] - truth.get(key, (0, 0))[0]) for key in told) > 1
    assert SitePolicy(level="private").counts == ()
