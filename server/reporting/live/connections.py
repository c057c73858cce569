"""The connections of the live view: few at a time, each with little time until its request.

uvicorn limits neither the time of a TLS handshake nor that of a request's headers, and beyond its limit of connections
it answers nobody. Here the oldest connection without the token gives way, so that a browser gets in beside a flood.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

MOST_CONNECTIONS = 64
MOST_CLOSING, CLOSING_S = 32, 0.01
"""Connections that gave way and hold their descriptors for some turns of the loop more, before the next is accepted;
seconds between looks at them."""
REQUEST_S = 10.0
"""For the TLS handshake, and as long again for the headers of a request with the token."""
PAUSE_S = 0.5
"""Until the next attempt where the process has as many files open as it may."""

MakeProtocol = Callable[[], asyncio.Protocol]


@dataclass(eq=False)
class Connection:
    """An accepted connection.

    Attributes:
        address: Host and port of the other end.
        socket: The same that its transport closes at the end.
        handshake: The task that ends with the TLS handshake.
        transport: Once the handshake is done.
        has_token: Whether a request with the token has come on it.
    """

    address: tuple[str, int]
    socket: socket.socket
    handshake: asyncio.Task[None] | None = None
    transport: asyncio.Transport | None = None
    has_token: bool = False

    @property
    def is_open(self) -> bool:
        """Whether it holds a descriptor: also while TLS waits for the other end to close."""
        return self.socket.fileno() != -1

    @property
    def may_give_way(self) -> bool:
        """Whether it may be closed for another one."""
        return not self.has_token or (self.transport is not None and self.transport.is_closing())

    def close(self) -> None:
        """Close the connection at once."""
        if self.transport is not None:
            self.transport.abort()
        elif self.handshake is not None:
            self.handshake.cancel()


@dataclass
class Connections:
    """Accepts connections, and closes those that are too many or too slow."""

    _accepted: list[Connection] = field(default_factory=list)
    _closing: list[Connection] = field(default_factory=list)

    async def accept(self, listener: socket.socket, protocol: MakeProtocol, tls: ssl.SSLContext | None) -> None:
        """Accept connections until this task is cancelled; each is served by a protocol of its own."""
        listener.setblocking(False)
        while True:
            await self._accept_one(listener, protocol, tls)

    async def _accept_one(self, listener: socket.socket, protocol: MakeProtocol, tls: ssl.SSLContext | None) -> None:
        await asyncio.sleep(0)  # sock_accept does not wait while connections queue: let those that close do so
        while self._are_closing() >= MOST_CLOSING:
            await asyncio.sleep(CLOSING_S)
        loop = asyncio.get_running_loop()
        try:
            accepted, address = await loop.sock_accept(listener)
        except OSError:  # no descriptor is left, or the other end has gone already
            await asyncio.sleep(PAUSE_S)
            return
        if not self._make_room():
            accepted.close()
            return
        connection = Connection(address[:2], accepted)
        connection.handshake = loop.create_task(_shake_hands(connection, protocol, tls))
        connection.handshake.add_done_callback(partial(_close_unless_served, connection))
        self._accepted.append(connection)

    def note_token(self, address: tuple[str, int] | None) -> None:
        """Note that a request with the token has come from this address; its connection no longer gives way."""
        for connection in self._accepted:
            connection.has_token |= connection.may_give_way and connection.address == address

    def _make_room(self) -> bool:
        """Close the oldest connection without the token if there are too many; return whether there is room."""
        self._accepted = [connection for connection in self._accepted if connection.is_open]
        if len(self._accepted) < MOST_CONNECTIONS:
            return True
        oldest = next((connection for connection in self._accepted if connection.may_give_way), None)
        if oldest is not None:
            oldest.close()
            self._accepted.remove(oldest)
            self._closing.append(oldest)
        return oldest is not None

    def _are_closing(self) -> int:
        """Count the connections that were closed here and still hold their descriptors."""
        self._closing = [connection for connection in self._closing if connection.is_open]
        return len(self._closing)


def _close_unless_served(connection: Connection, handshake: asyncio.Task[None]) -> None:
    if connection.transport is None:
        connection.socket.close()


async def _shake_hands(connection: Connection, protocol: MakeProtocol, tls: ssl.SSLContext | None) -> None:
    loop = asyncio.get_running_loop()
    with contextlib.suppress(OSError, TimeoutError):  # no TLS, another one, or none in time
        served = loop.connect_accepted_socket(protocol, connection.socket, ssl=tls)
        connection.transport, _ = await asyncio.wait_for(served, REQUEST_S)
        loop.call_later(REQUEST_S, lambda: None if connection.has_token else connection.close())
