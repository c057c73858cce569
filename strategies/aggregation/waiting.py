"""Updates that wait for the others of their round: the first in memory, the trunks of the others in one file."""

import os
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO

import numpy as np

from common.models.state import Array
from common.wire.records import Groups

IN_MEMORY = 2**29
"""Bytes of updates that wait in memory."""


class WaitingUpdates(Mapping[str, Groups]):
    """Updates that wait, by site: :data:`IN_MEMORY` bytes of them in memory, the trunks of the others in a file.

    Args:
        folder: For that file; the system's own for temporary files where None.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder, self._updates, self._bytes = folder, dict[str, Groups](), 0
        self._file, self._places = TrunkFile(folder), dict[str, slice]()

    def put(self, site: str, update: Groups, *, briefly: bool = False) -> None:
        """Keep a site's update, in memory if it fits there or is taken at once, or if the disk has no room."""
        if site in self._updates:
            self.take(site)
        trunk = update.trunk
        if trunk is not None and trunk.size and not briefly and self._bytes + trunk.nbytes > IN_MEMORY:
            place = self._file.put(trunk)
            if place is not None:
                self._places[site], update = place, replace(update, trunk=None)
        self._updates[site] = update
        self._bytes += _trunk_bytes(update)

    def take(self, site: str) -> Groups:
        """Return a site's update, which waits no longer."""
        update = self[site]
        self._bytes -= _trunk_bytes(self._updates.pop(site))
        self._places.pop(site, None)
        if not self._places:
            self._file = TrunkFile(self._folder)  # the old one goes with the last look at it
        return update

    def __getitem__(self, site: str) -> Groups:
        update, place = self._updates[site], self._places.get(site)
        return update if place is None else replace(update, trunk=self._file.trunk(place))

    def __iter__(self) -> Iterator[str]:
        return iter(self._updates)

    def __len__(self) -> int:
        return len(self._updates)


def _trunk_bytes(update: Groups) -> int:
    """Bytes of the trunk, where it is in memory: the rest is small, and stays there."""
    return 0 if update.trunk is None else update.trunk.nbytes


class TrunkFile:
    """Trunks one after the other in a file without a name, which no kill leaves behind; read where they lie.

    One file for all: a process may have no more than some hundred or thousand open.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._file: IO[bytes] | None = None
        self._mapped = np.empty(0, np.float32)

    def put(self, trunk: Array) -> slice | None:
        """Write a trunk at the end; return its place, or None where the disk has no room."""
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115 - until the finalizer
                weakref.finalize(self, self._file.close)  # what was mapped stays so
            start = self._file.seek(0, os.SEEK_END)
        except OSError:
            return None
        try:
            left = np.ascontiguousarray(trunk, np.float32).data.cast("B")
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            self._file.truncate(start)
            return None
        first = start // trunk.itemsize
        return slice(first, first + trunk.size)

    def trunk(self, place: slice) -> Array:
        """Return what lies at a place, float32 ``(n,)``, read-only."""
        if len(self._mapped) < place.stop:
            assert self._file is not None
            self._mapped = np.memmap(self._file, np.float32, mode="r")
        return self._mapped[place]
