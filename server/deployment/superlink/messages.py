"""Storage of the messages between a run and its sites, and the rules by which a site may access a message.

A request goes to one site, and the site answers it once. A site may only pull objects of requests that were handed to
it, push objects of replies that it announced, and release its own requests. Objects are files named by their hash; a
file is removed with the last message that needs it.
"""

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Any

from polyclinic.common.wire.fleet_protocol import Envelope, ObjectTree, choose_small_objects, list_tree_object_ids
from polyclinic.server.deployment.superlink.database import SuperLinkDatabase
from polyclinic.server.deployment.superlink.object_store import ObjectFileStore
from polyclinic.server.deployment.superlink.registrations import RunRegistry, SiteRegistry

SPARE_REPLY_BYTES = 64 * 2**20
"""Bytes that a reply may have beyond twice the size of its request."""
MAX_FINISHED_MESSAGES = 16
"""Finished messages of one site that are stored in each direction; a site has one or two messages at a time."""
_COLUMNS = "root, node, run, is_reply, partner, expires, envelope, tree, handed, released, withdrawn"
_STORE_STATEMENT = f"INSERT OR REPLACE INTO messages ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"


class ReplyAcceptance(Enum):
    """The answer to a site that announces a reply: accepted, or the reason for the rejection."""

    ACCEPTED = auto()
    ANOTHER_WAS_ACCEPTED = auto()
    NOBODY_WAITS = auto()


class NoReplyReason(Enum):
    """The reason why a request will never get a reply."""

    MESSAGE_GONE = auto()
    SITE_GONE = auto()


def parse_message_envelope(envelope: bytes, tree: bytes) -> tuple[Any, Any]:
    """Parse a serialized message: its envelope (metadata) and the tree of its object ids."""
    return Envelope.FromString(envelope), ObjectTree.FromString(tree)


@dataclass(eq=False)
class StoredMessage:
    """A request to a site or a site's reply, as stored by the SuperLink.

    Attributes:
        root: Id of the message, the hash of its outermost object.
        partner: For a request, the id of the accepted reply or empty text; for a reply, the id of its request.
        expires: Time on the steady clock after which the run no longer waits for the message.
        envelope: Serialized metadata.
        tree: Serialized tree of object ids.
        handed: True once the request was handed out to its site.
        released: True once the message no longer needs its objects.
        withdrawn: True once the run has learned that the request will get no reply.
        object_ids: Ids of all objects of the message.
        size: For a request, bytes of its objects when it was handed out; for a reply, bytes received so far.
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
    object_ids: frozenset[str] = frozenset()
    size: int = 0

    def __post_init__(self) -> None:
        self.object_ids = frozenset(map(sys.intern, list_tree_object_ids(ObjectTree.FromString(self.tree))))

    @classmethod
    def from_request(cls, proto: Any, tree: Any) -> "StoredMessage":
        """Make a request from its envelope (``proto``) and its tree of object ids, as announced by a run."""
        metadata = proto.metadata
        return cls(
            root=metadata.message_id,
            node=metadata.dst_node_id,
            run=metadata.run_id,
            is_reply=False,
            partner="",
            expires=metadata.created_at + metadata.ttl,
            envelope=proto.SerializeToString(),
            tree=tree.SerializeToString(),
        )

    @classmethod
    def from_reply(cls, proto: Any, tree: Any) -> "StoredMessage":
        """Make a reply from its envelope (``proto``) and its tree of object ids, as announced by a site."""
        metadata = proto.metadata
        return cls(
            root=metadata.message_id,
            node=metadata.src_node_id,
            run=metadata.run_id,
            is_reply=True,
            partner=metadata.reply_to_message_id,
            expires=0.0,  # accept_reply copies the time of the request
            envelope=proto.SerializeToString(),
            tree=tree.SerializeToString(),
        )

    def is_due_for_delivery(self, *, again: bool) -> bool:
        """Return True for a request that was not handed out to its site yet.

        Args:
            again: True to deliver again a request without a reply whose objects are still needed.
        """
        return not self.handed or (again and not self.partner and not self.released)

    @property
    def database_row(self) -> tuple[Any, ...]:
        """The message's values in the order of the database columns."""
        return (
            *(self.root, str(self.node), str(self.run), int(self.is_reply), self.partner, self.expires),
            *(self.envelope, self.tree, int(self.handed), int(self.released), int(self.withdrawn)),
        )


