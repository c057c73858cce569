"""Stop our programs on Ctrl-C, SIGTERM and SIGHUP within seconds, with all processes that they started.

A separate thread ends the program, because an exception in the main thread would have to wait for threads of Flower and
Ray. A run's state is always on disk, so no cleanup is needed. A program that must notify others of its end uses
:func:`graceful_shutdown`, and has some seconds for that.

Many systems (terminal, Kubernetes, Slurm, systemd) send the signal to all processes of a job at once. A child can then
end before this process has listed its children; Linux makes this process the parent of such orphans, and it ends them.
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

STOPPED_EXIT_CODE = 3
"""Exit code of ``flwr-sim`` and ``flwr-server run`` after a signal."""

KILL_TIMEOUT_S = 3.0
"""Seconds for which a program tries to kill its children."""
SHUTDOWN_TIMEOUT_S = 4.0
"""Seconds that a program has for its graceful shutdown."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that stop a program. SIGHUP is sent when a terminal is closed or an ssh connection is lost; ``nohup`` ignores
it.
"""
_SHOW_CURSOR = "\x1b[?25h"  # a progress table hides the cursor
PROGRAM_VARIABLE = "POLYCLINIC_PROGRAM"
"""Environment variable with the id of the program with which the process that forks runs must end."""
STARTER_VARIABLE = "POLYCLINIC_STARTER"
"""Environment variable with the id of the process with which one of our programs must end."""
_END_WITH_PARENT = 1  # PR_SET_PDEATHSIG of linux/prctl.h
_ADOPT_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER

_resume_hints: list[Callable[[], str]] = []
_removal_callbacks: list[Callable[[], object]] = []
_stop_callbacks: list[Callable[[], object]] = []
_program_is_ending = threading.Event()


@dataclass
class _GracefulShutdown:
    """Exit code and state of an active :func:`graceful_shutdown`.

    Attributes:
        code: The exit code.
        ask: Asks the main thread to end; None to raise ``SystemExit`` there.
        requested: True after the first signal.
        closed: True after the ``with`` block has ended.
    """

    code: int
    ask: Callable[[], object] | None
    requested: bool = False
    closed: bool = False


_graceful_shutdowns: list[_GracefulShutdown] = []


@contextmanager
def stop_on_signals() -> Iterator[None]:
    """End this process and all its children on SIGINT, SIGTERM or SIGHUP inside the ``with`` block.

    A signal that was ignored when the process started stays ignored, such as SIGINT in a background job. A program with
    a special exit code enters :func:`graceful_shutdown` before this context, so that even a signal at the very start
    gives that exit code.
    """
    if threading.current_thread() is not threading.main_thread() or _is_handling_signals():
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    _adopt_orphans(True)
    watched = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)  # before the handlers, to lose no signal
    for number in STOP_SIGNALS:
        if before[number] is not signal.SIG_IGN:
            signal.signal(number, _handle_signal)
    threading.Thread(target=_wait_for_signal, args=(reading,), daemon=True, name="stopping").start()
    try:
        yield
    finally:
        for closing in _graceful_shutdowns:
            closing.closed = True
        poll = select.poll()  # select.select fails for descriptors above 1,023
        poll.register(reading, select.POLLIN)
        # A signal has come if its byte is in the pipe, or the thread has already read it. Then let the thread end this
        # program, not an error that the end of its children causes.
        if _program_is_ending.is_set() or poll.poll(0) or _program_is_ending.is_set():
            time.sleep(2 * KILL_TIMEOUT_S)
        signal.set_wakeup_fd(watched)
        for number, handler in before.items():
            signal.signal(number, handler)
        _adopt_orphans(False)
        os.close(writing)  # ends the thread
        _resume_hints.clear()


@contextmanager
def graceful_shutdown(code: int, ask: Callable[[], object] | None = None) -> Iterator[None]:
    """Give the ``with`` block ``SHUTDOWN_TIMEOUT_S`` seconds to finish after a signal; a second signal has no effect.

    Args:
        code: The exit code, also for a program that is killed because it takes longer.
        ask: Asks the main thread to end; called in another thread. None to raise ``SystemExit`` in the main thread.

    Raises:
        SystemExit: When a signal arrives and ``ask`` is None.
    """
    closing = _GracefulShutdown(code, ask)
    _graceful_shutdowns.append(closing)
    try:
        yield
    finally:
        closing.closed = True
        if not closing.requested:
            _graceful_shutdowns.remove(closing)


def block_thread_if_stopping() -> None:
    """Block the calling thread if the program is ending, so that the thread starts no new work."""
    if _program_is_ending.is_set():
        time.sleep(2 * KILL_TIMEOUT_S)


def set_resume_hint(line: Callable[[], str]) -> None:
    """Set the function that returns the command line for resuming; it is printed if the program is stopped."""
    _resume_hints[:] = [line]


@contextmanager
def remove_output_if_stopped(remove: Callable[[], object]) -> Iterator[None]:
    """Call ``remove``, which deletes unfinished output, if a signal stops the program inside the ``with`` block."""
    _removal_callbacks.append(remove)
    try:
        yield
    finally:
        _removal_callbacks.remove(remove)


@contextmanager
def notify_of_stop_request(notify: Callable[[], object]) -> Iterator[None]:
    """Call ``notify`` in another thread as soon as a signal stops the program inside the ``with`` block.

    The main thread may be in a computation that it cannot leave before the program ends.
    """
    _stop_callbacks.append(notify)
    try:
        yield
    finally:
        _stop_callbacks.remove(notify)


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
    """Call :func:`end_process_with_parent` if the variable :data:`STARTER_VARIABLE` is set; ``main`` calls
    this first.
    """
    starter = os.environ.pop(STARTER_VARIABLE, "")  # removed, so that programs which this one starts do not inherit it
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
        signal.pthread_sigmask(how, STOP_SIGNALS)


def _restore_signals_after_fork() -> None:
    """Restore Python's default signal handlers in a forked child, which lacks the thread that ends the program."""
    if _is_handling_signals():
        signal.set_wakeup_fd(-1)
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is _handle_signal:
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


