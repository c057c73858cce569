"""Which worker does what: one message of a site at a time, and again elsewhere when a worker is lost."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

MOST_LOSSES = 6
"""A message that has cost so many workers is given up: its site is absent, with the reason."""


@dataclass
class Task:
    """A message for a site.

    Attributes:
        identifier: The message's.
        site: Name of the site.
        node: Flower's number of it.
        head: The message without the bytes of its arrays.
        arrays: References to those, or the bytes themselves.
        losses: Workers that it has cost.
    """

    identifier: str
    site: str
    node: int
    head: Any
    arrays: list[Any]
    losses: int = 0


@dataclass(eq=False)
class Worker:
    """A process on some node that serves any site.

    Attributes:
        actor: Ray's handle.
        files: Site -> version of its folder that the worker has.
        frozen: Names of the frozen parts of models that it has.
        ready: Whether it has been set up.
        task: What it is at.
    """

    actor: Any
    files: dict[str, int] = field(default_factory=dict)
    frozen: set[str] = field(default_factory=set)
    ready: bool = False
    task: Task | None = None


class Dispatcher:
    """The messages that wait, and the workers that there are."""

    def __init__(self) -> None:
        self.workers: list[Worker] = []
        self.versions: dict[str, int] = {}
        self._waiting: deque[Task] = deque()

    def add(self, tasks: Iterable[Task]) -> None:
        """Have messages wait for a worker, behind those that wait already."""
        self._waiting.extend(tasks)

    def assign(self) -> list[Worker]:
        """Give free workers something to do; return those that got it."""
        free = [worker for worker in self.workers if worker.ready and worker.task is None]
        for worker in free:
            worker.task = self._next(worker)
        return [worker for worker in free if worker.task is not None]

    def done(self, worker: Worker) -> Task:
        """Take note that a worker has answered; its copy of the site's folder is the newest."""
        task, worker.task = worker.task, None
        assert task is not None, "a worker answers what it was asked"
        self.versions[task.site] = worker.files[task.site] = self.versions.get(task.site, 0) + 1
        return task

    def lost(self, worker: Worker) -> Task | None:
        """Take a worker away that is gone; return its message if that has cost too many, else it goes first again."""
        self.workers.remove(worker)
        task, worker.task = worker.task, None
        if task is None:
            return None
        task.losses += 1
        if task.losses >= MOST_LOSSES:
            return task
        self._waiting.appendleft(task)
        return None

    def has_newest(self, worker: Worker, site: str) -> bool:
        """Whether a worker's copy of a site's folder is the newest."""
        return worker.files.get(site) == self.versions.get(site, 0)

    def _next(self, worker: Worker) -> Task | None:
        """The first message whose site is at nothing else; one whose folder this worker has, before others."""
        busy = {one.task.site for one in self.workers if one.task is not None}
        open_sites: dict[str, Task] = {}
        for task in self._waiting:
            if task.site not in busy:
                open_sites.setdefault(task.site, task)
        known = (task for site, task in open_sites.items() if self.has_newest(worker, site))
        found = next(known, None) or next(iter(open_sites.values()), None)
        if found is not None:
            self._waiting.remove(found)
        return found
