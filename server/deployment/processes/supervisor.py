"""`flwr-server run` is two processes: a small one that stays, and the one that leads, begun again if it dies.

A kill, a machine without memory or a defect of ours ends the second; the first then has it go on from its last
checkpoint. What ends both: the run is done or cannot go on, the input is wrong, a person stops it, or it dies
``MOST_DEATHS`` times without completing a round.
"""

import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from enum import IntEnum
from pathlib import Path

from common.system.stopping import STOPPED_ON_REQUEST, exit_message, graceful_shutdown, stop_on_signals
from server.deployment.processes.child_process import with_this_process

MOST_DEATHS = 5
FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0
"""Before the process is begun again, growing from the one to the other."""

PROGRAM = (sys.executable, "-P", "-m", "server.cli")
"""What leads."""


class RunExit(IntEnum):
    """How ``flwr-server run`` ends."""

    DONE = 0
    STOPPED = 1
    BAD_INPUT = 2
    ON_REQUEST = STOPPED_ON_REQUEST
    CRASHED = 70


def supervise(
    arguments: Sequence[str],
    done: Callable[[], int],
    note: Callable[[str, int, float], None],
    *,
    resume: bool,
) -> int:
    """Have a child lead the run, and begin it again as long as that helps.

    Args:
        arguments: Of ``flwr-server``.
        done: How many rounds have been completed.
        note: Told how the child died, how often in a row it has, and after how many seconds it is begun again;
            0 for not at all.

    Returns:
        The exit code, a :class:`RunExit`.
    """
    stop = _Stop()
    with stop_on_signals(), graceful_shutdown(int(RunExit.ON_REQUEST), stop.ask):
        deaths, before = 0, done()
        while True:
            code = _led([*PROGRAM, *arguments, "--once", *["--resume"] * resume], stop)
            if stop.asked.is_set():
                return code if code >= 0 else _stopped()
            if 0 <= code < RunExit.CRASHED:
                return code
            deaths, before = (1 if (now := done()) > before else deaths + 1), now
            pause_s = min(FIRST_PAUSE_S * 2 ** (deaths - 1), MAX_PAUSE_S) if deaths < MOST_DEATHS else 0.0
            note(_words(code), deaths, pause_s)
            if not pause_s:
                return RunExit.CRASHED
            if stop.asked.wait(pause_s):
                return _stopped()
            resume = True


def _stopped() -> RunExit:
    """The end of a run whose leading process is gone and could not say how to go on."""
    print(exit_message(), file=sys.stderr)
    return RunExit.ON_REQUEST


class _Stop:
    """SIGTERM and Ctrl-C, handed on to the child."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.child: subprocess.Popen[bytes] | None = None

    def ask(self) -> None:
        """Have the child end; in a thread of its own."""
        self.asked.set()
        if self.child is not None:
            self.child.terminate()


def _led(command: Sequence[str], stop: _Stop) -> int:
    """Run the child to its end; its exit code, or minus the signal that killed it."""
    # A session of its own: Ctrl-C at the terminal reaches it once, through us.
    with subprocess.Popen(command, start_new_session=True, env=with_this_process()) as child:
        stop.child = child
        if stop.asked.is_set():
            child.terminate()
        return child.wait()


def _words(code: int) -> str:
    if code >= 0:
        return f"ended with code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


def rounds_done(run_folder: Path) -> int:
    """Count the rounds done, by the newest checkpoint, whole or not."""
    numbers = (path.stem.removeprefix("round-") for path in run_folder.glob("checkpoints/round-*.json"))
    return max((int(number) for number in numbers if number.isdecimal()), default=0)
