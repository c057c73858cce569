"""Figures of what only some methods have: how alike classes are (FedMLP), in which order sites take turns (UniFed)."""

from collections.abc import Sequence

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from server.reporting.figures.svg import BLUE, INK, ORANGE, PAPER, SeriesStyle, canvas, inline, looks, theme
from server.reporting.wording import NOT_APPLICABLE, number
from server.runs.reader import Prototypes, RoundLine

ROW = 0.27  # inches of height for one line of text
LETTERED = 10  # classes up to which a heat map has its numbers in the cells
CELLS = 1200  # of one heat map; of more rounds only some are drawn
ORDERED = 40  # more sites than this are not drawn
STRONGEST = 0.6  # cover of a cell's colour, so that its number stays readable by day and by night
_UNKNOWN = "–"

Floats = NDArray[np.float64]


def order_of_passes(rounds: Sequence[RoundLine], sites: Sequence[str]) -> Markup:
    """Place of every site in each pass, a line a site, and its slope after the round; empty where nothing is passed on.

    Rounds written before slopes were have the order alone.
    """
    sloped = any(each.learned.slopes for each in rounds)
    in_order = all(list(each.sites) == sorted(each.sites) for each in rounds)
    if len(sites) > ORDERED or not rounds or (in_order and not sloped):
        return Markup("")
    with theme():
        figure, panels = canvas(9, 1.1 + max(1.9, ROW * len(sites)), columns=2 if sloped else 1)
        for site, look in zip(sites, looks(len(sites)), strict=True):
            places = [each.sites.index(site) + 1 if site in each.sites else np.nan for each in rounds]
            _line(panels[0], rounds, places, look)
            if sloped:
                _line(panels[1], rounds, [_or_nan(each.learned.slopes.get(site)) for each in rounds], look)
        _places(panels[0], rounds, sites)
        if sloped:
            panels[1].set(title="Slope of the site's loss, a batch", xlabel="round")
            panels[1].grid(axis="y")
            panels[1].xaxis.set_major_locator(MaxNLocator(integer=True))
        return inline(figure, "order", "Line chart: place of every site in each pass, round by round.")


def difficulty_by_round(rounds: Sequence[RoundLine]) -> Markup:
    """A row a class, a column a round: of how many images without a label the model is sure; empty without figures."""
    told = [each for each in rounds if each.learned.difficulty]
    if not told:
        return Markup("")
    names = list(told[-1].learned.difficulty)
    told = told[:: -(-len(told) * len(names) // CELLS)]
    values = np.array([[_or_nan(each.learned.difficulty.get(name)) for each in told] for name in names])
    with theme():
        figure, (axes,) = canvas(9, 1.0 + ROW * len(names))
        _heat(axes, values, (0.0, 1.0), letters=len(told) <= LETTERED)
        numbers = [each.round for each in told]
        shown = range(0, len(numbers), -(-len(numbers) // 12))
        axes.set_xticks(list(shown), [str(numbers[place]) for place in shown])
        axes.set_yticks(range(len(names)), names)
        axes.set(title="Share of unlabelled images of which the model is sure", xlabel="round")
        return inline(figure, "difficulty", "Heat map: share of sure images by class and round.")


def alike(prototypes: Prototypes) -> Markup:
    """Cosines between the positives of every two classes, and between negatives and positives of each."""
    names, between = prototypes.classes, np.array(prototypes.positives, np.float64)
    others = between[~np.eye(len(names), dtype=bool)]
    known = others[~np.isnan(others)]
    with theme():
        figure, (left, right) = canvas(9, 1.9 + 0.33 * len(names), columns=2)
        _heat(left, between, _range(known), letters=len(names) <= LETTERED)
        left.set_xticks(range(len(names)), names, rotation=90 if max(map(len, names)) > 3 else 0)
        left.set_yticks(range(len(names)), names)
        left.set_title("Cosine between positives of two classes")
        _apart(right, prototypes.signs)
        right.set_title("Positives apart from negatives, degrees")
        return inline(figure, "prototypes", "Heat map and bar chart: how much the classes' prototypes are alike.")


def _line(axes: Axes, rounds: Sequence[RoundLine], values: Sequence[float], look: SeriesStyle) -> None:
    every = max(1, len(rounds) // 15)
    numbers = [each.round for each in rounds]
    axes.plot(numbers, values, color=look.color, marker=look.marker, markersize=6, markevery=every, linewidth=2)


def _places(axes: Axes, rounds: Sequence[RoundLine], sites: Sequence[str]) -> None:
    """Places from the top down; every site's name at the end of its line."""
    axes.set(title="Place in the pass", xlabel="round", ylim=(len(sites) + 0.5, 0.5))
    axes.set_yticks(range(1, len(sites) + 1))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    last = {site: each for each in rounds for site in each.sites}
    for site, each in last.items():
        at = (each.round, each.sites.index(site) + 1)
        axes.annotate(site, at, (8, 0), "data", "offset points", va="center", annotation_clip=False)


def _heat(axes: Axes, values: Floats, limits: tuple[float, float], *, letters: bool) -> None:
    """One rectangle a cell, stronger where the value is higher; what is unknown stays empty."""
    low, high = limits
    for (row, column), value in np.ndenumerate(values):
        if np.isnan(value):
            axes.annotate(_UNKNOWN, (column, row), ha="center", va="center")
            continue
        strength = STRONGEST * float(np.clip((value - low) / (high - low), 0.04, 1))
        place = (column - 0.5, row - 0.5)
        axes.add_patch(Rectangle(place, 1, 1, facecolor=BLUE, alpha=strength, edgecolor=PAPER, linewidth=1))
        if letters:
            axes.annotate(f"{value:.2f}", (column, row), ha="center", va="center", fontsize=8)
    axes.set(xlim=(-0.5, values.shape[1] - 0.5), ylim=(values.shape[0] - 0.5, -0.5))
    axes.tick_params(length=0)
    axes.spines[["left", "bottom"]].set_visible(False)


def _apart(axes: Axes, cosines: Sequence[float | None]) -> None:
    """Angle between a class's negatives and positives; the further apart, the easier to tell."""
    for row, cosine in enumerate(cosines):
        if cosine is None:
            axes.annotate(NOT_APPLICABLE, (0, row), (4, 0), "data", "offset points", va="center", style="italic")
            continue
        degrees = float(np.degrees(np.arccos(cosine)))
        axes.barh(row, degrees, height=0.68, color=ORANGE, hatch="///", edgecolor=PAPER, linewidth=0)
        axes.annotate(number(degrees, 1), (degrees, row), (4, 0), "data", "offset points", va="center")
    axes.axvline(0, color=INK, linewidth=1)
    axes.set(ylim=(len(cosines) - 0.5, -0.5), yticks=[])
    axes.margins(x=0.15)
    axes.spines["left"].set_visible(False)


def _range(values: Floats) -> tuple[float, float]:
    """Return the range of the colours, from the least similar pair to 1: cosines of these features lie near 1."""
    low = float(values.min()) if len(values) else 0.0
    return min(low, 0.99), 1.0


def _or_nan(value: float | None) -> float:
    return np.nan if value is None else value
