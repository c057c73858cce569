"""Who is connected, as ``flwr-server start`` sees it, in a file: for anyone who looks without asking the SuperLink."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from common.system.files import write_atomically

FILE = "connections.json"


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
