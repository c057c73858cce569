"""Ctrl-C, SIGTERM and SIGHUP for our programs: all that they started ends with them within seconds, however busy.

A thread of its own ends the program, for an exception raised in the main thread waits there for Flower's threads, which
wait for Ray. All that a run has to keep is on the disk at any instant, so nothing needs to be closed. A program that
tells others that it leaves (:func:`graceful_shutdown`) has some seconds for that, and is ended after them.

A terminal and Kubernetes send the signal to a group of processes, Slurm and systemd to every process of the job. A
process in the middle may so end before this one looks for its children; its own are then handed to this one, by Linux.
"""

import ctypes
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

STOPPED_ON_REQUEST = 3
"""The exit code of ``flwr-sim``, and of ``flwr-server run``."""

ENDING_S = 3.0
CLOSING_S = 4.0
"""For a program to close what is open; then it is ended."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The last comes when a terminal is closed or an ssh connection is lost; ``nohup`` has it ignored."""
_SHOW_CURSOR = "\x1b[?25h"  # a table of progress hides it
PROGRAM = "POLYCLINIC_PROGRAM"
"""Environment variable: number of the program that the process which runs are forked from ends with."""
STARTER = "POLYCLINIC_STARTER"
"""Environment variable: number of the process that a program of ours is to end with."""
_END_WITH_PARENT, _ADOPT_ORPHANS = 1, 36  # PR_SET_PDEATHSIG and PR_SET_CHILD_SUBREAPER of linux/prctl.h

_how_to_go_on: list[Callable[[], str]] = []
_to_remove: list[Callable[[], object]] = []
_ending = threading.Event()


@dataclass
class _Closing:
    """How a program ends that closes things first; ``asked`` once it was told to."""

    code: int
    ask: Callable[[], object] | None
    asked: bool = False
    closed: bool = False


_closing: list[_Closing] = []


@contextmanager
def stop_on_signals() -> Iterator[None]:
    """Within it, SIGINT, SIGTERM and SIGHUP end this process and all that it started.

    A signal that this process was started to ignore stays so: shells do that with SIGINT of what runs in the
    background, ``nohup`` with SIGHUP.
    """
    if threading.current_thread() is not threading.main_thread() or _is_within():
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = {each: signal.getsignal(each) for each in SIGNALS}
    _adopt_orphans(True)
    watched = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)  # first: what comes after is not lost
    for each in SIGNALS:
        if before[each] is not signal.SIG_IGN:
            signal.signal(each, _leave_it_to_the_thread)
    threading.Thread(target=_wait, args=(reading,), daemon=True, name="stopping").start()
    try:
        yield
    finally:
        if _has_come(reading):
            time.sleep(2 * ENDING_S)  # what its children's end makes of this program is not its end
        signal.set_wakeup_fd(watched)
        for each, handler in before.items():
            signal.signal(each, handler)
        _adopt_orphans(False)
        os.close(writing)  # ends the thread
        _how_to_go_on.clear()


def _has_come(reading: int) -> bool:
    """Whether a signal has come: its byte is in the pipe, or the thread is at work."""
    look = select.poll()  # select.select takes no descriptor above 1,023
    look.register(reading, select.POLLIN)
    return _ending.is_set() or bool(look.poll(0)) or _ending.is_set()


@contextmanager
def graceful_shutdown(code: int, ask: Callable[[], object] | None = None) -> Iterator[None]:
    """Within it, a signal lets the program close what is open; what lasts longer than ``CLOSING_S`` is ended.

    A second signal changes nothing: it would break into the closing.

    Args:
        code: The exit code, also of a program that has to be ended.
        ask: Called in a thread of its own to have the main thread end. Where left out, ``SystemExit`` is raised there.

    Raises:
        SystemExit: Wherever the main thread is when the signal comes.
    """
    closing = _Closing(code, ask)
    _closing.append(closing)
    try:
        yield
    finally:
        closing.closed = True
        if not closing.asked:
            _closing.remove(closing)


def block_if_stopping() -> None:
    """Stay here where the program was told to stop: what has ended since needs nothing else in its place."""
    if _ending.is_set():
        time.sleep(2 * ENDING_S)


