"""Which messages of the hospital link belong to which site, and so which objects it may pull, push and confirm.

Flower's object store hands any object to anybody who names it. Here a site may pull the objects of messages that were
handed to it, push the objects of replies that it announced, and confirm its own messages; nothing else. What is known
lies in a small database of its own beside Flower's, so that a site can go on after the SuperLink was killed.
"""

import sqlite3
import threading
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

ROOM_BYTES = 64 * 2**20
"""What a reply may weigh in any case, and beyond the bound otherwise."""
MOST_MESSAGES = 64
"""Messages of one site that are remembered in each direction. A site has one or two at a time."""

_TABLE = """CREATE TABLE IF NOT EXISTS messages (
    root TEXT PRIMARY KEY, node TEXT NOT NULL, run TEXT NOT NULL, is_reply INTEGER NOT NULL, size INTEGER NOT NULL,
    reply TEXT NOT NULL)"""


@dataclass
class _Message:
    """A message that was handed to a site, or a reply that a site announced.

    Attributes:
        names: Of all its objects; None until they are looked up after a restart.
        size: Bytes of the objects of a message that was handed to a site, or of those of a reply that have come.
        reply: The reply that was taken; empty where none was, and for replies.
    """

    node: int
    run: int
    is_reply: bool
    names: frozenset[str] | None
    size: int = 0
    reply: str = ""


class Owners:
    """Messages by site. Safe to use from several threads.

    Args:
        path: Of the database.
        tree_of: Looks up the names of all objects of a message by its own name; empty where it is gone.
    """

    def __init__(self, path: Path, tree_of: Callable[[str], Collection[str]]) -> None:
        self._tree_of, self._lock = tree_of, threading.RLock()
        self._sql = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        weakref.finalize(self, self._sql.close)
        self._sql.execute("PRAGMA journal_mode=WAL")
        self._sql.execute("PRAGMA synchronous=OFF")  # a killed process loses nothing; a lost machine loses messages too
        self._sql.execute(_TABLE)
        self._messages: dict[str, _Message] = {}
        self._of_site: dict[tuple[int, bool], dict[str, _Message]] = {}  # site and direction -> oldest message first
        rows = self._sql.execute("SELECT root, node, run, is_reply, size, reply FROM messages ORDER BY rowid")
        for root, node, run, is_reply, size, reply in rows:
            self._keep(str(root), _Message(int(node), int(run), bool(is_reply), None, int(size), str(reply)))

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            self._sql.close()

    def handed(self, node: int, run: int, root: str, names: Collection[str], size: int) -> None:
        """Note that a message was handed to a site; ``size`` are the bytes of its objects."""
        with self._lock:
            self._note(root, _Message(node, run, False, frozenset(names), size))

    def announced(self, node: int, run: int, request: str, root: str, names: Collection[str]) -> None:
        """Note that a site's reply to a message was taken."""
        with self._lock:
            self._messages[request].reply = root
            self._sql.execute("UPDATE messages SET reply = ? WHERE root = ?", (root, request))
            self._note(root, _Message(node, run, True, frozenset(names)))

    def owner_of(self, root: str) -> int | None:
        """The site that a message was handed to, or that announced it; None where no such message is known."""
        with self._lock:
            message = self._messages.get(root)
            return message.node if message else None

    def was_handed(self, node: int, root: str) -> bool:
        """Whether this message was handed to this site."""
        with self._lock:
            return root in self._of_site.get((node, False), {})

    def reply_to(self, request: str) -> str:
        """The reply that was taken to a message; empty where none was."""
        with self._lock:
            message = self._messages.get(request)
            return message.reply if message else ""

    def takes_part(self, node: int, run: int) -> bool:
        """Whether a message of this run was handed to this site."""
        with self._lock:
            return any(message.run == run for message in self._of_site.get((node, False), {}).values())

    def may_pull(self, node: int, name: str) -> bool:
        """Whether an object belongs to a message that was handed to this site."""
        return self._holds(node, False, name)

    def may_push(self, node: int, name: str) -> bool:
        """Whether an object belongs to a reply that this site announced."""
        return self._holds(node, True, name)

    def takes(self, node: int, name: str, size: int) -> bool:
        """Count an object of a reply; say whether the reply may weigh as much.

        A reply weighs no more than the largest message of the run that was handed to its site, twice, and some room:
        a masked update is as large as the model that came before it. The run holds each reply to a closer bound.
        """
        with self._lock:
            for reply in self._of_site.get((node, True), {}).values():
                if reply.names is not None and name in reply.names:
                    handed = self._of_site.get((node, False), {}).values()
                    largest = max((one.size for one in handed if one.run == reply.run), default=0)
                    reply.size += size
                    return reply.size <= 2 * largest + ROOM_BYTES
            return False

    def _holds(self, node: int, is_reply: bool, name: str) -> bool:
        with self._lock:
            newest_first = [*reversed(self._of_site.get((node, is_reply), {}).items())]
        # Not under the lock: to look names up waits for Flower's database, whose holder may wait for the lock.
        return any(name in self._names(root, message) for root, message in newest_first)

    def _names(self, root: str, message: _Message) -> frozenset[str]:
        if message.names is None:
            message.names = frozenset(self._tree_of(root))
        return message.names

    def _note(self, root: str, message: _Message) -> None:
        if root not in self._messages:
            row = root, str(message.node), str(message.run), int(message.is_reply), message.size, message.reply
            self._sql.execute("INSERT OR REPLACE INTO messages VALUES (?, ?, ?, ?, ?, ?)", row)
            self._keep(root, message)

    def _keep(self, root: str, message: _Message) -> None:
        of_site = self._of_site.setdefault((message.node, message.is_reply), {})
        self._messages[root] = of_site[root] = message
        while len(of_site) > MOST_MESSAGES:
            oldest = next(iter(of_site))
            del of_site[oldest], self._messages[oldest]
            self._sql.execute("DELETE FROM messages WHERE root = ?", (oldest,))
