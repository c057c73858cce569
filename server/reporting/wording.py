"""Numbers as people read them."""

import numpy as np

from common.metrics.benefit import WORDS as SITE_MODELS
from common.metrics.calibration import wilson
from common.metrics.measured import figure
from common.system.formatting import (
    NOT_APPLICABLE,
    count,
    counted,
    duration,
    listed,
    number,
    shortened,
    signed,
    size,
    span,
    spans,
)
from server.analysis.comparison import Spread
from server.analysis.statistics import PairedTest
from server.runs.reader import Measure

__all__ = (
    "MEASURE_NAMES",
    "NOT_APPLICABLE",
    "SITE_MODELS",
    "count",
    "counted",
    "deciding_test",
    "duration",
    "figure",
    "interval",
    "listed",
    "number",
    "probability",
    "share",
    "shortened",
    "signed",
    "size",
    "span",
    "spans",
    "spread",
    "threshold",
)
"""What templates and other modules say."""

MEASURE_NAMES: dict[Measure, str] = {
    "accuracy": "accuracy",
    "sensitivity": "sensitivity",
    "specificity": "specificity",
    "f1": "F1",
    "best_mean_client_test_accuracy": "BMCTA",
    "best_test_accuracy": "BTA",
}


def told(value: int | None, smallest: int | None) -> str:
    """A site's count; where it does not tell one, by which threshold: a hidden count is never 0."""
    return f"hidden (fewer than {smallest} patients)" if value is None and smallest else count(value)


def spread(value: Spread) -> str:
    """Mean and SD over seeds, the mean alone with one seed."""
    return number(value.mean) if value.sd is None else f"{number(value.mean)} ± {number(value.sd)}"


def share(part: int, whole: int) -> str:
    """A share of images in per cent with its 95 % score interval: ``"91 % (87–94)"``."""
    if not whole:
        return NOT_APPLICABLE
    (low,), (high,) = wilson(np.array([part]), np.array([whole]))
    return f"{part / whole:.0%} ({100 * low:.0f}–{100 * high:.0f})".replace("%", "\N{NO-BREAK SPACE}%")


def threshold(value: float) -> str:
    """A threshold with as many digits as one near 0 needs: ``"0.4312"``, ``"0.002104"``."""
    return f"{value:.4g}"


def probability(p: float | None) -> str:
    """A p-value: ``"p = 0.012"``, ``"p < 0.001"``."""
    if p is None:
        return NOT_APPLICABLE
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def deciding_test(test: PairedTest) -> str:
    """Which test decides and what Shapiro-Wilk said of its differences."""
    if test.normality_p is None:
        return test.reason
    if test.wilcoxon_p is None:
        return f"paired t-test; differences look normal (Shapiro-Wilk {probability(test.normality_p)})"
    return (
        f"Wilcoxon signed-rank test; differences are not normal (Shapiro-Wilk {probability(test.normality_p)}, "
        f"t-test {probability(test.t_test_p)})"
    )


def interval(test: PairedTest) -> str:
    """The bootstrap interval: ``"+0.004 to +0.031"``."""
    return NOT_APPLICABLE if test.interval is None else " to ".join(signed(end) for end in test.interval)
