"""A SuperLink's storage and port for hospitals in this process, as the SuperLink's program makes them."""

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import ConfigRecord, Message, RecordDict

from polyclinic.common.wire import fleet_protocol as fleet
from polyclinic.common.wire.flower_messages import METADATA_FIELDS, make_message, replace_metadata
from polyclinic.common.wire.message_objects import encode_message_objects, make_announcement
from polyclinic.server.coordinator.folder import CoordinatorFolder, read_coordinator_folder
from polyclinic.server.coordinator.init import make_coordinator_folder
from polyclinic.server.deployment.superlink.fleet_server import start_server_for_hospitals
from polyclinic.server.deployment.superlink.messages import StoredMessage, SuperLinkStorage
from polyclinic.server.deployment.superlink.object_store import ObjectFileStore
from tests.fleet_stub import FleetStub
from tests.signing import SignsCalls, pem

SUPERLINK = 1
"""Flower's number of the SuperLink itself."""
DATABASE = "superlink.db"
INTERVAL_S = 30.0
"""Between two heartbeats of a site."""


def named(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def refused(call: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[grpc.StatusCode, str]:
    """Make a call that is refused; return its status and its details."""
    with pytest.raises(grpc.RpcError) as error:
        call(*arguments, **options)
    return error.value.code(), error.value.details() or ""


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        return self.now


@dataclass
class Link:
    """A SuperLink's storage, and one run that goes on."""

    folder: Path
    clock: Clock = field(default_factory=Clock)
    sent: dict[str, Message] = field(default_factory=dict)
    storages: list[SuperLinkStorage] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.storage = self.restarted()
        self.files = self.storage.files
        self.run, _ = self.storage.begin_run()

    def restarted(self) -> SuperLinkStorage:
        """Open the storage of a new process on the same database and files; the one before was killed."""
        files = ObjectFileStore(self.folder / "objects")
        self.storages.append(SuperLinkStorage.open_storage(self.folder / DATABASE, files, self.clock, self.clock))
        return self.storages[-1]

    def request(self, node: int, *contents: bytes) -> StoredMessage:
        """Make a request of any objects, the first one above the others; nothing is written."""
        top, *below = (named(content) for content in contents)
        proto = fleet.Envelope()
        about = proto.metadata
        about.message_id, about.run_id, about.dst_node_id, about.src_node_id = top, self.run, node, SUPERLINK
        about.created_at, about.ttl = self.clock(), 600.0
        children = [fleet.ObjectTree(object_id=name) for name in below]
        return StoredMessage.from_request(proto, fleet.ObjectTree(object_id=top, children=children))


@pytest.fixture
def link(tmp_path: Path) -> Iterator[Link]:
    """A new storage, which is closed: Python 3.13 warns of databases that are left to the garbage collector."""
    new = Link(tmp_path)
    yield new
    for storage in new.storages:
        storage.close()


def message(words: str, **metadata: Any) -> Message:
    """Make a training message with one text in it, under the name that its content gives it."""
    about = dict.fromkeys(METADATA_FIELDS, "") | {"group_id": "1", "message_type": "train", **metadata}
    new = make_message(RecordDict({"fields": ConfigRecord({"words": words})}), about)
    return replace_metadata(new, message_id=encode_message_objects(new)[0].object_id)


def announcement_of(message: Message, name: str = "") -> Any:
    """Return what announces a message, under its own name or another."""
    return make_announcement(message, name or message.metadata.message_id)


@dataclass
class Hospital:
    """Anyone who has a key and a stub for all calls: an admitted site, a stranger, or a forger."""

    link: Link
    channel: grpc.Channel
    key: bytes
    node_id: int

    @cached_property
    def stub(self) -> FleetStub:
        return FleetStub(self.channel)

    @property
    def node(self) -> Any:
        return fleet.Node(node_id=self.node_id)

    def sign_on(self, interval_s: float = INTERVAL_S, **options: Any) -> int:
        request = fleet.ActivateNodeRequest(public_key=self.key, heartbeat_interval=interval_s)
        return int(self.stub.ActivateNode(request, **options).node_id)

    def beat(self, interval_s: float = INTERVAL_S, **options: Any) -> bool:
        request = fleet.SendNodeHeartbeatRequest(node=self.node, heartbeat_interval=interval_s)
        return bool(self.stub.SendNodeHeartbeat(request, **options).success)

    def pull(self, **options: Any) -> list[str]:
        """Return the names of the messages that this site is handed."""
        answer = self.stub.PullMessages(fleet.PullMessagesRequest(node=self.node), **options)
        return [proto.metadata.message_id for proto in answer.messages_list]

    def pull_object(self, name: str) -> Any:
        return self.stub.PullObject(fleet.PullObjectRequest(node=self.node, run_id=self.link.run, object_id=name))

    def confirm(self, name: str) -> None:
        request = fleet.ConfirmMessageReceivedRequest(node=self.node, run_id=self.link.run, message_object_id=name)
        self.stub.ConfirmMessageReceived(request)

    def reply_to(
        self, message_id: str, words: str = "trained", source: int = 0, to: int = SUPERLINK, run: int = 0
    ) -> Message:
        """Make a reply in this site's name, or in that of ``source``."""
        request = self.link.sent.get(message_id)
        return message(
            words,
            run_id=run or self.link.run,
            src_node_id=source or self.node_id,
            dst_node_id=to,
            reply_to_message_id=message_id,
            created_at=request.metadata.created_at if request else time.time(),
            ttl=500.0,
        )

    def announce(self, reply: Message, node: int = 0) -> Any:
        """Push a reply without its objects."""
        return self.stub.PushMessages(
            fleet.PushMessagesRequest(
                node=fleet.Node(node_id=node or self.node_id),
                messages_list=[announcement_of(reply)],
                message_object_trees=[encode_message_objects(reply)[0]],
            )
        )

    def send(self, reply: Message) -> None:
        """Push a reply with all its objects."""
        answer = self.announce(reply)
        for name, part in encode_message_objects(reply)[1].items():
            if name in answer.objects_to_push:
                assert self.push(name, part, answer.session_id)

    def push(self, name: str, content: bytes, session: str = "") -> bool:
        request = fleet.PushObjectRequest(
            node=self.node, run_id=self.link.run, session_id=session, object_id=name, object_content=content
        )
        return bool(self.stub.PushObject(request).stored)


@dataclass
class Port:
    """The hospitals' port of a :class:`Link`, and anyone who calls it."""

    link: Link
    address: str
    authority: bytes
    channels: list[grpc.Channel] = field(default_factory=list)

    def hospital(self, name: str) -> Hospital:
        """Admit a site."""
        site = self.stranger()
        site.node_id = self.link.storage.sites.register_site(name, site.key)
        return site

    def stranger(self) -> Hospital:
        """Make a fresh key that nobody admitted."""
        key = ec.generate_private_key(ec.SECP256R1())
        return Hospital(self.link, self.channel(key), pem(key.public_key()), 7)

    def channel(self, *signing: ec.EllipticCurvePrivateKey) -> grpc.Channel:
        """Open a connection of its own over TLS, whose calls are signed with this key, or are not signed."""
        credentials = grpc.ssl_channel_credentials(self.authority)
        self.channels.append(grpc.secure_channel(self.address, credentials, [("grpc.use_local_subchannel_pool", 1)]))
        return grpc.intercept_channel(self.channels[-1], *(self.signs(key) for key in signing))

    def signs(
        self, key: ec.EllipticCurvePrivateKey, named: ec.EllipticCurvePublicKey | None = None, authority: bytes = b""
    ) -> SignsCalls:
        """Sign each call with this key, for this coordinator or for that of another authority."""
        return SignsCalls(key, named or key.public_key(), authority or self.authority)

    def ask(self, hospital: Hospital, words: str = "train") -> str:
        """Send a site a message, as the coordinator's run does; return the message's name."""
        to = {"src_node_id": SUPERLINK, "dst_node_id": hospital.node_id, "reply_to_message_id": ""}
        new = message(words, run_id=self.link.run, **to, created_at=time.time(), ttl=600.0)
        (tree, contents), name = encode_message_objects(new), new.metadata.message_id
        for part, content in contents.items():
            self.link.files.write_object(part, content)
        self.link.storage.sites.mark_site_connected(
            hospital.node_id, INTERVAL_S
        )  # only a site that is there is sent a message
        request = StoredMessage.from_request(announcement_of(new), tree)
        assert self.link.storage.messages.store_requests([request]) == ([name], [])
        self.link.sent[name] = new
        return name

    def hand(self, hospital: Hospital, words: str = "train") -> str:
        """Send a site a message, which the site pulls; return the message's name."""
        name = self.ask(hospital, words)
        assert name in hospital.pull()
        return name


HOSTS = ("fl.example", "fl-2.example", "192.0.2.7", "2001:db8::7")


def coordinator_in(folder: Path) -> CoordinatorFolder:
    """Make a coordinator's folder with an authority and a server certificate."""
    make_coordinator_folder(folder, "trial", HOSTS, listen="0.0.0.0", port=9092)
    return read_coordinator_folder(folder)


@pytest.fixture
def coordinator(tmp_path: Path) -> CoordinatorFolder:
    """A coordinator's folder; nothing runs, and nobody is admitted."""
    return coordinator_in(tmp_path / "trial")


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes, bytes]:
    """An authority's certificate, a server's, and its key."""
    authority = coordinator_in(tmp_path_factory.mktemp("authority") / "trial").authority_path
    first, second, third = (authority / name for name in ("ca.crt", "server.crt", "server.key"))
    return first.read_bytes(), second.read_bytes(), third.read_bytes()


@contextmanager
def opened(link: Link, certificates: tuple[bytes, bytes, bytes], connections: int = 1000) -> Iterator[Port]:
    """Open the port for hospitals, as the SuperLink's program opens it."""
    server, number = start_server_for_hospitals("127.0.0.1:0", link.storage, certificates, link.folder, connections)
    port = Port(link, f"127.0.0.1:{number}", certificates[0])
    try:
        yield port
    finally:
        for channel in port.channels:
            channel.close()
        server.stop(None).wait()


@pytest.fixture
def port(link: Link, certificates: tuple[bytes, bytes, bytes]) -> Iterator[Port]:
    with opened(link, certificates) as port:
        yield port
