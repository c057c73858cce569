"""Memory and open files of our processes: memory limits, reuse of large buffers, garbage collection, descriptors.

By default glibc's malloc requests each large buffer from the kernel and returns it after use, which costs much CPU time
with a large model. A process that reuses its buffers occupies up to ``MAX_KEPT_BUFFER_BYTES`` more memory than it uses.
"""

import ctypes
import gc
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MAX_KEPT_BUFFER_BYTES = 2**30
LARGE_MODEL_BYTES = 2**27
"""Size of a model from which free buffers are returned to the kernel; unused buffers of several models would fill
memory.
"""
READING_THREADS = min(8, os.cpu_count() or 1)
"""Number of threads that read or decode picture files."""
_CONTROL_GROUPS = Path("/sys/fs/cgroup")
# Options of mallopt, from <malloc.h>.
_TRIM_THRESHOLD = -1
_MMAP_MAX = -4
_ARENA_MAX = -8

BUFFER_REUSE_ENVIRONMENT = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(MAX_KEPT_BUFFER_BYTES),
    "MALLOC_ARENA_MAX": "1",
}
"""Environment variables of a process that reuses large buffers; glibc reads them when a process starts."""


def measure_physical_memory() -> int:
    """Return the size of the machine's memory, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def read_container_memory_limit() -> int:
    """Return the memory limit of this process's control groups (cgroups, version 1 or 2), in bytes; 2^62 for no limit.

    Containers, systemd services and ``systemd-run -p MemoryMax=...`` set such limits.
    """
    limits = [2**62]
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            root = _CONTROL_GROUPS / "memory" if controllers else _CONTROL_GROUPS
            folder = root / group.strip("/")
            for place in (folder, *folder.parents):
                with suppress(OSError, ValueError):  # no such file in this container, or "max"
                    name = "memory.limit_in_bytes" if controllers else "memory.max"
                    limits.append(int((place / name).read_text(encoding="ascii")))
                if place == root:
                    break
    return min(limits)


def reuse_large_buffers() -> None:
    """Let malloc reuse large buffers in this process; call this before threads start. Only glibc supports this."""
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, MAX_KEPT_BUFFER_BYTES), (_ARENA_MAX, 1)):
            mallopt(option, value)


def release_free_memory() -> None:
    """Return all unused memory of this process to the kernel."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def release_free_memory_of_large_model(model_bytes: int) -> None:
    """Return unused memory to the kernel if the model has at least :data:`LARGE_MODEL_BYTES`; else keep it for reuse.

    Requesting it again takes some milliseconds per 100 MB, which is little compared with training such a model.
    """
    if model_bytes >= LARGE_MODEL_BYTES:
        release_free_memory()


@contextmanager
def exclude_imports_from_gc() -> Iterator[None]:
    """Exclude objects that imports create inside the ``with`` block from garbage collection.

    The import of torch creates some hundred thousand objects that live as long as the process. Checking them again and
    again takes a fifth of the CPU time of a small run.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if not gc.get_freeze_count():  # a second freeze would also keep all objects created since the first
            gc.freeze()


def raise_descriptor_limit() -> int:
    """Raise this process's soft limit of open files to the hard limit.

    Returns:
        The new limit; ``sys.maxsize`` for no limit.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):  # macOS does not allow the hard limit that it reports
        hard, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if hard == resource.RLIM_INFINITY else hard
