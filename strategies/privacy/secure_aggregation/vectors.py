"""A site's numbers as a vector of integers: where each lies, which sites share it, and what a sum of them means.

Updates are integers modulo 2**32, whose sums are exact in any order.

All sites count alike: weights that differ and are known would tell in a sum which part is whose. Of n sites each number
u of an update is cut to [-r, r] and becomes round(u * 2**30 / (r * n)). So each number of a sum of updates
lies in [-2**30 - n/2, 2**30 + n/2]; a value outside this range was not unmasked correctly. The mean errs by at most
r * n / 2**31, divided by the share of the sites whose updates are in the sum.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.config import Plan
from common.wire.records import ModelGroups
from common.wire.secure_aggregation import Integers
from strategies.local.site_method import SiteMethod

BODY = ""
"""Name of the segment that all sites share: trunk, batch normalisation, and the rows that all own."""


def compute_share_threshold(sites: int, honest: int = 0) -> int:
    """Return how many sites must stay to the end, which is how many shares make a secret: two thirds, rounded up.

    More than half of them, so that a coordinator that names different survivors to different sites gets the shares of
    a site's key and of its own mask only with the help of a third of the sites. Where all but ``honest`` may help it,
    more: that help counts in both halves, so twice the shares have to exceed ``honest + 2 * (sites - honest)``.

    Args:
        honest: Number of sites that do not help the coordinator in anything; 0 where nothing is promised about that.
    """
    two_thirds = -(-2 * sites // 3)
    return max(two_thirds, sites - -(-honest // 2) + 1) if honest else two_thirds


@dataclass(frozen=True)
class SegmentLayout:
    """A vector: the body, then a row for each class a site sends, by class name.

    Attributes:
        trunk, norm: Numbers of each; 0 where it is not sent.
        features: Width of a head row, without its bias.
    """

    trunk: int
    norm: int
    features: int

    @property
    def body_size(self) -> int:
        return self.trunk + self.norm

    @property
    def row_size(self) -> int:
        return self.features + 1

    def vector_size(self, rows: Sequence[str]) -> int:
        """Return how many numbers the vector of a site with these rows has."""
        return self.body_size + len(rows) * self.row_size

    def slices_of_classes(self, rows: Sequence[str], classes: Sequence[str], *, body: bool) -> Iterator[slice]:
        """Yield where the body and these classes lie in the vector of a site with these rows."""
        if body:
            yield slice(0, self.body_size)
        position = {name: place for place, name in enumerate(rows)}
        for name in classes:
            start = self.body_size + position[name] * self.row_size
            yield slice(start, start + self.row_size)


@dataclass(frozen=True)
class MaskedSegment:
    """Numbers that the same sites send; masks of their own cover them."""

    name: str
    classes: tuple[str, ...]
    owners: tuple[str, ...]

    @property
    def is_body(self) -> bool:
        return self.name == BODY


def list_segments(rows: Mapping[str, Collection[str]]) -> tuple[MaskedSegment, ...]:
    """Return the body, then the other segments by their first class.

    Args:
        rows: Site -> classes whose rows it sends.
    """
    everybody = tuple(sorted(rows))
    classes: dict[tuple[str, ...], list[str]] = {everybody: []}
    for name in sorted({name for held in rows.values() for name in held}):
        owners = tuple(site for site in everybody if name in rows[site])
        classes.setdefault(owners, []).append(name)
    return tuple(
        MaskedSegment(BODY if owners == everybody else names[0], tuple(names), owners)
        for owners, names in classes.items()
    )


def flatten_update(update: ModelGroups) -> tuple[SegmentLayout, tuple[str, ...], NDArray[np.float32]]:
    """Return the layout, the rows and the numbers of an update as one vector."""
    head = update.head
    rows = tuple(sorted(head.class_names)) if head else ()
    arrays = [array for array in (update.trunk, update.norm) if array is not None]
    if head:
        ordered = head.select_rows(rows)
        arrays.append(np.column_stack([ordered.weight, ordered.bias]).ravel())
    sizes = (0 if update.trunk is None else len(update.trunk), 0 if update.norm is None else len(update.norm))
    return SegmentLayout(*sizes, head.features if head else 0), rows, np.concatenate(arrays, dtype=np.float32)


def split_vector(
    layout: SegmentLayout, rows: tuple[str, ...], vector: NDArray[np.float64]
) -> tuple[NDArray[np.float64], ...]:
    """Return trunk, norm, weights ``(rows, features)`` and biases of a vector."""
    head = vector[layout.body_size :].reshape(len(rows), layout.row_size)
    return vector[: layout.trunk], vector[layout.trunk : layout.body_size], head[:, :-1], head[:, -1]


# ---------------------------------------------------------------------- numbers as integers

ONE = 2**30
BLOCK = 2**16
"""Numbers turned at a time: half a megabyte in float64."""


def convert_to_fixed_point(update: NDArray[np.float32], divisor: int, largest: float) -> Integers:
    """Return an update's numbers as integers.

    Args:
        divisor: Number of sites, or more.
        largest: Bound r; numbers beyond are cut.

    Raises:
        ValueError: If a number is not finite.
    """
    result = np.empty(len(update), np.uint32)
    factor = 1 / divisor * (ONE / largest)
    for start in range(0, len(update), BLOCK):
        block = update[start : start + BLOCK].astype(np.float64)
        if not np.isfinite(block).all():
            raise ValueError("an update that is not finite cannot be masked")
        np.clip(block, -largest, largest, out=block)
        result[start : start + BLOCK] = np.rint(block * factor).astype(np.int32).view(np.uint32)
    return result


def count_out_of_range(update: NDArray[np.float32], largest: float) -> int:
    """Count the numbers that lie beyond the range."""
    return int(np.count_nonzero(np.abs(update) > largest))


def is_plausible_sum(total: Integers, sites: int) -> bool:
    """Return False if a number is outside the range of a sum of ``sites`` updates.

    If a mask was not removed, about half of all numbers are outside that range.
    """
    signed = total.view(np.int32)
    limit = ONE + sites
    return not len(signed) or bool(-limit <= signed.min() and signed.max() <= limit)


def convert_from_fixed_point(total: Integers, largest: float) -> NDArray[np.float64]:
    """Turn a sum of fixed-point integers back into numbers."""
    return total.view(np.int32) * np.float64(largest / ONE)


MAX_UPDATE_VALUE = 16.0
"""Bound where the experiment sets none: numbers of an update beyond are cut. The resolution is 1.5e-8."""


def max_update_value(plan: Plan, method: SiteMethod) -> float:
    """Return the bound of one number of an update: the experiment's, or the length that updates are clipped to."""
    if plan.privacy.noise == "distributed":
        return plan.privacy.max_update_norm
    return plan.privacy.max_update_value or method.parameters.clip_update or MAX_UPDATE_VALUE
