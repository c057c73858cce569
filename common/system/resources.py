"""Memory and open files of our programs: large buffers are kept, imported modules are not garbage collected.

By default glibc's malloc asks the kernel for each buffer of megabytes and gives it back, page by page zeroed every
time: a good part of the processor time of a large model's way. The price is that a process keeps what it once needed,
up to ``KEPT_BYTES`` beyond what it uses.
"""

import ctypes
import gc
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

KEPT_BYTES = 2**30
_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8  # of <malloc.h>

LARGE_BUFFERS = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(KEPT_BYTES),
    "MALLOC_ARENA_MAX": "1",
}
"""The same for a process that is started: glibc reads these once, at its start."""


def physical_memory() -> int:
    """Return the bytes of the machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def container_limit() -> int:
    """Return the bytes of memory that this container may use; of none, more than any machine has."""
    try:
        return int(_CONTAINER_LIMIT.read_text(encoding="ascii"))
    except (OSError, ValueError):  # no container, or "max"
        return 2**62


def keep_large_buffers() -> None:
    """Set it for this process, before it has threads; nothing where the C library is another."""
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, KEPT_BYTES), (_ARENA_MAX, 1)):
            mallopt(option, value)


def release_free_memory() -> None:
    """Give the memory that nobody uses back to the kernel, also what :data:`KEPT_BYTES` would keep."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@contextmanager
def uncollected_imports() -> Iterator[None]:
    """Within it a program imports what it works with; the garbage collector rests, and leaves that alone afterwards.

    Torch alone makes some hundred thousand objects that live as long as the process. To look through them again and
    again, and once more at the end, is a fifth of the CPU seconds of a small run. What is made later is collected as
    often as ever.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if not gc.get_freeze_count():  # else what else has been made since would be kept too
            gc.freeze()


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
