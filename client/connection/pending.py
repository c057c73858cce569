"""The file with the message that a site works on, and the folder of messages that made its program end."""

import base64
import datetime as dt
import hashlib
import json
import threading
from pathlib import Path

from polyclinic.common.system.files import is_disk_full, write_atomically
from polyclinic.common.system.plain_names import HashName, join_plain_name

MAX_SET_ASIDE_MESSAGES = 20
"""Maximum number of messages in the folder ``set-aside``; the oldest are deleted."""
MAX_STORED_MESSAGE_BYTES = 64 * 2**10
"""Maximum number of bytes stored of a message; without its content, an ordinary message has a few hundred."""


class PendingMessage:
    """The file with the message that a site works on, so that the next process resumes the work after a kill.

    The file holds a few hundred bytes, because the coordinator keeps the message's content until the reply has arrived.
    It begins with a SHA-256, because a damaged message would end every process that resumes the work.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()  # another thread writes a stop on request
        # The message at work, and the number of earlier processes that died while they worked on it.
        self._current: tuple[bytes, int] | None = None

    def begin_work(self, received: bytes, attempts: int) -> bool:
        """Store a received message before the work on it starts; its number of deaths already counts this process.

        Args:
            attempts: Number of earlier processes that died while they worked on the message.

        Returns:
            False if the disk is full; then no later process can resume the work.
        """
        with self._lock:
            self._current = received, attempts
            return self._write(received, attempts + 1)

    def undo_death_count(self) -> None:
        """Undo the count of this process's death, because the process ends by a requested stop.

        The process may end in the middle of a computation. Without this, two stops during one long request would set
        aside a message that has no fault.
        """
        with self._lock:
            if self._current is not None:
                self._write(*self._current)

    def store_message(self, received: bytes, attempts: int = 0) -> bool:
        """Store a received message with the number of processes that died while they worked on it.

        Returns:
            False if the disk is full; then no later process can resume the work.
        """
        with self._lock:
            self._current = None
            return self._write(received, attempts)

    def _write(self, received: bytes, attempts: int) -> bool:
        content = bytes([attempts]) + received
        try:
            write_atomically(self._path, hashlib.sha256(content).digest() + content)
        except OSError as error:
            if not is_disk_full(error):
                raise
            self._path.unlink(missing_ok=True)
            return False
        return True

    def read_message(self) -> tuple[int, bytes] | None:
        """Return the number of deaths at the stored message, and the message; None without an intact file."""
        try:
            data = self._path.read_bytes()
        except OSError:
            return None
        size = hashlib.sha256().digest_size
        digest = data[:size]
        content = data[size:]
        if len(content) < 2 or hashlib.sha256(content).digest() != digest:
            return None
        return content[0], content[1:]

    def remove_message(self) -> None:
        """Remove the stored message after it was answered or its run has ended."""
        with self._lock:
            self._current = None
            self._path.unlink(missing_ok=True)


class SetAsideMessages:
    """The folder ``set-aside`` with a JSON file for each message that made the program end.

    No later process works on such a message, not even if the coordinator sends it again. A file may be sent to the
    developers: it has the message's metadata and the reason, without the message's content.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def set_message_aside(self, message_id: str, received: bytes, reason: str) -> None:
        """Store a message with the reason, and remove the oldest ones beyond :data:`MAX_SET_ASIDE_MESSAGES`."""
        content = {
            "time": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            "reason": reason,
            "bytes": len(received),
            "sha256": hashlib.sha256(received).hexdigest(),
            "message": base64.b64encode(received[:MAX_STORED_MESSAGE_BYTES]).decode(),
        }
        write_atomically(self._path(message_id), json.dumps(content, indent=1).encode(), private=True)
        oldest_first = sorted(self._folder.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
        for old in oldest_first[:-MAX_SET_ASIDE_MESSAGES]:
            old.unlink(missing_ok=True)

    def is_set_aside(self, message_id: str) -> bool:
        """Return True if the message with this id was set aside before."""
        return self._path(message_id).exists()

    def _path(self, message_id: str) -> Path:
        # The id may be any text: the coordinator chooses it.
        name = HashName(hashlib.sha256(message_id.encode()).hexdigest())
        return join_plain_name(self._folder, name, ".json")
