"""Facts about the figures of coverage among many sites, and of shared against unique classes."""

import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from server.analysis.comparison import MethodResult, Spread
from server.reporting.coverage import ClassesOfGroup
from server.reporting.figures.subsets import _runs, coverage_of_many, shared_and_unique
from server.runs.reader import SiteRecord

GROUPS = [ClassesOfGroup("shared", ("a",)), ClassesOfGroup("some", ("b",))]


def sites(count: int) -> dict[str, SiteRecord]:
    """Every other site annotates b."""
    return {f"s{n}": SiteRecord(classes=("a", "b") if n % 2 else ("a",)) for n in range(count)}


def test_few_sites_and_classes_need_no_figure() -> None:
    assert coverage_of_many(sites(24), GROUPS) == ""
    assert coverage_of_many(sites(25), GROUPS)


def test_sites_that_annotate_the_same_are_neighbours_so_a_thousand_make_two_bars() -> None:
    svg = coverage_of_many(sites(1000), GROUPS)
    assert len(re.findall(r"fill: var\(--(?:blue|sky)\)", svg)) == 2


@pytest.mark.parametrize(
    ("members", "runs"),
    [([1, 1, 0, 1], [(0.5, 2), (3.5, 1)]), ([0, 0], []), ([0, 1], [(1.5, 1)])],
)
def test_runs_begin_half_a_place_before_their_first_member(members: list[int], runs: list[tuple[float, int]]) -> None:
    assert list(_runs(np.array(members, bool))) == runs


def test_a_method_without_a_subset_has_no_marker_there_and_one_seed_no_line() -> None:
    def method(label: str, sd: float | None, unique: float | None) -> MethodResult:
        aurocs = {"all": Spread(0.8, sd), "shared": Spread(0.9, sd), "unique": Spread(unique, None)}
        none = Spread(None, None)
        return MethodResult(label, (0,), "", aurocs, none, none, {}, {}, {})  # type: ignore[arg-type]

    svg = ElementTree.fromstring(shared_and_unique([method("one", None, None), method("two", 0.01, 0.7)]))
    markers = [use.get("style", "") for use in svg.iter("use")]
    lines = [path.get("style", "") for path in svg.iter("path") if "stroke-width: 2" in path.get("style", "")]
    assert sum("fill: var(--blue)" in style for style in markers) == 2 + 1  # and one in the legend
    assert sum("fill: var(--vermilion)" in style for style in markers) == 3 + 1
    assert sum("var(--vermilion)" in style for style in lines) == 2
