"""The figures of both reports. Each reads without colour: markers, line styles and hatches say the same."""

from collections.abc import Mapping, Sequence

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from common.metrics.measured import Measured
from server.analysis.comparison import Contrast, MethodResult
from server.reporting import wording
from server.reporting.coverage import ClassesOfGroup
from server.reporting.figures.svg import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    PAPER,
    SKY,
    VERMILION,
    SeriesStyle,
    canvas,
    column,
    inline,
    key,
    legend_above,
    looks,
    theme,
)
from server.reporting.wording import signed
from server.runs.reader import RoundLine

CHANCE, NEAR_CHANCE = 0.5, 0.7
"""The axis of methods reaches to chance only where a value lies below the second: else all dots were one column."""
ROW = 0.27  # inches of height for one line of text
LANE = 0.5  # of a row, for each method
BAND = 0.76  # of a row that the methods share

_FILLS = {"shared": (BLUE, ""), "some": (SKY, "..."), "unique": (ORANGE, "///"), "varies": (GREEN, "xxx")}


def learning_curves(rounds: Sequence[RoundLine], best_round: int | None) -> Markup:
    """Training and validation loss by round and mean AUROC beside them, as far as they were measured; else empty."""
    numbers = [each.round for each in rounds]
    aurocs = {
        "validation": column([each.validation_auroc for each in rounds]),
        "test": column([each.test_mean_auroc for each in rounds]),
    }
    losses = {
        "training": column([each.train_loss for each in rounds]),
        "validation": column([each.validation_loss for each in rounds]),
    }
    measured = {
        label: found
        for label, curves in (("loss", losses), ("mean AUROC", aurocs))
        if (found := {name: values for name, values in curves.items() if np.isfinite(values).any()})
    }
    if not measured:
        return Markup("")
    with theme():
        figure, panels = canvas(9, 3.2, columns=len(measured))
        for axes, (label, curves) in zip(panels, measured.items(), strict=True):
            _curves(axes, numbers, curves)
            axes.set(xlabel="round", ylabel=label)
            _mark_best(axes, best_round, labelled=axes is panels[0])
        return inline(figure, "curves", "Line chart: training and validation loss by round.")


def auroc_bars(
    groups: Sequence[ClassesOfGroup],
    aurocs: Mapping[str, Measured | None],
    intervals: Mapping[str, tuple[float, float]],
) -> Markup:
    """One bar for each class, drawn from chance (0.5), grouped by who annotates the class, with its interval if any."""
    with theme():
        figure, (axes,) = canvas(9, _height(groups))
        positions = _class_rows(axes, groups)
        for group in groups:
            color, hatch = _FILLS[group.kind]
            for name in group.classes:
                _bar(axes, positions[name], aurocs.get(name), (color, hatch), intervals.get(name))
        ends = [end for interval in intervals.values() for end in interval]
        values = [*(one.value for one in aurocs.values() if one is not None), *ends]
        axes.set(xlim=(min([0.45, *(value - 0.06 for value in values)]), 1.0), xlabel="AUROC")
        axes.axvline(CHANCE, color=INK, linewidth=1)
        handles = [
            Patch(facecolor=_FILLS[group.kind][0], edgecolor=PAPER, hatch=_FILLS[group.kind][1], label=group.title)
            for group in groups
        ]
        legend_above(axes, handles)
        return inline(figure, "bars", "Bar chart: AUROC of every class; the table beside it has the numbers.")


def participation(rounds: Sequence[RoundLine], sites: Sequence[str]) -> Markup:
    """A dot where a site took part in a round, a cross where it was absent."""
    with theme():
        figure, (axes,) = canvas(9, 0.9 + ROW * len(sites))
        present = [(each.round, row) for each in rounds for row, site in enumerate(sites) if site in each.sites]
        absent = [(each.round, row) for each in rounds for row, site in enumerate(sites) if site in each.absent]
        area = float(np.clip(3000 / max(1, len(rounds)), 6, 45))
        axes.scatter(*_unzipped(present), s=area, color=BLUE, marker="o", linewidths=0, label="took part")
        axes.scatter(*_unzipped(absent), s=area * 1.6, color=VERMILION, marker="x", linewidths=1.8, label="absent")
        axes.set_yticks(range(len(sites)), sites)
        axes.set(xlabel="round", ylim=(len(sites) - 0.5, -0.5))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        legend_above(axes, list(axes.collections))
        return inline(figure, "participation", "Dot chart: which site took part in which round.")


