"""One clock for the SuperLink and the runs on it, which setting the machine's clock does not move.

By it Flower says when a message's time is over and whether a site or a run still lives; on a clock that is set an hour
on, all of them would have been silent for an hour. Signatures of calls keep the machine's own clock.
"""

import datetime as dt
import importlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from common.system.files import write_atomically

OF_THE_SUPERLINK = (
    "flwr.server.superlink.linkstate.sql_linkstate",
    "flwr.server.superlink.linkstate.utils",
    "flwr.server.utils.validator",
    "flwr.supercore.corestate.sql_corestate",
    "flwr.supercore.corestate.utils",
    "flwr.supercore.routers.runtime.responses",
)
OF_A_RUN = ("flwr.app.message.message", "flwr.superlink.grid.http_grid")
"""Flower's modules that ask for the time under the name ``now``."""

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def set_steady(modules: Sequence[str], file: Path) -> None:
    """Have these modules of Flower go by the clock that ``file`` keeps."""
    now = clock(file)
    for name in modules:
        module = vars(importlib.import_module(name))
        assert "now" in module, name
        module["now"] = now


def clock(file: Path) -> Callable[[], dt.datetime]:
    """The time since the machine's start, counted from what its clock said when ``file`` was written."""
    offset = _kept(file)
    if offset is None:
        offset = time.time() - _since_start()
        content = {"boot": _boot(), "offset_s": offset}
        write_atomically(file, json.dumps(content).encode())
    return lambda: dt.datetime.fromtimestamp(offset + _since_start(), tz=dt.UTC)


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
