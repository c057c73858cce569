"""Programs of ours that we start and that must not outlive us, however we end."""

import os

from common.system.stopping import STARTER


def with_this_process() -> dict[str, str]:
    """The ``env`` of a program that calls :func:`common.system.stopping.end_with_starter`.

    Linux sends it SIGKILL once the thread that started it is gone. Python's ``preexec_fn`` is no way to that: it
    makes gRPC's fork handlers run in the child, and of a process that has used gRPC one child in twenty was aborted.
    """
    return {**os.environ, STARTER: str(os.getpid())}
