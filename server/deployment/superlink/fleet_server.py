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

MAX_THREADS = 1000
"""Greatest number of calls that are answered at a time; a call whose request arrives slowly holds a thread."""
MAX_CONCURRENT_CALLS = 2000
"""Greatest number of calls that wait or are answered; gRPC refuses more calls at once with RESOURCE_EXHAUSTED."""
MAX_CALLS_PER_CONNECTION = 32
"""Greatest number of calls in progress on a connection; gRPC lets more calls wait at the client."""
MAX_METADATA_BYTES = 8192
"""Greatest size of a call's headers: a hospital's signature, key and versions take 1 KB."""
HANDSHAKE_TIMEOUT_S = 10.0
"""Timeout of the TLS and HTTP/2 handshakes of a connection."""
MAX_IDLE_S = 30.0
"""Seconds without a call after which a connection is closed; sites send a heartbeat every five seconds."""
KEEPALIVE_INTERVAL_MS = 210_000
"""Interval between HTTP/2 pings. Some networks cut connections that are silent for four minutes."""


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
    fleet = FleetService(storage, admitted, folder)
    unknown_callers = UnknownCallerCounts()
    root, certificate, key = certificates
    authority = compute_certificate_key_hash(root.decode())
    authenticator = CallAuthenticator(
        authority,
        admitted,
        RefusedCallLog(folder / REFUSED_CALLS_FILE),
        unknown_callers,
        fleet.processes.refuse_earlier_process,
    )
    server = grpc.server(
        ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="fleet"),
        handlers=(
            make_connection_check_handler(authority, admitted, unknown_callers),
            grpc.method_handlers_generic_handler(FLEET_SERVICE, make_fleet_method_handlers(fleet, authenticator)),
        ),
        options=make_grpc_server_options(connections),
        maximum_concurrent_rpcs=MAX_CONCURRENT_CALLS,
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
        ("grpc.max_concurrent_streams", MAX_CALLS_PER_CONNECTION),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.max_allowed_incoming_connections", connections),
        ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_TIMEOUT_S * 1000)),
        ("grpc.max_connection_idle_ms", int(MAX_IDLE_S * 1000)),
        # With this probe, gRPC enlarges its receive window on fast lines, and buffers megabytes per connection that
        # nobody has read. Without it, the window of a message that is being read is one megabyte.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.keepalive_time_ms", KEEPALIVE_INTERVAL_MS),
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
    authority: str, admitted: RegisteredSiteKeys, unknown_callers: UnknownCallerCounts
) -> grpc.GenericRpcHandler:
    """Make the handler of ``Hello``, which returns the time, release and wire version, and if the key is admitted.

    A site with a wrong clock needs this answer, so a signature of any age is accepted, and others may replay it. The
    handler therefore records nothing about the site, such as the release that the call states.

    Args:
        authority: Hash of the public key of this coordinator's certificate authority: the audience of signatures.
        admitted: Cache of the registered sites' keys.
        unknown_callers: Counts the calls without an admitted key.
    """
    signatures = CallSignatureVerifier(authority)

    def answer_connection_check(_: object, context: grpc.ServicerContext) -> bytes:
        try:
            key, when, signature = parse_signed_headers(context.invocation_metadata())
            caller = admitted.find_caller_by_key(key)  # first: an unknown key costs no check of a signature
            audience = None if caller is None else signatures.find_signature_audience(key, when, signature)
        except HospitalCallRefused:
            caller = audience = None
        if audience is None:
            caller = None
        stated = read_stated_release(context.invocation_metadata(), audience)
        if caller is None:
            unknown_callers.count_refused_call(context.peer(), "asked whether its key is admitted, which it is not")
        answer = HelloAnswer(
            time=time.time(),
            release=__version__,
            wire=stated.agreed_version,
            newest=WIRE_VERSION,
            key="unknown" if caller is None else "admitted",
            site="" if caller is None else caller.name,
        )
        return answer.model_dump_json().encode()

    # Declared as a stream of requests that is never read: callers are not authenticated, so no request is accepted.
    handler = grpc.stream_unary_rpc_method_handler(answer_connection_check)
    return grpc.method_handlers_generic_handler(HELLO_SERVICE, {HELLO_METHOD: handler})
