"""Client for the SuperLink's control socket, used by ``flwr-server start``, ``run`` and ``status``.

A message is sent as an envelope (its metadata) and a tree (the ids of its objects), both as serialized protobuf.
"""

import time
from collections.abc import Collection, Iterable
from contextlib import closing
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import grpc
from cryptography.hazmat.primitives.serialization import load_ssh_public_key

from polyclinic.common.errors import ProgramCannotContinue
from polyclinic.common.security.call_signatures import encode_public_key_pem
from polyclinic.common.system.plain_text import shorten_grpc_details
from polyclinic.common.wire.fleet_protocol import make_protobuf_message_classes
from polyclinic.common.wire.versions import StatedRelease
from polyclinic.server.coordinator.folder import CoordinatorFolder
from polyclinic.server.coordinator.state import ControlSocketPath
from polyclinic.server.deployment.superlink.messages import NoReplyReason, parse_message_envelope
from polyclinic.server.deployment.superlink.registrations import RegisteredSite, SiteConnectionState

RUN_RETRY_TIMEOUT_S = 900.0
"""Time for which a run repeats a call to a SuperLink that does not answer."""
CONTROL_CALL_TIMEOUT_S = 20.0
"""Timeout of one call; after that the call is made again, or the SuperLink counts as unavailable."""
HEALTH_CHECK_TIMEOUT_S = 10.0
"""Timeout of a health check; two seconds are too few on a busy machine."""
RETRY_DELAY_S = 0.2
GIVEN_UP_MESSAGE = "the SuperLink heard nothing of this run for too long, and gave it up."
_RETRIED_STATUS_CODES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)

CONTROL_SERVICE = "polyclinic.Control"
MAX_CALL_BYTES = 64 * 2**20
"""Greatest size of a call in bytes. One call announces requests to thousands of sites, without their contents."""
proto = SimpleNamespace(
    **{
        name.rpartition(".")[2]: message_class
        for name, message_class in make_protobuf_message_classes(
            "polyclinic.control",
            """
Nothing:
Site: 1 uint64 node_id, 2 string name, 3 string state, 4 bytes public_key, 5 string process, 6 uint32 wire, \
7 string release
Sites: 1 Site* sites
Run: 1 uint64 run_id, 2 bool goes_on
Nodes: 1 uint64* node_ids, 2 bool all_nodes
RunBegin: 1 uint64 run_id, 2 bytes* envelopes, 3 bytes* trees
Requests: 1 uint64 run_id, 2 bytes* envelopes, 3 bytes* trees
PushResult: 1 string* names, 2 string* missing
MessageNames: 1 uint64 run_id, 2 string* names
Reply: 1 string request, 2 bytes envelope, 3 bytes tree, 4 string reason
Replies: 1 Reply* replies
""",
        ).items()
    }
)
"""Protobuf classes of the requests and responses, as attributes."""
CALL_MESSAGE_CLASSES: dict[str, tuple[Any, Any]] = {
    "health": (proto.Nothing, proto.Nothing),
    "list_sites": (proto.Nothing, proto.Sites),
    "register": (proto.Site, proto.Nothing),
    "unregister": (proto.Site, proto.Nothing),
    "begin_run": (proto.Nodes, proto.RunBegin),
    "end_run": (proto.Run, proto.Nothing),
    "heartbeat": (proto.Run, proto.Run),
    "push": (proto.Requests, proto.PushResult),
    "replies": (proto.MessageNames, proto.Replies),
    "release": (proto.MessageNames, proto.Nothing),
}
"""Name of a call -> protobuf classes of its request and its response."""


class SuperLinkUnreachable(ProgramCannotContinue):
    """Raised when the SuperLink does not answer within the time that its caller waits."""


class RunEndedBySuperLink(RuntimeError):
    """Raised when the SuperLink has ended a run because its heartbeats were missing for too long."""


@dataclass(frozen=True)
class ReplyStatus:
    """The outcome of one request on the SuperLink: its reply, or the reason why no reply will come.

    Attributes:
        request: Id of the request.
        envelope: Metadata of the reply; None without a reply.
        tree: Tree of the ids of the reply's objects; None without a reply.
        reason: Reason why no reply will come; None for a reply.
    """

    request: str
    envelope: Any = None
    tree: Any = None
    reason: NoReplyReason | None = None


