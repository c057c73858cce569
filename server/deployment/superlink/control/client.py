"""The coordinator's programs call their SuperLink over its Unix socket."""

import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import grpc
from cryptography.hazmat.primitives.serialization import load_ssh_public_key

from common.errors import CannotGoOn
from common.security.call_signatures import key_bytes
from common.system.plain_text import grpc_words
from server.coordinator.control_socket import ControlSocket
from server.coordinator.folder import Coordinator
from server.deployment.superlink.control.protocol import CALLS, SERVICE, Asked, Nothing, Requests, Run, Site, pair
from server.deployment.superlink.storage.messages import Lack
from server.deployment.superlink.storage.sites import Presence

LINK_PATIENCE_S = 900.0
"""How long a run waits for a SuperLink that does not answer."""
ANSWER_S = 20.0
"""For one call; longer and it is made again, or the SuperLink counts as away."""
LOOK_S = 10.0
"""For a SuperLink that is asked whether it is there: two seconds are too few on a machine that has much to do."""
PAUSE_S = 0.2
GIVEN_UP = "the SuperLink heard nothing of this run for too long, and gave it up."
_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


class SuperLinkGone(CannotGoOn):
    """The SuperLink did not answer for longer than its caller can wait."""


class RunLost(RuntimeError):
    """The SuperLink has given this run up: it heard nothing of it for too long. It goes on as a new one."""


@dataclass(frozen=True)
class Node:
    """A registered site as the SuperLink sees it; ``public_key`` in Flower's form."""

    node_id: int
    name: str
    state: Presence
    public_key: bytes

    @property
    def online(self) -> bool:
        """Whether it is connected."""
        return self.state == Presence.CONNECTED


@dataclass(frozen=True)
class Announced:
    """What the SuperLink says of a request: its reply's envelope and tree, or why there is none."""

    asked: str
    envelope: Any = None
    tree: Any = None
    lack: Lack | None = None


class Control:
    """The calls.

    Args:
        patience_s: How long a SuperLink is waited for that is away; calls are safe to make again.
    """

    def __init__(self, coordinator: Coordinator, *, patience_s: float = 0.0, answer_s: float = ANSWER_S) -> None:
        self._patience_s, self._answer_s = patience_s, answer_s
        self._socket = ControlSocket(coordinator.state)
        options = [
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_send_message_length", -1),
            ("grpc.enable_retries", 0),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", int(1000 * LOOK_S)),
            ("grpc.max_reconnect_backoff_ms", 1000),
        ]
        self._channel = grpc.insecure_channel(self._socket.grpc_address, options=options)
        self._methods = {
            name: self._channel.unary_unary(
                f"/{SERVICE}/{name}",
                request_serializer=request.SerializeToString,
                response_deserializer=answer.FromString,
            )
            for name, (request, answer) in CALLS.items()
        }

    def close(self) -> None:
        """Hang up."""
        self._channel.close()
        self._socket.close()

    def be_impatient(self) -> None:
        """Make every call once from now on."""
        self._patience_s, self._answer_s = 0.0, min(self._answer_s, 3.0)

    # ------------------------------------------------------------------ sites

    def health(self) -> None:
        """Raise :class:`SuperLinkGone` unless the SuperLink answers."""
        self._call("Health", Nothing())

    def nodes(self) -> list[Node]:
        """All registered sites."""
        found = self._call("ListSites", Nothing()).sites
        return [Node(one.node_id, one.name, Presence(one.state), one.public_key) for one in found]

    def register(self, name: str, public_key: str) -> None:
        """Register a site's key, an OpenSSH line, under its name."""
        self._call("Register", Site(name=name, public_key=flower_key(public_key)))

    def unregister(self, node: Node) -> None:
        """Take a registration back: from now on every call that is signed with its key is refused."""
        self._call("Unregister", Site(node_id=node.node_id))

    # ------------------------------------------------------------------ runs

    def begin_run(self) -> tuple[int, list[tuple[Any, Any]]]:
        """Begin a run; what a run left whose process was killed is over, so that sites drop their work on it.

        Returns:
            Its number, and envelope and tree of each reply to an earlier run that nobody has let go of.
        """
        begun = self._call("BeginRun", Nothing())
        return int(begun.run_id), [pair(*both) for both in zip(begun.envelopes, begun.trees, strict=True)]

    def end_run(self, run: int) -> None:
        """Say that a run is over."""
        self._call("EndRun", Run(run_id=run))

    def heartbeat(self, run: int) -> bool:
        """Give a sign of life; return whether the SuperLink still knows the run."""
        return bool(self._call("Heartbeat", Run(run_id=run)).goes_on)

    def push(self, run: int, requests: Iterable[tuple[Any, Any]]) -> tuple[list[str], list[str]]:
        """Announce requests by their envelopes and trees.

        Returns:
            Names of those that were taken, and of their objects whose files are missing.
        """
        both = [(envelope.SerializeToString(), tree.SerializeToString()) for envelope, tree in requests]
        envelopes, trees = [one for one, _ in both], [one for _, one in both]
        taken = self._call("Push", Requests(run_id=run, envelopes=envelopes, trees=trees))
        return list(taken.names), list(taken.missing)

    def replies(self, run: int, names: Collection[str]) -> list[Announced]:
        """What has come of these requests."""
        found = self._call("Replies", Asked(run_id=run, names=names)).replies
        return [
            Announced(one.asked, lack=Lack[one.lack])
            if one.lack
            else Announced(one.asked, *pair(one.envelope, one.tree))
            for one in found
        ]

    def let_go(self, names: Collection[str]) -> None:
        """Say that the contents of these messages are not needed any more."""
        self._call("LetGo", Asked(names=names))

    def _call(self, name: str, request: Any) -> Any:
        until = time.monotonic() + self._patience_s
        while True:
            try:
                return self._methods[name](request, timeout=self._answer_s)
            except grpc.RpcError as error:
                if error.code() == grpc.StatusCode.FAILED_PRECONDITION:
                    raise RunLost(GIVEN_UP) from None
                if error.code() not in _AWAY or time.monotonic() >= until:
                    said = grpc_words(error.details()) or error.code().name.lower()
                    problem = f"the SuperLink does not answer: {said}. The log of flwr-server start says why."
                    raise SuperLinkGone(problem) from None
            time.sleep(PAUSE_S)


def answers(coordinator: Coordinator, *, within_s: float = 0.0) -> bool:
    """Whether the SuperLink of this folder answers its own programs, now or within this time.

    Where nothing listens it is known at once; one that listens is waited for ``LOOK_S``.
    """
    until = time.monotonic() + within_s
    while not (well := _answers(coordinator)) and time.monotonic() < until:
        time.sleep(0.2)
    return well


def _answers(coordinator: Coordinator) -> bool:
    try:
        control = Control(coordinator, answer_s=LOOK_S)
    except OSError:
        return False
    try:
        control.health()
    except SuperLinkGone:
        return False
    finally:
        control.close()
    return True


def flower_key(line: str) -> bytes:
    """A public key in Flower's form."""
    return key_bytes(load_ssh_public_key(line.encode()))  # type: ignore[arg-type]
