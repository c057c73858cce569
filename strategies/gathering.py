"""A round's updates, added up as they come, and in the order of site names: the same bits whoever was first."""

import tempfile
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from common.models.state import ModelState
from common.wire import Groups, TrainReply
from strategies.method import Weighting
from strategies.state import Means, site_weight

IN_MEMORY = 4
"""Updates that wait for a slower site in memory; the trunks of more wait in temporary files."""


class Gathering:
    """Takes one reply a site, in any order, and keeps no more of the updates than has to wait.

    Args:
        model: What the sites started from.
        sites: Those that were asked.
    """

    def __init__(self, model: ModelState, sites: Iterable[str], weighting: Weighting) -> None:
        self._means, self._weighting = Means(model), weighting
        self._next = deque(sorted(sites))
        self._waiting: dict[str, _Waiting] = {}

    def take(self, reply: TrainReply) -> TrainReply:
        """Add a good reply's update, now or when those before it are there; return the reply without it."""
        held = _Waiting(reply.update, site_weight(reply, self._weighting))
        if self._next[0] != reply.site and len(self._waiting) >= IN_MEMORY:
            held = held.put_away()
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
    """An update with its weight; its trunk in a file that goes with it where ``file`` is not None."""

    update: Groups
    weight: float
    file: "tempfile._TemporaryFileWrapper[bytes] | None" = None

    def put_away(self) -> "_Waiting":
        if self.update.trunk is None:
            return self
        file = tempfile.NamedTemporaryFile(prefix="polyclinic-update-")  # noqa: SIM115 - goes with this object
        self.update.trunk.tofile(file)
        file.flush()
        return _Waiting(replace(self.update, trunk=None), self.weight, file)

    def taken_out(self) -> Groups:
        if self.file is None:
            return self.update
        with self.file as file:
            return replace(self.update, trunk=np.fromfile(file.name, np.float32))