os.register_at_fork(
    before=partial(_block_signals_around_fork, signal.SIG_BLOCK),
    after_in_parent=partial(_block_signals_around_fork, signal.SIG_UNBLOCK),
    after_in_child=_restore_signals_after_fork,
)


def _handle_signal(number: int, frame: FrameType | None) -> None:
    """Handle a signal in the main thread: raise ``SystemExit`` inside :func:`graceful_shutdown`, else do nothing.

    The thread "stopping", which runs :func:`_wait_for_signal`, ends the program. Python notifies that thread only of
    signals with a handler, so this handler must be installed even where it does nothing.

    Raises:
        SystemExit: At the first signal inside a :func:`graceful_shutdown` without ``ask``. With ``ask``, the thread
            "stopping" calls that function instead.
    """
    if _graceful_shutdowns and (closing := _graceful_shutdowns[-1]).ask is None and not closing.requested:
        closing.requested = True
        raise SystemExit(closing.code)


def _wait_for_signal(reading: int) -> None:
    has_timer = False
    with open(reading, "rb", buffering=0) as signals:
        while number := signals.read(1):
            if number[0] not in STOP_SIGNALS:
                continue
            if not _graceful_shutdowns:
                _notify_of_stop_request()
                _end_program(STOPPED_EXIT_CODE)
            closing = _graceful_shutdowns[-1]
            if closing.ask is not None and not closing.requested:
                closing.requested = True
                closing.ask()
            if not has_timer:
                has_timer = True
                threading.Thread(target=_end_program, args=(closing.code, closing), daemon=True).start()
                _notify_of_stop_request()  # may take long, because another thread ends the program in time


def _notify_of_stop_request() -> None:
    for notify in [*_stop_callbacks]:
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
    _program_is_ending.set()
    stderr = 2
    try:
        # Silence other threads from here on; this fails if the process has reached its limit of open files.
        with suppress(OSError):
            stderr = os.dup(2)
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for descriptor in (1, 2):
                os.dup2(nowhere, descriptor)
        # Copy the list first, because after the end of a child another thread may remove its entry.
        removals = list(_removal_callbacks)
        with suppress(Exception):
            _end_children()
        for remove in [*removals, *_removal_callbacks]:
            with suppress(Exception):  # the program ends in any case
                remove()
        cursor = _SHOW_CURSOR if os.isatty(stderr) else ""
        if closing is None or not closing.closed:
            os.write(stderr, f"{cursor}\n{make_exit_message()}\n".encode())
    finally:
        os._exit(code)


def make_exit_message() -> str:
    """Return the last message of a stopped program, with the command line that resumes the run, if one is set."""
    again = f"; to go on: {_resume_hints[0]()}" if _resume_hints else ""
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
