"""Figures of who annotates what among many, and of shared against unique classes among methods."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from markupsafe import Markup
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from server.analysis.comparison import SUBSETS, MethodResult
from server.reporting.coverage import ClassesOfGroup
from server.reporting.figures.svg import (
    BLUE,
    GREEN,
    ORANGE,
    PAPER,
    RULE,
    SKY,
    canvas,
    inline,
    key,
    legend_above,
    looks,
    theme,
)
from server.runs.reader import SiteRecord

MANY = 24  # sites or classes from which on the table alone is hard to read
ROW = 0.24
_COLORS = {"shared": BLUE, "some": SKY, "unique": ORANGE, "varies": GREEN}


def coverage_of_many(sites: Mapping[str, SiteRecord], groups: Sequence[ClassesOfGroup]) -> Markup:
    """A row a class, and in it a bar over every run of sites that annotate it; empty where the table is enough.

    Sites stand in the order of what they annotate, so that those that annotate the same are neighbours.
    """
    names = [name for group in groups for name in group.classes]
    if max(len(sites), len(names)) <= MANY:
        return Markup("")
    covered = np.array([[name in record.classes for name in names] for record in sites.values()])  # (sites, classes)
    order = np.lexsort(~covered.T[::-1])
    covered = covered[order]
    kinds = {name: group.kind for group in groups for name in group.classes}
    with theme():
        figure, (axes,) = canvas(9, 0.9 + ROW * len(names))
        for row, name in enumerate(names):
            axes.axhline(row, color=RULE, linewidth=0.6, zorder=0)
            axes.broken_barh(list(_runs(covered[:, row])), (row - 0.38, 0.76), color=_COLORS[kinds[name]], linewidth=0)
        axes.set_yticks(range(len(names)), names)
        axes.set(xlim=(0.5, len(sites) + 0.5), ylim=(len(names) - 0.5, -0.5))
        if len(sites) <= MANY:
            axes.set_xticks(range(1, len(sites) + 1), [list(sites)[row] for row in order], rotation=90)
        else:
            axes.set_xlabel("number of sites; neighbours annotate alike")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.tick_params(axis="y", length=0)
        return inline(figure, "coverage", f"Bar chart: which of {len(names)} classes {len(sites)} sites annotate.")


def shared_and_unique(methods: Sequence[MethodResult]) -> Markup:
    """Mean AUROC over all, shared and unique classes, a marker a method, its line ± one SD over seeds."""
    with theme():
        figure, (axes,) = canvas(9, 1.2 + 0.2 * len(methods) * len(SUBSETS))
        drawn = list(zip(methods, looks(len(methods)), strict=True))
        for place, (method, look) in enumerate(drawn):
            shift = 0.7 * (place - (len(drawn) - 1) / 2) / len(drawn)
            for row, subset in enumerate(SUBSETS):
                found, at = method.auroc[subset], [row + shift] * 2
                if found.mean is None:
                    continue
                if found.sd is not None:
                    axes.plot([found.mean - found.sd, found.mean + found.sd], at, color=look.color, linewidth=2)
                axes.plot([found.mean], at[:1], look.marker, color=look.color, markersize=8, markeredgecolor=PAPER)
        for row in range(len(SUBSETS) - 1):
            axes.axhline(row + 0.5, color=RULE, linewidth=0.6)
        axes.set_yticks(range(len(SUBSETS)), [f"{subset} classes" for subset in SUBSETS])
        axes.set(ylim=(len(SUBSETS) - 0.5, -0.5), xlabel="mean AUROC")
        axes.tick_params(axis="y", length=0)
        legend_above(axes, [key(method.label, look) for method, look in drawn])
        return inline(figure, "subsets", "Dot chart: mean AUROC over all, shared and unique classes by method.")


def _runs(members: NDArray[np.bool_]) -> Iterator[tuple[float, int]]:
    """Where each unbroken run of members begins, half a place before it, and how long it is; places from 1."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], members, [False]]).astype(np.int8)))
    for first, end in edges.reshape(-1, 2).tolist():
        yield first + 0.5, end - first
