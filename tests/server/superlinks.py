"""A SuperLink's database, files and port for hospitals in this process, as the SuperLink's program makes them."""

import hashlib
import importlib
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import ConfigRecord, Message, Metadata, RecordDict
from flwr.app.message import make_message, remove_content_from_message
from flwr.common.constant import NOOP_FLWR_AID
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PullMessagesRequest, PushMessagesRequest
from flwr.proto.fleet_pb2_grpc import FleetStub
from flwr.proto.message_pb2 import ObjectTree, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.server.superlink.linkstate import LinkStateFactory, linkstate_factory
from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.object_store import ObjectStoreFactory, object_store_factory
from flwr.supercore.object_store.sql_object_store import SqlObjectStore
from flwr.superlink import extensions
from flwr.superlink.federation import NoOpFederationManager

from server.coordinator.authority import issue_server_certificate, make_authority
from server.coordinator.folder import Coordinator, CoordinatorFile
from server.deployment.superlink import program
from server.deployment.superlink.local.loopback import SECRET
from server.deployment.superlink.local.steady_clock import OF_THE_SUPERLINK
from server.deployment.superlink.program import ObjectStore, superlink_command
from tests.signing import SignsCalls, pem

SUPERLINK = 1
"""Flower's number of the SuperLink itself."""
REPLACED = (
    (linkstate_factory, "SqlLinkState", LinkStateFactory.state),
    (object_store_factory, "SqlObjectStore", ObjectStoreFactory.store),
    (superlink_command, "SuperLinkLifespan", superlink_command._run_superlink_http_api),
)
"""Module, the name in it that we replace, and Flower's function that must look it up there when it runs."""


def named(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@dataclass
class Link:
    """A SuperLink's two stores and one run that goes on, as Flower makes them after ``main()``."""

    folder: Path
    clock: Clock
    sent: dict[str, Message] = field(default_factory=dict)
    more: list[ObjectStore] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.files = ObjectStore.files
        self.stores = ObjectStoreFactory(str(self.folder / "superlink.db"))
        self.states = LinkStateFactory(self.stores.database, NoOpFederationManager(), self.stores)
        self.state, self.store = self.states.state(), self.stores.store()
        self.run, self.task = self.begun()

    def begun(self) -> tuple[int, int]:
        """A run that goes on, and its task."""
        run = self.created()
        (found,) = self.state.get_run_info(run_ids=[run])
        task = int(found.primary_task_id or 0)
        assert self.state.claim_task(task)
        assert self.state.activate_task(task)
        return run, task

    def created(self) -> int:
        """A run that has not begun."""
        return self.state.create_run(None, None, None, {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, TaskType.SERVER_APP)

    def announced(self, *contents: bytes) -> str:
        """Announce objects, the first one above the others; the push session they are expected in."""
        top, *below = (named(content) for content in contents)
        session = self.state.start_session(self.run)
        tree = ObjectTree(object_id=top, children=[ObjectTree(object_id=name) for name in below])
        self.state.preregister_object_tree(tree, session)
        return session

    def restarted(self) -> ObjectStore:
        """The store of a new process on the same database and files."""
        store = ObjectStore(self.stores.database)
        store.initialize()
        self.more.append(store)
        return store

    def close(self) -> None:
        """Close the databases, of which Python 3.13 warns where they are left to the garbage collector."""
        for one in (self.state, self.store, *self.more):
            assert one._engine
            one._engine.dispose()


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Flower's empty database, for to make it takes a second."""
    path = tmp_path_factory.mktemp("empty") / "superlink.db"
    store = SqlObjectStore(str(path))
    store.initialize()
    assert store._engine
    store._engine.dispose()
    return path


@pytest.fixture
def link(database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Link]:
    """``main()`` has run, up to the place where Flower's program would begin."""
    shutil.copytree(database.parent, tmp_path, dirs_exist_ok=True)
    clock, begun = Clock(), list[list[str]]()
    for module, name, _ in REPLACED:
        monkeypatch.setattr(module, name, getattr(module, name))  # put back after the test
    monkeypatch.setattr(extensions, "get_middleware", extensions.get_middleware)
    monkeypatch.setattr(ObjectStore, "files", None, raising=False)
    monkeypatch.setattr(program, "time", clock)
    monkeypatch.setattr(superlink_command, "flower_superlink", lambda: begun.append(list(sys.argv)))
    for name in OF_THE_SUPERLINK:
        monkeypatch.setattr(f"{name}.now", vars(importlib.import_module(name))["now"])
    ours = ["--state", str(tmp_path), "--connections", "1000", "--connections-per-address", "256"]
    (tmp_path / SECRET).write_bytes(b"known to this folder")
    monkeypatch.setattr(sys, "argv", ["superlink", *ours, "--isolation", "process"])
    program.main()
    assert begun == [["superlink", "--isolation", "process"]]
    made = Link(tmp_path, clock)
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

    def reply_to(self, message_id: str, words: str = "trained", source: int = 0, to: int = SUPERLINK) -> Message:
        """A reply in this site's name, or in that of ``source``."""
        metadata = Metadata(
            run_id=self.link.run,
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
        node = self.link.state.create_node(NOOP_FLWR_AID, "owner", public, 30.0, name=name)
        return Hospital(self.link, name, self.stub(key), public, node)

    def stranger(self) -> Hospital:
        """A fresh key that nobody admitted."""
        key = ec.generate_private_key(ec.SECP256R1())
        return Hospital(self.link, "stranger", self.stub(key), pem(key.public_key()), 7)

    def stub(self, *signing: ec.EllipticCurvePrivateKey) -> FleetStub:
        """Flower's own stub over TLS, which signs with this key, or does not sign."""
        channel = grpc.secure_channel(self.address, grpc.ssl_channel_credentials(self.authority))
        self.channels.append(channel)
        signed = [SignsCalls(key, key.public_key()) for key in signing]
        return FleetStub(grpc.intercept_channel(channel, *signed))

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
        self.link.state.activate_node(hospital.node_id, 30.0)  # only a site that is there is sent a message
        session = self.link.state.start_session(self.link.run)
        proto = remove_content_from_message(message)
        stored, _ = self.link.state.store_message_and_object_tree(proto, get_object_tree(message), session)
        assert stored
        self.link.sent[name] = message
        return name


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes, bytes]:
    """An authority's certificate, a server's, and its key."""
    folder = tmp_path_factory.mktemp("authority")
    made = Coordinator(folder, CoordinatorFile(name="trial", hosts=("127.0.0.1",), port=9092, control_port=8000))
    make_authority(made)
    issue_server_certificate(made)
    first, second, third = (folder / "authority" / name for name in ("ca.crt", "server.crt", "server.key"))
    return first.read_bytes(), second.read_bytes(), third.read_bytes()


@pytest.fixture
def port(link: Link, certificates: tuple[bytes, bytes, bytes]) -> Iterator[Port]:
    """The port for hospitals, as the SuperLink's program opens it."""
    server = superlink_command.SuperLinkLifespan.link.run("127.0.0.1:0", link.states, link.stores, certificates)
    found = Port(link, server.bound_address, certificates[0])
    try:
        yield found
    finally:
        for channel in found.channels:
            channel.close()
        server.stop(None).wait()
