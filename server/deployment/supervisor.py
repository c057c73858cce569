"""The supervisor of ``flwr-server run``: a small process that starts the leading process of a run, and restarts it.

The leading process executes the run's rounds. If it is killed, runs out of memory or crashes, a new leading process
continues from the last checkpoint. The supervisor gives up after :data:`MAX_DEATHS` deaths without a completed round.
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

MAX_DEATHS = 5
FIRST_RESTART_DELAY_S = 1.0
"""Seconds before the first restart of the leading process; doubled with each further death."""
MAX_RESTART_DELAY_S = 60.0

LEADER_COMMAND = (sys.executable, "-P", "-m", "polyclinic.server.cli")
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
    """Lead a run in a child process; restart the child if it crashes.

    The child is not restarted after :data:`MAX_DEATHS` crashes in a row without a completed round in between. Each
    crash is printed by ``tell`` and recorded in the run folder ``out``, if the folder exists.

    Args:
        arguments: Command line of the run, ``run`` and its arguments, without ``--resume``.
        resume: True if the first child resumes an earlier run; restarted children always do.

    Returns:
        The exit code, a :class:`RunExitCode`.
    """
    stop_requested = threading.Event()
    child: subprocess.Popen[bytes] | None = None

    def stop_child_process() -> None:  # called in another thread at SIGTERM or Ctrl-C
        stop_requested.set()
        if child is not None:
            child.terminate()

    # STARTER makes the child end when this process ends. It uses a signal of Linux, not preexec_fn, which runs gRPC's
    # fork handlers in the child: in a process that has used gRPC they aborted one child in twenty.
    environment = {**os.environ, STARTER_VARIABLE: str(os.getpid())}
    with stop_on_signals(), graceful_shutdown(int(RunExitCode.ON_REQUEST), stop_child_process):
        deaths = 0  # since the last completed round
        rounds_before = count_checkpointed_rounds(out)
        while True:
            command = [*LEADER_COMMAND, *arguments, "--once", *["--resume"] * resume]
            # In a new session, so that Ctrl-C at the terminal reaches the child once, through this process.
            with subprocess.Popen(command, start_new_session=True, env=environment) as child:
                if stop_requested.is_set():
                    child.terminate()
                code = child.wait()  # minus the signal that killed it
            if stop_requested.is_set():
                return code if code >= 0 else _report_requested_stop()
            if 0 <= code < RunExitCode.CRASHED:
                return code

            completed_rounds = count_checkpointed_rounds(out)
            deaths = 1 if completed_rounds > rounds_before else deaths + 1
            rounds_before = completed_rounds
            gives_up = deaths >= MAX_DEATHS
            delay_s = 0.0 if gives_up else min(FIRST_RESTART_DELAY_S * 2 ** (deaths - 1), MAX_RESTART_DELAY_S)
            cause = f"ended with code {code}" if code >= 0 else f"was killed by signal {-code}"
            with contextlib.suppress(ValueError):  # no signal, or one without a name
                cause = f"was killed by {signal.Signals(-code).name}"
            outcome = f"goes on from its last checkpoint in {delay_s:.0f} s"
            if gives_up:
                outcome = f"died {deaths} times without a new round, and is given up"
            tell(f"the process that leads the run {cause}; the run {outcome}")
            with contextlib.suppress(OSError):
                if (out / "events.jsonl").is_file():
                    RunFolder(out).append_event("died", how=cause, times=deaths, again_in_s=delay_s)
            if gives_up:
                return RunExitCode.CRASHED
            if stop_requested.wait(delay_s):
                return _report_requested_stop()
            resume = True


def _report_requested_stop() -> RunExitCode:
    # The child was killed before it could print how to resume the run.
    print(make_exit_message(), file=sys.stderr)
    return RunExitCode.ON_REQUEST


def count_checkpointed_rounds(run_folder: Path) -> int:
    """Return the number of completed rounds, from the name of the newest checkpoint file; 0 without checkpoints."""
    numbers = (path.stem.removeprefix("round-") for path in run_folder.glob("checkpoints/round-*.json"))
    return max((int(number) for number in numbers if number.isdecimal()), default=0)
