"""Messages between a run and its sites, and the objects that they are made of: whose they are, who may reach them.

A request goes to one site, once; the site answers it once. A site may pull the objects of requests that were handed to
it, push those of replies that it announced, and let go of its own requests; nothing else. Contents lie in files named
by their hash, and a file is removed with the last message that names it.
"""

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from common.wire.fleet_protocol import Envelope, ObjectTree, choose_small_objects, object_ids
from server.deployment.superlink.objects.files import ObjectFiles
from server.deployment.superlink.storage.arrivals import Arrivals
from server.deployment.superlink.storage.database import Database
from server.deployment.superlink.storage.runs import LedRuns
from server.deployment.superlink.storage.sites import Sites

ROOM_BYTES = 64 * 2**20
"""What a reply may weigh in any case, and beyond the bound otherwise."""
MOST_MESSAGES = 16
"""Messages of one site that are remembered in each direction once they are done; a site has one or two at a time."""


class Acceptance(Enum):
    """What became of a reply."""

    TAKEN = auto()
    ANOTHER_WAS_TAKEN = auto()
    NOBODY_WAITS = auto()


class Lack(Enum):
    """Why there is no reply, and will be none."""

    MESSAGE_GONE = auto()
    SITE_GONE = auto()


@dataclass(eq=False)
class StoredMessage:
    """A request to a site, or the reply of one.

    Attributes:
        root: Its name, the hash of its outermost object.
        partner: The reply that was taken to a request, empty where none was; the request that a reply answers.
        expires: When nobody waits for it any more, on the steady clock.
        envelope, tree: As they travel.
        handed: Whether a request was handed to its site.
        released: Whether its objects are no longer needed.
        withdrawn: Whether the run was told that there will be no reply.
        names: Of all its objects.
        size: Bytes of a request's objects when it was handed over, or of a reply's that have come.
    """

    root: str
    node: int
    run: int
    is_reply: bool
    partner: str
    expires: float
    envelope: bytes
    tree: bytes
    handed: bool = False
    released: bool = False
    withdrawn: bool = False
    names: frozenset[str] = frozenset()
    size: int = 0

    def __post_init__(self) -> None:
        self.names = frozenset(map(sys.intern, object_ids(ObjectTree.FromString(self.tree))))

    def is_due(self, *, again: bool) -> bool:
        """Whether a request is to be handed to its site: the first time, or ``again`` as long as it has no reply."""
        return not self.handed or (again and not self.partner and not self.released)

    @property
    def row(self) -> tuple[Any, ...]:
        """The message as a row of the database."""
        return (
            *(self.root, str(self.node), str(self.run), int(self.is_reply), self.partner, self.expires),
            *(self.envelope, self.tree, int(self.handed), int(self.released), int(self.withdrawn)),
        )


def request_from(proto: Any, tree: Any) -> StoredMessage:
    """A run's message to a site, as it was announced."""
    said = proto.metadata
    serialized = proto.SerializeToString(), tree.SerializeToString()
    return StoredMessage(
        said.message_id, said.dst_node_id, said.run_id, False, "", said.created_at + said.ttl, *serialized
    )


def reply_from(proto: Any, tree: Any) -> StoredMessage:
    """A site's reply, as it was announced; it expires with its request."""
    said = proto.metadata
    serialized = proto.SerializeToString(), tree.SerializeToString()
    return StoredMessage(
        said.message_id, said.src_node_id, said.run_id, True, said.reply_to_message_id, 0.0, *serialized
    )


_KEEP = "INSERT OR REPLACE INTO messages VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"


