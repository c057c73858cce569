"""glibc's malloc for processes that move models: buffers of megabytes are kept and used again.

By default each is asked from the kernel and given back, page by page zeroed every time: a good part of the processor
time of a large model's way. The price is that a process keeps what it once
needed, up to ``KEPT_BYTES`` beyond what it uses.
"""

import ctypes
import sys

KEPT_BYTES = 2**30
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8  # of <malloc.h>

LARGE_BUFFERS = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(KEPT_BYTES),
    "MALLOC_ARENA_MAX": "1",
}
"""The same for a process that is started: glibc reads these once, at its start."""


def keep_large_buffers() -> None:
    """Set it for this process, before it has threads; nothing where the C library is another."""
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, KEPT_BYTES), (_ARENA_MAX, 1)):
            mallopt(option, value)


def give_back() -> None:
    """Give the memory that nobody uses back to the kernel, also what :data:`KEPT_BYTES` would keep."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
