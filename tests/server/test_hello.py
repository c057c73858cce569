"""The coordinator's answer to anyone who asks before taking part, over real gRPC and TLS."""

import time

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from client.connection.fleet_client import FleetClient
from common import __version__
from common.wire.fleet_protocol import HELLO_METHOD, HELLO_SERVICE, WIRE_VERSION, Hello
from tests.client.check.servers import grpc_server
from tests.server.superlinks import Port
from tests.signing import SignsCalls, pem

OURS, OTHERS = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())


def answer(port: Port, *signing: SignsCalls) -> Hello:
    """Ask, where only the key ``OURS`` is admitted."""
    port.link.storage.sites.register("north", pem(OURS.public_key()))
    channel = grpc.intercept_channel(port.channel(), *signing)
    return Hello.model_validate_json(channel.unary_unary(f"/{HELLO_SERVICE}/{HELLO_METHOD}")(b"", timeout=20))


def test_an_admitted_site_learns_that_it_is_and_time_and_release(port: Port) -> None:
    hello = answer(port, SignsCalls(OURS, OURS.public_key()))
    assert (hello.key, hello.release, hello.wire) == ("admitted", __version__, WIRE_VERSION)
    assert hello.time == pytest.approx(time.time(), abs=20)


@pytest.mark.parametrize(
    "signing",
    [(SignsCalls(OTHERS, OURS.public_key()),), (SignsCalls(OTHERS, OTHERS.public_key()),), ()],
    ids=["an admitted key that did not sign", "a key that was never admitted", "no key"],
)
def test_everybody_else_is_unknown(signing: tuple[SignsCalls, ...], port: Port) -> None:
    assert answer(port, *signing).key == "unknown"


def test_a_coordinator_without_the_service_does_not_count_as_unreachable(
    certificates: tuple[bytes, bytes, bytes],
) -> None:
    authority, certificate, key = certificates
    nothing = grpc.method_handlers_generic_handler("another.Service", {})
    credentials = grpc.ssl_server_credentials([(key, certificate)])
    with grpc_server(nothing, credentials) as port, FleetClient(f"127.0.0.1:{port}", authority, OURS) as client:
        assert client.hello() is None
