"""ROC and precision-recall curves, a panel a class."""

from collections.abc import Callable, Mapping

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator

from common.metrics.curves import RankingCurve, wilson
from server.reporting.figures.svg import BLUE, INK, canvas, inline, theme

COLUMNS, PANELS = 5, 25
PANEL = 1.75  # inches
LONGEST = 22


def roc(curves: Mapping[str, RankingCurve]) -> Markup:
    """Sensitivity by false positive rate, with the interval of the sensitivity."""
    return _panels(curves, _roc, "roc", ("false positive rate", "sensitivity"), "ROC curves, class by class.")


def precision_recall(curves: Mapping[str, RankingCurve]) -> Markup:
    """Precision by sensitivity, with the interval of the precision."""
    about = "Precision-recall curves, class by class."
    return _panels(curves, _precision, "precision", ("sensitivity (recall)", "precision"), about)


def _roc(axes: Axes, curve: RankingCurve) -> None:
    found, alarms = np.array(curve.found, float), np.array(curve.alarms, float)
    low, high = wilson(found, np.full_like(found, found[-1]))
    rate = alarms / alarms[-1]
    axes.plot([0, 1], [0, 1], color=INK, linewidth=1, linestyle=":")
    axes.fill_between(rate, low, high, color=BLUE, alpha=0.2, linewidth=0)
    axes.plot(rate, found / found[-1], color=BLUE, linewidth=1.6)


def _precision(axes: Axes, curve: RankingCurve) -> None:
    found, alarms = np.array(curve.found[1:], float), np.array(curve.alarms[1:], float)
    low, high = wilson(found, found + alarms)
    recall = found / found[-1]
    axes.axhline(found[-1] / (found[-1] + alarms[-1]), color=INK, linewidth=1, linestyle=":")
    axes.fill_between(recall, low, high, color=BLUE, alpha=0.2, linewidth=0)
    axes.plot(recall, found / (found + alarms), color=BLUE, linewidth=1.6)


def _panels(
    curves: Mapping[str, RankingCurve],
    draw: Callable[[Axes, RankingCurve], None],
    name: str,
    labels: tuple[str, str],
    about: str,
) -> Markup:
    shown = dict(list(curves.items())[:PANELS])
    if not shown:
        return Markup("")
    rows, columns = -(-len(shown) // COLUMNS), min(COLUMNS, len(shown))
    with theme():
        figure, panels = canvas(max(columns * PANEL, 2.6), rows * (PANEL + 0.25) + 0.2, columns, rows)
        for index, (axes, (title, curve)) in enumerate(zip(panels, shown.items(), strict=False)):
            draw(axes, curve)
            axes.set(xlim=(-0.04, 1.04), ylim=(-0.04, 1.04), aspect="equal")
            axes.set_title(title if len(title) <= LONGEST else f"{title[: LONGEST - 1]}…", fontsize=9)
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_locator(FixedLocator([0, 0.5, 1]))
                axis.set_minor_locator(NullLocator())
            axes.set_yticklabels([] if index % columns else ["0", "0.5", "1"])
            axes.set_xticklabels(["0", "0.5", "1"] if index + columns >= len(shown) else [])
        for axes in panels[len(shown) :]:
            axes.set_axis_off()
        figure.supxlabel(labels[0], fontsize=10)
        figure.supylabel(labels[1], fontsize=10)
        return inline(figure, name, about)
