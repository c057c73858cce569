"""The same image twice: exact, byte by byte in files, pixel by pixel in arrays."""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from client.check.source import Source

MOST_BYTES = 4 * 2**30
"""Read for it; files beyond that are not compared."""


@dataclass(frozen=True)
class Duplicates:
    """Groups of rows with the same content.

    Attributes:
        compared: Images, of all.
    """

    groups: tuple[tuple[int, ...], ...]
    compared: int

    def across(self, parts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the duplicates that stand on two sides of the split."""
        return tuple(group for group in self.groups if len({str(parts[row]) for row in group}) > 1)


def duplicates(source: Source, readable: Iterable[int]) -> Duplicates:
    """Compare images; files only with those of the same size, for others differ.

    Args:
        readable: Rows to compare.
    """
    rows = list(readable)
    if not source.files:
        with source.opened():
            return Duplicates(_equal(source, rows), len(rows))
    by_size = defaultdict[int, list[int]](list)
    for row in rows:
        by_size[source.files[row].stat().st_size].append(row)
    left, wanted, compared = MOST_BYTES, list[int](), 0
    for size, same in by_size.items():
        if len(same) > 1 and size * len(same) > left:
            continue
        compared += len(same)
        if len(same) > 1:
            left -= size * len(same)
            wanted += same
    return Duplicates(_equal(source, wanted), compared)


def _digest(content: bytes | Path | NDArray[np.uint8]) -> bytes:
    if isinstance(content, Path):
        with content.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").digest()
    return hashlib.sha256(content if isinstance(content, bytes) else content.tobytes()).digest()


def _equal(source: Source, rows: Iterable[int]) -> tuple[tuple[int, ...], ...]:
    found = defaultdict[bytes, list[int]](list)
    for row in rows:
        found[_digest(source.read(row))].append(row)
    return tuple(tuple(group) for group in found.values() if len(group) > 1)
