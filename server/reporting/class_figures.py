"""Figures of what scores are worth, class by class: calibration, ROC and precision-recall curves, decisions at 0.5."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.markers import TICKDOWN, TICKLEFT
from matplotlib.transforms import Affine2D, Transform

from common.metrics.calibration import Calibration, Decisions, RankingCurve, wilson
from server.reporting.svg import BLUE, INK, PAPER, RULE, VERMILION, canvas, inline, theme

COLUMNS, MOST = 5, 25
"""Panels in a row, and in one figure."""
INCHES, TITLE_INCHES = 1.75, 0.25
FROM, TO = -0.06, 1.06
WIDTH, HEIGHT = 1.3, 1.3 * (INCHES + TITLE_INCHES) / INCHES
"""Size of a panel with its margins, where the axes have length 1."""
TICKS = ("0", 0.0), ("0.5", 0.5), ("1", 1.0)
ROW = 0.27
"""Inches of height for one line of text."""
NUMBERED = 14
"""Number of classes up to which the cells of a confusion matrix have room for numbers."""
DARKEST = 0.6
"""Opacity of a full cell: the page's ink stays readable on it."""

Content = TypeVar("Content")


def reliability(calibrations: Mapping[str, Calibration]) -> Markup:
    """Draw one panel a class: the share of positives at each mean score, with the diagonal where both are equal."""
    labels = "mean score of a tenth of the scale", "share of positives"
    about = "Reliability diagrams: share of positives by mean score, class by class."
    return _panels(calibrations, _reliability, "reliability", labels, about)


def _reliability(axes: Axes, at: Transform, calibration: Calibration) -> None:
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


def roc(curves: Mapping[str, RankingCurve]) -> Markup:
    """Draw sensitivity by false positive rate, with the interval of the sensitivity."""
    return _panels(curves, _roc, "roc", ("false positive rate", "sensitivity"), "ROC curves, class by class.")


def _roc(axes: Axes, at: Transform, curve: RankingCurve) -> None:
    detected, alarms = np.array(curve.found, float), np.array(curve.alarms, float)
    low, high = wilson(detected, np.full_like(detected, detected[-1]))
    rate = alarms / alarms[-1]
    axes.plot([0, 1], [0, 1], color=INK, linewidth=1, linestyle=":", transform=at)
    axes.fill_between(rate, low, high, color=BLUE, alpha=0.2, linewidth=0, transform=at)
    axes.plot(rate, detected / detected[-1], color=BLUE, linewidth=1.6, transform=at)


def precision_recall(curves: Mapping[str, RankingCurve]) -> Markup:
    """Draw precision by sensitivity, with the interval of the precision."""
    about = "Precision-recall curves, class by class."
    return _panels(curves, _precision, "precision", ("sensitivity (recall)", "precision"), about)


def _precision(axes: Axes, at: Transform, curve: RankingCurve) -> None:
    detected, alarms = np.array(curve.found[1:], float), np.array(curve.alarms[1:], float)
    low, high = wilson(detected, detected + alarms)
    recall, share = detected / detected[-1], detected[-1] / (detected[-1] + alarms[-1])
    axes.plot([0, 1], [share] * 2, color=INK, linewidth=1, linestyle=":", transform=at)
    axes.fill_between(recall, low, high, color=BLUE, alpha=0.2, linewidth=0, transform=at)
    axes.plot(recall, detected / (detected + alarms), color=BLUE, linewidth=1.6, transform=at)


