"""The gRPC server of the hospital link: the one port that hospitals reach."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from flwr.proto.fab_pb2 import GetFabRequest
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
    UnregisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest
from flwr.proto.run_pb2 import GetRunRequest
from flwr.supercore.constant import NodeStatus
from flwr.supercore.object_store import NoObjectInStoreError

from common.wire.flower_objects import names_in
from server.deployment.superlink.fleet import hello
from server.deployment.superlink.fleet.authentication import Admitted, Caller, Door
from server.deployment.superlink.fleet.message_owners import Owners
from server.deployment.superlink.fleet.refused_calls import FILE, RefusedCalls
from server.deployment.superlink.fleet.service import Fleet
from server.deployment.superlink.objects.files import ObjectFiles
from server.deployment.superlink.objects.service import parsed_push
from server.deployment.superlink.port_guard.grpc_options import AnythingElse, options
from server.deployment.superlink.port_guard.guard import Guard

SERVICE = "flwr.proto.Fleet"
THREADS = 1000
"""Calls that are answered at a time; one whose request arrives slowly holds a thread meanwhile."""
AT_ONCE = 2000
"""Calls that wait or are answered at a time; more are refused at once with RESOURCE_EXHAUSTED."""


class FleetServer:
    """Makes the server in the place of Flower's.

    Args:
        folder: The coordinator's ``state``.
        files: Where contents of objects lie.
        guard: Set to watch the port.
    """

    def __init__(self, folder: Path, files: ObjectFiles, guard: Guard) -> None:
        self._folder, self._files, self._guard = folder, files, guard

    def run(
        self,
        address: str,
        state_factory: Any,
        objectstore_factory: Any,
        certificates: tuple[bytes, bytes, bytes],
    ) -> grpc.Server:
        """Start it.

        Args:
            address: To listen on.
            state_factory, objectstore_factory: Flower's database and object store.
            certificates: The authority's, the server's, and the server's key, as PEM.

        Raises:
            OSError: If the port is in use.
        """
        admitted = Admitted(lambda: admitted_keys(state_factory.state()))
        owners = Owners(self._folder / "owners.db", lambda root: _names(objectstore_factory.store(), root))
        fleet = Fleet(state_factory.state, objectstore_factory.store, self._files, owners, admitted, self._folder)
        door = Door(admitted, RefusedCalls(self._folder / FILE), self._guard)
        server = grpc.server(
            ThreadPoolExecutor(THREADS, thread_name_prefix="fleet"),
            handlers=(
                hello.handler(admitted.node_of, self._guard.refused),
                grpc.method_handlers_generic_handler(SERVICE, methods(fleet, door)),
                AnythingElse(self._guard.refused),
            ),
            options=options(self._guard.limits),
            maximum_concurrent_rpcs=AT_ONCE,
        )
        root, certificate, key = certificates
        try:
            port = server.add_secure_port(address, grpc.ssl_server_credentials([(key, certificate)], root))
        except RuntimeError as error:
            raise OSError(f"{address} cannot be listened on: {error}") from None
        server.bound_address = f"{address.rpartition(':')[0]}:{port}"
        self._guard.start(port)
        server.start()
        return server


def methods(fleet: Fleet, door: Door) -> Mapping[str, grpc.RpcMethodHandler]:
    """The methods of the service by name; Flower's others are not there."""
    plain: dict[str, tuple[Callable[[Caller, Any], Any], Any]] = {
        "ActivateNode": (fleet.activate, ActivateNodeRequest),
        "DeactivateNode": (fleet.deactivate, DeactivateNodeRequest),
        "SendNodeHeartbeat": (fleet.heartbeat, SendNodeHeartbeatRequest),
        "RegisterNode": (fleet.register, RegisterNodeFleetRequest),
        "UnregisterNode": (fleet.register, UnregisterNodeFleetRequest),
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


def admitted_keys(state: Any) -> Mapping[bytes, Caller]:
    """The keys of all registered sites, as Flower's database has them."""
    nodes = state.get_node_info(statuses=[NodeStatus.REGISTERED, NodeStatus.ONLINE, NodeStatus.OFFLINE])
    return {node.public_key: Caller(node.node_id, node.name, node.public_key) for node in nodes}


def _names(store: Any, root: str) -> Sequence[str]:
    """The names of a message's objects; none where it is gone."""
    try:
        return names_in(store.get_object_tree(root))
    except NoObjectInStoreError:
        return ()
