"""Figures of a study: along a sweep, round by round, and how accuracy spreads over sites."""

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from common.metrics.multi_class import accuracy_density
from server.analysis.study.results import Curves, TableResult
from server.reporting.figures.svg import PAPER, SeriesStyle, canvas, column, inline, looks, theme

LineStyle = Literal["-", "--", "-.", ":"]
Draw = Callable[[Axes, "Curves", SeriesStyle, LineStyle], None]
WIDTH, HEIGHT = 9.0, 3.2
LINES: tuple[LineStyle, ...] = ("-", "--", "-.", ":")
POINTS = 801
PANELS = 3


def sweep(table: TableResult, name: str) -> Markup:
    """Measures along the settings, a line a method; hollow markers are the paper's numbers."""
    shown = table.headings[:PANELS]
    with theme():
        figure, panels = canvas(WIDTH, HEIGHT + _legend_height(len(table.methods)), columns=len(shown))
        for measure, axes in enumerate(panels):
            _sweep_of(table, measure, axes)
        _legend_above(figure, table.methods)
        return inline(figure, name, f"Line charts: {', '.join(shown)} of every method along the settings.")


def _sweep_of(table: TableResult, measure: int, axes: Axes) -> None:
    positions = np.array(table.positions, dtype=np.float64)
    for index, look in enumerate(looks(len(table.methods))):
        entries = [column[measure] for column in table.entries[index]]
        spread = np.nan_to_num(column([entry.ours.sd for entry in entries]))
        means, line = column([entry.ours.mean for entry in entries]), LINES[index % len(LINES)]
        axes.plot(positions, means, line, color=look.color, marker=look.marker, markersize=6)
        axes.errorbar(positions, means, yerr=spread, color=look.color, linestyle="none", capsize=3)
        paper = column([entry.paper for entry in entries])
        axes.plot(positions, paper, look.marker, color=look.color, markerfacecolor="none", markersize=7)
    axes.set(title=table.headings[measure])
    axes.set_xticks(positions, [f"{position:g}" for position in positions])
    axes.grid(axis="y")


def curves(found: Sequence[Curves], name: str) -> Markup:
    """Mean accuracy over the sites by round, a panel a setting; empty where no run has it."""
    drawn = [each for each in found if each.rounds]
    return _panels(drawn, name, "Line chart: mean accuracy of the sites by round.", _course) if drawn else Markup("")


def density(found: Sequence[Curves], name: str) -> Markup:
    """Density of the sites' accuracies, a panel a setting; empty where no run has them, or all are the same."""
    drawn = [each for each in found if accuracy_density(each.sites, POINTS) is not None]
    return _panels(drawn, name, "Density of the accuracies of the sites, by method.", _spread) if drawn else Markup("")


def _panels(drawn: Sequence[Curves], name: str, description: str, draw: Draw) -> Markup:
    settings = list(dict.fromkeys(each.setting for each in drawn))
    methods = list(dict.fromkeys(each.method for each in drawn))
    with theme():
        figure, panels = canvas(WIDTH, HEIGHT + _legend_height(len(methods)), columns=len(settings))
        for axes, setting in zip(panels, settings, strict=True):
            for index, look in enumerate(looks(len(methods))):
                for each in (each for each in drawn if (each.method, each.setting) == (methods[index], setting)):
                    draw(axes, each, look, LINES[index % len(LINES)])
            axes.set(title=setting)
        _legend_above(figure, methods)
        return inline(figure, name, description)


def _course(axes: Axes, each: Curves, look: SeriesStyle, line: LineStyle) -> None:
    every = max(1, len(each.rounds) // 12)
    axes.plot(each.rounds, each.accuracy, line, color=look.color, marker=look.marker, markevery=every, markersize=5)
    axes.set(xlabel="round", ylabel="mean accuracy of the sites")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y")


def _spread(axes: Axes, each: Curves, look: SeriesStyle, line: LineStyle) -> None:
    curve = accuracy_density(each.sites, POINTS)
    assert curve is not None
    axes.plot(*curve, line, color=look.color, marker=look.marker, markevery=80, markersize=5, markeredgecolor=PAPER)
    axes.set(xlabel="accuracy of a site", ylabel="density")


def _legend_above(figure: Figure, methods: Sequence[str]) -> None:
    handles = [
        Line2D([], [], color=look.color, marker=look.marker, linestyle=LINES[index % len(LINES)], label=method)
        for index, (method, look) in enumerate(zip(methods, looks(len(methods)), strict=True))
    ]
    figure.legend(handles=handles, loc="outside upper left", ncols=min(4, len(handles)))


def _legend_height(methods: int) -> float:
    return 0.25 * ((methods + 3) // 4)