@dataclass(eq=False)
class _ArrivalCount:
    """The number of messages that have arrived for one site, and a condition variable to wait for the next."""

    number: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)


class MessageArrivalSignal:
    """Lets calls wait for a site's next message. Safe to use from several threads."""

    def __init__(self) -> None:
        self._counts: dict[int, _ArrivalCount] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def count_arrived_messages(self, node: int) -> int:
        """Return the number of messages that have arrived for a site, to be passed to :meth:`wait_for_message`."""
        return self._get_arrival_counter(node).number

    def wait_for_message(self, node: int, number: int, seconds: float) -> None:
        """Wait until a site's count of messages exceeds ``number``, :meth:`close` is called, or the time is over."""
        count = self._get_arrival_counter(node)
        with count.changed:
            count.changed.wait_for(lambda: count.number > number or self._is_closed, seconds)

    def record_message_arrival(self, node: int) -> None:
        """Record that a message has arrived for a site, and wake the calls that wait for the message."""
        count = self._get_arrival_counter(node)
        with count.changed:
            count.number += 1
            count.changed.notify_all()

    def close(self) -> None:
        """Wake all waiting calls, because the process ends."""
        self._is_closed = True
        for count in list(self._counts.values()):
            with count.changed:
                count.changed.notify_all()

    def _get_arrival_counter(self, node: int) -> _ArrivalCount:
        with self._lock:
            return self._counts.setdefault(node, _ArrivalCount())


