"""The message that a site works on, and messages that were put aside because they ended its program."""

import base64
import datetime as dt
import hashlib
import json
import threading
from pathlib import Path

from polyclinic.common.system.files import is_disk_full, write_atomically
from polyclinic.common.system.plain_names import HashName, join_plain_name

MOST_SET_ASIDE = 20
"""Number of messages that are kept in the folder ``set-aside``, the latest ones."""
MOST_BYTES_SET_ASIDE = 64 * 2**10
"""Bytes of a message that are kept there; without its content, an ordinary one has a few hundred."""


class PendingMessage:
    """The file with the message that a site is working on, so that after a kill the next process resumes the work.

    The file holds a few hundred bytes, because the coordinator keeps the message's content until the reply has arrived.
    It begins with a SHA-256, because a damaged message would end every process that resumes the work.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()  # a stop on request is written by another thread
        self._begun: tuple[bytes, int] | None = None  # the message at work, and the deaths at it before this process

    def begin_work(self, received: bytes, attempts: int) -> bool:
        """Store a received message before the work on it; if this process dies, the death counts against the message.

        Args:
            attempts: Number of earlier processes that died while they worked on the message.

        Returns:
            False if the disk is full; then no later process can resume the work.
        """
        with self._lock:
            self._begun = received, attempts
            return self._write(received, attempts + 1)

    def count_no_death(self) -> None:
        """Store that the work on the present message does not end by a death, because a stop was requested.

        The process may end in the middle of a computation. Two stops in one long request would otherwise put aside a
        message at which nothing is wrong.
        """
        with self._lock:
            if self._begun is not None:
                self._write(*self._begun)

    def store_message(self, received: bytes, attempts: int = 0) -> bool:
        """Store a received message, and the number of processes that died while they worked on it.

        Returns:
            False if the disk is full; then no later process can resume the work.
        """
        with self._lock:
            self._begun = None
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
        """Return the number of processes that died on the stored message, and the message; None without intact file."""
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
        """Remove the stored message, because it is answered or its run has ended."""
        with self._lock:
            self._begun = None
            self._path.unlink(missing_ok=True)


class SetAsideMessages:
    """The folder ``set-aside`` of messages that ended the program, each a JSON file with the reason.

    No later process works on such a message, also not if the coordinator sends it again. A file may be sent to the
    developers; it holds no content of the message, only what announced it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def set_message_aside(self, message_id: str, received: bytes, reason: str) -> None:
        """Store a message with the reason, and remove the oldest ones beyond :data:`MOST_SET_ASIDE`."""
        content = {
            "time": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            "reason": reason,
            "bytes": len(received),
            "sha256": hashlib.sha256(received).hexdigest(),
            "message": base64.b64encode(received[:MOST_BYTES_SET_ASIDE]).decode(),
        }
        write_atomically(self._path(message_id), json.dumps(content, indent=1).encode(), private=True)
        oldest_first = sorted(self._folder.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
        for old in oldest_first[:-MOST_SET_ASIDE]:
            old.unlink(missing_ok=True)

    def is_set_aside(self, message_id: str) -> bool:
        """Return True if the message with this id was put aside before."""
        return self._path(message_id).exists()

    def _path(self, message_id: str) -> Path:
        # The id may be any text: the coordinator chooses it.
        name = HashName(hashlib.sha256(message_id.encode()).hexdigest())
        return join_plain_name(self._folder, name, ".json")
