"""Flower's APIs on loopback, called by another account of the machine: without the secret nothing is answered."""

import socket
import ssl
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx
import pytest
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListRunsRequest,
    RegisterNodeRequest,
    StartRunRequest,
    StopRunRequest,
    UnregisterNodeRequest,
)
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest, PushObjectRequest
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    GetNodesRequest,
    PullAppMessagesRequest,
    PullTaskInputRequest,
    PushAppMessagesRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.superlink import extensions
from flwr.superlink import main as superlink_main

from server.coordinator.folder import Coordinator, read_coordinator
from server.deployment.superlink.local.loopback import HEADER, secret_file, secret_of
from server.deployment.superlink.local.process import SuperLink, answers
from server.deployment.superlink.run_client.control import Control
from tests.network.real import flwr_server, free_ports

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    """A SuperLink that runs."""
    folder = tmp_path_factory.mktemp("loopback") / "trial"
    port, control_port = free_ports(2)
    ports = ("--port", port, "--control-port", control_port)
    assert flwr_server("init", folder, "--name", "trial", "--host", "127.0.0.1", *ports).code == 0
    made = read_coordinator(folder)
    made.state.mkdir(exist_ok=True)
    link = SuperLink(made)
    link.start()
    yield made
    link.stop()


CONTROL: dict[str, Any] = {
    "ListNodes": ListNodesRequest(),
    "ListRuns": ListRunsRequest(),
    "RegisterNode": RegisterNodeRequest(public_key=b"any", name="ghost"),
    "UnregisterNode": UnregisterNodeRequest(node_id=1),
    "StartRun": StartRunRequest(),
    "StopRun": StopRunRequest(run_id=1),
}
RUNTIME: dict[str, Any] = {
    "AcquireTask": AcquireTaskRequest(),
    "GetNodes": GetNodesRequest(),
    "PullTaskInput": PullTaskInputRequest(),
    "PushTaskOutput": PushTaskOutputRequest(),
    "SendTaskHeartbeat": SendTaskHeartbeatRequest(),
    "PushMessages": PushAppMessagesRequest(),
    "PullMessages": PullAppMessagesRequest(),
    "PullObject": PullObjectRequest(),
    "PushObject": PushObjectRequest(),
    "ConfirmMessageReceived": ConfirmMessageReceivedRequest(),
}


@pytest.mark.parametrize("call", [*CONTROL, *RUNTIME])
def test_a_call_without_the_secret_is_refused_whatever_it_asks(call: str, coordinator: Coordinator) -> None:
    kind: Any = ControlHttpClient if call in CONTROL else RuntimeHttpClient
    names = [RuntimeVersionHttpInterceptor("flwr CLI"), RuntimeTokenHttpInterceptor("guessed")]
    client = kind.from_server_address(
        coordinator.control_address, False, coordinator.ca_certificate.read_bytes(), names
    )
    with closing(client), pytest.raises(httpx.HTTPStatusError) as refused:
        getattr(client, call)((CONTROL | RUNTIME)[call])
    assert refused.value.response.status_code == 401
    assert "only who can read the coordinator's folder" in refused.value.response.text


PATHS = ["/health", "/docs", "/openapi.json", "/v1/control/list-nodes", "/v1/fleet/activate-node", "/v1/none", "/"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("secret", [None, "", "0" * 64, "\u00fc"])
def test_no_page_answers_without_the_secret_or_with_another(
    path: str, secret: str | None, coordinator: Coordinator
) -> None:
    headers = {} if secret is None else {HEADER: secret.encode()}
    with httpx.Client(verify=False, trust_env=False) as client:
        for method in ("GET", "POST", "OPTIONS", "HEAD"):
            url = f"https://{coordinator.control_address}{path}"
            assert client.request(method, url, headers=headers).status_code == 401


def test_a_body_is_not_waited_for_without_the_secret(coordinator: Coordinator) -> None:
    context = ssl.create_default_context(cafile=str(coordinator.ca_certificate))
    head = "POST /v1/control/start-run HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2147483648\r\n\r\n"
    plain = socket.create_connection(("127.0.0.1", coordinator.file.control_port), timeout=20)
    with context.wrap_socket(plain, server_hostname="localhost") as connection:
        connection.sendall(head.encode())
        assert connection.recv(1000).startswith(b"HTTP/1.1 401 ")


def test_flower_asks_the_hook_that_we_fill() -> None:
    assert {"extensions", "get_middleware"} <= set(superlink_main._get_middleware.__code__.co_names)
    assert superlink_main.extensions is extensions


def test_the_secret_is_readable_by_its_owner_only_and_not_what_calls_carry(coordinator: Coordinator) -> None:
    path = secret_file(coordinator)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_bytes().hex() != secret_of(path)


def test_who_reads_the_folder_is_answered(coordinator: Coordinator) -> None:
    assert answers(coordinator)
    with closing(Control(coordinator)) as control:
        assert control.nodes() == []