@dataclass
class MessageStore:
    """Stores the messages between runs and sites. Safe to use from several threads.

    Args:
        clock: Returns the time on the steady clock that SuperLink and runs share.

    Attributes:
        arrivals: Wakes the calls of sites that wait for a message.
    """

    database: SuperLinkDatabase
    sites: SiteRegistry
    runs: RunRegistry
    files: ObjectFileStore
    clock: Callable[[], float]
    arrivals: MessageArrivalSignal = field(default_factory=MessageArrivalSignal)
    _by_root: dict[str, StoredMessage] = field(default_factory=dict)
    _by_site: dict[tuple[int, bool], dict[str, StoredMessage]] = field(default_factory=dict)
    _need_counts: Counter[str] = field(default_factory=Counter)  # object id -> number of messages that need the object

    def __post_init__(self) -> None:
        for root, node, run, is_reply, partner, expires, envelope, tree, *flags in self.database.query_rows(
            f"SELECT {_COLUMNS} FROM messages ORDER BY rowid"
        ):
            owner = int(node), int(run), bool(is_reply)
            message = StoredMessage(root, *owner, partner, expires, envelope, tree)
            message.handed, message.released, message.withdrawn = map(bool, flags)
            self._add_message_to_memory(message)
        self.files.remove_unneeded_objects(self._need_counts)

    # ------------------------------------------------------------------ the run's side

    def store_requests(self, requests: Sequence[StoredMessage]) -> tuple[list[str], list[str]]:
        """Store a run's requests, except those to sites that are not registered.

        Returns:
            Ids of the accepted requests; and ids of their objects whose files are missing.
        """
        with self.database.lock:
            accepted = [request for request in requests if self.sites.find_registered_site(request.node)]
            new = [request for request in accepted if request.root not in self._by_root]
            self.database.execute_in_transaction(*((_STORE_STATEMENT, request.database_row) for request in new))
            for request in new:
                self._add_message_to_memory(request)
            missing = self._list_missing_objects(accepted)
        for request in new:
            self.arrivals.record_message_arrival(request.node)
        return [request.root for request in accepted], missing

    def find_replies(self, run: int, roots: Collection[str]) -> Iterator[StoredMessage | tuple[str, NoReplyReason]]:
        """Yield for each request of a run its reply, or the request's id with the reason why no reply will come.

        Requests that still await a reply are skipped. A reply is yielded again on every call.

        Args:
            roots: Ids of the requests.
        """
        for root in roots:
            request = self._by_root.get(root)
            if request is None or request.run != run or request.is_reply:
                yield root, NoReplyReason.MESSAGE_GONE
            elif reply := self._by_root.get(request.partner):
                yield reply
            elif request.expires <= self.clock():
                yield root, self._withdraw_request(request, NoReplyReason.MESSAGE_GONE)
            elif not self.sites.is_site_connected(request.node):
                yield root, self._withdraw_request(request, NoReplyReason.SITE_GONE)

    def end_run(self, run: int) -> None:
        """End a run; remove the files of its requests, but keep its replies until a later run has recorded them."""
        with self.database.lock:
            self.runs.end_run(run)
            requests = (message for message in self._by_root.values() if not message.is_reply)
            self._release_and_remove_files([request for request in requests if request.run == run])

    def find_unrecorded_replies(self) -> list[StoredMessage]:
        """Return the replies to ended runs that no run has recorded yet, in the order of their arrival."""
        with self.database.lock:
            replies = [message for message in self._by_root.values() if message.is_reply and not message.released]
            return [reply for reply in replies if not self.runs.is_run_active(reply.run)]

    def find_runs_that_asked(self, nodes: Collection[int]) -> set[int]:
        """Return the numbers of the runs that have stored messages to or from these sites."""
        with self.database.lock:
            return {message.run for message in self._by_root.values() if message.node in nodes}

    def _withdraw_request(self, request: StoredMessage, reason: NoReplyReason) -> NoReplyReason:
        with self.database.lock:
            if not request.withdrawn:
                statement = "UPDATE messages SET withdrawn = 1 WHERE root = ?"
                self.database.execute_in_transaction((statement, (request.root,)))
                request.withdrawn = True
        self.release_message_objects(request.root)
        return reason

    # ------------------------------------------------------------------ the site's side

    def hand_out_next_request(self, node: int, *, again: bool = False) -> StoredMessage | None:
        """Return the oldest request that a site does not have yet, and mark it as handed out; None if there is none.

        Args:
            node: Node id of the site.
            again: True if the site has reported that it holds no request. Then a request that was handed out but not
                answered counts as lost on its way, and is returned again.
        """
        waiting = self._by_site.get((node, False))
        if not waiting or not any(request.is_due_for_delivery(again=again) for request in list(waiting.values())):
            return None  # without taking the lock, because sites call this all the time
        with self.database.lock:
            for request in waiting.values():
                if not request.is_due_for_delivery(again=again) or not self._is_reply_awaited(request):
                    continue
                if not request.handed:
                    statement = "UPDATE messages SET handed = 1 WHERE root = ?"
                    self.database.execute_in_transaction((statement, (request.root,)))
                    request.handed = True
                    request.size = sum(map(self.files.get_object_size, request.object_ids))
                return request
        return None

    def read_small_message_objects(self, tree: Any) -> list[bytes]:
        """Return the contents of a request's small objects, to be sent with it; skip objects without a file.

        Args:
            tree: Tree of the ids of the request's objects.
        """
        sizes = [(name, self.files.get_object_size(name)) for name in dict.fromkeys(list_tree_object_ids(tree))]
        contents = map(self.files.read_object, choose_small_objects(sizes))
        return [content for content in contents if content is not None]

    def accept_reply(self, reply: StoredMessage) -> tuple[ReplyAcceptance, list[str]]:
        """Store a reply that a site announces; a repeated announcement of the same reply is accepted again.

        Returns:
            The outcome, and the ids of the reply's objects whose files are missing.
        """
        with self.database.lock:
            request = self._by_root.get(reply.partner)
            earlier = self._by_root.get(reply.root)
            if earlier is not None and (earlier.node, earlier.partner) != (reply.node, reply.partner):
                return ReplyAcceptance.ANOTHER_WAS_ACCEPTED, []
            if request is not None and request.partner not in ("", reply.root):
                return ReplyAcceptance.ANOTHER_WAS_ACCEPTED, []
            if earlier is not None:
                return ReplyAcceptance.ACCEPTED, [] if earlier.released else self._list_missing_objects([earlier])
            if request is None or request.run != reply.run or not self._is_reply_awaited(request):
                return ReplyAcceptance.NOBODY_WAITS, []
            reply.expires = request.expires
            partner = ("UPDATE messages SET partner = ? WHERE root = ?", (reply.root, request.root))
            self.database.execute_in_transaction((_STORE_STATEMENT, reply.database_row), partner)
            request.partner = reply.root
            self._add_message_to_memory(reply)
            return ReplyAcceptance.ACCEPTED, self._list_missing_objects([reply])

    def release_message_objects(self, root: str) -> None:
        """Mark a message's objects as no longer needed for it; remove the files that no other message needs."""
        with self.database.lock:
            if (message := self._by_root.get(root)) is not None:
                self._release_and_remove_files([message])

    # ------------------------------------------------------------------ ownership

    def find_node_of_message(self, root: str) -> int | None:
        """Return the node id of the site that received or announced message ``root``; None if there is none."""
        message = self._by_root.get(root)
        return message.node if message and (message.handed or message.is_reply) else None

    def was_request_handed_out(self, node: int, root: str) -> bool:
        """Return whether the request with id ``root`` was handed to the site with node id ``node``."""
        message = self._by_root.get(root)
        return message is not None and message.handed and message.node == node

    def find_accepted_reply_id(self, root: str) -> str:
        """Return the message id of the accepted reply to the request with id ``root``; empty if there is none."""
        message = self._by_root.get(root)
        return "" if message is None or message.is_reply else message.partner

    def is_site_in_run(self, node: int, run: int) -> bool:
        """Return whether this site takes part in this run: a request of the run was handed to the site."""
        requests = self._list_newest_messages(node, is_reply=False)
        return any(request.handed and request.run == run for request in requests)

    def may_pull_object(self, node: int, name: str) -> bool:
        """Return whether a site may download the object with id ``name``: a request that it received contains it."""
        requests = self._list_newest_messages(node, is_reply=False)
        return any(request.handed and name in request.object_ids for request in requests)

    def may_push_object(self, node: int, name: str) -> bool:
        """Return whether a site may upload the object with id ``name``: a reply that the site announced contains it."""
        return any(name in reply.object_ids for reply in self._list_newest_messages(node, is_reply=True))

    def has_object_expired(self, node: int, name: str) -> bool:
        """Return whether all replies of this site with object ``name`` have expired; True if there is no such reply."""
        now = self.clock()
        replies = self._list_newest_messages(node, is_reply=True)
        return all(reply.expires <= now for reply in replies if name in reply.object_ids)

    def is_object_needed(self, name: str) -> bool:
        """Return whether a message that still needs its objects contains the object with the id ``name``."""
        return name in self._need_counts

    def add_reply_bytes_within_limit(self, node: int, name: str, size: int) -> bool:
        """Add the size of an object to that of its reply; return whether the reply is within its size limit.

        The limit is twice the size of the run's largest request to the site, plus a constant, because a reply may hold
        the arrays of its request and in addition a masked update as large as the model. The run itself checks a lower
        limit for each reply.

        Args:
            name: Id of the object.
            size: Size of the object in bytes.

        Returns:
            False if the reply is too large, or if no reply of the site contains the object.
        """
        with self.database.lock:
            for reply in self._list_newest_messages(node, is_reply=True):
                if name in reply.object_ids:
                    requests = self._list_newest_messages(node, is_reply=False)
                    largest = max((request.size for request in requests if request.run == reply.run), default=0)
                    reply.size += size
                    return reply.size <= 2 * largest + SPARE_REPLY_BYTES
            return False

    def store_needed_object(self, name: str, content: bytes | memoryview) -> bool:
        """Write an object if a message still needs it; return whether it was written."""
        self.files.write_object(name, content)
        with self.database.lock:
            if self.is_object_needed(name):
                return True
            self.files.remove_object(name)
            return False

    # ------------------------------------------------------------------ private

    def _list_newest_messages(self, node: int, *, is_reply: bool) -> list[StoredMessage]:
        return list(self._by_site.get((node, is_reply), {}).values())[::-1]

    def _is_reply_awaited(self, request: StoredMessage) -> bool:
        return not request.withdrawn and request.expires > self.clock() and self.runs.is_run_active(request.run)

    def _list_missing_objects(self, messages: Iterable[StoredMessage]) -> list[str]:
        trees = (ObjectTree.FromString(message.tree) for message in messages)
        names = dict.fromkeys(name for tree in trees for name in list_tree_object_ids(tree))
        return [name for name in names if not self.files.has_object(name)]

    def _add_message_to_memory(self, message: StoredMessage) -> None:
        """Add a message to memory, and delete the site's oldest messages that are finished and above the limit.

        The limit is :data:`MAX_FINISHED_MESSAGES`.
        """
        site_messages = self._by_site.setdefault((message.node, message.is_reply), {})
        self._by_root[message.root] = message
        site_messages[message.root] = message
        if not message.released:
            self._need_counts.update(message.object_ids)
        finished = [old for old in site_messages.values() if old.released or old.expires <= self.clock()]
        forgotten = finished[: max(0, len(site_messages) - MAX_FINISHED_MESSAGES)]
        if forgotten:
            self._release_and_remove_files(forgotten)
            delete = "DELETE FROM messages WHERE root = ?"
            self.database.execute_in_transaction(*((delete, (old.root,)) for old in forgotten))
            for old in forgotten:
                self._by_root.pop(old.root, None)
                site_messages.pop(old.root, None)

    def _release_and_remove_files(self, messages: Sequence[StoredMessage]) -> None:
        """Mark the objects of messages as no longer needed for them; remove files that no other message needs."""
        pending = [message for message in messages if not message.released]
        if pending:
            release = "UPDATE messages SET released = 1 WHERE root = ?"
            self.database.execute_in_transaction(*((release, (message.root,)) for message in pending))
        for message in pending:
            message.released = True
            for name in message.object_ids:
                self._need_counts[name] -= 1
                if self._need_counts[name] <= 0:
                    del self._need_counts[name]
                    self.files.remove_object(name)


