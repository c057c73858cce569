"""Facts about the figures of our pages: places, ticks, gaps, and names that somebody else wrote."""

import math
import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from polyclinic.common.reporting.figure import LegendEntry, draw_figure
from polyclinic.common.reporting.plot import Axis, Frame, Plot, choose_ticks
from polyclinic.common.reporting.svg import (
    BLUE,
    MARKERS,
    choose_series_styles,
    draw_path,
    estimate_text_width,
    shorten_to_width,
)


def test_a_frame_places_the_smallest_value_at_the_lower_left_and_the_largest_at_the_upper_right() -> None:
    frame = Frame(10, 20, 100, 50, x_limits=(2, 4), y_limits=(-1, 1), figure="a")
    assert frame.points([2, 3, 4], [-1, 0, 1]) == [(10, 70), (60, 45), (110, 20)]
    reversed_frame = Frame(10, 20, 100, 50, x_limits=(2, 4), y_limits=(1, -1), figure="a")
    assert reversed_frame.y(1) == 70  # rows are counted from the top


@pytest.mark.parametrize(
    ("limits", "most", "whole_numbers", "labels"),
    [
        ((0, 1), 6, False, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        ((1, 0), 6, False, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        ((-0.3, 0.2), 5, False, ["−0.3", "−0.2", "−0.1", "0.0", "0.1", "0.2"][1:]),
        ((0.9, 1.0), 4, False, ["0.900", "0.925", "0.950", "0.975", "1.000"]),
        ((0.9, 2.1), 9, True, ["1", "2"]),
        ((1, 1000), 5, True, ["200", "400", "600", "800", "1000"]),
        ((0, 4e30), 4, False, ["0", "1e+30", "2e+30", "3e+30", "4e+30"]),
    ],
)
def test_ticks_are_round_numbers(
    limits: tuple[float, float], most: float, whole_numbers: bool, labels: list[str]
) -> None:
    ticks = choose_ticks(limits, most, whole_numbers=whole_numbers)
    assert [text for _, text in ticks][-len(labels) :] == labels
    assert all(min(limits) - 1e-9 <= value <= max(limits) * (1 + 1e-9) + 1e-9 for value, _ in ticks)


def test_a_line_has_a_gap_where_a_value_is_missing() -> None:
    drawn = draw_path([(0, 0), (1, 1), (2, math.nan), (3, 3), (4, 4)], BLUE, 1)
    assert re.findall(r' d="(.*?)"', drawn) == ["M0 0L1 1M3 3L4 4"]


@pytest.mark.parametrize("values", [[], [0.5], [0.5, 0.5, 0.5], [1.0, 1.0 + 2e-16], [math.nan], [1e308, 2.0], [0.0]])
def test_a_plot_of_no_equal_or_huge_values_has_finite_places_within_the_figure(values: list[float]) -> None:
    plot = Plot(Axis("round", whole_numbers=True), Axis("loss", grid=True))
    plot.add_line(range(len(values)), values, BLUE)
    plot.add_markers(range(len(values)), values, "circle", BLUE, 5)
    svg = draw_figure([plot], "a", "Line chart.", height=100)
    width, height = map(float, ElementTree.fromstring(svg).get("viewBox", "").split()[2:])
    places = [float(number) for path in re.findall(r' d="(.*?)"', svg) for number in re.findall(r"[\d.]+", path)]
    assert places
    assert all(0 <= place <= max(width, height) for place in places)


def test_names_are_escaped_in_every_text_of_a_figure() -> None:
    evil = '<script>&"'
    plot = Plot(Axis(evil), Axis(evil, ticks=[(0.0, evil)]), evil, above=[(0.0, evil)])
    plot.add_text(evil, 0, 0)
    legend = [LegendEntry(evil, BLUE)]
    svg = draw_figure([plot], "a", evil, height=50, legend=legend, common_labels=(evil, evil))
    root = ElementTree.fromstring(svg)
    assert root.get("aria-label") == evil
    assert [text.text for text in root.iter("text")].count(evil) == 9
    assert "<script>" not in svg


def test_a_figure_defines_the_hatches_that_it_uses_under_its_own_name() -> None:
    plot = Plot()
    plot.add_bar(0, 1, 0, 0.5, BLUE, "dots")
    svg = draw_figure([plot], "bars", "Bar chart.", height=50, legend=[LegendEntry("a", BLUE, hatch="stripes")])
    assert set(re.findall(r'id="(.*?)"', svg)) == {"bars-dots", "bars-stripes"}
    assert set(re.findall(r"url\(#(.*?)\)", svg)) == {"bars-dots", "bars-stripes"}


def test_a_text_beside_the_last_point_makes_the_plot_narrower_and_not_the_figure_wider() -> None:
    def draw_with_text(text: str) -> list[float]:
        plot = Plot(Axis(limits=(0, 1)), Axis(limits=(0, 1)))
        plot.add_vertical_rule(1)
        plot.add_text(text, 1, 0.5)
        svg = draw_figure([plot], "a", "Chart.", height=50)
        return [float(x) for x in re.findall(r'd="M([\d.]+) ', svg)]

    short, long = draw_with_text("a" * 4), draw_with_text("a" * 20)
    assert max(short) - max(long) == pytest.approx(16 * estimate_text_width("a"), abs=1)


def test_a_name_that_is_too_long_is_cut_and_one_that_fits_is_not() -> None:
    assert shorten_to_width("edema", 100) == "edema"
    short = shorten_to_width("edema " * 100, 100)
    assert short.endswith("…")
    assert 80 < estimate_text_width(short) <= 100
    assert estimate_text_width("结节") == 2 * estimate_text_width("结") > 2 * estimate_text_width("e")


def test_the_cells_of_a_heat_map_cover_the_plot_and_are_empty_where_nothing_is_known() -> None:
    plot = Plot()
    plot.add_heat_map(np.array([[0.0, 0.5, 1.0], [np.nan, 1.0, 0.25]]), (0.0, 1.0), [["0", "", "1"], ["", "", ""]])
    root = ElementTree.fromstring(draw_figure([plot], "a", "Heat map.", height=40))
    cells = [(cell.get("y"), cell.get("fill-opacity")) for cell in root.iter("rect")]
    assert cells == [("8", "0.02"), ("8", "0.3"), ("8", "0.6"), ("28", "0.6"), ("28", "0.15")]
    assert [text.text for text in root.iter("text")][:2] == ["0", "1"]


def test_78_series_differ_by_colour_or_marker() -> None:
    styles = choose_series_styles(79)
    assert len(set(styles[:78])) == 78
    assert styles[78] == styles[0]
    assert {style.marker for style in styles} == set(MARKERS)


def test_equal_plots_give_equal_text() -> None:
    def draw() -> str:
        plot = Plot(Axis("round", whole_numbers=True), Axis("loss"))
        plot.add_line([1, 2, 3], [0.5, 0.25, 0.125], BLUE)
        return draw_figure([plot], "a", "Line chart.", height=100)

    assert draw() == draw()
