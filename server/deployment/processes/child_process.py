"""Processes that we start and that must not outlive us, however we end."""

import ctypes
import os
import signal
from collections.abc import Callable

_SET_PDEATHSIG = 1  # of linux/prctl.h
_C = ctypes.CDLL(None, use_errno=True)


def with_this_process() -> Callable[[], None]:
    """For ``preexec_fn``: Linux sends the child SIGKILL once the thread that started it is gone."""
    parent = os.getpid()

    def tie() -> None:
        if _C.prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
        if os.getppid() != parent:  # it was gone before we asked
            os._exit(1)

    return tie
