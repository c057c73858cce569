"""The live view beside a simulation: a process of its own, which ends with the run."""

import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from server.reporting.live.listening import listening

LAST_LOOK_S = 5.0
"""How long a run that is over waits for the view to tell so."""
LOOPBACK = "127.0.0.1"


@contextmanager
def beside(folder: Path, port: int, tell: Callable[[str], None]) -> Iterator[None]:
    """Show the run in ``folder`` on 127.0.0.1 as long as the context lasts.

    Plain HTTP, for there is no certificate in a simulation: what it says does not leave this machine.

    Raises:
        BadInput: If the port cannot be had.
    """
    token = secrets.token_urlsafe(24)
    with listening(LOOPBACK, port) as at:
        command = [sys.executable, "-P", "-m", "server.reporting.live.main", str(at.fileno()), str(folder.resolve())]
        viewer = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[at.fileno()])
        tell(f"live view: http://{LOOPBACK}:{at.getsockname()[1]}/?token={token}")
    assert viewer.stdin is not None
    try:
        viewer.stdin.write(f"{token}\n".encode())
        viewer.stdin.flush()
        yield
    finally:
        viewer.stdin.close()
        _end(viewer)


def _end(viewer: subprocess.Popen[bytes]) -> None:
    try:
        viewer.wait(LAST_LOOK_S)
    except subprocess.TimeoutExpired:
        viewer.kill()
        viewer.wait()
