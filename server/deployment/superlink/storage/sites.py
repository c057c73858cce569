"""The registered sites, and which of them are there."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from server.deployment.superlink.storage.database import Database

PATIENCE = 2
"""Intervals between signs of life after which a site counts as lost; Flower's own rule."""


class Presence(StrEnum):
    """Whether a site is there, and why not."""

    NEVER = "never connected"
    CONNECTED = "connected"
    SIGNED_OFF = "signed off"
    LOST = "lost"


@dataclass(frozen=True)
class RegisteredSite:
    """A site that may call.

    Attributes:
        node_id: Its number in Flower's protocol, made from its key: the same in every database.
        name: Under which it was admitted.
        public_key: In Flower's form.
        state: As it said last; ``LOST`` follows from the time, and is not kept.
        until: When it counts as lost, on the steady clock.
    """

    node_id: int
    name: str
    public_key: bytes
    state: Presence = Presence.NEVER
    until: float = 0.0

    def at(self, now: float) -> Presence:
        """Whether it is there at this time."""
        return Presence.LOST if self.state == Presence.CONNECTED and self.until <= now else self.state


class Sites:
    """All registered sites. Safe to use from several threads."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database, self._clock = database, clock
        rows = database.read("SELECT node, name, key, state, until FROM sites")
        self._sites = {
            int(node): RegisteredSite(int(node), name, bytes(key), Presence(state), until)
            for node, name, key, state, until in rows
        }

    def all(self) -> list[RegisteredSite]:
        """All sites, each in its present state."""
        now = self._clock()
        return [replace(site, state=site.at(now)) for site in list(self._sites.values())]

    def get(self, node_id: int) -> RegisteredSite | None:
        return self._sites.get(node_id)

    def is_there(self, node_id: int) -> bool:
        """Whether a site has given a sign of life in time."""
        site = self._sites.get(node_id)
        return site is not None and site.at(self._clock()) == Presence.CONNECTED

    def has_signed_off(self, node_id: int) -> bool:
        """Whether a site said that it leaves, and has not come back."""
        site = self._sites.get(node_id)
        return site is not None and site.state == Presence.SIGNED_OFF

    def by_key(self) -> Mapping[bytes, RegisteredSite]:
        return {site.public_key: site for site in list(self._sites.values())}

    def register(self, name: str, public_key: bytes) -> int:
        """Register a site's key under its name; return its number."""
        node_id = node_of(public_key)
        if node_id not in self._sites:
            self._keep(RegisteredSite(node_id, name, public_key))
        return node_id

    def unregister(self, node_id: int) -> None:
        """Forget a site: from now on every call that is signed with its key is refused."""
        with self._database.lock:
            self._database.write(("DELETE FROM sites WHERE node = ?", (str(node_id),)))
            self._sites.pop(node_id, None)

    def activate(self, node_id: int, interval_s: float) -> bool:
        """Note that a site is there; return False where it seems to be there already."""
        with self._database.lock:
            return not self.is_there(node_id) and self.heartbeat(node_id, interval_s)

    def deactivate(self, node_id: int) -> bool:
        """Note that a site has said that it leaves; return False where it was not there."""
        with self._database.lock:
            if not self.is_there(node_id):
                return False
            self._keep(replace(self._sites[node_id], state=Presence.SIGNED_OFF, until=self._clock()))
            return True

    def heartbeat(self, node_id: int, interval_s: float) -> bool:
        """Note a sign of life; return False for a site that is not registered."""
        with self._database.lock:
            if (site := self._sites.get(node_id)) is None:
                return False
            self._keep(replace(site, state=Presence.CONNECTED, until=self._clock() + PATIENCE * interval_s))
            return True

    def _keep(self, site: RegisteredSite) -> None:
        row = str(site.node_id), site.name, site.public_key, str(site.state), site.until
        with self._database.lock:
            self._database.write(("INSERT OR REPLACE INTO sites VALUES (?, ?, ?, ?, ?)", row))
            self._sites[site.node_id] = site


def node_of(public_key: bytes) -> int:
    """A site's number: 64 bits of its key's SHA-256, none of Flower's own small numbers."""
    return int.from_bytes(hashlib.sha256(public_key).digest()[:8]) | 1 << 63
