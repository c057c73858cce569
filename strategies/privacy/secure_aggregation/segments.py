"""Where a site's numbers lie in its vector, and which sites share them."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.wire.records import Groups

BODY = ""
"""Name of the segment that all sites share: trunk, batch normalisation, and the rows that all own."""


def threshold(sites: int, honest: int = 0) -> int:
    """How many of so many sites must stay to the end, and how many shares make a secret: two thirds, rounded up.

    More than half of them, so that a coordinator that names different survivors to different sites gets the shares of
    a site's key and of its own mask only with the help of a third of the sites. Where all but ``honest`` may help it,
    more: that help counts in both halves, so twice the shares have to exceed ``honest + 2 * (sites - honest)``.

    Args:
        honest: Of the sites, so many help the coordinator in nothing; 0 where nothing is promised about that.
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
    def body(self) -> int:
        return self.trunk + self.norm

    @property
    def row(self) -> int:
        return self.features + 1

    def size(self, rows: Sequence[str]) -> int:
        """Numbers in the vector of a site with these rows."""
        return self.body + len(rows) * self.row

    def places(self, rows: Sequence[str], classes: Sequence[str], *, body: bool) -> Iterator[slice]:
        """Where the body and these classes lie in the vector of a site with these rows."""
        if body:
            yield slice(0, self.body)
        position = {name: place for place, name in enumerate(rows)}
        for name in classes:
            start = self.body + position[name] * self.row
            yield slice(start, start + self.row)


@dataclass(frozen=True)
class Segment:
    """Numbers that the same sites send; masks of their own cover them."""

    name: str
    classes: tuple[str, ...]
    owners: tuple[str, ...]

    @property
    def body(self) -> bool:
        return self.name == BODY


def segments_of(rows: Mapping[str, Collection[str]]) -> tuple[Segment, ...]:
    """The body, then the other segments by their first class.

    Args:
        rows: Site -> classes whose rows it sends.
    """
    everybody = tuple(sorted(rows))
    classes: dict[tuple[str, ...], list[str]] = {everybody: []}
    for name in sorted({name for held in rows.values() for name in held}):
        owners = tuple(site for site in everybody if name in rows[site])
        classes.setdefault(owners, []).append(name)
    return tuple(
        Segment(BODY if owners == everybody else names[0], tuple(names), owners) for owners, names in classes.items()
    )


def flat(update: Groups) -> tuple[SegmentLayout, tuple[str, ...], NDArray[np.float32]]:
    """An update as one vector, with its layout and rows."""
    head = update.head
    rows = tuple(sorted(head.class_names)) if head else ()
    arrays = [array for array in (update.trunk, update.norm) if array is not None]
    if head:
        ordered = head.rows(rows)
        arrays.append(np.column_stack([ordered.weight, ordered.bias]).ravel())
    sizes = (0 if update.trunk is None else len(update.trunk), 0 if update.norm is None else len(update.norm))
    return SegmentLayout(*sizes, head.features if head else 0), rows, np.concatenate(arrays, dtype=np.float32)


def rows_of(
    layout: SegmentLayout, rows: tuple[str, ...], vector: NDArray[np.float64]
) -> tuple[NDArray[np.float64], ...]:
    """Trunk, norm, weights ``(rows, features)`` and biases of a vector."""
    head = vector[layout.body :].reshape(len(rows), layout.row)
    return vector[: layout.trunk], vector[layout.trunk : layout.body], head[:, :-1], head[:, -1]
