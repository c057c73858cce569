"""A round's updates, added up as they come, and in the order of site names: the same bits whoever was first."""

import tempfile
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from common.models.state import ModelState
from common.wire import Groups, TrainReply
from strategies.method import Weighting
from strategies.state import Means, site_weight

IN_MEMORY = 4
"""Updates that wait for a slower site in memory; the trunks of more wait in files that no kill leaves behind."""


class Gathering:
    """Takes one reply a site, in any order, and keeps no more of the updates than has to wait.

    Args:
        model: What the sites started from.
        sites: Those that were asked.
        folder: For files of updates that wait; the system's own for temporary files where None.
    """

    def __init__(
        self, model: ModelState, sites: Iterable[str], weighting: Weighting, folder: Path | None = None
    ) -> None:
        self._means, self._weighting, self._folder = Means(model), weighting, folder
        self._next = deque(sorted(sites))
        self._waiting: dict[str, _Waiting] = {}

    def take(self, reply: TrainReply) -> TrainReply:
        """Add a good reply's update, now or when those before it are there; return the reply without it."""
        held = _Waiting(reply.update, site_weight(reply, self._weighting))
        if self._next[0] != reply.site and len(self._waiting) >= IN_MEMORY:
            held = held.put_away(self._folder)
        self._waiting[reply.site] = held
        self._add()
        return replace(reply, update=Groups())

    def leave_out(self, site: str) -> None:
        """Wait no longer for this site's update: it came and does not count."""
        self._next.remove(site)
        self._add()

    def means(self) -> Means:
        """The means of all that came."""
        self._next = deque(sorted(self._waiting))
        self._add()
        return self._means

    def _add(self) -> None:
        while self._next and self._next[0] in self._waiting:
            held = self._waiting.pop(self._next.popleft())
            self._means.add(held.taken_out(), held.weight)


@dataclass(frozen=True)
class _Waiting:
    """An update with its weight; its trunk in a file without a name where ``file`` is not None."""

    update: Groups
    weight: float
    file: BinaryIO | None = None

    def put_away(self, folder: Path | None) -> "_Waiting":
        """With the trunk in a file; as it is where there is no trunk, or no room on the disk."""
        if self.update.trunk is None:
            return self
        try:
            file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - goes with this object
            file.write(self.update.trunk.tobytes())
            file.seek(0)
        except OSError:
            return self
        return _Waiting(replace(self.update, trunk=None), self.weight, file)

    def taken_out(self) -> Groups:
        if self.file is None:
            return self.update
        with self.file as file:
            return replace(self.update, trunk=np.frombuffer(file.read(), np.float32))
