"""The process that Ray's workers are forked from: ``python -m ...own_ray.fork_server PARENT SOCKET MODULE...``.

It imports the modules, with torch and what else a site's app needs, once, while Ray starts; each worker has them at
once. It must not import Ray, whose settings are read from the environment at its import, and it keeps to a single
thread, because a fork copies no other. It ends with the process that started it.
"""

import importlib
import json
import os
import runpy
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.system.resources import uncollected_imports
from server.simulation.backends.own_ray.ray_worker import FORKED, KILLED_FIRST

LOOK_S, WITHIN_S = 0.5, 5.0
THREADS = "/proc/self/task"
STREAMS = (0, 1, 2)
MOST_BYTES = 2**20


def serve(parent: int, path: str, modules: Sequence[str]) -> dict[str, Any]:
    """Fork a worker for each connection; return in the worker, with what it was asked to be.

    Raises:
        SystemExit: In the server itself, when its parent is gone or a thread has begun.
    """
    listener, beside = socket.socket(socket.AF_UNIX), f"{path}.{os.getpid()}"
    listener.bind(beside)
    listener.listen()  # a worker that is wanted before the imports are done waits
    os.replace(beside, path)  # so that it listens as soon as it is there; that of one which was killed may be
    with uncollected_imports():  # frozen too: else a worker's first collection copies every page that it shares
        for name in modules:
            importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a worker that has ended
    listener.settimeout(LOOK_S)
    while os.getppid() == parent and len(os.listdir(THREADS)) == 1:
        try:
            connection, _ = listener.accept()
        except OSError:  # nobody came in this time
            continue
        with connection:
            if (wanted := _forked(connection)) is not None:
                listener.close()
                return wanted
    raise SystemExit(0)


def _forked(connection: socket.socket) -> dict[str, Any] | None:
    """Fork; return in the worker what it was asked to be, None in the server.

    Raises:
        OSError: In a worker that nobody waits for any more.
    """
    descriptors: list[int] = []
    try:
        wanted = _received(connection, descriptors)
        is_worker = os.fork() == 0
    except (OSError, ValueError):  # the worker starts by itself when its connection ends
        wanted, is_worker = {}, False
    if is_worker:
        for descriptor, stream in zip(descriptors, STREAMS, strict=True):
            os.dup2(descriptor, stream)
    for descriptor in descriptors:
        os.close(descriptor)
    if not is_worker:
        return None
    connection.sendall(b"\n")
    return wanted


def _received(connection: socket.socket, descriptors: list[int]) -> dict[str, Any]:
    """Read a request, one line of JSON; its streams are added to ``descriptors``, also where it is refused.

    Raises:
        OSError: If it does not come in time.
        ValueError: If it is not whole.
    """
    connection.settimeout(WITHIN_S)
    data, streams, _, _ = socket.recv_fds(connection, MOST_BYTES, len(STREAMS))
    descriptors += streams
    while not data.endswith(b"\n"):
        more = connection.recv(MOST_BYTES)
        if not more:
            raise ValueError("the connection ended early")
        data += more
    if len(descriptors) != len(STREAMS):
        raise ValueError(f"{len(descriptors)} streams came instead of {len(STREAMS)}")
    wanted: dict[str, Any] = json.loads(data)
    return wanted


def _become(wanted: dict[str, Any]) -> None:
    """Run the program that was asked for, as if it had been started by its command."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    environment = {**wanted["environment"], FORKED: "1"}
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    # Only what differs: Ray finds the memory of a process's title by the first variable that it was started with.
    os.environ.update({name: value for name, value in environment.items() if os.environ.get(name) != value})
    os.chdir(wanted["folder"])
    if Path(KILLED_FIRST).read_text(encoding="ascii") != wanted["killed_first"]:
        Path(KILLED_FIRST).write_text(wanted["killed_first"], encoding="ascii")
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # else a plug-in's numpy.random draws the same numbers in every worker
    sys.argv[:] = wanted["arguments"]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    _become(serve(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
