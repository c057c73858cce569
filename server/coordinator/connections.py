"""Who is connected, as ``flwr-server start`` sees it, and who signed off, in files that anyone may read."""

import datetime as dt
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path

from common.system.files import write_atomically

FILE = "connections.json"
SIGNED_OFF = "signed-off.json"
"""Written by the SuperLink, which a site tells that it leaves; a site that is lost tells nobody."""
_one_at_a_time = threading.Lock()


def note_connections(state: Path, online: Mapping[str, bool]) -> None:
    """Write ``state/connections.json``."""
    facts = {"pid": os.getpid(), "online": dict(online)}
    write_atomically(state / FILE, json.dumps(facts).encode(), durable=False)


def read_connections(state: Path) -> dict[str, bool] | None:
    """Site -> whether it is connected; None where ``flwr-server start`` does not run."""
    try:
        facts = json.loads((state / FILE).read_text(encoding="utf-8"))
        running = Path(f"/proc/{facts['pid']}").exists()
        return {str(name): bool(online) for name, online in facts["online"].items()} if running else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def note_sign_off(state: Path, site: str) -> None:
    """Note that a site says now that it leaves: its operator stops it, or it ends because a run refused it."""
    with _one_at_a_time:
        when = dt.datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        _write_sign_offs(state, {**read_sign_offs(state), site: when})


def forget_sign_off(state: Path, site: str) -> None:
    """Note that a site is here again."""
    with _one_at_a_time:
        if site in (known := read_sign_offs(state)):
            _write_sign_offs(state, {name: when for name, when in known.items() if name != site})


def read_sign_offs(state: Path) -> dict[str, str]:
    """Site -> local date, time and zone at which it said that it leaves; the others are connected, or were lost."""
    try:
        found = json.loads((state / SIGNED_OFF).read_text(encoding="utf-8"))
        return {str(name): str(when) for name, when in found.items()}
    except (OSError, ValueError, AttributeError):
        return {}


def _write_sign_offs(state: Path, found: Mapping[str, str]) -> None:
    write_atomically(state / SIGNED_OFF, json.dumps(found).encode(), durable=False)
