"""Metrics that a package of the user's computes, class by class."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import numpy as np
from numpy.typing import NDArray

from common.errors import BadInput, Fault
from common.plugins import METRICS, PLUGIN, loaded

MOST = 1e9
"""Largest magnitude of a metric."""
Metric = Callable[[NDArray[np.floating], NDArray[np.floating]], float | None]
"""Called once a class with the scores ``(n,)``, 0 to 1, and the labels ``(n,)``, 0 or 1, of the images whose label is
known. There are positives and negatives among them. NaN or None stands for "not defined"."""


def metrics_of(names: Iterable[str]) -> Mapping[str, Metric]:
    """The metrics of these plug-ins, ``plugin:NAME``.

    Raises:
        BadInput: If one is not installed.
    """
    return {name: loaded(METRICS, name.removeprefix(PLUGIN)) for name in names}


def value_of(name: str, metric: Metric, scores: NDArray[np.floating], labels: NDArray[np.floating]) -> float | None:
    """What a metric says of one class.

    Raises:
        BadInput: If it fails, or returns no number of at most :data:`MOST`.
    """
    fault = partial(Fault, f"evaluation.metrics: {name}")
    try:
        value = metric(scores.copy(), labels.copy())  # somebody else's code may write into what it gets
        number = float("nan") if value is None else float(value)
    except (Exception, SystemExit) as error:  # it may raise anything
        raise BadInput([fault(f"failed: {type(error).__name__}.")]) from error
    if abs(number) > MOST:
        raise BadInput([fault(f"returned {number:g}; at most {MOST:g} can be told.")])
    return None if np.isnan(number) else number


def or_undefined(name: str, metric: Metric, tell: Callable[[str], None]) -> Metric:
    """Make a metric that is not defined where this one fails, or returns a number that cannot be told.

    Args:
        tell: Told why.
    """

    def value(scores: NDArray[np.floating], labels: NDArray[np.floating]) -> float | None:
        try:
            return value_of(name, metric, scores, labels)
        except BadInput as error:
            tell(str(error))
            return None

    return value
