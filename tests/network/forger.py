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
from flwr.app import ConfigRecord, Error, Metadata, RecordDict
from flwr.app.message import make_message, remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto import fleet_pb2
from flwr.proto.fab_pb2 import GetFabRequest
from flwr.proto.fleet_pb2_grpc import FleetStub
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.run_pb2 import GetRunRequest
from flwr.supercore.inflatable.inflatable_object import get_object_tree

from common.security.identity import read_connection_kit, read_private_key
from server.deployment.superlink.control_client import convert_openssh_key_to_pem
from tests.signing import SignsCalls

Attempt = tuple[str, Callable[[Any], Any], Any]
"""Kind, call of the hospital link, and its request."""


class Forger:
    """One channel, signed with the forger's own key."""

    def __init__(self, folder: Path, name: str, nodes: dict[str, tuple[int, str]]) -> None:
        kit, key = read_connection_kit(folder / f"{name}.kit"), read_private_key(folder / f"{name}.key")
        credentials = grpc.ssl_channel_credentials(kit.ca_certificate.encode())
        channel = grpc.secure_channel(kit.address, credentials)
        self.stub = FleetStub(grpc.intercept_channel(channel, SignsCalls(key, key.public_key())))
        self.own, _ = nodes[name]
        self.victims = {victim: node for victim, (node, _) in nodes.items() if victim != name}
        self.keys = {victim: convert_openssh_key_to_pem(line) for victim, (_, line) in nodes.items() if victim != name}

    def always(self) -> Iterator[Attempt]:
        """What needs no message."""
        stub = self.stub
        for victim, number in self.victims.items():
            node = Node(node_id=number)
            yield (
                "activate",
                stub.ActivateNode,
                fleet_pb2.ActivateNodeRequest(public_key=self.keys[victim], heartbeat_interval=1800),
            )
            yield "deactivate", stub.DeactivateNode, fleet_pb2.DeactivateNodeRequest(node_id=number)
            yield "heartbeat", stub.SendNodeHeartbeat, SendNodeHeartbeatRequest(node=node, heartbeat_interval=1800)
            yield "pull", stub.PullMessages, fleet_pb2.PullMessagesRequest(node=node)
            yield "unregister", stub.UnregisterNode, fleet_pb2.UnregisterNodeFleetRequest(node_id=number)
        yield "register", stub.RegisterNode, fleet_pb2.RegisterNodeFleetRequest(public_key=b"another")
        yield "order", stub.PushMessages, _reply(0, "", self.own, 1, next(iter(self.victims.values())))

    def about(self, victim: int, run: int, message: str) -> Iterator[Attempt]:
        """What is done to a message that waits for a victim."""
        stub = self.stub
        for source in (self.own, victim, 1):
            for signing in (self.own, victim):
                yield "reply", stub.PushMessages, _reply(run, message, signing, source)
        yield "error reply", stub.PushMessages, _reply(run, message, self.own, victim, error="the site gives up")
        for number in (self.own, victim):
            at = {"node": Node(node_id=number), "run_id": run}
            poison = PushObjectRequest(**at, object_id=message, object_content=b"poison")
            yield "read", stub.PullObject, PullObjectRequest(**at, object_id=message)
            yield "write", stub.PushObject, poison
            yield "confirm", stub.ConfirmMessageReceived, ConfirmMessageReceivedRequest(**at, message_object_id=message)
        at = {"node": Node(node_id=victim), "run_id": run}
        yield "run", stub.GetRun, GetRunRequest(**at)
        yield "bundle", stub.GetFab, GetFabRequest(**at, hash_str="")


def _reply(
    run: int, message: str, signing: int, source: int, to: int = 1, error: str = ""
) -> fleet_pb2.PushMessagesRequest:
    """A push of a reply that is made up."""
    fields = {"reply_to_message_id": message, "message_id": "", "group_id": "1", "message_type": "train", "ttl": 100.0}
    metadata = Metadata(run_id=run, src_node_id=source, dst_node_id=to, created_at=time.time() - 1, **fields)
    content = {"error": Error(2, error)} if error else {"content": RecordDict({"fields": ConfigRecord({"poison": 1})})}
    reply = make_message(metadata=metadata, **content)
    reply.metadata.__dict__["_message_id"] = reply.object_id
    return fleet_pb2.PushMessagesRequest(
        node=Node(node_id=signing),
        messages_list=[message_to_proto(reply if error else remove_content_from_message(reply))],
        message_object_trees=[get_object_tree(reply)],
    )


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
        for kind, call, request in attempts:
            try:
                call(request)
                ended[f"{kind} OK"] += 1
            except grpc.RpcError as error:
                ended[f"{kind} {error.code().name}"] += 1
        Path(out).write_text(json.dumps(ended), encoding="utf-8")
        time.sleep(0.05)


if __name__ == "__main__":
    main()
