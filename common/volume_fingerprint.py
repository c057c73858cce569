"""The fingerprint of a hospital's training volumes, with which a network is planned: sums over volumes, as JSON.

Volumes are grouped, and a group has at least as many patients as the policy's ``smallest_count``. For each group the
hospital sends the number of volumes and the mean of their values, so that no value of one patient leaves.
"""

import json
import math
from collections.abc import Sequence
from typing import Annotated, Any, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

GREY_VALUES = 256
MOST_GROUPS = 40
"""Maximum number of groups of volumes along one axis."""
SIGNIFICANT_DIGITS = 6
LONGEST_FINGERPRINT = 20_000
"""Maximum length of a fingerprint as JSON."""

Group = tuple[Annotated[float, Field(gt=0, le=1e6)], Annotated[int, Field(ge=1, le=10**9)]]
"""Mean value of a group of volumes, and the number of volumes."""
Axis = Annotated[tuple[Group, ...], Field(min_length=1, max_length=MOST_GROUPS)]
Axes = Annotated[tuple[Axis, Axis, Axis], Field()]


class VolumeFingerprint(BaseModel):
    """Voxel sizes and extents of the training volumes of one or several hospitals, and the grey values of outlined
    voxels.

    Attributes:
        spacing: Distance of neighbouring voxels in mm as in the files, by groups of volumes, along depth, height and
            width; 1 where it is unknown.
        extent: Length of the volumes in mm, by groups of volumes, along depth, height and width.
        grey: Number of outlined voxels with each stored value, 0 to 255; empty if stored values of two volumes have
            different meanings.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    spacing: Axes
    extent: Axes
    grey: tuple[Annotated[int, Field(ge=0, le=2**53)], ...] = ()

    def to_json(self) -> str:
        return json.dumps(self.model_dump(mode="json"), separators=(",", ":"))

    @property
    def volumes(self) -> int:
        """Number of training volumes."""
        return sum(count for _, count in self.spacing[0])

    def __add__(self, other: Self) -> "VolumeFingerprint":
        """Return the fingerprint of both hospitals' volumes; grey values only if both send them."""
        both = zip(self.grey, other.grey, strict=True) if self.grey and other.grey else ()
        sums: dict[str, Any] = {
            "spacing": tuple(ours + theirs for ours, theirs in zip(self.spacing, other.spacing, strict=True)),
            "extent": tuple(ours + theirs for ours, theirs in zip(self.extent, other.extent, strict=True)),
            "grey": tuple(ours + theirs for ours, theirs in both),
        }
        return VolumeFingerprint.model_construct(**sums)  # many hospitals have more groups than one may send


def group_volumes(values: Sequence[float], patients: Sequence[str], smallest: int) -> tuple[Group, ...]:
    """Return groups of volumes with similar values, each of at least ``smallest`` patients, as (mean, number of
    volumes).

    Volumes with equal values are in one group. The result is empty if there are not enough patients for one group.

    Args:
        values: Value of each volume.
        patients: Patient of each volume.
        smallest: Minimum number of patients in a group.
    """
    order = np.argsort(np.asarray(values, np.float64), kind="stable")
    least = max(smallest, 1)
    least_volumes = -(-len(order) // MOST_GROUPS)
    groups, open_rows = list[list[int]](), list[int]()
    for place, row in enumerate(order.tolist()):
        open_rows.append(row)
        follows = place + 1 < len(order) and values[order[place + 1]] == values[row]  # equal values stay together
        enough = len({patients[each] for each in open_rows}) >= least and len(open_rows) >= least_volumes
        if enough and not follows:
            groups.append(open_rows)
            open_rows = []
    if open_rows and groups:
        groups[-1] += open_rows
    means = [float(f"{np.mean([values[row] for row in rows]):.{SIGNIFICANT_DIGITS}g}") for rows in groups]
    return tuple((mean, len(rows)) for mean, rows in zip(means, groups, strict=True))


def compute_percentile(axis: Sequence[Group], percentile: float) -> float:
    """Return a percentile of the values of all volumes, like ``np.percentile``; each volume has the mean of its group.

    The memory does not depend on the numbers of volumes, which a hospital states.
    """
    order = sorted(axis)
    ends = np.cumsum([count for _, count in order])
    place = (int(ends[-1]) - 1) * percentile / 100
    low, high = (order[int(np.searchsorted(ends, index, side="right"))][0] for index in (int(place), math.ceil(place)))
    return low + (high - low) * (place - int(place))