@dataclass(frozen=True)
class SuperLinkStorage:
    """All data of the SuperLink: sites, runs and messages in one database, and objects of messages in files."""

    database: SuperLinkDatabase
    sites: SiteRegistry
    runs: RunRegistry
    messages: MessageStore
    files: ObjectFileStore

    @classmethod
    def open_storage(
        cls,
        path: Path,
        files: ObjectFileStore,
        clock: Callable[[], float],
        steady: Callable[[], float] = time.monotonic,
    ) -> "SuperLinkStorage":
        """Open the database or create a new one; remove object files that are incomplete or that no message needs.

        Args:
            clock: Returns Unix time in seconds that does not jump when the machine's clock is set.
            steady: Returns seconds on a monotonic clock, which is valid only within this process.
        """
        database = SuperLinkDatabase(path)
        sites, runs = SiteRegistry(database, clock), RunRegistry(database, steady)
        return cls(database, sites, runs, MessageStore(database, sites, runs, files, clock), files)

    def close(self) -> None:
        """Close the database."""
        self.database.close()

    def begin_run(self, nodes: Collection[int] | None = None) -> tuple[int, list[StoredMessage]]:
        """Begin a run, and end each earlier run of its sites, whose process was killed.

        Args:
            nodes: Node ids of the run's sites; None for all sites. The caller has checked that these sites take part in
                no other run in progress. A run of other sites goes on.

        Returns:
            The run's number; and the replies of these sites to earlier runs that no run has recorded.
        """
        with self.database.lock:
            ended = set(self.runs.list_unfinished_runs())
            if nodes is not None:
                ended &= self.messages.find_runs_that_asked(nodes)
            for unfinished in sorted(ended):
                self.messages.end_run(unfinished)
            replies = self.messages.find_unrecorded_replies()
            return self.runs.begin_run(), [reply for reply in replies if nodes is None or reply.node in nodes]
