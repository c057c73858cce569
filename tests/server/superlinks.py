"""A SuperLink's storage and port for hospitals in this process, as the SuperLink's program makes them."""

import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import ConfigRecord, Message, Metadata, RecordDict
from flwr.app.message import make_message, remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PullMessagesRequest, PushMessagesRequest
from flwr.proto.fleet_pb2_grpc import FleetStub
from flwr.proto.message_pb2 import ObjectTree, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree

from common.wire import fleet_protocol
from server.coordinator.authority import issue_server_certificate, make_authority
from server.coordinator.folder import Coordinator, CoordinatorFile
from server.deployment.superlink.fleet_server import serve_hospitals
from server.deployment.superlink.messages import StoredMessage, SuperLinkStorage
from server.deployment.superlink.object_store import ObjectFiles
from tests.signing import SignsCalls, pem

SUPERLINK = 1
"""Flower's number of the SuperLink itself."""
DATABASE = "superlink.db"


def named(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


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
    opened: list[SuperLinkStorage] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.storage = self.restarted()
        self.files = self.storage.files
        self.run, _ = self.storage.begin_run()

    def restarted(self) -> SuperLinkStorage:
        """The storage of a new process on the same database and files; the one before was killed."""
        files = ObjectFiles(self.folder / "objects")
        self.opened.append(SuperLinkStorage.open(self.folder / DATABASE, files, self.clock, self.clock))
        return self.opened[-1]

    def request(self, node: int, *contents: bytes) -> StoredMessage:
        """A request of any objects, the first one above the others; nothing is written."""
        top, *below = (named(content) for content in contents)
        proto = fleet_protocol.Envelope()
        said = proto.metadata
        said.message_id, said.run_id, said.dst_node_id, said.src_node_id = top, self.run, node, SUPERLINK
        said.created_at, said.ttl = self.clock(), 600.0
        children = [fleet_protocol.ObjectTree(object_id=name) for name in below]
        return StoredMessage.request(proto, fleet_protocol.ObjectTree(object_id=top, children=children))

    def close(self) -> None:
        """Close the databases, of which Python 3.13 warns where they are left to the garbage collector."""
        for one in self.opened:
            one.close()


@pytest.fixture
def link(tmp_path: Path) -> Iterator[Link]:
    """A new storage."""
    made = Link(tmp_path)
    yield made
    made.close()


# ---------------------------------------------------------------------- over a socket


@dataclass
class Hospital:
    """Anyone who has a key and Flower's own stub: an admitted site, a stranger, or a forger."""

    link: Link
    name: str
    stub: FleetStub
    key: bytes
    node_id: int

    @property
    def node(self) -> Node:
        return Node(node_id=self.node_id)

    def pull(self) -> tuple[str, ObjectTree]:
        """The next message for this site: its name, and the tree of its objects."""
        answer = self.stub.PullMessages(PullMessagesRequest(node=self.node))
        return answer.messages_list[0].metadata.message_id, answer.message_object_trees[0]

    def reply_to(
        self, message_id: str, words: str = "trained", source: int = 0, to: int = SUPERLINK, run: int = 0
    ) -> Message:
        """A reply in this site's name, or in that of ``source``."""
        metadata = Metadata(
            run_id=run or self.link.run,
            message_id="",
            src_node_id=source or self.node_id,
            dst_node_id=to,
            reply_to_message_id=message_id,
            group_id="1",
            created_at=self.link.sent[message_id].metadata.created_at if message_id in self.link.sent else time.time(),
            ttl=500.0,
            message_type="train",
        )
        reply = make_message(metadata=metadata, content=RecordDict({"fields": ConfigRecord({"words": words})}))
        reply.metadata.__dict__["_message_id"] = reply.object_id
        return reply

    def announce(self, reply: Message, node: int = 0) -> Any:
        """Push a reply without its objects."""
        return self.stub.PushMessages(
            PushMessagesRequest(
                node=Node(node_id=node or self.node_id),
                messages_list=[message_to_proto(remove_content_from_message(reply))],
                message_object_trees=[get_object_tree(reply)],
            )
        )

    def send(self, reply: Message) -> None:
        """Push a reply with all its objects."""
        answer = self.announce(reply)
        for name, part in get_all_nested_objects(reply).items():
            if name in answer.objects_to_push:
                assert self.push(name, part.deflate(), answer.session_id)

    def push(self, name: str, content: bytes, session: str) -> bool:
        request = PushObjectRequest(
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
        """An admitted site."""
        key = ec.generate_private_key(ec.SECP256R1())
        public = pem(key.public_key())
        return Hospital(self.link, name, self.stub(key), public, self.link.storage.sites.register(name, public))

    def stranger(self) -> Hospital:
        """A fresh key that nobody admitted."""
        key = ec.generate_private_key(ec.SECP256R1())
        return Hospital(self.link, "stranger", self.stub(key), pem(key.public_key()), 7)

    def stub(self, *signing: ec.EllipticCurvePrivateKey) -> FleetStub:
        """Flower's own stub over TLS, which signs with this key, or does not sign."""
        channel = self.channel()
        signed = [SignsCalls(key, key.public_key()) for key in signing]
        return FleetStub(grpc.intercept_channel(channel, *signed))

    def channel(self) -> grpc.Channel:
        """A connection of its own."""
        credentials = grpc.ssl_channel_credentials(self.authority)
        self.channels.append(grpc.secure_channel(self.address, credentials, [("grpc.use_local_subchannel_pool", 1)]))
        return self.channels[-1]

    def ask(self, hospital: Hospital, words: str = "train") -> str:
        """Send a site a message, as the coordinator's run does; return the message's name."""
        metadata = Metadata(
            run_id=self.link.run,
            message_id="",
            src_node_id=SUPERLINK,
            dst_node_id=hospital.node_id,
            reply_to_message_id="",
            group_id="1",
            created_at=time.time(),
            ttl=600.0,
            message_type="train",
        )
        message = make_message(metadata=metadata, content=RecordDict({"fields": ConfigRecord({"words": words})}))
        message.metadata.__dict__["_message_id"] = name = message.object_id
        objects = get_all_nested_objects(message)
        for part, content in objects.items():
            self.link.files.write(part, content.deflate())
        self.link.storage.sites.activate(hospital.node_id, 30.0)  # only a site that is there is sent a message
        proto = message_to_proto(remove_content_from_message(message))
        taken, missing = self.link.storage.messages.push([StoredMessage.request(proto, get_object_tree(message))])
        assert (taken, missing) == ([name], [])
        self.link.sent[name] = message
        return name

    def hand(self, hospital: Hospital, words: str = "train") -> str:
        """Send a site a message, which the site pulls; return the message's name."""
        name = self.ask(hospital, words)
        hospital.pull()
        return name


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes, bytes]:
    """An authority's certificate, a server's, and its key."""
    folder = tmp_path_factory.mktemp("authority")
    made = Coordinator(folder, CoordinatorFile(name="trial", hosts=("127.0.0.1",), port=9092))
    make_authority(made)
    issue_server_certificate(made)
    first, second, third = (folder / "authority" / name for name in ("ca.crt", "server.crt", "server.key"))
    return first.read_bytes(), second.read_bytes(), third.read_bytes()


@pytest.fixture
def port(link: Link, certificates: tuple[bytes, bytes, bytes]) -> Iterator[Port]:
    """The port for hospitals, as the SuperLink's program opens it."""
    with opened(link, certificates) as found:
        yield found


@contextmanager
def opened(link: Link, certificates: tuple[bytes, bytes, bytes], connections: int = 1000) -> Iterator[Port]:
    """Open the port for hospitals."""
    server, number = serve_hospitals("127.0.0.1:0", link.storage, certificates, link.folder, connections)
    found = Port(link, f"127.0.0.1:{number}", certificates[0])
    try:
        yield found
    finally:
        for channel in found.channels:
            channel.close()
        server.stop(None).wait()
