"""The calls over the control socket, between the SuperLink and the programs of ``flwr-server``, all of one release."""

from typing import Any

from common.wire.fleet_protocol import Envelope, ObjectTree, message_classes

SERVICE = "polyclinic.Control"
MESSAGES = """
Nothing:
Site: 1 uint64 node_id, 2 string name, 3 string state, 4 bytes public_key
Sites: 1 Site* sites
Run: 1 uint64 run_id, 2 bool goes_on
Begun: 1 uint64 run_id, 2 bytes* envelopes, 3 bytes* trees
Requests: 1 uint64 run_id, 2 bytes* envelopes, 3 bytes* trees
Taken: 1 string* names, 2 string* missing
Asked: 1 uint64 run_id, 2 string* names
Reply: 1 string asked, 2 bytes envelope, 3 bytes tree, 4 string lack
Replies: 1 Reply* replies
"""
"""Envelopes and trees travel as bytes, as the SuperLink keeps them."""

_CLASSES = {name.rpartition(".")[2]: made for name, made in message_classes("polyclinic.control", MESSAGES).items()}
Nothing: Any = _CLASSES["Nothing"]
Site: Any = _CLASSES["Site"]
Sites: Any = _CLASSES["Sites"]
Run: Any = _CLASSES["Run"]
Begun: Any = _CLASSES["Begun"]
Requests: Any = _CLASSES["Requests"]
Taken: Any = _CLASSES["Taken"]
Asked: Any = _CLASSES["Asked"]
Reply: Any = _CLASSES["Reply"]
Replies: Any = _CLASSES["Replies"]

CALLS: dict[str, tuple[Any, Any]] = {
    "Health": (Nothing, Nothing),
    "ListSites": (Nothing, Sites),
    "Register": (Site, Nothing),
    "Unregister": (Site, Nothing),
    "BeginRun": (Nothing, Begun),
    "EndRun": (Run, Nothing),
    "Heartbeat": (Run, Run),
    "Push": (Requests, Taken),
    "Replies": (Asked, Replies),
    "LetGo": (Asked, Nothing),
}
"""Each call's request and answer."""
LARGEST_CALL = 64 * 2**20
"""Bytes: requests to thousands of sites are announced in one call, without their contents."""


def pair(envelope: bytes, tree: bytes) -> tuple[Any, Any]:
    """A message's envelope and tree, read."""
    return Envelope.FromString(envelope), ObjectTree.FromString(tree)
