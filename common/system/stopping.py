"""Stops our programs on Ctrl-C, SIGTERM and SIGHUP within seconds, with all processes that they started.

A separate thread ends the program, because an exception in the main thread would have to wait for threads of Flower and
Ray. A run's state is always on the disk, so no cleanup is needed. A program that must notify others of its end uses
:func:`graceful_shutdown` and has some seconds for that.

Many systems (terminal, Kubernetes, Slurm, systemd) send the signal to all processes of a job at once. A child can then
end before this process has listed its children; Linux hands these orphans to this process, which ends them.
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
from functools import partial
from types import FrameType

STOPPED_ON_REQUEST = 3
"""Exit code of ``flwr-sim`` and of ``flwr-server run``."""

KILL_TIMEOUT_S = 3.0
SHUTDOWN_TIMEOUT_S = 4.0
"""Seconds that a program has for its graceful shutdown."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""SIGHUP is sent when a terminal is closed or an ssh connection is lost; ``nohup`` ignores it."""
_SHOW_CURSOR = "\x1b[?25h"  # a table of progress hides it
PROGRAM = "POLYCLINIC_PROGRAM"
"""Environment variable: process id of the program with which the process ends that forks runs."""
STARTER = "POLYCLINIC_STARTER"
"""Environment variable: id of the process with which a program of ours has to end."""
_END_WITH_PARENT, _ADOPT_ORPHANS = 1, 36  # PR_SET_PDEATHSIG and PR_SET_CHILD_SUBREAPER of linux/prctl.h

_how_to_go_on: list[Callable[[], str]] = []
_to_remove: list[Callable[[], object]] = []
_to_notify: list[Callable[[], object]] = []
_ending = threading.Event()


@dataclass
class _GracefulShutdown:
    """The exit code and the state of an active :func:`graceful_shutdown`."""

    code: int
    ask: Callable[[], object] | None
    requested: bool = False
    closed: bool = False


_closing: list[_GracefulShutdown] = []


@contextmanager
def stop_on_signals() -> Iterator[None]:
    """End this process and all its children on SIGINT, SIGTERM or SIGHUP inside the ``with`` block.

    A signal that was already ignored when the process started stays ignored, such as SIGINT in a background job.
    A program with an exit code of its own enters :func:`graceful_shutdown` before this context, so that even a signal
    at the very start gives that exit code.
    """
    if threading.current_thread() is not threading.main_thread() or _is_handling_signals():
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = {number: signal.getsignal(number) for number in SIGNALS}
    _adopt_orphans(True)
    watched = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)  # first: what comes after is not lost
    for number in SIGNALS:
        if before[number] is not signal.SIG_IGN:
            signal.signal(number, _handle_signal)
    threading.Thread(target=_wait_for_signal, args=(reading,), daemon=True, name="stopping").start()
    try:
        yield
    finally:
        for closing in _closing:
            closing.closed = True
        look = select.poll()  # select.select takes no descriptor above 1,023
        look.register(reading, select.POLLIN)
        if _ending.is_set() or look.poll(0) or _ending.is_set():  # its byte is in the pipe, or the thread is at work
            time.sleep(2 * KILL_TIMEOUT_S)  # the thread ends this program, not an error that its children's end causes
        signal.set_wakeup_fd(watched)
        for number, handler in before.items():
            signal.signal(number, handler)
        _adopt_orphans(False)
        os.close(writing)  # ends the thread
        _how_to_go_on.clear()


@contextmanager
def graceful_shutdown(code: int, ask: Callable[[], object] | None = None) -> Iterator[None]:
    """Give the ``with`` block ``SHUTDOWN_TIMEOUT_S`` seconds to finish after a signal; a second signal has no effect.

    Args:
        code: The exit code, also for a program that is killed because it takes longer.
        ask: Function that asks the main thread to end, called in another thread. By default a signal raises
            ``SystemExit`` in the main thread.

    Raises:
        SystemExit: When a signal arrives and ``ask`` is None.
    """
    closing = _GracefulShutdown(code, ask)
    _closing.append(closing)
    try:
        yield
    finally:
        closing.closed = True
        if not closing.requested:
            _closing.remove(closing)


def block_thread_if_stopping() -> None:
    """Block the calling thread if the program is ending, so that the thread starts no new work."""
    if _ending.is_set():
        time.sleep(2 * KILL_TIMEOUT_S)


def set_resume_hint(line: Callable[[], str]) -> None:
    """Set the function that returns the command line for resuming; it is printed if the program is stopped."""
    _how_to_go_on[:] = [line]


@contextmanager
def remove_output_if_stopped(remove: Callable[[], object]) -> Iterator[None]:
    """Call ``remove``, which deletes unfinished output, if a signal stops the program inside the ``with`` block."""
    _to_remove.append(remove)
    try:
        yield
    finally:
        _to_remove.remove(remove)


@contextmanager
def notify_of_stop_request(notify: Callable[[], object]) -> Iterator[None]:
    """Call ``notify`` in another thread as soon as a signal asks the program to end inside the ``with`` block.

    The main thread may be in a computation that it cannot leave before the program ends.
    """
    _to_notify.append(notify)
    try:
        yield
    finally:
        _to_notify.remove(notify)


