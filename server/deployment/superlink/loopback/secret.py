"""Who may call on 127.0.0.1: only who can read the coordinator's ``state`` folder.

Any account of the machine can connect there. Our programs send a secret with every call, in a header inside TLS; the
SuperLink compares it before it reads a request.
"""

import hashlib
import hmac
from pathlib import Path
from typing import Any

from server.coordinator.folder import Coordinator

SECRET = "executor.secret"
"""In the coordinator's ``state``."""
HEADER = "polyclinic-secret"
REFUSED = "this port answers only who can read the coordinator's folder"
_PURPOSE = b"polyclinic: calls on loopback"


def secret_file(coordinator: Coordinator) -> Path:
    """Return the file of the secret that a caller on loopback must have."""
    return coordinator.state / SECRET


def secret_of(path: Path) -> str:
    """What calls carry: made from the secret for one purpose, so that the secret itself is sent nowhere.

    Raises:
        OSError: If this account cannot read the file.
    """
    return hmac.new(path.read_bytes(), _PURPOSE, hashlib.sha256).hexdigest()


def knows(metadata: Any, secret: str) -> bool:
    """Whether the headers of a call hold the secret, once."""
    given = [value for name, value in metadata or () if name == HEADER]
    return len(given) == 1 and isinstance(given[0], str) and hmac.compare_digest(given[0].encode(), secret.encode())
