"""The gRPC server on the port that hospitals connect to, and its gRPC limits.

gRPC cannot limit connections per IP address, so a port that is open to the internet needs a proxy
(``docker/haproxy.cfg``).
"""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from polyclinic.common import __version__
from polyclinic.common.security.phrase import compute_certificate_key_hash
from polyclinic.common.wire.fleet_protocol import (
    FLEET_SERVICE,
    HELLO_METHOD,
    HELLO_SERVICE,
    MAX_CALL_BYTES,
    ActivateNodeRequest,
    ConfirmMessageReceivedRequest,
    DeactivateNodeRequest,
    GetFabRequest,
    GetRunRequest,
    HelloAnswer,
    PullMessagesRequest,
    PullObjectRequest,
    PushMessagesRequest,
    SendNodeHeartbeatRequest,
)
from polyclinic.common.wire.versions import WIRE_VERSION
from polyclinic.server.deployment.superlink.authentication import (
    CallAuthenticator,
    CallingSite,
    CallSignatureVerifier,
    HospitalCallRefused,
    RegisteredSiteKeys,
    parse_signed_headers,
    read_stated_release,
)
from polyclinic.server.deployment.superlink.fleet_service import FleetService
from polyclinic.server.deployment.superlink.messages import SuperLinkStorage
from polyclinic.server.deployment.superlink.object_store import ParsedObjectPush
from polyclinic.server.deployment.superlink.refused_calls import REFUSED_CALLS_FILE, RefusedCallLog, UnknownCallerCounts

THREADS = 1000
"""Calls that are answered at a time; a call whose request arrives slowly holds a thread meanwhile."""
MOST_CALLS = 2000
"""Calls that wait or are answered at a time; gRPC refuses further calls at once with RESOURCE_EXHAUSTED."""
CALLS_PER_CONNECTION = 32
"""gRPC lets further calls wait at the client."""
LARGEST_METADATA = 8192
"""Bytes of a call's headers: a hospital's signature, key and versions are 1 KB."""
HANDSHAKE_S = 10.0
"""Time for the TLS and HTTP/2 handshakes of a connection."""
IDLE_S = 30.0
"""Time without a call after which a connection is closed; sites send a heartbeat every five seconds."""
KEEPALIVE_MS = 210_000
"""Some networks cut connections that are silent for four minutes."""


def start_server_for_hospitals(
    address: str, storage: SuperLinkStorage, certificates: tuple[bytes, bytes, bytes], folder: Path, connections: int
) -> tuple[grpc.Server, int]:
    """Open the port that hospitals connect to.

    Args:
        certificates: PEM of the authority's certificate, the server's certificate and the server's key.
        folder: The coordinator's folder ``state``.
        connections: Greatest number of connections at a time; gRPC closes further ones at once.

    Returns:
        The running server, and its port.

    Raises:
        OSError: If the port is in use.
    """

    def read_registered_callers() -> dict[bytes, CallingSite]:
        sites = storage.sites.map_keys_to_sites()
        return {key: CallingSite(site.node_id, site.name, key) for key, site in sites.items()}

    admitted = RegisteredSiteKeys(read_registered_callers)
    fleet, strangers, refused = (
        FleetService(storage, admitted, folder),
        UnknownCallerCounts(),
        folder / REFUSED_CALLS_FILE,
    )
    refuse_caller = fleet.processes.refuse_earlier_process
    root, certificate, key = certificates
    authority = compute_certificate_key_hash(root.decode())
    authenticator = CallAuthenticator(authority, admitted, RefusedCallLog(refused), strangers, refuse_caller)
    server = grpc.server(
        ThreadPoolExecutor(THREADS, thread_name_prefix="fleet"),
        handlers=(
            make_connection_check_handler(authority, admitted, strangers),
            grpc.method_handlers_generic_handler(FLEET_SERVICE, make_fleet_method_handlers(fleet, authenticator)),
        ),
        options=make_grpc_server_options(connections),
        maximum_concurrent_rpcs=MOST_CALLS,
    )
    try:
        port = server.add_secure_port(address, grpc.ssl_server_credentials([(key, certificate)], root))
    except RuntimeError as error:
        raise OSError(f"{address} cannot be listened on: {error}") from None
    server.start()
    return server, port