def end_process_with_parent(parent: int | None = None) -> None:
    """Let Linux kill this process when its parent ends; no effect on other systems.

    Args:
        parent: Process id of the parent. If the parent has already ended, this process ends at once.
    """
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_END_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def end_with_parent_if_requested() -> None:
    """Call :func:`end_process_with_parent` if the environment has :data:`STARTER`; call this first in ``main``."""
    starter = os.environ.pop(STARTER, "")  # not for programs that this one starts
    if starter:
        end_process_with_parent(int(starter))


def _adopt_orphans(adopt: bool) -> None:
    """Let Linux make this process the parent of its orphaned descendants (or no longer, if ``adopt`` is False)."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_ADOPT_ORPHANS, int(adopt), 0, 0, 0)


def _is_handling_signals() -> bool:
    """Return True if :func:`stop_on_signals` is active."""
    return signal.getsignal(signal.SIGTERM) is _handle_signal


def _block_signals_around_fork(how: signal.Sigmasks) -> None:
    """Block signals before a fork, or unblock them after it, so that a signal to the child cannot end the parent."""
    if _is_handling_signals():
        signal.pthread_sigmask(how, SIGNALS)


def _restore_signals_after_fork() -> None:
    """Restore Python's default signal handlers in a forked child, which lacks the thread that ends the program."""
    if _is_handling_signals():
        signal.set_wakeup_fd(-1)
        for number in SIGNALS:
            if signal.getsignal(number) is _handle_signal:
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


os.register_at_fork(
    before=partial(_block_signals_around_fork, signal.SIG_BLOCK),
    after_in_parent=partial(_block_signals_around_fork, signal.SIG_UNBLOCK),
    after_in_child=_restore_signals_after_fork,
)


def _handle_signal(number: int, frame: FrameType | None) -> None:
    """Handle a signal, in the main thread: raise ``SystemExit`` inside :func:`graceful_shutdown`, else do nothing.

    The thread "stopping", which runs :func:`_wait_for_signal`, ends the program. This handler must be installed even
    where it does nothing, because Python notifies that thread only of signals that have a handler.

    Raises:
        SystemExit: At the first signal inside a :func:`graceful_shutdown` whose argument ``ask`` is None. With ``ask``,
            the thread "stopping" calls that function instead.
    """
    if _closing and (closing := _closing[-1]).ask is None and not closing.requested:
        closing.requested = True
        raise SystemExit(closing.code)


def _wait_for_signal(reading: int) -> None:
    has_timer = False
    with open(reading, "rb", buffering=0) as signals:
        while number := signals.read(1):
            if number[0] not in SIGNALS:
                continue
            if not _closing:
                _notify_of_stop_request()
                _end_program(STOPPED_ON_REQUEST)
            closing = _closing[-1]
            if closing.ask is not None and not closing.requested:
                closing.requested = True
                closing.ask()
            if not has_timer:
                has_timer = True
                threading.Thread(target=_end_program, args=(closing.code, closing), daemon=True).start()
                _notify_of_stop_request()  # the program ends in time, even if this takes long


def _notify_of_stop_request() -> None:
    for notify in [*_to_notify]:
        with suppress(Exception):  # the program ends in any case
            notify()


def _end_program(code: int, closing: _GracefulShutdown | None = None) -> None:
    """End all child processes, remove unfinished output, print the exit message, and end this process.

    Args:
        code: The exit code.
        closing: The active graceful shutdown, for which the function first waits ``SHUTDOWN_TIMEOUT_S`` seconds. If the
            shutdown is complete by then, no message is printed. None to end at once.
    """
    if closing is not None:
        time.sleep(SHUTDOWN_TIMEOUT_S)
    _ending.set()
    stderr = 2
    try:
        with suppress(OSError):  # it has as many files open as it may; else other threads print no more from here on
            stderr = os.dup(2)
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for descriptor in (1, 2):
                os.dup2(nowhere, descriptor)
        half_done = list(_to_remove)  # when its child has ended, a thread of ours takes it off the list
        with suppress(Exception):
            _end_children()
        for remove in [*half_done, *_to_remove]:
            with suppress(Exception):  # the program ends in any case
                remove()
        cursor = _SHOW_CURSOR if os.isatty(stderr) else ""
        if closing is None or not closing.closed:
            os.write(stderr, f"{cursor}\n{make_exit_message()}\n".encode())
    finally:
        os._exit(code)


def make_exit_message() -> str:
    """Return the last message of a stopped program, with the command line that resumes the run, if it is set."""
    again = f"; to go on: {_how_to_go_on[0]()}" if _how_to_go_on else ""
    return f"stopped on request{again}"


def _end_children() -> None:
    """Kill all descendants repeatedly until none is left, because a thread may start new ones meanwhile."""
    import psutil

    until = time.monotonic() + KILL_TIMEOUT_S
    while time.monotonic() < until and (children := psutil.Process().children(recursive=True)):
        for child in children:
            with suppress(psutil.Error):
                child.kill()
        psutil.wait_procs(children, timeout=0.5)
