"""What tests ask of processes, of which any may end between two looks."""

import os
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
MARK = "POLYCLINIC_TEST"
"""Variable of the environment by which the programs of one test are recognised."""


def environment() -> dict[str, str]:
    """The environment of a program that tests start: this tree's packages, one thread, no proxy."""
    near = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**near, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": path}


def marked(mark: str, others: Collection[int] = ()) -> list[psutil.Process]:
    """Every living process that descends from programs with this mark in their environment, or with these ids.

    Ray's agents overwrite their environment: they are found as children of one that has it.
    """
    parents, processes = dict[psutil.Process, int](), dict[int, psutil.Process]()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            parents[process] = process.ppid()
            if process.pid in others or process.environ().get(MARK) == mark:
                processes[process.pid] = process
    while more := {own.pid: own for own, parent in parents.items() if parent in processes and own.pid not in processes}:
        processes |= more
    return living(processes.values())


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
