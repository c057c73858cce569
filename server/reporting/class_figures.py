"""Plots of classification quality per class: calibration, ROC and precision-recall curves, decisions at 0.5."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from polyclinic.common.metrics.calibration import Calibration, DecisionCounts, RocCurve, compute_wilson_interval
from polyclinic.common.reporting.figure import ROW_HEIGHT, LegendEntry, draw_figure
from polyclinic.common.reporting.plot import Axis, Plot, Tick, replace_none_by_nan
from polyclinic.common.reporting.svg import BLUE, DOTTED, LINE_COLOR, TEXT_COLOR, VERMILION

PANELS_PER_ROW = 5
MAX_PANELS = 25
"""Greatest number of panels (classes) in one figure."""
PANEL_HEIGHT = 104.0
"""Height of a panel within its axes, in points."""
MAX_PANEL_WIDTH = 104.0
"""Greatest width of a panel within its axes, in points."""
PANEL_LIMITS = -0.06, 1.06
"""Limits of both axes of a panel."""
PANEL_TICKS: tuple[Tick, ...] = ((0.0, "0"), (0.5, "0.5"), (1.0, "1"))
MAX_NUMBERED_CLASSES = 14
"""Greatest number of classes with which the cells of a confusion matrix show numbers."""

MAX_MATRIX_CLASSES = 60
"""Greatest number of classes in a confusion matrix; with more classes the cells would be too small."""

Content = TypeVar("Content")
"""Type of the values that a panel shows."""


def draw_reliability_diagrams(calibrations: Mapping[str, Calibration]) -> Markup:
    """Draw a reliability diagram per class: share of positives by mean score, and the line of perfect calibration."""

    def draw_reliability_panel(plot: Plot, calibration: Calibration) -> None:
        bins = [each for each in calibration.bins if each.mean_score is not None]
        means = replace_none_by_nan([each.mean_score for each in bins])
        positives, images = np.array([(each.positives, each.images) for each in bins], float).reshape(-1, 2).T
        low, high = compute_wilson_interval(positives, images)
        plot.add_line([0, 1], [0, 1], TEXT_COLOR, width=1, dash=DOTTED)
        for mean, *interval in zip(means.tolist(), low.tolist(), high.tolist(), strict=True):
            plot.add_line([mean, mean], interval, BLUE, width=1.2, opacity=0.6)
        diameters = np.sqrt(14 + 60 * images / images.sum())  # areas grow with the number of images
        plot.add_markers(means, positives / images, "circle", BLUE, diameters)

    labels = "mean score of a tenth of the scale", "share of positives"
    about = "Reliability diagrams: share of positives by mean score, class by class."
    return _draw_class_panels(calibrations, draw_reliability_panel, "reliability", labels, about)


def draw_roc_curves(curves: Mapping[str, RocCurve]) -> Markup:
    """Draw the ROC curve of each class: sensitivity with its interval by false positive rate."""

    def draw_roc_panel(plot: Plot, curve: RocCurve) -> None:
        true_positives = np.array(curve.detected, float)
        false_positives = np.array(curve.alarms, float)
        positives = np.full_like(true_positives, true_positives[-1])
        false_positive_rate = false_positives / false_positives[-1]
        _draw_rate_with_interval(plot, false_positive_rate, true_positives, positives, guessing=(0, 1))

    labels = "false positive rate", "sensitivity"
    return _draw_class_panels(curves, draw_roc_panel, "roc", labels, "ROC curves, class by class.")


def draw_precision_recall_curves(curves: Mapping[str, RocCurve]) -> Markup:
    """Draw the precision-recall curve of each class: precision with its interval by sensitivity."""

    def draw_precision_recall_panel(plot: Plot, curve: RocCurve) -> None:
        true_positives = np.array(curve.detected[1:], float)
        false_positives = np.array(curve.alarms[1:], float)
        predicted_positives = true_positives + false_positives
        prevalence = true_positives[-1] / predicted_positives[-1]
        recall = true_positives / true_positives[-1]
        guessing = prevalence, prevalence
        _draw_rate_with_interval(plot, recall, true_positives, predicted_positives, guessing=guessing)

    labels = "sensitivity (recall)", "precision"
    about = "Precision-recall curves, class by class."
    return _draw_class_panels(curves, draw_precision_recall_panel, "precision", labels, about)


def _draw_rate_with_interval(
    plot: Plot,
    x: NDArray[np.float64],
    hits: NDArray[np.float64],
    images: NDArray[np.float64],
    guessing: tuple[float, float],
) -> None:
    """Draw a rate (hits per images) with its 95 % interval, and the line of random guessing.

    Args:
        x: Horizontal position of each rate.
        hits: Numerator of each rate.
        images: Denominator of each rate.
        guessing: Rate of random guessing at ``x`` = 0 and at ``x`` = 1.
    """
    low, high = compute_wilson_interval(hits, images)
    plot.add_band(x, low, high, BLUE, 0.2)
    plot.add_line([0, 1], guessing, TEXT_COLOR, width=1, dash=DOTTED)
    plot.add_line(x, hits / images, BLUE, width=1.6)


def _draw_class_panels(
    contents: Mapping[str, Content],
    draw: Callable[[Plot, Content], None],
    name: str,
    labels: tuple[str, str],
    description: str,
) -> Markup:
    """Draw a panel for each of the first 25 classes, five in a row; return an empty text without classes.

    Args:
        contents: Class -> content of its panel.
        draw: Draws the content of one class.
        name: Prefix of the ids in the SVG.
        labels: Labels of the horizontal and of the vertical axis.
        description: Description for readers who cannot see the figure.
    """
    shown = dict(list(contents.items())[:MAX_PANELS])
    if not shown:
        return Markup("")
    columns = min(PANELS_PER_ROW, len(shown))
    ticks_without_labels = [(position, "") for position, _ in PANEL_TICKS]
    plots = list[Plot]()
    for index, (title, content) in enumerate(shown.items()):
        # Only the outer panels have numbers at their ticks.
        is_leftmost = index % columns == 0
        is_lowest = index + columns >= len(shown)
        x_axis = Axis(limits=PANEL_LIMITS, ticks=PANEL_TICKS if is_lowest else ticks_without_labels)
        y_axis = Axis(limits=PANEL_LIMITS, ticks=PANEL_TICKS if is_leftmost else ticks_without_labels)
        plot = Plot(x_axis, y_axis, _shorten_class_name(title), title_size=9)
        draw(plot, content)
        plots.append(plot)
    return draw_figure(
        plots,
        name,
        description,
        height=PANEL_HEIGHT,
        width=MAX_PANEL_WIDTH,
        columns=columns,
        common_labels=labels,
    )


def draw_sensitivity_and_specificity(decisions: Mapping[str, DecisionCounts]) -> Markup:
    """Draw sensitivity and specificity at probability 0.5 for each class; empty without classes."""
    if not decisions:
        return Markup("")
    plot = Plot(Axis("sensitivity, specificity", (-0.02, 1.02)))
    plot.y.label_rows(list(map(_shorten_class_name, decisions)))
    for row in range(len(decisions)):
        plot.add_horizontal_rule(row, LINE_COLOR, width=0.6)
    legend = list[LegendEntry]()
    for kind, color, marker, shift in (
        ("sensitivity", BLUE, "circle", -0.12),
        ("specificity", VERMILION, "square", 0.12),
    ):
        shares = replace_none_by_nan([getattr(each, kind) for each in decisions.values()])
        plot.add_markers(shares, np.arange(len(decisions)) + shift, marker, color, 8)
        legend.append(LegendEntry(kind, color, marker))
    about = "Dot chart: sensitivity and specificity of every class at 0.5."
    return draw_figure([plot], "decided", about, height=ROW_HEIGHT * len(decisions), legend=legend)


def draw_confusion_matrix(table: Sequence[Sequence[int]], class_names: Sequence[str]) -> Markup:
    """Draw the confusion matrix: true class by row, predicted class by column, shaded by share of the row.

    If there are more than :data:`MAX_MATRIX_CLASSES` classes, only the classes with the most wrong answers are drawn.
    """
    counts = np.array(table)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    shown = _find_most_confused_classes(counts)
    counts = counts[np.ix_(shown, shown)]
    shares = shares[np.ix_(shown, shown)]
    size = len(shown)
    names = [_shorten_class_name(class_names[row], 16) for row in shown]
    plot = Plot(Axis("answer"), Axis("class"))
    plot.x.label_columns(names)
    plot.y.label_rows(names)
    plot.x.text_size = plot.y.text_size = 10 if size <= MAX_NUMBERED_CLASSES else 6
    if size < len(class_names):
        plot.title = f"The {size} of {len(class_names)} classes with the most wrong answers"
    texts = list[list[str]]()
    if size <= MAX_NUMBERED_CLASSES:
        texts = [[str(count) if count else "" for count in row] for row in counts]
    plot.add_heat_map(shares, (0.0, 1.0), texts)
    about = "Confusion matrix: test images by class and by the model's answer."
    return draw_figure([plot], "confusion", about, height=min(540.0, 26.0 * size))


def _find_most_confused_classes(counts: NDArray[np.intp]) -> list[int]:
    """Return the rows of the classes with the most wrong answers, sorted; at most :data:`MAX_MATRIX_CLASSES`.

    Args:
        counts: Confusion matrix: number of images by true class and predicted class, ``(classes, classes)``.
    """
    correct = counts.diagonal()
    wrong = counts.sum(axis=0) + counts.sum(axis=1) - 2 * correct  # (classes,)
    rows = np.argsort(-wrong, kind="stable")[:MAX_MATRIX_CLASSES]
    return sorted(rows.tolist())


def _shorten_class_name(name: str, longest: int = 22) -> str:
    return name if len(name) <= longest else f"{name[: longest - 1]}…"
