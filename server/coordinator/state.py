"""The folder ``state``: connections of sites, their sign-offs, and the SuperLink's control socket."""

import contextlib
import datetime as dt
import json
import os
import socket
import threading
from collections.abc import Mapping
from pathlib import Path

from common.system.files import write_atomically

CONNECTIONS = "connections.json"
SIGNED_OFF = "signed-off.json"
"""Written by the SuperLink, which a site tells that it leaves; a lost site tells nobody."""
SOCKET = "control.sock"
_lock = threading.Lock()


def write_connections(state: Path, online: Mapping[str, bool]) -> None:
    """Write ``state/connections.json``: for each site, whether it is connected."""
    content = {"pid": os.getpid(), "online": dict(online)}
    write_atomically(state / CONNECTIONS, json.dumps(content).encode(), durable=False)


def read_connections(state: Path) -> dict[str, bool] | None:
    """Return for each site whether it is connected; None where ``flwr-server start`` does not run."""
    try:
        content = json.loads((state / CONNECTIONS).read_text(encoding="utf-8"))
        running = Path(f"/proc/{content['pid']}").exists()
        return {str(name): bool(online) for name, online in content["online"].items()} if running else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def record_sign_off(state: Path, site: str) -> None:
    """Record that a site signs off now: its operator stops it, or it ends because a run refused it."""
    with _lock:
        when = dt.datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        _write_sign_offs(state, {**read_sign_offs(state), site: when})


def remove_sign_off(state: Path, site: str) -> None:
    """Remove a site's sign-off, because the site has come back."""
    with _lock:
        if site in (sign_offs := read_sign_offs(state)):
            _write_sign_offs(state, {name: when for name, when in sign_offs.items() if name != site})


def read_sign_offs(state: Path) -> dict[str, str]:
    """Return for each site that signed off the local date, time and zone; other sites are connected or lost."""
    try:
        sign_offs = json.loads((state / SIGNED_OFF).read_text(encoding="utf-8"))
        return {str(name): str(when) for name, when in sign_offs.items()}
    except (OSError, ValueError, AttributeError):
        return {}


def _write_sign_offs(state: Path, sign_offs: Mapping[str, str]) -> None:
    write_atomically(state / SIGNED_OFF, json.dumps(sign_offs).encode(), durable=False)


class ControlSocket:
    """The Unix socket ``state/control.sock``; no other account can connect, because the folder has mode 700.

    The kernel allows 107 bytes for the path of a socket, and a folder's path may be longer. So the path goes through
    the folder's descriptor, which stays open for as long as gRPC may connect again.

    Raises:
        OSError: If there is no such folder, or this account may not open it.
    """

    def __init__(self, state: Path) -> None:
        self._descriptor = os.open(state, os.O_PATH | os.O_DIRECTORY)
        self.path = f"/proc/self/fd/{self._descriptor}/{SOCKET}"
        self.grpc_address = f"unix:{self.path}"

    def close(self) -> None:
        """Close the folder's descriptor."""
        os.close(self._descriptor)


def is_control_socket_listening(state: Path) -> bool:
    """Return whether a process listens on the control socket of this folder."""
    with (
        contextlib.suppress(OSError),
        contextlib.closing(ControlSocket(state)) as control,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection,
    ):
        connection.connect(control.path)
        return True
    return False
