"""Processes that we start and that must not outlive us, however we end."""

import os
from collections.abc import Callable
from functools import partial

from common.system.stopping import end_with_parent


def with_this_process() -> Callable[[], None]:
    """For ``preexec_fn``: Linux sends the child SIGKILL once the thread that started it is gone."""
    return partial(end_with_parent, os.getpid())