def auroc_by_method(methods: Sequence[MethodResult], groups: Sequence[ClassesOfGroup]) -> Markup:
    """For each class one marker a method, at its AUROC averaged over seeds, with its interval where it has one."""
    with theme():
        figure, (axes,) = canvas(9, _height(groups) * max(1.0, LANE * len(methods)) + ROW * (len(methods) // 4))
        positions = _class_rows(axes, groups)
        drawn = list(zip(methods, looks(len(methods)), strict=True))
        for lane, (method, look) in enumerate(drawn):
            beside = BAND * ((lane + 0.5) / len(drawn) - 0.5)
            _dots(axes, method, look, {name: row + beside for name, row in positions.items()})
        for name in (name for name in positions if all(each.per_class.get(name) is None for each in methods)):
            left = axes.get_yaxis_transform()  # x as a share of the axis, y as data
            axes.annotate("n/a", (0, positions[name]), (6, 0), left, "offset points", va="center", style="italic")
        ends = [end for method in methods for interval in method.intervals.values() for end in interval]
        values = [value for method in methods for value in method.per_class.values() if value is not None]
        if min([*values, *ends], default=CHANCE) < NEAR_CHANCE:
            axes.axvline(CHANCE, color=INK, linewidth=1, linestyle=":")
        axes.set(xlabel="AUROC (mean over seeds)")
        legend_above(axes, [key(method.label, look) for method, look in drawn])
        return inline(figure, "methods", "Dot chart: AUROC of every class by method; the table has the numbers.")


def _dots(axes: Axes, method: MethodResult, look: SeriesStyle, rows: Mapping[str, float]) -> None:
    lines = [(rows[name], *interval) for name, interval in method.intervals.items() if name in rows]
    if lines:
        axes.hlines(*zip(*lines, strict=True), color=look.color, linewidth=1.4)
    dots = [(value, rows[name]) for name, value in method.per_class.items() if value is not None]
    axes.plot(*_unzipped(dots), look.marker, color=look.color, markersize=7, markeredgecolor=PAPER)


def differences(contrasts: Sequence[Contrast]) -> Markup:
    """Mean difference between the reference and each other method with its 95 % interval, by subset of classes."""
    others = list(dict.fromkeys(each.other for each in contrasts))
    subsets = list(dict.fromkeys(each.subset for each in contrasts))
    with theme():
        figure, (axes,) = canvas(9, 1.1 + 2.2 * ROW * len(others))
        for offset, (subset, look) in enumerate(zip(subsets, looks(len(subsets)), strict=True)):
            for each in (each for each in contrasts if each.subset == subset):
                _whisker(axes, each, others.index(each.other) + 0.24 * (offset - 1), (look.color, look.marker))
        axes.axvline(0, color=INK, linewidth=1)
        axes.set_yticks(range(len(others)), [f"against {other}" for other in others])
        axes.set(ylim=(len(others) - 0.5, -0.5))
        axes.set_xlabel("← reference scores lower   ·   difference in AUROC   ·   reference scores higher →")
        named = zip(subsets, looks(len(subsets)), strict=True)
        legend_above(axes, [key(f"{subset} classes", look) for subset, look in named])
        return inline(figure, "differences", "Interval chart: mean differences with 95 % intervals.")


def _curves(axes: Axes, rounds: Sequence[int], curves: Mapping[str, NDArray[np.float64]]) -> None:
    styles = {"training": (BLUE, "-", "o"), "validation": (VERMILION, "--", "s"), "test": (GREEN, "-.", "^")}
    for name, values in curves.items():
        color, line, marker = styles[name]
        every = max(1, len(rounds) // 15)
        axes.plot(rounds, values, line, color=color, marker=marker, markersize=4.5, markevery=every, label=name)
    axes.grid(axis="y")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend()


def _mark_best(axes: Axes, best_round: int | None, labelled: bool) -> None:
    if best_round is None:
        return
    axes.axvline(best_round, color=INK, linewidth=1, linestyle=":")
    if labelled:
        where = ("data", "axes fraction")
        axes.annotate(f"best round: {best_round}", (best_round, 1.0), (0, 4), where, "offset points", ha="center")


def _height(groups: Sequence[ClassesOfGroup]) -> float:
    return 1.1 + ROW * (sum(len(group.classes) for group in groups) + 0.7 * len(groups))


def _class_rows(axes: Axes, groups: Sequence[ClassesOfGroup]) -> dict[str, float]:
    """Name the rows from the top down, with a gap between groups; return each class's position."""
    positions: dict[str, float] = {}
    row = 0.0
    for group in groups:
        for name in group.classes:
            positions[name] = row
            row += 1
        row += 0.7
    axes.set_yticks(list(positions.values()), list(positions))
    axes.set_ylim(row - 1.1, -0.7)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    return positions


def _bar(
    axes: Axes, row: float, measured: Measured | None, look: tuple[str, str], interval: tuple[float, float] | None
) -> None:
    if measured is None:
        axes.annotate("n/a", (CHANCE, row), (6, 0), "data", "offset points", va="center", style="italic")
        return
    color, hatch = look
    auroc = measured.value
    axes.barh(row, auroc - CHANCE, left=CHANCE, height=0.68, color=color, hatch=hatch, edgecolor=PAPER, linewidth=0)
    low, high = interval or (auroc, auroc)
    if interval:
        axes.plot([low, high], [row, row], color=PAPER, linewidth=4)
        axes.plot([low, high], [row, row], color=INK, linewidth=1.4, marker="|", markersize=7)
    place, side = ((4, high), "left") if auroc >= CHANCE else ((-4, low), "right")
    axes.annotate(
        wording.figure(measured), (place[1], row), (place[0], 0), "data", "offset points", va="center", ha=side
    )


def _whisker(axes: Axes, contrast: Contrast, row: float, look: tuple[str, str]) -> None:
    test = contrast.result
    if test.mean_difference is None:
        return
    low, high = test.interval or (test.mean_difference, test.mean_difference)
    axes.plot([low, high], [row, row], color=look[0], linewidth=2)
    axes.plot([test.mean_difference], [row], look[1], color=look[0], markersize=7, markeredgecolor=PAPER)
    axes.annotate(signed(test.mean_difference), (high, row), (7, 0), "data", "offset points", va="center", fontsize=8.5)


def _unzipped(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
