"""Sites that wait for a message: a call is held until one comes, instead of sites that ask again and again."""

import threading
from dataclasses import dataclass, field


@dataclass(eq=False)
class _Site:
    """The messages that have come for one site, counted."""

    came: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)


class Arrivals:
    """Wakes the calls of a site for which a message has come. Safe to use from several threads."""

    def __init__(self) -> None:
        self._sites: dict[int, _Site] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def number(self, node: int) -> int:
        """How many messages have come for a site; to be read before a look at its messages, for :meth:`wait`."""
        return self._of(node).came

    def wait(self, node: int, number: int, seconds: float) -> None:
        """Return when more than ``number`` messages have come for the site, after :meth:`close`, or in this time."""
        site = self._of(node)
        with site.changed:
            site.changed.wait_for(lambda: site.came > number or self._is_closed, seconds)

    def note(self, node: int) -> None:
        """A message has come for a site."""
        site = self._of(node)
        with site.changed:
            site.came += 1
            site.changed.notify_all()

    def close(self) -> None:
        """Have nobody wait any more: the process ends."""
        self._is_closed = True
        for site in list(self._sites.values()):
            with site.changed:
                site.changed.notify_all()

    def _of(self, node: int) -> _Site:
        with self._lock:
            return self._sites.setdefault(node, _Site())
