"""Registered sites with their connection state, and runs: held in memory, and stored in SQLite for a restart."""

import hashlib
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from polyclinic.common.wire.release_name import parse_release_name
from polyclinic.common.wire.versions import StatedRelease, is_spoken
from polyclinic.server.deployment.superlink.database import SuperLinkDatabase

MAX_MISSED_HEARTBEATS = 2
"""Heartbeat intervals without a heartbeat after which a site counts as lost; the same rule as in Flower."""
RUN_HEARTBEAT_TIMEOUT_S = 60.0
"""Time without a heartbeat of a run's leading process after which sites drop their work on the run."""
MAX_STORED_RUNS = 100
"""Number of the newest runs that are stored."""


class SiteConnectionState(StrEnum):
    """The connection state of a site: connected, or why not."""

    NEVER = "never connected"
    CONNECTED = "connected"
    SIGNED_OFF = "signed off"
    LOST = "lost"


@dataclass(frozen=True)
class RegisteredSite:
    """A site whose calls the SuperLink accepts.

    Attributes:
        node_id: Flower's node id, derived from the public key.
        name: Name under which the site was admitted.
        public_key: PEM, as Flower sends it.
        state: Last state that the site reported. ``LOST`` is never stored; it is computed from ``until``.
        until: Time on the steady clock at which the site counts as lost unless another heartbeat arrives.
        process: Identifier of the site's process that connected last; empty until one connects. It is not stored on
            disk.
        stated: Wire version and release that the site stated last when it connected or sent a heartbeat; None before.
    """

    node_id: int
    name: str
    public_key: bytes
    state: SiteConnectionState = SiteConnectionState.NEVER
    until: float = 0.0
    process: str = ""
    stated: StatedRelease | None = None

    @property
    def is_online(self) -> bool:
        """True if the site was connected when its state was read."""
        return self.state == SiteConnectionState.CONNECTED

    def compute_connection_state_at(self, now: float) -> SiteConnectionState:
        """Return the connection state of the site at this time."""
        return SiteConnectionState.LOST if self.is_online and self.until <= now else self.state


