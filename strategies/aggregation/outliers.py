"""Which updates of a round are far longer than the others': by the median and the median absolute deviation.

Hampel, "The Influence Curve and Its Role in Robust Estimation", JASA 1974: median and MAD are moved by outliers less
than any other pair of location and scale. What the rule is here:

- Three lengths of an update are looked at, each by itself, for in a sum the largest group would hide the others: of the
  trunk, of batch normalisation, and of the longest head row with its bias. Sites own different classes and so have
  different numbers of rows; the length of one row can be compared all the same.
- With ``m`` the median of a length over the sites of the round and ``MAD`` the median of its distances from ``m``, an
  update is far where its length is more than ``m + 6 * max(1.4826 * MAD, m / 3)``. 1.4826 MAD is the standard deviation
  of normally distributed lengths; the other term keeps a handful of sites that are much alike from calling a site far
  that has three times their images: nobody under three times the median is far.
- Only what is too long is far; a short update can do no harm.
- With fewer than 4 sites nobody is far: there is no majority to be far from.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from common.wire.records import Groups
from strategies.aggregation.mean import BLOCK, Float32, running_sum

FEWEST = 4
SPREADS, OF_NORMAL, LEAST_SPREAD = 6.0, 1.4826, 1 / 3

Lengths = Mapping[str, float]
"""Part of an update -> its Euclidean length."""


@dataclass(frozen=True)
class Far:
    """One site's update that is far.

    Attributes:
        spreads: How many spreads its worst part lies above the median.
        reason: Which part, how long, and how long the others' are.
    """

    spreads: float
    reason: str


def lengths_of(update: Groups) -> Lengths:
    """The lengths that are compared, of the groups that are there."""
    found = {}
    if update.trunk is not None:
        found["trunk"] = _length(update.trunk)
    if update.norm is not None:
        found["batch normalisation"] = _length(update.norm)
    if update.head is not None:
        squares = np.square(update.head.weight, dtype=np.float64).sum(axis=1) + np.square(update.head.bias, dtype=float)
        found["longest head row"] = float(np.sqrt(squares.max()))
    return found


def far_updates(lengths: Mapping[str, Lengths]) -> dict[str, Far]:
    """The sites whose update is far, by site name.

    Args:
        lengths: Of all updates of one round, by site name.
    """
    found: dict[str, Far] = {}
    for part in sorted({part for of_site in lengths.values() for part in of_site}):
        sent = {site: of_site[part] for site, of_site in sorted(lengths.items()) if part in of_site}
        for site, far in _far(part, sent).items():
            if site not in found or far.spreads > found[site].spreads:
                found[site] = far
    return found


def dropped(far: Mapping[str, Far], sites: int, needed: int) -> tuple[str, ...]:
    """Choose the farthest updates to leave out, so that ``needed`` and more than half of all stay."""
    most = max(min(sites - needed, (sites - 1) // 2), 0)
    farthest = sorted(far, key=lambda site: (-far[site].spreads, site))
    return tuple(sorted(farthest[:most]))


def _far(part: str, lengths: Mapping[str, float]) -> dict[str, Far]:
    values = np.array(list(lengths.values()))
    median = float(np.median(values)) if len(values) else 0.0
    if len(values) < FEWEST or not median:
        return {}
    spread = max(OF_NORMAL * float(np.median(np.abs(values - median))), LEAST_SPREAD * median)
    return {
        site: Far((length - median) / spread, _reason(part, length, median))
        for site, length in lengths.items()
        if length > median + SPREADS * spread
    }


def _reason(part: str, length: float, median: float) -> str:
    return f"its update is far longer than the others': {part} {length:.3g}, their median {median:.3g}"


def _length(values: Float32) -> float:
    blocks = (values[start : start + BLOCK].astype(np.float64) for start in range(0, len(values), BLOCK))
    return float(np.sqrt(running_sum(float(block @ block) for block in blocks)))
