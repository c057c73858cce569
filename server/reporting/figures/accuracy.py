"""Figures of a task with one class an image: how accuracy went round by round, and how it spreads over sites."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from common.metrics.multi_class import ClientAccuracy, accuracy_density
from server.reporting.figures.svg import BLUE, PAPER, VERMILION, canvas, inline, theme
from server.runs.reader import RoundLine

POINTS = 2001  # twelve sites within one per cent still give a smooth curve
VISIBLE = 0.005  # share of the peak below which the curve is left out of the picture


@dataclass(frozen=True)
class Curve:
    """How a line is drawn; ``shift`` sets its markers between those of a line that may coincide, in steps."""

    color: str
    line: str
    marker: str
    label: str
    shift: float


def accuracy_by_round(rounds: Sequence[RoundLine], best: ClientAccuracy) -> Markup:
    """Mean over sites and pooled accuracy, a star at the best round of each; empty where no round has them."""
    scored = [(each.round, each.test_accuracy) for each in rounds if each.test_accuracy]
    if not scored:
        return Markup("")
    numbers, means = [number for number, _ in scored], [accuracy.mean for _, accuracy in scored]
    with theme():
        figure, (axes,) = canvas(9, 3)
        _curve(axes, numbers, means, Curve(BLUE, "-", "o", "mean over sites", 0))
        pooled = [accuracy.pooled for _, accuracy in scored]
        _curve(axes, numbers, pooled, Curve(VERMILION, "--", "s", "all images pooled", 0.5))
        _star(axes, best.best_mean_round, best.best_mean_client_test_accuracy, BLUE)
        _star(axes, best.best_pooled_round, best.best_test_accuracy, VERMILION)
        axes.set(title="Accuracy on the sites' test images", xlabel="round", ylabel="accuracy")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(axis="y")
        axes.legend()
        return inline(figure, "accuracy", "Line chart: accuracy on the sites' test images by round.")


def density_of_sites(accuracies: Sequence[float]) -> Markup:
    """The kernel density with a tick for every site; empty where :func:`accuracy_density` has none."""
    curve = accuracy_density(accuracies, POINTS)
    if curve is None:
        return Markup("")
    grid, density = curve
    with theme():
        figure, (axes,) = canvas(9, 2.6)
        axes.plot(grid, density, color=BLUE, linewidth=2, label="density")
        axes.fill_between(grid, density, color=BLUE, alpha=0.15, linewidth=0)
        ticks = axes.get_xaxis_transform()  # accuracy along x, share of the height along y
        axes.vlines(list(accuracies), 0, 0.1, VERMILION, linewidth=1.8, transform=ticks, label="one site")
        axes.set(title="How accuracy spreads over sites", xlabel="accuracy of a site", ylabel="density")
        axes.set(xlim=_range(curve, accuracies), ylim=(0, None))
        axes.legend()
        return inline(figure, "density", f"Density of the accuracies of {len(accuracies)} sites, a tick for each.")


def _curve(axes: Axes, rounds: Sequence[int], values: Sequence[float], look: Curve) -> None:
    every = max(1, len(rounds) // 15)
    (line,) = axes.plot(rounds, values, look.line, color=look.color, marker=look.marker, markersize=4.5)
    line.set(markevery=(int(look.shift * every), every), label=look.label)


def _star(axes: Axes, best_round: int, accuracy: float, color: str) -> None:
    axes.plot([best_round], [accuracy], "*", color=color, markersize=14, markeredgecolor=PAPER)


def _range(
    curve: tuple[NDArray[np.floating], NDArray[np.floating]], accuracies: Sequence[float]
) -> tuple[float, float]:
    """Return the range of the axis: the visible part of the curve, and every site's accuracy."""
    grid, density = curve
    seen = [*accuracies, *grid[density > VISIBLE * density.max()].tolist()]
    return min(seen), max(seen)