@dataclass
class Messages:
    """All messages. Safe to use from several threads.

    Args:
        clock: The steady clock.

    Attributes:
        arrivals: Wakes a site's call that waits for a message.
    """

    database: Database
    sites: Sites
    runs: LedRuns
    files: ObjectFiles
    clock: Callable[[], float]
    arrivals: Arrivals = field(default_factory=Arrivals)
    _by_root: dict[str, StoredMessage] = field(default_factory=dict)
    _of_site: dict[tuple[int, bool], dict[str, StoredMessage]] = field(default_factory=dict)
    _needed: Counter[str] = field(default_factory=Counter)  # object -> messages that are not released and name it

    def __post_init__(self) -> None:
        columns = "root, node, run, is_reply, partner, expires, envelope, tree, handed, released, withdrawn"
        for root, node, run, is_reply, partner, expires, envelope, tree, *flags in self.database.read(
            f"SELECT {columns} FROM messages ORDER BY rowid"
        ):
            owner = int(node), int(run), bool(is_reply)
            message = StoredMessage(root, *owner, partner, expires, envelope, tree)
            message.handed, message.released, message.withdrawn = map(bool, flags)
            self._remember(message)
        self.files.keep_only(self._needed)

    # ------------------------------------------------------------------ the run's side

    def push(self, requests: Sequence[StoredMessage]) -> tuple[list[str], list[str]]:
        """Take a run's requests; one to a site that is not registered is not taken.

        Returns:
            Names of the requests that were taken, and of their objects whose files are missing.
        """
        with self.database.lock:
            taken = [one for one in requests if self.sites.get(one.node)]
            new = [one for one in taken if one.root not in self._by_root]
            self.database.write(*((_KEEP, one.row) for one in new))
            for one in new:
                self._remember(one)
            missing = self._missing(taken)
        for one in new:
            self.arrivals.note(one.node)
        return [one.root for one in taken], missing

    def replies(self, run: int, roots: Collection[str]) -> Iterator[StoredMessage | tuple[str, Lack]]:
        """What has come of a run's requests: replies that were announced, or why there will be none.

        The same is said again until the run has let go of it.
        """
        for root in roots:
            asked = self._by_root.get(root)
            if asked is None or asked.run != run or asked.is_reply:
                yield root, Lack.MESSAGE_GONE
            elif reply := self._by_root.get(asked.partner):
                yield reply
            elif asked.expires <= self.clock():
                yield root, self._withdrawn(asked, Lack.MESSAGE_GONE)
            elif not self.sites.is_there(asked.node):
                yield root, self._withdrawn(asked, Lack.SITE_GONE)

    def end(self, run: int) -> None:
        """Release the requests of a run that is over; its replies stay until the next run has noted them."""
        with self.database.lock:
            self.runs.end(run)
            self._release([one for one in self._by_root.values() if one.run == run and not one.is_reply])

    def not_noted(self) -> list[StoredMessage]:
        """Return the replies to runs that are over of which nobody has let go, in the order in which they came."""
        with self.database.lock:
            replies = [one for one in self._by_root.values() if one.is_reply and not one.released]
            return [one for one in replies if not self.runs.goes_on(one.run)]

    def _withdrawn(self, asked: StoredMessage, lack: Lack) -> Lack:
        """Have nobody wait for a reply any more: the run was told that there is none."""
        with self.database.lock:
            if not asked.withdrawn:
                self.database.write(("UPDATE messages SET withdrawn = 1 WHERE root = ?", (asked.root,)))
                asked.withdrawn = True
        self.let_go(asked.root)
        return lack

    # ------------------------------------------------------------------ the site's side

    def next_for(self, node: int, *, again: bool = False) -> StoredMessage | None:
        """Hand a site its oldest request that it does not have yet.

        Args:
            again: Whether the site has said that it has no request: one that was handed out before and is not
                answered was lost on its way, and is handed out once more.
        """
        waiting = self._of_site.get((node, False))
        if not waiting or not any(one.is_due(again=again) for one in list(waiting.values())):
            return None  # without the lock: sites ask all the time
        with self.database.lock:
            for one in waiting.values():
                if one.is_due(again=again) and self._is_wanted(one):
                    self._hand(one)
                    return one
        return None

    def _hand(self, request: StoredMessage) -> None:
        if not request.handed:
            self.database.write(("UPDATE messages SET handed = 1 WHERE root = ?", (request.root,)))
            request.handed, request.size = True, sum(map(self.files.size, request.names))

    def small_contents(self, tree: Any) -> list[bytes]:
        """The contents of a request's small objects, as far as they are written."""
        sizes = [(name, self.files.size(name)) for name in dict.fromkeys(object_ids(tree))]
        contents = map(self.files.read, choose_small_objects(sizes))
        return [content for content in contents if content is not None]

    def answer(self, reply: StoredMessage) -> tuple[Acceptance, list[str]]:
        """Take a site's reply, or the same one again.

        Returns:
            What became of it, and the names of its objects whose files are missing.
        """
        with self.database.lock:
            asked, known = self._by_root.get(reply.partner), self._by_root.get(reply.root)
            if known is not None and (known.node, known.partner) != (reply.node, reply.partner):
                return Acceptance.ANOTHER_WAS_TAKEN, []
            if asked is not None and asked.partner not in ("", reply.root):
                return Acceptance.ANOTHER_WAS_TAKEN, []
            if known is not None:
                return Acceptance.TAKEN, [] if known.released else self._missing([known])
            if asked is None or asked.run != reply.run or not self._is_wanted(asked):
                return Acceptance.NOBODY_WAITS, []
            reply.expires = asked.expires
            partner = ("UPDATE messages SET partner = ? WHERE root = ?", (reply.root, asked.root))
            self.database.write((_KEEP, reply.row), partner)
            asked.partner = reply.root
            self._remember(reply)
            return Acceptance.TAKEN, self._missing([reply])

    def let_go(self, root: str) -> None:
        """Release a message's objects."""
        with self.database.lock:
            if (one := self._by_root.get(root)) is not None:
                self._release([one])

    # ------------------------------------------------------------------ whose

    def owner_of(self, root: str) -> int | None:
        """The site that a message was handed to, or that announced it; None where no such message is known."""
        message = self._by_root.get(root)
        return message.node if message and (message.handed or message.is_reply) else None

    def was_handed(self, node: int, root: str) -> bool:
        """Whether this request was handed to this site."""
        message = self._by_root.get(root)
        return message is not None and message.handed and message.node == node

    def reply_to(self, root: str) -> str:
        """The reply that was taken to a request; empty where none was."""
        message = self._by_root.get(root)
        return "" if message is None or message.is_reply else message.partner

    def takes_part(self, node: int, run: int) -> bool:
        """Whether a request of this run was handed to this site."""
        return any(one.handed and one.run == run for one in self._of(node, is_reply=False))

    def may_pull(self, node: int, name: str) -> bool:
        """Whether an object belongs to a request that was handed to this site."""
        return any(one.handed and name in one.names for one in self._of(node, is_reply=False))

    def may_push(self, node: int, name: str) -> bool:
        """Whether an object belongs to a reply that this site announced."""
        return any(name in one.names for one in self._of(node, is_reply=True))

    def is_late(self, node: int, name: str) -> bool:
        """Whether the time of every reply of this site that an object belongs to is over."""
        now = self.clock()
        return all(one.expires <= now for one in self._of(node, is_reply=True) if name in one.names)

    def needs(self, name: str) -> bool:
        """Whether an object belongs to any message that is not released."""
        return name in self._needed

    def takes(self, node: int, name: str, size: int) -> bool:
        """Count an object of a reply; say whether the reply may weigh as much.

        A reply weighs no more than the largest request of the run that was handed to its site, twice, and some room:
        a masked update is as large as the model that came before it. The run holds each reply to a closer bound.
        """
        with self.database.lock:
            for reply in self._of(node, is_reply=True):
                if name in reply.names:
                    handed = [one.size for one in self._of(node, is_reply=False) if one.run == reply.run]
                    reply.size += size
                    return reply.size <= 2 * max(handed, default=0) + ROOM_BYTES
            return False

    def keep(self, name: str, content: bytes | memoryview) -> bool:
        """Write an object that some message still names; return False where none does."""
        self.files.write(name, content)
        with self.database.lock:
            if self.needs(name):
                return True
            self.files.remove(name)
            return False

    # ------------------------------------------------------------------ inside

    def _of(self, node: int, *, is_reply: bool) -> list[StoredMessage]:
        """The messages of a site, newest first."""
        return list(self._of_site.get((node, is_reply), {}).values())[::-1]

    def _is_wanted(self, request: StoredMessage) -> bool:
        return not request.withdrawn and request.expires > self.clock() and self.runs.goes_on(request.run)

    def _missing(self, messages: Iterable[StoredMessage]) -> list[str]:
        names = dict.fromkeys(name for one in messages for name in object_ids(ObjectTree.FromString(one.tree)))
        return [name for name in names if not self.files.has(name)]

    def _remember(self, message: StoredMessage) -> None:
        of_site = self._of_site.setdefault((message.node, message.is_reply), {})
        self._by_root[message.root] = of_site[message.root] = message
        if not message.released:
            self._needed.update(message.names)
        old = [one for one in of_site.values() if one.released or one.expires <= self.clock()]
        self._forget(old[: max(0, len(of_site) - MOST_MESSAGES)])

    def _forget(self, messages: Sequence[StoredMessage]) -> None:
        if messages:
            self._release(messages)
            self.database.write(*(("DELETE FROM messages WHERE root = ?", (one.root,)) for one in messages))
        for one in messages:
            self._by_root.pop(one.root, None)
            self._of_site[one.node, one.is_reply].pop(one.root, None)

    def _release(self, messages: Sequence[StoredMessage]) -> None:
        """Remove the files of objects that no other message needs."""
        those = [one for one in messages if not one.released]
        if those:
            self.database.write(*(("UPDATE messages SET released = 1 WHERE root = ?", (one.root,)) for one in those))
        for one in those:
            one.released = True
            for name in one.names:
                self._needed[name] -= 1
                if self._needed[name] <= 0:
                    del self._needed[name]
                    self.files.remove(name)


def told(found: StoredMessage) -> tuple[Any, Any]:
    """A stored message's envelope and tree."""
    return Envelope.FromString(found.envelope), ObjectTree.FromString(found.tree)