def set_resume_hint(line: Callable[[], str]) -> None:
    """Remember what gives the command line that goes on; it is asked and printed if the program is stopped."""
    _how_to_go_on[:] = [line]


@contextmanager
def removed_if_stopped(remove: Callable[[], object]) -> Iterator[None]:
    """Within it, ``remove`` is called when the program is stopped: for what must not be left half done."""
    _to_remove.append(remove)
    try:
        yield
    finally:
        _to_remove.remove(remove)


def end_with_parent(parent: int | None = None) -> None:
    """Have Linux send this process SIGKILL once the thread that started it is gone; other systems cannot.

    Args:
        parent: Number of the process that started it. Where that is gone already, this one ends at once.
    """
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_END_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def end_with_starter() -> None:
    """Do as :func:`end_with_parent` where the process that started this program wants it; comes first in ``main``."""
    starter = os.environ.pop(STARTER, "")  # programs that this one starts are not its starter's
    if starter:
        end_with_parent(int(starter))


def _adopt_orphans(wanted: bool) -> None:
    """Where the system cannot (macOS), the children of a process that has ended are not found."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_ADOPT_ORPHANS, int(wanted), 0, 0, 0)


def _is_within() -> bool:
    """Whether signals come to the thread of :func:`stop_on_signals`."""
    return signal.getsignal(signal.SIGTERM) is _leave_it_to_the_thread


def _hold_back() -> None:
    """What a child is sent before it is on its own must not end its parent."""
    if _is_within():
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _let_come() -> None:
    if _is_within():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _only_here() -> None:
    """A forked child has no such thread, and what it is sent must not end its parent."""
    if _is_within():
        signal.set_wakeup_fd(-1)
        for each in SIGNALS:
            if signal.getsignal(each) is _leave_it_to_the_thread:
                signal.signal(each, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


os.register_at_fork(before=_hold_back, after_in_parent=_let_come, after_in_child=_only_here)


def _leave_it_to_the_thread(number: int, frame: FrameType | None) -> None:
    """Python tells the thread only of signals that have a handler.

    Raises:
        SystemExit: Where the program closes things first.
    """
    if _closing and (closing := _closing[-1]).ask is None and not closing.asked:
        closing.asked = True
        raise SystemExit(closing.code)


def _wait(reading: int) -> None:
    until_ended: list[threading.Thread] = []
    with open(reading, "rb", buffering=0) as signals:
        while number := signals.read(1):
            if number[0] not in SIGNALS:
                continue
            if not _closing:
                _end(STOPPED_ON_REQUEST)
            closing = _closing[-1]
            if closing.ask is not None and not closing.asked:
                closing.asked = True
                closing.ask()
            if not until_ended:
                until_ended.append(threading.Thread(target=_end_late, args=(closing,), daemon=True))
                until_ended[0].start()


def _end_late(closing: _Closing) -> None:
    time.sleep(CLOSING_S)
    _end(closing.code, silently=closing.closed)


def _end(code: int, *, silently: bool = False) -> None:
    """End every process that this one started, remove what is half done, say how to go on, and end."""
    _ending.set()
    try:
        person = _silenced()
        half_done = list(_to_remove)  # when its child has ended, a thread of ours takes it off the list
        with suppress(Exception):
            _end_children()
        for remove in [*half_done, *_to_remove]:
            with suppress(Exception):  # the program ends in any case
                remove()
        cursor = _SHOW_CURSOR if os.isatty(person) else ""
        os.write(person, f"{cursor}\n{exit_message()}\n".encode() if not silently else b"")
    finally:
        os._exit(code)


def exit_message() -> str:
    """What a program says that was stopped, with the line that goes on."""
    again = f"; to go on: {_how_to_go_on[0]()}" if _how_to_go_on else ""
    return f"stopped on request{again}"


def _silenced() -> int:
    """Send what other threads still print nowhere; return where a person reads what this one says."""
    try:
        person, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    except OSError:  # it has as many files open as it may
        return 2
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)
    return person


def _end_children() -> None:
    """Until there are none: a thread of ours may start another while these end."""
    import psutil

    until = time.monotonic() + ENDING_S
    while time.monotonic() < until and (children := psutil.Process().children(recursive=True)):
        for child in children:
            with suppress(psutil.Error):
                child.kill()
        psutil.wait_procs(children, timeout=0.5)
