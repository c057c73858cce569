"""Subgroups of images by columns that a user names: ``--by sex --by age:0,40,65``."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from polyclinic.common.errors import BadInput, Fault
from polyclinic.data.base.names import is_blank_cell, normalize_name
from polyclinic.data.base.splits import StringArray

UNSTATED_GROUP = "not stated"
"""Group of the images whose cell is empty or has no number."""
OTHER_VALUES_GROUP = "other values"
"""Group that joins the images of rare values."""
MAX_GROUPS = 12
"""Maximum number of groups of a column; the images of rarer values are joined."""
_NUMBER_OR_AGE = re.compile(r"\s*(-?\d+(?:[.,]\d+)?)\s*([Yy]|years?)?\s*")
"""A number, optionally with years as its unit, as in DICOM's age ``045Y``."""


@dataclass(frozen=True)
class Grouping:
    """The value of one ``--by`` option.

    Attributes:
        column: Column of the label table that defines subgroups.
        edges: For a column of numbers, the lower ends of the bands; empty if each value is a group.
    """

    column: str
    edges: tuple[float, ...] = ()

    def assign_groups(self, cells: StringArray) -> StringArray:
        """Return the group of each image, from the cells of the column, ``(n,)``."""
        if self.edges:
            groups = [self._find_band(cell) for cell in cells.tolist()]
        else:
            groups = [UNSTATED_GROUP if is_blank_cell(cell) else cell.strip() for cell in cells.tolist()]
        values, counts = np.unique(np.array(groups, dtype=np.str_), return_counts=True)
        if len(values) <= MAX_GROUPS:
            return np.array(groups, dtype=np.str_)
        most_frequent = set(values[np.argsort(-counts, kind="stable")[:MAX_GROUPS]].tolist())
        return np.array([group if group in most_frequent else OTHER_VALUES_GROUP for group in groups], dtype=np.str_)

    def _find_band(self, cell: str) -> str:
        match = _NUMBER_OR_AGE.fullmatch(cell)
        if match is None:
            return UNSTATED_GROUP
        number = float(match[1].replace(",", "."))
        below = [edge for edge in self.edges if edge <= number]
        if not below:
            return f"below {self.edges[0]:g}"
        low = below[-1]
        above = [edge for edge in self.edges if edge > number]
        return f"{low:g} to below {above[0]:g}" if above else f"{low:g} and more"

    def order_groups(self, groups: Sequence[str]) -> list[str]:
        """Return the groups in order: bands by number, other groups by name; groups of unstated and other values come
        last.
        """
        bands = [f"below {self.edges[0]:g}"] if self.edges else []
        for index, edge in enumerate(self.edges):
            following = self.edges[index + 1 : index + 2]
            bands.append(f"{edge:g} to below {following[0]:g}" if following else f"{edge:g} and more")
        last_groups = [UNSTATED_GROUP, OTHER_VALUES_GROUP]

        def make_sort_key(group: str) -> tuple[int, int, str]:
            if group in last_groups:
                return 1, last_groups.index(group), group
            return 0, bands.index(group) if group in bands else 0, group

        return sorted(set(groups), key=make_sort_key)


def parse_grouping(text: str) -> Grouping:
    """Parse the value of ``--by``: ``COLUMN``, or ``COLUMN:EDGE,EDGE,...`` with the lower ends of bands.

    Raises:
        BadInput: If the edges are not ascending numbers.
    """
    column, colon, listed = text.rpartition(":")
    if not colon:
        return Grouping(normalize_name(text))
    try:
        edges = tuple(float(edge) for edge in listed.split(","))
    except ValueError:
        edges = ()
    if not edges or list(edges) != sorted(set(edges)):
        problem = "expected a column, or a column with the lower ends of bands in ascending order."
        raise BadInput([Fault(f"--by {text}", problem, "For instance: --by sex --by age:0,40,65")])
    return Grouping(normalize_name(column), edges)