def _panels(
    of_classes: Mapping[str, Content],
    draw: Callable[[Axes, Transform, Content], None],
    name: str,
    labels: tuple[str, str],
    description: str,
) -> Markup:
    """Draw the first 25 classes, five in a row; nothing where there is none.

    All lie on one pair of axes: 25 pairs take matplotlib as long as the whole rest of a report.

    Args:
        draw: Draws one class by a transform from its panel's coordinates.
        labels: Labels of the horizontal and of the vertical axes.
    """
    shown = dict(list(of_classes.items())[:MOST])
    if not shown:
        return Markup("")
    rows, columns = -(-len(shown) // COLUMNS), min(COLUMNS, len(shown))
    with theme():
        figure, (axes,) = canvas(max(columns * INCHES, 2.6), rows * (INCHES + TITLE_INCHES) + 0.2)
        axes.set_axis_off()
        for index, (title, content) in enumerate(shown.items()):
            row, column = divmod(index, COLUMNS)
            at = Affine2D().translate(column * WIDTH, -row * HEIGHT) + axes.transData
            _frame(axes, at, title, left=not column, below=index + columns >= len(shown))
            draw(axes, at, content)
        axes.set(xlim=(-0.2, columns * WIDTH - 0.2), ylim=(-(rows - 1) * HEIGHT - 0.3, 1.25), aspect="equal")
        figure.supxlabel(labels[0], fontsize=10)
        figure.supylabel(labels[1], fontsize=10)
        return inline(figure, name, description)


def _frame(axes: Axes, at: Transform, title: str, *, left: bool, below: bool) -> None:
    """Draw title, edges and ticks, with numbers beside the first panel of a row and below the last rows."""
    axes.text(FROM, TO + 0.05, _short(title), fontsize=9, transform=at)
    axes.plot([FROM, FROM, TO], [TO, FROM, FROM], color=RULE, linewidth=0.8, transform=at)
    places = [place for _, place in TICKS]
    axes.plot(places, [FROM] * 3, linestyle="", marker=TICKDOWN, markersize=3.5, color=RULE, transform=at)
    axes.plot([FROM] * 3, places, linestyle="", marker=TICKLEFT, markersize=3.5, color=RULE, transform=at)
    for text, place in TICKS:
        if left:
            axes.text(FROM - 0.08, place, text, ha="right", va="center", color=INK, transform=at)
        if below:
            axes.text(place, FROM - 0.08, text, ha="center", va="top", color=INK, transform=at)


def decisions_chart(decisions: Mapping[str, Decisions]) -> Markup:
    """Draw sensitivity and specificity at probability 0.5, class by class; empty without classes."""
    if not decisions:
        return Markup("")
    with theme():
        figure, (axes,) = canvas(9, 1.0 + ROW * len(decisions))
        for row in range(len(decisions)):
            axes.axhline(row, color=RULE, linewidth=0.6)
        for kind, color, marker, shift in (("sensitivity", BLUE, "o", -0.12), ("specificity", VERMILION, "s", 0.12)):
            values = [(getattr(each, kind), row + shift) for row, each in enumerate(decisions.values())]
            x, y = [value for value, _ in values if value is not None], [y for value, y in values if value is not None]
            axes.plot(x, y, marker, color=color, markersize=8, markeredgecolor=PAPER, label=kind, clip_on=False)
        axes.set_yticks(range(len(decisions)), list(map(_short, decisions)))
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.set(xlim=(-0.02, 1.02), ylim=(len(decisions) - 0.5, -0.5), xlabel="sensitivity, specificity")
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2, borderaxespad=0.4)
        return inline(figure, "decided", "Dot chart: sensitivity and specificity of every class at probability 0.5.")


def confusion_matrix(table: Sequence[Sequence[int]], class_names: Sequence[str]) -> Markup:
    """Draw images by class (rows) and answer (columns), shaded by their share of the row."""
    counts = np.array(table)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    size, names = len(class_names), [_short(name, 16) for name in class_names]
    with theme():
        figure, (axes,) = canvas(9, min(9.0, 1.6 + 0.36 * size))
        colors = np.array([to_rgba(BLUE, DARKEST * share) for share in shares.flat])
        mesh = axes.pcolormesh(np.arange(size + 1), np.arange(size + 1), shares, edgecolors=RULE, linewidth=0.5)
        mesh.set(array=None, facecolor=colors)
        for (row, column), count in np.ndenumerate(counts):
            if count and size <= NUMBERED:
                place, weight = (column + 0.5, row + 0.5), "bold" if row == column else "normal"
                axes.annotate(f"{count}", place, ha="center", va="center", fontsize=9, weight=weight)
        axes.set(ylim=(size, 0), xlabel="answer", ylabel="class", xlim=(0, size))
        axes.set_xticks(np.arange(size) + 0.5, names, rotation=90 if max(map(len, names)) > 3 else 0)
        axes.set_yticks(np.arange(size) + 0.5, names)
        axes.tick_params(length=0, labelsize=10 if size <= NUMBERED else 6)
        axes.spines[["left", "bottom"]].set_visible(False)
        return inline(figure, "confusion", "Confusion matrix: test images by class and by the model's answer.")


def _short(name: str, longest: int = 22) -> str:
    return name if len(name) <= longest else f"{name[: longest - 1]}…"
