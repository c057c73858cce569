"""Which connections to the hospitals' port are closed: strangers' before hospitals', the oldest of the worst address.

A connection is a stranger's until a call on it is authenticated. The newest of strangers stay: a hospital that connects
is through before many others have come after it.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from server.deployment.superlink.port_guard.sockets import Peer

FIRST_CALL_S = 10.0
"""From the connection's start to its first authenticated call; a TLS handshake and a signature take two round trips."""
SILENT_S = 300.0
"""Without an authenticated call. Sites give a sign of life every few seconds, and connect again by themselves."""
REFUSED_CALLS = 8
"""On one connection; a site that is not admitted yet, and asks whether it is, has one or two refused."""
DEAF_S = 30.0
"""From the start of a connection on which more were refused to its end; meanwhile nobody listens to it. So long, too,
where an address has more than :data:`PLACES_KEPT` strangers that have made no authenticated call in time."""
PLACES_KEPT = 16
"""For strangers at any address, and in all, however many hospitals are connected: everybody begins as a stranger."""
HELD = 2
"""So many times the strangers that are listened to may be held at one address: who is closed comes back at once."""
CONNECTIONS_PER_SITE = 8
"""A hospital uses one; those that it left behind when its line was cut may still count."""

FROM_ONE_ADDRESS, TOO_MANY_REFUSED = "too many connections from one address", "too many refused calls"
TOO_LATE = "no authenticated call in time"


@dataclass(frozen=True)
class Limits:
    """How many connections there may be: in all, and from one address (of IPv6: one /64 network)."""

    connections: int = 1000
    per_address: int = 256


@dataclass
class Connection:
    """What is known of one connection; times by ``time.monotonic``.

    Attributes:
        number: The kernel's of its socket, 0 until it is known: a port can serve a hospital and then a stranger.
        site: The hospital that made an authenticated call on it; empty for a stranger's.
        called: When that was last.
        refused: Calls on it that were refused since then.
        deaf: Whether nothing that comes in on it is listened to any more.
    """

    peer: Peer
    since: float
    number: int = 0
    site: str = ""
    called: float = 0.0
    refused: int = 0
    deaf: bool = False


def surplus(connections: Collection[Connection], limits: Limits, now: float) -> dict[Peer, str]:
    """Choose the connections to close, each with the reason; a hospital's never gives way to a stranger's."""
    crowded = _crowded(connections)
    chosen = {
        one.peer: reason for one in connections if (reason := _reason(one, now, crowded=one.peer.network in crowded))
    }
    left = [one for one in connections if one.peer not in chosen]
    chosen |= dict.fromkeys(_of_one_site(one for one in left if one.site), "too many connections of one hospital")
    by_address, rooms = _strangers(left), _rooms(left, limits)
    for network, its in by_address.items():
        room = HELD * rooms[network]
        chosen |= dict.fromkeys((one.peer for one in its[:-room]), FROM_ONE_ADDRESS)
        by_address[network] = its[-room:]
    room = max(limits.connections - sum(bool(one.site) for one in left), PLACES_KEPT)
    return chosen | dict.fromkeys(_of_the_most(by_address, room), "too many connections")


def unheard(connections: Collection[Connection], limits: Limits, now: float) -> dict[Peer, str]:
    """Choose the connections that are not listened to any more, with what is noted of it: of each the first time."""
    strangers, rooms = _strangers(connections), _rooms(connections, limits)
    older = [one for network, its in strangers.items() for one in its[: -rooms[network]]]
    chosen = {one.peer: FROM_ONE_ADDRESS for one in older if not one.deaf}
    loud = [one for its in strangers.values() for one in its if one.refused >= REFUSED_CALLS and not one.deaf]
    crowded = _crowded(connections)
    late = [
        one
        for network, its in strangers.items()
        for one in its
        if network in crowded and now - one.since > FIRST_CALL_S and not one.deaf
    ]
    return chosen | dict.fromkeys((one.peer for one in late), TOO_LATE) | {one.peer: TOO_MANY_REFUSED for one in loud}


def _crowded(connections: Iterable[Connection]) -> set[str]:
    """Addresses with so many strangers that each one closed is likely to come back at once."""
    return {network for network, its in _strangers(connections).items() if len(its) > PLACES_KEPT}


def _strangers(connections: Iterable[Connection]) -> dict[str, list[Connection]]:
    """Strangers by address, the oldest first."""
    found: dict[str, list[Connection]] = {}
    for one in sorted(connections, key=lambda one: one.since):
        if not one.site:
            found.setdefault(one.peer.network, []).append(one)
    return found


def _rooms(connections: Iterable[Connection], limits: Limits) -> Mapping[str, int]:
    """How many strangers at each address are listened to, beside the hospitals there."""
    rooms: dict[str, int] = defaultdict(lambda: limits.per_address)
    for one in connections:
        if one.site:
            rooms[one.peer.network] = max(rooms[one.peer.network] - 1, PLACES_KEPT)
    return rooms


def _reason(one: Connection, now: float, *, crowded: bool) -> str:
    """Why this connection is to be closed no matter what other connections there are; empty if it is not."""
    if one.site:
        return "no authenticated call for too long" if now - one.called > SILENT_S else ""
    if one.refused >= REFUSED_CALLS:
        return TOO_MANY_REFUSED if now - one.since > DEAF_S else ""
    return TOO_LATE if now - one.since > (DEAF_S if crowded else FIRST_CALL_S) else ""


def _of_one_site(known: Iterable[Connection]) -> list[Peer]:
    """Choose the connections used longest ago, of each hospital that has too many."""
    by_site: dict[str, list[Connection]] = {}
    for one in sorted(known, key=lambda one: one.called):
        by_site.setdefault(one.site, []).append(one)
    return [one.peer for its in by_site.values() for one in its[:-CONNECTIONS_PER_SITE]]


def _of_the_most(by_address: dict[str, list[Connection]], room: int) -> list[Peer]:
    """The oldest of the address that has the most, until so many are left: one address cannot crowd out another."""
    chosen, left = list[Peer](), {network: list(its) for network, its in by_address.items()}
    for _ in range(sum(map(len, left.values())) - room):
        most = max(left.values(), key=len)
        chosen.append(most.pop(0).peer)
    return chosen
