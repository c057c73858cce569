"""Which connections the guard chooses, as a function of what is known of them."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as any_

from server.deployment.superlink.port_guard.sockets import Peer
from server.deployment.superlink.port_guard.strangers import (
    CONNECTIONS_PER_SITE,
    DEAF_S,
    FIRST_CALL_S,
    FROM_ONE_ADDRESS,
    HELD,
    PLACES_KEPT,
    REFUSED_CALLS,
    SILENT_S,
    TOO_MANY_REFUSED,
    Connection,
    Limits,
    surplus,
    unheard,
)

NOW = 10_000.0
LIMITS = Limits(connections=60, per_address=40)


def strangers(address: str, count: int) -> list[Connection]:
    """The first is the oldest."""
    return [Connection(Peer(address, 1000 + number), NOW - 5 + number / 100) for number in range(count)]


def hospitals(address: str, count: int) -> list[Connection]:
    return [Connection(Peer(address, 9000 + n), NOW - 99, 0, f"{address}/{n}", NOW - 9) for n in range(count)]


@given(
    any_.lists(any_.tuples(any_.sampled_from("abcd"), any_.integers(0, 80)), max_size=4, unique_by=lambda one: one[0]),
    any_.integers(0, 90),
)
def test_no_hospital_gives_way_to_strangers_and_strangers_keep_within_the_limits(
    crowds: list[tuple[str, int]], sites: int
) -> None:
    known = hospitals("a", sites)
    others = [one for address, count in crowds for one in strangers(address, count)]
    chosen = surplus([*known, *others], LIMITS, NOW)
    left = [one for one in others if one.peer not in chosen]
    assert not chosen.keys() & {one.peer for one in known}
    assert len(left) == min(len(left), max(60 - sites, PLACES_KEPT))
    room = {"a": max(40 - sites, PLACES_KEPT)}
    by_address = Counter(one.peer.address for one in left)
    assert all(count <= HELD * room.get(at, 40) for at, count in by_address.items())
    silenced = unheard([*known, *left], LIMITS, NOW)
    heard = Counter(one.peer.address for one in left if one.peer not in silenced)
    assert all(heard[at] == min(count, room.get(at, 40)) for at, count in by_address.items())
    assert not silenced.keys() & {one.peer for one in known}
    assert len(left) >= min(len(others), PLACES_KEPT)  # nobody is closed for nothing


def test_one_address_does_not_crowd_out_another() -> None:
    crowd, newcomer = strangers("198.51.100.9", 40), strangers("192.0.2.1", 1)
    beside = hospitals("203.0.113.5", 50)
    chosen = surplus([*newcomer, *crowd, *beside], LIMITS, NOW)
    assert newcomer[0].peer not in chosen
    assert chosen.keys() == {one.peer for one in crowd[:25]}  # room for 16 strangers: 15 of the crowd and the newcomer


def test_in_a_crowd_one_that_is_late_is_ignored_first_and_closed_later() -> None:
    crowd = strangers("198.51.100.9", PLACES_KEPT)
    late = Connection(Peer("198.51.100.9", 9), NOW - FIRST_CALL_S - 1)
    assert surplus([late, *crowd], LIMITS, NOW) == {}
    assert unheard([late, *crowd], LIMITS, NOW) == {late.peer: "no authenticated call in time"}
    assert surplus([late, *crowd], LIMITS, NOW + DEAF_S).keys() >= {late.peer}
    assert surplus([late, *crowd[1:]], LIMITS, NOW).keys() == {late.peer}  # no crowd


def test_addresses_of_one_ipv6_network_count_as_one() -> None:
    crowd = [Connection(Peer(f"2001:db8::{n:x}", 1000), NOW - 5 + n / 100) for n in range(85)]
    limits = Limits(connections=1000, per_address=40)
    assert surplus(crowd, limits, NOW) == {one.peer: FROM_ONE_ADDRESS for one in crowd[:5]}
    assert unheard(crowd[5:], limits, NOW) == {one.peer: FROM_ONE_ADDRESS for one in crowd[5:45]}


def test_of_one_hospitals_connections_those_go_that_were_used_longest_ago() -> None:
    its = [Connection(Peer("192.0.2.1", n), NOW - 99, 0, "north", NOW - n) for n in range(CONNECTIONS_PER_SITE + 2)]
    assert surplus(its, LIMITS, NOW).keys() == {its[-1].peer, its[-2].peer}


def test_times_and_refusals_close_whoever_else_is_there() -> None:
    late, early = (Connection(Peer(name, 1), NOW - FIRST_CALL_S + off) for name, off in (("a", -0.1), ("b", 0.1)))
    loud = Connection(Peer("c", 1), NOW - DEAF_S - 1, refused=8, deaf=True)
    quiet, deaf = Connection(Peer("d", 1), NOW, refused=7), Connection(Peer("g", 1), NOW - 20, refused=8, deaf=True)
    silent, alive = (
        Connection(Peer(name, 1), NOW - 9e3, 0, name, NOW - SILENT_S + off) for name, off in (("e", -0.1), ("f", 0.1))
    )
    assert REFUSED_CALLS == 8
    assert unheard([loud, quiet, deaf], LIMITS, NOW) == {}
    assert unheard([Connection(Peer("h", 1), NOW, refused=8)], LIMITS, NOW) == {Peer("h", 1): TOO_MANY_REFUSED}
    assert surplus([late, early, loud, quiet, deaf, silent, alive], LIMITS, NOW) == {
        late.peer: "no authenticated call in time",
        loud.peer: "too many refused calls",
        silent.peer: "no authenticated call for too long",
    }
