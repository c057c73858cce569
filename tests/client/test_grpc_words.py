"""What gRPC and the other end say of a broken line comes as one short line; nothing of it comes past our own log."""

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from client.connection.exit_codes import Refused, Unreachable
from client.connection.fleet_client import FleetClient, RunOver
from common.security.call_signatures import ANOTHER_PROCESS
from common.system.plain_text import MOST_WORDS, is_plain
from common.wire.fleet_protocol import HELLO_METHOD, HELLO_SERVICE
from server.coordinator.folder import Coordinator
from tests.client.check.servers import grpc_server, tls_of
from tests.client.handshakes import coordinator_in, listening

KEY = ec.generate_private_key(ec.SECP256R1())
TRACE = "\n\n=== Source Location Trace: ===\nsrc/core/util/status_helper.cc:68\n"
HOSTILE = f"\x1b[2J\u202ered{TRACE}\n12:00:00  round 9 of 9{'x' * 3000}"
CALL = """
import common  # first, as in our programs
import sys
from cryptography.hazmat.primitives.asymmetric import ec
from client.connection.exit_codes import Unreachable
from client.connection.fleet_client import FleetClient
try:
    FleetClient(sys.argv[1], open(sys.argv[2], "rb").read(), ec.generate_private_key(ec.SECP256R1())).hello()
except Unreachable as error:
    print(error)
"""


@pytest.fixture
def coordinator(tmp_path: Path) -> Coordinator:
    return coordinator_in(tmp_path)


def authority(coordinator: Coordinator) -> Path:
    return coordinator.authority / "ca.crt"


def link_to(port: int, coordinator: Coordinator) -> FleetClient:
    return FleetClient(f"127.0.0.1:{port}", authority(coordinator).read_bytes(), KEY)


def refuses(connection: socket.socket) -> None:
    connection.recv(4096)
    connection.sendall(b"HTTP/1.1 403 Forbidden\r\n\r\n")


def test_what_grpcs_core_writes_of_a_refusing_proxy_is_not_in_a_sites_log(coordinator: Coordinator) -> None:
    with listening(refuses) as port:
        environment = {**os.environ, "https_proxy": f"http://127.0.0.1:{port}", "no_proxy": "", "no_grpc_proxy": ""}
        environment.pop("GRPC_VERBOSITY", None)
        command = [sys.executable, "-c", CALL, "fl.example:9092", str(authority(coordinator))]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert ended.stderr == ""
    assert ended.stdout == "HTTP proxy returned response code 403\n"


@contextmanager
def aborting(coordinator: Coordinator, code: grpc.StatusCode, details: str) -> Iterator[FleetClient]:
    """A link to a coordinator that ends every question with this code and these words."""

    def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
        context.abort(code, details)

    method = grpc.unary_unary_rpc_method_handler(answer)
    handler = grpc.method_handlers_generic_handler(HELLO_SERVICE, {HELLO_METHOD: method})
    with grpc_server(handler, tls_of(coordinator)) as port, link_to(port, coordinator) as link:
        yield link


@pytest.mark.parametrize(
    ("code", "before", "raised"),
    [
        (grpc.StatusCode.UNAVAILABLE, "", Unreachable),
        (grpc.StatusCode.DATA_LOSS, "", Unreachable),
        (grpc.StatusCode.PERMISSION_DENIED, "", RunOver),
        (grpc.StatusCode.UNAUTHENTICATED, ANOTHER_PROCESS, Refused),
        (grpc.StatusCode.UNAUTHENTICATED, "", Refused),
        (grpc.StatusCode.ALREADY_EXISTS, "", Unreachable),
    ],
)
def test_words_of_the_other_end_come_as_one_plain_line_without_a_trace(
    code: grpc.StatusCode, before: str, raised: type[Exception], coordinator: Coordinator
) -> None:
    with aborting(coordinator, code, before + HOSTILE) as link, pytest.raises(raised) as caught:
        link.hello()
    said = str(caught.value)
    assert is_plain(said)
    assert "Source Location" not in said
    assert len(said) < 2 * MOST_WORDS


def test_an_answer_that_cannot_be_read_leaves_no_traceback_in_a_sites_log(
    coordinator: Coordinator, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    server = grpc_server(lambda request: b"\xff no hello", tls_of(coordinator))
    with server as port, link_to(port, coordinator) as link, pytest.raises(Unreachable):
        link.hello()
    assert caplog.records == []
