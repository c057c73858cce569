"""ROC and precision-recall curves, a panel a class."""

from collections.abc import Mapping

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.transforms import Transform

from common.metrics.calibration import RankingCurve, wilson
from server.reporting.figures.panels import panels
from server.reporting.figures.svg import BLUE, INK


def roc(curves: Mapping[str, RankingCurve]) -> Markup:
    """Sensitivity by false positive rate, with the interval of the sensitivity."""
    return panels(curves, _roc, "roc", ("false positive rate", "sensitivity"), "ROC curves, class by class.")


def precision_recall(curves: Mapping[str, RankingCurve]) -> Markup:
    """Precision by sensitivity, with the interval of the precision."""
    about = "Precision-recall curves, class by class."
    return panels(curves, _precision, "precision", ("sensitivity (recall)", "precision"), about)


def _roc(axes: Axes, at: Transform, curve: RankingCurve) -> None:
    found, alarms = np.array(curve.found, float), np.array(curve.alarms, float)
    low, high = wilson(found, np.full_like(found, found[-1]))
    rate = alarms / alarms[-1]
    axes.plot([0, 1], [0, 1], color=INK, linewidth=1, linestyle=":", transform=at)
    axes.fill_between(rate, low, high, color=BLUE, alpha=0.2, linewidth=0, transform=at)
    axes.plot(rate, found / found[-1], color=BLUE, linewidth=1.6, transform=at)


def _precision(axes: Axes, at: Transform, curve: RankingCurve) -> None:
    found, alarms = np.array(curve.found[1:], float), np.array(curve.alarms[1:], float)
    low, high = wilson(found, found + alarms)
    recall = found / found[-1]
    axes.plot([0, 1], [found[-1] / (found[-1] + alarms[-1])] * 2, color=INK, linewidth=1, linestyle=":", transform=at)
    axes.fill_between(recall, low, high, color=BLUE, alpha=0.2, linewidth=0, transform=at)
    axes.plot(recall, found / (found + alarms), color=BLUE, linewidth=1.6, transform=at)