def make_grpc_server_options(connections: int) -> list[tuple[str, int]]:
    """Return gRPC options that limit the resources which an unauthenticated caller can use."""
    return [
        ("grpc.max_receive_message_length", MAX_CALL_BYTES),
        ("grpc.max_send_message_length", MAX_CALL_BYTES),
        ("grpc.max_concurrent_streams", CALLS_PER_CONNECTION),
        ("grpc.max_metadata_size", LARGEST_METADATA),
        ("grpc.absolute_max_metadata_size", LARGEST_METADATA),
        ("grpc.max_allowed_incoming_connections", connections),
        ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_S * 1000)),
        ("grpc.max_connection_idle_ms", int(IDLE_S * 1000)),
        # Otherwise gRPC accepts more and more of what nobody reads yet: megabytes a connection, on a fast line. A
        # message that is being read has a window of a megabyte without it.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.keepalive_permit_without_calls", 0),
        ("grpc.so_reuseport", 0),  # a second SuperLink on the port is an error
    ]


def make_fleet_method_handlers(
    fleet: FleetService, authenticator: CallAuthenticator
) -> Mapping[str, grpc.RpcMethodHandler]:
    """Return gRPC handlers by method name, for the methods of Flower's Fleet API that hospitals may call."""
    methods: dict[str, tuple[Callable[[CallingSite, Any], Any], Any]] = {
        "ActivateNode": (fleet.activate_site, ActivateNodeRequest),
        "DeactivateNode": (fleet.sign_off_site, DeactivateNodeRequest),
        "SendNodeHeartbeat": (fleet.record_heartbeat, SendNodeHeartbeatRequest),
        "RegisterNode": (fleet.refuse_registration, DeactivateNodeRequest),
        "UnregisterNode": (fleet.refuse_registration, DeactivateNodeRequest),
        "PullMessages": (fleet.pull_messages, PullMessagesRequest),
        "PushMessages": (fleet.push_messages, PushMessagesRequest),
        "ConfirmMessageReceived": (fleet.confirm_message_received, ConfirmMessageReceivedRequest),
        "GetRun": (fleet.get_run_info, GetRunRequest),
        "GetFab": (fleet.get_flower_app_bundle, GetFabRequest),
    }

    def serialize_response(response: Any) -> bytes:
        return bytes(response.SerializeToString())

    make = authenticator.make_authenticated_handler
    return {
        **{name: make(name, answer, kind.FromString, serialize_response) for name, (answer, kind) in methods.items()},
        "PushObject": make("PushObject", fleet.push_object, ParsedObjectPush.parse_push_request, serialize_response),
        "PullObject": make("PullObject", fleet.pull_object, PullObjectRequest.FromString, bytes),
    }


def make_connection_check_handler(
    authority: str, admitted: RegisteredSiteKeys, strangers: UnknownCallerCounts
) -> grpc.GenericRpcHandler:
    """Make the handler that tells a site the time, the release, the wire version, and whether its key is admitted.

    A site with a wrong clock needs this answer, so the signature may be of any age, and anybody who has seen one may
    repeat it. The handler therefore records nothing about the site, such as the release that the call states.

    Args:
        authority: Hash of the key of this coordinator's authority, for which callers sign.
        admitted: Public keys of the registered sites.
        strangers: Counts the calls without an admitted key.
    """
    signatures = CallSignatureVerifier(authority)

    def answer_connection_check(_: object, context: grpc.ServicerContext) -> bytes:
        try:
            key, when, signature = parse_signed_headers(context.invocation_metadata())
            caller = admitted.find_caller_by_key(key)  # first: strangers cost no check of a signature
            signed = None if caller is None else signatures.find_what_was_signed(key, when, signature)
        except HospitalCallRefused:
            caller = signed = None
        if signed is None:
            caller = None
        stated = read_stated_release(context.invocation_metadata(), signed)
        if caller is None:
            strangers.count_refused_call(context.peer(), "asked whether its key is admitted, which it is not")
        answer = HelloAnswer(
            time=time.time(),
            release=__version__,
            wire=stated.agreed_version,
            newest=WIRE_VERSION,
            key="unknown" if caller is None else "admitted",
            site="" if caller is None else caller.name,
        )
        return answer.model_dump_json().encode()

    # As a stream of requests that nobody reads: a stranger may ask, and no byte of the request is accepted.
    handler = grpc.stream_unary_rpc_method_handler(answer_connection_check)
    return grpc.method_handlers_generic_handler(HELLO_SERVICE, {HELLO_METHOD: handler})
