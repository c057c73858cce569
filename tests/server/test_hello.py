"""What a coordinator tells to anyone who asks before taking part, over real gRPC and TLS."""

import time
from collections.abc import Mapping
from pathlib import Path

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from client.connection.fleet_client import Link
from common import __version__
from common.wire.fleet_protocol import HELLO_METHOD, HELLO_SERVICE, WIRE_VERSION, Hello
from server.coordinator.authority import issue_server_certificate, make_authority
from server.coordinator.folder import Coordinator, CoordinatorFile
from server.deployment.superlink.fleet.hello import handler
from tests.client.check.servers import grpc_server, tls_of
from tests.signing import SignsCalls, pem

OURS, OTHERS = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
ADMITTED: Mapping[bytes, int] = {pem(OURS.public_key()): 7}


@pytest.fixture
def coordinator(tmp_path: Path) -> Coordinator:
    made = Coordinator(tmp_path, CoordinatorFile(name="trial", hosts=("fl.example",), port=9092))
    make_authority(made)
    issue_server_certificate(made)
    return made


def asked(coordinator: Coordinator, *signing: SignsCalls) -> Hello:
    credentials = grpc.ssl_channel_credentials(coordinator.ca_certificate.read_bytes())
    with (
        grpc_server(handler(ADMITTED.get), tls_of(coordinator)) as port,
        grpc.secure_channel(f"127.0.0.1:{port}", credentials) as raw,
    ):
        channel = grpc.intercept_channel(raw, *signing)
        return Hello.model_validate_json(channel.unary_unary(f"/{HELLO_SERVICE}/{HELLO_METHOD}")(b"", timeout=20))


def test_an_admitted_site_learns_that_it_is_and_time_and_release(coordinator: Coordinator) -> None:
    hello = asked(coordinator, SignsCalls(OURS, OURS.public_key()))
    assert (hello.key, hello.release, hello.wire) == ("admitted", __version__, WIRE_VERSION)
    assert hello.time == pytest.approx(time.time(), abs=20)


def test_who_shows_an_admitted_key_but_signs_with_another_learns_nothing_of_it(coordinator: Coordinator) -> None:
    assert asked(coordinator, SignsCalls(OTHERS, OURS.public_key())).key == "unknown"


def test_a_key_that_was_never_admitted_and_no_key_at_all_are_unknown(coordinator: Coordinator) -> None:
    assert asked(coordinator, SignsCalls(OTHERS, OTHERS.public_key())).key == "unknown"
    assert asked(coordinator).key == "unknown"


def test_a_coordinator_that_has_no_such_service_is_told_from_one_that_is_away(coordinator: Coordinator) -> None:
    nothing = grpc.method_handlers_generic_handler("another.Service", {})
    authority = coordinator.ca_certificate.read_bytes()
    with grpc_server(nothing, tls_of(coordinator)) as port, Link(f"127.0.0.1:{port}", authority, OURS) as link:
        assert link.hello() is None
