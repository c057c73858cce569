"""Metrics with a largest possible error, for values computed from score histograms instead of exact scores."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from polyclinic.common.system.plain_text import NOT_APPLICABLE, format_number

MAX_METRIC_ERROR = 0.05
"""Largest possible error with which a metric is still printed or used."""
LARGE_ERROR_NOTE = f"error above {MAX_METRIC_ERROR:g}"
MAX_DECIMALS = 3


@dataclass(frozen=True)
class ValueWithError:
    """A metric with its largest possible error: the exact metric lies within ``value`` ± ``error``."""

    value: float
    error: float = 0.0

    @classmethod
    def from_bounds(cls, low: float, high: float) -> "ValueWithError":
        """Return the middle of two bounds, given in any order, with half their distance as the error."""
        return cls((low + high) / 2, abs(high - low) / 2)

    @property
    def low(self) -> float:
        return self.value - self.error

    @property
    def high(self) -> float:
        return self.value + self.error


def average_values_with_error(figures: Iterable[ValueWithError | None]) -> ValueWithError | None:
    """Return the mean of the values that are not None; its error is the mean of their errors."""
    rows = [(figure.value, figure.error) for figure in figures if figure is not None]
    return ValueWithError(*np.mean(rows, axis=0).tolist()) if rows else None


def format_value_with_error(measured: ValueWithError | None) -> str:
    """Format a metric: ``"0.812"`` if it is exact, else ``"0.81 ± 0.02"``, without digits smaller than the error.

    The error is rounded up, so that the exact metric also lies within the printed interval.
    """
    if measured is None:
        return NOT_APPLICABLE
    if not measured.error:
        return format_number(measured.value)
    if measured.error > MAX_METRIC_ERROR:
        return f"{NOT_APPLICABLE}: {LARGE_ERROR_NOTE}"
    digits = min(MAX_DECIMALS, max(1, -math.floor(math.log10(measured.error))))
    value = round(measured.value, digits)
    steps = math.ceil(round((measured.error + abs(measured.value - value)) * 10**digits, 9))
    return f"{value:.{digits}f} ± {steps / 10**digits:.{digits}f}"