class SuperLinkControlClient:
    """Client of the SuperLink's control socket. Every call can be repeated without harm.

    Args:
        retry_s: Seconds for which calls are retried while the SuperLink is unavailable.
        timeout_s: Timeout of one call in seconds.
    """

    def __init__(
        self, coordinator: CoordinatorFolder, *, retry_s: float = 0.0, timeout_s: float = CONTROL_CALL_TIMEOUT_S
    ) -> None:
        self._retry_s = retry_s
        self._timeout_s = timeout_s
        self._socket = ControlSocketPath(coordinator.state_path)
        options = [
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_send_message_length", -1),
            ("grpc.enable_retries", 0),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", int(1000 * HEALTH_CHECK_TIMEOUT_S)),
            ("grpc.max_reconnect_backoff_ms", 1000),
        ]
        self._channel = grpc.insecure_channel(self._socket.grpc_address, options=options)
        self._methods = {
            name: self._channel.unary_unary(
                f"/{CONTROL_SERVICE}/{name}",
                request_serializer=request.SerializeToString,
                response_deserializer=response.FromString,
            )
            for name, (request, response) in CALL_MESSAGE_CLASSES.items()
        }

    def close(self) -> None:
        """Close the connection to the control socket."""
        self._channel.close()
        self._socket.close()

    def stop_retrying(self) -> None:
        """Stop retrying calls from now on, and shorten the timeout of a call to at most three seconds."""
        self._retry_s = 0.0
        self._timeout_s = min(self._timeout_s, 3.0)

    def check_health(self) -> None:
        """Check the SuperLink; raise :class:`SuperLinkUnreachable` if it does not answer."""
        self._call_with_retries("health", proto.Nothing())

    def list_registered_sites(self) -> list[RegisteredSite]:
        """Return all registered sites with their connection states."""
        return [
            RegisteredSite(
                site.node_id,
                site.name,
                site.public_key,
                SiteConnectionState(site.state),
                process=site.process,
                stated=StatedRelease(site.wire, site.release) if site.wire else None,
            )
            for site in self._call_with_retries("list_sites", proto.Nothing()).sites
        ]

    def register_site(self, name: str, public_key: str) -> None:
        """Register a site: its name, and its public key as an OpenSSH line."""
        self._call_with_retries("register", proto.Site(name=name, public_key=convert_openssh_key_to_pem(public_key)))

    def unregister_site(self, node: RegisteredSite) -> None:
        """Remove a site's registration; calls signed with its key are then refused."""
        self._call_with_retries("unregister", proto.Site(node_id=node.node_id))

    def begin_run(self, nodes: Collection[int] | None = None) -> tuple[int, list[tuple[Any, Any]]]:
        """Begin a run; end each earlier run whose process was killed, so that sites stop working for it.

        Args:
            nodes: Node ids of the run's sites, which must not take part in another run in progress; None for all sites.

        Returns:
            The run's number; and envelope (metadata) and tree of object ids of each reply that no run has recorded yet.
        """
        begin = self._call_with_retries("begin_run", proto.Nodes(node_ids=nodes or (), all_nodes=nodes is None))
        return int(begin.run_id), list(map(parse_message_envelope, begin.envelopes, begin.trees))

    def end_run(self, run: int) -> None:
        """Mark a run as ended on the SuperLink, which then removes the files of its requests."""
        self._call_with_retries("end_run", proto.Run(run_id=run))

    def send_run_heartbeat(self, run: int) -> bool:
        """Send a run's heartbeat; return whether the run is still active on the SuperLink."""
        return bool(self._call_with_retries("heartbeat", proto.Run(run_id=run)).goes_on)

    def announce_requests_to_superlink(
        self, run: int, requests: Iterable[tuple[Any, Any]]
    ) -> tuple[list[str], list[str]]:
        """Announce requests to the SuperLink; their contents are passed as files.

        Args:
            run: The run's number.
            requests: Envelope (metadata) and tree of object ids of each request.

        Returns:
            Ids of the accepted requests; and ids of their objects whose files are missing.
        """
        serialized = [(envelope.SerializeToString(), tree.SerializeToString()) for envelope, tree in requests]
        envelopes = [envelope for envelope, _ in serialized]
        trees = [tree for _, tree in serialized]
        result = self._call_with_retries("push", proto.Requests(run_id=run, envelopes=envelopes, trees=trees))
        return list(result.names), list(result.missing)

    def fetch_replies_or_failures(self, run: int, names: Collection[str]) -> list[ReplyStatus]:
        """Return for each request its reply, or the reason why none will come; leave out requests that await a reply.

        Args:
            run: The run's number.
            names: Ids of the requests.
        """
        return [
            ReplyStatus(reply.request, reason=NoReplyReason[reply.reason])
            if reply.reason
            else ReplyStatus(reply.request, *parse_message_envelope(reply.envelope, reply.tree))
            for reply in self._call_with_retries("replies", proto.MessageNames(run_id=run, names=names)).replies
        ]

    def allow_message_file_deletion(self, names: Collection[str]) -> None:
        """Allow the SuperLink to delete the files of messages, except files that other messages still need.

        Args:
            names: Ids of the messages.
        """
        self._call_with_retries("release", proto.MessageNames(names=names))

    def _call_with_retries(self, name: str, request: Any) -> Any:
        """Return the response to a call of :data:`CALL_MESSAGE_CLASSES`; retry it while the SuperLink is unavailable.

        Raises:
            RunEndedBySuperLink: If the call is about a run that the SuperLink has ended.
            SuperLinkUnreachable: If no answer comes in time.
        """
        until = time.monotonic() + self._retry_s
        while True:
            try:
                return self._methods[name](request, timeout=self._timeout_s)
            except grpc.RpcError as error:
                if error.code() == grpc.StatusCode.FAILED_PRECONDITION:
                    raise RunEndedBySuperLink(GIVEN_UP_MESSAGE) from None
                if error.code() not in _RETRIED_STATUS_CODES or time.monotonic() >= until:
                    details = shorten_grpc_details(error.details()) or error.code().name.lower()
                    problem = f"the SuperLink does not answer: {details}. The log of flwr-server start says why."
                    raise SuperLinkUnreachable(problem) from None
            time.sleep(RETRY_DELAY_S)


def is_superlink_answering(coordinator: CoordinatorFolder, *, within_s: float = 0.0) -> bool:
    """Return whether the SuperLink of this folder answers; try again for ``within_s`` seconds.

    A try fails at once if no process listens on the socket, else after :data:`HEALTH_CHECK_TIMEOUT_S` seconds.
    """
    until = time.monotonic() + within_s
    while True:
        try:
            with closing(SuperLinkControlClient(coordinator, timeout_s=HEALTH_CHECK_TIMEOUT_S)) as control:
                control.check_health()
            return True
        except (OSError, SuperLinkUnreachable):
            if time.monotonic() >= until:
                return False
        time.sleep(RETRY_DELAY_S)


def convert_openssh_key_to_pem(line: str) -> bytes:
    """Convert a public key from an OpenSSH line to PEM, the format that Flower sends."""
    return encode_public_key_pem(load_ssh_public_key(line.encode()))  # type: ignore[arg-type]
