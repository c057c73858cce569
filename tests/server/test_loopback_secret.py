"""Our calls on loopback, made by another account of the machine: without the secret nothing is answered."""

import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import grpc
import psutil
import pytest

from server.coordinator.before_start import not_started
from server.coordinator.folder import Coordinator, alone, read_coordinator
from server.deployment.superlink.local.process import SuperLink
from server.deployment.superlink.loopback.control import Control, SuperLinkGone, answers
from server.deployment.superlink.loopback.protocol import CALLS, SERVICE
from server.deployment.superlink.loopback.secret import HEADER, REFUSED, secret_file, secret_of
from tests.network.flood import END_HEADERS, HEADERS, PREFACE, SETTINGS, announced, frame, headers
from tests.network.real import flwr_server, free_ports
from tests.processes import command_line

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


@pytest.fixture
def channel(coordinator: Coordinator) -> Iterator[grpc.Channel]:
    """Anybody's connection."""
    credentials = grpc.ssl_channel_credentials(coordinator.ca_certificate.read_bytes())
    with grpc.secure_channel(coordinator.control_address, credentials) as made:
        yield made


def refused(channel: grpc.Channel, path: str, *metadata: tuple[str, Any]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as error:
        channel.unary_unary(path)(b"", metadata=metadata, timeout=20)
    return error.value.code(), error.value.details() or ""


WITHOUT = (grpc.StatusCode.UNAUTHENTICATED, REFUSED)
PATHS = [*(f"/{SERVICE}/{call}" for call in CALLS), f"/{SERVICE}/None", "/flwr.proto.Control/ListNodes", "/none"]


@pytest.mark.parametrize("path", PATHS)
def test_a_call_without_the_secret_is_refused_and_nobody_learns_what_there_is(
    path: str, channel: grpc.Channel, coordinator: Coordinator
) -> None:
    secret = secret_of(secret_file(coordinator))
    assert refused(channel, path) == WITHOUT
    for wrong in ("", "0" * 64, secret[:-1], secret.upper()):
        assert refused(channel, path, (HEADER, wrong)) == WITHOUT
    assert refused(channel, path, (HEADER, secret), (HEADER, secret)) == WITHOUT


def test_with_the_secret_a_call_that_is_not_there_is_said_not_to_be(
    channel: grpc.Channel, coordinator: Coordinator
) -> None:
    code, _ = refused(channel, "/none", (HEADER, secret_of(secret_file(coordinator))))
    assert code == grpc.StatusCode.UNIMPLEMENTED


def test_a_request_is_not_waited_for_without_the_secret(coordinator: Coordinator) -> None:
    context = ssl.create_default_context(cafile=str(coordinator.ca_certificate))
    context.set_alpn_protocols(["h2"])
    plain = socket.create_connection(("127.0.0.1", coordinator.file.control_port), timeout=20)
    with context.wrap_socket(plain, server_hostname="localhost") as connection:
        begun = PREFACE + frame(SETTINGS, 0, 0) + frame(SETTINGS, 1, 0)
        call = frame(HEADERS, END_HEADERS, 1, headers(f"/{SERVICE}/Push".encode()))
        connection.sendall(begun + call + frame(0, 0, 1, announced(2**24)))
        came, until = b"", time.monotonic() + 20
        while REFUSED.replace(" ", "%20").encode() not in came and REFUSED.encode() not in came:
            assert time.monotonic() < until, came
            came += connection.recv(1000)


def test_the_secret_is_readable_by_its_owner_only_and_not_what_calls_carry(coordinator: Coordinator) -> None:
    path = secret_file(coordinator)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_bytes().hex() != secret_of(path)


def test_who_reads_the_folder_is_answered(coordinator: Coordinator) -> None:
    assert answers(coordinator)
    with closing(Control(coordinator)) as control:
        assert control.nodes() == []


def test_a_superlink_that_takes_seconds_to_answer_is_there(coordinator: Coordinator) -> None:
    """As on a machine that has much to do."""
    (process,) = [one for one in psutil.Process().children() if "superlink.program" in command_line(one)]
    process.suspend()
    later = threading.Timer(4, process.resume)
    later.start()
    try:
        assert answers(coordinator)
    finally:
        later.cancel()
        process.resume()


def test_a_run_that_comes_too_early_is_told_that_start_is_at_work(coordinator: Coordinator) -> None:
    with alone(coordinator, "start"):
        told = not_started(coordinator)
    assert told.problem == "flwr-server start is at work on this folder, but its SuperLink does not answer."
    assert str(coordinator.log) in told.remedy
    assert not_started(coordinator).problem == "flwr-server start does not run on this folder."


def test_who_has_another_secret_is_told_that_the_superlink_does_not_answer(coordinator: Coordinator) -> None:
    path = secret_file(coordinator)
    content = path.read_bytes()
    path.write_bytes(b"another")
    try:
        assert not answers(coordinator)
        with closing(Control(coordinator)) as control, pytest.raises(SuperLinkGone, match=REFUSED):
            control.nodes()
    finally:
        path.write_bytes(content)
    assert answers(coordinator)
