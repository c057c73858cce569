"""Processes that we start and that must not outlive us, however we end."""

import os
from collections.abc import Callable

from common.system.stopping import end_with_parent


def with_this_process() -> Callable[[], None]:
    """For ``preexec_fn``: Linux sends the child SIGKILL once the thread that started it is gone."""
    parent = os.getpid()

    def tie() -> None:
        end_with_parent()
        if os.getppid() != parent:  # it was gone before we asked
            os._exit(1)

    return tie
