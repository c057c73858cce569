"""How fast a site's training loss falls, and the order of sites that follows from it.

Hassani and Rekik, "UniFed: A Universal Federation of a Mixture of Highly Heterogeneous Medical Image Classification
Tasks", 2024, eq. 2 (specs 2.4, steps 1 and 2).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal, TypeVar

import numpy as np

SlopeRule = Literal["least_squares", "endpoints"]
"""``least_squares`` is the paper's eq. 2. ``endpoints`` is the authors' code, the mean of successive differences, in
which two noisy batches decide; the two can order sites differently."""

Site = TypeVar("Site", str, int)


def loss_slope(losses: Sequence[float], rule: SlopeRule = "least_squares") -> float:
    """Slope of the training loss over the batches of a site's latest local training, all its epochs in one row.

    It shrinks as training gets longer; the paper does not correct for that, nor do we.

    Returns:
        Change of loss per batch; 0 for one batch or none, which the paper leaves open.
    """
    if len(losses) < 2:
        return 0.0
    if rule == "endpoints":
        return (losses[-1] - losses[0]) / (len(losses) - 1)
    steps = np.arange(len(losses)) - (len(losses) - 1) / 2
    values = np.asarray(losses, np.float64)
    return float((steps * (values - values.mean())).sum() / (steps * steps).sum())


def easy_first(slopes: Mapping[Site, float]) -> tuple[Site, ...]:
    """Sites from the fastest falling loss to the slowest; ties by lower site, a slope that is NaN after all others."""

    def rank(site: Site) -> tuple[float, Site]:
        slope = slopes[site]
        return math.inf if math.isnan(slope) else slope, site

    return tuple(sorted(slopes, key=rank))
