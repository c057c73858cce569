"""Watches the connections to the hospitals' port, and closes those of strangers before they cost much.

gRPC has no hook for a connection that is accepted, knows no limit for one address, and waits two minutes for a TLS
handshake and for ever for a first call. So a thread looks at the sockets of this process, a few times a second. A
connection is a stranger's until a call on it is authenticated: the door (the interceptor of the Fleet API) reports
each such call, and each call that it refuses. The data of hospitals never passes through here.
"""

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from common.system.resources import release_free_memory
from server.deployment.superlink.port_guard.call_limits import CallLimits
from server.deployment.superlink.port_guard.refusals import Refusals
from server.deployment.superlink.port_guard.sockets import Accepted, Peer, parsed_peer
from server.deployment.superlink.port_guard.strangers import REFUSED_CALLS, Connection, Limits, surplus, unheard

_log = logging.getLogger(__name__)

LOOK_S, PAUSE_S = 0.25, 0.03
"""Between two looks at most, and at least."""
FLOOD = 50
"""So many connections closed since the last calm: the memory that they used is given back afterwards."""
CALM_S = 5.0


@dataclass
class Guard:
    """The register of connections, and the thread that watches them.

    Attributes:
        calls: What the door reads the messages of authenticated calls by.
    """

    limits: Limits = field(default_factory=Limits)
    refusals: Refusals = field(default_factory=Refusals)
    calls: CallLimits = field(default_factory=CallLimits)
    _accepted: Accepted = field(default_factory=lambda: Accepted(0))
    _known: dict[Peer, Connection] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _wake: threading.Event = field(default_factory=threading.Event)
    _stopped: bool = False
    _closed: int = 0
    _last_closed: float = 0.0

    def start(self, port: int) -> None:
        """Watch this port."""
        self._accepted = Accepted(port)
        threading.Thread(target=self._watch, name="guard", daemon=True).start()

    def stop(self) -> None:
        """Watch no longer."""
        self._stopped = True
        self._wake.set()

    def authenticated(self, peer: str, site: str) -> None:
        """Report a call that is authenticated, by what gRPC's ``context.peer()`` says."""
        with self._lock:
            one = self._of(peer)
            one.site, one.called, one.refused = site, time.monotonic(), 0

    def refused(self, peer: str, reason: str) -> None:
        """Report a call that is refused; it is counted in the log."""
        with self._lock:
            one = self._of(peer)
            one.refused += 1
            if one.refused == REFUSED_CALLS:
                one.site = ""  # of a hospital that was revoked, or whose clock went wrong
                self._wake.set()
        self.refusals.count(one.peer.network, reason)

    def _of(self, peer: str) -> Connection:
        where, now = parsed_peer(peer), time.monotonic()
        return self._known.setdefault(where, Connection(where, now))

    def _watch(self) -> None:
        while not self._stopped:
            self._wake.wait(LOOK_S)
            self._wake.clear()
            try:
                self.look()
                self.refusals.report()
            except Exception:  # the thread's edge: without it strangers are never thrown out again
                _log.exception("the guard of the hospitals' port failed once")
            time.sleep(PAUSE_S)

    def look(self) -> None:
        """Look at all connections once, and close what is too much."""
        now, there = time.monotonic(), self._accepted.peers()
        with self._lock:
            self._update(there, now)
            chosen = surplus(self._known.values(), self.limits, now)
            silenced = {peer: why for peer, why in self._unheard(now).items() if peer not in chosen}
        self._accepted.deafen(silenced.keys())
        for peer in self._accepted.shut(chosen.keys()):
            self._closed, self._last_closed = self._closed + 1, now
            self.refusals.count(peer.network, chosen[peer])
        for peer, why in silenced.items():
            self.refusals.count(peer.network, why)
        for site in self.calls.cancel_late():
            self.refusals.count(site, "a call that took too long")
        self._calm(now)

    def _unheard(self, now: float) -> Mapping[Peer, str]:
        """Note whom we listen to no more; and listen again to one who proves to be a hospital after all."""
        known = self._known.values()
        self._accepted.hear({one.peer for one in known if one.site and one.deaf})
        found = unheard(known, self.limits, now)
        for one in known:
            one.deaf = not one.site and (one.deaf or one.peer in found)
        return found

    def _update(self, there: Mapping[Peer, int], now: float) -> None:
        """Forget the connections that are gone, and note the new ones."""
        for peer, one in list(self._known.items()):
            reused = one.number not in (0, there.get(peer, one.number))
            # A call may be reported before its connection is seen here.
            if reused or (peer not in there and now - one.since > LOOK_S):
                del self._known[peer]
        for peer, number in there.items():
            self._known.setdefault(peer, Connection(peer, now)).number = number

    def _calm(self, now: float) -> None:
        if self._closed >= FLOOD and now - self._last_closed > CALM_S:
            self._closed = 0
            release_free_memory()
