"""Facts about the figures of a run's report: coverage among many sites, and what only some methods have."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from server.reporting.page import ClassGroup
from server.reporting.run_figures import (
    draw_difficulty_by_round,
    draw_label_coverage,
    draw_order_of_passes,
    draw_prototype_similarity,
)
from server.runs.reader import LearnedInRound, PrototypeSimilarity, RoundLine, SiteRecord

SITES = ["east", "north", "west"]
PASSES = [("north", "east", "west"), ("west", "north", "east"), ("west", "east")]


def passes(slopes: dict[str, float | None]) -> list[RoundLine]:
    learned = LearnedInRound(slopes=slopes)
    return [RoundLine(round=n, sites=sites, learned=learned) for n, sites in enumerate(PASSES, start=1)]


def words(svg: str) -> list[str]:
    return [text.text or "" for text in ElementTree.fromstring(svg).iter("text")]


def test_the_order_of_passes_names_every_site_at_the_end_of_its_line() -> None:
    drawn = words(draw_order_of_passes(passes({}), SITES))
    assert set(SITES) <= set(drawn)
    assert "Slope of the site's loss, a batch" not in drawn


def test_slopes_are_drawn_where_a_run_has_them() -> None:
    assert "Slope of the site's loss, a batch" in words(
        draw_order_of_passes(passes({"east": -0.1, "west": None}), SITES)
    )


def test_rounds_that_all_train_at_once_have_no_order() -> None:
    at_once = [RoundLine(round=n, sites=tuple(SITES)) for n in (1, 2)]
    assert draw_order_of_passes(at_once, SITES) == ""
    assert draw_order_of_passes([], SITES) == ""


def test_prototypes_show_every_pair_and_say_what_nobody_knows() -> None:
    known = PrototypeSimilarity(
        classes=("a", "b", "c"), positives=((1, 0.25, None), (0.25, 1, None), (None,) * 3), signs=(0.0, 1.0, None)
    )
    drawn = words(draw_prototype_similarity(known))
    assert (drawn.count("0.25"), drawn.count("–"), drawn.count("n/a")) == (2, 5, 1)
    assert "90.0" in drawn  # degrees: a cosine of 0
    assert "0.0" in drawn


def test_many_classes_leave_the_numbers_out_but_not_the_cells() -> None:
    names = tuple(f"class {n}" for n in range(14))
    row = tuple(0.5 if n else 1.0 for n in range(14))
    svg = draw_prototype_similarity(PrototypeSimilarity(classes=names, positives=(row,) * 14, signs=row))
    assert "0.50" not in words(svg)
    assert len(re.findall("var\\(--blue\\)", svg)) == 14 * 14


@pytest.mark.parametrize(("rounds", "columns"), [(5, 5), (1000, 100)])
def test_difficulty_is_drawn_round_by_round_thinned_where_there_are_many(rounds: int, columns: int) -> None:
    told = LearnedInRound(difficulty={f"c{n}": 0.5 for n in range(12)})
    svg = draw_difficulty_by_round([RoundLine(round=n, learned=told) for n in range(rounds)])
    assert len(re.findall("var\\(--blue\\)", svg)) == 12 * columns


def test_a_run_without_difficulty_has_no_such_figure() -> None:
    assert draw_difficulty_by_round([RoundLine(round=1)]) == ""


def covered(groups: dict[str, str], *sites: str) -> str:
    """The figure of groups of one-letter classes, and of sites that annotate the letters of their texts."""
    records = {f"s{n}": SiteRecord(classes=tuple(names)) for n, names in enumerate(sites)}
    return draw_label_coverage(records, [ClassGroup(kind, tuple(names)) for kind, names in groups.items()])


def test_few_sites_and_classes_need_no_figure() -> None:
    assert covered({"shared": "a", "some": "b"}, *["a", "ab"] * 12) == ""
    assert covered({"shared": "a", "some": "b"}, *["a", "ab"] * 12, "a")


@pytest.mark.parametrize(
    ("groups", "sites", "bars"),
    [
        ({"shared": "a", "some": "b"}, ["a", "ab"] * 500, 2),
        ({"shared": "a", "some": "bc"}, ["abc", "ab", "ac", "a"] * 10, 4),  # of c there are two, apart
        ({"shared": "a", "some": "b"}, ["a"] * 30, 1),
    ],
)
def test_sites_that_annotate_the_same_are_neighbours_under_one_bar(
    groups: dict[str, str], sites: list[str], bars: int
) -> None:
    assert len(re.findall(r"fill: var\(--(?:blue|sky)\)", covered(groups, *sites))) == bars
