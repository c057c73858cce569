"""Flower's Control API: sites registered, runs begun and stopped."""

import hashlib
from contextlib import suppress
from dataclasses import dataclass

import httpx
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.cli.build import build_fab_from_files
from flwr.common.constant import Status
from flwr.common.serde import fab_to_proto, user_config_to_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListRunsRequest,
    RegisterNodeRequest,
    StartRunRequest,
    StopRunRequest,
    UnregisterNodeRequest,
)
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

from common.security.call_signatures import key_bytes
from server.coordinator.folder import Coordinator
from server.deployment.superlink.local.loopback import SecretInterceptor
from server.deployment.superlink.run_client.retry import quiet, retrying

LEFT_AT_MOST = 20
"""Runs that are looked at, from the newest on, for one that was left; one at a time holds the folder's lock."""

APP = """[project]
name = "polyclinic"
version = "1"
description = "Names the app that every site has installed; carries no code."
license = "Apache-2.0"
dependencies = ["flwr"]
[tool.flwr.app]
publisher = "polyclinic"
[tool.flwr.app.components]
serverapp = "installed:on_the_coordinator"
clientapp = "installed:at_the_site"
[tool.flwr.app.config]
"""


@dataclass(frozen=True)
class Node:
    """A registered site as the SuperLink sees it; ``public_key`` in Flower's form."""

    node_id: int
    name: str
    online: bool
    public_key: bytes


class Control:
    """The few things that we ask of Flower's Control API.

    Args:
        patient: Wait for a SuperLink that is being restarted, as a run does.
    """

    def __init__(self, coordinator: Coordinator, *, patient: bool = False) -> None:
        quiet()
        self._client = ControlHttpClient.from_server_address(
            coordinator.control_address,
            False,
            coordinator.ca_certificate.read_bytes(),
            [RuntimeVersionHttpInterceptor(component_name="flwr CLI"), SecretInterceptor(coordinator)],
            retry_invoker=retrying() if patient else None,
        )

    def close(self) -> None:
        """Hang up."""
        self._client.close()

    def nodes(self) -> list[Node]:
        """All registered sites."""
        found = self._client.ListNodes(ListNodesRequest()).nodes_info
        return [
            Node(node.node_id, node.name, node.status == "online", node.public_key)
            for node in found
            if node.status != "unregistered"
        ]

    def register(self, name: str, public_key: str) -> None:
        """Register a site's key under its name."""
        self._client.RegisterNode(RegisterNodeRequest(public_key=flower_key(public_key), name=name))

    def unregister(self, node: Node) -> None:
        """Take a registration back: from now on every call that is signed with its key is refused."""
        self._client.UnregisterNode(UnregisterNodeRequest(node_id=node.node_id))

    def start_run(self) -> int:
        """Submit the app bundle that carries no code; return the run's number."""
        content, _ = build_fab_from_files({"pyproject.toml": APP.encode()})
        fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
        request = StartRunRequest(fab=fab_to_proto(fab), override_config=user_config_to_proto({}))
        return int(self._client.StartRun(request).run_id)

    def stop_run(self, run_id: int) -> None:
        """Stop a run that nobody leads."""
        self._client.StopRun(StopRunRequest(run_id=run_id))

    def stop_left(self) -> None:
        """Stop what a run left whose process was killed, so that sites drop their work on it."""
        found = self._client.ListRuns(ListRunsRequest(limit=LEFT_AT_MOST)).run_dict
        for run_id, run in found.items():
            if run.status.status != Status.FINISHED:
                with suppress(httpx.HTTPStatusError):  # it has just ended
                    self.stop_run(run_id)


def flower_key(line: str) -> bytes:
    """A public key in the form in which Flower stores it."""
    return key_bytes(load_ssh_public_key(line.encode()))  # type: ignore[arg-type]
