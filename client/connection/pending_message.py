"""The message that a site is working on, on its disk: a killed process takes it up again when it comes back.

The coordinator keeps a message's content until the reply has arrived, so the message itself, a few hundred bytes, is
all that need be written; behind its SHA-256, for what a bad disk gives back would end every process that takes it up.
"""

import hashlib
from pathlib import Path

from common.system.files import is_disk_full, write_atomically

MAX_ATTEMPTS = 3
_DIGEST = hashlib.sha256().digest_size


class InHand:
    """One file: how often processes died at the work, and the message as the link received it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def take(self, received: bytes, attempts: int = 0) -> bool:
        """Note a message, and how often work on it was begun and not ended.

        Returns:
            Whether there was room; where there was none, a process that dies at the work does not take it up again.
        """
        content = bytes([attempts]) + received
        try:
            write_atomically(self._path, hashlib.sha256(content).digest() + content)
        except OSError as error:
            if not is_disk_full(error):
                raise
            self.done()
            return False
        return True

    def left(self) -> tuple[int, bytes] | None:
        """What an earlier process left: attempts so far, and the message; None where it left nothing that is whole."""
        try:
            written = self._path.read_bytes()
        except OSError:
            return None
        digest, content = written[:_DIGEST], written[_DIGEST:]
        if len(content) < 2 or hashlib.sha256(content).digest() != digest:
            return None
        return content[0], content[1:]

    def done(self) -> None:
        """Forget the message: it is answered, or nobody waits for it."""
        self._path.unlink(missing_ok=True)
