"""The Unix socket on which the SuperLink answers ``flwr-server start``, ``run`` and ``status``: ``state/control.sock``.

The folder ``state`` has mode 700, so the operating system lets no other account connect.
"""

import contextlib
import os
import socket
from pathlib import Path

FILE = "control.sock"


class ControlSocket:
    """Opens the folder of the socket, whose path may be longer than that of a socket.

    The kernel takes 107 bytes for the path of a socket. So the path goes through the descriptor of the folder, which
    stays open for as long as gRPC may connect again.

    Args:
        state: The coordinator's ``state``.

    Raises:
        OSError: If there is no such folder, or this account may not open it.
    """

    def __init__(self, state: Path) -> None:
        self._descriptor = os.open(state, os.O_PATH | os.O_DIRECTORY)

    @property
    def path(self) -> str:
        """Path for ``connect`` and ``bind`` in this process."""
        return f"/proc/self/fd/{self._descriptor}/{FILE}"

    @property
    def grpc_address(self) -> str:
        """Address of the socket as gRPC writes it."""
        return f"unix:{self.path}"

    def close(self) -> None:
        """Close the folder."""
        os.close(self._descriptor)


def takes_connections(state: Path) -> bool:
    """Return whether something listens on the socket of this folder."""
    with (
        contextlib.suppress(OSError),
        contextlib.closing(ControlSocket(state)) as place,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection,
    ):
        connection.connect(place.path)
        return True
    return False
