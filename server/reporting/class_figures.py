"""Plots of classification quality per class: calibration, ROC and precision-recall curves, decisions at 0.5."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.markers import TICKDOWN, TICKLEFT
from matplotlib.transforms import Affine2D, Transform
from numpy.typing import NDArray

from polyclinic.common.metrics.calibration import Calibration, DecisionCounts, RocCurve, compute_wilson_interval
from polyclinic.server.reporting.svg import (
    BLUE,
    INK,
    PAPER,
    ROW,
    RULE,
    VERMILION,
    convert_figure_to_svg,
    draw_heat_map,
    draw_legend_above,
    make_figure,
    replace_none_by_nan,
    use_report_plot_theme,
)

COLUMNS, MOST_PANELS = 5, 25
"""Panels in a row, and in one figure."""
INCHES, TITLE_INCHES = 1.75, 0.25
PANEL_LOW, PANEL_HIGH = -0.06, 1.06
WIDTH, HEIGHT = 1.3, 1.3 * (INCHES + TITLE_INCHES) / INCHES
"""Size of a panel with its margins, where the axes have length 1."""
TICKS = ("0", 0.0), ("0.5", 0.5), ("1", 1.0)
MOST_NUMBERED = 14
"""Number of classes up to which the cells of a confusion matrix have room for numbers."""

MOST_IN_MATRIX = 60
"""Number of classes up to which a confusion matrix shows all: its cells grow with the square, and get too small."""

Content = TypeVar("Content")


def draw_reliability_diagrams(calibrations: Mapping[str, Calibration]) -> Markup:
    """Draw a reliability diagram per class: share of positives by mean score, and the line of perfect calibration."""

    def draw_reliability_panel(axes: Axes, at: Transform, calibration: Calibration) -> None:
        bins = [each for each in calibration.bins if each.mean_score is not None]
        means = replace_none_by_nan([each.mean_score for each in bins])
        positives, images = np.array([(each.positives, each.images) for each in bins], float).reshape(-1, 2).T
        low, high = compute_wilson_interval(positives, images)
        areas = 14 + 60 * images / images.sum()
        axes.plot([0, 1], [0, 1], color=INK, linewidth=1, linestyle=":", transform=at)
        axes.vlines(means, low, high, BLUE, linewidth=1.2, alpha=0.6, transform=at)
        axes.scatter(
            means, positives / images, s=areas, color=BLUE, edgecolors=PAPER, linewidths=0.6, zorder=3, transform=at
        )

    labels = "mean score of a tenth of the scale", "share of positives"
    about = "Reliability diagrams: share of positives by mean score, class by class."
    return _draw_class_panels(calibrations, draw_reliability_panel, "reliability", labels, about)


def draw_roc_curves(curves: Mapping[str, RocCurve]) -> Markup:
    """Draw the ROC curve of each class: sensitivity with its interval by false positive rate."""

    def draw_roc_panel(axes: Axes, at: Transform, curve: RocCurve) -> None:
        detected, alarms = np.array(curve.detected, float), np.array(curve.alarms, float)
        positives = np.full_like(detected, detected[-1])
        _draw_rate_with_interval(axes, at, alarms / alarms[-1], detected, positives, guessing=(0, 1))

    labels = "false positive rate", "sensitivity"
    return _draw_class_panels(curves, draw_roc_panel, "roc", labels, "ROC curves, class by class.")


def draw_precision_recall_curves(curves: Mapping[str, RocCurve]) -> Markup:
    """Draw the precision-recall curve of each class: precision with its interval by sensitivity."""

    def draw_precision_recall_panel(axes: Axes, at: Transform, curve: RocCurve) -> None:
        detected, alarms = np.array(curve.detected[1:], float), np.array(curve.alarms[1:], float)
        share, recall = detected[-1] / (detected[-1] + alarms[-1]), detected / detected[-1]
        _draw_rate_with_interval(axes, at, recall, detected, detected + alarms, guessing=(share, share))

    labels, about = ("sensitivity (recall)", "precision"), "Precision-recall curves, class by class."
    return _draw_class_panels(curves, draw_precision_recall_panel, "precision", labels, about)


def _draw_rate_with_interval(
    axes: Axes,
    at: Transform,
    x: NDArray[np.float64],
    hits: NDArray[np.float64],
    images: NDArray[np.float64],
    guessing: tuple[float, float],
) -> None:
    """Draw a rate (hits per images) with its 95 % interval, and the line of random guessing.

    Args:
        at: Transform from the coordinates of the panel, 0 to 1.
        x: Horizontal positions, one for each rate.
        guessing: Rate of random guessing at ``x`` = 0 and at ``x`` = 1.
    """
    low, high = compute_wilson_interval(hits, images)
    axes.plot([0, 1], guessing, color=INK, linewidth=1, linestyle=":", transform=at)
    axes.fill_between(x, low, high, color=BLUE, alpha=0.2, linewidth=0, transform=at)
    axes.plot(x, hits / images, color=BLUE, linewidth=1.6, transform=at)


def _draw_class_panels(
    of_classes: Mapping[str, Content],
    draw: Callable[[Axes, Transform, Content], None],
    name: str,
    labels: tuple[str, str],
    description: str,
) -> Markup:
    """Draw a panel for each of the first 25 classes, five in a row; return an empty text without classes.

    All panels share one matplotlib axes object, because 25 of them would double the time of a report.

    Args:
        of_classes: Class -> content of its panel.
        draw: Draws the content of one class, with a transform from panel coordinates.
        name: Prefix of the ids in the SVG.
        labels: Labels of the horizontal and of the vertical axis.
        description: Description for readers who cannot see the figure.
    """
    shown = dict(list(of_classes.items())[:MOST_PANELS])
    if not shown:
        return Markup("")
    rows, columns = -(-len(shown) // COLUMNS), min(COLUMNS, len(shown))
    ticks = [tick for _, tick in TICKS]
    with use_report_plot_theme():
        figure, (axes,) = make_figure(max(columns * INCHES, 2.6), rows * (INCHES + TITLE_INCHES) + 0.2)
        axes.set_axis_off()
        for index, (title, content) in enumerate(shown.items()):
            row, place = divmod(index, COLUMNS)
            at = Affine2D().translate(place * WIDTH, -row * HEIGHT) + axes.transData
            axes.text(PANEL_LOW, PANEL_HIGH + 0.05, _shorten_class_name(title), fontsize=9, transform=at)
            x, y = [PANEL_LOW, PANEL_LOW, PANEL_HIGH], [PANEL_HIGH, PANEL_LOW, PANEL_LOW]
            axes.plot(x, y, color=RULE, linewidth=0.8, transform=at)
            axes.plot(ticks, [PANEL_LOW] * 3, linestyle="", marker=TICKDOWN, markersize=3.5, color=RULE, transform=at)
            axes.plot([PANEL_LOW] * 3, ticks, linestyle="", marker=TICKLEFT, markersize=3.5, color=RULE, transform=at)
            for text, tick in TICKS:  # numbers only beside outer panels
                if not place:
                    axes.text(PANEL_LOW - 0.08, tick, text, ha="right", va="center", color=INK, transform=at)
                if index + columns >= len(shown):
                    axes.text(tick, PANEL_LOW - 0.08, text, ha="center", va="top", color=INK, transform=at)
            draw(axes, at, content)
        axes.set(xlim=(-0.2, columns * WIDTH - 0.2), ylim=(-(rows - 1) * HEIGHT - 0.3, 1.25), aspect="equal")
        figure.supxlabel(labels[0], fontsize=10)
        figure.supylabel(labels[1], fontsize=10)
        return convert_figure_to_svg(figure, name, description)


def draw_sensitivity_and_specificity(decisions: Mapping[str, DecisionCounts]) -> Markup:
    """Draw sensitivity and specificity at probability 0.5 for each class; empty without classes."""
    if not decisions:
        return Markup("")
    with use_report_plot_theme():
        figure, (axes,) = make_figure(9, 1.0 + ROW * len(decisions))
        for row in range(len(decisions)):
            axes.axhline(row, color=RULE, linewidth=0.6)
        for kind, color, marker, shift in (("sensitivity", BLUE, "o", -0.12), ("specificity", VERMILION, "s", 0.12)):
            x = replace_none_by_nan([getattr(each, kind) for each in decisions.values()])
            y = np.arange(len(decisions)) + shift
            axes.plot(x, y, marker, color=color, markersize=8, markeredgecolor=PAPER, label=kind, clip_on=False)
        axes.set_yticks(range(len(decisions)), list(map(_shorten_class_name, decisions)))
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.set(xlim=(-0.02, 1.02), ylim=(len(decisions) - 0.5, -0.5), xlabel="sensitivity, specificity")
        draw_legend_above(axes, axes.get_lines()[len(decisions) :])
        return convert_figure_to_svg(figure, "decided", "Dot chart: sensitivity and specificity of every class at 0.5.")


def draw_confusion_matrix(table: Sequence[Sequence[int]], class_names: Sequence[str]) -> Markup:
    """Draw the confusion matrix: true class by row, predicted class by column, shaded by share of the row.

    Of more than :data:`MOST_IN_MATRIX` classes, those are drawn that have the most wrong answers.
    """
    counts = np.array(table)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    shown = _find_most_confused_classes(counts)
    counts, shares = counts[np.ix_(shown, shown)], shares[np.ix_(shown, shown)]
    size, names = len(shown), [_shorten_class_name(class_names[row], 16) for row in shown]
    with use_report_plot_theme():
        figure, (axes,) = make_figure(9, min(9.0, 1.6 + 0.36 * size))
        texts = [[str(count) if count else "" for count in row] for row in counts] if size <= MOST_NUMBERED else ()
        draw_heat_map(axes, shares, (0.0, 1.0), texts)
        axes.set(xlabel="answer", ylabel="class")
        axes.set_xticks(range(size), names, rotation=90 if max(map(len, names)) > 3 else 0)
        axes.set_yticks(range(size), names)
        axes.tick_params(labelsize=10 if size <= MOST_NUMBERED else 6)
        if size < len(class_names):
            axes.set_title(f"The {size} of {len(class_names)} classes with the most wrong answers")
        about = "Confusion matrix: test images by class and by the model's answer."
        return convert_figure_to_svg(figure, "confusion", about)


def _find_most_confused_classes(counts: NDArray[np.intp]) -> list[int]:
    """Return the rows of the classes with the most wrong answers of or about them, in order; at most sixty."""
    right = counts.diagonal()
    wrong = counts.sum(axis=0) + counts.sum(axis=1) - 2 * right  # (classes,)
    most = np.argsort(-wrong, kind="stable")[:MOST_IN_MATRIX]
    return sorted(most.tolist())


def _shorten_class_name(name: str, longest: int = 22) -> str:
    return name if len(name) <= longest else f"{name[: longest - 1]}…"
