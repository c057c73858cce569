"""A command as a process: how and when it ends, what it says, and what it leaves behind."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.network.real import ROOT, WITHIN_S
from tests.processes import MARK, command_line, environment, kill, living, marked

MODULES = {
    "flwr-sim": "polyclinic.studies.cli",
    "flwr-server": "polyclinic.server.cli",
    "flwr-client": "polyclinic.client.cli",
}
HALF = ("*.part", "*.unfinished", "*.tmp")
"""Names of what is not whole."""


def rounds_done(folder: Path) -> int:
    """The most rounds that a run below a folder has done; runs may be renamed while this looks."""
    done = 0
    for place, _, files in os.walk(folder):  # which passes over a folder that is gone; Path.rglob does not
        with suppress(FileNotFoundError):
            if "rounds.jsonl" in files:
                done = max(done, Path(place, "rounds.jsonl").read_text(encoding="utf-8").count("\n"))
    return done


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes:
        wall_s: From the signal, or without one from the start, to the end of its last process.
        output: Standard output and error.
        left: Processes that live on, and files that are not whole.
    """

    code: int
    wall_s: float
    output: str
    left: tuple[str, ...]


def to_the_parent(parent: int, mark: str, number: signal.Signals) -> None:
    os.kill(parent, number)


def to_the_group(parent: int, mark: str, number: signal.Signals) -> None:
    os.killpg(parent, number)


def to_every_process(parent: int, mark: str, number: signal.Signals) -> None:
    """As Slurm and systemd do with a job's, wherever a group may begin; the parent last, which is hardest."""
    for process in marked(mark):
        if process.pid != parent:
            with suppress(psutil.Error):
                process.send_signal(number)
    os.kill(parent, number)


WAYS: Mapping[str, tuple[signal.Signals, Callable[[int, str, signal.Signals], None]]] = {
    "Ctrl-C": (signal.SIGINT, to_the_group),
    "SIGTERM to the parent": (signal.SIGTERM, to_the_parent),
    "SIGHUP to the parent": (signal.SIGHUP, to_the_parent),
    "SIGTERM to the group": (signal.SIGTERM, to_the_group),
    "SIGTERM to every process": (signal.SIGTERM, to_every_process),
}


def listens(pid: int) -> bool:
    """Whether a process has begun: SIGTERM would no longer just end it."""
    with suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
        caught = int(status.split("SigCgt:")[1].split()[0], 16)
        return bool(caught >> (signal.SIGTERM - 1) & 1)
    return False


@contextmanager
def as_from_a_terminal(ignores_ctrl_c: bool = False) -> Iterator[None]:
    """A program that is started within it has no other signal ignored, also where the tests run under ``nohup``."""
    handlers = {signal.SIGINT: signal.SIG_IGN if ignores_ctrl_c else signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def fill(folder: Path) -> Path:
    """Write a file until there is no room for another byte."""
    with (folder / "filler").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    return folder / "filler"


@contextmanager
def disk(folder: Path, size_kb: int) -> Iterator[None]:
    """A disk of its own in the place of an empty folder."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_kb}k", "none", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a disk of its own cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


class Command:
    """A command that has been started, in a session of its own as a shell starts it.

    Args:
        typed: As a person types it, its program first.
        log: Where it prints to.
        ignores_ctrl_c: As a program that a shell starts in the background.
    """

    def __init__(self, typed: Sequence[object], log: Path, *, ignores_ctrl_c: bool = False) -> None:
        program, *arguments = map(str, typed)
        self._mark, self._log = uuid.uuid4().hex, log
        self._began = time.monotonic()
        command = [sys.executable, "-m", MODULES[program], *arguments]
        surroundings = environment() | {MARK: self._mark}
        with log.open("wb") as file, as_from_a_terminal(ignores_ctrl_c):
            streams = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
            self.process = subprocess.Popen(command, start_new_session=True, env=surroundings, cwd=ROOT, **streams)

    @property
    def output(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def worked_s(self) -> float:
        """CPU seconds of its processes so far."""
        worked = 0.0
        for process in marked(self._mark):
            with suppress(psutil.Error):
                times = process.cpu_times()
                worked += times.user + times.system
        return worked

    def until(self, holds: Callable[["Command"], bool]) -> None:
        """Wait until this holds; it must not end before."""
        deadline = time.monotonic() + WITHIN_S
        while not holds(self):
            assert self.process.poll() is None, f"it ended with {self.process.returncode}:\n{self.output[-3000:]}"
            assert time.monotonic() < deadline, f"not within {WITHIN_S:.0f} s:\n{self.output[-3000:]}"
            time.sleep(0.02)

    def ended(self, folder: Path, way: str = "") -> Ended:
        """Send what ends it, if anything, and wait for its last process; what is left then is killed.

        Args:
            folder: Where half-written files would be.
            way: One of :data:`WAYS`; empty for a command that ends by itself.
        """
        since, before = self._began, set(marked(self._mark))
        left = lambda: living({*before, *marked(self._mark)})  # noqa: E731
        if way:
            number, send = WAYS[way]
            since = time.monotonic()
            send(self.process.pid, self._mark, number)
        try:
            code = self.process.wait(60)
            deadline = time.monotonic() + 5
            while left() and time.monotonic() < deadline:
                time.sleep(0.01)
            wall = time.monotonic() - since
            alive = [line for process in left() if (line := command_line(process))]
            half = [str(path.relative_to(folder)) for name in HALF for path in folder.rglob(name)]
            return Ended(code, wall, self.output, (*alive, *half))
        finally:
            kill(left())
            self.process.wait()
