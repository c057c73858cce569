"""One clock for the SuperLink and the runs on it, which setting the machine's clock does not move.

By it the SuperLink says when a message's time is over and whether a site still lives; on a clock that is set an hour
on, all of them would have been silent for an hour. Signatures of calls keep the machine's own clock.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path

from common.system.files import write_atomically

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def clock(file: Path) -> Callable[[], float]:
    """Unix time by the time since the machine's start, counted from what its clock said when ``file`` was written."""
    offset = _kept(file)
    if offset is None:
        offset = time.time() - _since_start()
        content = {"boot": _boot(), "offset_s": offset}
        write_atomically(file, json.dumps(content).encode())
    return lambda: offset + _since_start()


def _kept(file: Path) -> float | None:
    """What was written since the machine's start."""
    try:
        kept = json.loads(file.read_bytes())
        return float(kept["offset_s"]) if kept["boot"] == _boot() else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _since_start() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _boot() -> str:
    return _BOOT.read_text(encoding="ascii").strip()
