"""Figures of what scores are worth: calibration class by class, decisions at 0.5, and the confusion of classes."""

from collections.abc import Mapping, Sequence

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.transforms import Transform
from numpy.typing import NDArray

from common.metrics.calibration import Calibration, Decisions, wilson
from server.reporting.figures.panels import panels
from server.reporting.figures.svg import BLUE, INK, PAPER, RULE, VERMILION, canvas, inline, theme

ROW = 0.27  # inches of height for one line of text
NUMBERED = 14  # classes up to which the cells of a confusion matrix have room for numbers
DARKEST = 0.6  # opacity of a full cell: the page's ink stays readable on it


def reliability(calibrations: Mapping[str, Calibration]) -> Markup:
    """One panel a class: the share of positives at each mean score, with the diagonal where scores hold their word."""
    labels = "mean score of a tenth of the scale", "share of positives"
    about = "Reliability diagrams: share of positives by mean score, class by class."
    return panels(calibrations, _panel, "reliability", labels, about)


def _panel(axes: Axes, at: Transform, calibration: Calibration) -> None:
    points = [
        (each.mean_score, each.positives, each.images) for each in calibration.bins if each.mean_score is not None
    ]
    means, shares = [mean for mean, _, _ in points], [positives / images for _, positives, images in points]
    low, high = wilson(np.array([p for _, p, _ in points], float), np.array([n for _, _, n in points], float))
    axes.plot([0, 1], [0, 1], color=INK, linewidth=1, linestyle=":", transform=at)
    axes.vlines(means, low, high, BLUE, linewidth=1.2, alpha=0.6, transform=at)
    total = sum(images for _, _, images in points)
    areas = [14 + 60 * images / total for _, _, images in points]
    axes.scatter(means, shares, s=areas, color=BLUE, edgecolors=PAPER, linewidths=0.6, zorder=3, transform=at)


def decided(decisions: Mapping[str, Decisions]) -> Markup:
    """Per class, sensitivity and specificity at probability 0.5."""
    if not decisions:
        return Markup("")
    with theme():
        figure, (axes,) = canvas(9, 1.0 + ROW * len(decisions))
        for row in range(len(decisions)):
            axes.axhline(row, color=RULE, linewidth=0.6)
        for kind, color, marker, shift in (("sensitivity", BLUE, "o", -0.12), ("specificity", VERMILION, "s", 0.12)):
            values = [(getattr(each, kind), row + shift) for row, each in enumerate(decisions.values())]
            dots = [(value, row) for value, row in values if value is not None]
            at, rows = [value for value, _ in dots], [row for _, row in dots]
            axes.plot(at, rows, marker, color=color, markersize=8, markeredgecolor=PAPER, label=kind, clip_on=False)
        axes.set_yticks(range(len(decisions)), list(map(_short, decisions)))
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.set(xlim=(-0.02, 1.02), ylim=(len(decisions) - 0.5, -0.5), xlabel="sensitivity, specificity")
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2, borderaxespad=0.4)
        return inline(figure, "decided", "Dot chart: sensitivity and specificity of every class at probability 0.5.")


def confusion_matrix(table: Sequence[Sequence[int]], class_names: Sequence[str]) -> Markup:
    """Images by class (rows) and answer (columns), shaded by their share of the row."""
    counts = np.array(table)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    size, names = len(class_names), [_short(name, 16) for name in class_names]
    with theme():
        figure, (axes,) = canvas(9, min(9.0, 1.6 + 0.36 * size))
        colors = np.array([to_rgba(BLUE, DARKEST * share) for share in shares.flat])
        mesh = axes.pcolormesh(np.arange(size + 1), np.arange(size + 1), shares, edgecolors=RULE, linewidth=0.5)
        mesh.set(array=None, facecolor=colors)
        _numbers(axes, counts)
        axes.set(ylim=(size, 0), xlabel="answer", ylabel="class", xlim=(0, size))
        axes.set_xticks(np.arange(size) + 0.5, names, rotation=90 if max(map(len, names)) > 3 else 0)
        axes.set_yticks(np.arange(size) + 0.5, names)
        axes.tick_params(length=0, labelsize=10 if size <= NUMBERED else 6)
        axes.spines[["left", "bottom"]].set_visible(False)
        return inline(figure, "confusion", "Confusion matrix: test images by class and by the model's answer.")


def _numbers(axes: Axes, counts: NDArray[np.int64]) -> None:
    """Counts in the cells, where there is room; none for zero."""
    if len(counts) > NUMBERED:
        return
    for (row, column), count in np.ndenumerate(counts):
        if count:
            weight = "bold" if row == column else "normal"
            axes.annotate(f"{count}", (column + 0.5, row + 0.5), ha="center", va="center", fontsize=9, weight=weight)


def _short(name: str, longest: int = 22) -> str:
    return name if len(name) <= longest else f"{name[: longest - 1]}…"
