"""A round's updates, added up as they come or kept until all are there.

Either way in the order of site names: the same bits whoever was first.
"""

import tempfile
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from common.models.state import ModelState
from common.wire.records import Groups, TrainReply
from strategies.aggregation.mean import HeadMean
from strategies.base.method import Weighting
from strategies.base.state import Means, RunningMeans, site_weight

IN_MEMORY = 4
"""Updates that wait for a slower site in memory; the trunks of more wait in files that no kill leaves behind."""


class Gathering:
    """Takes one reply a site, in any order, and keeps no more of the updates than has to wait.

    Args:
        model: What the sites started from.
        sites: Those that were asked.
        head_mean: How head rows are averaged.
        folder: For files of updates that wait; the system's own for temporary files where None.
    """

    def __init__(
        self,
        model: ModelState,
        sites: Iterable[str],
        weighting: Weighting,
        head_mean: HeadMean,
        folder: Path | None = None,
    ) -> None:
        self._means, self._weighting, self._folder = RunningMeans(model, head_mean), weighting, folder
        self._next = deque(sorted(sites))
        self._waiting: dict[str, tuple[Groups, float]] = {}

    def take(self, reply: TrainReply) -> TrainReply:
        """Add a good reply's update, now or when those before it are there; return the reply without it."""
        update = reply.update
        if self._next[0] != reply.site and len(self._waiting) >= IN_MEMORY:
            update = put_away(update, self._folder)
        self._waiting[reply.site] = update, site_weight(reply, self._weighting)
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
        return self._means.means

    def _add(self) -> None:
        while self._next and self._next[0] in self._waiting:
            self._means.add(*self._waiting.pop(self._next.popleft()))


class Assembly:
    """Keeps a round's updates until all are there, for rules that look at all of them together.

    The first stay in memory; the trunks of the others lie in files and are read from there, a piece at a time.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._waiting: dict[str, Groups] = {}

    def take(self, reply: TrainReply) -> TrainReply:
        """Keep a good reply's update; return the reply without it."""
        stays = len(self._waiting) < IN_MEMORY
        self._waiting[reply.site] = reply.update if stays else put_away(reply.update, self._folder)
        return replace(reply, update=Groups())

    def leave_out(self, site: str) -> None:
        """This site's update does not count, whether it is here or not."""
        self._waiting.pop(site, None)

    def updates(self) -> Mapping[str, Groups]:
        """Every site's update."""
        return dict(self._waiting)


def put_away(update: Groups, folder: Path | None) -> Groups:
    """An update with its trunk in a file without a name, which is read where it lies and goes with the last look at it.

    As it is where there is no trunk, or no room on the disk.
    """
    if update.trunk is None or not update.trunk.size:
        return update
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(update.trunk.tobytes())
            file.flush()
            return replace(update, trunk=np.memmap(file, np.float32, mode="r"))
    except OSError:
        return update
