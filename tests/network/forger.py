"""An admitted hospital that tries every call of the hospital link in another hospital's name, while a run goes on.

It is a program of its own: it has its key and kit, Flower's public protocol, and nothing of the site's program. It is
told more than any hospital could learn: the nodes of its victims and, from the coordinator's own database, the names of
the messages that wait for them. ``python -m tests.network.forger FOLDER NAME DATABASE NODES OUT``: works until it is
told to stop, and writes to OUT how each call ended, counted by status.
"""

import contextlib
import json
import signal
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
from flwr.app import ConfigRecord, Error, Message, Metadata, RecordDict
from flwr.app.message import make_message, remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.fab_pb2 import GetFabRequest
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
    UnregisterNodeFleetRequest,
)
from flwr.proto.fleet_pb2_grpc import FleetStub
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.run_pb2 import GetRunRequest
from flwr.supercore.inflatable.inflatable_object import get_object_tree

from common.security.identity import read_key, read_kit
from server.deployment.superlink.control_client import openssh_key_to_pem
from tests.signing import SignsCalls

Attempt = tuple[str, Callable[[], Any]]


class Forger:
    """One channel, signed with the forger's own key."""

    def __init__(self, folder: Path, name: str, nodes: dict[str, tuple[int, str]]) -> None:
        kit, key = read_kit(folder / f"{name}.kit"), read_key(folder / f"{name}.key")
        credentials = grpc.ssl_channel_credentials(kit.ca_certificate.encode())
        channel = grpc.secure_channel(kit.address, credentials)
        self.stub = FleetStub(grpc.intercept_channel(channel, SignsCalls(key, key.public_key())))
        self.own, _ = nodes[name]
        self.victims = {victim: node for victim, (node, _) in nodes.items() if victim != name}
        self.keys = {victim: openssh_key_to_pem(line) for victim, (_, line) in nodes.items() if victim != name}

    def always(self) -> Iterator[Attempt]:
        """What needs no message."""
        for victim, node in self.victims.items():
            yield (
                "activate",
                lambda key=self.keys[victim]: self.stub.ActivateNode(
                    ActivateNodeRequest(public_key=key, heartbeat_interval=1800)
                ),
            )
            yield "deactivate", lambda node=node: self.stub.DeactivateNode(DeactivateNodeRequest(node_id=node))
            yield (
                "heartbeat",
                lambda node=node: self.stub.SendNodeHeartbeat(
                    SendNodeHeartbeatRequest(node=Node(node_id=node), heartbeat_interval=1800)
                ),
            )
            yield "pull", lambda node=node: self.stub.PullMessages(PullMessagesRequest(node=Node(node_id=node)))
            yield "unregister", lambda node=node: self.stub.UnregisterNode(UnregisterNodeFleetRequest(node_id=node))
        yield "register", lambda: self.stub.RegisterNode(RegisterNodeFleetRequest(public_key=b"another"))
        yield "order", lambda: self._push(0, "", self.own, 1, next(iter(self.victims.values())))

    def about(self, victim: int, run: int, message: str) -> Iterator[Attempt]:
        """What is done to a message that waits for a victim."""
        for source in (self.own, victim, 1):
            for signing in (self.own, victim):
                yield "reply", lambda source=source, signing=signing: self._push(run, message, signing, source)
        yield "error reply", lambda: self._push(run, message, self.own, victim, error="the site gives up")
        for node in (self.own, victim):
            who = Node(node_id=node)
            yield (
                "read",
                lambda who=who: self.stub.PullObject(PullObjectRequest(node=who, run_id=run, object_id=message)),
            )
            yield (
                "write",
                lambda who=who: self.stub.PushObject(
                    PushObjectRequest(node=who, run_id=run, object_id=message, object_content=b"poison")
                ),
            )
            yield (
                "confirm",
                lambda who=who: self.stub.ConfirmMessageReceived(
                    ConfirmMessageReceivedRequest(node=who, run_id=run, message_object_id=message)
                ),
            )
        yield "run", lambda: self.stub.GetRun(GetRunRequest(node=Node(node_id=victim), run_id=run))
        yield "bundle", lambda: self.stub.GetFab(GetFabRequest(node=Node(node_id=victim), run_id=run, hash_str=""))

    def _push(self, run: int, message: str, signing: int, source: int, to: int = 1, error: str = "") -> Any:
        """Push a reply that is made up."""
        metadata = Metadata(
            run_id=run,
            message_id="",
            src_node_id=source,
            dst_node_id=to,
            reply_to_message_id=message,
            group_id="1",
            created_at=time.time() - 1,
            ttl=100.0,
            message_type="train",
        )
        content = RecordDict({"fields": ConfigRecord({"poison": 1})})
        reply: Message = (
            make_message(metadata=metadata, error=Error(2, error))
            if error
            else make_message(metadata=metadata, content=content)
        )
        reply.metadata.__dict__["_message_id"] = reply.object_id
        request = PushMessagesRequest(
            node=Node(node_id=signing),
            messages_list=[message_to_proto(reply if error else remove_content_from_message(reply))],
            message_object_trees=[get_object_tree(reply)],
        )
        return self.stub.PushMessages(request)


def waiting(database: Path) -> list[tuple[int, int, str]]:
    """Node, run and name of every message that was handed to a site and not answered."""
    with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as sql:
        rows = sql.execute("SELECT node, run, root FROM messages WHERE is_reply = 0 AND handed = 1 AND partner = ''")
        return [(int(node), int(run), str(root)) for node, run, root in rows]


def main() -> None:
    """Attack until SIGTERM."""
    folder, name, database, nodes, out = sys.argv[1:]
    forger = Forger(Path(folder), name, json.loads(Path(nodes).read_text(encoding="utf-8")))
    ended: Counter[str] = Counter()
    going: list[bool] = [True]
    signal.signal(signal.SIGTERM, lambda number, frame: going.clear())
    while going:
        attempts = [*forger.always()]
        for node, run, message in waiting(Path(database)):
            if node in forger.victims.values():
                attempts += forger.about(node, run, message)
        for kind, attempt in attempts:
            try:
                attempt()
                ended[f"{kind} OK"] += 1
            except grpc.RpcError as error:
                ended[f"{kind} {error.code().name}"] += 1
        Path(out).write_text(json.dumps(ended), encoding="utf-8")
        time.sleep(0.05)


if __name__ == "__main__":
    main()
