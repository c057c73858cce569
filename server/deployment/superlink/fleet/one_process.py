"""One process a site: of two that sign on with the same key, the later one stays and the earlier one is refused.

Two copies of a site's folder would keep two privacy ledgers and two memories of what the site has sent. A site whose
process was killed signs on again at once, so the earlier process cannot be preferred: nobody knows yet that it is dead.
"""

import datetime as dt
import threading
from dataclasses import dataclass, field

import grpc

from common.security.call_signatures import ANOTHER_PROCESS
from server.deployment.superlink.fleet.authentication import Caller, CallRefused

MOST_EARLIER = 64
"""Earlier processes of one site that are remembered."""


@dataclass
class _Processes:
    """The processes of one site: the present one since when, and earlier ones, the oldest first."""

    present: str
    since: str
    earlier: dict[str, None] = field(default_factory=dict)


class OneProcess:
    """Knows the present process of each site. Safe to use from several threads; nothing of it is on disk."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sites: dict[int, _Processes] = {}

    def sign_on(self, caller: Caller) -> None:
        """Note that the caller's process speaks for its site from now on."""
        now = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
        with self._lock:
            site = self._sites.setdefault(caller.node_id, _Processes(caller.process, now))
            if caller.process == site.present:
                return
            site.earlier[site.present] = None
            site.present, site.since = caller.process, now
            if len(site.earlier) > MOST_EARLIER:
                del site.earlier[next(iter(site.earlier))]

    def is_present(self, caller: Caller) -> bool:
        """Whether the caller's process is the one that signed on last."""
        with self._lock:
            site = self._sites.get(caller.node_id)
            return site is not None and site.present == caller.process

    def refuse_an_earlier_one(self, caller: Caller) -> None:
        """Let the present process pass.

        Raises:
            CallRefused: If the caller's process has lost its place to a later one.
        """
        with self._lock:
            site = self._sites.get(caller.node_id)
            if site is None or caller.process not in site.earlier:
                return
            reason = f"{ANOTHER_PROCESS} {site.since}"
        # A process that was killed does not call: this one lives, and the coordinator should hear of it.
        raise CallRefused(grpc.StatusCode.UNAUTHENTICATED, reason, noted=True)
