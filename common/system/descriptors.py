"""How many files and connections a process of ours may have open: as many as the system lets it."""

import resource
import sys


def raise_descriptor_limit() -> int:
    """Raise the soft limit of open files to the hard one, which needs no rights.

    Returns:
        The limit; ``sys.maxsize`` where there is none.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):  # macOS sets less than it names
        hard, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if hard == resource.RLIM_INFINITY else hard
