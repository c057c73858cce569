"""A site's update as a vector of integers: positions of values, segments by sites, and conversion of sums.

Updates are integers modulo 2**32, whose sums are exact in any order.

All sites have equal weights, because different known weights would reveal in a sum which part belongs to which site.
With n sites each value u of an update is clipped to [-r, r] and becomes round(u * 2**30 / (r * n)). So each value of a
sum of updates is in [-2**30 - n/2, 2**30 + n/2]; a value outside this range was not unmasked correctly. The error of
the mean is at most r * n / 2**31, divided by the share of the sites whose updates are in the sum.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polyclinic.common.config import HospitalPlan
from polyclinic.common.wire.records import ModelGroups
from polyclinic.common.wire.secure_aggregation import Integers
from polyclinic.strategies.local.site_method import SiteMethod

BODY_SEGMENT = ""
"""Name of the segment that all sites send: trunk, batch normalisation, and the head rows that all own."""


def compute_share_threshold(sites: int, honest: int = 0) -> int:
    """Return how many of ``sites`` sites must answer at every stage of masking, at least two thirds.

    As many shares recover a secret. A dishonest coordinator could name different survivors to different sites, to
    collect shares of both a site's key and its own mask. With two thirds it succeeds only if a third of the sites help
    it. If all but ``honest`` sites may help and reveal both shares, the threshold is higher: ``2 * threshold > honest +
    2 * (sites - honest)``.

    Args:
        honest: Number of sites that do not help the coordinator; 0 if no such number is promised.
    """
    two_thirds = -(-2 * sites // 3)
    return max(two_thirds, sites - -(-honest // 2) + 1) if honest else two_thirds


@dataclass(frozen=True)
class UpdateVectorLayout:
    """Positions of values in the masked vector: the body, then one row for each class that a site sends, by class name.

    The body is trunk and batch normalisation.

    Attributes:
        trunk, norm: Number of values of trunk and batch normalisation; 0 if not sent.
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

    def compute_vector_size(self, rows: Sequence[str]) -> int:
        """Return the length of the vector of a site with these head rows."""
        return self.body_size + len(rows) * self.row_size

    def iterate_class_slices(self, rows: Sequence[str], classes: Sequence[str], *, body: bool) -> Iterator[slice]:
        """Yield the slices of head rows in the vector of one site.

        Args:
            rows: Classes whose head rows the site sends, sorted.
            classes: Classes whose slices are yielded.
            body: True to yield first the slice of the body: trunk and batch normalisation.
        """
        if body:
            yield slice(0, self.body_size)
        position = {name: place for place, name in enumerate(rows)}
        for name in classes:
            start = self.body_size + position[name] * self.row_size
            yield slice(start, start + self.row_size)


@dataclass(frozen=True)
class UpdateVectorSegment:
    """Values of the update that the same sites send; each of these sites covers them with a mask of its own.

    Attributes:
        classes: Classes of the head rows in the segment.
        owners: The sites that send the values, sorted.
    """

    name: str
    classes: tuple[str, ...]
    owners: tuple[str, ...]

    @property
    def is_body_segment(self) -> bool:
        return self.name == BODY_SEGMENT


def group_rows_into_segments(rows: Mapping[str, Collection[str]]) -> tuple[UpdateVectorSegment, ...]:
    """Group head rows by the sites that send them, because each group is summed over its own sites.

    The first segment, the body, holds trunk, batch normalisation and the rows that all sites send. The other segments
    follow in the order of their first class.

    Args:
        rows: Site -> classes whose head rows it sends.
    """
    everybody = tuple(sorted(rows))
    classes: dict[tuple[str, ...], list[str]] = {everybody: []}
    for name in sorted({name for held in rows.values() for name in held}):
        owners = tuple(site for site in everybody if name in rows[site])
        classes.setdefault(owners, []).append(name)
    return tuple(
        UpdateVectorSegment(BODY_SEGMENT if owners == everybody else names[0], tuple(names), owners)
        for owners, names in classes.items()
    )


