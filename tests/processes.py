"""What tests ask of processes, of which any may end between two looks."""

from collections.abc import Iterable
from contextlib import suppress

import psutil


def command_line(process: psutil.Process) -> str:
    """Empty where it has ended: a child that another test has not waited for yet is a zombie, which has none."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def kill(processes: Iterable[psutil.Process]) -> None:
    """SIGKILL to those that have not ended."""
    for process in processes:
        with suppress(psutil.Error):
            process.kill()


def living(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended."""
    alive = []
    for process in processes:
        with suppress(psutil.Error):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
    return alive
