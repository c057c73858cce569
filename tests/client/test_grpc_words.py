"""What gRPC and the other end say of a broken line comes as one short line; nothing of it comes past our own log."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from polyclinic.client.connection.exit_codes import ConnectionNotAccepted, CoordinatorUnreachable
from polyclinic.client.connection.fleet_client import FleetClient, UnacceptableAnswer
from polyclinic.common.security.call_signatures import ANOTHER_PROCESS_MESSAGE
from polyclinic.common.system.plain_text import MAX_REASON_CHARACTERS, is_plain_text
from polyclinic.common.wire.fleet_protocol import HELLO_METHOD, HELLO_SERVICE
from polyclinic.server.coordinator.folder import CoordinatorFolder
from tests.client.handshakes import answers, coordinator_in, grpc_server, listening, tls_of

KEY = ec.generate_private_key(ec.SECP256R1())
TRACE = "\n\n=== Source Location Trace: ===\nsrc/core/util/status_helper.cc:68\n"
HOSTILE = f"\x1b[2J\u202ered{TRACE}\n12:00:00  round 9 of 9{'x' * 3000}"
CALL = """
import polyclinic.common  # first, as in our programs
import sys
from cryptography.hazmat.primitives.asymmetric import ec
from polyclinic.client.connection.exit_codes import CoordinatorUnreachable
from polyclinic.client.connection.fleet_client import FleetClient
try:
    FleetClient(sys.argv[1], open(sys.argv[2], "rb").read(), ec.generate_private_key(ec.SECP256R1())).exchange_hello()
except CoordinatorUnreachable as error:
    print(error)
"""


@pytest.fixture
def coordinator(tmp_path: Path) -> CoordinatorFolder:
    return coordinator_in(tmp_path)


def test_what_grpcs_core_writes_of_a_refusing_proxy_is_not_in_a_sites_log(coordinator: CoordinatorFolder) -> None:
    with listening(answers(b"HTTP/1.1 403 Forbidden\r\n\r\n")) as port:
        environment = {**os.environ, "https_proxy": f"http://127.0.0.1:{port}", "no_proxy": "", "no_grpc_proxy": ""}
        environment.pop("GRPC_VERBOSITY", None)
        command = [sys.executable, "-c", CALL, "fl.example:9092", str(coordinator.ca_certificate_path)]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert ended.stderr == ""
    assert ended.stdout == "HTTP proxy returned response code 403\n"


@contextmanager
def asking(answer: Any, coordinator: CoordinatorFolder) -> Iterator[FleetClient]:
    """A link to a coordinator that answers every question so."""
    with (
        grpc_server(answer, tls_of(coordinator)) as port,
        FleetClient(f"127.0.0.1:{port}", coordinator.ca_certificate_path.read_bytes(), KEY) as link,
    ):
        yield link


@pytest.mark.parametrize(
    ("code", "before", "raised"),
    [
        *((code, "", CoordinatorUnreachable) for code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DATA_LOSS)),
        (grpc.StatusCode.PERMISSION_DENIED, "", UnacceptableAnswer),
        (grpc.StatusCode.FAILED_PRECONDITION, "", UnacceptableAnswer),
        (grpc.StatusCode.UNAUTHENTICATED, ANOTHER_PROCESS_MESSAGE, ConnectionNotAccepted),
        (grpc.StatusCode.UNAUTHENTICATED, "", ConnectionNotAccepted),
        (grpc.StatusCode.ALREADY_EXISTS, "", CoordinatorUnreachable),
    ],
)
def test_words_of_the_other_end_come_as_one_plain_line_without_a_trace(
    code: grpc.StatusCode, before: str, raised: type[Exception], coordinator: CoordinatorFolder
) -> None:
    def abort(request: bytes, context: grpc.ServicerContext) -> bytes:
        context.abort(code, before + HOSTILE)

    methods = {HELLO_METHOD: grpc.unary_unary_rpc_method_handler(abort)}
    handler = grpc.method_handlers_generic_handler(HELLO_SERVICE, methods)
    with asking(handler, coordinator) as link, pytest.raises(raised) as caught:
        link.exchange_hello()
    words = str(caught.value)
    assert is_plain_text(words)
    assert "Source Location" not in words
    assert len(words) < 2 * MAX_REASON_CHARACTERS


def test_an_answer_that_cannot_be_read_logs_no_traceback(
    coordinator: CoordinatorFolder, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with asking(lambda request: b"\xff no hello", coordinator) as link, pytest.raises(CoordinatorUnreachable):
        link.exchange_hello()
    assert caplog.records == []
