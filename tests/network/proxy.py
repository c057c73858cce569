"""A line between a site and its coordinator that can be cut: a TCP proxy on loopback.

    python -m tests.network.proxy PORT TO_PORT

SIGUSR1 silences it: connections stay, nothing comes through, nobody new is let in. SIGUSR2 cuts it: connections are
reset, new ones refused. SIGHUP fixes it.
"""

import contextlib
import select
import signal
import socket
import struct
import sys


class Line:
    """All connections, and whether anything passes."""

    def __init__(self, port: int, to_port: int) -> None:
        self._address, self._to = ("127.0.0.1", port), ("127.0.0.1", to_port)
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._listener: socket.socket | None = None
        self.passes = True

    def open(self) -> None:
        """Let connections in."""
        self._listener = socket.create_server(self._address, backlog=64)

    def silence(self) -> None:
        self.passes = False

    def cut(self) -> None:
        """Reset every connection, and take no more."""
        self.passes = False
        if self._listener:
            self._listener.close()
            self._listener = None
        for end in list(self._pairs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close() sends RST
            end.close()
        self._pairs.clear()

    def fix(self) -> None:
        self.passes = True
        if self._listener is None:
            self.open()

    def step(self) -> None:
        """Pass on what there is."""
        if not self.passes:
            select.select([], [], [], 0.05)
            return
        watched = [*self._pairs, *([self._listener] if self._listener else [])]
        ready, _, _ = select.select(watched, [], [], 0.05)
        for end in ready:
            if end is self._listener:
                self._connect(end)
            elif end in self._pairs:
                self._pass_on(end)

    def _connect(self, listener: socket.socket) -> None:
        near, _ = listener.accept()
        try:
            far = socket.create_connection(self._to, timeout=5)
        except OSError:
            near.close()
            return
        self._pairs |= {near: far, far: near}

    def _pass_on(self, end: socket.socket) -> None:
        other = self._pairs[end]
        with contextlib.suppress(OSError):
            if content := end.recv(1 << 16):
                other.sendall(content)
                return
        for each in (end, other):
            self._pairs.pop(each, None)
            each.close()


def main() -> None:
    """Until SIGTERM."""
    line = Line(*map(int, sys.argv[1:]))
    line.open()
    commands = list[str]()
    for number, name in ((signal.SIGUSR1, "silence"), (signal.SIGUSR2, "cut"), (signal.SIGHUP, "fix")):
        signal.signal(number, lambda _number, _frame, name=name: commands.append(name))  # type: ignore[misc]
    print("open", flush=True)
    while True:
        while commands:
            getattr(line, name := commands.pop(0))()
            print(name, flush=True)
        line.step()


if __name__ == "__main__":
    main()
