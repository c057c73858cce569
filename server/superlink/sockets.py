"""The sockets of this process that were accepted on one port: gRPC lists them nowhere and closes none on request.

Each file descriptor is duplicated before it is looked at, so that it cannot become another file in between, and what is
asked or shut is the connection that was looked at.
"""

import ctypes
import ipaddress
import os
import socket
import struct
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from urllib.parse import unquote

_OPEN = Path("/proc/self/fd")
_ATTACH_FILTER, _DETACH_FILTER, _RETURN = 26, 27, 0x06  # of <asm/socket.h> and <linux/bpf_common.h>


@dataclass(frozen=True)
class Peer:
    """The other end of a TCP connection; an IPv4 address that came over an IPv6 socket is an IPv4 address."""

    address: str
    port: int

    @property
    def network(self) -> str:
        """What counts as one address: an IPv4 address, or an IPv6 network of 64 bits, of which one machine has all."""
        return _network(self.address)


@lru_cache(10_000)
def _network(address: str) -> str:
    return str(ipaddress.IPv6Network((address, 64), strict=False)) if ":" in address else address


def parsed_peer(text: str) -> Peer:
    """What gRPC's ``context.peer()`` says: ``ipv4:127.0.0.1:40000`` or ``ipv6:%5B::1%5D:40000``."""
    address, _, port = unquote(text).partition(":")[2].rpartition(":")
    return _peer(address.strip("[]"), int(port) if port.isdecimal() else 0)


def _peer(address: str, port: int) -> Peer:
    return Peer(address.partition("%")[0].removeprefix("::ffff:"), port)


def accepted(port: int) -> dict[Peer, int]:
    """The other ends of all connections to this port, each with the kernel's number of its socket."""
    return {peer: os.fstat(connection.fileno()).st_ino for peer, connection in _connections(port)}


def shut(port: int, peers: Collection[Peer]) -> list[Peer]:
    """Shut these connections, both ways; gRPC then frees what it holds. Returns those that were still there."""
    return _for_each(port, peers, _shut)


def deafen(port: int, peers: Collection[Peer]) -> list[Peer]:
    """Have the kernel drop all data that comes in on these connections, until they are shut.

    To close one at once would have it come back at once, and its next TLS handshake costs a thousand times as much.
    """
    return _for_each(port, peers, _deafen)


def hear(port: int, peers: Collection[Peer]) -> list[Peer]:
    """Listen again to connections that were deafened; what was dropped meanwhile is sent again by the other end."""
    return _for_each(port, peers, _hear)


def _for_each(port: int, peers: Collection[Peer], work: Callable[[socket.socket], None]) -> list[Peer]:
    done = []
    for peer, connection in _connections(port) if peers else ():
        if peer in peers:
            with suppress(OSError):  # the other side was faster
                work(connection)
            done.append(peer)
    return done


def _shut(connection: socket.socket) -> None:
    _hear(connection)
    connection.shutdown(socket.SHUT_RDWR)


def _hear(connection: socket.socket) -> None:
    with suppress(OSError):  # nothing was attached
        connection.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)


def _deafen(connection: socket.socket) -> None:
    """Attach a program for the kernel's packet filter, of one instruction: keep 0 bytes of each packet."""
    program = ctypes.create_string_buffer(struct.pack("=HBBI", _RETURN, 0, 0, 0))
    connection.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("@HP", 1, ctypes.addressof(program)))


def _connections(port: int) -> Iterator[tuple[Peer, socket.socket]]:
    for name in os.listdir(_OPEN):
        with suppress(OSError), _same(int(name)) as connection:  # closed meanwhile, or no socket
            where = connection.getsockname()
            if isinstance(where, tuple) and len(where) >= 2 and where[1] == port:
                address, other_port = connection.getpeername()[:2]  # OSError for the socket that listens
                yield _peer(address, other_port), connection


@contextmanager
def _same(number: int) -> Iterator[socket.socket]:
    """Another descriptor of the same socket."""
    own = os.dup(number)
    try:
        connection = socket.socket(fileno=own)
    except OSError:
        os.close(own)
        raise
    with connection:
        yield connection
