"""Ctrl-C and SIGTERM for a program that starts others: all of them end with it, at once, however busy it is.

A thread of its own ends the program, for an exception raised in the main thread waits there for Flower's threads, which
wait for Ray. All that a run has to keep is on the disk at any instant, so nothing needs to be closed.

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
from types import FrameType

STOPPED_ON_REQUEST = 3
"""The exit code of ``flwr-sim``, and of ``flwr-server run``."""

ENDING_S = 3.0
SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SHOW_CURSOR = "\x1b[?25h"  # a table of progress hides it
_ADOPT_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER of linux/prctl.h

_how_to_go_on: list[Callable[[], str]] = []
_to_remove: list[Callable[[], object]] = []
_ending = threading.Event()


@contextmanager
def stopped_at_once() -> Iterator[None]:
    """Within it, SIGINT and SIGTERM end this process and all that it started.

    A signal that this process was started to ignore, as shells do with SIGINT of what runs in the background, stays so.
    """
    if threading.current_thread() is not threading.main_thread():
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
    return _ending.is_set() or bool(select.select([reading], [], [], 0.0)[0]) or _ending.is_set()


def go_on_with(line: Callable[[], str]) -> None:
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


def _adopt_orphans(wanted: bool) -> None:
    """Where the system cannot (macOS), the children of a process that has ended are not found."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_ADOPT_ORPHANS, int(wanted), 0, 0, 0)


def _is_within() -> bool:
    """Whether signals come to the thread of :func:`stopped_at_once`."""
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
    """Python tells the thread only of signals that have a handler."""


def _wait(reading: int) -> None:
    with open(reading, "rb", buffering=0) as signals:
        while number := signals.read(1):
            if number[0] in SIGNALS:
                _ending.set()
                _end()


def _end() -> None:
    """End every process that this one started, remove what is half done, say how to go on, and end."""
    person = _silenced()
    half_done = list(_to_remove)  # when its child has ended, a thread of ours takes it off the list
    _end_children()
    for remove in [*half_done, *_to_remove]:
        with suppress(Exception):  # the program ends in any case
            remove()
    again = f"; to go on: {_how_to_go_on[0]()}" if _how_to_go_on else ""
    cursor = _SHOW_CURSOR if os.isatty(person) else ""
    with suppress(OSError):
        os.write(person, f"{cursor}\nstopped on request{again}\n".encode())
    os._exit(STOPPED_ON_REQUEST)


def _silenced() -> int:
    """Send what other threads still print nowhere; return where a person reads what this one says."""
    person, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
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
