"""Files in the coordinator's folder ``state``: connected sites, sites that signed off, and the control socket."""

import contextlib
import datetime as dt
import json
import os
import socket
import threading
from collections.abc import Mapping
from pathlib import Path

from polyclinic.common.system.files import write_atomically

CONNECTIONS_FILE = "connections.json"
SIGN_OFFS_FILE = "signed-off.json"
"""File in which the SuperLink records the sites that have signed off. A site whose connection is lost is not in it."""
CONTROL_SOCKET = "control.sock"
_sign_offs_lock = threading.Lock()


def write_site_connections(state: Path, online: Mapping[str, bool]) -> None:
    """Write to ``state/connections.json`` whether each site is connected."""
    content = {"pid": os.getpid(), "online": dict(online)}
    write_atomically(state / CONNECTIONS_FILE, json.dumps(content).encode(), durable=False)


def read_site_connections(state: Path) -> dict[str, bool] | None:
    """Return site -> True if the site is connected; return None if ``flwr-server start`` does not run."""
    try:
        content = json.loads((state / CONNECTIONS_FILE).read_text(encoding="utf-8"))
        running = Path(f"/proc/{content['pid']}").exists()
        return {str(name): bool(online) for name, online in content["online"].items()} if running else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def record_site_sign_off(state: Path, site: str) -> None:
    """Record that a site has left on purpose: its operator stopped it, or a run refused it."""
    with _sign_offs_lock:
        when = dt.datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        _write_site_sign_offs(state, {**read_site_sign_offs(state), site: when})


def remove_site_sign_off(state: Path, site: str) -> None:
    """Remove a site's sign-off record, because the site has connected again."""
    with _sign_offs_lock:
        if site in (sign_offs := read_site_sign_offs(state)):
            _write_site_sign_offs(state, {name: when for name, when in sign_offs.items() if name != site})


def read_site_sign_offs(state: Path) -> dict[str, str]:
    """Return site -> local date, time and zone of its sign-off, for the sites that left on purpose."""
    try:
        sign_offs = json.loads((state / SIGN_OFFS_FILE).read_text(encoding="utf-8"))
        return {str(name): str(when) for name, when in sign_offs.items()}
    except (OSError, ValueError, AttributeError):
        return {}


def _write_site_sign_offs(state: Path, sign_offs: Mapping[str, str]) -> None:
    write_atomically(state / SIGN_OFFS_FILE, json.dumps(sign_offs).encode(), durable=False)


class ControlSocketPath:
    """The path of the Unix socket ``state/control.sock``, which only this account can reach (the folder has mode 700).

    The kernel allows 107 bytes for a socket's path, and the folder's path may be longer. Therefore the path is
    ``/proc/self/fd/N/control.sock``, by a descriptor of the folder that stays open until :meth:`close`.

    Raises:
        OSError: If the folder does not exist, or this account may not open it.
    """

    def __init__(self, state: Path) -> None:
        self._descriptor = os.open(state, os.O_PATH | os.O_DIRECTORY)
        self.path = f"/proc/self/fd/{self._descriptor}/{CONTROL_SOCKET}"
        self.grpc_address = f"unix:{self.path}"

    def close(self) -> None:
        """Close the descriptor of the folder."""
        os.close(self._descriptor)


def is_control_socket_listening(state: Path) -> bool:
    """Return whether a process listens on the control socket in this folder."""
    with (
        contextlib.suppress(OSError),
        contextlib.closing(ControlSocketPath(state)) as control,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection,
    ):
        connection.connect(control.path)
        return True
    return False
