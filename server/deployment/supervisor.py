"""The supervisor of ``flwr-server run``: a small process that starts the leading process of a run, and restarts it.

The leading process may be killed, run out of memory or crash; its successor continues from the last checkpoint. Both
processes end when the run is done or cannot continue, the input is wrong, a person stops the run, or the leading
process dies :data:`MOST_DEATHS` times without completing a round.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from enum import IntEnum
from pathlib import Path

from polyclinic.common.system.stopping import (
    STARTER_VARIABLE,
    STOPPED_EXIT_CODE,
    graceful_shutdown,
    make_exit_message,
    stop_on_signals,
)
from polyclinic.server.runs.folder import RunFolder

MOST_DEATHS = 5
FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0
"""Pause before the process is restarted: the first, and the longest."""

PROGRAM = (sys.executable, "-P", "-m", "polyclinic.server.cli")
"""Command of the leading process."""


class RunExitCode(IntEnum):
    """Exit codes of ``flwr-server run``.

    docs/troubleshooting.md prints these texts: the cause, and after the semicolon who or what helps.

    Attributes:
        DONE: Done.
        STOPPED: The run cannot go on, and says why: too few sites, no room, the SuperLink away; the same line with
            `--resume` once that is fixed.
        BAD_INPUT: A fault in a file or an option, each one listed; you.
        ON_REQUEST: Stopped on request; the same line with `--resume` goes on.
        CRASHED: It died again and again; send us the log.
    """

    DONE = 0
    STOPPED = 1
    BAD_INPUT = 2
    ON_REQUEST = STOPPED_EXIT_CODE
    CRASHED = 70


def supervise_run(arguments: Sequence[str], out: Path, tell: Callable[[str], None], *, resume: bool) -> int:
    """Run the command line ``arguments`` in a child process that leads the run; restart the child if it crashes.

    The child is not restarted after :data:`MOST_DEATHS` crashes in a row without a completed round in between. Each
    crash is printed by ``tell`` and recorded in the run folder ``out``, if the folder exists already.

    Args:
        arguments: Command line of the run, ``run`` and its arguments, without ``--resume``.
        resume: Whether the first child resumes an earlier run; restarted children always do.

    Returns:
        The exit code, a :class:`RunExitCode`.
    """
    stop_requested = threading.Event()
    child: subprocess.Popen[bytes] | None = None

    def stop_child_process() -> None:  # by SIGTERM or Ctrl-C; runs in a thread of its own
        stop_requested.set()
        if child is not None:
            child.terminate()

    # The child ends when this process does, by Linux's signal and not by preexec_fn: that one makes gRPC's fork
    # handlers run in the child, and of a process that has used gRPC one child in twenty was aborted.
    environment = {**os.environ, STARTER_VARIABLE: str(os.getpid())}
    with stop_on_signals(), graceful_shutdown(int(RunExitCode.ON_REQUEST), stop_child_process):
        deaths, before = 0, count_checkpointed_rounds(out)
        while True:
            command = [*PROGRAM, *arguments, "--once", *["--resume"] * resume]
            # A session of its own: Ctrl-C at the terminal reaches the child once, through us.
            with subprocess.Popen(command, start_new_session=True, env=environment) as child:
                if stop_requested.is_set():
                    child.terminate()
                code = child.wait()  # minus the signal that killed it
            if stop_requested.is_set():
                return code if code >= 0 else _report_requested_stop()
            if 0 <= code < RunExitCode.CRASHED:
                return code
            deaths, before = (1 if (now := count_checkpointed_rounds(out)) > before else deaths + 1), now
            pause_s = min(FIRST_PAUSE_S * 2 ** (deaths - 1), MAX_PAUSE_S) if deaths < MOST_DEATHS else 0.0
            cause = f"ended with code {code}" if code >= 0 else f"was killed by signal {-code}"
            with contextlib.suppress(ValueError):  # no signal, or one without a name
                cause = f"was killed by {signal.Signals(-code).name}"
            again = f"goes on from its last checkpoint in {pause_s:.0f} s"
            then = again if pause_s else f"died {deaths} times without a new round, and is given up"
            tell(f"the process that leads the run {cause}; the run {then}")
            with contextlib.suppress(OSError):
                if (out / "events.jsonl").is_file():
                    RunFolder(out).append_event("died", how=cause, times=deaths, again_in_s=pause_s)
            if not pause_s:
                return RunExitCode.CRASHED
            if stop_requested.wait(pause_s):
                return _report_requested_stop()
            resume = True


def _report_requested_stop() -> RunExitCode:
    print(make_exit_message(), file=sys.stderr)  # the child is gone and could not say how to go on
    return RunExitCode.ON_REQUEST


def count_checkpointed_rounds(run_folder: Path) -> int:
    """Return the number of completed rounds by the newest checkpoint file, even if that file is damaged."""
    numbers = (path.stem.removeprefix("round-") for path in run_folder.glob("checkpoints/round-*.json"))
    return max((int(number) for number in numbers if number.isdecimal()), default=0)
