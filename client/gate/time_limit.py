"""Work that takes too long is stopped by the site itself, wherever the main thread is in it."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class OutOfTime(BaseException):
    """The time for one request is over; like a signal to stop, no handler of errors on the way takes it."""


@contextmanager
def at_most(seconds: float | None) -> Iterator[None]:
    """Interrupt what happens inside after so many seconds; no limit where None, or outside the main thread.

    Only the main thread of a process can be interrupted; there a hospital's program does all its work.

    Raises:
        OutOfTime: From wherever the work is.
    """
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    began, (left, _) = time.monotonic(), signal.getitimer(signal.ITIMER_REAL)
    before = signal.signal(signal.SIGALRM, _over)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left:  # somebody else's alarm goes on
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - began), 1e-3))


def _over(number: int, frame: object) -> None:
    raise OutOfTime
