"""The gRPC server of the hospital link: the one port that hospitals reach."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from common.wire.fleet_protocol import (
    SERVICE,
    ActivateNodeRequest,
    ConfirmMessageReceivedRequest,
    DeactivateNodeRequest,
    GetFabRequest,
    GetRunRequest,
    PullMessagesRequest,
    PullObjectRequest,
    PushMessagesRequest,
    SendNodeHeartbeatRequest,
)
from server.deployment.superlink.fleet import hello
from server.deployment.superlink.fleet.authentication import Admitted, Caller, Door
from server.deployment.superlink.fleet.refused_calls import FILE, RefusedCalls
from server.deployment.superlink.fleet.service import Fleet
from server.deployment.superlink.objects.service import parsed_push
from server.deployment.superlink.port_guard.grpc_options import AnythingElse, options
from server.deployment.superlink.port_guard.guard import Guard
from server.deployment.superlink.storage.sites import Sites
from server.deployment.superlink.storage.storage import Storage

THREADS = 1000
"""Calls that are answered at a time; one whose request arrives slowly holds a thread meanwhile."""
AT_ONCE = 2000
"""Calls that wait or are answered at a time; more are refused at once with RESOURCE_EXHAUSTED."""


def serve_hospitals(
    address: str, storage: Storage, certificates: tuple[bytes, bytes, bytes], folder: Path, guard: Guard
) -> tuple[grpc.Server, int]:
    """Open the port.

    Args:
        address: To listen on.
        certificates: The authority's, the server's, and the server's key, as PEM.
        folder: The coordinator's ``state``.
        guard: Set to watch the port.

    Returns:
        The server, and the port.

    Raises:
        OSError: If the port is in use.
    """
    admitted = Admitted(lambda: admitted_keys(storage.sites))
    fleet = Fleet(storage, admitted, folder)
    door = Door(admitted, RefusedCalls(folder / FILE), guard, fleet.one_process.refuse_an_earlier_one)
    server = grpc.server(
        ThreadPoolExecutor(THREADS, thread_name_prefix="fleet"),
        handlers=(
            hello.handler(admitted.node_of, guard.refused),
            grpc.method_handlers_generic_handler(SERVICE, methods(fleet, door)),
            AnythingElse(guard.refused),
        ),
        options=options(guard.limits),
        maximum_concurrent_rpcs=AT_ONCE,
    )
    root, certificate, key = certificates
    try:
        port = server.add_secure_port(address, grpc.ssl_server_credentials([(key, certificate)], root))
    except RuntimeError as error:
        raise OSError(f"{address} cannot be listened on: {error}") from None
    guard.start(port)
    server.start()
    return server, port


def methods(fleet: Fleet, door: Door) -> Mapping[str, grpc.RpcMethodHandler]:
    """The methods of the service by name; Flower's others are not there."""
    plain: dict[str, tuple[Callable[[Caller, Any], Any], Any]] = {
        "ActivateNode": (fleet.activate, ActivateNodeRequest),
        "DeactivateNode": (fleet.deactivate, DeactivateNodeRequest),
        "SendNodeHeartbeat": (fleet.heartbeat, SendNodeHeartbeatRequest),
        "RegisterNode": (fleet.register, DeactivateNodeRequest),
        "UnregisterNode": (fleet.register, DeactivateNodeRequest),
        "PullMessages": (fleet.pull_messages, PullMessagesRequest),
        "PushMessages": (fleet.push_messages, PushMessagesRequest),
        "ConfirmMessageReceived": (fleet.confirm, ConfirmMessageReceivedRequest),
        "GetRun": (fleet.get_run, GetRunRequest),
        "GetFab": (fleet.get_bundle, GetFabRequest),
    }
    handlers = {
        name: door.handler(name, answer, request.FromString, lambda found: found.SerializeToString())
        for name, (answer, request) in plain.items()
    }
    handlers["PushObject"] = door.handler(
        "PushObject", fleet.push_object, parsed_push, lambda found: found.SerializeToString()
    )
    handlers["PullObject"] = door.handler("PullObject", fleet.pull_object, PullObjectRequest.FromString, bytes)
    return handlers


def admitted_keys(sites: Sites) -> Mapping[bytes, Caller]:
    """The keys of all registered sites."""
    return {key: Caller(site.node_id, site.name, key) for key, site in sites.by_key().items()}
