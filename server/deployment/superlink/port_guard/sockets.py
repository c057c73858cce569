"""The sockets of this process that were accepted on one port: gRPC lists them nowhere and closes none on request.

Each file descriptor is duplicated before it is looked at, so that it cannot become another file in between, and what is
asked or shut is the connection that was looked at. Only sockets are duplicated, see :func:`_same`.
"""

import ctypes
import ipaddress
import os
import socket
import stat
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


class Accepted:
    """The connections to one port, looked at again and again: a socket is asked once who its other end is.

    Args:
        port: Of the listening socket.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._seen: dict[int, tuple[int, Peer | None]] = {}  # by file descriptor: the kernel's number, the other end

    def peers(self) -> dict[Peer, int]:
        """The other ends of all connections, each with the kernel's number of its socket."""
        self._look()
        return {peer: number for number, peer in self._seen.values() if peer is not None}

    def shut(self, peers: Collection[Peer]) -> list[Peer]:
        """Shut these connections, both ways; gRPC then frees what it holds. Returns those that were still there."""
        return self._for_each(peers, _shut)

    def deafen(self, peers: Collection[Peer]) -> list[Peer]:
        """Have the kernel drop all data that comes in on these connections, until they are shut.

        To close one at once would have it come back at once, and its next TLS handshake costs a thousand times as much.
        """
        return self._for_each(peers, _deafen)

    def hear(self, peers: Collection[Peer]) -> list[Peer]:
        """Listen again to connections that were deafened; the other end sends again what was dropped meanwhile."""
        return self._for_each(peers, _hear)

    def _look(self) -> None:
        found: dict[int, tuple[int, Peer | None]] = {}
        for name in os.listdir(_OPEN):
            descriptor = int(name)
            with suppress(OSError):  # closed meanwhile
                file = os.fstat(descriptor)
                if not stat.S_ISSOCK(file.st_mode):
                    continue
                number, before = file.st_ino, self._seen.get(descriptor)
                found[descriptor] = before if before and before[0] == number else (number, self._peer(descriptor))
        self._seen = found

    def _peer(self, descriptor: int) -> Peer | None:
        with suppress(OSError), _same(descriptor) as connection:  # no socket, or the one that listens
            where = connection.getsockname()
            if isinstance(where, tuple) and len(where) >= 2 and where[1] == self._port:
                return _peer(*connection.getpeername()[:2])
        return None

    def _for_each(self, peers: Collection[Peer], work: Callable[[socket.socket], None]) -> list[Peer]:
        done = []
        for descriptor, (number, peer) in self._seen.items() if peers else ():
            if peer is None or peer not in peers:
                continue
            with suppress(OSError), _same(descriptor) as connection:
                if os.fstat(connection.fileno()).st_ino == number:
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


@contextmanager
def _same(number: int) -> Iterator[socket.socket]:
    """Another descriptor of the same socket.

    Raises:
        OSError: If it is no socket any more. Then the new descriptor stays open: to close any descriptor of a file
            removes all POSIX locks of this process on it, and those of SQLite protect the database.
    """
    with socket.socket(fileno=os.dup(number)) as connection:
        yield connection
