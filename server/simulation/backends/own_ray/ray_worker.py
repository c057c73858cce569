"""What Ray starts for a worker: ``python ray_worker.py SOCKET PROGRAM ARGUMENT...``.

It has a worker forked that runs Ray's own program, or becomes that program itself where the fork server does not
answer. It imports little, because it runs once for each worker.
"""

import json
import os
import socket
import sys
from pathlib import Path

FORKED = "POLYCLINIC_FORKED"
"""A variable of the environment of forked workers."""
KILLED_FIRST = "/proc/self/oom_score_adj"
"""Ray has the kernel kill workers before other processes where memory runs out; it does so by process."""
WITHIN_S = 60.0


def forked(path: str, command: list[str]) -> bool:
    """Ask for a worker with this process's environment, folder and streams; return whether it has begun."""
    try:
        wanted = {
            "arguments": command,
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "killed_first": Path(KILLED_FIRST).read_text(encoding="ascii"),
        }
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(WITHIN_S)
            connection.connect(path)
            sent = json.dumps(wanted).encode() + b"\n"
            done = socket.send_fds(connection, [sent], [0, 1, 2])
            if done < len(sent):  # the worker may have begun and closed its end: not even nothing can be sent then
                connection.sendall(sent[done:])
            return connection.recv(1) == b"\n"
    except OSError:
        return False


if __name__ == "__main__":
    _, server, *worker = sys.argv
    if not forked(server, worker):
        os.execv(sys.executable, [sys.executable, *worker])