def flatten_update(update: ModelGroups) -> tuple[UpdateVectorLayout, tuple[str, ...], NDArray[np.float32]]:
    """Return the layout, the classes of the head rows, and the values of an update as one vector."""
    head = update.head
    rows = tuple(sorted(head.class_names)) if head else ()
    arrays = [array for array in (update.trunk, update.norm) if array is not None]
    if head:
        ordered = head.select_rows(rows)
        arrays.append(np.column_stack([ordered.weight, ordered.bias]).ravel())
    sizes = (0 if update.trunk is None else len(update.trunk), 0 if update.norm is None else len(update.norm))
    return UpdateVectorLayout(*sizes, head.features if head else 0), rows, np.concatenate(arrays, dtype=np.float32)


def split_update_vector(
    layout: UpdateVectorLayout, rows: tuple[str, ...], vector: NDArray[np.float64]
) -> tuple[NDArray[np.float64], ...]:
    """Return trunk, batch normalisation, weights ``(rows, features)`` and biases ``(rows,)`` from a vector.

    Args:
        rows: Classes whose head rows the vector contains.
    """
    head = vector[layout.body_size :].reshape(len(rows), layout.row_size)
    return vector[: layout.trunk], vector[layout.trunk : layout.body_size], head[:, :-1], head[:, -1]


# ---------------------------------------------------------------------- numbers as integers

FIXED_POINT_ONE = 2**30
VALUES_PER_BLOCK = 2**16
"""Number of values converted at a time: half a megabyte in float64."""


def convert_to_fixed_point(update: NDArray[np.float32], divisor: int, largest: float) -> Integers:
    """Convert an update's values to fixed-point integers.

    Args:
        divisor: Number by which each value is divided: at least the number of sites, or 1 for counts.
        largest: Largest absolute value r; larger values are clipped.

    Raises:
        ValueError: If a value is not finite.
    """
    result = np.empty(len(update), np.uint32)
    factor = 1 / divisor * (FIXED_POINT_ONE / largest)
    for start in range(0, len(update), VALUES_PER_BLOCK):
        block = update[start : start + VALUES_PER_BLOCK].astype(np.float64)
        if not np.isfinite(block).all():
            raise ValueError("an update that is not finite cannot be masked")
        np.clip(block, -largest, largest, out=block)
        result[start : start + VALUES_PER_BLOCK] = np.rint(block * factor).astype(np.int32).view(np.uint32)
    return result


def count_out_of_range_values(update: NDArray[np.float32], largest: float) -> int:
    """Count the values whose absolute value exceeds ``largest``."""
    return int(np.count_nonzero(np.abs(update) > largest))


def is_plausible_sum(total: Integers, limit: int) -> bool:
    """Return True if no absolute value exceeds the limit of a sum; if a mask was not removed, about half of them do."""
    signed = total.view(np.int32)
    return not len(signed) or bool(-limit <= signed.min() and signed.max() <= limit)


def convert_from_fixed_point(total: Integers, largest: float) -> NDArray[np.float64]:
    """Convert a sum of fixed-point integers to floats.

    Args:
        total: The sum, modulo 2**32.
        largest: The same limit as in :func:`convert_to_fixed_point`.
    """
    return total.view(np.int32) * np.float64(largest / FIXED_POINT_ONE)


MAX_UPDATE_VALUE = 16.0
"""Default for the largest absolute value in an update; larger values are clipped. The resolution is 1.5e-8."""


def choose_max_update_value(plan: HospitalPlan, method: SiteMethod) -> float:
    """Return the limit of an update's absolute values: the experiment's setting, the clipping length, or a default.

    With distributed noise it is the limit of the update's norm.
    """
    if plan.privacy.noise == "distributed":
        return plan.privacy.max_update_norm
    return plan.privacy.max_update_value or method.parameters.clip_update or MAX_UPDATE_VALUE