class SiteRegistry:
    """Stores the registered sites and their connection states. Safe to use from several threads."""

    def __init__(self, database: SuperLinkDatabase, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock
        self._sites = dict[int, RegisteredSite]()
        for node, name, key, state, until in database.query_rows("SELECT node, name, key, state, until FROM sites"):
            self._sites[int(node)] = RegisteredSite(int(node), name, bytes(key), SiteConnectionState(state), until)
        for node, wire, release in database.query_rows("SELECT node, wire, release FROM releases"):
            if (site := self._sites.get(int(node))) is not None and is_spoken(int(wire)):
                name = parse_release_name(str(release)) if release else ""
                self._sites[int(node)] = replace(site, stated=StatedRelease(int(wire), name))

    def list_registered_sites(self) -> list[RegisteredSite]:
        """Return all registered sites, each with its current connection state."""
        now = self._clock()
        return [replace(site, state=site.compute_connection_state_at(now)) for site in list(self._sites.values())]

    def find_registered_site(self, node_id: int) -> RegisteredSite | None:
        """Return the site with this node id; None if it is not registered."""
        return self._sites.get(node_id)

    def is_site_connected(self, node_id: int) -> bool:
        """Return whether a site is connected and its heartbeats arrive in time."""
        site = self._sites.get(node_id)
        return site is not None and site.compute_connection_state_at(self._clock()) == SiteConnectionState.CONNECTED

    def has_site_signed_off(self, node_id: int) -> bool:
        """Return whether a site has left on purpose and has not connected again."""
        site = self._sites.get(node_id)
        return site is not None and site.state == SiteConnectionState.SIGNED_OFF

    def map_keys_to_sites(self) -> Mapping[bytes, RegisteredSite]:
        """Return public key -> registered site."""
        return {site.public_key: site for site in list(self._sites.values())}

    def register_site(self, name: str, public_key: bytes) -> int:
        """Register a site's key under its name; return its node id."""
        node_id = derive_node_id(public_key)
        if node_id not in self._sites:
            self._store_registered_site(RegisteredSite(node_id, name, public_key))
        return node_id

    def unregister_site(self, node_id: int) -> None:
        """Remove a site's registration; calls signed with its key are then refused."""
        with self._database.lock:
            self._database.execute_in_transaction(
                ("DELETE FROM sites WHERE node = ?", (str(node_id),)),
                ("DELETE FROM releases WHERE node = ?", (str(node_id),)),
            )
            self._sites.pop(node_id, None)

    def mark_site_connected(self, node_id: int, interval_s: float) -> bool:
        """Mark a site as connected; return False if it is connected already or not registered.

        Args:
            interval_s: Seconds between the site's heartbeats.
        """
        with self._database.lock:
            return not self.is_site_connected(node_id) and self.record_site_heartbeat(node_id, interval_s)

    def mark_site_signed_off(self, node_id: int) -> bool:
        """Mark a site as signed off; return False if it was not connected."""
        with self._database.lock:
            if not self.is_site_connected(node_id):
                return False
            self._store_registered_site(
                replace(self._sites[node_id], state=SiteConnectionState.SIGNED_OFF, until=self._clock())
            )
            return True

    def record_site_heartbeat(self, node_id: int, interval_s: float) -> bool:
        """Record a site's heartbeat; return False for an unregistered node.

        Args:
            interval_s: Seconds between the site's heartbeats.
        """
        with self._database.lock:
            if (site := self._sites.get(node_id)) is None:
                return False
            until = self._clock() + MAX_MISSED_HEARTBEATS * interval_s
            self._store_registered_site(replace(site, state=SiteConnectionState.CONNECTED, until=until))
            return True

    def record_site_process(self, node_id: int, process: str) -> None:
        """Record the process of a site that has connected last; a restarted program is a new process."""
        with self._database.lock:
            if (site := self._sites.get(node_id)) is not None and site.process != process:
                self._sites[node_id] = replace(site, process=process)

    def record_site_release(self, node_id: int, stated: StatedRelease) -> None:
        """Record the wire version and the release that a site stated last, in memory and on disk.

        A site that has no wire version in common with this release is not recorded, because no message can be sent to
        it. For a site with a newer version, the disk holds the newest version that both speak.
        """
        with self._database.lock:
            site = self._sites.get(node_id)
            if site is None or site.stated == stated or not stated.is_within_reach:
                return
            row = str(node_id), stated.agreed_version, stated.release
            self._database.execute_in_transaction(("INSERT OR REPLACE INTO releases VALUES (?, ?, ?)", row))
            self._sites[node_id] = replace(site, stated=stated)

    def _store_registered_site(self, site: RegisteredSite) -> None:
        row = str(site.node_id), site.name, site.public_key, str(site.state), site.until
        with self._database.lock:
            self._database.execute_in_transaction(("INSERT OR REPLACE INTO sites VALUES (?, ?, ?, ?, ?)", row))
            self._sites[site.node_id] = site


def derive_node_id(public_key: bytes) -> int:
    """Return the node id of a public key: the first 64 bits of the key's SHA-256, with the highest bit set.

    The highest bit keeps node ids above the small numbers that Flower reserves.
    """
    return int.from_bytes(hashlib.sha256(public_key).digest()[:8]) | 1 << 63


class RunRegistry:
    """Stores the runs and the time of their last heartbeats. Safe to use from several threads.

    Args:
        steady: Returns monotonic time in seconds. Heartbeats are not stored on disk, so after a restart of the
            SuperLink each run has the full timeout again.
    """

    def __init__(self, database: SuperLinkDatabase, steady: Callable[[], float]) -> None:
        self._database = database
        self._steady = steady
        rows = database.query_rows("SELECT run, is_over FROM runs ORDER BY rowid")
        self._is_over = {int(run): bool(is_over) for run, is_over in rows}
        self._last_heartbeat = {run: steady() for run, is_over in self._is_over.items() if not is_over}

    def begin_run(self) -> int:
        """Begin a run; return its number."""
        run = secrets.randbits(63) | 1
        with self._database.lock:
            oldest = list(self._is_over)[: max(0, len(self._is_over) - MAX_STORED_RUNS + 1)]
            insertion = ("INSERT INTO runs VALUES (?, 0)", (str(run),))
            deletions = [("DELETE FROM runs WHERE run = ?", (str(old),)) for old in oldest]
            self._database.execute_in_transaction(insertion, *deletions)
            for old in oldest:
                del self._is_over[old]
            self._is_over[run] = False
            self._last_heartbeat[run] = self._steady()
        return run

    def end_run(self, run: int) -> None:
        """Mark a run as over."""
        with self._database.lock:
            self._database.execute_in_transaction(("UPDATE runs SET is_over = 1 WHERE run = ?", (str(run),)))
            self._last_heartbeat.pop(run, None)
            if run in self._is_over:
                self._is_over[run] = True

    def record_run_heartbeat(self, run: int) -> bool:
        """Record a heartbeat of a run's leading process; return False if the run is over or the heartbeat too late."""
        with self._database.lock:
            if not self.is_run_active(run):
                return False
            self._last_heartbeat[run] = self._steady()
            return True

    def is_run_active(self, run: int) -> bool:
        """Return whether a run has not ended and its heartbeats arrive in time."""
        last = self._last_heartbeat.get(run)
        return last is not None and self._steady() - last <= RUN_HEARTBEAT_TIMEOUT_S

    def list_unfinished_runs(self) -> list[int]:
        """Return the numbers of the runs that have not been ended, also of runs without recent heartbeats."""
        return list(self._last_heartbeat)
